"""The feed of events: what happened to the replicas, told once, with what became of their requests."""

import io
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from deployments.command import announce
from deployments.fleet.seen import GoneReplica, SeenReplica
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.serve_details import Listed, ServeDetails
from deployments.watch.observatory.state import State
from tests.unit.deployments.observed import details, listed, row, seen, view

BOTH = details(listed("a"), listed("b"), unified=2)


class Told:
    """A state fed a second at a time, and what its feed says."""

    def __init__(self) -> None:
        self.deaths: Counter[str] = Counter()
        self.state = State(on_death=lambda role: self.deaths.update([role]), first_version=100)
        self.second = 0

    def go_on(self, views: list[RouterView], serve: ServeDetails = BOTH, *, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.state.advance(views, serve, 1000.0 + self.second, time_s=5000.0 + self.second)
            self.second += 1
        self.state.check()

    @property
    def kinds(self) -> list[tuple[str, str | None]]:
        return [(each["kind"], each["replica"]) for each in self.state.feed.body()]

    @property
    def last(self) -> str:
        return str(self.state.feed.body()[-1]["text"])


def gone(replica_id: str, *, died: bool) -> tuple[GoneReplica, ...]:
    return (GoneReplica(replica_id=replica_id, role="unified", died=died),)


def silent(replica_id: str) -> SeenReplica:
    return replace(seen(replica_id), state="silent", why="it has said nothing for 1.2 s")


def again(rid: str) -> dict[str, Any]:
    """A request that was left by a and went on at b."""
    tries = [{"replica": "a", "prefill": None, "start_s": 0.0, "end_s": 1.0, "failure": "ReplicaGone"},
             {"replica": "b", "prefill": None, "start_s": 1.0, "end_s": None, "failure": None}]  # fmt: skip
    return row(rid, replica="b", tries=2, tries_at=tries)


def test_a_fleet_that_was_there_before_the_observatory_is_no_news() -> None:
    told = Told()
    told.go_on([], BOTH)  # Serve has answered and no router yet
    told.go_on([view("one", seen("a"), seen("b"))], seconds=5)
    assert told.kinds == []


def test_a_start_is_told_and_when_it_is_ready() -> None:
    told = Told()
    told.go_on([], details(unified=1))
    told.go_on([], details(listed("a", state="STARTING"), unified=1), seconds=12)
    told.go_on([], details(listed("a"), unified=1))  # by Serve it runs; no router has met it
    told.go_on([view("one", seen("a"))], details(listed("a"), unified=1))
    assert told.kinds == [("start", "a"), ("ready", "a")]
    assert told.last == "replica 1 (a) is ready, after 13 s"


def test_a_death_is_counted_once_with_its_requests_and_another_takes_its_place() -> None:
    """Serve's list is some seconds old: it still has the dead one, which is shown no more. Two routers tell."""
    told = Told()
    told.go_on([view("one", seen("a"), seen("b")), view("two", seen("a"), seen("b"))])
    told.go_on([view("one", silent("a"), seen("b")), view("two", seen("a"), seen("b"))])
    lost = gone("a", died=True)
    told.go_on([view("one", seen("b"), gone=lost), view("two", seen("b"), gone=gone("a", died=False))])
    assert [each["id"] for each in told.state.since()["replicas"]] == ["b"]
    ended = {"id": "a", "name": "replica 1", "role": "unified", "time": 5002.0, "died": True}
    assert told.state.since()["ended"] == [ended]
    told.go_on([view("one", seen("b"), gone=lost, rows=(again("x"), again("y"), row("z", replica="b")))], seconds=2)
    assert told.last == "replica 1 (a) is lost; 2 requests went on elsewhere"
    assert told.deaths == {"unified": 1}
    now = details(listed("b"), listed("c", state="STARTING"), unified=2)
    told.go_on([view("one", seen("b"), gone=lost)], now, seconds=8)
    told.go_on([view("one", seen("b"), seen("c"), gone=lost)], now)
    kinds = [("lost", "a"), ("start", "c"), ("replaced", "c")]
    assert told.kinds[-3:] == kinds
    assert told.last == "replica 3 (c) is ready in the place of replica 1, 11 s after that one ended"
    told.go_on([view("one", seen("b"), seen("c"), gone=lost)], now, seconds=30)
    assert (told.kinds[-3:], told.deaths) == (kinds, {"unified": 1})
    told.second += 3600
    told.go_on([view("one", seen("b"), seen("c"))], now)
    assert (told.kinds, told.state.since()["ended"]) == ([], []), "an hour is over"


def test_a_name_is_kept_and_no_other_replica_has_it_within_an_hour() -> None:
    """The order of the first ones is that in which Serve started them, not that of their ids."""
    told = Told()
    begun = [replace(listed("b", role="decode"), started=1.0), replace(listed("a", role="decode"), started=2.0)]
    prefill = listed("p", role="prefill")

    def names(*there: Listed) -> dict[str, str]:
        views = [view("one", *(seen(each.replica_id, role=each.role) for each in there))]
        told.go_on(views, details(*there, decode=2, prefill=1), seconds=2)
        return {each["id"]: each["name"] for each in told.state.since()["replicas"]}

    assert names(*begun, prefill) == {"b": "decode 1", "a": "decode 2", "p": "prefill 1"}
    assert names(begun[1], prefill) == {"a": "decode 2", "p": "prefill 1"}  # b has died
    assert names(*begun[1:], prefill, listed("c", role="decode"))["c"] == "decode 3"
    assert [each["id"] for each in told.state.since()["replicas"]] == ["a", "c", "p"]  # by role and number
    told.second += 3600
    there = (begun[1], listed("c", role="decode"), prefill)
    assert names(*there) == {"a": "decode 2", "c": "decode 3", "p": "prefill 1"}
    assert names(*there, listed("d", role="decode"))["d"] == "decode 1", "an hour is over"


def test_a_router_that_ends_takes_no_replica_with_it() -> None:
    told = Told()
    told.go_on([view("one", seen("a"), seen("b"))])
    told.go_on([], seconds=40)
    told.go_on([view("two", seen("a", age_s=None), seen("b"))])
    told.go_on([view("two", seen("a"), seen("b"))])
    assert told.kinds == []
    told.go_on([], seconds=40)
    told.go_on([view("three", seen("b"))], details(listed("b"), unified=2))
    assert told.kinds == [("lost", "a")], "who could have told why has ended"


def test_a_silent_replica_that_speaks_again_has_not_died() -> None:
    told = Told()
    told.go_on([view("one", seen("a"), seen("b"))])
    told.go_on([view("one", silent("a"), seen("b"), rows=(again("x"),))], seconds=50)
    told.go_on([view("one", seen("a"), seen("b"))])
    assert [each["text"] for each in told.state.feed.body()] == [
        "replica 1 (a) is silent; 1 request went on elsewhere", "replica 1 (a) speaks again, after 50 s",
    ]  # fmt: skip
    assert not told.deaths


@pytest.mark.parametrize("long", [False, True])
def test_what_serve_stops_has_drained_and_is_no_death(long: bool) -> None:
    """An idle one is gone before the next look at Serve."""
    told = Told()
    told.go_on([view("one", seen("a"), seen("b"))])
    left = view("one", seen("b"), gone=gone("a", died=False))
    if long:
        told.go_on([left], details(listed("a", state="STOPPING"), listed("b"), unified=1), seconds=20)
        assert "a" in told.state.replica_ids
    told.go_on([left], details(listed("b"), unified=1), seconds=2)
    assert told.kinds == [("drains", "a"), ("drained", "a")]
    assert (told.deaths, told.state.since()["ended"][0]["died"]) == ({}, False)
    more = view("one", seen("b"), seen("c"))
    told.go_on([view("one", seen("b"), seen("c", age_s=None))], details(listed("b"), listed("c"), unified=2))
    told.go_on([more], details(listed("b"), listed("c"), unified=2))
    assert told.kinds[-1] == ("ready", "c"), "the place of one that drained is not vacant"


def test_a_start_long_after_a_death_is_no_replacement() -> None:
    told = Told()
    told.go_on([view("one", seen("a"), seen("b"))])
    told.go_on([view("one", seen("b"), gone=gone("a", died=True))])
    told.second += 700
    told.go_on([view("one", seen("b"), seen("c", age_s=None))], details(listed("b"), listed("c"), unified=2))
    told.go_on([view("one", seen("b"), seen("c"))], details(listed("b"), listed("c"), unified=2))
    assert told.kinds[-2:] == [("start", "c"), ("ready", "c")]


def test_a_member_that_left_and_is_back_is_told_once() -> None:
    told = Told()
    told.go_on([view("one", seen("a"), seen("b"))])
    told.go_on([view("one", seen("b"), gone=gone("a", died=False))])
    told.go_on([view("one", seen("a"), seen("b"), gone=gone("a", died=False))], seconds=5)
    assert told.kinds == [("drains", "a")]


def test_shedding_begins_and_ends_with_the_number_of_those_refused() -> None:
    told = Told()
    for second in range(40):
        shed = 3 * max(0, min(second - 4, 10))  # 3 a second from second 5 to 14
        told.go_on([view("one", seen("a"), seen("b"), counts={"requests": 10 * second, "shed": shed})])
    assert [each["kind"] for each in told.state.feed.body()] == ["shedding", "shed"]
    assert told.last.startswith("no more requests are refused; 30 were, in 1")


def test_the_numbers_of_events_grow_from_life_to_life() -> None:
    told = Told()
    told.go_on([view("one", seen("a"), seen("b"))])
    told.go_on([view("one", silent("a"), seen("b"))])
    told.go_on([view("one", seen("a"), seen("b"))])
    assert [each["seq"] for each in told.state.feed.body()] == [101, 102]
    assert [each["seq"] for each in told.state.feed.body(since=101)] == [102]


def test_the_console_prints_what_comes_after_its_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked, answers = io.StringIO(), list[str](), list[Any]()

    def urlopen(request: Any, timeout: float) -> io.StringIO:
        asked.append(request.full_url.partition("?")[2])
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return io.StringIO(answer)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    lines = announce.EventLines(["http://here/manta"], out)
    first = '{"events": [{"seq": 7, "time": 0, "text": "replica 1 (a) is ready"}]}'
    second = '{"events": [{"seq": 8, "time": 0, "text": "replica a is lost"}]}'
    answers += [OSError("it starts"), first, OSError("it restarts"), second, '{"events": []}']
    for _ in range(5):
        lines.look()
    assert [line.partition("] ")[2] for line in out.getvalue().splitlines()] == ["replica a is lost"]
    assert asked == ["since=0", "since=0", "since=7", "since=7", "since=8"]
