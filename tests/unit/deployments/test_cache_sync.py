"""The router's index follows the replicas' caches: batches, gaps, snapshots, several routers, and lost events."""

from random import Random

import numpy as np

from deployments.dispatch.leases import ReplicaGone
from deployments.fleet.cache_sync import CacheSync
from routing.router import Router
from routing.types import IndexSnapshot, KeysStored, ReplicaView, RouteQuery
from tests.unit.deployments.in_process import PAGE_SIZE, House, LocalLeases, ScriptedReplica
from tests.waiting import until_async

TOKENS = list(range(100, 100 + 4 * PAGE_SIZE))


async def add(house: House, *replicas: ScriptedReplica) -> None:
    """Add and wait until each has reported and sent its snapshot."""
    await house.ready(*replicas)
    await until_async(lambda: not house.fleet.sync.asking)


def overlap(house: House, token_ids: list[int] = TOKENS) -> int:
    """Prompt tokens that the router believes the best replica to hold."""
    query = RouteQuery(rid="x", token_ids=np.array([*token_ids, 1], dtype=np.int32))
    return house.router.explain_only(query).best_overlap[1]


async def test_events_keep_the_index_right(house: House) -> None:
    replica = ScriptedReplica("r0")
    await add(house, replica)
    assert overlap(house) == 0
    replica.store(TOKENS)
    await until_async(lambda: overlap(house) == 64)
    replica.clear()
    await until_async(lambda: overlap(house) == 0)
    assert house.fleet.sync.num_snapshots == 1


async def test_a_lost_event_costs_one_snapshot(house: House) -> None:
    replica = ScriptedReplica("r0")
    await add(house, replica)
    replica.store(TOKENS, tell=False)
    replica.store(TOKENS[:32])  # its number shows that one was lost
    await until_async(lambda: overlap(house) == 64)
    assert (house.fleet.sync.num_gaps, replica.num_snapshots) == (1, 2)


async def test_a_snapshot_that_fails_is_asked_for_again(house: House) -> None:
    class Shy(ScriptedReplica):
        num_asked = 0

        async def send_snapshot(self, router_id: str) -> None:
            self.num_asked += 1
            if self.num_asked == 1:
                raise ReplicaGone("not yet")
            await super().send_snapshot(router_id)

    shy = Shy("r0")
    shy.store(TOKENS, tell=False)
    await add(house, shy)
    assert (shy.num_asked, overlap(house)) == (2, 64)


def one_replica(*, pool_pages: int = 100) -> tuple[Router, CacheSync]:
    """A router that knows r0, and the sync; no replica answers it."""
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


async def test_reports_show_that_the_index_began_anew() -> None:
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


async def test_reports_of_a_replica_that_left_do_not_count_when_it_comes_back() -> None:
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
