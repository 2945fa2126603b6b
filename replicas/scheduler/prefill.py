"""Prefill: which waiting requests start in the next extend step, and how much of each prompt runs in it.

Owns:      nothing; moves requests from the waiting queue to prefill, and sets which one is mid-prompt. What is computed
           is charged to the tenant of its request (`TenantShares.charge`), when the step is over.
Never:     runs or samples anything; takes the slots of running requests (decode.py).
Invariant: a refused request holds nothing; every refusal has a reason. In an extend step forced runs come first, then
           prompts, in the order of their batch, then every running request, in the order of the running ones.
Thread:    scheduler thread only.

A mixed step computes one token of each running request together with the prompts: running requests continue while
prompts arrive, and the weights are read once for both. SPEC F01 and F08 let prompts go first, so that running requests
make no token while prompts arrive; the scheduler departs from that here (``scheduler.mixed_steps``).

A prompt waits while another of the step computes its prefix, and the next step has that in the tree. Requests behind it
may start meanwhile, but only with their whole prompt: one that became mid-prompt would go before it until its end.
Source:    Sarathi-Serve, Agrawal et al. 2024 (arXiv:2403.02310), "piggy-backed" decodes.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from replicas.cache.kv import KvCache, longest_reuse
from replicas.errors import PagesExhausted
from replicas.request import Req, ReqState, below
from replicas.scheduler.admission import NewTokenRatio, StepBudget, prompt_tokens
from replicas.scheduler.decode import DecodeRows, adapters_of, retract, sample_row
from replicas.scheduler.plan import ExtendPlan, ExtendRow, PrefixGroup, Slots, TableWrite
from replicas.scheduler.queues import Queues
from replicas.scheduler.shares import Easing
from replicas.scheduler.tokens import Counters
from replicas.scheduler.victims import Need, victims

LOGITS_CHUNK = 512  # tokens a step of a prompt whose logprobs are wanted: each needs a row of vocabulary-wide logits


class Refusal(enum.Enum):
    """Why a waiting request did not start in a step."""

    RUNNING_LIMIT = "max_running_requests are running"
    STEP_BUDGET = "the step's token budget is used up"
    MEMORY = "its prompt and reserved output do not fit the pool beside what runs"
    SHARED_PREFIX = "another request is computing its prefix right now"
    OLDER_GRANT = "an older decode leg waits for memory"
    SHARE = "a request of a higher class, or of a tenant that has had less, begins in this step and would wait for it"
    LOADING = "its cached prefix is on its way from the host or the store"
    ADAPTER = "its adapter is being loaded, or has no room beside those of requests that run"


PASSING = frozenset(  # others behind it may still start
    {Refusal.SHARED_PREFIX, Refusal.OLDER_GRANT, Refusal.LOADING, Refusal.ADAPTER}
)
NO_ROOM = frozenset({Refusal.RUNNING_LIMIT, Refusal.MEMORY})


@dataclass(slots=True)
class ExtendBatch:
    """The requests of one extend step, the rows that the device gets, and which request was refused why."""

    reqs: list[Req] = field(default_factory=list)
    rows: list[ExtendRow] = field(default_factory=list)
    num_forced: int = 0  # of the rows, the first
    refusals: dict[tuple[str, int], Refusal] = field(default_factory=dict)
    reserved: int = 0  # tokens that the requests in flight may still need, this batch included
    barrier: float | None = None  # rank of the request that found no row or memory
    short: Req | None = None  # that request, if it was memory
    loaded: int = 0  # tokens that this step has loaded from the host
    whole_only: bool = False  # a request waits for its prefix: none behind it may become mid-prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the next extend batch, beside the pool."""

    chunk_size: int  # most new tokens of a step
    share_len: int  # a request that shares this many tokens with one of the batch waits for them
    in_flight: list[Req]  # requests that have their pages and may need more: running, or waiting for their K/V
    max_running: int
    running: Sequence[Req]  # of them, those that make a token in the same step


def next_batch(
    queues: Queues, kv: KvCache, ratio: NewTokenRatio, counters: Counters, limits: Limits, *, now_s: float
) -> ExtendBatch:
    """Form the next extend batch; it has no rows when nothing can start."""
    batch = ExtendBatch()
    budget = StepBudget(_num_tokens(limits, len(limits.running), kv), page_size=kv.page_size)
    _extend_forced(batch, queues, kv, counters, budget)
    shares = queues.waiting.shares
    order = queues.waiting.ordered(now_s, queues.running) if len(queues.waiting) else []  # it settles credits
    if queues.chunked is not None:
        _ease(budget, queues.chunked, shares.easing, limits, kv, now_s)
    while queues.chunked is not None and not _extend(batch, queues.chunked, queues, kv, budget):
        if not _has_room(queues.chunked, Refusal.MEMORY, queues, kv, counters, limits, budget):
            return batch  # no memory or budget is left for the next chunk: no request may take it first
    batch.reserved = sum(ratio.reserve(req) for req in limits.in_flight)
    batch.reserved += sum(_still_needs(req, ratio) for req in batch.reqs)
    for req in order:
        if queues.prealloc.bars(req):
            refusal: Refusal | None = Refusal.OLDER_GRANT
        elif shares.waits_out(req, batch.reqs[batch.num_forced :]):
            refusal = Refusal.SHARE
        else:
            _ease(budget, req, shares.easing, limits, kv, now_s)
            refusal = _start(batch, req, queues, kv, ratio, limits, budget, now_s)
            while refusal is not None and _has_room(req, refusal, queues, kv, counters, limits, budget):
                batch.reserved = sum(map(ratio.reserve, limits.in_flight))
                batch.reserved += sum(_still_needs(each, ratio) for each in batch.reqs)
                refusal = _start(batch, req, queues, kv, ratio, limits, budget, now_s)
        if refusal is None:
            shares.easing.began(req, req.num_tokens - req.computed_len, now_s)
            batch.reserved += _still_needs(req, ratio)
            if req.stamps.admitted_s is None:  # once for each request, however often it is retracted
                req.stamps.admitted_s = now_s
                counters["lookup_tokens"] += req.prompt_len
                counters["cached_tokens"] += req.cached_tokens
                counters["host_tokens"] += req.cached.host
                counters["store_tokens"] += req.cached.store
            continue
        batch.refusals[(req.rid, req.index)] = refusal
        if refusal in NO_ROOM:
            batch.barrier = None if req.in_background else req.rank.from_s
            batch.short = req if refusal is Refusal.MEMORY else None
        batch.whole_only |= refusal is Refusal.SHARED_PREFIX
        if refusal not in PASSING:
            break
    return batch


def _num_tokens(limits: Limits, num_decode: int, kv: KvCache) -> int:
    return prompt_tokens(limits.chunk_size, num_decode, page_size=kv.page_size)


def _ease(budget: StepBudget, req: Req, easing: Easing, limits: Limits, kv: KvCache, now_s: float) -> None:
    """Leave ``req`` what it may have of a step, and lend it the part of those that are left out where it ends."""
    budget.lower(max(easing.most_len(req, now_s), limits.chunk_size // 8, kv.page_size))
    budget.lower(max(math.ceil(req.rank.request_class.chunk_share * limits.chunk_size), kv.page_size))
    num_running, num_out = len(limits.running), easing.num_left_out(limits.running, req)
    budget.lend(_num_tokens(limits, num_running - num_out, kv) - _num_tokens(limits, num_running, kv))


def _has_room(
    req: Req, refusal: Refusal, queues: Queues, kv: KvCache, counters: Counters, limits: Limits, budget: StepBudget
) -> bool:
    """Retract those that must leave for ``req``, which was refused: for a row or pages if it could begin in this step
    with all pages. Returns: whether any was retracted."""
    found: list[Req] = []
    if refusal is Refusal.ADAPTER:
        found = victims(Need.ADAPTER, req, queues, kv)
    elif refusal in NO_ROOM and queues.chunked in (None, req):
        could_begin = budget.grant(req.num_tokens - req.computed_len, prefix_len=req.computed_len, ends=True) > 0
        found = victims(Need.ROOM, req, queues, kv) if could_begin else []
    for victim in found:
        retract(victim, queues, kv, counters)
        limits.in_flight.remove(victim)
    return bool(found)


def _start(
    batch: ExtendBatch,
    req: Req,
    queues: Queues,
    kv: KvCache,
    ratio: NewTokenRatio,
    limits: Limits,
    budget: StepBudget,
    now_s: float,
) -> Refusal | None:
    """Start waiting request ``req`` in the batch, or tell why not."""
    num_running = len(limits.in_flight) + len(queues.forced) + len(batch.reqs)
    mid_prompt = queues.chunked is not None and queues.chunked is not req
    full = num_running >= limits.max_running
    if full or budget.empty or mid_prompt:
        if full and queues.adapters is not None and below(queues.running, req):
            if not queues.adapters.ready(req):  # none gives its place up before that
                return Refusal.ADAPTER
        elif queues.adapters is not None:
            queues.adapters.hint(req)
        return Refusal.RUNNING_LIMIT if full else Refusal.STEP_BUDGET
    if queues.adapters is not None and not queues.adapters.ready(req):
        return Refusal.ADAPTER
    if kv.store_tier is not None and kv.store_tier.waits(req, now_s):
        return Refusal.LOADING
    if _prefix_is_computed(batch, req, kv, limits.share_len):
        return Refusal.SHARED_PREFIX
    reused = kv.admit(req)  # locks the prefix: its pages no longer count as evictable
    alone = num_running == 0
    need = req.num_tokens - reused + (min(1, req.max_remaining) if alone else ratio.reserve(req))
    if need + (0 if alone else batch.reserved) > kv.store.available_tokens():
        kv.release(req, keep=False)  # it has computed nothing
        return Refusal.MEMORY
    tiers = kv.store.tiers
    budgeted = 0 if tiers is None else tiers.load_budget(limits.chunk_size) - batch.loaded
    loaded, left = kv.load(req, budgeted)
    batch.loaded += loaded
    if left:
        kv.release(req, keep=False)  # what has come stays in the tree; the next step goes on
        return Refusal.LOADING
    if not _extend(batch, req, queues, kv, budget):
        kv.release(req, keep=False)
        return Refusal.STEP_BUDGET
    queues.remove(req)
    req.move(ReqState.PREFILLING)
    if req.stamps.admitted_s is None:
        req.cached = req.cached.of(min(reused + loaded, req.prompt_len))
    return None


def _extend_forced(
    batch: ExtendBatch, queues: Queues, kv: KvCache, counters: Counters, budget: StepBudget
) -> None:
    """Add the requests whose grammar forced a run of tokens, each with all of it; without memory one is retracted."""
    for req in list(queues.forced):
        start, length = req.computed_len, req.extend_len
        if budget.grant(length, prefix_len=start) < length:
            return
        try:
            slots = kv.extend(req, req.num_tokens)
        except PagesExhausted:
            retract(req, queues, kv, counters)
            continue
        budget.spend(length)
        queues.forced.remove(req)
        batch.reqs.append(req)
        batch.rows.append(_row(req, start, length, slots, sample=True))
        batch.num_forced += 1


def _extend(batch: ExtendBatch, req: Req, queues: Queues, kv: KvCache, budget: StepBudget) -> bool:
    """Add the next chunk of ``req`` to the batch; False when budget or pages allow none."""
    start = req.computed_len
    want = req.num_tokens - start
    if req.prompt_logprobs_from is not None and want > LOGITS_CHUNK:
        want = max(1, (start + LOGITS_CHUNK) // kv.page_size * kv.page_size - start)
    length = budget.grant(want, prefix_len=start, ends=start + want == req.num_tokens)
    last = start + length == req.num_tokens
    if length == 0 or (batch.whole_only and not last):
        return False
    try:
        slots = kv.extend(req, start + length)
    except PagesExhausted:
        return False
    budget.spend(length)
    queues.chunked = None if last else req
    batch.reqs.append(req)
    batch.rows.append(_row(req, start, length, slots, sample=last))
    return True


def _prefix_is_computed(batch: ExtendBatch, req: Req, kv: KvCache, share_len: int) -> bool:
    """Whether ``req`` could reuse at least ``share_len`` more tokens if it waited for this batch (SPEC F04)."""
    ids = req.ids[: longest_reuse(req)]
    own = -1
    for leader in batch.reqs:
        if leader.salt != req.salt:
            continue
        common = _common_prefix_len(leader.ids[: leader.num_tokens], ids) // kv.page_size * kv.page_size
        if common < share_len:
            continue
        own = kv.cache.peek_len(ids, req.salt) if own < 0 else own
        if kv.store.reuses_prefixes and common - own >= share_len:
            return True
    return False


def _still_needs(req: Req, ratio: NewTokenRatio) -> int:
    """Count the tokens that a request of the batch will or may need beyond those that it has."""
    assert req.holding is not None
    return req.num_tokens - req.holding.kv_len + ratio.reserve(req)


def _row(req: Req, start: int, length: int, slots: Slots, *, sample: bool) -> ExtendRow:
    assert req.holding is not None
    target_ids, target_start = None, 0
    if req.prompt_logprobs_from is not None:
        target_start = max(req.prompt_logprobs_from, start + 1)
        target_ids = req.ids[target_start : min(start + length + 1, req.prompt_len)]
    return ExtendRow(
        row=req.holding.row,
        token_ids=req.ids[start : start + length].copy(),
        prefix_len=start,
        slots=slots,
        sample=sample,
        target_ids=target_ids if target_ids is not None and len(target_ids) else None,
        target_start=target_start,
        top_logprobs=req.top_logprobs,
        readout=req.sampling.readout,
        adapter="" if req.asked.adapter is None else req.asked.adapter.identity,
    )


def _common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def extend_plan(
    batch: ExtendBatch,
    running: Sequence[Req],
    decode: DecodeRows | None,
    table_writes: tuple[TableWrite, ...],
    groups: tuple[PrefixGroup, ...],
    prompt_groups: tuple[PrefixGroup, ...],
) -> ExtendPlan:
    """Plan a step of ``batch`` and, with ``decode``, of all ``running`` requests; each of them with its groups."""
    rows, sampled = list(batch.rows), [req for req, row in zip(batch.reqs, batch.rows, strict=True) if row.sample]
    if decode is not None:
        rows += _decode_rows(decode, adapters_of(running))
        sampled += running
    return ExtendPlan(
        table_writes=table_writes,
        rows=tuple(rows),
        sampling=tuple(sample_row(req) for req in sampled),
        num_decode=len(rows) - len(batch.rows),
        num_forced=batch.num_forced,
        prefix_groups=groups,
        prompt_groups=prompt_groups,
    )


def _decode_rows(decode: DecodeRows, adapters: Sequence[str]) -> list[ExtendRow]:
    return [
        ExtendRow(
            row=int(decode.rows[i]),
            token_ids=decode.token_ids[i : i + 1],
            prefix_len=int(decode.seq_lens[i]) - 1,
            slots=decode.slots[i : i + 1],
            sample=True,
            adapter=adapters[i] if adapters else "",
        )
        for i in range(len(decode.rows))
    ]
