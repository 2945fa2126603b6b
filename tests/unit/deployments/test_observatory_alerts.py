"""The live view's alerts: each fires by the rule that Prometheus has (dashboards/alerts.py), without Prometheus."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dashboards.alerts import ALERTS, BOUNDS, SOURCES, Grew, Over, Share, Stands
from dashboards.files import LOOK, SCRAPE_S
from deployments.fleet.seen import GoneReplica, SeenReplica
from deployments.settings.groups import ReplicaSettings
from deployments.watch.observatory.alerts import OBJECTIVE_OF
from deployments.watch.observatory.figures import Growth
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.serve_details import ServeDetails
from deployments.watch.observatory.state import State
from kvtransfer.types import TransferStats
from replicas.config import SchedulerConfig
from replicas.types import AdapterStats, TierStats
from tests.unit.deployments.observed import details, listed, row, seen, view

ROUTERS = details(*(listed(name, "router") for name in ("one", "two", "three")), listed("a"), unified=1)
Make = Callable[[int], list[RouterView]]  # second -> what the routers answer
STEP_S = 5


class Watching:
    """A state that goes on from what routers answer, a step of STEP_S after the other."""

    def __init__(self, serve: ServeDetails | None = None) -> None:
        self.state = State()
        self.second = 0
        self.serve = details(listed("a"), unified=1) if serve is None else serve

    def go_on(self, seconds: int, make: Make) -> "Watching":
        for _ in range(0, seconds, STEP_S):
            self.state.advance(make(self.second), self.serve, 1000.0 + self.second, time_s=5000.0 + self.second)
            self.second += STEP_S
        self.state.check()
        return self

    @property
    def alerts(self) -> dict[str, tuple[str, str]]:
        return {each["name"]: (each["state"], each["summary"]) for each in self.state.since()["alerts"]}

    def figure(self, name: str) -> dict[str, Any]:
        return next(each for each in self.state.since()["figures"] if each["name"] == name)


def counting(**rates: float) -> Make:
    """A router whose counters grow so."""
    return lambda second: [view("one", seen("a"), counts={name: int(each * second) for name, each in rates.items()})]


def replica(**changes: Any) -> Make:
    return lambda second: [view("one", seen("a", **changes))]


def apart(prefill: str) -> Make:
    decode: SeenReplica = seen("d", role="decode")
    return lambda second: [view("one", decode, replace(seen("p", role="prefill"), state=prefill), mode="disaggregated")]


def handed(second: int) -> list[RouterView]:
    return [view("one", seen("a", transfer=TransferStats(receives_done=9 * second, receives_failed=second)))]


def sick(second: int) -> list[RouterView]:
    return [view("one", replace(seen("a"), state="unhealthy", why="CUDA error"), seen("b"))]


def mute(second: int) -> list[RouterView]:
    return [view("one", replace(seen("a"), state="silent", why="it has said nothing for 4.2 s"), seen("b"))]


def dying(second: int) -> list[RouterView]:
    """Two were there; one is gone after a minute, the other after two."""
    gone = tuple(GoneReplica(replica_id=each, role="unified", died=True) for each in "bc"[: second // 60])
    there = [seen(each) for each in "bc"[second // 60 :]]
    return [view("one", seen("a"), *there, gone=gone)]


def retracting(second: int) -> list[RouterView]:
    return [view("one", seen("a", retracted_tokens=20 * second, decode_tokens=100 * second))]


def wrong(second: int) -> list[RouterView]:
    return [view("one", seen("a", tiers=TierStats(host_pages=1, host_used_pages=0, store_wrong_pages=second)))]


def reloading(second: int) -> list[RouterView]:
    adapters = AdapterStats(held=("x",), num_bytes=9, num_loads=6 * second, num_dropped=6 * second, load_s=0.1)
    return [view("one", seen("a", adapters=adapters, num_finished=10 * second))]


def asking(second: int) -> list[RouterView]:
    rule = {"unified": {"min_replicas": 0.0, "max_replicas": 1.0, "ttft_objective_s": 5.0, "pool_high": 0.85,
                        "running_high": 0.9, "slack": 0.7}}  # fmt: skip
    return [view("one", seen("a", waiting_uncached_tokens=18_000, prefill_tokens_per_s=2000.0), autoscaling=rule)]


STALLED = {"id": "batch_1", "router": "one", "problem": "router.batch_folder has no room on its disk", "created_at": 1}
# alert -> what happens, seconds until it fires, its sentence
FIRING: dict[str, tuple[Make, int, str]] = {
    "NoRouter": (lambda second: [], 60, "No router answers"),
    "NoReadyReplica": (lambda second: [view("one", seen("a", age_s=None))], 60, "No replica of tiny accepts requests."),
    "NoPrefillReplica": (apart("starting"), 60, "tiny has decode replicas and no prefill replica"),
    "ReplicaSilent": (mute, 10, "A unified replica of tiny is silent (replica 1, a): it has said nothing for 4.2 s."),
    "ReplicaDeaths": (dying, 0, "Two or more unified replicas of tiny died within ten minutes."),
    "ReplicaUnhealthy": (sick, 0, "A unified replica of tiny is unhealthy (replica 1, a): CUDA error."),
    "TargetDown": (replica(), 30, "router three (and 1 more) does not answer."),
    "RequestErrors": (counting(requests=10, failed=1), 300, "10 % of the requests to tiny end with an error"),
    "RequestsShed": (counting(requests=10, shed=1), 120, "10 % of the requests to tiny are refused"),
    "TtftObjectiveBurn": (counting(ttft_judged=20, ttft_missed=9), 120, "45 % of the requests to tiny miss the TTFT "
                          "objective of 2 s."),
    "ItlObjectiveBurn": (counting(itl_judged=20, itl_missed=9), 120, "45 % of the requests to tiny miss the ITL "
                         "objective of 100 ms."),
    "AutoscalerAtMaximum": (asking, 600, "The unified replicas of tiny are at their maximum"),
    "TooFewReplicas": (lambda second: [replace(asking(second)[0], autoscaling={})], 600, "The unified replicas of tiny "
                       "are too few for the load, and their number is fixed at 1 (replicas.count)."),
    "KvPoolNearlyFull": (replica(used_pages=10), 120, "100 % of the KV pool of replica 1 (a) cannot be taken by"),
    "AdmissionBlocked": (replica(blocked="pool", num_waiting=7), 60, "Requests wait for room in the KV pool of repl"),
    "RetractionsHigh": (retracting, 300, "replica 1 (a) gives up 20 % as many tokens as it computes"),
    "KvTransferFailures": (handed, 300, "10 % of the KV transfers of tiny fail"),
    "KvTransferDamaged": (
        lambda second: [view("one", seen("a", transfer=TransferStats(digest_mismatches=second // 30)))], 0,
        "replica 1 (a) received K/V that differs"),
    "WrongPages": (wrong, 0, "replica 1 (a) read back a page from a lower tier"),
    "PagesLost": (lambda second: [view("one", seen("a", failed_checks=2 * second))], 0, "replica 1 (a) is idle, and"),
    "StepsFail": (lambda second: [view("one", seen("a", failed_steps=second))], 0, "Steps of replica 1 (a) have fail"),
    "StoreOff": (
        replica(tiers=TierStats(host_pages=1, host_used_pages=0, store="file", store_error="it hangs")), 0,
        "replica 1 (a) does not use its store: it hangs."),
    "AdaptersReloaded": (reloading, 600, "replica 1 (a) loads an adapter for 60 % of its requests"),
    "QuarantineDoesNotEnd": (replica(transfer=TransferStats(oldest_drain_s=301.0)), 60, "of replica 1 (a) for 301 s."),
    "RouterIndexStale": (counting(predicted=100, actual=50), 600, "Only 50 % of the reuse that the routers of tiny"),
    "BatchesStalled": (
        lambda second: [view("one", seen("a"), batches=[STALLED])], 10,
        "Router one of tiny cannot keep what batch requests became (router.batch_folder has no room on its disk)"),
    "RouterReportsOld": (replica(age_s=31.0), 15, "The newest report of replica 1 (a) is 31 s old."),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRING)
def test_an_alert_is_pending_for_as_long_as_its_rule_wants_and_then_fires(name: str) -> None:
    make, for_s, words = FIRING[name]
    alert = next(each for each in ALERTS if each.name == name)
    assert alert.for_s == for_s
    watching = Watching(ROUTERS if name == "TargetDown" else None)
    for _ in range(0, 1200, STEP_S):  # until it is true at all
        watching.go_on(STEP_S, make)
        if name in watching.alerts:
            break
    before = "firing" if not for_s else "seen" if alert.at_once else "pending"
    assert watching.alerts[name][0] == before
    watching.go_on(for_s - STEP_S, make)
    assert watching.alerts[name][0] == before
    watching.go_on(STEP_S, make)
    state, summary = watching.alerts[name]
    assert (state, words in summary) == ("firing", True), summary
    if alert.figure and alert.figure not in OBJECTIVE_OF:  # such a figure has the level of its value
        assert watching.figure(alert.figure)["level"] == alert.severity


def test_a_tile_has_the_colour_of_its_value_and_says_who_met_the_objective() -> None:
    """A median of 10 s is a warning in its first second; one of 0.5 s is none while the hour's burn still fires. Value
    and share are of the same first tokens, whatever the requests that ended have met."""
    for ttfts, met, level in (((10.0, 0.5, 10.0), 0.333, "warning"), ((0.5, 0.5, 10.0), 0.667, "ok")):
        rows = tuple(row(str(each), time=5000.0, ttft_s=ttft_s, total_s=None, outcome="running")
                     for each, ttft_s in enumerate(ttfts))  # fmt: skip
        make = lambda second, rows=rows: [  # noqa: E731
            view("one", seen("a"), rows=rows, counts={"ttft_judged": 20 * second, "ttft_missed": 0})
        ]
        watching = Watching().go_on(2 * STEP_S, make)
        found = watching.figure("ttft")
        assert (found["value"], found["objective"], found["met"], found["level"]) == (ttfts[0], 2.0, met, level)
    watching.go_on(300, counting(ttft_judged=20, ttft_missed=9))
    assert watching.alerts["TtftObjectiveBurn"][0] == "firing"
    assert watching.figure("ttft")["level"] == "idle"


def test_who_waits_for_room_is_counted_beside_the_pool_and_slots_are_no_lack_of_room() -> None:
    for blocked, number in (("pool", 7), ("slots", 0), ("", 0)):
        watching = Watching().go_on(STEP_S, replica(blocked=blocked, num_waiting=7))
        assert watching.figure("kv")["more"]["without_room"] == number
        assert ("AdmissionBlocked" in watching.alerts) == bool(number)


def test_all_alerts_are_judged_here_but_those_that_only_prometheus_can_see() -> None:
    assert {alert.name for alert in ALERTS} - FIRING.keys() == {"PoolVanished", "KeysFileFailed"}
    named = set[str]()
    for alert in ALERTS:
        if isinstance(alert.when, Share):
            named |= {alert.when.part, alert.when.of}
        elif isinstance(alert.when, Over | Grew):
            named.add(alert.when.source)
        else:
            assert isinstance(alert.when, Stands)
    assert named == SOURCES.keys()


def test_an_alert_fires_before_serve_or_the_fleet_end_what_it_tells_of() -> None:
    """A replica that hangs was unhealthy for 14 s, and then had another name: its alert wanted 30 s. Here for each
    condition that somebody ends the shortest time after which that happens, with the settings' defaults; all others
    stand for as long as what they tell of does."""
    scheduler, replicas = SchedulerConfig(), ReplicaSettings()
    checks = 3  # that fail until Serve takes a replica away
    ends_s = {
        "ReplicaSilent": scheduler.hang_kill_s,
        "ReplicaUnhealthy": checks * replicas.health_period_s,
        "TargetDown": min(scheduler.hang_kill_s, checks * replicas.health_timeout_s),
        "RouterReportsOld": scheduler.hang_kill_s - BOUNDS["RouterReportsOld"],
    }
    assert ends_s.keys() == {alert.name for alert in ALERTS if alert.at_once}
    look_s = SCRAPE_S + float(LOOK.removesuffix("s"))  # until Prometheus has looked
    for alert in ALERTS:
        if alert.name in ends_s:
            seen_s = look_s if alert.for_s else 0.0  # with 0 s the first look at it fires
            assert alert.for_s + seen_s < ends_s[alert.name], alert.name


def test_nothing_is_wrong_with_a_fleet_that_works() -> None:
    busy = counting(requests=10, ttft_judged=10, ttft_missed=1, itl_judged=10, predicted=100, actual=95)
    watching = Watching().go_on(1200, busy)
    assert watching.alerts == {}
    assert {each["level"] for each in watching.state.since()["figures"]} <= {"ok", "idle"}


@pytest.mark.parametrize(("make", "name"), [(mute, "ReplicaSilent"), (sick, "ReplicaUnhealthy"),
                                            (replica(age_s=31.0), "RouterReportsOld")])  # fmt: skip
@pytest.mark.parametrize("lasted_s", [5, 60])
def test_an_alert_of_a_state_ends_with_it_and_grows_no_older_afterwards(make: Make, name: str, lasted_s: int) -> None:
    """A replica that was silent for two seconds was said to be so, as critical, for 15 s after it had gone on."""
    watching = Watching().go_on(lasted_s, make)
    assert name in watching.alerts
    for _ in range(6):
        assert watching.go_on(STEP_S, replica()).alerts == {}
    assert watching.go_on(STEP_S, make).alerts[name][0] == ("firing" if name == "ReplicaUnhealthy" else "seen")


@pytest.mark.parametrize(("name", "bad", "good"), [
    ("AdmissionBlocked", replica(blocked="pool", num_waiting=7), replica()),
    ("KvPoolNearlyFull", replica(used_pages=10), replica(used_pages=7)),
])  # fmt: skip
def test_a_pool_that_frees_a_page_now_and_then_is_judged_by_its_average(name: str, bad: Make, good: Make) -> None:
    """Each such moment began the alert anew, so that it never fired; and now and then a full moment is no alert."""
    watching = Watching()
    for _ in range(20):
        watching.go_on(45, bad).go_on(STEP_S, good if name == "AdmissionBlocked" else bad)
    assert watching.alerts[name][0] == "firing"
    rare = Watching()
    for _ in range(20):
        rare.go_on(STEP_S, bad).go_on(15, good)
    assert rare.alerts == {}


def test_five_bad_minutes_after_a_good_hour_burn_no_budget() -> None:
    good, bad = 3600, 300

    def judged(second: int) -> list[RouterView]:
        missed = max(0, second - good) * 10
        return [view("one", seen("a"), counts={"ttft_judged": 10 * second, "ttft_missed": missed})]

    assert "TtftObjectiveBurn" not in Watching().go_on(good + bad, judged).alerts


def test_a_replica_that_is_lost_and_seen_again_begins_anew() -> None:
    def wrong(second: int) -> list[RouterView]:
        pages = 2 * (second >= 50) + (second >= 740)
        tiers = TierStats(host_pages=10, host_used_pages=0, host_wrong_pages=pages)
        return [] if 700 <= second < 735 else [view("one", seen("a", tiers=tiers))]

    watching = Watching().go_on(55, wrong)
    assert watching.alerts["WrongPages"][0] == "firing"
    watching.go_on(685, wrong)  # the ten minutes are over; then no router is heard for more than 30 s
    assert "WrongPages" not in watching.alerts
    assert watching.go_on(10, wrong).alerts["WrongPages"][0] == "firing"  # one more page


def test_an_older_report_of_a_replica_is_no_restart() -> None:
    state = State()
    counted = [(0.1, 1000), (0.1, 2000), (5.0, 1500), (0.1, 2100)]  # a report's age, and all retracted tokens in it
    for second, (age_s, tokens) in enumerate(counted):
        one = view("one", seen("a", age_s=age_s, retracted_tokens=tokens))
        state.advance([one], details(), 100.0 + second)
    assert state._replica_growth.over("retracted", 60.0, 103.0, subject="a") == 1100


def test_growth_is_that_of_the_window_and_a_restarted_source_begins_anew() -> None:
    growth = Growth(step_s=1.0, kept_s=60.0)
    for second in range(100):
        growth.take("one", {"requests": 1000 + 2 * second})  # what was counted before is not ours
        growth.take("two", {"requests": 3 * (second % 50)})  # it starts anew at 50
        growth.sample(float(second))
        growth.check()
    assert growth.over("requests", 10.0, 99.0) == 50
    assert growth.over("requests", 1000.0, 99.0) == pytest.approx(60 * 5, abs=8)  # of what is kept
    assert growth.over("unheard", 10.0, 99.0) == 0
    growth.keep(["one"])
    growth.take("two", {"requests": 7})  # another life again: it only says where it begins
    assert growth.over("requests", 10.0, 99.0) == 50
