"""Which replicas hang, and what becomes of their requests."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.channel.frames import ReplicaReport
from deployments.dispatch.attempt import STEADY_S, Tries
from deployments.dispatch.leases import ReplicaGone, ReplicaHangs
from deployments.fleet.fleet import SETTLED_STEPS, Fleet, Hangs
from replicas.types import TokenDelta
from routing.types import Role
from tests.harness import Clock
from tests.unit.deployments.in_process import House, LocalLeases, ScriptedReplica
from tests.unit.deployments.sample_values import ask, info, stats

BOTH = ("r0", "r1")


def report(step_age_s: float = 0.0, *, steps: int = 1000, longest_step_s: float = 0.0) -> ReplicaReport:
    said = stats(num_decode_steps=steps, longest_step_s=longest_step_s)
    return ReplicaReport(stats=said, error=None, num_open=1, step_age_s=step_age_s)


def hangs_of(clock: Clock) -> Hangs:
    return Hangs(hang_s=4.0, silent_s=1.0, clock=clock)


def test_a_silent_replica_hangs_after_the_timeout_while_another_one_speaks() -> None:
    clock = Clock()
    hangs = hangs_of(clock)
    for name in BOTH:
        hangs.heard(name, report())
    clock.now_s = 3.9
    hangs.heard("r1", report())
    assert hangs.find(BOTH) == {}
    clock.now_s = 4.1
    assert hangs.find(BOTH) == {"r0": "it has said nothing for 4.1 s"}
    assert hangs.find(["r0"]) == {}, "there is nowhere to go"
    clock.now_s = 9.0
    assert hangs.find(BOTH) == {}, "all are silent: it is the machine that is busy"
    hangs.heard("r1", report())
    hangs.lost("r0")
    assert hangs.find(BOTH) == {}, "a connection that ended has no streams"


def test_a_silent_prefill_replica_hangs_after_twice_as_long_and_in_a_step_as_soon_as_others() -> None:
    """Heartbeats of the decode side find its silence within 4 s; of its engine thread they tell nothing."""
    clock = Clock()
    hangs = hangs_of(clock)
    for name in BOTH:
        hangs.heard(name, report())
    for now_s, found in ((7.9, {}), (8.1, {"r0": "it has said nothing for 8.1 s"})):
        clock.now_s = now_s
        hangs.heard("r1", report())
        assert hangs.find(["r1"], prefill=["r0"]) == found
    hangs.heard("r0", report(4.2))
    assert hangs.find(["r1"], prefill=["r0"]) == {"r0": "its step has been running for 4.2 s"}


def test_a_step_hangs_after_the_timeout_and_four_times_the_longest_recent_step_of_any_replica() -> None:
    hangs = hangs_of(Clock())
    hangs.heard("r1", report(longest_step_s=0.5))
    hangs.heard("r0", report(3.9))
    assert hangs.find(BOTH) == {}
    hangs.heard("r0", report(4.2))
    assert hangs.find(BOTH) == {"r0": "its step has been running for 4.2 s"}
    hangs.heard("r1", report(longest_step_s=3.0))  # a chunk of such a prompt takes so long
    assert hangs.find(BOTH) == {}
    hangs.heard("r0", report(12.5))
    assert hangs.find(BOTH).keys() == {"r0"}
    hangs.heard("r1", report(12.5, longest_step_s=3.0))
    assert hangs.find(BOTH) == {}, "neither can go on for the other"


def test_an_engines_first_steps_may_take_long() -> None:
    """They compile, and no step has told yet how long one takes."""
    hangs = hangs_of(Clock())
    hangs.heard("r1", report())
    hangs.heard("r0", report(60.0, steps=SETTLED_STEPS - 1))
    assert hangs.find(BOTH) == {}
    hangs.heard("r0", report(60.0, steps=SETTLED_STEPS))
    assert hangs.find(BOTH).keys() == {"r0"}


def test_time_in_which_the_router_itself_stood_still_is_nobodys_silence() -> None:
    clock = Clock()
    hangs = hangs_of(clock)
    for name in BOTH:
        hangs.heard(name, report())
    clock.now_s = 10.0
    hangs.heard("r1", report())  # read first; what r0 sent meanwhile is not read yet
    hangs.stood_still(9.5)
    assert hangs.find(BOTH) == {}
    clock.now_s = 13.6
    hangs.heard("r1", report())
    assert hangs.find(BOTH).keys() == {"r0"}


def test_a_prefill_replica_alone_cannot_go_on_for_one_that_hangs() -> None:
    clock = Clock()
    fleet, left = Fleet(router=House().router, leases=LocalLeases(), clock=clock), list[str]()
    fleet._leave = lambda replica_id, error: left.append(replica_id)
    fleet.set_members({"r0", "r1"})
    fleet._infos = {"r0": info("r0"), "r1": info("r1", role=Role.PREFILL)}
    for name in BOTH:
        fleet.on_report(name, report())
    clock.now_s = 5.0
    fleet.on_report("r1", report())
    fleet.leave_hanging()
    assert left == []
    fleet._infos["r1"] = info("r1")
    fleet.leave_hanging()
    assert left == ["r0"]


def test_a_hung_step_is_passed_over_by_new_requests_and_taken_again_when_it_ends() -> None:
    fleet = Fleet(router=House().router, leases=LocalLeases(), clock=Clock())
    fleet.set_members({"r0", "r1"})
    fleet._infos = {name: info(name) for name in BOTH}
    fleet.on_report("r0", report(5.0))
    assert fleet.num_ready == 1, "alone it is waited for"
    fleet.on_report("r1", report())
    assert fleet.describe() == "r0: unhealthy, r1: accepting"
    fleet.on_report("r0", report())
    assert fleet.num_ready == 2


def test_tries_are_counted_anew_after_a_replica_has_served_for_a_while() -> None:
    clock = Clock()
    tries, gone = Tries(2, clock), ReplicaGone("gone")
    for number in range(5):  # rolling restarts under one long stream
        assert tries.number == number
        assert not tries.is_last or number
        tries.brought_tokens()
        clock.now_s += STEADY_S
        tries.brought_tokens()
        assert not tries.is_last
        assert tries.failed(f"r{number}", gone)
        assert tries.excluded == {f"r{number}"}
    tries.brought_tokens()
    clock.now_s += STEADY_S - 1
    tries.brought_tokens()  # a request that kills each of them soon
    assert tries.is_last
    assert not tries.failed("r9", gone)


def test_one_that_hangs_may_be_tried_again_when_it_is_back() -> None:
    tries = Tries(3, Clock())
    assert tries.failed("r0", ReplicaHangs("silent"))
    assert tries.failed("r1", ReplicaGone("gone"))
    assert tries.excluded == {"r1"}


@pytest.fixture
async def clock() -> Clock:
    return Clock()


@pytest.fixture
async def house(clock: Clock) -> AsyncIterator[House]:
    house = House(report_period_s=0.1, clock=clock, max_tries=2)
    await house.start()
    yield house
    await house.stop()


async def until_ready(house: House, *replicas: ScriptedReplica) -> None:
    for replica in replicas:
        house.add(replica)
    async with asyncio.timeout(5):
        while house.fleet.num_ready < len(replicas):
            await asyncio.sleep(0.005)


async def until_token(deltas: list[TokenDelta], num: int) -> None:
    async with asyncio.timeout(5):
        while sum(len(delta.token_ids) for delta in deltas) < num:
            await asyncio.sleep(0.001)


def follow(house: House, deltas: list[TokenDelta], **options: int) -> "asyncio.Task[None]":
    async def read(deltas: list[TokenDelta]) -> None:
        async for delta in house.dispatcher.stream(ask(**options)):  # type: ignore[arg-type]
            deltas += [delta]  # one by one, as they come

    return asyncio.create_task(read(deltas))


async def speak(house: House, replica: ScriptedReplica) -> None:
    """``replica`` reports, and the router has heard it."""
    said = house.fleet._hangs._said
    before = said[replica.replica_id]
    await replica.send_reports(1)
    async with asyncio.timeout(5):
        while said[replica.replica_id] is before:
            await asyncio.sleep(0.001)


def ids(deltas: list[TokenDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


@pytest.mark.parametrize("how", ["silent", "in a step"])
async def test_open_streams_go_on_elsewhere_and_late_tokens_of_the_first_are_dropped(
    house: House, clock: Clock, how: str
) -> None:
    """n = 2: each choice is resumed with what it has. The first replica hears nothing, and goes on when it can."""
    first, second = ScriptedReplica("r0"), ScriptedReplica("r1")
    first.pause_at, first.deaf = 3, True
    for replica in (first, second):
        replica.stats = report().stats
    await until_ready(house, first, second)
    deltas = list[TokenDelta]()
    reading = follow(house, deltas, n=2, max_new_tokens=8)
    await until_token(deltas, 6)
    if how == "silent":
        clock.now_s += 4.1
    else:
        first.step_age_s = 4.1
        await speak(house, first)
    await speak(house, second)
    house.fleet.leave_hanging()
    await asyncio.wait_for(reading, 5)
    assert [ids(deltas, index) for index in range(2)] == [list(range(1000, 1008))] * 2
    assert [request.resumed_ids for request in second.requests] == [(1000, 1001, 1002)] * 2
    assert first.num_aborted == 1, "its lease was cancelled"
    [retry] = house.dispatcher.retries
    assert retry.reason.startswith("ReplicaHangs: replica r0 hangs: it")
    first.hold.set()
    await speak(house, first)  # sent after its late tokens
    assert len(ids(deltas)) == 8


async def test_with_nobody_else_a_request_waits_for_a_replica_that_hangs(house: House, clock: Clock) -> None:
    only = ScriptedReplica("r0")
    only.pause_at = 3
    await until_ready(house, only)
    deltas = list[TokenDelta]()
    reading = follow(house, deltas, max_new_tokens=8)
    await until_token(deltas, 3)
    clock.now_s += 14.0
    house.fleet.leave_hanging()
    only.hold.set()
    await asyncio.wait_for(reading, 5)
    assert (ids(deltas), house.dispatcher.num_retries) == (list(range(1000, 1008)), 0)


async def test_the_last_try_stays_with_a_replica_that_hangs(house: House, clock: Clock) -> None:
    """Of two: the first died, so to fail is all that the request could do instead of waiting."""
    first, second, third = ScriptedReplica("r0", die_at=2), ScriptedReplica("r1"), ScriptedReplica("r2")
    second.pause_at = third.pause_at = 5
    await until_ready(house, first, second, third)
    deltas = list[TokenDelta]()
    reading = follow(house, deltas, max_new_tokens=8)
    await until_token(deltas, 5)
    [at] = [replica for replica in (second, third) if replica.requests]
    [other] = {second, third} - {at}
    clock.now_s += 6.0
    await speak(house, other)
    house.fleet.leave_hanging()
    at.hold.set()
    await asyncio.wait_for(reading, 5)
    assert (ids(deltas), house.dispatcher.num_retries, other.requests) == (list(range(1000, 1008)), 1, [])
