"""The scheduler: `schedule` says what the next step runs, `apply` takes in what it made.

Owns:      every request between submit and finish, and the order of all that happens to them. Legs of hand-offs that no
           step runs are in legs.py, who gives way when pages run out is in retraction.py, what a step made of its
           requests is in outcome.py, whose the steps under way are is in ahead.py.
Never:     sees a tensor, a model or text.
Invariant: a request is in exactly one of: waiting queue, being prefilled, running batch, prealloc queue, away,
           finished; see `check`.
Thread:    engine thread only.

    submit ─> WaitingQueue ──next_batch──> ExtendPlan ─ step ─> apply ─┬─ mid-prompt: commit, next chunk goes first
                  ^                            ^ mixed.py              ├─ prompt done: commit, RunningBatch
                  └────── retract (pool full) ── RunningBatch          └─ finished: release, pages stay in the tree
                                                     └─> DecodePlan ─ step ─> apply    (no prompt can run)
                                                           └─ schedule_ahead ─> DecodePlan, before that apply
"""

from collections.abc import Callable

import numpy as np

from replicas.cache.kv import KvCache
from replicas.config import SchedulerConfig
from replicas.request import Req, ReqState
from replicas.scheduler.ahead import Ahead, UnderWay
from replicas.scheduler.budget import NewTokenRatio
from replicas.scheduler.cramped import Cramped
from replicas.scheduler.deadlines import Deadlines
from replicas.scheduler.decode import RunningBatch
from replicas.scheduler.legs import Legs
from replicas.scheduler.mixed import extend_plan
from replicas.scheduler.outcome import Outcome
from replicas.scheduler.plan import DecodePlan, StepPlan, StepResult, TableWrite
from replicas.scheduler.prealloc import Room
from replicas.scheduler.prefill import ExtendBatch, PrefillScheduler, Refusal
from replicas.scheduler.retraction import Retraction
from replicas.scheduler.tokens import Counters, NewToken
from replicas.scheduler.waiting import WaitingQueue
from replicas.types import Finish, FinishReason, TokenLogprob


class Scheduler:
    """One step at a time: prompts, and beside them a token of each who runs (not as SPEC F01, F08: see mixed.py)."""

    def __init__(self, kv: KvCache, config: SchedulerConfig, *, max_running: int, clock: Callable[[], float]) -> None:
        assert config.chunked_prefill_size is not None
        self.kv = kv
        self.max_running = max_running
        self._clock = clock
        self._ratio = NewTokenRatio(
            initial=config.new_token_ratio, floor=config.min_new_token_ratio, decay=config.new_token_ratio_decay
        )
        self.counters = Counters()
        self.waiting = WaitingQueue(
            policy=config.policy,
            lpm_max_queue=config.lpm_max_queue,
            ageing_s=config.ageing_s,
            peek_len=kv.peek_len,
        )
        self.running = RunningBatch(kv, cascade=config.cascade, cascade_saves=config.cascade_saves or 0)
        self.legs = Legs(kv, self._ratio, max_running=max_running)
        self.prefill = PrefillScheduler(
            kv,
            self.waiting,
            self._ratio,
            self.counters,
            chunk_size=config.chunked_prefill_size,
            share_len=config.in_batch_prefix_len,
        )
        self._mixed_steps = config.mixed_steps
        self._has_priorities, self._ageing_s = config.priorities == "on", config.ageing_s
        self.retraction = Retraction(kv, self.waiting, self.running, self.prefill, self._ratio, self.counters)
        self.refusals: dict[tuple[str, int], Refusal] = {}  # of the last scheduling round, for explanation
        self._outcome = Outcome(kv, self.running, self.legs, self.counters, finish=self.finish, clock=clock)
        self.under_way = UnderWay(lambda req, keep: self.legs.let_go(req, keep=keep))
        self.deadlines = Deadlines()
        self._ahead = Ahead(
            kv, self.running, self.waiting, self.prefill, self.legs, self.deadlines, self.under_way
        )
        self.cramped = Cramped(kv, self.finish)
        self.made_progress = False  # whether the last `schedule` found something to run
        self._short: Req | None = None  # who found no room in it

    @property
    def has_work(self) -> bool:
        return bool(len(self.waiting) or len(self.running) or self.prefill.chunked or len(self.legs))

    @property
    def only_away(self) -> bool:
        """Nothing is left to do here until another replica has done its part."""
        return not (len(self.waiting) or len(self.running) or self.prefill.chunked or len(self.legs.prealloc))

    def would_wait(self, num_new: int) -> int:
        """How many would have to wait if ``num_new`` requests came: all that hold nothing, but for those who fill free
        places. While memory is short, no place is free."""
        num_starting = len(self.waiting) + len(self.legs.prealloc) + num_new
        if self._short is not None and self._short.state is not ReqState.FINISHED:
            num_starting = 0
        num_free = self.max_running - len(self.running) - len(self.legs.holding) - (self.prefill.chunked is not None)
        return len(self.waiting) + self.legs.num_queued + num_new - min(num_starting, num_free)

    def submit(self, req: Req) -> None:
        """Accept a request; from here on it ends in exactly one finish."""
        self._accept(req)
        self._wait(req)

    def ask_grant(self, req: Req) -> None:
        """Accept a decode leg: it gets row and pages when they fit, and is then among `Legs.take_granted`."""
        self._accept(req)
        self.legs.prealloc.add(req)
        self._ahead.disturb()

    def park(self, req: Req) -> None:
        """Accept a request that may not start before `unpark`."""
        self._accept(req)
        self.legs.away.add(req)

    def unpark(self, req: Req) -> None:
        self.legs.away.remove(req)
        self._wait(req)

    def received(self, req: Req, token_id: int, logprob: TokenLogprob | None, *, cached_tokens: int) -> NewToken:
        """The K/V of a RECEIVING request is all here, and its next token; it runs on from there, without a forward."""
        self.legs.away.remove(req)
        req.computed_len = req.num_tokens
        if req.admitted_s is None:
            req.admitted_s, req.cached_tokens = self._clock(), cached_tokens
        self.kv.commit(req)
        req.move(ReqState.RUNNING)
        self.running.add(req)
        return self._outcome.take_token(req, token_id, logprob)

    def compute_here(self, req: Req) -> None:
        """The K/V of a decode leg, granted or not, will not come or is wrong: it waits to be computed."""
        self.legs.remove(req)
        if req.state is ReqState.RECEIVING:
            assert req.leg is not None
            req.leg.failed_s = self._clock()
            self.legs.let_go(req, keep=False)
            req.move(ReqState.WAITING)
        self._wait(req)

    def finish(self, req: Req, finish: Finish) -> None:
        """End ``req`` wherever it is; its computed prefix stays reusable (SPEC F17). Idempotent. What it holds goes
        when no step is under way with it."""
        if req.state is ReqState.FINISHED:
            return
        if req in self.legs:
            self.legs.remove(req)
        elif req.state is ReqState.WAITING:
            self.waiting.remove(req)
        elif req.state is ReqState.RUNNING:
            self.running.remove(req)
        self.prefill.forget(req)
        if req.holding is not None:
            keep = finish.reason is not FinishReason.ERROR
            if req in self.under_way:
                self.under_way.hold(req, keep=keep)
            else:
                self.legs.let_go(req, keep=keep)
        self._ahead.disturb()
        req.move(ReqState.FINISHED)
        req.finish, req.ended_s = finish, self._clock()
        self.counters.count_end(finish.reason)
        self.legs.ended(req)
        self.deadlines.remove(req)

    def schedule(self) -> StepPlan | None:
        """What to run next, or None when nothing can run; nothing may be under way. Slots are taken here; `apply` must
        follow."""
        assert not len(self.under_way), "a step is under way: apply it, or schedule ahead"
        now_s = self._clock()
        self.made_progress = False
        self.deadlines.expire(now_s, self.finish)
        gave_way, decode = self._take_decode_slots() if self._mixed_steps else (False, None)  # before any prompt's
        batch = ExtendBatch() if gave_way and len(self.running) else self._next_prompts(now_s)
        if batch.rows:
            self.made_progress = True
            self.under_way.begin([*batch.reqs, *(self.running if decode is not None else ())])
            return extend_plan(batch, self.running, decode, self._table_writes())
        if not self._mixed_steps:
            gave_way, decode = self._take_decode_slots()
        if decode is None:
            self._ratio.idle()
            if not self.legs.holding and self.prefill.chunked is None:
                heads = [head for head in (batch.short, self.legs.prealloc.short) if head is not None]
                self.made_progress = self.cramped.answer(heads, now_s=now_s)
            return None
        self.made_progress = True
        self.under_way.begin(list(self.running))
        if gave_way:
            self._ahead.disturb()
        else:
            self._ahead.looked()
        return self.running.plan(self.running.reqs, self._table_writes(), decode)

    def schedule_ahead(self) -> DecodePlan | None:
        """The step after the one under way, before that one's tokens are known; None where it cannot be said yet."""
        found = self._ahead.next(self._clock())
        if found is None:
            return None
        reqs, follows = found
        self.under_way.begin(reqs)
        self._ratio.decode_step()
        decode = self.running.prepare(reqs, ahead=True)
        return self.running.plan(reqs, self._table_writes(), decode, follows=follows)

    def _accept(self, req: Req) -> None:
        """Give ``req`` its place in the queues. With priorities off, what it asks for is forgotten."""
        if not self._has_priorities:
            req.priority = 0
        req.ranks_from_s = req.arrival_s - req.priority * self._ageing_s
        self.deadlines.add(req)

    def _take_decode_slots(self) -> tuple[bool, tuple[np.ndarray, ...] | None]:
        """A slot for the next token of each who runs. Returns: whether anybody gave way for it, and what
        `RunningBatch.prepare` does; None when nobody runs."""
        gave_way = self.retraction.until_it_fits()
        if not len(self.running):
            return gave_way, None
        self._ratio.decode_step()
        return gave_way, self.running.prepare(self.running.reqs)

    def _next_prompts(self, now_s: float) -> ExtendBatch:
        """The prompts of this step, and grants for legs that others compute."""
        in_flight = [*self.running, *self.legs.away.in_state(ReqState.RECEIVING)]
        max_running = self.max_running - len(self.legs.away.in_state(ReqState.HANDING_OFF))  # those have but a row
        batch = self.prefill.next_batch(
            in_flight,
            max_running=max_running,
            now_s=now_s,
            barrier=self.legs.prealloc.barrier,
            num_decode=len(self.running) if self._mixed_steps else 0,
        )
        self.refusals = batch.refusals
        self._grant(batch, num_rows=max_running - len(in_flight) - len(batch.reqs), alone=not in_flight, now_s=now_s)
        self._short = batch.short or self.legs.prealloc.short or (None if batch.rows else self.prefill.chunked)
        return batch

    def apply(self, plan: StepPlan, result: StepResult) -> list[NewToken]:
        """Take in a step: tokens to their requests, pages to the tree, finished requests out."""
        tokens = self._outcome.take(plan, result, self.under_way.end())
        self.under_way.let_go()
        return tokens

    def check(self) -> None:
        """All invariants of DESIGN.md section 3 that hold between two steps, one of which may be under way."""
        self.waiting.check()
        self.running.check()
        self.legs.check()
        held = [*self.running, *self.legs.holding, *([self.prefill.chunked] if self.prefill.chunked else [])]
        for req in held:
            assert req.holding is not None, f"{req.rid} is {req.state} and holds nothing"
        self.under_way.check()
        self.deadlines.check()
        self.kv.check([*held, *self.under_way.ended])

    def _wait(self, req: Req) -> None:
        self.waiting.add(req)
        self._ahead.disturb()

    def _grant(self, batch: ExtendBatch, *, num_rows: int, alone: bool, now_s: float) -> None:
        if self.prefill.chunked is not None and not batch.rows:
            return  # the next chunk found no room: nobody may overtake it into the pool
        room = Room(num_rows=num_rows, reserved=batch.reserved, alone=alone and not batch.reqs)
        if self.legs.grant(room, barrier=batch.barrier, now_s=now_s):
            self.made_progress = True

    def _table_writes(self) -> tuple[TableWrite, ...]:
        return tuple(TableWrite(row, start, slots) for row, start, slots in self.kv.drain_table_writes())
