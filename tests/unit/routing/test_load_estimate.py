"""What is believed of a replica between its reports, and of one whose reports are late."""

import pytest

from routing.load import FADE_HALF_S, FRESH_S, Load, LoadEstimate, smooth
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


def test_those_sent_since_the_report_wait_too() -> None:
    made = load(view("a", num_waiting=2, queued_uncached_tokens=1_000))
    for number in range(2):
        made.send("a", number=number, uncached_tokens=500, now_s=0.0)
    assert at(made, 0.0).num_waiting.tolist() == [4.0]
    assert at(made, 1.0).num_waiting.tolist() == [2.0]


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


def test_where_all_are_late_they_fade_towards_the_mean_of_all() -> None:
    made = load(view("a", num_running=10), view("b", num_running=30))
    assert at(made, FRESH_S).num_requests.tolist() == [10, 30]
    assert at(made, FRESH_S + FADE_HALF_S).num_requests.tolist() == [15, 25]


def test_a_standing_does_not_change_with_what_is_sent_afterwards() -> None:
    made = load(view("a"))
    before = at(made, 0.0)
    made.send("a", number=0, uncached_tokens=700, now_s=0.0)
    assert (before.queued_tokens.tolist(), before.num_waiting.tolist(), before.in_flight.tolist()) == ([0], [0], [0])


def test_a_rate_follows_its_reports_by_half_in_a_second_and_0_is_no_measurement() -> None:
    assert smooth(100.0, 200.0, 1.0) == 150.0
    assert smooth(0.0, 200.0, 1.0) == 200.0
    assert smooth(100.0, 0.0, 1.0) == 100.0
