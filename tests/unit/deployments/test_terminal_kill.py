"""`kill`: which replica a name means, and what is said while it dies and is replaced."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from deployments.watch.terminal import ask, kill
from tests.unit.deployments.listening import answering
from tests.unit.deployments.pseudo_terminal import manta
from tests.unit.deployments.test_terminal_top import replica, state

REPLICAS = [
    replica("abcd"), replica("bcde", name="replica 2"), replica("cdef", role="decode", name="decode 1"),
    replica("cdxf", role="decode", name="decode 3"),
]  # fmt: skip
LOST = {"seq": 8, "kind": "lost", "replica": "bcde", "role": "unified", "text": "replica 2 (bcde) is lost; 2 requests "
        "went on elsewhere"}  # fmt: skip
REPLACED = {"seq": 9, "kind": "replaced", "replica": "new", "role": "unified", "text": "replica new is ready in the "
            "place of bcde, 23 s after that one ended"}  # fmt: skip
OLD = {**REPLACED, "seq": 7, "text": "an earlier one"}
OTHER = {**REPLACED, "seq": 8, "role": "decode", "text": "of another role"}


class Observatory:
    """Answers as one; ``later``: the events of each state after the kill, one after the other."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.later: list[list[dict[str, Any]]] = []
        self.refusal: tuple[int, str, str] | None = None  # status, code and message of a kill
        self.hides_facts = False
        self.url = ""

    def respond(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        self.asked.append((path, headers.get("Authorization")))
        if path.startswith("/manta/api/state"):
            killed = any(each.endswith("/kill") for each, _ in self.asked)
            events = self.later.pop(0) if killed and self.later else [OLD]
            return 200, json.dumps(state(replicas=REPLICAS, events=events)).encode()
        if path.endswith("/kill") and self.refusal is not None:
            status, code, message = self.refusal
            return status, json.dumps({"error": {"code": code, "message": message}}).encode()
        if self.hides_facts and not path.endswith("/kill"):
            return 503, json.dumps({"error": {"code": "not_readable", "message": "node n did not answer"}}).encode()
        facts = {"pid": 4711, "address": "10.0.0.1"}
        return 200, json.dumps({"message": "its process has ended"} if path.endswith("/kill") else facts).encode()

    def was_killed(self) -> list[str]:
        return [path for path, _ in self.asked if path.endswith("/kill")]


@pytest.fixture
def observatory() -> Iterator[Observatory]:
    made = Observatory()
    with answering(made.respond) as port:
        made.url = f"http://127.0.0.1:{port}"
        yield made


def killed(observatory: Observatory, name: str, key: str | None = None) -> int:
    now_s = iter(range(1000))
    return kill.run(
        observatory.url, name, key, sure=True, for_s=5.0, sleep=lambda _: None, clock=lambda: float(next(now_s))
    )


def test_a_replica_is_meant_by_its_name_its_id_or_the_number_or_a_part_that_no_other_has() -> None:
    names = ("abcd", "replica 2", "2", "decode 1", "3", "ef", "a")
    meant = ["abcd", "bcde", "bcde", "cdef", "cdxf", "cdef", "abcd"]
    assert [kill.chosen(REPLICAS, name)["id"] for name in names] == meant
    assert kill.chosen([replica("ab"), replica("abc")], "ab")["id"] == "ab"  # a whole id before parts
    known = "there are: replica 1 (abcd), replica 2 (bcde), decode 1 (cdef), decode 3 (cdxf)"
    with pytest.raises(ask.Unanswered, match=re.escape(f"'cd' may be each of 4 replicas; {known}")):
        kill.chosen(REPLICAS, "cd")
    with pytest.raises(ask.Unanswered, match="'1' may be each of 2 replicas"):
        kill.chosen(REPLICAS, "1")
    with pytest.raises(ask.Unanswered, match=r"there is no replica '4'; there are: replica 1 \(abcd\)"):
        kill.chosen(REPLICAS, "4")
    with pytest.raises(ask.Unanswered, match="there are: none"):
        kill.chosen([], "1")


def test_a_killed_replica_is_told_with_its_process_its_requests_and_the_one_that_replaces_it(
    observatory: Observatory, capsys: pytest.CaptureFixture[str]
) -> None:
    observatory.later = [[OLD], [OLD, LOST, OTHER], [OLD, LOST, REPLACED]]
    assert killed(observatory, "2", "secret") == 0
    assert observatory.was_killed() == ["/manta/api/replicas/bcde/kill"]
    assert {key for _, key in observatory.asked} == {"Bearer secret"}
    assert capsys.readouterr().out.splitlines() == [
        "replica 2 (bcde, process 4711 on node 10.0.0.1): its process has ended", LOST["text"], REPLACED["text"],
    ]  # fmt: skip


def test_a_replica_whose_node_does_not_answer_is_killed_too(
    observatory: Observatory, capsys: pytest.CaptureFixture[str]
) -> None:
    observatory.hides_facts, observatory.later = True, [[OLD, REPLACED]]
    assert killed(observatory, "bcde") == 0
    said = capsys.readouterr()
    assert said.err == f"where it runs is not known: {observatory.url}: node n did not answer\n"
    assert said.out.startswith("replica 2 (bcde, process ? on node ?): its process has ended\n")


def test_where_no_other_one_comes_in_time_the_command_fails_and_says_where_to_look(
    observatory: Observatory, capsys: pytest.CaptureFixture[str]
) -> None:
    observatory.later = [[OLD, LOST]] * 9
    assert killed(observatory, "bcde") == ask.NOT_THERE
    assert "no other replica is ready after 5.00 s: `manta top`" in capsys.readouterr().err


def test_an_unknown_name_and_a_refusal_kill_nothing(
    observatory: Observatory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert killed(observatory, "nobody") == ask.NOT_THERE
    assert observatory.was_killed() == []
    observatory.refusal = (409, "not_done", "replica bcde no longer runs")
    assert killed(observatory, "bcde") == ask.NOT_THERE
    assert capsys.readouterr().err.endswith(f"{observatory.url}: replica bcde no longer runs\n")
    observatory.refusal = (403, "admin_key_not_set", "this needs an admin key")
    assert killed(observatory, "bcde") == ask.REFUSED
    assert capsys.readouterr().err.endswith("this needs an admin key\nwithout one, on node 10.0.0.1: kill -9 4711\n")


def test_on_a_terminal_it_asks_first(observatory: Observatory) -> None:
    with manta("kill", "replica 2", "--url", observatory.url, columns=200) as terminal:
        terminal.until("Kill replica 2 (bcde, process 4711 on node 10.0.0.1)? (its requests go on at another one)")
        terminal.press("n\n")
        terminal.until("nothing was done")
        assert terminal.process.wait(60) == ask.NOT_THERE
    assert observatory.was_killed() == []
