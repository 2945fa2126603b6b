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
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from replicas.cache.kv import KvCache, longest_reuse
from replicas.config import SchedulerConfig
from replicas.errors import PagesExhausted
from replicas.request import Req, ReqState, below
from replicas.scheduler.budget import (
    NewTokenRatio,
    NextStep,
    Room,
    StepBudget,
    budget,
    grant,
    max_receiving,
    throttle,
    wanted,
)
from replicas.scheduler.decode import DecodeRows, adapters_of, retract, sample_row
from replicas.scheduler.plan import ExtendPlan, ExtendRow, PrefixGroup, Slots, TableWrites
from replicas.scheduler.precedence import waits_out
from replicas.scheduler.queues import Queues
from replicas.scheduler.tokens import LONG_MASK_S, Counters
from replicas.scheduler.victims import Need, victims


class Refusal(enum.Enum):
    """Why a waiting request did not start in a step."""

    RUNNING_LIMIT = "max_running_requests are running"
    STEP_BUDGET = "the step's token budget is used up"
    MEMORY = "its prompt and reserved output do not fit the pool beside what runs"
    SHARED_PREFIX = "another request is computing its prefix right now"
    OLDER_GRANT = "an older decode leg waits for memory"
    SHARE = "a request of a higher class, or of a tenant that has had less, begins in this step and would wait for it"
    LOADING = "its cached prefix is on its way from the host or the store"
    MASK = "the first mask of its grammar is being computed"
    ADAPTER = "its adapter is being loaded, or has no room beside those of requests that run"


PASSING = frozenset(  # others behind it may still start
    {Refusal.SHARED_PREFIX, Refusal.OLDER_GRANT, Refusal.LOADING, Refusal.MASK, Refusal.ADAPTER}
)
NO_ROOM = frozenset({Refusal.RUNNING_LIMIT, Refusal.MEMORY})


@dataclass(slots=True)
class ExtendBatch:
    """The requests of one extend step, the rows that the device gets, and which request was refused why."""

    reqs: list[Req] = field(default_factory=list)
    rows: list[ExtendRow] = field(default_factory=list)
    num_forced: int = 0  # of the rows, the first
    num_logits: int = 0  # prompt tokens whose logprobs it computes
    refusals: dict[tuple[str, int], Refusal] = field(default_factory=dict)
    reserved: int = 0  # tokens that the requests in flight may still need, this batch included
    barrier: float | None = None  # rank of the request that found no row or memory
    short: Req | None = None  # that request, if it was memory
    loaded: int = 0  # tokens that this step has loaded from the host
    whole_only: bool = False  # a request waits for its prefix: none behind it may become mid-prompt


def next_prompts(
    queues: Queues, kv: KvCache, ratio: NewTokenRatio, counters: Counters, config: SchedulerConfig, *,
    max_running: int, now_s: float,
) -> tuple[ExtendBatch, bool]:  # fmt: skip
    """Choose the prompts of the next step, and grant decode legs their memory. Returns: the batch, and whether any leg
    was granted."""
    assert config.chunked_prefill_size is not None
    if queues.adapters is not None:
        queues.adapters.look(queues.holding)
    in_flight = [*queues.decoding, *queues.away.in_state(ReqState.RECEIVING)]
    num_handing_off = len(queues.away.in_state(ReqState.HANDING_OFF))  # each needs its row, and no more pages
    step = NextStep(
        chunk_size=config.chunked_prefill_size,
        page_size=kv.page_size,
        share_len=config.in_batch_prefix_len,
        in_flight=in_flight,
        max_running=max_running - num_handing_off,
        running=queues.running if config.mixed_steps else (),
        waiting=queues.waiting,
        now_s=now_s,
    )
    batch = next_batch(queues, kv, ratio, counters, step)
    if queues.chunked is not None and not batch.rows:
        return batch, False  # the next chunk found no memory: no leg may take it first
    room = Room(
        num_rows=step.max_running - len(in_flight) - len(queues.forced) - len(batch.reqs),
        max_receiving=max_receiving(max_running),
        reserved=batch.reserved,
        alone=not in_flight and not batch.reqs,
        barrier=batch.barrier,
    )
    return batch, grant(queues, kv, ratio, room, now_s=now_s)


def next_batch(queues: Queues, kv: KvCache, ratio: NewTokenRatio, counters: Counters, step: NextStep) -> ExtendBatch:
    """Form the next extend batch; it has no rows when nothing can start."""
    batch, left, now_s, num_begun = ExtendBatch(), budget(step), step.now_s, 0
    _extend_forced(batch, queues, kv, counters, left)
    shares = queues.waiting.shares
    order = queues.waiting.ordered(now_s, queues.running) if len(queues.waiting) else []  # it settles credits
    queues.waiting.order_masks(order)
    if queues.chunked is not None:
        throttle(left, queues.chunked, step)
    while queues.chunked is not None and not _extend(batch, queues.chunked, queues, kv, left):
        if not _has_room(queues.chunked, Refusal.MEMORY, queues, kv, counters, step, left):
            return batch  # no memory or budget is left for the next chunk: no request may take it first
    batch.reserved = sum(ratio.reserve(req) for req in step.in_flight)
    batch.reserved += sum(_still_needs(req, ratio) for req in batch.reqs)
    for req in order:
        if queues.prealloc.bars(req):
            refusal: Refusal | None = Refusal.OLDER_GRANT
        elif waits_out(shares.rank(req), map(shares.rank, batch.reqs[batch.num_forced :])):
            refusal = Refusal.SHARE
        elif shares.precedence(order[-1]) < shares.precedence(req) and _is_bounded(batch, step):
            refusal = Refusal.STEP_BUDGET
        else:
            throttle(left, req, step)
            refusal = _start(batch, req, queues, kv, ratio, step, left)
            while refusal is not None and _has_room(req, refusal, queues, kv, counters, step, left):
                batch.reserved = sum(map(ratio.reserve, step.in_flight))
                batch.reserved += sum(_still_needs(each, ratio) for each in batch.reqs)
                refusal = _start(batch, req, queues, kv, ratio, step, left)
        if refusal is None:
            num_begun += 1
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
    if not NO_ROOM.isdisjoint(batch.refusals.values()):
        counters["begun_where_short"] += num_begun
    return batch


def _is_bounded(batch: ExtendBatch, step: NextStep) -> bool:
    """Whether the prompts of ``batch`` alone take a bounded step: another one would make all of them wait."""
    waiting, num_prompt = step.waiting, sum(len(row.token_ids) for row in batch.rows[batch.num_forced :])
    return num_prompt >= waiting.shares.throttle.most_prompt_len(0, step.now_s, waiting.step_times)


def _has_room(
    req: Req, refusal: Refusal, queues: Queues, kv: KvCache, counters: Counters, step: NextStep, left: StepBudget
) -> bool:
    """Retract those that must leave for ``req``, which was refused: for a row or pages if it could begin in this step
    with all pages. Returns: whether any was retracted."""
    found: list[Req] = []
    if refusal is Refusal.ADAPTER:
        found = victims(Need.ADAPTER, req, queues, kv)
    elif refusal in NO_ROOM and queues.chunked in (None, req):
        could_begin = left.grant(req.num_tokens - req.computed_len, prefix_len=req.computed_len) > 0
        found = victims(Need.ROOM, req, queues, kv) if could_begin else []
    for victim in found:
        retract(victim, queues, kv, counters)
        step.in_flight.remove(victim)
    return bool(found)


def _start(
    batch: ExtendBatch,
    req: Req,
    queues: Queues,
    kv: KvCache,
    ratio: NewTokenRatio,
    step: NextStep,
    left: StepBudget,
) -> Refusal | None:
    """Start waiting request ``req`` in the batch, or tell why not."""
    num_running = len(step.in_flight) + len(queues.forced) + len(batch.reqs)
    mid_prompt = queues.chunked is not None and queues.chunked is not req
    full = num_running >= step.max_running
    if full or left.empty or mid_prompt:
        if full and queues.adapters is not None and below(queues.decoding, req):
            if not queues.adapters.ready(req):  # none gives its place up before that
                return Refusal.ADAPTER
        elif queues.adapters is not None:
            queues.adapters.hint(req)
        return Refusal.RUNNING_LIMIT if full else Refusal.STEP_BUDGET
    if queues.adapters is not None and not queues.adapters.ready(req):
        return Refusal.ADAPTER
    if (refusal := awaits(req, kv, step.now_s)) is not None:
        return refusal
    if _prefix_is_computed(batch, req, kv, step.share_len):
        return Refusal.SHARED_PREFIX
    reused = kv.admit(req)  # locks the prefix: its pages no longer count as evictable
    alone = num_running == 0
    need = req.num_tokens - reused + (min(1, req.max_remaining) if alone else ratio.reserve(req))
    if need + (0 if alone else batch.reserved) > kv.store.available_tokens():
        kv.release(req, keep=False)  # it has computed nothing
        return Refusal.MEMORY
    tiers = kv.store.tiers
    budgeted = 0 if tiers is None else tiers.load_budget(step.chunk_size) - batch.loaded
    loaded, rest = kv.load(req, budgeted)
    batch.loaded += loaded
    if rest:
        kv.release(req, keep=False)  # what has come stays in the tree; the next step goes on
        return Refusal.LOADING
    if not _extend(batch, req, queues, kv, left):
        kv.release(req, keep=False)
        return Refusal.STEP_BUDGET
    queues.remove(req)
    req.move(ReqState.PREFILLING)
    if req.stamps.admitted_s is None:
        req.cached = req.cached.of(min(req.computed_len, req.prompt_len))
    return None


def awaits(req: Req, kv: KvCache, now_s: float) -> Refusal | None:
    """Tell what another thread still makes for ``req``: the first mask of its grammar, or its stored prefix."""
    if req.guide is not None and req.guide.due_s > LONG_MASK_S:
        return Refusal.MASK
    if kv.store_tier is not None and kv.store_tier.waits(req, now_s):
        return Refusal.LOADING
    return None


def _extend_forced(batch: ExtendBatch, queues: Queues, kv: KvCache, counters: Counters, left: StepBudget) -> None:
    """Add the requests whose grammar forced a run of tokens, each with all of it; without memory one is retracted."""
    for req in list(queues.forced):
        start, length = req.computed_len, req.extend_len
        if left.grant(length, prefix_len=start) < length:
            return
        try:
            slots = kv.extend(req, req.num_tokens)
        except PagesExhausted:
            retract(req, queues, kv, counters)
            continue
        left.spend(length)
        queues.forced.remove(req)
        batch.reqs.append(req)
        batch.rows.append(_row(req, start, length, slots, sample=True))
        batch.num_forced += 1


def _extend(batch: ExtendBatch, req: Req, queues: Queues, kv: KvCache, left: StepBudget) -> bool:
    """Add the next chunk of ``req`` to the batch; False when budget or pages allow none."""
    start = req.computed_len
    want = wanted(req, page_size=kv.page_size, num_logits=batch.num_logits)
    length = left.grant(want, prefix_len=start)
    last = start + length == req.num_tokens
    if length == 0 or (batch.whole_only and not last):
        return False
    try:
        slots = kv.extend(req, start + length)
    except PagesExhausted:
        return False
    left.spend(length)
    queues.chunked = None if last else req
    batch.reqs.append(req)
    batch.rows.append(row := _row(req, start, length, slots, sample=last))
    batch.num_logits += 0 if row.target_ids is None else len(row.target_ids)
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
        pooling=req.sampling.pooling,
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
    table_writes: TableWrites,
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
