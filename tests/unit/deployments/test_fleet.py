"""Which replicas a router sees, and when it stops trusting one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.channel.channel_server import ChannelAddress
from deployments.channel.frames import ReplicaReport
from deployments.dispatch import ray_leases
from deployments.dispatch.leases import ReplicaGone, ReplicaInfo
from deployments.fleet.fleet import STALE_S, Fleet
from tests.harness import Clock
from tests.unit.deployments.in_process import House, LocalLeases, ScriptedReplica
from tests.unit.deployments.sample_values import info, stats


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.start()
    yield house
    await house.stop()


async def test_a_member_is_ready_once_it_has_attached_and_reported(house: House) -> None:
    assert house.fleet.describe() == "no replica is running yet"
    assert not await house.fleet.wait_ready(0.01)
    house.add(ScriptedReplica("r0"))
    assert house.fleet.describe() == "r0: starting"
    assert await house.fleet.wait_ready(5)
    assert house.fleet.describe() == "r0: accepting"
    assert [each.replica_id for each in house.fleet.infos] == ["r0"]


async def test_a_replica_that_leaves_is_forgotten_at_once(house: House) -> None:
    house.add(ScriptedReplica("r0"))
    await house.fleet.wait_ready(5)
    house.remove("r0")
    assert house.fleet.num_ready == 0
    assert house.fleet.infos == []
    house.fleet.on_report("r0", ReplicaReport(stats=stats(), error=None, num_open=0))  # it still drains
    assert house.fleet.num_ready == 0


async def test_a_replica_that_cannot_be_reached_yet_is_tried_again(house: House) -> None:
    class Shy(ScriptedReplica):
        num_asked = 0

        async def attach(self, address: ChannelAddress) -> ReplicaInfo:
            self.num_asked += 1
            if self.num_asked == 1:
                raise ReplicaGone("not yet")
            return await super().attach(address)

    shy = Shy("r0")
    house.add(shy)
    assert await house.fleet.wait_ready(5)
    assert shy.num_asked == 2


async def test_an_unhealthy_or_silent_replica_is_passed_over() -> None:
    clock, house = Clock(), House()
    fleet = Fleet(router=house.router, leases=LocalLeases(), clock=clock)
    fleet.set_members({"r0"})
    fleet._infos["r0"] = info("r0")
    fleet.on_report("r0", ReplicaReport(stats=stats(), error=None, num_open=0))
    assert fleet.num_ready == 1
    clock.now_s += STALE_S - 1
    assert fleet.num_ready == 1
    clock.now_s += 2
    assert fleet.num_ready == 0
    fleet.on_report("r0", ReplicaReport(stats=stats(), error="rank 1 died", num_open=0))
    assert (fleet.num_ready, fleet.describe()) == (0, "r0: unhealthy")
    fleet.check()


async def test_who_waits_for_pages_is_told_apart_from_who_waits_to_be_computed() -> None:
    house = House()
    fleet = Fleet(router=house.router, leases=LocalLeases(), clock=Clock())
    fleet.set_members({"r0"})
    fleet._infos["r0"] = info("r0")
    said = stats(num_running=1, num_waiting=2, num_preallocating=3, num_receiving=4)
    fleet.on_report("r0", ReplicaReport(stats=said, error=None, num_open=0))
    [view] = house.router.views
    assert (view.num_running, view.num_waiting, view.num_receiving) == (1, 2, 7)


async def test_one_that_hangs_is_passed_over_within_a_second_while_another_speaks() -> None:
    """A process that is stopped keeps its connection: only its silence tells. If all are silent, the machine is."""
    clock, house = Clock(), House()
    fleet = Fleet(router=house.router, leases=LocalLeases(), report_period_s=0.1, clock=clock)
    fleet.set_members({"r0", "r1"})
    for name in ("r0", "r1"):
        fleet._infos[name] = info(name)
        fleet.on_report(name, ReplicaReport(stats=stats(), error=None, num_open=0))
    clock.now_s += 0.9
    fleet.on_report("r1", ReplicaReport(stats=stats(), error=None, num_open=0))
    assert fleet.num_ready == 2
    clock.now_s += 0.2
    assert fleet.describe() == "r0: unhealthy, r1: accepting"
    clock.now_s += 1.0
    assert fleet.num_ready == 2


async def test_a_long_report_period_is_no_silence() -> None:
    clock, house = Clock(), House()
    fleet = Fleet(router=house.router, leases=LocalLeases(), report_period_s=2.0, clock=clock)
    fleet.set_members({"r0", "r1"})
    for name in ("r0", "r1"):
        fleet._infos[name] = info(name)
        fleet.on_report(name, ReplicaReport(stats=stats(), error=None, num_open=0))
    clock.now_s += 9.0
    fleet.on_report("r1", ReplicaReport(stats=stats(), error=None, num_open=0))
    assert fleet.num_ready == 2
    clock.now_s += 1.5
    assert fleet.num_ready == 1


async def test_the_age_of_a_report_grows_for_as_long_as_a_member_is_mute() -> None:
    """Joined at 0, a report at 10 s of a step that began 4 s before it; then silence, through attaching again."""
    clock, house = Clock(), House()
    clock.now_s = 0.0
    fleet = Fleet(router=house.router, leases=LocalLeases(), clock=clock)
    fleet.set_members({"r0"})
    clock.now_s = 10.0
    assert fleet.report_ages_s() == {"r0": 10.0}
    fleet._infos["r0"] = info("r0")
    fleet.on_report("r0", ReplicaReport(stats=stats(), error=None, num_open=0, age_s=4.0))
    assert fleet.report_ages_s() == {"r0": 4.0}
    [seen] = fleet.seen()
    assert seen.report_age_s == 4.0
    ages = []
    for _ in range(6):
        clock.now_s += STALE_S
        fleet.attach_silent_again()
        fleet._infos["r0"] = info("r0")  # it can be attached, and says nothing
        ages.append(fleet.report_ages_s()["r0"])
    assert ages == [4 + STALE_S * (turn + 1) for turn in range(6)]
    fleet.check()
    fleet.set_members(set())
    assert fleet.report_ages_s() == {}


async def test_a_silent_replica_is_attached_again_and_the_second_time_over_a_new_connection() -> None:
    """A report in between means that the connection works."""
    clock, asked = Clock(), list[bool]()

    class Mute(ScriptedReplica):
        async def attach(self, address: ChannelAddress) -> ReplicaInfo:
            asked.append(address.renew)
            return info("r0")

    leases = LocalLeases()
    leases.replicas["r0"] = Mute("r0")
    fleet = Fleet(router=House().router, leases=leases, clock=clock)
    address = ChannelAddress(router_id="router", node_id="here", unix_path="", host="", port=1, token="")
    fleet.start(address, leave=lambda *_: None)
    fleet.set_members({"r0"})
    for reports in (False, False, True, False):
        await asyncio.sleep(0)
        if reports:
            fleet.on_report("r0", ReplicaReport(stats=stats(), error=None, num_open=0))
        clock.now_s += STALE_S + 1
        fleet.attach_silent_again()
        fleet.check()
    await asyncio.sleep(0)
    assert asked == [False, False, True, False, True]
    await fleet.stop()


async def test_one_that_does_not_answer_is_left_out_of_what_all_are_asked(house: House) -> None:
    for name in ("r0", "r1"):
        house.add(ScriptedReplica(name))
    async with asyncio.timeout(5):
        while house.fleet.num_ready < 2:
            await asyncio.sleep(0.005)

    async def ask(replica_id: str) -> int:
        if replica_id == "r0":
            raise ReplicaGone("gone")
        return 7

    assert await house.fleet.ask_all(ask) == {"r1": 7}

    async def ask_stuck(replica_id: str) -> int:
        return await asyncio.Event().wait() if replica_id == "r0" else 7

    async with asyncio.timeout(1):
        assert await house.fleet.ask_all(ask_stuck, timeout_s=0.01) == {"r1": 7}


def test_membership_tells_what_is_and_what_changes() -> None:
    heard: list[frozenset[str]] = []
    deployment = ray_leases.key("app", "a deployment of this test")
    ray_leases.publish(deployment, frozenset({"r0"}))
    ray_leases.listen(deployment, heard.append)
    ray_leases.publish(deployment, frozenset({"r0", "r1"}))
    ray_leases.publish(ray_leases.key("app", "another"), frozenset({"x"}))
    assert heard == [frozenset({"r0"}), frozenset({"r0", "r1"})]


async def test_a_router_that_stops_attaches_nobody_again(house: House) -> None:
    """Its channel ends the connections, which is not to be mistaken for replicas that died."""
    asked: list[str] = []

    class Asked(ScriptedReplica):
        async def attach(self, address: ChannelAddress) -> ReplicaInfo:
            asked.append(self.replica_id)
            return await super().attach(address)

    house.add(Asked("r0"))
    assert await house.fleet.wait_ready(5)
    await house.fleet.stop()
    house.fleet.on_lost("r0")
    await asyncio.sleep(0)
    assert asked == ["r0"]
