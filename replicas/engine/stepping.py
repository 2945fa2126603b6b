"""The steps of one engine on its ranks: launched, waited for, counted.

Owns:      the step that is under way, and how long steps took.
Never:     knows text, callers or hand-offs.
Invariant: results are asked for in the order of launch; at most one step is under way between two calls.
Thread:    engine thread only; it waits in `end`, for the device.

    begin(n) ─> end: schedule_ahead, launch n + 1 | result n, apply n      with overlap, while that can be said
                end: schedule_ahead, launch n + 2 | result n + 1, apply n + 1
"""

from collections.abc import Callable
from dataclasses import dataclass

from replicas.distributions import Distributions
from replicas.engine.stats import StepClock
from replicas.scheduler.plan import ExtendPlan, PendingStep, StepPlan
from replicas.scheduler.scheduler import Scheduler
from replicas.scheduler.tokens import NewToken

Launch = Callable[[StepPlan], PendingStep]  # starts a plan on all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step that was launched and not applied."""

    plan: StepPlan
    pending: PendingStep
    launched_s: float


class Stepping:
    """Launches plans and takes in what they made."""

    def __init__(
        self,
        launch: Launch,
        scheduler: Scheduler,
        distributions: Distributions,
        *,
        chunk_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.launch = launch  # of a plan, on all ranks
        self._scheduler = scheduler
        self._distributions = distributions
        self._clock = clock
        self._under_way: Launched | None = None
        self._counted_s = clock()
        self.times = StepClock(chunk_size=chunk_size)

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    def begin(self, plan: StepPlan) -> None:
        assert self._under_way is None, "end the step under way first"
        self._under_way = self._launched(plan)

    def end(self, *, ahead: bool) -> tuple[Launched, list[NewToken]]:
        """Wait for the step under way and apply it. With ``ahead`` the next decode step is launched before that, where
        it can be made; it is then under way. Returns: the step that is over, to be given to `count`, and its tokens."""
        step = self._under_way
        assert step is not None, "no step is under way"
        plan = self._scheduler.schedule_ahead() if ahead else None
        self._under_way = self._launched(plan) if plan is not None else None
        return step, self._scheduler.apply(step.plan, step.pending.result())

    def count(self, step: Launched) -> None:
        """All that is made of ``step`` is made. It took from its launch, or from the count of the step before it."""
        started_s, self._counted_s = max(step.launched_s, self._counted_s), self._clock()
        plan, step_s = step.plan, self._counted_s - started_s
        is_extend, num_rows = isinstance(plan, ExtendPlan), len(plan.rows)
        num_new = plan.num_tokens if isinstance(plan, ExtendPlan) else num_rows
        num_prompt = plan.num_prompt_tokens if isinstance(plan, ExtendPlan) else 0
        self.times.record(step_s, num_prompt, is_extend=is_extend, is_mixed=is_extend and num_prompt < num_new)
        self._distributions.step(step_s, num_rows, num_new, is_extend=is_extend)

    def _launched(self, plan: StepPlan) -> Launched:
        launched_s = self._clock()
        return Launched(plan=plan, pending=self.launch(plan), launched_s=launched_s)
