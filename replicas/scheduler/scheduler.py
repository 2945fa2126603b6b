"""The scheduler: `schedule` says what the next step runs, `apply` takes in what it made.

Owns:      every request between submit and finish, and the order of all that happens to them.
Never:     sees a tensor, a model or text.
Invariant: a request is in exactly one of: waiting queue, being prefilled, running batch, finished; see `check`.
Thread:    engine thread only.

    submit ─> WaitingQueue ──next_batch──> ExtendPlan ─ step ─> apply ─┬─ mid-prompt: commit, next chunk goes first
                  ^                                                    ├─ prompt done: commit, RunningBatch
                  └────── retract (pool full) ── RunningBatch          └─ finished: release, pages stay in the tree
                                                     └─> DecodePlan ─ step ─> apply
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from replicas.cache.kv import KvCache
from replicas.config import SchedulerConfig
from replicas.request import Req, ReqState
from replicas.scheduler.budget import NewTokenRatio
from replicas.scheduler.decode import RunningBatch, sample_row
from replicas.scheduler.plan import BROKEN, ExtendPlan, StepPlan, StepResult, TableWrite
from replicas.scheduler.prefill import ExtendBatch, PrefillScheduler, Refusal
from replicas.scheduler.waiting import WaitingQueue
from replicas.types import Finish, FinishReason, TokenLogprob

BROKEN_LOGITS = (
    "no token can be chosen: the logits hold NaN or inf, or all are masked out. The weights are broken, activations "
    "overflow their dtype (try float32 or bfloat16), or the penalties are extreme"
)


@dataclass(frozen=True, slots=True, eq=False)
class NewToken:
    """One sampled token of one request; ``req.finish`` is set when it was its last."""

    req: Req
    token_id: int | None  # None: the request wanted no output (max_new_tokens = 0), or its logits are broken
    logprob: TokenLogprob | None


@dataclass(slots=True)
class Counters:
    """What the scheduler counted since it started; only grows."""

    finished: int = 0
    aborted: int = 0
    errors: int = 0
    retractions: int = 0
    retracted_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    lookup_tokens: int = 0
    decode_tokens: int = 0


class Scheduler:
    """Prefill first, else decode (SPEC F01, F08); one step at a time."""

    def __init__(
        self, kv: KvCache, config: SchedulerConfig, *, max_running: int, clock: Callable[[], float]
    ) -> None:
        assert config.chunked_prefill_size is not None
        self.kv = kv
        self.max_running = max_running
        self._clock = clock
        self._ratio = NewTokenRatio(
            initial=config.new_token_ratio, floor=config.min_new_token_ratio, decay=config.new_token_ratio_decay
        )
        self.waiting = WaitingQueue(
            policy=config.policy,
            lpm_max_queue=config.lpm_max_queue,
            ageing_s=config.ageing_s,
            peek_len=kv.peek_len,
        )
        self.running = RunningBatch(kv)
        self.prefill = PrefillScheduler(
            kv,
            self.waiting,
            self._ratio,
            chunk_size=config.chunked_prefill_size,
            share_len=config.in_batch_prefix_len,
        )
        self.counters = Counters()
        self.refusals: dict[tuple[str, int], Refusal] = {}  # of the last scheduling round, for explanation
        self._step_reqs: list[Req] = []  # requests of the plan that is running now, in row order
        self._deadlines: list[tuple[float, int, Req]] = []  # heap
        self._expired: list[Req] = []
        self.made_progress = False  # whether the last `schedule` found something to run

    @property
    def has_work(self) -> bool:
        return bool(len(self.waiting) or len(self.running) or self.prefill.chunked)

    def submit(self, req: Req) -> None:
        """Accept a request; from here on it ends in exactly one finish."""
        self.waiting.add(req)
        if req.deadline_s is not None:
            heapq.heappush(self._deadlines, (req.deadline_s, id(req), req))

    def finish(self, req: Req, finish: Finish) -> None:
        """End ``req`` wherever it is, between two steps; its computed prefix stays reusable (SPEC F17). Idempotent."""
        if req.state is ReqState.FINISHED:
            return
        if req.state is ReqState.WAITING:
            self.waiting.remove(req)
        elif req.state is ReqState.RUNNING:
            self.running.remove(req)
        self.prefill.forget(req)
        if req.holding is not None:
            self.kv.release(req, keep=finish.reason is not FinishReason.ERROR)
        req.move(ReqState.FINISHED)
        req.finish = finish
        match finish.reason:
            case FinishReason.ABORT:
                self.counters.aborted += 1
            case FinishReason.ERROR:
                self.counters.errors += 1
            case _:
                self.counters.finished += 1

    def schedule(self) -> StepPlan | None:
        """What to run next, or None when nothing can run. Slots are taken here; `apply` must follow."""
        now_s = self._clock()
        self.made_progress = False
        self._expire(now_s)
        batch = self.prefill.next_batch(self.running.reqs, max_running=self.max_running, now_s=now_s)
        self.refusals = batch.refusals
        if batch.rows:
            self.made_progress = True
            return self._extend_plan(batch, now_s)
        self._retract_until_it_fits()
        if not len(self.running):
            self._ratio.idle()
            return None
        self.made_progress = True
        arrays = self.running.prepare()
        self._step_reqs = list(self.running)
        self._ratio.decode_step()
        return self.running.plan(self._table_writes(), arrays)

    def apply(self, plan: StepPlan, result: StepResult) -> list[NewToken]:
        """Take in a step: tokens to their requests, pages to the tree, finished requests out."""
        reqs, self._step_reqs = self._step_reqs, []
        if isinstance(plan, ExtendPlan):
            sampled = self._apply_extend(plan, result, reqs)
        else:
            for req in reqs:
                req.computed_len += 1
            self.counters.decode_tokens += len(reqs)
            sampled = reqs
        logprobs = result.logprobs or (None,) * len(sampled)
        return [
            self._take_token(req, int(token), logprob)
            for req, token, logprob in zip(sampled, result.token_ids, logprobs, strict=True)
        ]

    def take_expired(self) -> list[Req]:
        """Requests whose deadline passed since the last call; they are finished."""
        expired, self._expired = self._expired, []
        return expired

    def check(self) -> None:
        """All invariants of DESIGN.md section 3 that hold between two steps."""
        self.waiting.check()
        self.running.check()
        held = [*self.running, *([self.prefill.chunked] if self.prefill.chunked else [])]
        for req in held:
            assert req.holding is not None, f"{req.rid} is {req.state} and holds nothing"
        self.kv.check(held)

    def _extend_plan(self, batch: ExtendBatch, now_s: float) -> ExtendPlan:
        for req in batch.reqs:
            if req.admitted_s is None:
                req.admitted_s = now_s
                self.counters.lookup_tokens += req.prompt_len
                self.counters.cached_tokens += req.cached_tokens
        self._step_reqs = batch.reqs
        return ExtendPlan(
            table_writes=self._table_writes(),
            rows=tuple(batch.rows),
            sampling=tuple(sample_row(req) for req, row in zip(batch.reqs, batch.rows, strict=True) if row.sample),
        )

    def _table_writes(self) -> tuple[TableWrite, ...]:
        return tuple(TableWrite(row, start, slots) for row, start, slots in self.kv.drain_table_writes())

    def _apply_extend(self, plan: ExtendPlan, result: StepResult, reqs: list[Req]) -> list[Req]:
        sampled = []
        for index, (req, row) in enumerate(zip(reqs, plan.rows, strict=True)):
            req.computed_len += len(row.token_ids)
            req.prompt_logprobs += result.prompt_logprobs.get(index, ())
            self.kv.commit(req)
            self.counters.prefill_tokens += len(row.token_ids)
            if row.sample:
                req.move(ReqState.RUNNING)
                req.prompt_logprobs_from = None  # all made; a retracted request need not make them again
                self.running.add(req)
                sampled.append(req)
        return sampled

    def _take_token(self, req: Req, token_id: int, logprob: TokenLogprob | None) -> NewToken:
        if req.first_token_s is None:
            req.first_token_s = self._clock()
        if req.max_remaining <= 0:
            self.finish(req, Finish(reason=FinishReason.LENGTH))
            return NewToken(req, None, None)
        if token_id == BROKEN:
            self.finish(req, Finish(reason=FinishReason.ERROR, message=BROKEN_LOGITS, http_status=500))
            return NewToken(req, None, None)
        req.append(token_id)
        finish = stop_reason(req)
        if finish is not None:
            self.finish(req, finish)
        return NewToken(req, token_id, logprob)

    def _retract_until_it_fits(self) -> None:
        """Make room for one decode step (SPEC F11): the running give way first, but one keeps going."""
        retracted = False
        while len(self.running) and self.running.short_of_pages():
            if len(self.running) == 1 and self.prefill.chunked is not None:
                victim = self.prefill.chunked
            else:
                victim = self.running.victim()
            self.retract(victim)
            retracted = True
        if retracted:
            self._ratio.retracted(self.running)

    def retract(self, req: Req) -> None:
        """Take the pages of a request in prefill or decode back; it waits again and keeps its tokens (SPEC F11)."""
        if req.state is ReqState.RUNNING:
            self.running.remove(req)
        self.prefill.forget(req)
        self.counters.retractions += 1
        self.counters.retracted_tokens += req.computed_len
        req.num_retractions += 1
        req.prompt_logprobs.clear()
        self.kv.release(req, keep=True)
        req.move(ReqState.WAITING)
        self.waiting.add(req)

    def _expire(self, now_s: float) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][2].finish is not None):
            _, _, req = heapq.heappop(self._deadlines)
            if req.finish is None:
                self.finish(
                    req,
                    Finish(
                        reason=FinishReason.ABORT,
                        message=f"deadline passed after {now_s - req.arrival_s:.1f} s, {req.num_output} tokens made",
                        http_status=504,
                    ),
                )
                self._expired.append(req)


def stop_reason(req: Req) -> Finish | None:
    """Whether the last token of ``req`` ends it by id or by length; stop strings are the detokenizer's."""
    if req.num_output > 0:
        last = int(req.ids[req.num_tokens - 1])
        if req.num_output >= req.sampling.min_new_tokens and last in req.stop_ids:
            return Finish(reason=FinishReason.STOP, matched=last)
    if req.max_remaining <= 0:
        return Finish(reason=FinishReason.LENGTH)
    return None


def uncached_tokens(waiting: WaitingQueue, chunked: Iterable[Req]) -> int:
    """Prompt tokens still to be computed by what is queued or in the middle of its prompt."""
    return waiting.uncached_tokens() + sum(req.extend_len for req in chunked)
