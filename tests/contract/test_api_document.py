"""/openapi.json is what the routes do: schemathesis sends what it describes, and what it does not, and compares.
docs/api.md and docs/api_fields.md are made from it, and all of it is explained.

Owns: a router with replicas that only pretend to generate, behind a real socket, on an event loop of its own thread.
"""

import asyncio
import dataclasses
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel

from deployments.batches.store import BatchStore
from deployments.channel.channel_client import ChannelClient
from deployments.http.api_document import describe
from deployments.http.convert import _NOT_DONE
from deployments.http.http_app import ROUTERS, make_app
from deployments.http.service import ModelFace, Service
from deployments.tenancy.keys import NO_KEYS, ApiKey, KeyDigests
from replicas.text.tokenizer import Tokenizer
from replicas.types import GenerateRequest, TokenLogprob
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.sample_values import token
from tests.unit.tokenizer_folders import byte_level_folder
from tools.api_doc import FIELDS, PAGE, document, tables, written

CONTEXT_LEN = 48  # no request generates more tokens than that
LONGEST_RUN_S = 500.0  # with much else on the machine; alone it takes half a minute
RESPONSE = "/v1/responses/{response_id}"  # none of a made-up id is kept
BATCH = "/v1/batches/{batch_id}"  # nor of this
CANCEL, CANCEL_BATCH = f"{RESPONSE}/cancel", f"{BATCH}/cancel"
STREAM = "/v1/streams/{name}"
FILE = "/v1/files/{file_id}"  # nor of this: the document does not say that POST /v1/files tells one
IDS = ("/route/{rid}", "/v1/models/{name}", RESPONSE, STREAM, BATCH, FILE, f"{FILE}/content")
ALIASES = ("/v1/tokenize", "/v1/detokenize", "/model_info", "/server_info", "/ready", "/prometheus/metrics")
CHECKS = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection", "positive_data_acceptance", "unsupported_method", "allow_header_conformance",
]  # fmt: skip


class PromptReader(ScriptedReplica):
    """Also ends requests for no token at all, and those that read something out."""

    async def _generate(self, client: ChannelClient, request: GenerateRequest) -> None:
        pooling = request.sampling.pooling
        if pooling is not None:
            top = tuple((label, -1.0) for label in pooling.labels)
            logprob = TokenLogprob(token_id=1000, logprob=-1.0, top=top, hidden=(0.6, 0.8))
            client.sink([dataclasses.replace(token(request, 0, 0, self.finish), logprobs=(logprob,))])
            return
        if request.sampling.max_new_tokens:
            await super()._generate(client, request)
            return
        for index in range(request.sampling.n):
            client.sink([dataclasses.replace(token(request, index, 0, self.finish), token_ids=(), text="")])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a router with two replicas answers."""
    # asyncio sends small parts at once only where the listening socket names its protocol; else each answer takes 44 ms
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # from here on a client waits for uvicorn, and is not refused
    tokenizer = Tokenizer(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))
    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        house = House()
        await house.start()
        replicas = [PromptReader("r0"), PromptReader("r1")]
        for replica in replicas:
            house.add(replica)
        assert await house.fleet.wait_ready(30)
        face = ModelFace(
            name="tiny", path="tiny", tokenizer_path="tiny", context_len=CONTEXT_LEN, vocab_size=2000,
            architectures=("Tiny",), model_type="tiny",
        )  # fmt: skip
        service = Service(
            model=face, tokenizer=tokenizer, dispatcher=house.dispatcher, fleet=house.fleet, leases=house.leases,
            settings={}, batches=BatchStore(tmp_path_factory.mktemp("batches"), max_bytes=1 << 30),
        )  # fmt: skip
        app = make_app(service)
        app.openapi()  # on a loaded machine it can take longer than schemathesis waits for it
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        stop.append(lambda: setattr(server, "should_exit", True))
        ready.set()
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not serving.done():  # or the fleet takes silent replicas for lost
            await asyncio.wait({serving}, timeout=5)
            for replica in replicas:
                await replica.send_reports(1)
        await house.stop()

    stop: list[Any] = []
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(20)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    loop.call_soon_threadsafe(stop[0])
    thread.join(20)
    assert not thread.is_alive()


def test_every_route_is_described(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    served = {route.path_format for router in ROUTERS for route in router.routes}  # type: ignore[attr-defined]
    assert served == document["paths"].keys()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            has_body = method == "post" and path not in ("/flush_cache", CANCEL, CANCEL_BATCH)
            assert ("requestBody" in operation) == has_body, path


def described(keys: KeyDigests) -> FastAPI:
    """An app with all routes and no service behind them."""
    app = FastAPI(openapi_url=None)
    app.state.keys = keys
    for router in ROUTERS:
        app.include_router(router)
    describe(app, None)
    return app


def test_with_keys_the_document_says_which_routes_ask_for_one() -> None:
    app = described(KeyDigests(api=(ApiKey(digest=b"", name="somebody"),)))
    document = app.openapi()
    assert document["security"] == [{"bearer": []}, {"x-api-key": []}]
    open_ones = {path for path, each in document["paths"].items() if each.get("get", {}).get("security") == []}
    assert open_ones == {"/", "/health", "/ready", "/ping"}


async def test_the_document_is_written_once_for_each_place_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    app, render = described(NO_KEYS), Mock(side_effect=JSONResponse({}).render)
    monkeypatch.setattr(JSONResponse, "render", render)

    async def document(root: str) -> dict[str, Any]:
        transport = httpx.ASGITransport(app=app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://manta") as client:
            found: dict[str, Any] = (await client.get(f"{root}/openapi.json")).raise_for_status().json()
        return found

    found = [await document(root) for root in ("", "/here", "", "/here")]
    assert [each.get("servers") for each in found] == [None, [{"url": "/here"}]] * 2
    assert found[0]["paths"] == found[1]["paths"]
    assert render.call_count == 2


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 1}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "logprobs": 1}, Completion),
        ("/v1/chat/completions", CHAT, ChatCompletion),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}, Response),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4, "background": True}, Response),
        ("/v1/embeddings", {"input": ["Hello"]}, CreateEmbeddingResponse),
    ],
)
def test_openais_own_types_take_the_answers_that_have_its_form(
    url: str, path: str, body: dict[str, Any], kind: type[BaseModel]
) -> None:
    kind.model_validate_json(httpx.post(f"{url}{path}", json=body).raise_for_status().content, strict=True)


def test_openais_own_type_takes_every_event_of_a_chat(url: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": True}).raise_for_status()
    *events, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    assert [ChatCompletionChunk.model_validate_json(each, strict=True) for each in events]


@pytest.mark.slow
def test_what_the_document_says_is_what_the_routes_do(url: str, tmp_path: Path) -> None:
    """6,000 requests, the same in every run: 45 s of CPU. Every route has answered some of them."""
    settings, report = tmp_path / "schemathesis.toml", tmp_path / "report.ndjson"
    # fields that exclude each other, or the id of a request that nobody knows, are a 4xx that the route lists
    # /generate takes a list in the place of each field: all pairs of them are a third of the time, fuzzing has some
    pairs = '[[operations]]\ninclude-path = ["/generate", "/route/explain"]\nphases.coverage.enabled = false\n'
    settings.write_text(f'[checks.positive_data_acceptance]\nexpected-statuses = ["2xx", 400, 404]\n{pairs}')
    run = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(settings),
            "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing",
            "--max-examples", "10", "--seed", "12", "--generation-deterministic",
            "--suppress-health-check", "all", "--continue-on-failure", "--request-timeout", "60", "--no-color",
            "--report-ndjson-path", str(report), *(word for path in ALIASES for word in ("--exclude-path", path)),
        ],
        capture_output=True, text=True, timeout=LONGEST_RUN_S, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:]
    statuses = statuses_of(report)
    assert sum(map(len, statuses.values())) > 2000
    of_an_id = {f"{method} {path}" for method in ("GET", "HEAD") for path in IDS}
    of_an_id |= {f"DELETE {FILE}", f"DELETE {RESPONSE}", f"POST {CANCEL}", f"POST {CANCEL_BATCH}", "POST /v1/batches"}
    of_an_id |= {"POST /snapshot_request"}
    reranks = ("/v1/rerank", "/v2/rerank", "/rerank")  # whose prompt alone is longer than this context
    too_long = {f"POST {path}" for path in reranks}
    no_folders = {f"POST {v1}/{verb}_lora_adapter" for v1 in ("", "/v1") for verb in ("load", "unload")}
    assert {name for name, seen in statuses.items() if 200 not in seen} == of_an_id | too_long | no_folders
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
    assert all({200, 400, 405} <= set(statuses[f"POST {path}"]) for path in paths)
    assert {200, 400} <= set(statuses["POST /generate"])


def statuses_of(report: Path) -> dict[str, list[int]]:
    """By operation, of every answer that was asked for."""
    statuses: dict[str, list[int]] = {}
    for line in report.read_text().splitlines():
        event = json.loads(line).get("ScenarioFinished")
        if event is not None:
            recorder = event["recorder"]
            seen = statuses.setdefault(recorder["label"], [])
            asked = recorder.get("interactions", {}).values()
            seen += [each["response"]["status_code"] for each in asked if each["response"]]
    return statuses


TEXT, REFERENCE = PAGE.read_text(), FIELDS.read_text()
TABLES = tables()


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    """Else: run `python -m tools.api_doc`."""
    assert written(TEXT, TABLES, "routes", "errors") == TEXT
    assert written(REFERENCE, TABLES, "fields") == REFERENCE


def test_every_field_of_a_body_has_a_meaning() -> None:
    """Else: say it at the field, in deployments/http/bodies.py or apis."""
    rows = TABLES["fields"].splitlines()
    assert len(rows) > 250
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_route_and_every_header_of_ours_is_on_the_page() -> None:
    assert [path for path in document()["paths"] if f"`{path}`" not in TEXT] == []
    sources = [path.read_text() for path in Path("deployments/http").rglob("*.py")]
    headers = {name for text in sources for name in re.findall(r'"(x-manta-[a-z]+)"', text)}
    assert len(headers) >= 5
    assert [name for name in headers if f"| `{name}` |" not in TEXT] == []


def test_every_field_that_is_refused_is_named() -> None:
    prefixes = re.findall(r"`(\w+_)\*`", TEXT + REFERENCE)
    named = set(re.findall(r"`(\w+)`", TEXT + REFERENCE))
    missing = [name for name in _NOT_DONE if name not in named and not name.startswith(tuple(prefixes))]
    assert missing == []


def test_every_kind_of_error_has_its_status_in_the_table() -> None:
    told = set(re.findall(r"^\| (\d{3}) \|", TEXT, flags=re.MULTILINE))
    assert told >= {"400", "401", "403", "404", "408", "413", "415", "429", "499", "500", "503", "504"}
