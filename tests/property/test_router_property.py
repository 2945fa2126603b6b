"""Router under random joins, leaves, reports, choices and endings."""

from dataclasses import dataclass, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from routing.policies import POLICIES
from routing.router import Router
from routing.types import Decision, Ending, NoReplica, ReplicaView, RouteOutcome, RouteQuery

IDS = ["a", "b", "c", "d"]

subsets = st.frozensets(st.sampled_from(IDS))
views = st.builds(
    ReplicaView,
    replica_id=st.sampled_from(IDS),
    time_s=st.just(0.0),
    num_running=st.integers(0, 5),
    num_waiting=st.integers(0, 5),
    queued_uncached_tokens=st.integers(0, 500),
    pool_pages=st.sampled_from([0, 2, 3]),
    prefill_tokens_per_s=st.sampled_from([0.0, 100.0]),
    healthy=st.booleans(),
    accepting=st.booleans(),
)


@dataclass(frozen=True)
class Update:
    views: list[ReplicaView]


@dataclass(frozen=True)
class Forget:
    replica_id: str


@dataclass(frozen=True)
class Ask:
    num_tokens: int
    allowed: frozenset[str] | None
    excluded: frozenset[str]


@dataclass(frozen=True)
class End:
    which: int


updates = st.builds(Update, st.lists(views, max_size=4, unique_by=lambda v: v.replica_id))
asks = st.builds(Ask, st.integers(1, 50), st.none() | subsets, subsets)
ends = st.builds(End, st.integers(0, 99))
leaves = st.builds(Forget, st.sampled_from(IDS))
events = st.lists(st.one_of(updates, asks, asks, ends, leaves))


def play(policy: str, seed: int, trace: list[object]) -> list[str]:
    """Run the trace, checking after each event; returns where each request went."""
    now_s = 0.0
    router = Router(policy, Random(seed), lambda: now_s)
    there: dict[str, ReplicaView] = {}
    open_: list[Decision] = []
    went: list[str] = []
    for event in trace:
        now_s += 1.0
        match event:
            case Update(views):
                there = {view.replica_id: replace(view, time_s=now_s) for view in views}
                router.update(there.values())
            case Forget(replica_id):
                there.pop(replica_id, None)
                router.forget(replica_id)
            case Ask(num_tokens, allowed, excluded):
                may = {
                    view.replica_id
                    for view in there.values()
                    if view.healthy and view.accepting and view.replica_id not in excluded
                } & (set(IDS) if allowed is None else allowed)
                query = RouteQuery(rid="r", token_ids=[0] * num_tokens, allowed=allowed, excluded=excluded)
                try:
                    decision = router.choose(query)
                except NoReplica:
                    assert not may
                    went.append("none")
                else:
                    assert decision.replica_id in may
                    assert {candidate.replica_id for candidate in decision.candidates} == may
                    open_.append(decision)
                    went.append(decision.replica_id)
            case End(which) if open_:
                router.done(open_.pop(which % len(open_)), RouteOutcome(ending=Ending.OK))
        router.check()
    for decision in open_:
        router.done(decision, RouteOutcome(ending=Ending.OK))
    assert router.num_open == 0
    router.check()
    return went


@settings(max_examples=150, deadline=None)
@given(policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 9), trace=events)
def test_it_only_chooses_who_is_there_and_permitted_and_every_count_returns_to_zero(
    policy: str, seed: int, trace: list[object]
) -> None:
    play(policy, seed, trace)


@settings(max_examples=75, deadline=None)
@given(policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 9), trace=events)
def test_the_same_seed_gives_the_same_decisions(policy: str, seed: int, trace: list[object]) -> None:
    assert play(policy, seed, trace) == play(policy, seed, trace)
