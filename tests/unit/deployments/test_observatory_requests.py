"""Each request counts once, whatever it is called, whichever clock its router has, and however many come."""

import pytest

from deployments.watch.observatory.requests import MOST_TTFTS, Requests
from deployments.watch.observatory.serve_details import ServeDetails
from deployments.watch.observatory.state import State
from tests.unit.deployments.observed import details, hand_off, listed, row, seen, view

NOBODY = ServeDetails()


def test_requests_that_are_called_alike_count_each() -> None:
    requests = Requests()
    for number in range(5):
        told = row("same", key=f"{number}", time=1000.0 + number, hand_offs=[hand_off("p", "d")])
        requests.take([told], 1000.0 + number, 1000.0 + number)
    late = row("same", key="0", time=1000.0, ttft_s=4.5, total_s=4.5, hand_offs=[hand_off("p", "d")])
    requests.take([late], 1005.0, 1005.0)  # the first one changes once more
    assert requests.totals(1005.0)["requests_per_s"] == pytest.approx(5 / 60, abs=0.001)
    [link] = requests.links()
    assert link["hand_offs_per_s"] == 0.5  # 5 in 10 s
    assert [(each["rid"], each["time"]) for each in requests.rows()] == [("same", 1004.0)]
    requests.check()


def test_two_routers_may_use_the_same_names_inside() -> None:
    requests = Requests()
    rows = [row(name, key="k", router=name, time=1000.0, hand_offs=[hand_off("p", "d")]) for name in ("one", "two")]
    requests.take(rows, 1000.0, 1000.0)
    assert requests.links()[0]["hand_offs_per_s"] == 0.2


@pytest.mark.parametrize("skew_s", [0.0, -12.0, -70.0, 70.0])
def test_a_routers_clock_that_is_wrong_changes_no_count_and_no_order(skew_s: float) -> None:
    state = State()
    for second in range(20):
        now_s = 1000.0 + second
        told = row(f"r{second}", time=now_s - 0.5 + skew_s, hand_offs=[hand_off("p", "d")])
        right = row(f"s{second}", time=now_s - 0.6, router="two", cached_tokens=None, ttft_s=None)
        wrong = view("one", rows=(told,), time_s=now_s + skew_s)
        state.advance([wrong, view("two", rows=(right,), time_s=now_s)], NOBODY, now_s - 900.0, time_s=now_s)
    snapshot = state.snapshot
    assert snapshot["totals"]["requests_per_s"] == pytest.approx(40 / 60, abs=0.001)
    assert snapshot["totals"]["ttft_p50_s"] == 0.5
    assert snapshot["links"][0]["hand_offs_per_s"] == 1.1  # 11 polls are within 10 s
    assert [each["rid"] for each in snapshot["requests"][:4]] == ["r19", "s19", "r18", "s18"]
    assert snapshot["requests"][0]["time"] == pytest.approx(1018.5)
    state.check()


def test_a_rows_time_does_not_waver_with_how_long_an_answer_takes() -> None:
    state = State()
    times = []
    for late_s in (20.0, 20.7, 19.4, 22.0):
        told = view("one", rows=(row("x", time=980.0),), time_s=1000.0 - late_s)
        state.advance([told], NOBODY, 1000.0)
        times.append(state.snapshot["requests"][0]["time"])
    assert times == [1000.0, 1000.0, 1000.0, 1002.0]


def test_our_own_clock_may_jump_and_only_what_is_shown_jumps_with_it() -> None:
    """The wall clock is set back by an hour between two polls, which are a second apart."""
    state = State()
    for now_s, time_s in ((10.0, 9000.0), (11.0, 5400.0)):
        told = row(f"r{now_s:.0f}", time=time_s - 0.2, hand_offs=[hand_off("p", "d")])
        replica = seen("a", age_s=0.1, prefill_tokens=int(100 * now_s))
        state.advance([view("one", replica, rows=(told,), time_s=time_s)], NOBODY, now_s, time_s=time_s)
        state.check()
    snapshot = state.snapshot
    assert snapshot["time"] == 5400.0
    assert snapshot["history"] == {"times": [5400.0], "used": {"a": [0.0]}}
    assert snapshot["totals"]["requests_per_s"] == pytest.approx(2 / 60, abs=0.001)
    assert snapshot["links"][0]["hand_offs_per_s"] == 0.2
    assert snapshot["replicas"][0]["rates"]["prefill_tokens_per_s"] == 100.0
    state.advance([], NOBODY, 12.0, time_s=99_000.0)
    assert [each["id"] for each in state.snapshot["replicas"]] == ["a"]  # it was heard a second ago


def test_the_quantiles_are_of_the_newest_first_tokens_where_very_many_come() -> None:
    requests = Requests()
    for second, ttft_s in ((1, 9.0), (2, 0.25)):
        rows = [row(f"r{second}.{i}", time=1000.0 + second, ttft_s=ttft_s) for i in range(MOST_TTFTS)]
        requests.take(rows, 1020.0, 1020.0)
    totals = requests.totals(1020.0)
    assert (totals["ttft_p50_s"], totals["ttft_p90_s"]) == (0.25, 0.25)
    assert totals["requests_per_s"] == pytest.approx(2 * MOST_TTFTS / 60, abs=1)
    assert totals["reuse_ratio"] == 0.4
    requests.check()


def test_a_router_that_hangs_keeps_no_replica_that_has_left() -> None:
    state = State()
    serve = details(listed("one", "router"), listed("two", "router"))
    state.advance([view("one", seen("a"), seen("b")), view("two", seen("a"), seen("b"))], serve, 1000.0)
    state.advance([view("one", seen("a"))], serve, 1005.0)
    assert [each["id"] for each in state.snapshot["replicas"]] == ["a"]
    assert [target.process_id for target in state.merged.targets()] == ["a", "one", "two"]
    state.advance([], serve, 1010.0)  # nobody answers: the last word of all stands
    assert [each["id"] for each in state.snapshot["replicas"]] == ["a", "b"]


def test_a_router_that_drains_has_its_requests_until_it_has_left() -> None:
    state = State()
    running = row("x", time=999.0, outcome="running", total_s=None, stages=None)
    state.advance([view("one", rows=(running,))], details(listed("one", "router")), 1000.0)
    draining = details(listed("one", "router", "STOPPING"), listed("two", "router"))
    for now_s in (1001.0, 1040.0):
        state.advance([view("two")], draining, now_s)
        assert [each["outcome"] for each in state.snapshot["requests"]] == ["running"]
        assert [each["id"] for each in state.snapshot["routers"]] == ["two"]
    state.advance([view("two")], details(listed("two", "router")), 1041.0)
    assert [each["outcome"] for each in state.snapshot["requests"]] == ["unknown"]
