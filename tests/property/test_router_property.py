"""Router under random joins, leaves, reports, choices and endings, with replicas of one kind and with pairs (SPEC
H06)."""

from dataclasses import dataclass, replace
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from routing.policies import POLICIES
from routing.router import Router
from routing.types import Decision, Ending, NoReplica, PairReason, ReplicaView, Role, RouteOutcome, RouteQuery

IDS = ["a", "b", "c", "d"]
UNIFIED = dict.fromkeys(IDS, Role.UNIFIED)
PAIRED = {"a": Role.DECODE, "b": Role.DECODE, "c": Role.PREFILL, "d": Role.PREFILL}

subsets = st.frozensets(st.sampled_from(IDS))
views = st.builds(
    ReplicaView,
    replica_id=st.sampled_from(IDS),
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
    accepting=st.booleans(),
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
traces = st.lists(st.one_of(updates, asks, asks, ends, st.sampled_from(IDS)))


Went = list[tuple[str | None, str]]  # of each request: its prefill side if any, and the other


def play(router: Router, now_s: list[float], roles: dict[str, Role], trace: list[object]) -> Went:
    """Run the trace, checking after each event."""
    there: dict[str, ReplicaView] = {}
    open_, went = list[Decision](), Went()
    for event in trace:
        now_s[0] += 1.0
        match event:
            case list():
                there = {each.replica_id: replace(each, time_s=now_s[0], role=roles[each.replica_id]) for each in event}
                router.update(there.values())
            case str():
                there.pop(event, None)
                router.forget(event)
            case Ask():
                decision = ask(router, there, event)
                if decision is not None:
                    open_.append(decision)
                went.append((decision and decision.prefill_id, decision.replica_id if decision else "none"))
            case End(which, prefill_first) if open_:
                decision = open_.pop(which % len(open_))
                if prefill_first and decision.pair is not None:
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


def ask(router: Router, there: dict[str, ReplicaView], event: Ask) -> Decision | None:
    """Choose, and hold the answer against what is there."""
    may = {name for name, view in there.items() if view.healthy and view.accepting and name not in event.excluded}
    may &= set(IDS) if event.allowed is None else event.allowed
    prefills = {name for name in may if there[name].role is Role.PREFILL}
    decodes, prefills = may - prefills, {name for name in prefills if holds(there[name], event.num_tokens)}
    query = RouteQuery(
        rid="r", token_ids=[0] * event.num_tokens, allowed=event.allowed, excluded=event.excluded,
        one_replica=event.one_replica,
    )  # fmt: skip
    try:
        decision = router.choose(query)
    except NoReplica:
        assert not decodes
        return None
    assert decision.replica_id in decodes
    assert {candidate.replica_id for candidate in decision.candidates} == prefills | decodes
    if decision.pair is not None:
        check_pair(decision, prefills if not event.one_replica else set(), event, always=router._always_kv_transfer)
    return decision


def check_pair(decision: Decision, prefills: set[str], event: Ask, *, always: bool) -> None:
    pair = decision.pair
    assert pair is not None
    assert (pair.prefill_id is not None) == (pair.reason in (PairReason.TRANSFER, PairReason.ALWAYS))
    assert pair.prefill_id is None or pair.prefill_id in prefills
    assert (pair.reason is PairReason.NO_PREFILL) == (not prefills and not event.one_replica)
    assert pair.prefill_id is not None or not (always and prefills)
    local_s, kv_transfer_s = pair.chosen.local_cost_s, pair.kv_transfer_cost_s
    if pair.reason in (PairReason.TRANSFER, PairReason.LOCAL):
        assert kv_transfer_s is not None
        assert kv_transfer_s < local_s if pair.reason is PairReason.TRANSFER else local_s <= kv_transfer_s + 0.002


SMALL = ReplicaView(replica_id="c", time_s=0.0, pool_pages=2)
PROMPT = Ask(32, None, frozenset(), "")


@settings(max_examples=300, deadline=None)
@example(policy="estimated_ttft", seed=0, roles=PAIRED, always=False,
         trace=[[replace(SMALL, replica_id="a"), SMALL], PROMPT, replace(PROMPT, num_tokens=31)])  # fmt: skip
@given(
    policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 9), roles=st.sampled_from([UNIFIED, PAIRED]),
    always=st.booleans(), trace=traces,
)  # fmt: skip
def test_it_only_chooses_who_is_there_and_permitted_by_the_seed_alone_and_every_count_returns_to_zero(
    policy: str, seed: int, roles: dict[str, Role], always: bool, trace: list[object]
) -> None:
    went = []
    for _ in range(2):
        now_s = [0.0]
        router = Router(
            "estimated_ttft" if roles is PAIRED else policy, Random(seed), lambda now_s=now_s: now_s[0],  # type: ignore[misc]
            always_kv_transfer=always and roles is PAIRED,
        )  # fmt: skip
        went.append(play(router, now_s, roles, trace))
    assert went[0] == went[1]
