"""Forms the next extend batch: which waiting requests start, and how much of each prompt runs now.

Owns:      the request that is in the middle of its prompt (at most one, SPEC F06).
Never:     runs or samples anything.
Invariant: a refused request holds nothing; every refusal has a reason.
Thread:    scheduler thread only.
"""

import enum
from dataclasses import dataclass, field

import numpy as np

from replicas.cache.kv import KvCache
from replicas.errors import PagesExhausted
from replicas.request import Req, ReqState
from replicas.scheduler.budget import NewTokenRatio, StepBudget, prompt_tokens
from replicas.scheduler.plan import ExtendRow, Slots
from replicas.scheduler.prealloc import Rank, rank
from replicas.scheduler.tokens import Counters
from replicas.scheduler.waiting import WaitingQueue

LOGITS_CHUNK = 512  # tokens a step of a prompt whose logprobs are wanted: each needs a row of vocabulary-wide logits


class Refusal(enum.Enum):
    """Why a waiting request did not start in a step."""

    RUNNING_LIMIT = "max_running_requests are running"
    STEP_BUDGET = "the step's token budget is used up"
    MEMORY = "its prompt and reserved output do not fit the pool beside what runs"
    SHARED_PREFIX = "another request is computing its prefix right now"
    OLDER_GRANT = "an older decode leg waits for memory"


PASSING = frozenset({Refusal.SHARED_PREFIX, Refusal.OLDER_GRANT})  # others behind it may still start
NO_ROOM = frozenset({Refusal.RUNNING_LIMIT, Refusal.MEMORY})


@dataclass(slots=True)
class ExtendBatch:
    """The requests of one extend step, beside the rows that the device gets."""

    reqs: list[Req] = field(default_factory=list)
    rows: list[ExtendRow] = field(default_factory=list)
    refusals: dict[tuple[str, int], Refusal] = field(default_factory=dict)
    reserved: int = 0  # tokens that those in flight may still need, this batch included
    barrier: Rank | None = None  # of the request that found no room
    short: Req | None = None  # that request, if it was memory


class PrefillScheduler:
    """Picks from the waiting queue what fits the step and the pool."""

    def __init__(
        self,
        kv: KvCache,
        waiting: WaitingQueue,
        ratio: NewTokenRatio,
        counters: Counters,
        *,
        chunk_size: int,
        share_len: int,
    ) -> None:
        self._kv = kv
        self._waiting = waiting
        self._ratio = ratio
        self._counters = counters
        self._chunk_size = chunk_size
        self._share_len = share_len
        self.chunked: Req | None = None  # in the middle of its prompt; runs first in the next step

    def next_batch(
        self, in_flight: list[Req], *, max_running: int, now_s: float, barrier: Rank | None = None, num_decode: int = 0
    ) -> ExtendBatch:
        """The next extend batch; without rows when nothing can start.

        Args: in_flight: those that have their pages and may need more: running, and whose K/V is on its way.
              barrier: waiting requests that rank after it may not start.
              num_decode: running requests that make a token in the same step.
        """
        batch = ExtendBatch()
        page_size = self._kv.page_size
        budget = StepBudget(prompt_tokens(self._chunk_size, num_decode, page_size=page_size), page_size=page_size)
        if self.chunked is not None and not self._extend(batch, self.chunked, budget):
            return batch  # its next chunk finds no room: nobody may overtake it into the pool
        batch.reserved = sum(self._ratio.reserve(req) for req in in_flight)
        batch.reserved += sum(self._still_needs(req) for req in batch.reqs)
        for req in self._waiting.ordered(now_s) if len(self._waiting) else ():
            if barrier is not None and rank(req) > barrier:
                refusal: Refusal | None = Refusal.OLDER_GRANT
            else:
                refusal = self._try(batch, req, budget, len(in_flight), max_running)
            if refusal is None:
                batch.reserved += self._still_needs(req)
                self._count_start(req, now_s)
                continue
            batch.refusals[(req.rid, req.index)] = refusal
            if refusal in NO_ROOM:
                batch.barrier = rank(req)
                batch.short = req if refusal is Refusal.MEMORY else None
            if refusal not in PASSING:
                break
        return batch

    def forget(self, req: Req) -> None:
        """``req`` leaves the prefill stage: finished, running, aborted or retracted."""
        if self.chunked is req:
            self.chunked = None

    def _try(
        self, batch: ExtendBatch, req: Req, budget: StepBudget, num_running: int, max_running: int
    ) -> Refusal | None:
        if num_running + len(batch.reqs) >= max_running:
            return Refusal.RUNNING_LIMIT
        if budget.empty or (self.chunked is not None and self.chunked is not req):
            return Refusal.STEP_BUDGET
        if self._leader_computes_prefix(batch, req):
            return Refusal.SHARED_PREFIX
        reused = self._kv.admit(req)  # locks the prefix: what it holds no longer counts as evictable
        alone = num_running + len(batch.reqs) == 0
        need = req.num_tokens - reused + (min(1, req.max_remaining) if alone else self._ratio.reserve(req))
        if need + (0 if alone else batch.reserved) > self._kv.available_tokens():
            self._kv.release(req, keep=True)
            return Refusal.MEMORY
        if not self._extend(batch, req, budget):
            self._kv.release(req, keep=True)
            return Refusal.STEP_BUDGET
        self._waiting.remove(req)
        req.move(ReqState.PREFILLING)
        if req.admitted_s is None:
            req.cached_tokens = min(reused, req.prompt_len)
        return None

    def _count_start(self, req: Req, now_s: float) -> None:
        """Once for each request, however often it is retracted."""
        if req.admitted_s is None:
            req.admitted_s = now_s
            self._counters.lookup_tokens += req.prompt_len
            self._counters.cached_tokens += req.cached_tokens

    def _extend(self, batch: ExtendBatch, req: Req, budget: StepBudget) -> bool:
        """Add the next chunk of ``req`` to the batch; False when neither budget nor pages allow one."""
        start = req.computed_len
        want = req.num_tokens - start
        if req.prompt_logprobs_from is not None and want > LOGITS_CHUNK:
            want = max(1, (start + LOGITS_CHUNK) // self._kv.page_size * self._kv.page_size - start)
        length = budget.grant(want, prefix_len=start)
        if length == 0:
            return False
        try:
            slots = self._kv.extend(req, start + length)
        except PagesExhausted:
            return False
        budget.spend(length)
        last = start + length == req.num_tokens
        self.chunked = None if last else req
        batch.reqs.append(req)
        batch.rows.append(_row(req, start, length, slots, sample=last))
        return True

    def _leader_computes_prefix(self, batch: ExtendBatch, req: Req) -> bool:
        """True when waiting a step would let ``req`` reuse at least ``share_len`` more tokens (SPEC F04)."""
        ids = req.ids[: req.num_tokens - 1]
        own = -1
        for leader in batch.reqs:
            if leader.salt != req.salt:
                continue
            common = _common_prefix_len(leader.ids[: leader.num_tokens], ids) // self._kv.page_size * self._kv.page_size
            if common < self._share_len:
                continue
            own = self._kv.peek_len(ids, req.salt) if own < 0 else own
            if self._kv.reuses_prefixes and common - own >= self._share_len:
                return True
        return False

    def _still_needs(self, req: Req) -> int:
        """Tokens that a request of the batch will or may need beyond those that it has."""
        assert req.holding is not None
        return req.num_tokens - req.holding.kv_len + self._ratio.reserve(req)


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
    )


def _common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
