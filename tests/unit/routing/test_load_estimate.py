"""What is believed of a replica between its reports, and of one whose reports are late."""

from dataclasses import replace

import numpy as np
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


HEAVY, LIGHT, WEIGHTY = ("heavy", 1.0), ("light", 1.0), ("weighty", 3.0)


def test_of_a_queue_a_tenant_waits_for_its_own_and_for_as_much_of_each_other_tenant_by_weight() -> None:
    """8,000 tokens of the heavy one, 600 of the weighty one, and 100 own before 50 more: 150 + 450 + 100."""
    made = load(view("a", -2.0), view("b", -2.0))
    for number in range(8):
        made.send("a", number=number, uncached_tokens=1_000, now_s=-1.0, tenant=HEAVY)
    made.send("a", number=8, uncached_tokens=600, now_s=-1.0, tenant=WEIGHTY)
    made.send("a", number=9, uncached_tokens=100, now_s=-1.0, tenant=LIGHT)
    for replica_id, queued in (("a", 8_700), ("b", 500)):
        made.report(view(replica_id, num_waiting=10, queued_uncached_tokens=queued, late_uncached_tokens=queued))

    def left(tenant: tuple[str, float], waits: tuple[int, ...] = ()) -> list[list[float]]:
        found = at(made, 0.0)
        made.shared(found, made.eligible(), tenant, np.array([50, 50]), waits)
        return [found.queued_tokens.tolist(), found.late_tokens.tolist()]

    assert left(LIGHT) == [[700.0, 500.0], [100.0, 500.0]]  # of whom b's queue is this router does not know
    assert left(LIGHT, (9,)) == [[pytest.approx(200 * 8_700 / 8_600), 500.0], [0.0, 500.0]]
    assert left(HEAVY) == [[8_700.0, 500.0], [8_000.0, 500.0]]
    made.note(8, begun=True)
    assert left(LIGHT) == [[pytest.approx(250 * 8_700 / 8_100), 500.0], [100.0, 500.0]]
    for number in range(8):
        made.end(number, begun=False)
    made.check()


def seen(made: Load, tenant: tuple[str, float]) -> LoadEstimate:
    found = at(made, 0.0)
    made.shared(found, made.eligible(), tenant, np.array([100]), ())
    return found


def test_where_nothing_is_queued_a_request_meets_all_of_what_its_replica_is_short_of() -> None:
    made = load(view("a"))
    made.send("a", number=0, uncached_tokens=1_000, now_s=-1.0, tenant=HEAVY)
    made.report(view("a", num_running=1))
    found = seen(made, LIGHT)
    assert (found.queued_tokens.tolist(), found.share.tolist()) == ([0.0], [1.0])


def test_decode_legs_of_another_tenant_take_nothing_from_the_queue_of_which_nothing_is_known() -> None:
    made = load(view("a", num_waiting=4, queued_uncached_tokens=4_000, late_uncached_tokens=4_000))
    made.send("a", number=0, uncached_tokens=0, now_s=-1.0, tenant=HEAVY)
    made.send("a", number=1, uncached_tokens=100, now_s=-1.0, tenant=LIGHT)
    found = seen(made, LIGHT)
    assert (found.queued_tokens.tolist(), found.late_tokens.tolist()) == ([4_000.0], [4_000.0])
    assert (found.num_waiting.tolist(), found.share.tolist()) == ([4.0], [1.0])


def test_a_tenant_is_the_same_one_after_its_weight_has_changed() -> None:
    """1,000 own tokens all count; of the weighty one, as many by its newest weight: 2 x (1,000 + 100)."""
    made = load(view("a", -2.0))
    made.send("a", number=0, uncached_tokens=1_000, now_s=-1.0, tenant=("light", 5.0))
    for number, weight in ((1, 3.0), (2, 2.0)):
        made.send("a", number=number, uncached_tokens=3_000, now_s=-1.0, tenant=("weighty", weight))
    made.report(view("a", num_waiting=3, queued_uncached_tokens=7_000))
    assert seen(made, LIGHT).queued_tokens.tolist() == [3_200.0]
    made.forget("a")
    made.check()


def test_tenants_are_told_apart_at_replicas_that_join_and_leave() -> None:
    made = load(*(view(f"r{number}", -2.0) for number in range(8)))
    made.send("r7", number=0, uncached_tokens=1_000, now_s=-1.0, tenant=HEAVY)
    made.join([view("new", -2.0)])
    made.send("new", number=1, uncached_tokens=2_000, now_s=-1.0, tenant=HEAVY)
    made.forget("r7")
    for replica_id in ("r0", "new"):
        made.report(view(replica_id, num_waiting=2, queued_uncached_tokens=2_000))
    found = at(made, 0.0)
    made.shared(found, made.eligible(), LIGHT, np.full(8, 100), ())
    assert dict(zip((each.replica_id for each in made.eligible().views), found.queued_tokens, strict=True)) == {
        "new": 100.0, "r0": 2_000.0, **{f"r{number}": 0.0 for number in range(1, 7)},
    }  # fmt: skip


def test_at_a_replica_that_says_nothing_a_tenant_waits_as_elsewhere_and_for_its_own_that_has_not_begun() -> None:
    made = load(view("a", -60.0), view("b", -1.0))
    for number, replica_id in enumerate("aaaabbbb"):
        made.send(replica_id, number=number, uncached_tokens=1_000, now_s=-0.5, tenant=HEAVY)

    def queued() -> list[float]:
        found = at(made, 0.0)
        made.shared(found, made.eligible(), LIGHT, np.array([100, 100]), ())
        return found.queued_tokens.tolist()

    assert queued() == pytest.approx([100.0, 100.0])
    made.send("a", number=8, uncached_tokens=600, now_s=-0.1, tenant=LIGHT)
    silent, fresh = queued()
    assert (silent > 1_200, fresh) == (True, pytest.approx(100.0))
    made.note(8, begun=True)
    assert queued()[0] < 120


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
