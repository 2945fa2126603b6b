"""The scheduler: `schedule` plans the next step, `apply` takes in its result.

Owns:      every request between submit and finish, and the order of all that happens to it. Its queues are values
           (queues.py). Functions move requests between them: prefill.py starts prompts, budget.py grants memory to
           those that another replica computes, decode.py retracts and plans before a result is known, tokens.py takes
           in results, rounds.py says what a round looks for before it plans.
Never:     sees a tensor, a model or text. Names a feature: each stands in a table (`FEATURES`), and overrides what it
           needs of `Feature`. What decides for a request is in tables too: its class (`CLASSES`, replicas/request.py),
           its part of a step (`PARTS`, budget.py), who leaves for it (`REASONS`, victims.py).
Invariant: a request ends in `finish` and nowhere else; see `check`.
Thread:    engine thread only.

    submit ─> WaitingQueue ──next_batch──> ExtendPlan ─ step ─> apply ─┬─ mid-prompt: commit, next chunk goes first
                  ^                            ^ prefill.py            ├─ prompt done: commit, running
                  └────── retract (pool full) ── running               └─ finished: release, pages stay in the tree
                                                     └─> DecodePlan ─ step ─> apply    (no prompt can run)
                                                           └─ schedule_ahead ─> DecodePlan, before that apply
"""

from collections.abc import Callable, Sequence

from replicas.cache.kv import KvCache
from replicas.config import SchedulerConfig
from replicas.request import Req, ReqState
from replicas.scheduler.budget import NewTokenRatio, RatioRule, let_go
from replicas.scheduler.decode import (
    AheadGate,
    DecodeRows,
    SharedPrefixes,
    decode_plan,
    decode_rows,
    plan_ahead,
    prompt_groups,
    table_writes,
    take_slots,
)
from replicas.scheduler.plan import DecodePlan, PrefixGroup, StepPlan, StepResult
from replicas.scheduler.precedence import QueueRules, WaitingQueue, set_rank
from replicas.scheduler.prefill import ExtendBatch, extend_plan, next_prompts
from replicas.scheduler.queues import Queues
from replicas.scheduler.rounds import (
    FEATURES,
    Deadlines,
    Feature,
    LastRound,
    deadline_passed,
    give_way,
    resume,
    starved,
)
from replicas.scheduler.tokens import (
    COUNTERS,
    ENDS,
    Counters,
    Drawn,
    NewToken,
    at_fault,
    count_computed,
    jump,
    next_token,
    sampled,
)
from replicas.types import Finish, FinishReason


class Scheduler:
    """Plans one step at a time: prompts, and beside them a token of each running request (unlike SPEC F01, F08: see
    prefill.py)."""

    def __init__(self, kv: KvCache, config: SchedulerConfig, *, max_running: int, clock: Callable[[], float]) -> None:
        self.counters: Counters = dict.fromkeys(COUNTERS, 0)
        self.kv = kv
        self.max_running = max_running
        self.queues = Queues(waiting=WaitingQueue(QueueRules.of(config, kv, self.counters)))
        self.deadlines = Deadlines()
        self.last = LastRound()
        self._config = config
        self.clock = clock
        self._ratio = NewTokenRatio(RatioRule.of(config, kv))
        self._shared = SharedPrefixes()
        self._gate = AheadGate()
        # those of the table; the engine adds those that it alone can make
        self.features: dict[str, Feature] = {name: make(self.queues, kv) for name, make in FEATURES.items()}

    @property
    def has_work(self) -> bool:
        """Whether any queue has a request."""
        return not self.only_away or len(self.queues.away) > 0

    @property
    def only_away(self) -> bool:
        """Whether nothing is left to do here until another replica has done its part, or a grammar is compiled."""
        return self.queues.only_away

    def would_wait(self, num_new: int) -> int:
        """Count the requests that would wait if ``num_new`` came (`LastRound.would_wait`)."""
        return self.last.would_wait(num_new, self.queues, max_running=self.max_running)

    @property
    def blocked(self) -> str:
        """What kept waiting requests from starting at the last look (`LastRound.blocked`)."""
        return self.last.blocked(self.queues)

    def submit(self, req: Req) -> None:
        """Accept a request; from here on it ends in exactly one finish."""
        self.accept(req)
        self.wait(req)

    def look_again(self) -> None:
        """Look at the queues before another step is planned ahead: what a request waits for may be there."""
        self._gate.disturb()

    def park(self, req: Req) -> None:
        """Accept a request that may not start before `unpark`."""
        self.accept(req)
        self.queues.away.add(req)

    def unpark(self, req: Req) -> None:
        """Let a parked request wait for its turn."""
        self.queues.away.remove(req)
        self.wait(req)

    def take_back(self, req: Req) -> None:
        """Undo `park`: ``req`` is to be accepted another way."""
        self.queues.away.remove(req)
        self._ended(req)

    def finish(self, req: Req, finish: Finish) -> None:
        """End ``req`` wherever it is; its computed prefix stays reusable (SPEC F17). Idempotent. What it holds is
        released when no step under way has it."""
        if req.state is ReqState.FINISHED:
            return
        self.queues.remove(req)
        req.move(ReqState.FINISHED)
        req.finish, req.stamps.ended_s = finish, self.clock()
        if req.holding is not None:
            keep = finish.reason is not FinishReason.ERROR
            if req in self.queues.under_way:
                self.queues.under_way.hold(req, keep=keep)
            else:
                let_go(req, self.kv, keep=keep)
        self._gate.disturb()
        self.counters[ENDS.get(finish.reason, "finished")] += 1
        self._ended(req)

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or return None when nothing can run; no step may be under way. Slots are taken here, so
        `apply` must follow."""
        queues, mixed = self.queues, self._config.mixed_steps
        assert not len(queues.under_way), "a step is under way: apply it, or schedule ahead"
        now_s = self.clock()
        self.last = LastRound(refusals=self.last.refusals, short=self.last.short)
        for feature in self.features.values():
            for req, finish in feature.looks(now_s) or ():
                self._end(req, finish)
        while (due := self.deadlines.due(now_s)) is not None:
            self._end(due, deadline_passed(due, now_s))
        give_way(self.last, queues, self.kv, self.counters, max_running=self.max_running, now_s=now_s)
        slots = (queues, self.kv, self._ratio, self.counters)
        gave_way, decode = take_slots(*slots) if mixed else (False, None)  # before any prompt's
        slotted = list(queues.running)
        batch = ExtendBatch() if gave_way and queues.running else self._next_prompts(now_s)
        if len(queues.running) < len(slotted):  # a prompt was to have what others held
            self.last.made_progress = True
            decode = decode.of(queues.running, slotted) if decode is not None and queues.running else None
        if batch.rows:
            self.last.made_progress = True
            writes = table_writes(self.kv)
            groups = self._groups(queues.running, first=len(batch.rows)) if decode is not None else ()
            queues.under_way.begin([*batch.reqs, *(queues.running if decode is not None else ())])
            of_prompts = prompt_groups(batch.reqs) if self._config.cascade else ()
            return extend_plan(batch, queues.running, decode, writes, groups, of_prompts)
        if resume(queues) or not mixed:
            gave_way, decode = take_slots(*slots)
        if decode is None:
            if not queues.paused:
                self._ratio.idle()
                self._end_starved(batch.short, now_s)
            return None
        self.last.made_progress = True
        queues.under_way.begin(list(queues.running))
        if gave_way:
            self._gate.disturb()
        else:
            self._gate.looked()
        return self._decode_plan(decode)

    def schedule_ahead(self) -> DecodePlan | None:
        """Plan the step after the one under way, before that one's tokens are known; None where that is not possible
        yet."""
        next_s = self.deadlines.next_s
        if next_s is not None and next_s <= self.clock():
            return None
        if any(feature.needs_tokens(len(self.queues.running)) for feature in self.features.values()):
            return None
        found = plan_ahead(self.queues, self.kv, must_look=self._gate.must_look)
        if found is None:
            return None
        reqs, follows = found
        self._gate.planned()
        self.queues.under_way.begin(reqs)
        self._ratio.decode_step()
        rows = decode_rows(reqs, self.kv, ahead=True)
        return decode_plan(reqs, rows, table_writes(self.kv), self._groups(reqs), follows=follows)

    def apply(self, plan: StepPlan, result: StepResult) -> list[NewToken]:
        """Take in a step: tokens to their requests, pages to the tree, finished requests out."""
        under_way = self.queues.under_way
        reqs = under_way.end()
        num_prompt, num_decode = count_computed(plan, result, reqs, self.queues, self.kv)
        self.counters["prefill_tokens"] += num_prompt
        self.counters["decode_tokens"] += num_decode
        tokens = [self.take(req, run) for req, run in sampled(plan, result, reqs)]
        for feature in self.features.values():
            feature.applied(plan, reqs, tokens)
        for req, keep in under_way.take_released():
            let_go(req, self.kv, keep=keep)
        return tokens

    def take(self, req: Req, run: Sequence[Drawn]) -> NewToken:
        """Give ``req`` its next token, made here or elsewhere, and what ``run`` has behind it; end it at its last, or
        where its own grammar raises."""
        try:
            token, finish = next_token(req, run, self._jump, now_s=self.clock())
            if finish is not None:
                self.finish(req, finish)
            return token
        except BaseException as error:  # noqa: BLE001
            self.finish(req, at_fault(req, error))
            return NewToken(req, None, None)

    def check(self) -> None:
        """Assert all invariants that hold between two steps, one of which may be under way."""
        self.queues.check()
        self.deadlines.check()
        self.kv.check([*self.queues.holding, *self.queues.under_way.ended])

    def accept(self, req: Req) -> None:
        """Take ``req`` into the books of open requests, and give it its rank in the queues."""
        if not self.has_work:
            self._ratio.idle()
        set_rank(req, self._config)
        self.deadlines.add(req)
        for feature in self.features.values():
            feature.opened(req)

    def wait(self, req: Req) -> None:
        """Let ``req``, which was accepted, wait for its turn."""
        chunked = self.queues.chunked
        self.queues.waiting.add(req, mid_prompt_len=0 if chunked is None else chunked.extend_len)
        for feature in self.features.values():
            feature.waits(req)
        self._gate.disturb()

    def _end(self, req: Req, finish: Finish) -> None:
        """End ``req`` on the scheduler's own decision; the engine reads `LastRound.ended` to answer its caller."""
        self.finish(req, finish)
        self.last.ended.append(req)

    def _ended(self, req: Req) -> None:
        """Take ``req``, which is in no queue, out of the books of open requests."""
        self.deadlines.remove(req)
        for feature in self.features.values():
            feature.ended(req)

    def _end_starved(self, short: Req | None, now_s: float) -> None:
        """End heads of the queues that found no memory for too long; ``short``: that of those that wait."""
        for head, finish in starved(short, self.queues, self.deadlines, self.kv, now_s):
            self._end(head, finish)
            self.last.made_progress = True

    def _jump(self, req: Req) -> tuple[tuple[Drawn, ...], Finish | None]:
        """Take the tokens that the grammar of ``req`` forces next (`jump`), where their step makes none wait."""
        if not self._config.mixed_steps or len(self.queues.under_way):
            return (), None  # others would wait for the run's step; or the step under way is making its first token
        chunk_size = self._config.chunked_prefill_size or 0
        return jump(req, self.queues, self.counters, chunk_size=chunk_size, page_size=self.kv.page_size)

    def _decode_plan(self, rows: DecodeRows) -> DecodePlan:
        """Plan a step of all running requests, whose ``rows`` have slots."""
        reqs, groups = self.queues.running, self._groups(self.queues.running)
        min_saved = self._config.cascade_saves if self._config.cascade else None
        for feature in self.features.values():
            if (plan := feature.plan(reqs, rows, groups, min_saved=min_saved)) is not None:
                return plan
        return decode_plan(reqs, rows, table_writes(self.kv), groups)

    def _next_prompts(self, now_s: float) -> ExtendBatch:
        """Choose the prompts of this step, and grant memory to those that other replicas compute."""
        batch, granted = next_prompts(
            self.queues, self.kv, self._ratio, self.counters, self._config, max_running=self.max_running, now_s=now_s
        )
        self.last.looked(batch, self.queues, granted=granted)
        return batch

    def _groups(self, reqs: list[Req], *, first: int = 0) -> tuple[PrefixGroup, ...]:
        """Find which of ``reqs``, the first of which is the step's row ``first``, begin with the same pages."""
        config = self._config
        return self._shared.groups(reqs, first=first, min_saved=config.cascade_saves) if config.cascade else ()
