"""What is believed of a replica between its reports, and of one whose reports are late."""

from dataclasses import replace

import pytest

from routing.load import FADE_HALF_S, FRESH_S, RATE_FADE_HALF_S, RATE_FRESH_S, Load, LoadEstimate, smooth
from routing.types import ReplicaView


def view(replica_id: str, time_s: float = 0.0, **told: float) -> ReplicaView:
    return ReplicaView(replica_id=replica_id, time_s=time_s, prefill_tokens_per_s=1_000.0, **told)  # type: ignore[arg-type]


def load(*views: ReplicaView) -> Load:
    made = Load()
    made.join(views)
    return made


def at(made: Load, now_s: float) -> LoadEstimate:
    made.check()
    return made.estimate(made.eligible(), now_s)


def test_of_those_who_waited_as_many_are_left_as_of_their_tokens() -> None:
    made = load(view("a", num_waiting=10, queued_uncached_tokens=2_000))
    assert [at(made, now_s).num_waiting.tolist() for now_s in (0.0, 0.5, 1.5, 1.999, 2.5)] == [
        [10.0], [7.5], [2.5], [pytest.approx(0.005)], [0.0],
    ]  # fmt: skip


def test_no_more_wait_than_there_are_requests() -> None:
    """Of three who waited at the report, two have ended: aborted, so that their tokens are still counted."""
    made = load(view("a", -1.0))
    for number in range(3):
        made.send("a", number=number, uncached_tokens=1_000, now_s=-0.5)
    made.report(view("a", num_waiting=3, queued_uncached_tokens=3_000))
    made.end(0)
    made.end(1)
    then = at(made, 0.0)
    assert (then.num_requests.tolist(), then.num_waiting.tolist()) == ([1.0], [1.0])


def test_what_ends_before_its_first_token_is_queued_no_longer_and_what_came_after_it_still_is() -> None:
    """At the report 2,500 tokens are left of 3,000, and 700 came after them. Then the client of the 3,000 leaves."""
    made = load(view("a", -2.0))
    made.send("a", number=0, uncached_tokens=3_000, now_s=-1.5)
    made.send("a", number=1, uncached_tokens=700, now_s=-1.0)
    made.report(view("a", num_waiting=1, num_running=1, queued_uncached_tokens=3_200))
    made.end(0, begun=False)
    assert at(made, 0.0).queued_tokens.tolist() == [700.0]
    assert at(made, 0.5).queued_tokens.tolist() == [200.0]


def test_of_a_queue_that_is_others_only_what_was_the_ended_request_s_goes() -> None:
    made = load(view("a", -2.0))
    made.send("a", number=0, uncached_tokens=1_000, now_s=-1.0)
    made.report(view("a", num_waiting=4, queued_uncached_tokens=8_000))
    made.end(0, begun=False)
    assert at(made, 0.0).queued_tokens.tolist() == [7_000.0]


def test_a_report_that_comes_too_late_to_be_taken_changes_nothing_of_it() -> None:
    made = load(view("a", 5.0, num_waiting=3, queued_uncached_tokens=900, num_running=200))
    made.report(view("a", 4.0, num_waiting=99, queued_uncached_tokens=9_000))
    assert at(made, 5.0).num_waiting.tolist() == [3.0]


def test_a_late_report_fades_towards_the_mean_of_the_fresh() -> None:
    """a's report is one half-life late: half its own numbers, half b's and c's mean. Nothing drains after FRESH_S."""
    now_s = FRESH_S + FADE_HALF_S
    told = {"num_running": 60, "pool_utilization": 0.9, "queued_uncached_tokens": 10_000, "num_waiting": 40}
    idle = {"queued_uncached_tokens": 1_000, "num_running": 10, "num_waiting": 2, "pool_utilization": 0.1}
    made = load(view("a", **told), view("b", now_s, **idle), view("c", now_s, **idle))
    then = at(made, now_s)
    assert then.queued_tokens.tolist() == pytest.approx([(8_000 + 1_000) / 2, 1_000, 1_000])
    assert then.num_waiting.tolist() == pytest.approx([(32 + 2) / 2, 2, 2])
    assert then.num_requests.tolist() == [(100 + 12) / 2, 12, 12]
    assert then.utilization.tolist() == pytest.approx([0.5, 0.1, 0.1])


def test_a_rate_follows_its_reports_by_half_in_a_second_and_0_is_no_measurement() -> None:
    assert smooth(100.0, 200.0, 1.0) == 150.0
    assert smooth(0.0, 200.0, 1.0) == 200.0
    assert smooth(100.0, 0.0, 1.0) == 100.0


def slow(
    replica_id: str, time_s: float, *, rate: float = 1_000.0, step_s: float = 0.028, healthy: bool = True
) -> ReplicaView:
    told = view(replica_id, time_s, decode_step_s=step_s)
    return replace(told, prefill_tokens_per_s=rate, healthy=healthy)


def rates(made: Load) -> tuple[list[float], list[float]]:
    then = at(made, 0.0)
    return then.prefill_tokens_per_s.tolist(), then.decode_step_s.tolist()


def test_what_was_measured_across_a_silence_is_dropped_and_what_is_measured_after_it_counts() -> None:
    """50 s of silence, in which it was not healthy; then it reports a step of 10 s until it makes another one."""
    made = load(slow("a", 0.0))
    made.report(slow("a", 0.0, healthy=False))
    for time_s in (50.0, 50.1, 53.0):
        made.report(slow("a", time_s, rate=20.0, step_s=10.0))
        assert rates(made) == ([1_000.0], [0.028])
    made.report(slow("a", 54.0, rate=900.0, step_s=0.038))
    assert rates(made) == ([pytest.approx(950.0)], [pytest.approx(0.033)])


def test_rates_are_forgotten_with_the_replica_so_that_one_attached_anew_is_what_it_says() -> None:
    made = load(slow("a", 0.0, rate=20.0, step_s=10.0))
    made.forget("a")
    made.join([slow("a", 0.1)])
    assert rates(made) == ([1_000.0], [0.028])


def test_the_rates_of_an_idle_replica_drift_to_those_that_were_measured_lately() -> None:
    """a measured its last step at 0 s; b measures as it goes. 5 s are fresh, 5 more halve what is believed of a."""
    made = load(slow("a", 0.0, rate=100.0, step_s=10.0), slow("b", 0.0))
    believed = []
    for number, time_s in enumerate((RATE_FRESH_S, RATE_FRESH_S + RATE_FADE_HALF_S, 60.0)):
        made.report(slow("a", time_s, rate=100.0, step_s=10.0))
        made.report(slow("b", time_s, rate=1_000.0 + 0.001 * number, step_s=0.028 + 1e-6 * number))
        believed.append(rates(made))
    assert [tokens_per_s[0] for tokens_per_s, _ in believed] == pytest.approx([100, 550, 999.6], rel=1e-4)
    assert [step_s[0] for _, step_s in believed] == pytest.approx([10.0, 5.014, 0.033], rel=0.01)
    assert [tokens_per_s[1] for tokens_per_s, _ in believed] == pytest.approx([1_000.0] * 3, rel=1e-4)


def test_a_rate_that_does_not_change_is_as_old_as_its_measurement_and_work_makes_it_new() -> None:
    made = load(slow("a", 0.0, rate=100.0), slow("b", 0.0))
    for name, rate in (("a", 100.0), ("b", 1_000.1)):
        made.report(slow(name, 20.0, rate=rate))
    assert rates(made)[0][0] == pytest.approx(1_000.0 - 900.0 * 0.5**3, rel=1e-3)
    made.report(slow("a", 20.1, rate=101.0))  # it computed a prompt: it is slow
    assert rates(made)[0][0] == pytest.approx(100.0, rel=0.01)
