"""Pairs under random joins, leaves, reports, choices and endings: SPEC H06."""

from dataclasses import dataclass, replace
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from routing.router import Router
from routing.types import Decision, Ending, NoReplica, PairReason, ReplicaView, Role, RouteOutcome, RouteQuery

ROLES = {"a": Role.DECODE, "b": Role.DECODE, "c": Role.PREFILL, "d": Role.PREFILL}

subsets = st.frozensets(st.sampled_from(sorted(ROLES)))
views = st.builds(
    ReplicaView,
    replica_id=st.sampled_from(sorted(ROLES)),
    time_s=st.just(0.0),
    num_running=st.integers(0, 5),
    num_waiting=st.integers(0, 5),
    queued_uncached_tokens=st.integers(0, 500),
    pool_utilization=st.sampled_from([0.0, 0.5, 1.0]),
    pool_pages=st.sampled_from([0, 2, 3]),
    page_bytes=st.sampled_from([0, 1, 10**6]),
    prefill_tokens_per_s=st.sampled_from([0.0, 100.0]),
    decode_step_s=st.sampled_from([0.0, 0.02]),
    max_running_requests=st.sampled_from([0, 4]),
    healthy=st.booleans(),
)


@dataclass(frozen=True)
class Ask:
    num_tokens: int
    allowed: frozenset[str] | None
    excluded: frozenset[str]
    one_replica: str


@dataclass(frozen=True)
class End:
    which: int
    prefill_first: bool


updates = st.lists(views, max_size=4, unique_by=lambda v: v.replica_id)
asks = st.builds(Ask, st.integers(1, 50), st.none() | subsets, subsets, st.sampled_from(["", "", "n is 2"]))
ends = st.builds(End, st.integers(0, 99), st.booleans())
leaves = st.sampled_from(sorted(ROLES))


def play(seed: int, always: bool, trace: list[object]) -> list[tuple[str | None, str]]:
    """Run the trace, checking after each event; returns the pairs."""
    now_s = 0.0
    router = Router("estimated_ttft", Random(seed), lambda: now_s, always_kv_transfer=always)
    there: dict[str, ReplicaView] = {}
    open_: list[Decision] = []
    went: list[tuple[str | None, str]] = []
    for event in trace:
        now_s += 1.0
        match event:
            case list():
                there = {
                    view.replica_id: replace(view, time_s=now_s, role=ROLES[view.replica_id]) for view in event
                }
                router.update(there.values())
            case str():
                there.pop(event, None)
                router.forget(event)
            case Ask():
                decision = ask(router, there, event, always=always)
                if decision is not None:
                    open_.append(decision)
                    went.append((decision.prefill_id, decision.replica_id))
            case End(which, prefill_first) if open_:
                decision = open_.pop(which % len(open_))
                if prefill_first:
                    router.prefill_done(decision)
                router.done(decision, RouteOutcome(ending=Ending.OK))
        router.check()
    for decision in open_:
        router.done(decision, RouteOutcome(ending=Ending.OK))
    assert router.num_open == 0
    router.check()
    return went


def holds(view: ReplicaView, num_tokens: int) -> bool:
    """Whether its pool has room for a prompt, and for the token that is made of it; an unknown size may have."""
    return view.pool_pages == 0 or num_tokens + 1 <= view.pool_pages * view.page_size


def ask(router: Router, there: dict[str, ReplicaView], event: Ask, *, always: bool) -> Decision | None:
    """Choose, and hold the answer against what is there."""
    may = {name for name, view in there.items() if view.healthy and name not in event.excluded}
    may &= set(ROLES) if event.allowed is None else event.allowed
    prefills, decodes = ({name for name in may if ROLES[name] is role} for role in (Role.PREFILL, Role.DECODE))
    prefills = {name for name in prefills if holds(there[name], event.num_tokens)}
    query = RouteQuery(
        rid="r", token_ids=[0] * event.num_tokens, allowed=event.allowed, excluded=event.excluded,
        one_replica=event.one_replica,
    )  # fmt: skip
    try:
        decision = router.choose(query)
    except NoReplica:
        assert not decodes
        return None
    pair = decision.pair
    assert pair is not None
    assert decision.replica_id in decodes
    assert {candidate.replica_id for candidate in decision.candidates} == prefills | decodes
    assert (pair.prefill_id is not None) == (pair.reason in (PairReason.HAND_OFF, PairReason.ALWAYS))
    assert pair.prefill_id is None or (pair.prefill_id in prefills and not event.one_replica)
    assert (pair.reason is PairReason.NO_PREFILL) == (not prefills and not event.one_replica)
    if always and prefills and not event.one_replica:
        assert pair.prefill_id is not None
    local_s, kv_transfer_s = pair.chosen.local_cost_s, pair.kv_transfer_cost_s
    if pair.reason is PairReason.HAND_OFF:
        assert kv_transfer_s is not None
        assert kv_transfer_s < local_s
    if pair.reason is PairReason.LOCAL:
        assert kv_transfer_s is not None
        assert local_s <= kv_transfer_s + 0.002
    return decision


SMALL = ReplicaView(replica_id="c", time_s=0.0, pool_pages=2)
PROMPT = Ask(32, None, frozenset(), "")


@settings(max_examples=150, deadline=None)
@example(seed=0, always=False, trace=[[replace(SMALL, replica_id="a"), SMALL], PROMPT, replace(PROMPT, num_tokens=31)])
@given(seed=st.integers(0, 9), always=st.booleans(), trace=st.lists(st.one_of(updates, asks, asks, ends, leaves)))
def test_pairs_are_of_those_there_cost_least_and_both_legs_return_to_zero(
    seed: int, always: bool, trace: list[object]
) -> None:
    assert play(seed, always, trace) == play(seed, always, trace)
