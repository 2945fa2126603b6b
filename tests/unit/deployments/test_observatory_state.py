"""The observatory's state: what routers and Serve say becomes one picture, with numbers that an eye can check."""

from typing import Any

import pytest

from deployments.batches.runner import SHOWN
from deployments.watch.observatory.figures import Rates
from deployments.watch.observatory.scaling import Scaling
from deployments.watch.observatory.serve_details import ServeDetails, details_of, live_view_of
from deployments.watch.observatory.state import State
from replicas.types import TierStats
from tests.fake_fleet import FakeFleet
from tests.unit.deployments.observed import details, listed, row, seen, view

NOBODY = ServeDetails()


def figure(state: State, name: str) -> dict[str, Any]:
    return next(each for each in state.since()["figures"] if each["name"] == name)


def by_id(state: State) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in state.since()["replicas"]}


def test_the_fake_fleet_of_the_pages_tests_has_the_form_of_the_state() -> None:
    state = State()
    state.advance([view("one", seen("a", used_pages=10), rows=(row("x"),))], details(listed("a"), unified=1), 10.0)
    real, fake = state.since(), FakeFleet(unified=2, requests_per_tick=1, ticks=9, slow=True).answer(0)
    assert fake.keys() == real.keys()
    assert fake["facts"].keys() <= real["facts"].keys()
    assert [(each["name"], each["more"].keys(), each.keys()) for each in fake["figures"]] == [
        (each["name"], each["more"].keys(), each.keys()) for each in real["figures"]
    ]
    assert fake["history"]["names"] == real["history"]["names"]
    assert FakeFleet(tenants=["a"]).answer(0)["batches"][0].keys() == set(SHOWN)
    for part in ("alerts", "replicas", "routers"):
        assert fake[part][0].keys() == real[part][0].keys(), part


def test_a_page_that_is_opened_gets_the_last_minutes_of_each_replica_and_one_that_polls_does_not() -> None:
    state = State(first_version=100)
    for second in range(400):
        running = second % 7
        state.advance([view("one", seen("a", num_running=running, used_pages=4))], NOBODY, float(second))
    past = state.since()["past"]
    assert [point[0] for point in past["a"]] == [float(at) for at in range(100, 400, 5)]  # of 300 s
    assert [point[1] for point in past["a"]] == [at % 7 for at in range(100, 400, 5)]
    assert past["a"][-1][4] == 0.4  # of its pool
    assert "past" not in state.since(state.version - 1)
    state.advance([view("one", seen("b"))], NOBODY, 400.0)
    assert list(state.since()["past"]) == ["b"]


def test_a_version_of_another_life_is_answered_with_all() -> None:
    state = State(first_version=100)
    for second in (1.0, 2.0):
        state.advance([view("one", seen("a"), rows=(row(f"r{second:.0f}", time=second),))], NOBODY, second)
    for stranger in (0, 7, 100, 103):
        assert (state.since(stranger)["whole"], len(state.since(stranger)["requests"])) == (True, 2)
    assert (state.since(101)["whole"], [each["rid"] for each in state.since(101)["requests"]]) == (False, ["r2"])
    assert state.since(102)["requests"] == state.since(102)["history"]["points"] == []
    assert State().version > 1_700_000_000  # from the calendar: a later life begins above all earlier ones


def test_viewers_are_counted_without_a_change_since_a_scrape_does_it_on_its_own_thread() -> None:
    state = State()
    for at_s in (10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0):  # two views, each polls once a second
        state.answer(0, zipped=False, now_s=at_s)
    assert [state.num_viewers(now_s) for now_s in (100.0, 13.0)] == [0, 2]


def test_batches_of_all_routers_are_shown_each_by_the_newest_answer() -> None:
    def told(number: int, done: int) -> dict[str, Any]:
        return {"id": f"batch_{number}", "created_at": number, "completed": done}

    state = State()
    state.advance([view("one", batches=[told(2, 0), told(1, 5)])], NOBODY, 10.0)
    state.advance([view("two", batches=[told(1, 7)])], NOBODY, 11.0)  # it has taken it over
    assert state.since()["batches"] == [told(1, 7), told(2, 0)]


def test_of_two_routers_the_newest_report_of_a_replica_counts() -> None:
    state = State()
    old, new = seen("a", age_s=0.4, num_running=1), seen("a", age_s=0.1, num_running=2)
    state.advance([view("one", old), view("two", new)], NOBODY, 10.0)
    assert [(row["running"], row["report_age_s"]) for row in state.since()["replicas"]] == [(2, 0.1)]
    assert [router["id"] for router in state.since()["routers"]] == ["one", "two"]
    state.check()


def test_a_replicas_attention_is_shown_with_the_reason_once_it_is_known() -> None:
    state = State()
    state.advance([view("one", seen("a"))], details(listed("b", "unified")), 10.0)
    rows = by_id(state)
    assert (rows["a"]["attention"], rows["a"]["attention_why"]) == ("cpu", "the fast one of this device")
    assert (rows["b"]["attention"], rows["b"]["attention_why"]) == (None, None)  # starting


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
    assert figure(state, "kv")["value"] == 0.3  # of the devices
    state.check()


def test_a_router_that_is_silent_for_a_moment_takes_nothing_away_and_is_shown_as_silent() -> None:
    state = State()
    serve = details(listed("one", "router"))
    state.advance([view("one", seen("a", age_s=0.1))], serve, 10.0)
    state.advance([], serve, 12.0)
    assert [router["answering"] for router in state.since()["routers"]] == [False]
    assert by_id(state)["a"]["report_age_s"] == 2.1
    assert [target.process_id for target in state.merged.targets()] == ["a", "one"]
    state.advance([], serve, 41.0)  # more than 30 s
    assert state.since()["replicas"] == []
    assert [router["id"] for router in state.since()["routers"]] == ["one"]  # Serve still lists it


def test_a_router_that_serve_no_longer_lists_is_gone_at_once_and_nobody_knows_how_its_open_requests_ended() -> None:
    state = State()
    rows = (row("x", time=9.0, outcome="running", router="one"), row("y", time=9.5, outcome="running", router="two"))
    state.advance([view("one", rows=rows[:1]), view("two", rows=rows[1:])],
                  details(listed("one", "router"), listed("two", "router")), 10.0)  # fmt: skip
    state.advance([view("two")], details(listed("two", "router")), 11.0)
    assert [router["id"] for router in state.since()["routers"]] == ["two"]
    assert {each["rid"]: each["outcome"] for each in state.since()["requests"]} == {"x": "unknown", "y": "running"}


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
    rates.keep([])
    assert rates.of("a") is None


def test_a_changed_target_is_logged_with_the_signal_that_asked_for_it() -> None:
    changes: list[tuple[str, str]] = []
    state = State(on_scaling=lambda role, direction: changes.append((role, direction)))
    rule = {"unified": {"min_replicas": 1.0, "max_replicas": 4.0, "ttft_objective_s": 5.0, "pool_high": 0.85,
                        "running_high": 0.9, "slack": 0.7}}  # fmt: skip
    busy = seen("a", waiting_uncached_tokens=18_000, prefill_tokens_per_s=2000.0)
    state.advance([view("one", busy, autoscaling=rule)], details(listed("a"), unified=1), 10.0)
    [target] = state.since()["autoscaling"]["targets"]
    assert target == {
        "role": "unified", "running": 1, "desired": 1, "minimum": 1, "maximum": 4,
        "pressure": {"queue": 1.8, "kv_pool": 0.0, "slots": 0.0},
    }  # fmt: skip
    assert state.since()["autoscaling"]["log"] == []
    state.advance([view("one", busy, autoscaling=rule)], details(listed("a"), unified=2), 12.0)
    state.advance([view("one", seen("a"), autoscaling=rule)], details(listed("a"), unified=1), 14.0)
    down, up = state.since()["autoscaling"]["log"]
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


def test_the_live_view_of_an_application_is_where_its_observatory_is_served() -> None:
    def watching(prefix: str | None, application: str) -> dict[str, Any]:
        config = {"args": {"application": application}}
        return {"route_prefix": prefix, "deployed_app_config": config, "deployments": {"Observatory": {}}}

    api = {"route_prefix": "/", "deployed_app_config": None, "deployments": {"Router": {}}}
    views = {"watch": watching("/manta", "manta"), "other": watching("/b/", "b"), "off": watching(None, "c")}
    served = {"manta": api, **views}
    found = {name: live_view_of({"applications": served}, name) for name in ("manta", "b", "c", "d")}
    assert found == {"manta": "/manta/", "b": "/b/", "c": None, "d": None}
