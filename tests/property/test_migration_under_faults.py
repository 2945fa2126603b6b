"""Requests that wait and move between real engines, at random and under faults: each is begun once, and none is lost.

The engines run over fake devices, whose tokens are a function of the prompt. Faults: connections that end with all that
runs behind them, steps that do not end for a while, questions and answers that come late, clients that leave.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from deployments.channel.channel_client import ChannelClient
from deployments.dispatch.attempt import Attempt
from deployments.record.route_log import RequestWatch
from replicas.types import GenerateRequest, SamplingParams, TokenDelta
from routing.migration import Cause, Migration, Waiting
from routing.types import NoReplica
from tests.fakes import continuation
from tests.pairwise import ALL
from tests.unit.deployments.in_process import House
from tests.unit.deployments.sample_values import ids
from tests.unit.deployments.slow_replica import SlowReplica

pytestmark = pytest.mark.timeout(1200 if ALL else 300)
MOVES = 10_000 if ALL else 300
CLIENTS, SHARED = 32, 12


class Replica(SlowReplica):
    """A replica that runs two requests at a time, and answers when it likes."""

    def __init__(self, replica_id: str, rng: Random) -> None:
        super().__init__(replica_id, max_running=2, step_s=0.0005, report_period_s=0.05)
        self._rng = rng

    def _take_back(self, client: ChannelClient, rid: str) -> None:
        """Ask the engine late: behind what the router says after it."""
        asyncio.get_running_loop().call_later(self._rng.choice((0.0, 0.001, 0.01)), super()._take_back, client, rid)


class Counted(RequestWatch):
    def __init__(self) -> None:
        super().__init__()
        self.num_moved = 0

    def moved(self, cause: Cause) -> None:
        self.num_moved += 1


async def client(house: House, rng: Random, number: int, done: Callable[[], bool]) -> int:
    """Send request after request, and leave some early. Returns: how many were answered."""
    num_answered, at = 0, 0
    while not done():
        at += 1
        prompt = [7] * rng.choice((0, SHARED)) + [rng.randrange(1_000) for _ in range(rng.randint(1, 40))]
        request = GenerateRequest(
            rid=f"c{number}x{at}.0-me",
            token_ids=np.array(prompt, dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=rng.randint(1, 6), n=rng.choice((1, 1, 1, 2))),
        )
        leaves_s, deltas = rng.choice((None, None, None, 0.02)), list[TokenDelta]()
        stream = house.dispatcher.stream(request)
        with contextlib.suppress(TimeoutError):
            async with contextlib.aclosing(stream), asyncio.timeout(leaves_s):
                deltas = [delta async for delta in stream]
            for index in range(request.sampling.n):
                expected = continuation(prompt, request.sampling.max_new_tokens)
                assert ids(deltas, index) == expected, (request.rid, deltas[-1].finish)
            num_answered += 1
    return num_answered


async def move_at_random(house: House, rng: Random) -> None:
    """Ask for requests that may wait, whatever that gains; now and then by the rule."""
    while True:
        await asyncio.sleep(0.002)
        house.dispatcher.move_waiting()
        for attempt, waiting in list(house.dispatcher._running.items()):
            if attempt.may_wait and attempt.move is None and rng.random() < 0.5:
                ask_back(house, attempt, waiting)


def ask_back(house: House, attempt: Attempt, waiting: Waiting) -> None:
    elsewhere = replace(waiting.query, excluded=frozenset({waiting.decision.replica_id}))
    with contextlib.suppress(NoReplica):
        decision = house.router.choose(elsewhere)
        attempt.ask_back(Migration(waiting=waiting, decision=decision, cause="freed", wait_s=0.0))


async def break_things(replicas: list[Replica], rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0.0, 0.4))
        replica = rng.choice(replicas)
        if rng.random() < 0.3 and replica is not replicas[0]:  # a request that has failed at all of them has no other
            replica.die()
        else:
            replica.go_on.clear()
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            replica.go_on.set()


async def test_thousands_of_moves_under_faults_begin_no_request_twice_and_lose_none() -> None:
    rng, watch = Random(0), Counted()
    house = House(policy="estimated_ttft", max_tries=1_000, retry_wait_s=60.0)
    house.dispatcher.watch = watch
    await house.start()
    replicas = [Replica(f"r{number}", Random(number)) for number in range(3)]
    await house.ready(*replicas)
    faults = [asyncio.create_task(move_at_random(house, rng)), asyncio.create_task(break_things(replicas, rng))]
    clients = (client(house, Random(100 + at), at, lambda: watch.num_moved >= MOVES) for at in range(CLIENTS))
    answered = await asyncio.gather(*clients)
    for task in faults:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert sum(answered) > 0
    assert sum(len(replica.given_back) for replica in replicas) >= watch.num_moved >= MOVES
    for replica in replicas:
        assert not replica.begun & replica.given_back
        await replica.loop.run_on_engine(lambda engine: engine.scheduler.check())
    await house.stop()
    for replica in replicas:
        await replica.stop()
        replica.loop.engine.kv.check_idle()
