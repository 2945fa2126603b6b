"""Which replica is ordered to push its cache, to whom and when: by a router whose replicas come and go."""

import asyncio
from collections.abc import Callable

import pytest

from deployments.fleet import cache_migration
from kvtransfer.migration.wire import MigrationAddress
from kvtransfer.types import PeerAddress
from replicas.types import EngineStats
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.sample_values import stats
from tests.waiting import until_async


def movable(replica_id: str, *, at: EngineStats | None = None) -> ScriptedReplica:
    replica = ScriptedReplica(replica_id)
    peer = PeerAddress(host="127.0.0.1", port=1, incarnation=replica_id)
    replica.migration = MigrationAddress(peer=peer, token="secret")
    replica.stats = at or stats(num_extend_steps=1)
    return replica


def names(replica: ScriptedReplica) -> list[list[str]]:
    return [[each.peer.incarnation for each in order.targets] for order in replica.orders]


def leave(house: House, replica_id: str) -> Callable[[], None]:
    """It drains: no member any more, its connection lives. Returns: what takes that back."""
    replica = house.leases.replicas.pop(replica_id)
    house.fleet.set_members(house.leases.replicas)

    def back() -> None:
        house.leases.replicas[replica_id] = replica
        house.fleet.set_members(house.leases.replicas)

    return back


async def test_a_replica_that_leaves_pushes_to_those_that_stay_the_least_busy_first() -> None:
    a, c = movable("a"), movable("c")
    b = movable("b", at=stats(num_extend_steps=1, waiting_uncached_tokens=500))
    without = ScriptedReplica("without")  # it has no host tier
    async with House() as house:
        await house.ready(a, b, c, without)
        leave(house, "a")
        await until_async(lambda: bool(a.orders))
        house.fleet.check()
    assert names(a) == [["c", "b"]]
    assert (a.orders[0].most_s, a.orders[0].share, a.orders[0].hand_over_s) == (5.0, 0.5, 8.0)
    assert not b.orders + c.orders + without.orders


async def test_one_that_is_back_at_once_pushes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_migration, "BACK_S", 0.05)
    a, b = movable("a"), movable("b")
    async with House() as house:
        await house.ready(a, b)
        leave(house, "a")()
        await until_async(lambda: len(house.fleet.infos) == 2)
        leave(house, "b")  # later than a: when it has its order, that of a would be there
        await until_async(lambda: bool(b.orders))
    assert not a.orders


async def test_the_last_one_pushes_nowhere() -> None:
    a = movable("a")
    async with House() as house:
        await house.ready(a)
        leave(house, "a")
        house.fleet.check()
        assert not house.fleet._migration.leaving


async def test_a_new_replica_is_filled_before_it_is_used() -> None:
    a, new = movable("a"), movable("new", at=stats())
    async with House(fill_s=5.0) as house:
        await house.ready(a)
        seen: list[bool] = []
        push = a.push_cache

        async def pushes(order: object) -> object:
            seen.append(any(view.replica_id == "new" for view in house.router.views))
            return await push(order)  # type: ignore[arg-type]

        a.push_cache = pushes  # type: ignore[method-assign, assignment]
        await house.ready(new)
    assert names(a) == [["new"]]
    assert (a.orders[0].most_s, a.orders[0].share, a.orders[0].most_bytes) == (5.0, 1.0, 1 << 29)
    assert seen == [False]


async def test_one_that_has_computed_is_not_new() -> None:
    """To a router that has just started all replicas are; they are not filled again."""
    a, b = movable("a"), movable("b")
    async with House(fill_s=5.0) as house:
        await house.ready(a)
        await house.ready(b)
    assert not a.orders + b.orders


async def test_a_holder_that_hangs_delays_a_new_replica_by_its_bound_alone() -> None:
    a, new = movable("a"), movable("new", at=stats())

    async def hangs(order: object) -> object:
        await asyncio.Event().wait()
        return order

    a.push_cache = hangs  # type: ignore[method-assign, assignment]
    async with House(fill_s=0.05) as house:
        await house.ready(a)
        async with asyncio.timeout(30):
            await house.ready(new)
