"""Lost events are made good whatever comes meanwhile: what CacheSync is told, and whom it asks then."""

from random import Random

import numpy as np

from deployments.fleet.cache_sync import CacheSync
from routing.router import Router
from routing.types import IndexSnapshot, KeysStored, ReplicaView
from tests.unit.deployments.in_process import LocalLeases


def one_replica(*, pool_pages: int = 100) -> tuple[Router, CacheSync]:
    """A router that knows r0, and the sync to be told what came; nobody answers what it asks."""
    router = Router("round_robin", Random(0), lambda: 0.0)
    router.update([ReplicaView(replica_id="r0", time_s=0.0, pool_pages=pool_pages)])
    return router, CacheSync(router, LocalLeases())


def stored(seq: int) -> KeysStored:
    """Event ``seq`` stores page ``seq``."""
    return KeysStored(seq, np.array([seq], dtype=np.uint64))


def snapshot(seq: int, *pages: int) -> IndexSnapshot:
    return IndexSnapshot(seq=seq, keys=np.array(pages, dtype=np.uint64))


async def test_a_report_that_is_ahead_of_its_events_costs_nothing() -> None:
    """Statistics may be a step younger than the events beside them: those come before the next report."""
    router, sync = one_replica()
    for seq in range(1, 50):
        sync.on_report("r0", seq, "router")  # event ``seq`` is still on its way
        if seq % 2:
            sync.on_report("r0", seq, "router")  # such as attaching sends, without events
        sync.on_events("r0", [stored(seq)], "router")
        sync.check()
    assert (sync.num_gaps, sync.asking) == (0, frozenset())
    sync.on_report("r0", 50, "router")
    sync.on_report("r0", 50, "router")
    assert sync.asking == frozenset()
    sync.on_report("r0", 50, "router")
    assert sync.asking == {"r0"}
    sync.on_snapshot("r0", snapshot(50, 7))
    sync.check()
    assert (sync.num_gaps, router.num_pages("r0")) == (1, (1, 0))


async def test_a_snapshot_older_than_the_gap_does_not_end_the_asking() -> None:
    """Event 2 is lost; the snapshot that comes was on its way before it: event 2 is still missing."""
    router, sync = one_replica()
    sync.on_events("r0", [stored(1)], "router")
    sync.on_events("r0", [stored(3)], "router")
    sync.on_snapshot("r0", snapshot(1, 1))
    assert sync.asking == {"r0"}
    sync.on_snapshot("r0", snapshot(3, 3))
    assert (sync.asking, router.held("r0")) == (frozenset(), {3})
    sync.check()


async def test_a_snapshot_before_the_first_report_does_not_end_the_asking() -> None:
    """The router does not know the replica yet, and so cannot keep what it holds."""
    router = Router("round_robin", Random(0), lambda: 0.0)
    sync = CacheSync(router, LocalLeases())
    sync.ask("r0", "router")
    sync.on_snapshot("r0", snapshot(5, 1, 2))
    assert sync.asking == {"r0"}
    router.update([ReplicaView(replica_id="r0", time_s=0.0, pool_pages=100)])
    sync.on_snapshot("r0", snapshot(5, 1, 2))
    assert (sync.asking, router.held("r0")) == (frozenset(), {1, 2})


async def test_an_index_begun_anew_is_noticed_by_the_reports() -> None:
    """The pool has another size: the router forgets what the replica holds, and no event says so."""
    router, sync = one_replica(pool_pages=100)
    sync.on_snapshot("r0", snapshot(5, 1, 2))
    router.update([ReplicaView(replica_id="r0", time_s=1.0, pool_pages=101)])
    assert router.held("r0") == set()
    for _ in range(3):
        assert sync.asking == frozenset()
        sync.on_report("r0", 5, "router")
    assert sync.asking == {"r0"}
    assert sync.num_gaps == 1
    sync.on_snapshot("r0", snapshot(5, 1, 2))
    assert router.held("r0") == {1, 2}


async def test_a_gap_counts_once_however_much_is_heard_while_its_snapshot_is_on_its_way() -> None:
    router, sync = one_replica()
    sync.on_events("r0", [stored(1)], "router")
    sync.on_report("r0", 2, "router")
    sync.on_events("r0", [stored(3)], "router")
    for seq in (4, 5, 6):
        sync.on_report("r0", seq, "router")
        sync.on_events("r0", [stored(seq)], "router")
        sync.check()
    assert sync.asking == {"r0"}
    assert sync.num_gaps == 1
    sync.on_snapshot("r0", snapshot(4, 4))
    sync.on_report("r0", 6, "router")
    assert (sync.num_gaps, sync.asking, router.held("r0")) == (1, frozenset(), {4, 5, 6})


async def test_what_was_told_of_a_replica_that_left_does_not_count_against_its_next_life() -> None:
    """Told of event 9, then forgotten. It comes back with an empty cache, whose one event is heard: nothing is lost."""
    router, sync = one_replica()
    sync.on_report("r0", 9, "router")
    router.forget("r0")
    sync.forget("r0")
    router.update([ReplicaView(replica_id="r0", time_s=1.0, pool_pages=100)])
    sync.on_events("r0", [stored(1)], "router")
    for _ in range(5):
        sync.on_report("r0", 1, "router")
    assert (sync.num_gaps, sync.asking) == (0, frozenset())
