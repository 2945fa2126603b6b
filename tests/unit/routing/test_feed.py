"""Events of one replica: order, gaps, snapshots, and predictions that do not come true."""

from random import Random

import numpy as np

from routing.fleet_state import MAX_EARLY, Feed
from routing.index import TierIndex
from routing.router import Router
from routing.types import (
    Decision,
    Ending,
    IndexSnapshot,
    KeysCleared,
    KeysRemoved,
    KeysStored,
    ReplicaView,
    RouteOutcome,
    RouteQuery,
)

PROMPT = list(range(100, 164))  # 4 pages of 16


def keys(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.uint64)


def feed(capacity: int = 100, *, still_open: frozenset[int] = frozenset()) -> tuple[Feed, TierIndex]:
    index = TierIndex()
    index.join(0, capacity=capacity)
    return Feed(index, 0, still_open.__contains__), index


def test_an_event_counts_once_and_an_old_snapshot_not_at_all() -> None:
    f, index = feed()
    f.apply([KeysStored(1, keys(1)), KeysCleared(2), KeysStored(3, keys(3))])
    assert f.apply([KeysStored(1, keys(1))])
    assert f.apply_snapshot(IndexSnapshot(1, keys(1)))
    assert index.pages(0) == {3}


def test_a_flush_leaves_what_was_sent_and_has_not_begun() -> None:
    """A replica flushes only while nothing is open there: a decision that is, has yet to arrive."""
    f, index = feed(still_open=frozenset({0}))
    f.apply([KeysStored(1, keys(1))])
    index.expect(0, [2, 3], number=0)
    f.apply([KeysCleared(2)])
    assert index.pages(0) == {2, 3}
    f.apply([KeysStored(3, keys(2))])
    f.end(0, keys(2, 3))
    f.apply([])
    f.apply([])
    assert index.pages(0) == {2}
    index.check()


def test_a_replica_that_claims_more_than_its_pool_is_asked_for_a_snapshot() -> None:
    f, index = feed(capacity=2)
    assert not f.apply([KeysStored(1, keys(1, 2, 3))])
    assert f.apply_snapshot(IndexSnapshot(1, keys(1, 3)))
    assert index.pages(0) == {1, 3}


def routed() -> tuple[Router, Decision]:
    router = Router("estimated_ttft", Random(0), lambda: 0.0)
    router.update([ReplicaView(replica_id="a", time_s=0.0, pool_pages=10)])
    router.apply("a", [KeysStored(1, keys(1))])
    return router, router.choose(RouteQuery(rid="r", token_ids=PROMPT))


def test_what_a_request_was_expected_to_leave_and_did_not_is_dropped_two_batches_after_its_end() -> None:
    router, decision = routed()
    router.apply("a", [KeysStored(2, decision.keys[:1])])
    assert router.num_pages("a") == (2, 3)
    router.done(decision, RouteOutcome(ending=Ending.CANCELLED))
    router.apply("a", [])
    assert router.num_pages("a") == (2, 3)
    router.apply("a", [])
    assert router.num_pages("a") == (2, 0)
    router.check()


def test_what_ended_before_the_first_snapshot_is_expected_no_more_after_it() -> None:
    """Two decisions before anything is known of the replica: one ends, the other is open."""
    router = Router("estimated_ttft", Random(0), lambda: 0.0)
    router.update([ReplicaView(replica_id="a", time_s=0.0, pool_pages=100)])
    ended = router.choose(RouteQuery(rid="r0", token_ids=PROMPT))
    router.choose(RouteQuery(rid="r1", token_ids=[1] * 32))
    router.done(ended, RouteOutcome(ending=Ending.ERROR))
    assert router.num_pages("a") == (0, 4 + 2)
    assert router.apply_snapshot("a", IndexSnapshot(10, keys(1, 2, 3)))
    assert router.num_pages("a") == (3, 2)
    router.check()


def test_what_ended_before_the_first_event_is_expected_no_more_unless_that_tells() -> None:
    f, index = feed(still_open=frozenset({1}))
    index.expect(0, [2, 3], number=0)
    index.expect(0, [4], number=1)
    f.end(0, keys(2, 3))
    assert f.apply([KeysStored(1, keys(2))])
    assert index.pages(0) == {2, 4}
    assert index.num_pages(0) == (1, 1)


def test_what_ended_after_too_many_early_events_is_expected_no_more_after_the_snapshot() -> None:
    f, index = feed(capacity=MAX_EARLY)
    f.apply([KeysStored(1, keys(1))])
    index.expect(0, [2, 3], number=0)
    f.apply([KeysRemoved(seq, keys(9)) for seq in range(3, MAX_EARLY + 4)])
    assert f.seq is None
    f.end(0, keys(2, 3))
    f.apply_snapshot(IndexSnapshot(MAX_EARLY + 3, keys(1)))
    assert index.pages(0) == {1}


def test_a_snapshot_keeps_what_ended_a_moment_ago_until_its_events_are_due() -> None:
    f, index = feed()
    f.apply([KeysStored(1, keys(1))])
    index.expect(0, [2, 3], number=0)
    f.end(0, keys(2, 3))
    f.apply_snapshot(IndexSnapshot(2, keys(1)))
    assert index.pages(0) == {1, 2, 3}
    f.apply([])
    f.apply([])
    assert index.pages(0) == {1}
