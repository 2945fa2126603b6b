"""A request that waits at a replica moves to another one: what is asked, what is told, and what may come in between."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from deployments.channel.frames import KeptRequest, TakeBack, encode
from deployments.http.arrivals import header_part
from deployments.record.route_forms import record_body, request_row
from deployments.record.route_log import RouteRecord
from replicas.types import TokenDelta
from routing.migration import Migration
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.sample_values import ids
from tests.unit.deployments.slow_replica import SlowReplica
from tests.waiting import until_async


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Its engines report when they attach, and then no more: a test says what the router knows."""
    async with House(policy="estimated_ttft") as house:
        yield house


@pytest.fixture
async def slow() -> AsyncIterator[list[SlowReplica]]:
    """Two engines that run one request at a time."""
    both = [SlowReplica("r0", max_running=1), SlowReplica("r1", max_running=1)]
    yield both
    for each in both:
        each.go_on.set()
        await until_async(lambda loop=each.loop: not loop.num_open)  # what ran behind a lost connection is aborted
        each.check()
        await each.stop()


def queued(house: House, replica_id: str, tokens: int) -> None:
    """The router hears of a queue there."""
    [view] = [view for view in house.router.views if view.replica_id == replica_id]
    heard = replace(view, time_s=time.monotonic(), num_waiting=9, queued_uncached_tokens=tokens)
    house.router.report(heard)


def sent(house: House, rid: str) -> "asyncio.Task[list[TokenDelta]]":
    return asyncio.create_task(house.collect(rid=rid, max_new_tokens=3, num_tokens=8))


async def waits_behind_another(house: House, slow: list[SlowReplica]) -> "list[asyncio.Task[list[TokenDelta]]]":
    """Two requests are at r0, of which one runs and one waits; r1 has joined, and the router believes r0 to be slow."""
    first, second = slow
    first.go_on.clear()
    await house.ready(first)
    tasks = [sent(house, "a0.0-me")]
    await until_async(lambda: bool(first.begun))
    tasks.append(sent(house, "a1.0-me"))
    await until_async(lambda: first.loop.num_open == 2)
    await house.ready(second)
    for waiting in house.dispatcher._running.values():
        object.__setattr__(waiting.decision, "time_s", waiting.decision.time_s - 2.0)  # they were sent long ago
    queued(house, "r0", 20_000)
    return tasks


def record(house: House, name: str) -> RouteRecord:
    found = house.dispatcher.routes.get(name)
    assert found is not None
    return found


async def test_a_request_that_waits_goes_to_a_replica_that_has_joined_which_is_a_try_and_no_retry(
    house: House, slow: list[SlowReplica]
) -> None:
    tasks = await waits_behind_another(house, slow)
    house.dispatcher.move_waiting()
    await until_async(lambda: slow[0].num_asked == 2)
    slow[0].go_on.set()  # the engine answers between two steps
    undisturbed = ids(await house.collect(rid="b.0-me", max_new_tokens=3, num_tokens=8))
    assert [ids(await task) for task in tasks] == [undisturbed] * 2
    stayed, moved = record(house, "a0.0-me"), record(house, "a1.0-me")
    assert [each.decision.replica_id for each in stayed.tries] == ["r0"]
    assert [(each.decision.replica_id, each.moved, each.failure) for each in moved.tries] == [
        ("r0", "join", None), ("r1", None, None),
    ]  # fmt: skip
    assert slow[0].begun == {"a0.0-me"}  # which was admitted, and stayed though it was asked for
    assert slow[0].given_back == {"a1.0-me"}
    assert house.dispatcher.num_retries == 0
    body, row = record_body(moved, router_id="router"), request_row(moved, router_id="router")
    assert (body["num_retries"], body["num_migrations"]) == (0, 1)
    assert [(each["moved"], each["outcome"]) for each in body["tries"]] == [("join", "moved"), (None, "ok")]
    assert "Outcome: it waited there, and moved to begin sooner." in body["explanation"]
    assert (row["tries"], [each["moved"] for each in row["tries_at"]]) == (1, ["join", None])
    assert "tries=1; migrations=1" in header_part(moved)
    assert moved.timeline.stages is not None
    moved.timeline.check()


async def test_a_client_that_leaves_while_its_request_is_asked_for_leaves_nothing_behind(
    house: House, slow: list[SlowReplica]
) -> None:
    tasks = await waits_behind_another(house, slow)
    house.dispatcher.move_waiting()
    assert house.router.num_open == 4  # each of the two, and where it would go
    tasks[1].cancel()
    await until_async(lambda: house.router.num_open == 2)
    slow[0].go_on.set()
    assert len(ids(await tasks[0])) == 3
    house.dispatcher.check()


class Deaf(ScriptedReplica):
    """It answers that it keeps what it is asked for, once it is told to."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.hold.clear()
        self.kept: list[str] = []

    def _asked(self, asked: object) -> None:
        if isinstance(asked, TakeBack):
            self.kept.append(asked.rid)
        else:
            super()._asked(asked)  # type: ignore[arg-type]


async def test_a_request_that_its_replica_keeps_is_not_asked_for_again(house: House) -> None:
    replica, other = Deaf("r0"), ScriptedReplica("r1")
    await house.ready(replica)
    task = sent(house, "a0.0-me")
    await until_async(lambda: bool(replica.requests))
    await house.ready(other)
    [(attempt, waiting)] = house.dispatcher._running.items()
    elsewhere = house.router.choose(replace(waiting.query, excluded=frozenset({"r0"})))
    attempt.ask_back(Migration(waiting=waiting, decision=elsewhere, cause="freed", wait_s=1.0))
    await until_async(lambda: replica.kept == ["a0.0-me"])
    assert (house.router.num_open, attempt.may_wait) == (2, True)
    assert replica._client is not None
    replica._client.send(encode(KeptRequest("a0.0-me")))
    await until_async(lambda: not attempt.may_wait)
    assert (house.router.num_open, attempt.move) == (1, None)
    replica.hold.set()
    assert len(ids(await task)) == 3
    assert other.requests == []
