"""The router's index follows the replicas' caches: batches, gaps, snapshots, several routers, and lost events."""

from random import Random

import numpy as np

from deployments.dispatch.leases import ReplicaGone
from deployments.fleet.cache_sync import CacheSync
from routing.router import Router
from routing.types import IndexSnapshot, KeysStored, ReplicaView, RouteQuery
from tests.unit.deployments.in_process import PAGE_SIZE, House, LocalLeases, ScriptedReplica
from tests.unit.deployments.sample_values import stats
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


async def test_reports_show_that_the_last_event_was_lost(house: House) -> None:
    """Nothing follows it, so that no gap shows: three reports of a number that never came lead to a snapshot."""
    replica = ScriptedReplica("r0")
    await add(house, replica)
    replica.store(TOKENS, tell=False)
    await replica.send_reports(3)
    await until_async(lambda: overlap(house) == 64)
    assert (house.fleet.sync.num_gaps, replica.num_snapshots) == (1, 2)
    await replica.send_reports(3)
    replica.store(list(range(500, 500 + PAGE_SIZE)))
    await until_async(lambda: overlap(house, list(range(500, 500 + PAGE_SIZE))) == 16)
    assert (house.fleet.sync.num_gaps, replica.num_snapshots) == (1, 2)


async def test_a_replica_is_asked_again_until_a_snapshot_leaves_nothing_missing(house: House) -> None:
    class Slow(ScriptedReplica):
        """Its first answer after a gap is what it held before the first event."""

        num_asked = 0

        async def send_snapshot(self, router_id: str) -> None:
            self.num_asked += 1
            if self.num_asked == 2:
                house.fleet.on_snapshot("r0", IndexSnapshot(seq=0, keys=np.empty(0, dtype=np.uint64)))
            else:
                await super().send_snapshot(router_id)

    slow = Slow("r0")
    await add(house, slow)
    slow.store(TOKENS, tell=False)
    slow.store(TOKENS[:32])
    await until_async(lambda: overlap(house) == 64)
    assert (slow.num_asked, house.fleet.sync.num_gaps, house.fleet.sync.asking) == (3, 1, frozenset())


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


async def test_a_replica_that_left_is_forgotten_with_its_pages(house: House) -> None:
    first, second = ScriptedReplica("r0"), ScriptedReplica("r1")
    first.store(TOKENS, tell=False)
    await add(house, first, second)
    assert overlap(house) == 64
    house.remove("r0")
    assert overlap(house) == 0


async def test_two_routers_of_the_same_replicas_agree(house: House) -> None:
    """Each hears all events; what each sent itself and no event confirmed is all that may differ."""
    first = ScriptedReplica("r0")
    await add(house, first)
    async with House(router_id="another router") as other:
        twin = ScriptedReplica("r0")
        twin.cache = first.cache
        first.store(TOKENS)
        twin.held = first.held
        await add(other, twin)
        await until_async(lambda: overlap(house) == 64)
        assert house.router.held("r0") == other.router.held("r0") != set()


async def test_a_router_that_starts_learns_all_pages_from_one_snapshot_a_replica(house: House) -> None:
    """Eight replicas of 10,000 pages each."""
    replicas = [full_replica(f"r{number}", 10_000, seed=number) for number in range(8)]
    await add(house, *replicas)
    assert [house.router.num_pages(replica.replica_id) for replica in replicas] == [(10_000, 0)] * 8
    assert [replica.num_snapshots for replica in replicas] == [1] * 8
    assert (house.fleet.sync.num_snapshots, house.fleet.sync.num_gaps) == (8, 0)


def full_replica(replica_id: str, num_pages: int, *, seed: int) -> ScriptedReplica:
    """It has held ``num_pages`` pages since before the router came."""
    replica = ScriptedReplica(replica_id)
    replica.held = np.random.default_rng(seed).integers(0, 2**63, size=num_pages, dtype=np.uint64)
    replica.stats = stats(num_pages)
    replica.cache.stored(replica.held, None, PAGE_SIZE, np.empty(0, dtype=np.int32))
    replica.cache.drain()
    return replica


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
