"""One engine behind the channel: what its routers see of its queue."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.served_engine import ServedEngine
from replicas.errors import Overloaded
from replicas.loop import EngineLoop
from tests.harness import fake_engine
from tests.unit.deployments.in_process import House, ask


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.start()
    yield house
    await house.stop()


@pytest.fixture
async def served() -> AsyncIterator[ServedEngine]:
    """A started engine over a fake device, at most 2 requests waiting."""
    engine, _ = fake_engine(max_queued_requests=2)
    loop = EngineLoop(engine)
    loop.start()
    served = ServedEngine(loop, replica_id="r0", node_id="here")
    yield served
    served.check()
    await served.stop()


async def test_a_queue_found_full_by_the_engine_thread_is_told_at_once(house: House, served: ServedEngine) -> None:
    """4 choices: fewer than may be open (2 + 8), more than may wait (2). No replica is dead, so none is waited for."""
    house.add(served)
    assert await house.fleet.wait_ready(5)
    async with asyncio.timeout(1):
        with pytest.raises(Overloaded, match="at most 2 may"):
            [delta async for delta in house.dispatcher.stream(ask(n=4))]
