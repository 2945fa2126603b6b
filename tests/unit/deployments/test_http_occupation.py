"""Memory given back and used again over HTTP: all replicas or none, nobody ready meanwhile."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import pytest

from deployments.http.http_app import make_app
from deployments.replica.served_engine import ServedEngine
from replicas.engine.loop import EngineLoop
from replicas.text.tokenizer import Tokenizer
from tests.embedded import MODEL
from tests.harness import fake_engine
from tests.unit.deployments.in_process import House
from tests.unit.deployments.listening import client_of
from tests.unit.deployments.sample_values import ask
from tests.waiting import until_async

pytestmark = pytest.mark.model
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
NATIVE = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}


@dataclass
class Two:
    """Two engines over fake devices behind one router."""

    client: httpx.AsyncClient
    house: House
    replicas: list[ServedEngine]

    @property
    def released(self) -> list[frozenset[str]]:
        return [each.loop.engine.occupation.released for each in self.replicas]


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        house = await stack.enter_async_context(House())
        replicas = []
        for name in ("r0", "r1"):
            loop = EngineLoop(fake_engine()[0])
            loop.start()
            replicas.append(ServedEngine(loop, replica_id=name, node_id="here"))
            stack.push_async_callback(replicas[-1].stop)
        await house.ready(*replicas)
        client = await stack.enter_async_context(client_of(make_app(house.service(Tokenizer(MODEL)))))
        yield Two(client, house, replicas)


async def test_while_memory_is_given_back_requests_get_503_and_no_replica_is_ready(two: Two) -> None:
    assert (await two.client.post("/generate", json=NATIVE)).status_code == 200
    answer = await two.client.post(RELEASE, json={"tags": ["kv_cache"]})
    assert (answer.status_code, answer.json()) == (200, {"success": True, "num_replicas": 2})
    assert two.released == [{"kv_cache"}, {"kv_cache"}]
    await until_async(lambda: not two.house.fleet.num_ready)
    refused = await two.client.post("/generate", json=NATIVE)
    assert (refused.status_code, int(refused.headers["Retry-After"]) >= 1) == (503, True)
    assert "r0 is released" in refused.json()["error"]["message"]
    assert (await two.client.get("/health")).status_code == 503
    assert (await two.client.get("/ping")).status_code == 200
    assert (await two.client.post(RESUME)).json() == {"success": True, "num_replicas": 2}  # without a body: all
    await until_async(lambda: two.house.fleet.num_ready == 2)
    assert (await two.client.get("/health")).status_code == 200
    assert (await two.client.post("/generate", json=NATIVE)).status_code == 200


async def test_one_busy_replica_keeps_all_from_giving_memory_back(two: Two) -> None:
    two.replicas[1].loop.submit(ask(rid="a1.0-long", max_new_tokens=100), lambda deltas: None)
    two.replicas[1].loop.engine.steps.begin = lambda plan: None  # type: ignore[method-assign]  # it never ends
    answer = await two.client.post(f"{RELEASE}?timeout=0.1")
    assert answer.status_code == 409
    assert "no memory was given back: r1: it is busy with requests" in answer.json()["error"]["message"]
    assert two.released == [frozenset(), frozenset()]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [(RELEASE, {"tags": ["cuda_graph"]}, "tags"), (RESUME, {"tags": "kv_cache"}, "tags"), (RELEASE, [], "JSON object")],
)
async def test_what_is_no_part_is_refused(two: Two, path: str, body: object, said: str) -> None:
    answer = await two.client.post(path, json=body)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True)
    assert two.released == [frozenset(), frozenset()]
