"""The router's index follows the replicas' caches: batches, gaps, snapshots, several routers."""

from collections.abc import AsyncIterator

import numpy as np
import pytest

from deployments.dispatch.leases import ReplicaGone
from routing.types import IndexSnapshot, RouteQuery
from tests.unit.deployments.in_process import PAGE_SIZE, House, ScriptedReplica
from tests.unit.deployments.sample_values import stats
from tests.waiting import until_async

TOKENS = list(range(100, 100 + 4 * PAGE_SIZE))


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.start()
    yield house
    await house.stop()


async def add(house: House, *replicas: ScriptedReplica) -> None:
    """Add and wait until each has reported and sent its snapshot."""
    for replica in replicas:
        house.add(replica)
    await until_async(lambda: house.fleet.num_ready == len(replicas) and not house.fleet.sync.asking)


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


async def test_a_lost_last_event_is_told_of_by_the_reports(house: House) -> None:
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
    other = House(router_id="another router")
    await other.start()
    twin = ScriptedReplica("r0")
    twin.held, twin.cache = first.held, first.cache
    first.store(TOKENS)
    twin.held = first.held
    await add(other, twin)
    await until_async(lambda: overlap(house) == 64)
    assert house.router.held("r0") == other.router.held("r0") != set()
    await other.stop()


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
