"""Replicas that are killed at random tokens, over real engines, dispatcher and HTTP: what a client gets is to the byte
what it gets undisturbed.

The model is a tiny random one with the vocabulary of the embedded one: what it writes is noise, of all alphabets and of
parts of characters, and it never ends by itself. Of the embedded one: tests/serve/two_replicas/test_faults.py.
"""

import asyncio
import functools
import itertools
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from deployments.channel.channel_client import ChannelClient
from deployments.channel.channel_server import ChannelAddress
from deployments.http.http_app import make_app
from deployments.replica.served_engine import ServedEngine
from replicas.engine.loop import EngineLoop
from replicas.types import TokenDelta
from routing.types import Role
from tests.embedded import MODEL
from tests.joined_stream import equal, joined, named_events
from tests.numerics import tiny
from tests.pairwise import ALL
from tests.unit.deployments.in_process import House
from tests.unit.deployments.listening import client_of
from tests.unit.deployments.two_engines import Engines, two_engines
from tests.waiting import until_async

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]
DEATHS = 20 if ALL else 4  # of each way, at least
FOREVER = 1 << 30
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCAB = 49_152  # the embedded model's
SEEDED = {"temperature": 1.0, "seed": 7}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "Name three cities of France."}]
    return CHAT, {"messages": messages, "max_tokens": 60, **SEEDED, **fields}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 60, **SEEDED, **fields}


ROW = {
    "type": "object",
    "properties": {"kind": {"enum": ["bolt", "nut"]}, "count": {"type": "integer"}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
TITLE = {"type": "string", "minLength": 10, "maxLength": 40}
SCHEMA = {
    "type": "object",
    "properties": {"title": TITLE, "rows": {"type": "array", "minItems": 3, "maxItems": 4, "items": ROW}},
    "required": ["title", "rows"],
    "additionalProperties": False,
}
DOCUMENT = {"type": "json_schema", "json_schema": {"name": "order", "strict": True, "schema": SCHEMA}}
THINKS = [{"role": "user", "content": "Think."}, {"role": "assistant", "content": "<think>"}]
ORDER = [{"role": "user", "content": "Order three bolts."}]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("order", "cancel")
]
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": chat(temperature=0),
    "seeded": completion(top_p=0.9, top_k=1000),
    "three choices": chat(n=3),
    "logprobs": chat(logprobs=True, top_logprobs=3, n=2, return_token_ids=True),
    "echo and logprobs": completion(logprobs=2, echo=True),
    "stop strings": completion(n=2),  # of what it writes: see `stopped`
    "edited logits": chat(
        frequency_penalty=1.5,
        presence_penalty=0.8,
        repetition_penalty=1.3,
        min_tokens=40,
        stop_token_ids=list(range(20_000, 20_200)),
        allowed_token_ids=list(range(20_000, 20_300)),
        bad_words=[" tick tock"],
        logit_bias={"20250": 2.0},
        temperature=0.4,
    ),
    "json_schema": chat(response_format=DOCUMENT, n=2, max_tokens=200, logprobs=True, frequency_penalty=0.5),
    "tools": chat(tools=TOOLS, tool_choice="required", max_tokens=300),
    "reasoning": chat(  # of "</", "think", ">" and " a": "</think>" at times
        messages=THINKS, continue_final_message=True, allowed_token_ids=[9617, 17_400, 46, 253], n=2, max_tokens=150
    ),
    "responses": (
        "/v1/responses",
        {"input": "Order.", "tools": [{"type": "function", **TOOLS[0]["function"]}], "tool_choice": "required"}
        | {"max_output_tokens": 300, **SEEDED},
    ),
    "messages": (  # which has no seed
        "/v1/messages",
        {"messages": ORDER, "tools": [{"name": "order", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
        | {"max_tokens": 300, "temperature": 0},
    ),
}
PAIRED = ("seeded", "logprobs", "json_schema", *(("greedy", "edited logits", "tools") if ALL else ()))


class Doomed(ServedEngine):
    """A replica that is killed as soon as it has sent ``life`` tokens. Its engine goes on, as that of its successor."""

    def __init__(
        self, loop: EngineLoop, replica_id: str, role: Role, life: int, on_death: Callable[[str], None]
    ) -> None:
        super().__init__(loop, replica_id=replica_id, node_id="here", role=role)
        self._life = life
        self._on_death = on_death
        self._dead = False

    async def _connect(self, address: ChannelAddress) -> ChannelClient:
        client = await super()._connect(address)
        client.sink = functools.partial(self._send, client.sink, asyncio.get_running_loop())
        return client

    def _send(
        self, sink: Callable[[list[TokenDelta]], None], event_loop: asyncio.AbstractEventLoop, deltas: list[TokenDelta]
    ) -> None:
        for delta in deltas:
            if self._life > 0:
                sink([delta])
                self._life -= len(delta.token_ids)
            if self._life <= 0 and not self._dead:
                self._dead = True
                event_loop.call_soon_threadsafe(self._die)

    def _die(self) -> None:
        assert self._reporter is not None
        self._reporter.cancel()
        for client in list(self._clients.values()):
            client.close()
        self._on_death(self.replica_id)


class Street:
    """A house whose replicas are killed one after the other; each has a successor at once. Two of a role are there at a
    time where prefill and decode are not apart."""

    def __init__(self, engines: Engines, lives: Iterator[int], *, apart: bool, reasons: bool) -> None:
        """``reasons``: whether the model's output is read as one that begins with reasoning may be."""
        self._reads: dict[str, Any] = {"reasoning_format": "think"} if reasons else {}
        self.house = House(max_tries=10, retry_wait_s=60.0, always_kv_transfer=apart)
        self.num_deaths = 0
        self._lives = lives
        prefill, decode = engines.both
        both = ((prefill, Role.PREFILL), (decode, Role.DECODE)) if apart else ()
        self._places = both or ((prefill, Role.UNIFIED), (decode, Role.UNIFIED))
        self._placed: dict[str, tuple[EngineLoop, Role]] = {}

    async def __aenter__(self) -> httpx.AsyncClient:
        await self.house.start()
        for place in self._places:
            self._add(place)
        await until_async(lambda: len(self.house.router.views) == len(self._places))
        tokenizer = self._places[0][0].engine.tokenizer
        self._client = client_of(make_app(self.house.service(tokenizer, **self._reads)))
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        await self.house.stop()

    def _add(self, place: tuple[EngineLoop, Role]) -> None:
        replica_id = f"r{len(self._placed)}"
        self._placed[replica_id] = place
        loop, role = place
        life = FOREVER if role is Role.PREFILL else next(self._lives)
        self.house.add(Doomed(loop, replica_id, role, life, self._succeed))

    def _succeed(self, replica_id: str) -> None:
        self.num_deaths += 1
        self.house.remove(replica_id)
        self._add(self._placed[replica_id])


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("tiny")
    for file in (*Path(MODEL).glob("*token*.json"), *Path(MODEL).glob("*.jinja")):
        shutil.copy(file, folder)
    tiny.save("llama", folder, vocab_size=VOCAB, max_position_embeddings=2048)
    with two_engines(str(folder)) as engines:
        yield engines


@pytest.fixture
async def idle(engines: Engines) -> AsyncIterator[Engines]:
    """No request is open and no page is held after the test."""
    yield engines
    await engines.settle()


async def answered(
    engines: Engines, way: tuple[str, dict[str, Any]], lives: Iterator[int], *, apart: bool
) -> tuple[dict[str, Any], int]:
    """Ask with nothing cached. Returns: the answer, and how many replicas died meanwhile."""
    await engines.flush()
    path, body = way
    street = Street(engines, lives, apart=apart, reasons=body.get("messages") is THINKS)
    async with street as client:
        if path not in (CHAT, COMPLETIONS):
            answer = await client.post(path, json={**body, "stream": True}, headers={"x-request-id": "me"})
            return dict(enumerate(named_events(numbered(answer.text).splitlines()))), street.num_deaths
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post(path, json=asked, headers={"x-request-id": "me"})
    return joined(numbered(answer.text).splitlines()), street.num_deaths


def numbered(text: str) -> str:
    """The events with the ids of calls, which are the request's own, numbered as they first come: one that changed in
    the midst of a call would get another number."""
    found: dict[str, str] = {}
    return re.sub(r"(?:call|toolu)_[0-9a-f]{24}", lambda match: found.setdefault(match[0], f"call_{len(found)}"), text)


def lives(random: Random, *, apart: bool) -> Iterator[int]:
    """Tokens that each replica brings. The first may bring none where the second has not computed the prompt yet: its
    usage would tell of it."""
    yield random.randrange(1 if apart else 0, 16)
    while True:
        yield random.randrange(1, 16)


def stopped(way: tuple[str, dict[str, Any]], answer: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same with stop strings out of its own text: one that ends it, and ones that hold text back until they do
    not match."""
    text = answer[0]["text"]
    nearly = [text[at : at + 6] + "\0" for at in range(0, 120, 9)]
    return way[0], {**way[1], "stop": [text[130:136], *nearly]}


@pytest.mark.parametrize(("name", "apart"), [*((name, False) for name in WAYS), *((name, True) for name in PAIRED)])
async def test_an_answer_is_the_same_bytes_however_many_replicas_die_under_it(
    idle: Engines, name: str, apart: bool
) -> None:
    way, random, num_deaths = WAYS[name], Random(name), 0
    undisturbed, _ = await answered(idle, way, itertools.repeat(FOREVER), apart=apart)
    if name == "stop strings":
        way = stopped(way, undisturbed)
        undisturbed, _ = await answered(idle, way, itertools.repeat(FOREVER), apart=apart)
        assert undisturbed[0]["matched_stop"] == way[1]["stop"][0]
    if name == "reasoning":
        assert undisturbed[1]["delta"].keys() == {"role", "reasoning_content", "content"}
        assert 0 < undisturbed["usage"]["completion_tokens_details"]["reasoning_tokens"] < 300
    while num_deaths < DEATHS:
        disturbed, died = await answered(idle, way, lives(random, apart=apart), apart=apart)
        assert equal(disturbed, undisturbed), f"{disturbed} is not {undisturbed}"
        num_deaths += died
