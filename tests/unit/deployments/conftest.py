"""HTTP app, dispatcher, channel and a real engine on the embedded model in this process; only Ray is absent."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from dashboards.catalog import Process
from deployments.http.http_app import make_app
from deployments.http.service import Service, read_face
from deployments.replica.served_engine import ServedEngine
from deployments.settings.schema import ModelSettings
from deployments.watch.metrics.emitter import Identity, emitter_of
from replicas.config import CacheConfig
from replicas.engine.loop import EngineLoop
from replicas.launch import load_engine
from replicas.text.tokenizer import Tokenizer
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House

POOL_TOKENS = 12_000
ROUTER = Identity(model="SmolLM2-135M-Instruct", role="router", replica="router")


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of day are shown in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[EngineLoop]:
    """One real engine for all tests: SmolLM2, 750 pages."""
    cache = CacheConfig(max_total_tokens=POOL_TOKENS)
    loop = EngineLoop(load_engine(MODEL, cache=cache, products="own", num_threads=2, record_events=True))
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture
async def house(engine_loop: EngineLoop) -> AsyncIterator[House]:
    """A router with one replica, the real engine."""
    house = House()
    await house.start()
    house.add(ServedEngine(engine_loop, replica_id="r0", node_id="here"))
    assert await house.fleet.wait_ready(5.0)
    yield house
    await house.stop()
    while engine_loop.num_open:
        await asyncio.sleep(0.01)
    engine_loop.engine.kv.check([])


@pytest.fixture
def service(house: House, engine_loop: EngineLoop) -> Service:
    return service_of(house, engine_loop)


def service_of(house: House, engine_loop: EngineLoop) -> Service:
    """What HTTP needs to serve ``house``, with the tokenizer of ``engine_loop``."""
    tokenizer: Tokenizer = engine_loop.engine.tokenizer
    return Service(
        model=read_face(ModelSettings(path=MODEL)),
        tokenizer=tokenizer,
        dispatcher=house.dispatcher,
        fleet=house.fleet,
        leases=house.leases,
        settings={},
        registry=emitter_of(Process.ROUTER, ROUTER, disaggregated=False).registry,
    )


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """HTTP to the app, without a socket; an exception in the app would raise here."""
    transport = httpx.ASGITransport(app=make_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://manta", timeout=60) as client:
        yield client
