"""The prefix index against a dictionary of what each replica holds; the router's bound on overlap."""

from collections import OrderedDict
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import page_owners
from routing.fleet_state import Feed
from routing.index import PrefixIndex, TierIndex
from routing.policies import POLICIES
from routing.router import Router
from routing.types import IndexEvent, IndexSnapshot, KeysCleared, KeysRemoved, KeysStored, ReplicaView, RouteQuery

CAPACITY = 6
REPLICAS = 3
prompts = st.lists(st.integers(1, 12), min_size=1, max_size=8, unique=True)
pages = prompts | st.lists(st.integers(1, 12), min_size=1, max_size=8)  # a key may stand twice
replicas = st.integers(0, REPLICAS - 1)
steps = st.one_of(
    st.tuples(st.just("expect"), replicas, pages),
    st.tuples(st.just("expect"), replicas, pages),
    st.tuples(st.just("stored"), replicas, pages),
    st.tuples(st.just("removed"), replicas, pages),
    st.tuples(st.just("unexpect"), replicas, st.integers(0, 5)),
    st.tuples(st.just("replace"), replicas, pages),
    st.tuples(st.just("clear"), replicas, st.none()),
    st.tuples(st.just("leave"), replicas, st.none()),
)


class Model:
    """One replica: what events stored, and what is expected in order of use (oldest first), each by its decision."""

    def __init__(self) -> None:
        self.stored: set[int] = set()
        self.expected: OrderedDict[int, int] = OrderedDict()

    @property
    def held(self) -> set[int]:
        return self.stored | self.expected.keys()

    def expect(self, run: list[int], number: int) -> None:
        for page in reversed(list(dict.fromkeys(run))):  # the deepest is the oldest
            if page not in self.stored:
                self.expected[page] = number
                self.expected.move_to_end(page)
        while len(self.expected) > CAPACITY:
            self.expected.popitem(last=False)

    def store(self, run: list[int]) -> None:
        for page in run:
            if page not in self.stored:
                if len(self.stored) == CAPACITY:
                    return
                self.stored.add(page)
                self.expected.pop(page, None)

    def overlap(self, prompt: list[int]) -> int:
        return next((depth for depth, page in enumerate(prompt) if page not in self.held), len(prompt))


@pytest.mark.parametrize("slack", [0, page_owners.SLACK])
@settings(max_examples=200, deadline=None)
@given(trace=st.lists(steps, max_size=60), prompt=prompts)
def test_the_index_equals_a_dictionary(trace: list[tuple[str, int, object]], prompt: list[int], slack: int) -> None:
    """With a slack of 0 the order of use is collected again and again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(page_owners, "SLACK", slack)
        play(trace, prompt)


def play(trace: list[tuple[str, int, object]], prompt: list[int]) -> None:
    index, models = PrefixIndex(), [Model() for _ in range(REPLICAS)]
    sent: list[list[tuple[int, list[int]]]] = [[] for _ in range(REPLICAS)]
    for replica in range(REPLICAS):
        index.join(replica, capacity=CAPACITY)
    for number, (what, replica, value) in enumerate(trace):
        model = models[replica]
        match what, value:
            case "expect", list(run):
                index.expect(replica, run, number=number)
                model.expect(run, number)
                sent[replica].append((number, run))
            case "stored", list(run):
                index.stored(replica, run)
                model.store(run)
            case "removed", list(run):
                index.removed(replica, run)
                model.stored -= set(run)
                for page in run:
                    model.expected.pop(page, None)
            case "unexpect", int(which) if which < len(sent[replica]):
                then, run = sent[replica][which]
                index.unexpect(replica, run, number=then)
                for page in run:
                    if model.expected.get(page) == then:
                        del model.expected[page]
            case "replace", list(run):
                index.replace(replica, run)
                model.stored = set()
                expected, model.expected = model.expected, OrderedDict()
                model.store(run)
                model.expected = OrderedDict((p, n) for p, n in expected.items() if p not in model.stored)
            case "clear", _:
                index.clear(replica)
                models[replica] = Model()
            case "leave", _:
                index.leave(replica)
                index.join(replica, capacity=CAPACITY)
                models[replica], sent[replica] = Model(), []
        index.check()
        for at, each in enumerate(models):
            assert index.pages(at) == each.held
            assert index.num_pages(at) == (len(each.stored), len(each.expected))
        overlaps = index.overlap(prompt, np.arange(REPLICAS))
        assert overlaps.tolist() == [each.overlap(prompt) for each in models]


def keys(run: set[int] | list[int]) -> np.ndarray:
    return np.array(sorted(run), dtype=np.uint64)


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(st.none() | st.tuples(st.booleans(), st.sets(st.integers(1, 9), min_size=1)), min_size=1),
    lost=st.sets(st.integers(1, 20)),
    seed=st.integers(0, 99),
    batch=st.integers(1, 4),
)
def test_events_late_twice_or_lost_end_in_what_the_replica_holds(
    changes: list[tuple[bool, set[int]] | None], lost: set[int], seed: int, batch: int
) -> None:
    """Events come in any order and some twice; after a gap a snapshot is fetched, as the caller must."""
    held: set[int] = set()
    events: list[IndexEvent] = []
    states: list[set[int]] = [set()]  # by seq
    for seq, change in enumerate(changes, start=1):
        match change:
            case None:
                events.append(KeysCleared(seq))
                held = set()
            case True, run:
                events.append(KeysStored(seq, keys(run)))
                held = held | run
            case _, run:
                events.append(KeysRemoved(seq, keys(run)))
                held = held - run
        states.append(held)
    rng = Random(seed)
    arrived = [event for event in events if event.seq not in lost]
    arrived += rng.sample(arrived, k=len(arrived) // 3)
    rng.shuffle(arrived)
    index = TierIndex()
    index.join(0, capacity=100)
    feed = Feed(index, 0, lambda number: False)
    in_sync = False
    for at in range(0, len(arrived), batch):
        in_sync = feed.apply(arrived[at : at + batch])
        if in_sync:
            assert feed.seq is not None
            assert index.pages(0) == states[feed.seq]
        index.check()
    if not in_sync:
        assert feed.apply_snapshot(IndexSnapshot(len(events), keys(held)))
    assert index.pages(0) == states[feed.seq or 0]
    if not lost:
        assert feed.seq == len(events)


@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(sorted(POLICIES)), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_overlap_is_whole_pages_and_less_than_the_prompt(policy: str, lengths: list[int]) -> None:
    router = Router(policy, Random(0), lambda: 0.0, page_size=4)
    router.update([ReplicaView(replica_id=name, time_s=0.0, pool_pages=5, page_size=4) for name in "ab"])
    for num_tokens in lengths:
        decision = router.choose(RouteQuery(rid="r", token_ids=[7] * num_tokens))
        for candidate in decision.candidates:
            assert candidate.overlap_tokens % 4 == 0
            assert 0 <= candidate.overlap_tokens < num_tokens
            assert candidate.terms.own_tokens == num_tokens - candidate.overlap_tokens
        assert decision.overlap_tokens <= decision.best_overlap[1]
        assert all(sum(router.num_pages(name)) <= 5 for name in "ab")
        router.check()
