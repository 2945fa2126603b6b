"""HTTP app, dispatcher, channel and a real engine on the embedded model in this process; only Ray is absent."""

import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from dashboards.catalog import Process
from deployments.http.http_app import make_app
from deployments.http.service import Service
from deployments.replica.served_engine import ServedEngine
from deployments.watch.metrics.emitter import Identity, emitter_of
from replicas.config import CacheConfig
from replicas.engine.loop import EngineLoop
from replicas.launch import EngineSettings, load_engine
from replicas.text.tokenizer import Tokenizer
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House
from tests.unit.deployments.listening import client_of
from tests.waiting import until_async

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
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[EngineLoop]:
    """One real engine for all tests: SmolLM2, 750 pages."""
    cache = CacheConfig(max_total_tokens=POOL_TOKENS)
    loop = EngineLoop(
        load_engine(EngineSettings(model=MODEL, cache=cache, num_threads=1, record_events=True))
    )
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture
async def idle_engine(engine_loop: EngineLoop) -> AsyncIterator[EngineLoop]:
    """The engine, which has neither a request nor a page of one left after the test."""
    yield engine_loop
    await until_async(lambda: not engine_loop.num_open, 60.0)
    engine_loop.engine.kv.check([])


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """A router without replicas; with `service`, the real engine is its replica r0."""
    async with House() as house:
        yield house


@pytest.fixture
async def service(idle_engine: EngineLoop, house: House) -> Service:
    await house.ready(ServedEngine(idle_engine, replica_id="r0", node_id="here"))
    registry = emitter_of(Process.ROUTER, ROUTER, disaggregated=False).registry
    return house.service(idle_engine.engine.tokenizer, registry=registry)


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """HTTP to the app, without a socket; an exception in the app would raise here."""
    async with client_of(make_app(service)) as client:
        yield client
