"""The steps of one engine on its ranks: launched, awaited, timed; and the engine's snapshot of statistics.

Owns:      the step that is under way, the sums of step times, and the smoothed rates from which waits are estimated.
Never:     knows text, callers or KV transfers.
Invariant: results are awaited in the order of launch; at most one step is under way between two calls.
Thread:    engine thread only; `end` waits for the device.

    begin(n) ─> end: schedule_ahead, launch n + 1 | result n, apply n      with overlap, when that step can be planned
                end: schedule_ahead, launch n + 2 | result n + 1, apply n + 1
"""

import collections
import logging
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from replicas.cache.kv import KvCache
from replicas.cache.pages import PageStore
from replicas.engine.failed_steps import MOST_IN_A_ROW, FailedSteps, Launch, run_again, try_idle
from replicas.errors import EngineDead, NotSent
from replicas.request import Req, ReqState
from replicas.scheduler.budget import least_prompt_tokens
from replicas.scheduler.plan import DecodePlan, ExtendPlan, FailedStep, PendingStep, StepPlan, StepResult
from replicas.scheduler.precedence import StepTimes
from replicas.scheduler.queues import Queues
from replicas.scheduler.scheduler import Scheduler
from replicas.scheduler.tokens import AT_FAULT, SOURCES, Counters, NewToken, at_fault, require_fault
from replicas.types import SECONDS, EngineStats, PoolStats, Tally, TallyCounts, TierStats, each_told

log = logging.getLogger(__name__)

SMOOTHING = 0.2  # weight of the newest step: about the last ten steps count; of the first ones the plain mean
COST_WEIGHT = 0.01  # of the newest step in what a step costs by what it runs
LEAST_FIXED = 0.05  # of a mean step is the same in all, whatever steps of uneven durations say
RECENT_STEPS = 32  # of each kind, whose longest tells how long a step may take
FULL_STEP_TOKENS = 64  # smaller extend steps say little about the prefill rate, unless none need be as large
OUTLIER = 4.0  # a step that took so many times the median of the recent ones counts as that, or was interrupted
STOOD_STILL_S = 1.0  # without a beat of the pulse: the process was stopped, or its machine suspended


class Pulse:
    """Tells whether this process stood still: a thread that does nothing else calls `beat`. Any thread may ask.

    A step that spans SIGSTOP, a suspended machine or a frozen container took as long as that lasted, which says nothing
    about how fast this engine is. No clock tells it: the monotonic one goes on, and a process that computes on a GPU
    uses no CPU time either.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._beat_s: float | None = None
        self._resumed_s = float("-inf")  # end of the last stop that was noticed

    def beat(self) -> None:
        """Note that this process runs; called every fraction of STOOD_STILL_S."""
        now_s = self.clock()
        if self._stopped_at(now_s):
            self._resumed_s = now_s
        self._beat_s = now_s

    def stopped_since(self, since_s: float) -> bool:
        """Return whether the process stood still at some time after ``since_s``; False where nothing beats."""
        return self._resumed_s > since_s or self._stopped_at(self.clock())

    def _stopped_at(self, now_s: float) -> bool:
        return self._beat_s is not None and now_s - self._beat_s > STOOD_STILL_S


class StepClock:
    """The durations of engine steps: sums, smoothed rates, and the longest recent step. Engine thread only.

    The sums count each step as it was. In the rates a step that took more than OUTLIER times the median of the recent
    ones counts as that much. If the process stood still meanwhile, it counts for nothing, the longest step included.
    """

    def __init__(self, *, chunk_size: int) -> None:
        self._full_step = min(FULL_STEP_TOKENS, least_prompt_tokens(chunk_size))
        self.num_extend = 0
        self.num_mixed = 0  # of num_extend
        self.num_decode = 0
        self.extend_s = 0.0
        self.decode_s = 0.0
        self.rate_step_tokens = 0.0  # prompt tokens of the steps that the rate of prompts was measured on, smoothed
        self.decode_step_s = 0.0  # of steps that only decode; 0 until measured
        self.tokens_per_step = 1.0  # smoothed, of a request in these
        self.longest_s = 0.0  # of the recent steps of each kind: decode steps do not make it forget a long chunk
        self._recent_s = {is_extend: collections.deque[float](maxlen=RECENT_STEPS) for is_extend in (False, True)}
        self._moments = np.zeros((4, 3))  # smoothed: prompt tokens of a step, rows, seconds; then their covariances
        self._full_s = 0.0  # smoothed, of extend steps of at least _full_step
        self._recent_s_per_token = collections.deque[float](maxlen=RECENT_STEPS)  # of those

    def record(
        self,
        step_s: float,
        num_prompt_tokens: int,
        *,
        is_extend: bool,
        num_decode: int = 0,
        tokens_each: float = 1.0,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Record a step of ``step_s`` seconds that ran ``num_prompt_tokens`` of prompts.

        A mixed step counts whole: so fast are prompts computed beside running requests. The rate is the quotient of two
        smoothed sums, not a smoothed quotient, so steps weigh by their length: a short prompt in a step with many
        decode rows says little about the rate of long prompts. Much smaller steps are left out: 16 tokens beside 8
        others run at 520 a second where 240 run at 1,190 (docs/performance.md, Mixed steps).

        Args: num_decode: running requests, and rows of drafts, that the step had. tokens_each: that it made of a
              request.
              interrupted: tells whether the process stood still during the step; asked only of one that took long.
        """
        if is_extend:
            self.num_extend += 1
            self.num_mixed += num_decode > 0
            self.extend_s += step_s
        else:
            self.num_decode += 1
            self.decode_s += step_s
        is_full = is_extend and num_prompt_tokens >= self._full_step and step_s > 0
        recent, units = self._recent_s[is_extend], 1
        if is_full:
            recent, units = self._recent_s_per_token, num_prompt_tokens
        most_s = OUTLIER * statistics.median(recent) * units if recent else step_s
        if step_s > most_s and interrupted():
            return
        self._recent_s[is_extend].append(step_s)
        self.longest_s = max(max(each, default=0.0) for each in self._recent_s.values())
        weight = max(1 / (self.num_extend + self.num_decode), COST_WEIGHT)
        off = np.array((num_prompt_tokens, num_decode, min(step_s, most_s))) - self._moments[0]
        off[:2] *= abs(off[:2]) > 1e-9 * self._moments[0, :2]  # else rounding errors, once steps differ in nothing else
        self._moments[0] += weight * off
        self._moments[1:] = (1 - weight) * (self._moments[1:] + weight * np.outer(off, off))
        if not is_extend:
            self.decode_step_s = _smooth(self.decode_step_s, min(step_s, most_s), len(self._recent_s[False]))
            self.tokens_per_step = _smooth(self.tokens_per_step, tokens_each)
        elif is_full:
            self._recent_s_per_token.append(step_s / num_prompt_tokens)
            num = len(self._recent_s_per_token)
            self.rate_step_tokens = _smooth(self.rate_step_tokens, num_prompt_tokens, num)
            self._full_s = _smooth(self._full_s, min(step_s, most_s), num)

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast prompts are computed; 0 until measured."""
        return self.rate_step_tokens / self._full_s if self._full_s else 0.0

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """What a new token took of late, of a prompt or an answer; and by least squares over the steps what any of them
        took, and on top of that a token of a prompt and a running request. In seconds; 0 until one was recorded."""
        (num_prompt, num_rows, step_s), (prompt2, both, of_prompt), (_, row2, of_row), _ = self._moments.tolist()
        prompt2, row2 = 1.001 * prompt2 + 1e-30, 1.001 * row2 + 1e-30  # ridge: where both go together, each has a part
        determinant = prompt2 * row2 - both * both
        prompt_s = max((of_prompt * row2 - of_row * both) / determinant, 0.0)
        row_s = max((of_row * prompt2 - of_prompt * both) / determinant, 0.0)
        fixed_s = max(step_s - num_prompt * prompt_s - num_rows * row_s, LEAST_FIXED * step_s)
        return step_s / max(num_prompt + num_rows, 1.0), fixed_s, prompt_s, row_s


def _smooth(old: float, new: float, num: int = RECENT_STEPS) -> float:
    """Return the mean with ``new``, the last of ``num`` >= 1 values."""
    return old + max(SMOOTHING, 1 / num) * (new - old)


class Sources(NamedTuple):
    """What statistics are read from."""

    scheduler: Scheduler
    queues: Queues
    counters: Counters
    store: PageStore
    steps: StepClock


def snapshot(scheduler: Scheduler, store: PageStore, steps: StepClock, *, now_s: float) -> EngineStats:
    """Collect the statistics of scheduler, pages and steps; the caller adds those of failed steps and KV transfers."""
    counters, queues = scheduler.counters, scheduler.queues
    now = Sources(scheduler, queues, counters, store, steps)
    chunked = queues.chunked
    parked = queues.away.in_state(ReqState.WAITING)
    # a parked prefill leg waits for pages of its receiver, not for this engine, so it does not count as queued
    num_legs = sum(req.is_prefill_leg for req in parked)
    offline = [req for req in queues.holding if req.in_background]
    num_waiting = queues.waiting.num_counted
    pool = store.stats()
    uncached = queues.waiting.uncached_tokens()
    uncached += chunked.extend_len if chunked and not chunked.in_background else 0
    return EngineStats(
        time_s=now_s,
        pool=pool,
        num_waiting=num_waiting + len(parked) - num_legs,
        num_running=len(queues.decoding) + len(queues.forced) + (chunked is not None),
        num_offline_waiting=len(queues.waiting) - num_waiting,
        num_receiving=len(queues.away.in_state(ReqState.RECEIVING)),
        num_offline_running=len(offline),
        offline_pages=_pages_of_batches(queues, pool) if offline else 0,
        waiting_uncached_tokens=uncached,
        late_uncached_tokens=min(queues.waiting.late_len, uncached),
        tiers=_tier_stats(scheduler.kv, counters),
        drafted_tokens={source: counters[f"drafted_tokens.{source}"] for source in SOURCES},
        accepted_tokens={source: counters[f"accepted_tokens.{source}"] for source in SOURCES},
        **{name: _number(read(now)) for name, read in _READ.items()},
    )


def _reader(of: str) -> Callable[[Sources], Any]:
    """Make what reads ``of`` of `Sources`: attributes by name, and a counter by its key."""
    room, _, name = of.partition(".")
    return (lambda now: now.counters[name]) if room == "counters" else operator.attrgetter(of)


_READ = {name: _reader(how.of) for name, how in each_told(EngineStats) if how.of}


def _number(found: Any) -> Any:
    return found if isinstance(found, int | float | str) else len(found)


def _pages_of_batches(queues: Queues, pool: PoolStats) -> int:
    """Count the used pages that no other request can hold; what others share among them is counted for each."""
    held = [req.holding for req in queues.holding if req.holding is not None and not req.in_background]
    others = sum(-(-each.kv_len // pool.page_size) for each in held)
    return max(0, pool.protected_pages + pool.reserved_pages - others)


def _tier_stats(kv: KvCache, counters: Counters) -> TierStats | None:
    if kv.store.tiers is None:
        return None
    stats = kv.store.tiers.stats()
    if kv.store_tier is not None:
        stats = kv.store_tier.stats(stats)
    return replace(stats, host_hit_tokens=counters["host_tokens"], store_hit_tokens=counters["store_tokens"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step that was launched and not applied."""

    plan: StepPlan
    pending: PendingStep
    launched_s: float


_REQUESTS = tuple(float(2**i) for i in range(11))  # to 1,024
_TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)


class StepTallies:
    """How the steps of one engine spread, of each phase: seconds, requests and new tokens. The engine thread writes."""

    def __init__(self) -> None:
        self._of = {
            f"{phase}_{name}": Tally(bounds)
            for phase in ("prefill", "decode")
            for name, bounds in (("step_s", SECONDS), ("batch_requests", _REQUESTS), ("batch_tokens", _TOKENS))
        }

    def step(self, step_s: float, num_requests: int, num_tokens: int, *, is_extend: bool) -> None:
        """Count a step of ``num_requests`` requests and ``num_tokens`` new tokens that took ``step_s`` seconds."""
        phase = "prefill" if is_extend else "decode"
        self._of[f"{phase}_step_s"].add(step_s)
        self._of[f"{phase}_batch_requests"].add(num_requests)
        self._of[f"{phase}_batch_tokens"].add(num_tokens)

    def read(self) -> dict[str, TallyCounts]:
        """Return the fields of `EngineTallies`; any thread."""
        return {name: tally.read() for name, tally in self._of.items()}


class Stepping:
    """The step under way: launches plans and takes in their results."""

    def __init__(
        self,
        launch: Launch,
        scheduler: Scheduler,
        *,
        chunk_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.launch = launch  # of a plan, on all ranks
        self._scheduler = scheduler
        self.tallies = StepTallies()
        self._under_way: Launched | None = None
        self._counted_s = clock()
        self.pulse = Pulse(clock)
        self.times = StepClock(chunk_size=chunk_size)
        self.failed = FailedSteps()

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    def begin(self, plan: StepPlan) -> None:
        assert self._under_way is None, "end the step under way first"
        self._under_way = self._launched(plan)

    def end(self, *, ahead: bool, again: bool) -> tuple[Launched, list[NewToken]]:
        """Wait for the step under way and apply it. With ``ahead`` the next decode step, if it can be planned, is
        launched before that, and is then under way.

        Args:    again: a step that fails may run again: no other rank would be a step ahead or behind. One that was
                 not sent to them may do so always.
        Returns: the step that ended, for `count`, and its tokens; those of requests at fault come first.
        Raises:  EngineDead with the ids of the step's requests, if the engine cannot go on.
        """
        step = self._under_way
        assert step is not None, "no step is under way"
        reqs = self._scheduler.queues.under_way.steps[0]
        try:
            ahead = ahead and not isinstance(step.pending, FailedStep)
            plan = self._scheduler.schedule_ahead() if ahead else None
            self._under_way = self._launched(plan) if plan is not None else None
            step, result, ended = self._outcome(step, reqs, again=again)
            tokens = self._scheduler.apply(step.plan, result)
            if isinstance(step.pending, FailedStep):
                self._scheduler.check()
        except EngineDead:
            raise
        except BaseException as error:
            require_fault(error)
            rids = frozenset(req.rid for req in reqs)
            raise EngineDead(f"a step failed with {type(error).__name__}: {error}", rids=rids) from error
        if plan is not None:
            self._begin_masks()  # of the step that is under way: they follow from the tokens
        return step, [*ended, *tokens]

    def _outcome(
        self, step: Launched, reqs: Sequence[Req], *, again: bool
    ) -> tuple[Launched, StepResult, list[NewToken]]:
        """Wait for ``step`` of ``reqs``. If it fails, its requests run again in parts, and those that fail alone end.

        Returns: the step, `FailedStep` if it did; its result; and the requests that ended, as `end` does.
        """
        def may_fail(error: BaseException) -> bool:
            return again or isinstance(error, NotSent)

        try:
            return step, step.pending.result(), []
        except BaseException as error:
            require_fault(error)
            if not may_fail(error):
                raise
            failed = step.pending if isinstance(step.pending, FailedStep) else FailedStep(error)
        if not failed.follows:
            log.error("a step of %d requests failed with %r: they run again in parts", len(reqs), failed.error)
        result, faults = run_again(step.plan, reqs, self.launch, may_fail)
        if len(faults) == sum(req.finish is None for req in reqs):
            if faults and self.failed.in_a_row >= MOST_IN_A_ROW:
                failed.result()
            try:
                try_idle(self.launch, self._scheduler.max_running, step.plan.table_writes)
            except BaseException as unsound:
                require_fault(unsound)
                raise failed.error from unsound
        for req, fault in faults.items():
            self._scheduler.finish(req, at_fault(req, fault))
        if self._under_way is not None:  # it follows tokens that were sampled anew
            self._under_way = replace(self._under_way, pending=replace(failed, follows=True))
        return replace(step, pending=failed), result, [NewToken(req, None, None) for req in faults]

    def count(self, step: Launched, tokens: Sequence[NewToken]) -> None:
        """Record the time of ``step``, which is over and made ``tokens``: from its launch, or from the end of the step
        before if later. That of a step that failed says nothing."""
        started_s, self._counted_s = max(step.launched_s, self._counted_s), self.pulse.clock()
        ends = [token.req.finish for token in tokens if token.req.finish is not None]
        num_faults = sum(end.retry_as in AT_FAULT for end in ends)
        plan, step_s, num_reqs = step.plan, self._counted_s - started_s, step.plan.num_requests
        failed = isinstance(step.pending, FailedStep) and not step.pending.follows
        if failed or num_faults or self.failed.in_a_row:
            all_at_fault = num_faults > 0 and num_faults == num_reqs
            self.failed = self.failed.after(failed=failed or num_faults > 0, all_at_fault=all_at_fault)
        if isinstance(step.pending, FailedStep):
            return
        is_extend = isinstance(plan, ExtendPlan)
        num_new = plan.num_tokens if isinstance(plan, ExtendPlan) else len(plan.rows)
        num_prompt = plan.num_prompt_tokens if isinstance(plan, ExtendPlan) else 0
        queues = self._scheduler.queues
        self.times.record(
            step_s,
            num_prompt,
            is_extend=is_extend,
            num_decode=num_new - num_prompt,
            tokens_each=1.0 + sum(token.num_accepted for token in tokens) / num_reqs,
            interrupted=lambda: self.pulse.stopped_since(started_s),
        )
        tiers = self._scheduler.kv.store.tiers
        rate = self.times.prefill_tokens_per_s
        s_per_token = 1.0 / rate if rate else 0.0
        queues.waiting.step_times = StepTimes(s_per_token, self.times.decode_step_s, *self.times.costs)
        if tiers is not None and rate:
            tiers.compute_s_per_token = s_per_token
        self.tallies.step(step_s, num_reqs, num_new, is_extend=is_extend)

    def _begin_masks(self) -> None:
        """Compute the masks of the newest step beside its forward."""
        guides = [req.guide for req in self._scheduler.queues.under_way.newest if req.guide is not None]
        if guides:
            try:
                guides[0].begin_masks(guides[1:])
            except BaseException as error:  # noqa: BLE001 - each computes its own when it is sampled, and may fail
                require_fault(error)

    def _launched(self, plan: StepPlan) -> Launched:
        launched_s = self.pulse.clock()
        if not isinstance(plan, DecodePlan) or plan.follows is None:
            self._begin_masks()
        try:
            pending = self.launch(plan)
        except BaseException as error:  # noqa: BLE001
            require_fault(error)
            pending = FailedStep(error)
        return Launched(plan=plan, pending=pending, launched_s=launched_s)
