"""Health, clients that leave, and replicas that die, seen through HTTP."""

import asyncio
import pickle
from typing import Any

import httpx
import pytest

from deployments.http.http_app import make_app
from deployments.http.service import Service
from deployments.http.streaming import sse
from replicas.engine.loop import EngineLoop
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of
from tests.waiting import until_async

pytestmark = pytest.mark.model
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}


async def leave_after_first_event(app: Any, body: bytes) -> None:
    """A client that closes its connection as soon as it has received something; as ASGI sees it."""
    received, sent = asyncio.Event(), iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in sent:
            return message
        await received.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            received.set()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
             "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http",
             "server": ("manta", 80), "client": ("me", 1), "root_path": ""}  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 20)


async def test_a_client_that_leaves_a_stream_aborts_its_request(service: Service, engine_loop: EngineLoop) -> None:
    """Trap: a disconnect must abort in the engine and free the pages; within a second: serve, test_clients.py."""
    aborted = engine_loop.stats().num_aborted
    await leave_after_first_event(make_app(service), sse({**LONG, "stream": True}).removeprefix(b"data: "))
    await until_async(lambda: not engine_loop.num_open)
    assert (await engine_loop.run_on_engine(lambda engine: engine.stats())).num_aborted == aborted + 1


async def test_health_is_about_replicas_and_ping_about_the_router(client: httpx.AsyncClient, house: House) -> None:
    healthy = await client.get("/health")
    assert healthy.status_code == 200
    assert healthy.json() == {"status": "ok", "replicas_ready": 1, "replicas_draining": 0}
    house.remove("r0")
    health = await client.get("/health")
    assert health.status_code == 503
    assert "no replica is ready: r0: draining" in health.json()["error"]["message"]
    assert (await client.get("/ping")).status_code == 200
    refused = await client.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"


async def test_what_can_be_read_can_be_asked_for_by_head(client: httpx.AsyncClient) -> None:
    """`curl -I`, `wget --spider` and some load balancers; what HEAD asks for must change nothing."""
    for path in ("/health", "/ready", "/ping", "/v1/models", "/version", "/get_model_info", "/tokenizer_info"):
        get, head = await client.get(path), await client.head(path)
        assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"]), path
    assert (await client.head("/flush_cache")).status_code == 405
    assert (await client.get("/version")).json() == {"version": "0.1.0"}


async def test_the_root_leads_browsers_to_the_live_view_and_tells_programs_where_it_is(service: Service) -> None:
    async def live_view() -> str | None:
        return next(answers)

    answers = iter(["/manta/", "/manta/", None])
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with client_of(make_app(service, live_view=live_view)) as client:
        led = await client.get("/", headers=browser)
        assert (led.status_code, led.headers["location"], led.headers["vary"]) == (307, "/manta/", "Accept")
        told = await client.get("/")
        assert told.json() == {"name": "manta", "live_view": "/manta/", "document": "/openapi.json"}
        assert (await client.get("/", headers=browser)).json()["live_view"] is None  # none runs: there is no page


async def test_tokenize_gives_the_text_of_each_token_of_a_chat(client: httpx.AsyncClient) -> None:
    turns = [{"role": "user", "content": "Grüße 🦑!"}]
    body = (await client.post("/tokenize", json={"messages": turns, "return_texts": True})).json()
    whole = (await client.post("/detokenize", json={"tokens": body["tokens"], "skip_special_tokens": False})).json()
    assert len(body["texts"]) == body["count"] == len(body["tokens"])
    assert "".join(body["texts"]) == whole["text"]
    assert "Grüße 🦑!<|im_end|>" in whole["text"]
    both = (await client.post("/tokenize", json={"prompt": ["a b", "c"], "return_texts": True})).json()
    assert both["texts"] == [["a", " b"], ["c"]]
    assert "texts" not in (await client.post("/tokenize", json={"prompt": "a"})).json()


async def test_a_refusal_of_the_replica_reaches_the_client_as_it_is(client: httpx.AsyncClient, house: House) -> None:
    """What only a replica can know, such as the size of its pool: 8,192 tokens of context, 4,000 of pool."""
    from replicas.errors import PromptTooLong

    house.remove("r0")
    refusal = PromptTooLong.of_prompt(5000, longest=4000, param="prompt", why=" here (the KV pool holds 4000)")
    house.add(ScriptedReplica("small", refuse=pickle.loads(pickle.dumps(refusal))))  # as Ray brings it
    assert await house.fleet.wait_ready(30)
    answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["message"].startswith("This model's maximum context length is 4000 tokens here (the")
