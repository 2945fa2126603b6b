"""The feed of events: what happened to the replicas, told once, with what became of their requests."""

import asyncio
import io
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from deployments.command import announce
from deployments.fleet.seen import GoneReplica, SeenReplica
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.serve_details import Helper, Listed, Looks, ServeDetails, details_of
from deployments.watch.observatory.state import State
from deployments.watch.observatory.watch import Watch
from tests.unit.deployments.observed import details, listed, row, seen, view

BOTH = details(listed("a"), listed("b"), unified=2)


class Told:
    """A state fed a second at a time, and what its feed says."""

    def __init__(self) -> None:
        self.deaths: Counter[str] = Counter()
        self.state = State(on_death=lambda role: self.deaths.update([role]), first_version=100)
        self.second, self.zero_s = 0, 1000.0

    def go_on(self, views: list[RouterView], serve: ServeDetails = BOTH, *, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.state.advance(views, serve, self.zero_s + self.second, time_s=5000.0 + self.second)
            self.second += 1
        self.state.check()

    @property
    def kinds(self) -> list[tuple[str, str | None]]:
        return [(each["kind"], each["replica"]) for each in self.state.feed.body()]

    @property
    def last(self) -> str:
        return str(self.state.feed.body()[-1]["text"])


def both_seen() -> Told:
    """Fed with one second in which a router has met a and b."""
    told = Told()
    told.go_on([view("one", seen("a"), seen("b"))])
    return told


def gone(replica_id: str, *, died: bool) -> tuple[GoneReplica, ...]:
    return (GoneReplica(replica_id=replica_id, role="unified", died=died),)


def silent(replica_id: str) -> SeenReplica:
    return replace(seen(replica_id), state="silent", why="it has said nothing for 1.2 s")


def again(rid: str) -> dict[str, Any]:
    """A request that was left by a and went on at b."""
    tries = [{"replica": "a", "prefill": None, "start_s": 0.0, "end_s": 1.0, "failure": "ReplicaGone"},
             {"replica": "b", "prefill": None, "start_s": 1.0, "end_s": None, "failure": None}]  # fmt: skip
    return row(rid, replica="b", tries=2, tries_at=tries)


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


def test_a_silent_replica_that_speaks_again_has_not_died() -> None:
    told = both_seen()
    told.go_on([view("one", silent("a"), seen("b"), rows=(again("x"),))], seconds=50)
    told.go_on([view("one", seen("a"), seen("b"))])
    assert [each["text"] for each in told.state.feed.body()] == [
        "replica 1 (a) is silent; 1 request went on elsewhere", "replica 1 (a) speaks again, after 50 s",
    ]  # fmt: skip
    assert not told.deaths


@pytest.mark.parametrize("long", [False, True])
def test_what_serve_stops_has_drained_and_is_no_death(long: bool) -> None:
    """An idle one is gone before the next look at Serve."""
    told = both_seen()
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
    told = both_seen()
    told.go_on([view("one", seen("b"), gone=gone("a", died=True))])
    told.second += 700
    told.go_on([view("one", seen("b"), seen("c", age_s=None))], details(listed("b"), listed("c"), unified=2))
    told.go_on([view("one", seen("b"), seen("c"))], details(listed("b"), listed("c"), unified=2))
    assert told.kinds[-2:] == [("start", "c"), ("ready", "c")]


def test_a_member_that_left_and_is_back_is_told_once() -> None:
    told = both_seen()
    told.go_on([view("one", seen("b"), gone=gone("a", died=False))])
    told.go_on([view("one", seen("a"), seen("b"), gone=gone("a", died=False))], seconds=5)
    assert told.kinds == [("drains", "a")]


def test_batches_that_wait_for_their_folder_are_told_once_and_when_they_go_on() -> None:
    told = Told()
    for problem in ("", "no room", "no room", ""):
        batch = {"id": "b", "router": "one", "created_at": 1, "problem": problem}
        told.go_on([view("one", seen("a"), batches=[batch])])
    assert [(each["kind"], each["text"]) for each in told.state.feed.body()] == [
        ("stalled", "batches wait: no room"), ("went_on", "batches wait no more"),
    ]  # fmt: skip


def test_shedding_begins_and_ends_with_the_number_of_those_refused() -> None:
    told = Told()
    for second in range(40):
        shed = 3 * max(0, min(second - 4, 10))  # 3 a second from second 5 to 14
        told.go_on([view("one", seen("a"), seen("b"), counts={"requests": 10 * second, "shed": shed})])
    assert [each["kind"] for each in told.state.feed.body()] == ["shedding", "shed"]
    assert told.last.startswith("no more requests are refused; 30 were, in 1")


def test_the_numbers_of_events_grow_from_life_to_life() -> None:
    told = both_seen()
    told.go_on([view("one", silent("a"), seen("b"))], seconds=4)
    told.go_on([view("one", seen("a"), seen("b"))])
    assert [each["seq"] for each in told.state.feed.body()] == [101, 102]
    assert [each["seq"] for each in told.state.feed.body(since=101)] == [102]


def test_one_death_is_one_event_and_a_request_that_went_on_is_counted_once() -> None:
    """A killed process is silent for two seconds. A stopped one is silent, then in an endless step, then lost: six
    requests went on, and three events told of six each."""
    told, moved = both_seen(), (again("x"), again("y"))
    told.go_on([view("one", silent("a"), seen("b"))], seconds=2)
    told.go_on([view("one", seen("b"), gone=gone("a", died=True), rows=moved)], seconds=3)
    assert told.kinds == [("lost", "a")]
    assert told.last == "replica 1 (a) is lost; 2 requests went on elsewhere"

    stopped = both_seen()
    stopped.go_on([view("one", silent("a"), seen("b"), rows=moved)], seconds=9)
    endless = replace(seen("a"), state="unhealthy", why="its step has been running for 31.1 s")
    stopped.go_on([view("one", endless, seen("b"), rows=moved)], seconds=5)
    stopped.go_on([view("one", seen("b"), gone=gone("a", died=True), rows=moved)], seconds=3)
    assert stopped.kinds == [("silent", "a"), ("unhealthy", "a"), ("lost", "a")]
    assert [each["requests"] for each in stopped.state.feed.body()] == [2, 0, 0]

    held_up = both_seen()
    held_up.go_on([view("one", silent("a"), seen("b"))], seconds=2)
    held_up.go_on([view("one", endless, seen("b"))])
    held_up.go_on([view("one", seen("a"), seen("b"))], seconds=5)
    assert held_up.kinds == [], "a moment"


HELPERS = {
    "controller_info": {"worker_id": "w1"},
    "proxies": {"n1": {"actor_id": "h1", "node_ip": "10.0.0.1", "status": "HEALTHY"}},
    "applications": {"manta": {"status": "RUNNING", "deployments": {"Router": {"target_num_replicas": 1, "replicas": [
        {"replica_id": "m#Router#r1", "state": "RUNNING", "actor_id": "a1"}]}}}},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "new", "end", "said"), [
    ("router", {"m#Router#r2": "a2"}, "WORKER_DIED", [
        "router r1 has died; Serve starts it anew", "router r2 stands in for router r1, 7 s after that one had died"]),
    ("router", {"m#Router#r2": "a2"}, "RAY_KILL", []),  # a deploy: Serve has ended it
    ("haproxy", {"n1": "h2"}, "WORKER_DIED", ["the manager of HAProxy on 10.0.0.1 has died; Serve starts both anew",
                                               "HAProxy on 10.0.0.1 is there again, 7 s after that one had died"]),
    ("haproxy", {"n1": "h2"}, "RAY_KILL", ["HAProxy on 10.0.0.1 has died; Serve starts both anew",
                                            "HAProxy on 10.0.0.1 is there again, 7 s after that one had died"]),
    ("controller", {"w": "w2"}, "", ["Serve's controller has died; Ray starts it anew",
                                      "Serve's controller is there again"]),
])  # fmt: skip
def test_the_death_of_a_process_beside_the_replicas_is_an_event_and_a_stop_is_none(
    kind: str, new: dict[str, str], end: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    told, serve, now_s = Told(), json.loads(json.dumps(HELPERS)), [0.0]
    looks = Looks("manta", ask=lambda: serve, end_of=lambda actor_id: end, clock=lambda: now_s[0])

    def look(seconds: int) -> None:
        now_s[0] += 5
        told.go_on([view("m#Router#r1", seen("a"))], looks.look(), seconds=seconds)

    look(5)
    [(key, life)] = new.items()
    if kind == "router":
        replicas = serve["applications"]["manta"]["deployments"]["Router"]["replicas"]
        replicas[:] = [{"replica_id": key, "state": "STARTING", "actor_id": life}]
    elif kind == "haproxy":
        serve["proxies"][key] = {"actor_id": life, "node_ip": "10.0.0.1", "status": "STARTING"}
    else:
        serve["controller_info"]["worker_id"] = life
        serve["proxies"]["n1"]["status"] = "STARTING"  # the new one has not asked it yet
    look(7)
    if kind == "router":
        replicas[0]["state"] = "RUNNING"
    else:
        serve["proxies"]["n1"]["status"] = "HEALTHY"
    look(5)
    assert [each["text"] for each in told.state.feed.body()] == said
    assert not told.deaths, "those are of model replicas"


def test_a_deploy_that_failed_is_told_once_with_our_own_words() -> None:
    trace = "Deploying app 'manta' failed with exception:\nTraceback (most recent call last):\n  File x\n"
    said = "InvalidConfig: scheduler.max_runing_requests: no such setting; max_running_requests?"
    ours = f"{trace}replicas.errors.{said}"
    told, application = Told(), {"status": "DEPLOY_FAILED", "message": ours}
    views = [view("one", seen("a"), seen("b"))]
    told.go_on(views)
    for message in (ours, ours, f"{trace}OSError: models/none is not there"):
        application["message"] = message
        failed = details_of({"applications": {"manta": application}}, "manta")
        told.go_on(views, replace(BOTH, failure=failed.failure), seconds=5)
    first, second = (each["text"] for each in told.state.feed.body())
    assert first == f"a deploy failed; what ran before goes on: {said}"
    assert second.endswith("OSError: models/none is not there")
    told.go_on(views, seconds=5)
    told.go_on(views, replace(BOTH, failure=failed.failure))
    assert len(told.kinds) == 3, "another one, after one that went well"


def test_events_names_and_what_died_meanwhile_outlive_the_observatory() -> None:
    """The next process has another clock, and has not asked Serve or a router yet."""
    helpers = {"w1": Helper(name="Serve's controller", place="controller", actor_id="")}
    before, kept = Told(), list[bytes]()
    before.go_on([view("one", seen("a"), seen("b"))])
    now = details(listed("b"), listed("c"), unified=2)
    before.go_on([view("one", seen("b"), gone=gone("a", died=True))], details(listed("b"), unified=2), seconds=3)
    before.go_on([view("one", seen("b"), seen("c"))], now, seconds=5)

    async def keep(told: Told, restored: bytes = b"") -> None:
        watch = Watch(routers=None, look=lambda: BOTH, state=told.state, keep=kept.append,  # type: ignore[arg-type]
                      clock=lambda: told.zero_s + told.second, calendar=lambda: 5000.0 + told.second)  # fmt: skip
        watch.restore(restored)
        keeping = asyncio.create_task(watch._keep_forever())
        while not kept:
            await asyncio.sleep(0)
        keeping.cancel()

    asyncio.run(keep(before))
    names = {each["id"]: each["name"] for each in before.state.since()["replicas"]}
    assert names == {"b": "replica 2", "c": "replica 3"}

    after = Told()
    after.second, after.zero_s = before.second + 20, 400.0
    asyncio.run(keep(after, kept[-1]))
    assert after.state.feed.body() == before.state.feed.body()
    after.go_on([], ServeDetails())  # nobody has answered yet
    after.go_on([view("one", seen("b"), seen("c"))], ServeDetails())
    lost = gone("c", died=True)
    after.go_on([view("one", seen("b"), gone=lost)], replace(now, helpers=helpers), seconds=2)
    new = {each["id"]: each["name"] for each in after.state.since()["replicas"]}
    assert new["b"] == "replica 2"
    assert after.kinds == [*before.kinds, ("lost", "c")]
    assert after.state.feed.body()[-1]["seq"] > before.state.feed.body()[-1]["seq"]
    assert {each["name"] for each in after.state.since()["ended"]} == {"replica 1", "replica 3"}
    assert [each["name"] for each in after.state.since()["alerts"]] == ["ReplicaDeaths"], "two within ten minutes"


@pytest.mark.parametrize("kept", [b"{", b"[1, 2]", b'[1.0, {"events": [{}]}]', b"\xff", b"[0, {}]"])
def test_what_was_kept_in_another_form_is_left_out(kept: bytes) -> None:
    told = Told()
    Watch(routers=None, look=lambda: BOTH, state=told.state).restore(kept)  # type: ignore[arg-type]
    told.go_on([view("one", seen("a"), seen("b"))], seconds=3)
    assert told.kinds == []


def test_the_console_prints_what_comes_after_its_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked, answers = io.StringIO(), list[str](), list[Any]()

    def opened(request: Any, *, timeout_s: float, is_ours: bool) -> io.StringIO:
        asked.append(request.full_url.partition("?")[2])
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return io.StringIO(answer)

    monkeypatch.setattr(announce, "opened", opened)
    lines = announce.EventLines(["http://here/manta"], out)
    first = '{"events": [{"seq": 7, "time": 0, "text": "replica 1 (a) is ready"}]}'
    told = '{{"seq": {}, "time": 0, "text": "{}", "requests": {}}}'
    lost = told.format(8, "replica 1 (a) is lost", 0)
    one, both = (told.format(8, f"replica 1 (a) is lost; {n} went on", n) for n in (1, 2))
    starts, silent = told.format(9, "replica 3 (c) starts", "null"), told.format(10, "replica 2 (b) is silent", 0)
    answers += [OSError("it starts"), first, OSError("it restarts")]
    answers += [f'{{"events": [{events}]}}' for events in (
        lost, f"{one}, {starts}", f"{both}, {starts}", f"{both}, {starts}, {silent}", *[silent] * 5, "")]  # fmt: skip
    for _ in range(len(answers)):
        lines.look()
    assert out.getvalue().splitlines() == [  # the count stands still; of a silent one nothing went on
        "[1970-01-01 00:00:00 UTC] replica 1 (a) is lost; 2 went on", "[1970-01-01 00:00:00 UTC] replica 3 (c) starts",
        "[1970-01-01 00:00:00 UTC] replica 2 (b) is silent",
    ]  # fmt: skip
    assert asked[:4] == ["since=0", "since=0", "since=7", "since=7"]
    assert asked[-1] == "since=10"
