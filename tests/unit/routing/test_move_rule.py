"""Requests that wait move where they begin sooner: which, when, and in which order."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from routing.migration import ASK_AGAIN_S, Migration, Waiting, migrations
from routing.router import Router
from routing.types import Ending, ReplicaView, Role, RouteOutcome, RouteQuery

RATE = 1_000.0  # prompt tokens a second
CANCELLED = RouteOutcome(ending=Ending.CANCELLED)
MOVED = RouteOutcome(ending=Ending.MOVED)


class Fleet:
    """A router, its clock, and the requests that wait."""

    def __init__(self, policy: str = "estimated_ttft") -> None:
        self.now_s = 0.0
        self.router = Router(policy, Random(0), lambda: self.now_s)
        self.waiting: list[Waiting] = []

    def report(self, replica_id: str, *, queued: int = 0, waiting: int = 0, **fields: object) -> None:
        view = ReplicaView(
            replica_id=replica_id, time_s=self.now_s, num_waiting=waiting, queued_uncached_tokens=queued,
            prefill_tokens_per_s=RATE, **fields,
        )  # fmt: skip
        self.router.report(view)

    def send(self, num_tokens: int = 1_000, *, session: str = "", key: str = "", tenant: str = "") -> Waiting:
        """A request whose prompt no other shares, at the replica that the router chooses."""
        number = len(self.waiting)
        prompt = np.full(num_tokens, number, dtype=np.int32)
        query = RouteQuery(rid=str(number), token_ids=prompt, session_id=session, tenant=tenant)
        decision = self.router.choose(query)
        self.waiting.append(Waiting(query=query, decision=decision, arrived_s=self.now_s, key=key))
        self.now_s += 0.001
        return self.waiting[-1]

    def look(self, waiting: Sequence[Waiting] | None = None) -> list[Migration]:
        return list(migrations(self.router, self.waiting if waiting is None else waiting, self.now_s))

    def give_back(self, move: Migration) -> None:
        """The replica has given the request back, and it goes on."""
        self.router.done(move.waiting.decision, MOVED)
        move.waiting.decision = move.decision

    def wait(self, seconds: float) -> None:
        """Nothing is computed meanwhile: each replica reports the queue that it had."""
        self.now_s += seconds
        for view in self.router.views:
            self.router.report(replace(view, time_s=self.now_s))


def joined(num: int = 6, **asked: str) -> Fleet:
    """``num`` requests of 1 s each wait at a replica when another one comes."""
    fleet = Fleet()
    fleet.report("a")
    for _ in range(num):
        fleet.send(**asked)
    fleet.now_s = 2.0
    fleet.report("a", queued=num * 1_000, waiting=num)
    fleet.report("b")
    return fleet


def test_a_replica_that_joins_gets_every_second_request_so_that_each_begins_in_its_turn() -> None:
    fleet = joined()
    found = fleet.look()
    assert [int(move.waiting.query.rid) for move in found] == [1, 3, 5]
    assert {(move.waiting.decision.replica_id, move.decision.replica_id, move.cause) for move in found} == {
        ("a", "b", "join")
    }
    assert [round(move.wait_s) for move in found] == [1, 2, 3]  # those before it at a, without those that leave


def test_an_answer_closes_one_of_the_two_decisions() -> None:
    fleet = joined()
    first, second, third = fleet.look()
    assert fleet.router.num_open == 9
    fleet.give_back(first)
    fleet.router.done(second.decision, CANCELLED)
    fleet.router.stays(second.waiting.decision)
    fleet.router.forget("b")  # with it goes what was to go there
    assert fleet.router.num_open == 5
    assert not fleet.router.is_open(third.decision)
    for waiting in fleet.waiting:
        fleet.router.done(waiting.decision, CANCELLED)
    assert fleet.router.num_open == 0
    fleet.router.check()


def test_a_request_is_asked_for_once_a_second_and_not_while_it_is_asked_for() -> None:
    fleet = joined(2)
    [move] = fleet.look()
    move.waiting.is_asked = True
    fleet.wait(ASK_AGAIN_S)
    assert fleet.look() == []
    move.waiting.is_asked = False  # its replica has answered that it stays, wrongly: it is asked again
    fleet.router.done(move.decision, CANCELLED)
    fleet.router.stays(move.waiting.decision)
    assert [each.waiting for each in fleet.look()] == [move.waiting]
    fleet.router.done(fleet.waiting[0].decision, CANCELLED)


def test_nothing_moves_for_a_small_gain() -> None:
    fleet = Fleet()
    fleet.report("a", queued=1_000, waiting=10)
    fleet.report("b", queued=1_210, waiting=10)
    assert fleet.send(100).decision.replica_id == "a"
    fleet.now_s = 2.0
    for a, b, gains in ((900, 700, False), (900, 500, True), (3_000, 2_500, False), (3_000, 2_300, True)):
        fleet.now_s += 0.001
        fleet.report("a", queued=a + 100, waiting=1_000)
        fleet.report("b", queued=b, waiting=1_000)
        found = fleet.look()
        assert bool(found) is gains, (a, b)  # by more than 0.25 s, and by more than a fifth of what is left
        for move in found:
            move.waiting.asked_s = 0.0
            fleet.router.done(move.decision, CANCELLED)
            fleet.router.stays(move.waiting.decision)


@pytest.mark.parametrize("group", ["session", "key"])
def test_no_request_goes_before_an_older_one_of_its_session_or_key(group: str) -> None:
    fleet = joined(2, **{group: "s"})
    older, younger = fleet.waiting
    older.query = replace(older.query, allowed=frozenset({"a"}))  # it must stay, behind 3 s of others' prompts
    fleet.now_s += 0.001
    fleet.report("a", queued=5_000, waiting=5)
    assert fleet.look() == []
    younger.query, younger.key = replace(younger.query, session_id=""), ""
    assert [move.waiting for move in fleet.look()] == [younger]


def test_while_an_older_one_of_its_key_is_asked_for_a_request_stays() -> None:
    fleet = joined(4, key="k")
    fleet.waiting[0].is_asked = True
    assert fleet.look() == []


def test_a_silent_replica_is_asked_for_what_waits_there() -> None:
    fleet = Fleet()
    fleet.report("a")
    waiting = fleet.send()
    fleet.report("b")
    fleet.now_s = 2.0
    fleet.router.report(replace(fleet.router.views[0], silent=True, healthy=False))
    fleet.report("b")
    assert [(move.waiting, move.cause) for move in fleet.look()] == [(waiting, "silent")]


def test_what_takes_longer_than_was_estimated_is_behind() -> None:
    fleet = Fleet()
    fleet.report("a")
    fleet.report("b", queued=1_500)
    fleet.send()
    second = fleet.send(300)
    assert second.decision.replica_id == "a"
    fleet.now_s = 2.0
    fleet.report("a", queued=1_300, waiting=2)  # it has computed nothing
    fleet.report("b")
    assert [(move.waiting, move.cause) for move in fleet.look()] == [(second, "behind")]


def test_even_queues_are_not_looked_at() -> None:
    fleet = Fleet()
    fleet.report("a")
    fleet.report("b")
    for _ in range(4):
        fleet.send()
    fleet.wait(ASK_AGAIN_S)
    assert fleet.router.spread_s < 0.25
    assert fleet.look() == []


def test_a_policy_that_estimates_nothing_moves_nothing() -> None:
    fleet = Fleet("round_robin")
    fleet.report("a")
    fleet.send()
    fleet.now_s = 2.0
    fleet.report("a", queued=9_000)
    fleet.report("b")
    assert fleet.look() == []


def test_a_look_that_moves_nothing_changes_nothing_that_is_chosen_next() -> None:
    def chosen(*, look: bool) -> list[str]:
        fleet = Fleet()
        for name in ("a", "b", "c"):
            fleet.report(name)
        fleet.send()
        fleet.wait(ASK_AGAIN_S)
        if look:
            fleet.router.choose_again(fleet.waiting[0].decision, fleet.waiting[0].query)
        return [fleet.send(10).decision.replica_id for _ in range(8)]

    assert chosen(look=False) == chosen(look=True)


def test_both_legs_of_a_pair_move_together() -> None:
    fleet = Fleet()
    decode = {"role": Role.DECODE, "max_running_requests": 4, "pool_pages": 1_000}
    fleet.report("p1", role=Role.PREFILL)
    fleet.report("d1", num_running=3, decode_step_s=0.05, **decode)
    first, second = fleet.send(), fleet.send()
    assert {waiting.decision.prefill_id for waiting in (first, second)} == {"p1"}
    fleet.now_s = 2.0
    fleet.report("p1", role=Role.PREFILL, queued=4_000, waiting=4)
    fleet.report("p2", role=Role.PREFILL)
    move, *_ = fleet.look()
    assert (move.decision.prefill_id, move.decision.replica_id, move.cause) == ("p2", "d1", "join")
    fleet.give_back(move)
    for waiting in fleet.waiting:
        fleet.router.done(waiting.decision, CANCELLED)
    for rest in fleet.look([]):
        fleet.router.done(rest.decision, CANCELLED)
    fleet.router.check()


def test_prompts_of_a_tenant_go_where_fewer_of_its_own_wait_however_long_the_queue_of_another_is() -> None:
    """Of 20 s and 22 s of a flood a light tenant waits for as much as it has itself, so its prompts are spread."""
    fleet = Fleet()
    fleet.report("a")
    fleet.report("b")
    for _ in range(40):
        fleet.send(tenant="heavy")
    fleet.now_s = 2.0
    fleet.report("a", queued=20_000, waiting=20)
    fleet.report("b", queued=22_000, waiting=22)
    light = [fleet.send(100, tenant=f"light {at}").decision for at in range(4)]
    assert [each.replica_id for each in light].count("a") == 2
    assert max(each.predicted_ttft_s for each in light) < 1.0
    assert fleet.send(100, tenant="heavy").decision.predicted_ttft_s > 15.0
