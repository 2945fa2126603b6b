"""The observatory's state: what routers and Serve say becomes one picture, with numbers that an eye can check."""

from typing import Any

import pytest

from deployments.watch.observatory.deltas import History
from deployments.watch.observatory.rates import Rates
from deployments.watch.observatory.requests import Requests
from deployments.watch.observatory.scaling import Scaling
from deployments.watch.observatory.serve_details import ServeDetails, details_of
from deployments.watch.observatory.state import State
from replicas.types import TierStats
from tests.unit.deployments.observed import details, hand_off, listed, row, seen, view

NOBODY = ServeDetails()


def by_id(state: State) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in state.snapshot["replicas"]}


def test_before_anything_is_heard_the_state_is_whole_and_empty() -> None:
    snapshot = State().snapshot
    assert (snapshot["version"], snapshot["routers"], snapshot["replicas"], snapshot["requests"]) == (0, [], [], [])
    assert snapshot["history"] == {"times": [], "used": {}}
    assert snapshot["totals"] == {
        "requests_per_s": 0.0, "ttft_p50_s": None, "ttft_p90_s": None, "reuse_ratio": None, "fullest_pool_ratio": None,
    }  # fmt: skip


def test_of_two_routers_the_newest_report_of_a_replica_counts() -> None:
    state = State()
    old, new = seen("a", age_s=0.4, num_running=1), seen("a", age_s=0.1, num_running=2)
    state.advance([view("one", old), view("two", new)], NOBODY, 10.0)
    assert [(row["running"], row["report_age_s"]) for row in state.snapshot["replicas"]] == [(2, 0.1)]
    assert [router["id"] for router in state.snapshot["routers"]] == ["one", "two"]
    state.check()


def test_a_replicas_attention_is_shown_with_the_reason_once_it_is_known() -> None:
    state = State()
    state.advance([view("one", seen("a"))], details(listed("b", "unified")), 10.0)
    rows = by_id(state)
    assert (rows["a"]["attention"], rows["a"]["attention_why"]) == ("cpu", "the fast one of this device")
    assert (rows["b"]["attention"], rows["b"]["attention_why"]) == (None, None)  # starting


def test_a_pools_states_are_in_tokens_and_sum_to_its_capacity() -> None:
    state = State()
    state.advance([view("one", seen("a", used_pages=3))], NOBODY, 10.0)
    [pool] = by_id(state)["a"]["pools"]
    assert pool == {
        "tier": "L1", "capacity": 160, "free": 112, "evictable": 0, "protected": 48, "reserved": 0, "quarantined": 0,
    }  # fmt: skip
    assert state.snapshot["history"] == {"times": [10.0], "used": {"a": [0.3]}}
    assert state.snapshot["totals"]["fullest_pool_ratio"] == 0.3
    state.check()


def test_the_host_tier_is_a_pool_and_what_the_tiers_did_is_told() -> None:
    state = State()
    tiers = TierStats(host_pages=20, host_used_pages=5, store="disk", store_bytes=7000, host_hit_tokens=480,
                      store_hit_tokens=32, saved_s=1.2345, store_wrong_pages=1, store_error="no space")  # fmt: skip
    state.advance([view("one", seen("a", used_pages=3, tiers=tiers))], NOBODY, 10.0)
    row = by_id(state)["a"]
    assert [(pool["tier"], pool["capacity"], pool["free"], pool["evictable"]) for pool in row["pools"]] == [
        ("L1", 160, 112, 0), ("L2", 320, 240, 80),
    ]  # fmt: skip
    assert row["tiers"] == {
        "host_hit_tokens": 480, "store_hit_tokens": 32, "saved_s": 1.23, "wrong_pages": 1, "store_bytes": 7000,
        "store_error": "no space",
    }  # fmt: skip
    assert state.snapshot["totals"]["fullest_pool_ratio"] == 0.3  # of the devices
    state.check()


def test_a_router_that_is_silent_for_a_moment_takes_nothing_away_and_is_shown_as_silent() -> None:
    state = State()
    serve = details(listed("one", "router"))
    state.advance([view("one", seen("a", age_s=0.1))], serve, 10.0)
    state.advance([], serve, 12.0)
    assert [router["answering"] for router in state.snapshot["routers"]] == [False]
    assert by_id(state)["a"]["report_age_s"] == 2.1
    assert [target.process_id for target in state.merged.targets()] == ["a", "one"]
    state.advance([], serve, 41.0)  # more than 30 s
    assert state.snapshot["replicas"] == []
    assert [router["id"] for router in state.snapshot["routers"]] == ["one"]  # Serve still lists it


def test_a_router_that_serve_no_longer_lists_is_gone_at_once_and_nobody_knows_how_its_open_requests_ended() -> None:
    state = State()
    rows = (row("x", time=9.0, outcome="running", router="one"), row("y", time=9.5, outcome="running", router="two"))
    state.advance([view("one", rows=rows[:1]), view("two", rows=rows[1:])],
                  details(listed("one", "router"), listed("two", "router")), 10.0)  # fmt: skip
    state.advance([view("two")], details(listed("two", "router")), 11.0)
    assert [router["id"] for router in state.snapshot["routers"]] == ["two"]
    assert {each["rid"]: each["outcome"] for each in state.snapshot["requests"]} == {"x": "unknown", "y": "running"}


def test_replicas_that_only_serve_knows_start_or_drain() -> None:
    state = State()
    serve = details(listed("new", state="STARTING"), listed("old", state="STOPPING"), listed("a"))
    state.advance([view("one", seen("a"), seen("b", age_s=None))], serve, 10.0)
    assert {name: row["state"] for name, row in by_id(state).items()} == {
        "a": "accepting", "b": "starting", "new": "starting", "old": "draining",
    }  # fmt: skip
    assert by_id(state)["new"]["running"] is None
    assert by_id(state)["new"]["pools"] == []
    assert by_id(state)["new"]["node"] == "01234567"


def test_each_router_is_asked_for_what_came_after_its_own_last_answer() -> None:
    state = State()
    state.advance([view("one", seq=7), view("two", seq=90)], NOBODY, 10.0)
    assert state.merged.since == {"one": 7, "two": 90}


def test_rates_are_over_the_last_five_seconds_and_begin_anew_when_a_counter_goes_back() -> None:
    rates = Rates()
    for second in range(11):
        rates.add("a", float(second), (100 * second, 0))
    assert rates.of("a") == (100.0, 0.0)
    rates.add("a", 11.0, (1000, 50))  # nothing in the first, 50 in the second
    assert rates.of("a") == (pytest.approx(400 / 5), 10.0)
    rates.add("a", 12.0, (10, 0))  # a new life
    assert rates.of("a") is None
    rates.add("a", 13.0, (40, 1))
    assert rates.of("a") == (30.0, 1.0)
    rates.check()
    rates.keep([])
    assert rates.of("a") is None


def test_history_holds_five_minutes_and_null_where_a_replica_was_not_there() -> None:
    history = History()
    for second in range(302):
        history.add(float(second), {"b": 0.5} if second == 301 else {"a": 0.25})
    series = history.series()
    assert (len(series["times"]), series["times"][0], series["times"][-1]) == (300, 2.0, 301.0)
    assert series["used"]["a"][-2:] == [0.25, None]
    assert series["used"]["b"][-2:] == [None, 0.5]
    assert History.of_series(series).series() == series
    history.check()


def test_totals_are_of_the_last_minute_and_a_request_counts_when_its_first_token_came() -> None:
    requests = Requests()
    requests.take([row(f"r{i}", time=100.0 + i, ttft_s=0.1 * (i + 1)) for i in range(10)], 110.0, 110.0)
    requests.take([row("early", time=40.0, ttft_s=65.0, cached_tokens=90)], 110.0, 110.0)  # its first token came at 105
    requests.take([row("old", time=40.0, ttft_s=1.0)], 110.0, 110.0)
    totals = requests.totals(110.0)
    assert totals["requests_per_s"] == pytest.approx(10 / 60, abs=0.001)
    assert (totals["ttft_p50_s"], totals["ttft_p90_s"]) == (0.6, 1.0)
    assert totals["reuse_ratio"] == pytest.approx((10 * 40 + 90) / 1100, abs=0.001)
    requests.take([], 180.0, 180.0)
    assert requests.totals(180.0)["ttft_p50_s"] is None
    assert len(requests.rows()) == 12  # shown until newer ones come
    requests.check()


def test_the_fifty_newest_requests_are_shown_newest_first() -> None:
    requests = Requests()
    requests.take([row(f"r{i}", time=float(i)) for i in range(60)], 60.0, 60.0)
    rows = requests.rows()
    assert (len(rows), rows[0]["rid"], rows[-1]["rid"]) == (50, "r59", "r10")
    requests.take([row("r59", time=59.0, outcome="failed"), row("r58", time=3.0, key="another")], 61.0, 61.0)
    assert [each["outcome"] for each in requests.rows()[:2]] == ["failed", "finished"]
    assert requests.rows()[1]["time"] == 58.0  # of two bearers of a name the last counts


def test_links_are_of_the_last_ten_seconds_and_each_hand_off_counts_once() -> None:
    requests = Requests()
    told = [hand_off("p", "d", num_bytes=5000, ok=False), hand_off("p", "e", num_bytes=20_000)]
    requests.take([row("x", time=99.0, outcome="running", hand_offs=told[:1])], 100.0, 100.0)
    requests.take([row("x", time=99.0, hand_offs=told)], 101.0, 101.0)
    assert requests.links() == [
        {"from": "p", "to": "d", "bytes_per_s": 500.0, "hand_offs_per_s": 0.0, "failed_per_s": 0.1},
        {"from": "p", "to": "e", "bytes_per_s": 2000.0, "hand_offs_per_s": 0.1, "failed_per_s": 0.0},
    ]
    assert all("hand_offs" not in each for each in requests.rows())
    requests.take([], 110.5, 110.5)
    assert [link["to"] for link in requests.links()] == ["e"]
    requests.take([], 112.0, 112.0)
    assert requests.links() == []
    requests.check()


def test_hand_offs_that_were_long_over_when_we_came_count_for_no_link() -> None:
    requests = Requests()
    requests.take([row("x", time=50.0, hand_offs=[hand_off("p", "d")])], 100.0, 100.0)
    assert requests.links() == []


def test_a_changed_target_is_logged_with_the_signal_that_asked_for_it() -> None:
    changes: list[tuple[str, str]] = []
    state = State(on_scaling=lambda role, direction: changes.append((role, direction)))
    rule = {"unified": {"min_replicas": 1.0, "max_replicas": 4.0, "ttft_objective_s": 5.0, "pool_high": 0.85,
                        "running_high": 0.9, "slack": 0.7}}  # fmt: skip
    busy = seen("a", waiting_uncached_tokens=18_000, prefill_tokens_per_s=2000.0)
    state.advance([view("one", busy, autoscaling=rule)], details(listed("a"), unified=1), 10.0)
    [target] = state.snapshot["autoscaling"]["targets"]
    assert target == {
        "role": "unified", "running": 1, "desired": 1, "minimum": 1, "maximum": 4,
        "pressure": {"queue": 1.8, "kv_pool": 0.0, "slots": 0.0},
    }  # fmt: skip
    assert state.snapshot["autoscaling"]["log"] == []
    state.advance([view("one", busy, autoscaling=rule)], details(listed("a"), unified=2), 12.0)
    state.advance([view("one", seen("a"), autoscaling=rule)], details(listed("a"), unified=1), 14.0)
    down, up = state.snapshot["autoscaling"]["log"]
    assert (up["from"], up["to"], up["time"]) == (1, 2, 12.0)
    assert up["reason"] == "18,000 prompt tokens wait, 1.8 times the work of 1 replica in 5 s"
    assert (down["from"], down["to"]) == (2, 1)
    assert down["reason"].startswith("less is needed: ")
    assert changes == [("unified", "up"), ("unified", "down")]


def test_a_scrape_in_the_middle_of_a_look_sees_all_roles() -> None:
    """Another thread reads `targets`; here the look itself does, between one role and the next."""
    scaling, scraped = Scaling(), list[list[str]]()

    class Looking(ServeDetails):
        def running(self, role: str) -> int:
            scraped.append([target["role"] for target in scaling.targets])
            return 1

    for time_s in (1.0, 2.0):
        scaling.take(Looking(desired={"prefill": 1, "decode": 1}), {}, {}, time_s)
    assert scraped == [[], [], ["prefill", "decode"], ["prefill", "decode"]]


def test_a_role_with_a_fixed_number_has_it_for_bounds_and_null_pressure_before_a_report() -> None:
    state = State()
    state.advance([view("one")], details(unified=2), 10.0)
    [target] = state.snapshot["autoscaling"]["targets"]
    assert (target["running"], target["minimum"], target["maximum"]) == (0, 2, 2)
    assert target["pressure"] == {"queue": None, "kv_pool": None, "slots": None}


def test_serves_own_form_is_read() -> None:
    deployments = {
        "ModelReplica": {
            "target_num_replicas": 3,
            "replicas": [{"replica_id": "abc", "state": "RUNNING", "node_id": "n1"}],
        },
        "Router": {"target_num_replicas": 1, "replicas": [{"replica_id": "rr", "state": "STARTING", "node_id": None}]},
        "Other": {"target_num_replicas": 1, "replicas": []},
    }
    found = details_of({"applications": {"manta": {"deployments": deployments}}}, "manta")
    assert found.desired == {"unified": 3}
    assert [(each.replica_id, each.role, each.state) for each in found.replicas] == [
        ("abc", "unified", "RUNNING"), ("rr", "router", "STARTING"),
    ]  # fmt: skip
    assert (found.running("unified"), found.running("router")) == (1, 0)
    assert details_of({"applications": {}}, "manta") == ServeDetails()
