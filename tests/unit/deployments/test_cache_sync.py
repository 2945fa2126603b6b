"""The router's index follows the replicas' caches: batches, gaps, snapshots, several routers, and how fast."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from random import Random

import numpy as np
import pytest

from deployments.cache_sync import CacheSync
from deployments.leases import ReplicaGone
from routing.router import Router
from routing.types import IndexSnapshot, PagesStored, ReplicaView, RouteQuery
from tests.unit.deployments.in_process import PAGE_SIZE, House, LocalLeases, ScriptedReplica, stats

TOKENS = list(range(100, 100 + 4 * PAGE_SIZE))


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.start()
    yield house
    await house.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def add(house: House, *replicas: ScriptedReplica) -> None:
    """Add and wait until each has reported and sent its snapshot."""
    for replica in replicas:
        house.add(replica)
    await until(lambda: house.fleet.num_ready == len(replicas) and not house.fleet.sync.asking)


def overlap(house: House, token_ids: list[int] = TOKENS) -> int:
    """Prompt tokens that the router believes the best replica to hold."""
    query = RouteQuery(rid="x", token_ids=np.array([*token_ids, 1], dtype=np.int32))
    return house.router.explain_only(query).best_overlap[1]


async def test_what_a_replica_held_before_is_known_from_its_snapshot(house: House) -> None:
    replica = ScriptedReplica("r0")
    replica.store(TOKENS, tell=False)
    await add(house, replica)
    assert overlap(house) == 64
    assert (replica.num_snapshots, house.fleet.sync.num_gaps) == (1, 0)


async def test_events_keep_the_index_right(house: House) -> None:
    replica = ScriptedReplica("r0")
    await add(house, replica)
    assert overlap(house) == 0
    replica.store(TOKENS)
    await until(lambda: overlap(house) == 64)
    replica.clear()
    await until(lambda: overlap(house) == 0)
    assert house.fleet.sync.num_snapshots == 1


async def test_a_lost_event_costs_one_snapshot(house: House) -> None:
    replica = ScriptedReplica("r0")
    await add(house, replica)
    replica.store(TOKENS, tell=False)
    replica.store(TOKENS[:32])  # its number shows that one was lost
    await until(lambda: overlap(house) == 64)
    assert (house.fleet.sync.num_gaps, replica.num_snapshots) == (1, 2)


async def test_a_lost_last_event_is_told_of_by_the_reports(house: House) -> None:
    """Nothing follows it, so that no gap shows: three reports of a number that never came lead to a snapshot."""
    replica = ScriptedReplica("r0")
    await add(house, replica)
    replica.store(TOKENS, tell=False)
    await replica.send_reports(3)
    await until(lambda: overlap(house) == 64)
    assert (house.fleet.sync.num_gaps, replica.num_snapshots) == (1, 2)
    await replica.send_reports(3)
    replica.store(list(range(500, 500 + PAGE_SIZE)))
    await until(lambda: overlap(house, list(range(500, 500 + PAGE_SIZE))) == 16)
    assert (house.fleet.sync.num_gaps, replica.num_snapshots) == (1, 2)


async def test_a_report_that_is_ahead_of_its_events_costs_nothing() -> None:
    """Statistics may be a step younger than the events beside them: those come before the next report."""
    router = Router("round_robin", Random(0), lambda: 0.0)
    router.update([ReplicaView(replica_id="r0", time_s=0.0, pool_pages=100)])
    sync = CacheSync(router, LocalLeases())
    for seq in range(1, 50):
        sync.on_report("r0", seq, "router")  # event ``seq`` is still on its way
        if seq % 2:
            sync.on_report("r0", seq, "router")  # such as attaching sends, without events
        sync.on_events("r0", [PagesStored(seq, np.array([seq], dtype=np.uint64))], "router")
        sync.check()
    assert (sync.num_gaps, sync.asking) == (0, frozenset())
    sync.on_report("r0", 50, "router")
    sync.on_report("r0", 50, "router")
    assert sync.asking == frozenset()
    sync.on_report("r0", 50, "router")
    assert sync.asking == {"r0"}
    sync.on_snapshot("r0", IndexSnapshot(seq=50, keys=np.array([7], dtype=np.uint64)))
    sync.check()
    assert (sync.num_gaps, router.num_pages("r0")) == (1, (1, 0))


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
    other = House(router_id="another router")
    await other.start()
    twin = ScriptedReplica("r0")
    twin.held, twin.cache = first.held, first.cache
    first.store(TOKENS)
    twin.held = first.held
    await add(other, twin)
    await until(lambda: overlap(house) == 64)
    assert house.router.held("r0") == other.router.held("r0") != set()
    await other.stop()


async def test_eight_replicas_of_100_000_pages_are_known_within_a_second() -> None:
    """A router that starts, or starts again: attach, snapshots over the channel, index; all in this process, so that
    its CPU time is what a quiet machine would take."""
    house, replicas = House(), []
    rng = np.random.default_rng(0)
    num_pages = 100_000
    for number in range(8):
        replica = ScriptedReplica(f"r{number}")
        replica.held = rng.integers(0, 2**63, size=num_pages, dtype=np.uint64)
        replica.stats = stats(num_pages)
        replica.cache.stored(replica.held, None, PAGE_SIZE, np.empty(0, dtype=np.int32))
        replica.cache.drain()
        replicas.append(replica)
    await house.start()
    started_s = time.process_time()
    await add(house, *replicas)
    took_s = time.process_time() - started_s
    assert [house.router.num_pages(replica.replica_id)[0] for replica in replicas] == [num_pages] * 8
    print(f"8 x {num_pages:,} pages in {took_s:.2f} s")
    assert took_s < 1.0
    await house.stop()
