"""How requests are spread after one of two replicas was stopped (SIGSTOP) for 50 s: engines' step clocks, the fleet and
the router together, on one clock that the test moves."""

from collections import Counter
from random import Random

from deployments.channel.frames import ReplicaReport
from deployments.fleet.fleet import LOOK_S, STALE_S, Fleet
from replicas.engine.stepping import Pulse, StepClock
from routing.router import Router
from routing.types import RouteQuery
from tests.harness import Clock
from tests.unit.deployments.in_process import LocalLeases
from tests.unit.deployments.sample_values import info, stats

PERIOD_S, STEP_S, CHUNK, CHUNK_S = 0.1, 0.028, 512, 0.4
NAMES = ("r0", "r1")


class Replica:
    """An engine's clocks without an engine: `work` makes a chunk and a few decode steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.pulse, self.times = Pulse(clock), StepClock(chunk_size=CHUNK)

    def work(self) -> None:
        self.times.record(CHUNK_S, CHUNK, is_extend=True)
        for _ in range(4):
            self.times.record(STEP_S, 0, is_extend=False)

    def resume(self, stopped_s: float, *, in_extend: bool) -> None:
        """Go on with the step that the stop fell into."""
        since_s = self._clock.now_s - stopped_s
        self.times.record(
            stopped_s,
            CHUNK * in_extend,
            is_extend=in_extend,
            interrupted=lambda: self.pulse.stopped_since(since_s),
        )

    def report(self) -> ReplicaReport:
        times = self.times
        said = stats(
            num_pages=10_000, max_running_requests=64, num_decode_steps=times.num_decode,
            num_extend_steps=times.num_extend, prefill_tokens_per_s=times.prefill_tokens_per_s,
            decode_step_s=times.decode_step_s, longest_step_s=times.longest_s,
        )  # fmt: skip
        return ReplicaReport(stats=said, error=None, num_open=0, step_age_s=0.0)


def burst(router: Router) -> Counter[str]:
    """How 24 short prompts that share nothing are spread."""
    prompts = ([number] * 100 for number in range(24))
    return Counter(
        router.choose(RouteQuery(rid="r", token_ids=prompt, max_new_tokens=64)).replica_id for prompt in prompts
    )


async def spread_after(stopped_s: float, *, in_extend: bool, other_works: bool) -> Counter[str]:
    clock = Clock()
    router = Router("estimated_ttft", Random(0), clock)
    fleet = Fleet(router=router, leases=LocalLeases(), clock=clock, report_period_s=PERIOD_S)
    replicas = {name: Replica(clock) for name in NAMES}
    fleet.set_members(NAMES)

    def run(seconds: float, speaking: tuple[str, ...], working: tuple[str, ...] = ()) -> None:
        until_s = clock.now_s + seconds
        while clock.now_s < until_s:
            clock.now_s += PERIOD_S
            for name in speaking:
                if name not in fleet._infos:
                    fleet._attached(info(name))  # as soon as it can be
                replicas[name].pulse.beat()
                if name in working:
                    replicas[name].work()
                fleet.on_report(name, replicas[name].report())
            if clock.now_s % LOOK_S < PERIOD_S:
                fleet.attach_silent_again()
                fleet.leave_hanging()

    run(5.0, NAMES, NAMES)
    run(stopped_s, ("r1",), ("r1",) if other_works else ())
    assert stopped_s < STALE_S or [each.replica_id for each in fleet.infos] == ["r1"]  # r0 was forgotten
    replicas["r0"].resume(stopped_s, in_extend=in_extend)
    run(10.0, NAMES, ("r1",) if other_works else ())
    fleet.check()
    return burst(router)


async def test_ten_seconds_after_a_stop_both_replicas_get_as_much() -> None:
    for stopped_s in (3.0, 50.0):
        for in_extend in (False, True):
            for other_works in (False, True):
                spread = await spread_after(stopped_s, in_extend=in_extend, other_works=other_works)
                assert abs(spread["r0"] - 12) <= 3, (stopped_s, in_extend, other_works, spread)
