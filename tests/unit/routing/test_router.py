"""Router: who may be chosen, what counts as open, what an error says."""

from dataclasses import replace
from random import Random
from unittest.mock import Mock

import pytest

from routing.policies import Candidates
from routing.router import Router
from routing.types import Decision, Ending, NoReplica, Reason, ReplicaView, Role, RouteOutcome, RouteQuery
from tests.harness import Clock

FINISHED = RouteOutcome(ending=Ending.OK)


def query(rid: str = "r", *, num_tokens: int = 10, **kwargs: frozenset[str]) -> RouteQuery:
    return RouteQuery(rid=rid, token_ids=list(range(num_tokens)), **kwargs)


def view(replica_id: str, *, time_s: float = 0.0, running: int = 0, queued: int = 0, **state: bool) -> ReplicaView:
    return ReplicaView(
        replica_id=replica_id, time_s=time_s, num_running=running, queued_uncached_tokens=queued, **state
    )


def router(policy: str = "least_tokens", *, clock: Clock | None = None) -> Router:
    return Router(policy, Random(0), clock or Clock())


def numbers(decision: Decision) -> dict[str, tuple[int, int]]:
    """(requests, queued tokens) by replica, as the policy saw them."""
    return {c.replica_id: (c.num_requests, c.queued_tokens) for c in decision.candidates}


def test_round_robin_takes_each_in_turn_and_goes_on_after_one_that_left() -> None:
    r = router("round_robin")
    r.update([view("b"), view("a"), view("c")])
    assert [r.choose(query()).replica_id for _ in range(4)] == ["a", "b", "c", "a"]
    r.update([view("a"), view("c")])
    assert [r.choose(query()).replica_id for _ in range(3)] == ["c", "a", "c"]


def test_least_tokens_takes_the_shortest_queue_and_says_so() -> None:
    r = router()
    r.update([view("a", queued=500), view("b", queued=20, running=9), view("c", queued=100)])
    decision = r.choose(query())
    assert (decision.replica_id, decision.reason) == ("b", Reason.FEWER_TOKENS)


def test_least_tokens_with_equal_queues_takes_fewer_requests() -> None:
    r = router()
    r.update([view("a", running=3), view("b", running=1)])
    decision = r.choose(query())
    assert (decision.replica_id, decision.reason) == ("b", Reason.FEWER_REQUESTS)


def test_power_of_two_compares_two_and_takes_the_one_with_fewer_requests() -> None:
    r = router("power_of_two")
    r.update([view("a", running=1), view("b", running=2), view("c", running=3)])
    for _ in range(20):
        decision = r.choose(query())
        assert len(decision.compared) == 2
        assert decision.replica_id == min(decision.compared)  # a is less loaded than b, b than c
        r.done(decision, FINISHED)


def test_what_was_sent_since_the_report_counts_until_the_next_report() -> None:
    clock = Clock()
    r = router(clock=clock)
    r.update([view("a", time_s=0.0)])
    clock.now_s = 1.0
    r.choose(query(num_tokens=30))
    assert numbers(r.choose(query(num_tokens=5))) == {"a": (1, 30)}
    r.update([view("a", time_s=2.0, running=2, queued=7)])  # measured after both arrived
    clock.now_s = 3.0
    assert numbers(r.choose(query())) == {"a": (2, 7)}


def test_a_report_measured_before_the_request_was_sent_does_not_hide_it() -> None:
    clock = Clock()
    r = router(clock=clock)
    r.update([view("a")])
    clock.now_s = 1.0
    r.choose(query(num_tokens=30))
    r.update([view("a", time_s=0.9)])  # arrives late
    assert numbers(r.choose(query())) == {"a": (1, 30)}


def test_a_report_that_forgets_our_open_requests_does_not_make_the_replica_look_idle() -> None:
    r = router()
    r.update([view("a")])
    for _ in range(3):
        r.choose(query())
    r.update([view("a", time_s=1.0, running=0)])
    assert numbers(r.choose(query())) == {"a": (3, 0)}


def test_a_replica_that_left_is_forgotten_with_its_open_requests() -> None:
    r = router("round_robin")
    r.update([view("a"), view("b")])
    to_a, to_b = r.choose(query()), r.choose(query())
    r.update([view("b")])
    assert r.num_open == 1
    assert not r.done(to_a, FINISHED)
    assert r.done(to_b, FINISHED)
    assert r.num_open == 0
    r.update([view("a"), view("b")])
    assert numbers(r.choose(query())) == {"a": (0, 0), "b": (0, 0)}
    r.check()


def test_pairs_are_chosen_while_a_replica_is_for_prefill_alone() -> None:
    r = router()
    r.report(view("d"))
    r.report(replace(view("p"), role=Role.PREFILL))
    assert r.explain_only(query()).pair is not None
    r.forget("p")
    assert r.explain_only(query()).pair is None


def test_the_shortest_wait_is_known_without_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is held against it; to make a thousand candidates for that takes longer than to choose."""
    r = router("estimated_ttft")
    r.update([replace(view("a", queued=900), prefill_tokens_per_s=100.0), replace(view("b"), prefill_tokens_per_s=1.0)])
    with monkeypatch.context() as patched:
        patched.setattr(Candidates, "at", Mock(side_effect=AssertionError("a candidate was made")))
        decision = r.choose(query())
        assert decision.shortest_wait_s == 0.0
    assert decision.shortest_wait_s == min(each.terms.wait_s for each in decision.candidates)


def test_no_replica_says_what_there_is_and_what_to_do() -> None:
    r = router()
    r.update([view("a", healthy=False), view("b", accepting=False), view("c")])
    with pytest.raises(NoReplica) as error:
        r.choose(query("r7", excluded=frozenset({"c"})))
    assert str(error.value) == (
        "request r7 wants any replica but not ['c']; of 3 replicas a is unhealthy, b is draining, "
        "c is not permitted by the request: try again in a moment, or permit more replicas"
    )
    assert error.value.retryable
    assert r.num_open == 0


def test_no_replica_before_the_first_report_says_so() -> None:
    with pytest.raises(NoReplica, match="r1: no replica has reported yet"):
        router().choose(query("r1"))


def test_an_unknown_policy_lists_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'best' is unknown; there are: estimated_ttft, round_robin, random"):
        Router("best", Random(0), Clock())


def test_a_query_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="request r has no tokens"):
        query(num_tokens=0)
