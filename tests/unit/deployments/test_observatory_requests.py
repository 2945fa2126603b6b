"""Each request counts once, whatever it is called, whichever clock its router has, and however many come."""

from typing import Any

import pytest

from deployments.record.route_log import OBJECTIVES
from deployments.watch.observatory.figures import MOST_TTFTS, Recent
from deployments.watch.observatory.requests import MOST_ROWS, Requests
from deployments.watch.observatory.serve_details import ServeDetails
from deployments.watch.observatory.state import State
from replicas.types import TallyCounts
from tests.unit.deployments.observed import details, kv_transfer, listed, row, seen, view

NOBODY = ServeDetails()


class Told:
    """`Requests` with what they count, told rows of one second after the other."""

    def __init__(self) -> None:
        self.recent = Recent()
        self.requests = Requests(self.recent)
        self.version = 0

    def take(self, rows: list[dict[str, Any]], now_s: float) -> None:
        self.version += 1
        self.requests.take(rows, now_s, now_s, version=self.version, objectives=OBJECTIVES)

    def rids(self, since: int = 0) -> list[str]:
        return [row["rid"] for row in self.requests.rows(since)]


def test_a_running_request_shows_each_second_how_far_it_is() -> None:
    """Of several with one name, the one whose row is shown; one that ended is as its router told the end."""
    told = Told()
    for key, outcome in (("1", "running"), ("2", "ok")):
        told.take([row(f"r{key}", key=key, time=1000.0, outcome=outcome, output_tokens=1, last_s=0.5)], 1000.0)
    grown = {"output_tokens": 120, "itl_s": 0.1, "last_s": 12.0}
    told.requests.progress("one", {"1": grown, "2": grown, "other": grown}, version=9)
    assert [each["rid"] for each in told.requests.rows(since=told.version)] == ["r1"]
    assert [told.requests.row(rid)["output_tokens"] for rid in ("r1", "r2")] == [120, 1]  # type: ignore[index]
    told.requests.progress("one", {"1": grown}, version=10)
    told.requests.progress("two", {"1": grown | {"last_s": 13.0}}, version=10)
    assert told.rids(since=9) == [], "no new token, or another router's request"


def test_requests_that_are_called_alike_count_each() -> None:
    told = Told()
    for number in range(5):
        each = row("same", key=f"{number}", time=1000.0 + number, kv_transfers=[kv_transfer("p", "d")])
        told.take([each], 1000.0 + number)
    late = row("same", key="0", time=1000.0, ttft_s=4.5, total_s=4.5, kv_transfers=[kv_transfer("p", "d")])
    told.take([late], 1005.0)  # the first one changes once more
    assert told.recent.tokens == (500, 200)
    [link] = told.requests.links()
    assert link["kv_transfers_per_s"] == 0.5  # 5 in 10 s
    assert [(each["rid"], each["time"]) for each in told.requests.rows()] == [("same", 1004.0)]
    told.requests.check()


@pytest.mark.parametrize("skew_s", [0.0, -12.0, -70.0, 70.0])
def test_a_routers_clock_that_is_wrong_changes_no_count_and_no_order(skew_s: float) -> None:
    state = State()
    for second in range(20):
        now_s = 1000.0 + second
        told = row(f"r{second}", time=now_s - 0.5 + skew_s, kv_transfers=[kv_transfer("p", "d")])
        right = row(f"s{second}", time=now_s - 0.6, router="two", cached_tokens=None, ttft_s=None)
        wrong = view("one", rows=(told,), time_s=now_s + skew_s)
        state.advance([wrong, view("two", rows=(right,), time_s=now_s)], NOBODY, now_s - 900.0, time_s=now_s)
    snapshot = state.since()
    figures = {each["name"]: each for each in snapshot["figures"]}
    assert figures["ttft"]["value"] == 0.5
    assert figures["hit"]["more"] == {"prompt_tokens": 2000, "cached_tokens": 800}
    assert snapshot["links"][0]["kv_transfers_per_s"] == 1.1  # 11 polls are within 10 s
    assert [each["rid"] for each in snapshot["requests"][-4:]] == ["s18", "r18", "s19", "r19"]
    assert snapshot["requests"][-1]["time"] == pytest.approx(1018.5)
    state.check()


def test_our_own_clock_may_jump_and_only_what_is_shown_jumps_with_it() -> None:
    """The wall clock is set back by an hour between two polls, which are a second apart."""
    state = State()
    for now_s, time_s in ((10.0, 9000.0), (11.0, 5400.0)):
        told = row(f"r{now_s:.0f}", time=time_s - 0.2, kv_transfers=[kv_transfer("p", "d")])
        replica = seen("a", age_s=0.1, prefill_tokens=int(100 * now_s))
        state.advance([view("one", replica, rows=(told,), time_s=time_s)], NOBODY, now_s, time_s=time_s)
        state.check()
    snapshot = state.since()
    assert snapshot["time"] == 5400.0
    assert [point[0] for point in snapshot["history"]["points"]] == [5400.0]
    assert snapshot["figures"][0]["more"]["p50"] == 0.5
    assert snapshot["links"][0]["kv_transfers_per_s"] == 0.2
    assert snapshot["replicas"][0]["rates"]["prefill_tokens_per_s"] == 100.0
    state.advance([], NOBODY, 12.0, time_s=99_000.0)
    assert [each["id"] for each in state.since()["replicas"]] == ["a"]  # it was heard a second ago


def test_the_quantiles_are_of_the_newest_first_tokens_where_very_many_come() -> None:
    told = Told()
    for second, ttft_s in ((1, 9.0), (2, 0.25)):
        rows = [row(f"r{second}.{i}", time=1000.0 + second, ttft_s=ttft_s) for i in range(MOST_TTFTS)]
        told.take(rows, 1012.0)
    values = told.recent.values(1012.0)
    assert (values["ttft_p50"], values["ttft_p99"], values["hit"]) == (0.25, 0.25, 0.4)
    told.requests.check()


def test_the_newest_thousand_are_shown_oldest_first_and_later_what_changed_since() -> None:
    told = Told()
    told.take([row(f"r{i}", time=float(i)) for i in range(MOST_ROWS + 10)], 1010.0)
    assert (len(told.rids()), told.rids()[0], told.rids()[-1]) == (MOST_ROWS, "r10", f"r{MOST_ROWS + 9}")
    told.take([row("r1009", time=1009.0, outcome="error"), row("r1008", time=30.0, key="another")], 1011.0)
    assert told.rids(since=1) == ["r1009"]  # of two bearers of a name the last counts
    assert told.rids(since=2) == []
    told.requests.lose([], version=3)
    assert told.rids(since=2) == []  # none was running
    told.requests.check()


def test_a_row_says_which_objectives_the_request_missed() -> None:
    told = Told()
    quick, slow = row("quick", ttft_s=0.5, itl_s=0.05), row("slow", ttft_s=2.5, itl_s=0.2)
    shed, broke = row("shed", ttft_s=None, outcome="shed"), row("broke", outcome="error")
    told.take([slow, quick, shed, broke, row("left", ttft_s=9.0, outcome="cancelled")], 10.0)
    missed = {each["rid"]: each["missed"] for each in told.requests.rows()}
    assert missed == {"slow": ["ttft", "itl"], "quick": [], "shed": ["ttft"], "broke": ["itl"], "left": []}


def test_links_are_of_the_last_ten_seconds_and_each_kv_transfer_counts_once() -> None:
    told = Told()
    requests = told.requests
    ends = [kv_transfer("p", "d", num_bytes=5000, ok=False), kv_transfer("p", "e", num_bytes=20_000)]
    told.take([row("x", time=99.0, outcome="running", kv_transfers=ends[:1])], 100.0)
    told.take([row("x", time=99.0, kv_transfers=ends)], 101.0)
    assert requests.links() == [
        {"from": "p", "to": "d", "bytes_per_s": 500.0, "kv_transfers_per_s": 0.0, "failed_per_s": 0.1},
        {"from": "p", "to": "e", "bytes_per_s": 2000.0, "kv_transfers_per_s": 0.1, "failed_per_s": 0.0},
    ]
    assert all("kv_transfers" not in each for each in requests.rows())
    told.take([], 110.5)
    assert [link["to"] for link in requests.links()] == ["e"]
    told.take([], 112.0)
    assert requests.links() == []
    requests.check()


def test_a_fetch_that_is_told_after_the_transfer_of_its_try_counts_and_the_transfer_once() -> None:
    """It stands before the transfer, which was counted when it stood alone."""
    told = Told()
    fetch, transfer = kv_transfer("d", "p"), kv_transfer("p", "d")
    told.take([row("x", time=99.0, outcome="running", kv_transfers=[transfer])], 100.0)
    told.take([row("x", time=99.0, kv_transfers=[fetch, transfer])], 101.0)
    told.take([row("x", time=99.0, kv_transfers=[fetch, transfer, transfer])], 102.0)
    shown = {(link["from"], link["to"]): link["kv_transfers_per_s"] for link in told.requests.links()}
    assert shown == {("d", "p"): 0.1, ("p", "d"): 0.2}


def test_a_router_that_hangs_keeps_no_replica_that_has_left() -> None:
    state = State()
    serve = details(listed("one", "router"), listed("two", "router"))
    state.advance([view("one", seen("a"), seen("b")), view("two", seen("a"), seen("b"))], serve, 1000.0)
    state.advance([view("one", seen("a"))], serve, 1005.0)
    assert [each["id"] for each in state.since()["replicas"]] == ["a"]
    assert [target.process_id for target in state.merged.targets()] == ["a", "one", "two"]
    state.advance([], serve, 1010.0)  # nobody answers: the last word of all stands, but what is lost stays lost
    assert [each["id"] for each in state.since()["replicas"]] == ["a"]


def test_gaps_of_a_router_that_has_left_are_forgotten() -> None:
    recent = Recent()
    for router in ("one", "two"):
        recent.gaps(router, TallyCounts(bounds=(1.0,), counts=(1, 0), total=0.5), 1.0)
    recent.keep({"two"})
    assert recent._gaps.keys() == {"two"}
