"""Clients that come back: connections are cut at random bytes and routers die, over real engines, sockets and HTTP;
what the client of deployments/client.py gets is to the byte what it gets undisturbed.

The model and the ways to ask are test_failover.py's.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from deployments import client as deployed_client
from deployments.client import ALIVE, ServerEvent, events
from deployments.command import usage
from deployments.dispatch.resumable_streams import ResumableStreams
from deployments.http import arrivals, streaming
from deployments.http.http_app import make_app
from deployments.record.route_log import RequestWatch
from deployments.replica.served_engine import ServedEngine
from deployments.tenancy.keys import NO_KEYS, KeyDigests, read_keys
from routing.types import Role
from tests.joined_stream import equal, joined, named_events
from tests.pairwise import ALL
from tests.told_speculation import put_drafts
from tests.unit.deployments.in_process import House, LocalLeases
from tests.unit.deployments.listening import listening
from tests.unit.deployments.test_failover import CHAT, COMPLETIONS, WAYS, chat, engines, numbered
from tests.unit.deployments.two_engines import Engines
from tests.waiting import until_async

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]
__all__ = ["engines"]  # a fixture
KILLS = 20 if ALL else 2  # of each way, at least
NOBODY = 1  # a port on which nothing listens
WAYS = {
    **{name: way for name, way in WAYS.items() if name not in ("echo and logprobs", "stop strings", "reasoning")},
    "unseeded": chat(temperature=1.0, seed=None, n=2),
    "generate": ("/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 60, "temperature": 0}}),
}

OVER_ROUTERS = ("three choices", "tools", "unseeded")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is silent for seconds, which is no loss here unless a test says so."""
    monkeypatch.setattr(streaming, "ALIVE_S", 60.0)


class Routers:
    """Routers over the same two replicas, one at a time, each on a port of its own."""

    def __init__(self, engines: Engines, *, keys: KeyDigests = NO_KEYS, apart: bool = False, **options: Any) -> None:
        """``apart``: one replica hands every prompt over to the other. ``options``: of what they keep."""
        self._apart = apart
        self._engines = engines
        self._keys = keys
        self._options = options
        self._leases = LocalLeases()
        self._stack = contextlib.AsyncExitStack()
        self.num_made = 0
        self.port = 0
        self.house: House
        self.app: FastAPI

    async def __aenter__(self) -> "Routers":
        roles = (Role.PREFILL, Role.DECODE) if self._apart else (Role.UNIFIED, Role.UNIFIED)
        for number, (loop, role) in enumerate(zip(self._engines.both, roles, strict=True)):
            served = ServedEngine(loop, replica_id=f"r{number}", node_id="here", role=role)
            self._leases.replicas[served.replica_id] = served
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        name = f"router{self.num_made}"
        self.house = House(router_id=name, leases=self._leases, policy="estimated_ttft", always_kv_transfer=self._apart)
        self.num_made += 1
        await self._stack.enter_async_context(self.house)
        self.house.fleet.set_members(self._leases.replicas)
        await until_async(lambda: len(self.house.router.views) == 2)
        self._streams = ResumableStreams(**self._options)
        service = self.house.service(self._engines.prefill.engine.tokenizer, streams=self._streams)
        self.app = make_app(service, keys=self._keys)
        self.port = await self._stack.enter_async_context(listening(self.app))
        self._stack.callback(self._streams.stop)

    def forget(self) -> None:
        """End the streams that are kept."""
        self._streams.stop()

    async def die(self) -> None:
        """End this router, with all that it keeps and all connections to it; another one serves from now on."""
        self.port = NOBODY
        await self._stack.aclose()
        await self._start()


class Wire(httpx.AsyncHTTPTransport):
    """Connections to whatever router there is, each of which breaks after so many bytes as ``lives`` says."""

    def __init__(
        self,
        routers: Routers,
        lives: Random | None = None,
        *,
        most: int = 0,
        routers_die: bool = False,
        silently: bool = False,
        most_kills: float = math.inf,
    ) -> None:
        """``most``: bytes of the longest life. ``silently``: as where a machine vanishes, nothing comes any more.
        ``most_kills``: connections after so many breaks last."""
        super().__init__()
        self._most = most
        self._most_kills = most_kills
        self._routers = routers
        self._lives = lives
        self._routers_die = routers_die
        self.silently = silently
        self.num_kills = 0
        self.num_bytes = 0
        self.lost_s: float | None = None
        self.slowest_s = 0.0  # from a loss, and a new router, to the next byte

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=self._routers.port)
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        breaks = self._lives is not None and self.num_kills < self._most_kills
        if self.silently and not breaks:
            response.headers[ALIVE] = "60"  # a pause of a busy machine is no silence here
        response.stream = Frail(self, response.stream, self._lives.randrange(20, self._most) if breaks else None)
        return response

    async def broken(self) -> None:
        self.num_kills += 1
        if self._routers_die:
            await self._routers.die()
        self.lost_s = time.monotonic()


class Frail(httpx.AsyncByteStream):
    def __init__(self, wire: Wire, stream: httpx.AsyncByteStream, life: int | None) -> None:
        self._wire, self._stream, self._life = wire, stream, life

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            if self._wire.lost_s is not None:
                self._wire.slowest_s = max(self._wire.slowest_s, time.monotonic() - self._wire.lost_s)
                self._wire.lost_s = None
            self._wire.num_bytes += len(piece)
            if self._life is None:
                yield piece
                continue
            yield piece[: self._life]
            self._life -= len(piece)
            if self._life <= 0:
                if self._wire.silently:
                    await self._wire.broken()
                    await asyncio.Event().wait()
                await self._stream.aclose()
                await self._wire.broken()
                raise httpx.ReadError("cut")

    async def aclose(self) -> None:
        await self._stream.aclose()


async def asked(wire: Wire, path: str, body: dict[str, Any], name: str = "me") -> list[ServerEvent]:
    if path in (CHAT, COMPLETIONS):
        body = {**body, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(transport=wire, base_url="http://127.0.0.1", timeout=30) as http:
        return [event async for event in events(http, path, body, headers={"x-request-id": name})]


def answer_of(path: str, got: list[ServerEvent]) -> Any:
    """The answer that events add up to, without the counts of what was cached, which a second run finds more of."""
    lines = numbered("\n".join(f"data: {event.data}" for event in got)).split("\n")
    if path == "/generate":
        return lines[-2].partition('"meta_info"')[0], lines[-1]
    whole = joined(lines) if path in (CHAT, COMPLETIONS) else dict(enumerate(named_events(lines)))
    return without_cached(whole)


def without_cached(value: Any) -> Any:
    if isinstance(value, list):
        return [without_cached(each) for each in value]
    if not isinstance(value, dict):
        return value
    counts = ("cached_tokens", "cache_read_input_tokens", "input_tokens")
    return {name: without_cached(each) for name, each in value.items() if name not in counts}


def numbers(got: list[ServerEvent]) -> list[int]:
    return [int(event.id.partition(":")[0]) for event in got]


@pytest.mark.parametrize(
    ("way", "routers_die"), [*((way, False) for way in WAYS), *((way, True) for way in (WAYS if ALL else OVER_ROUTERS))]
)
async def test_a_client_that_comes_back_gets_the_same_bytes(engines: Engines, way: str, routers_die: bool) -> None:
    (path, body), random, num_kills, slowest_s = WAYS[way], Random(way), 0, 0.0
    async with Routers(engines) as routers:
        calm = await asked(Wire(routers), path, body)
        undisturbed, num_bytes = answer_of(path, calm), sum(len(event.data) for event in calm)
        while num_kills < (KILLS if ALL or not routers_die else 1):
            routers.forget()  # of the run before: its name is the same, since ids of calls are made of it
            wire = Wire(routers, random, most=num_bytes, routers_die=routers_die)
            got = await asked(wire, path, body, name=f"me-{num_kills}" if way == "unseeded" else "me")
            num_kills += wire.num_kills
            slowest_s = max(slowest_s, wire.slowest_s)
            assert numbers(got) == list(range(1, len(got) + 1))
            if way != "unseeded":
                assert equal(answer_of(path, got), undisturbed), f"{answer_of(path, got)} is not {undisturbed}"
        print(f"{way}: {num_kills} kills, at most {slowest_s:.2f} s until the next byte")
    await engines.settle()


@pytest.fixture
async def token_by_token(engines: Engines) -> AsyncIterator[None]:
    """No drafts: an answer that was given before would come in few events, and what the step under way makes is lost
    with the router."""
    drafts = [await loop.run_on_engine(lambda engine: put_drafts(engine.scheduler, None)) for loop in engines.both]
    yield
    for loop, each in zip(engines.both, drafts, strict=True):
        await loop.run_on_engine(lambda engine, each=each: put_drafts(engine.scheduler, each))


@pytest.mark.usefixtures("token_by_token")
@pytest.mark.parametrize("routers_die", [False, True])
async def test_a_connection_that_falls_silent_is_lost(
    engines: Engines, routers_die: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "ALIVE_S", 0.5)
    path, body = WAYS["seeded"]
    async with Routers(engines) as routers:
        calm = await asked(Wire(routers), path, body)
        routers.forget()
        # bytes that come however the text is cut into events: the first cut is certain
        most = len(answer_of(path, calm)[0]["text"])
        wire = Wire(routers, Random(5), most=most, routers_die=routers_die, silently=True, most_kills=2)
        got = await asked(wire, path, body)
        assert wire.num_kills == 2
        assert numbers(got) == list(range(1, len(got) + 1))
        assert equal(answer_of(path, got), answer_of(path, calm))
    await engines.settle()


RECALLED = {
    "two choices": chat(n=2, max_tokens=120, ignore_eos=True),
    "stop strings": chat(stop=["\0 never", "e" * 40], max_tokens=120, ignore_eos=True),
    "apart": chat(max_tokens=120, ignore_eos=True),
}


@pytest.mark.parametrize("way", RECALLED)
@pytest.mark.usefixtures("token_by_token")
async def test_what_was_made_before_a_router_died_is_not_made_again(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The replica remembers the ids, whose text is made at once."""
    monkeypatch.setattr(arrivals, "RECALL_S", 30.0)
    (path, body), watch = RECALLED[way], Heard()
    async with Routers(engines, watch=watch, apart=way == "apart") as routers:
        at_first = await num_made(engines)
        undisturbed = await asked(Wire(routers), path, body, name="another")
        alone = await num_made(engines) - at_first
        wire = Wire(routers)
        stream = asyncio.create_task(asked(wire, path, body))
        await until_async(lambda: wire.num_bytes > sum(len(event.data) for event in undisturbed) // 4, 30.0)
        await routers.die()
        before = await num_made(engines) - at_first - alone
        assert equal(answer_of(path, await stream), answer_of(path, undisturbed))
        assert [each for each in watch.heard if "resumed" in each] == ["resumed recalled"]
    twice = await num_made(engines) - at_first - 2 * alone
    print(f"{way}: {alone} tokens alone; {before} until its router died, {alone - before + twice} after that")
    assert before > 20
    assert -4 <= twice <= 4, "each token is computed once"
    await engines.settle()


@pytest.mark.usefixtures("token_by_token")
async def test_one_that_comes_back_before_its_first_event_goes_on_and_counts_once_though_both_routers_end_it(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrivals, "RECALL_S", 30.0)
    monkeypatch.setattr(logging.getLogger("deployments"), "propagate", True)
    caplog.set_level(logging.INFO, "deployments")
    watch = Heard()

    def ended() -> list[str]:
        return [line for line in map(logging.LogRecord.getMessage, caplog.records) if line.startswith("finished ")]

    async with Routers(engines, watch=watch) as routers:
        _, headers = await Client(routers).begin("mine", cut_after=20, max_tokens=200, x_manta_reconnect="1")
        await routers.die()
        again = {"x_manta_reconnect": "1", "x_manta_resume": headers["x-manta-resume"]}
        ids, _ = await Client(routers).begin("mine", cut_after=1000, max_tokens=200, **again)
        await until_async(lambda: len(ended()) == 2)
    assert [each for each in watch.heard if "resumed" in each] == ["resumed recalled"]
    assert ids[0].startswith("1:")
    [used] = usage.added(f"INFO 2026-11-30 23:59:59,999 router x -- {line}\n" for line in ended()).values()
    assert (used["requests"], used["output_tokens"]) == (1, 200)
    await engines.settle()


async def num_made(engines: Engines) -> int:
    """The tokens that both have decoded."""
    stats = [await loop.run_on_engine(lambda engine: engine.stats()) for loop in engines.both]
    return sum(each.decode_tokens for each in stats)


class Client:
    """One app over the two engines, with what tests need of it."""

    def __init__(self, routers: Routers, *, key: str = "") -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{routers.port}", timeout=30, headers=self._headers)

    async def begin(
        self, name: str, *, cut_after: int = 0, max_tokens: int = 1500, **headers: str
    ) -> tuple[list[str], httpx.Headers]:
        """Ask for a long answer, and leave after so many events. Returns: their ids."""
        body = {"prompt": "Once", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        sent = {"x-request-id": name, **{each.replace("_", "-"): value for each, value in headers.items()}}
        async with self.http.stream("POST", COMPLETIONS, json=body, headers=sent) as response:
            assert response.status_code == 200, await response.aread()
            ids = []
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    ids.append(line.removeprefix("id: "))
                if line.startswith("data: ") and len(ids) >= cut_after:
                    break
        return ids, response.headers

    async def rest(self, name: str, last_event: str = "") -> httpx.Response:
        headers = {"last-event-id": last_event} if last_event else {}
        return await self.http.get(f"/v1/streams/{name}", headers=headers)


async def test_only_a_stream_whose_client_asked_for_it_outlives_its_connection(engines: Engines) -> None:
    async with Routers(engines) as routers:
        client = Client(routers)
        ids, headers = await client.begin("mine")
        assert not ids
        assert "x-manta-resume" not in headers
        await until_async(lambda: not routers.house.dispatcher.num_open)  # aborted, and its pages are free
        assert (await client.rest("mine")).status_code == 404
        ids, headers = await client.begin("mine", cut_after=3, x_manta_reconnect="1")
        assert [each.partition(":")[0] for each in ids] == ["1", "2", "3"]
        assert headers["x-manta-resume"]
        await asyncio.sleep(0.2)
        assert routers.house.dispatcher.num_open == 1
        aborted = await client.http.post("/abort_request", json={"rid": "mine"})
        assert aborted.json()["num_aborted"] == 1
        await until_async(lambda: not routers.house.dispatcher.num_open)
        rest = await client.rest("mine", ids[-1])
        assert rest.status_code == 200
        assert '"finish_reason":"abort"' in rest.text
        assert rest.text.endswith("data: [DONE]\n\n")
    await engines.settle()


async def test_a_stream_is_found_by_its_own_key_alone(engines: Engines) -> None:
    both = {"MANTA_API_KEYS": "the-first-clients-key, the-other-clients-key"}
    keys = read_keys(api_key_file=None, admin_key=None, environ=both)
    async with Routers(engines, keys=keys) as routers:
        mine, other = Client(routers, key="the-first-clients-key"), Client(routers, key="the-other-clients-key")
        ids, _ = await mine.begin("shared-name", cut_after=2, max_tokens=100, x_manta_reconnect="1")
        assert (await other.rest("shared-name", ids[-1])).status_code == 404
        assert (await other.rest("shared-name")).status_code == 404
        assert (await mine.http.head("/v1/streams/shared-name")).status_code == 200
        again, _ = await other.begin("shared-name", cut_after=1, max_tokens=100, x_manta_reconnect="1")
        assert again[0].startswith("1:")
        whole = await mine.rest("shared-name")
        assert whole.text.endswith("data: [DONE]\n\n")
        rest = await mine.rest("shared-name", ids[-1])
        assert whole.text.endswith(rest.text)  # byte for byte
        assert whole.text.count("\n\n") == rest.text.count("\n\n") + 2
    await engines.settle()


async def test_a_stream_expires_and_says_so(engines: Engines) -> None:
    watch = Heard()
    async with Routers(engines, reconnect_s=0.3, watch=watch) as routers:
        client = Client(routers)
        ids, _ = await client.begin("mine", cut_after=2, x_manta_reconnect="1")
        await until_async(lambda: watch.heard == ["detached 0", "detached 1", "expired", "detached 0"])
        await until_async(lambda: not routers.house.dispatcher.num_open)
        gone = await client.rest("mine", ids[-1])
        assert (gone.status_code, gone.json()["error"]["code"]) == (410, "stream_gone")
        assert "away for more than 0.3 s" in gone.json()["error"]["message"]
        unknown = await client.http.post(
            COMPLETIONS, json={"prompt": "x", "stream": True}, headers={"last-event-id": "what"}
        )
        assert (unknown.status_code, "Last-Event-ID" in unknown.text) == (400, True)
    await engines.settle()


async def test_a_retry_with_the_same_name_gets_the_stream_that_runs(engines: Engines) -> None:
    """What the openai SDK does when a connection breaks before the answer begins."""
    async with Routers(engines) as routers:
        client = Client(routers)
        ids, _ = await client.begin("mine", cut_after=2, x_manta_reconnect="1")
        again, _ = await client.begin("mine", cut_after=4, x_manta_reconnect="1")
        assert again[:2] == ids
        assert routers.house.dispatcher.num_open == 1
        body = {"prompt": "Another", "max_tokens": 2, "stream": True}
        other = await client.http.post(
            COMPLETIONS, json=body, headers={"x-request-id": "mine", "x-manta-reconnect": "1"}
        )
        assert other.text.endswith("data: [DONE]\n\n")
        await until_async(lambda: not routers.house.dispatcher.num_open)  # the name is another's now
    await engines.settle()


async def test_the_openai_sdk_reads_events_with_ids_and_comments_between_them(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "ALIVE_S", 0.001)  # comments between its events
    sent, kept = list[bytes](), streaming._kept

    async def keeping(*given: Any) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(kept(*given)) as events:
            async for each in events:
                sent.append(each)
                yield each

    monkeypatch.setattr(streaming, "_kept", keeping)
    options: dict[str, Any] = {"model": "", "max_tokens": 30, "temperature": 0}
    async with Routers(engines) as routers:
        client = AsyncOpenAI(base_url=f"http://127.0.0.1:{routers.port}/v1", api_key="none", max_retries=0)
        back = {"x-manta-reconnect": "1"}
        stream = await client.completions.create(prompt="Once", **options, stream=True, extra_headers=back)
        texts: list[str] = [chunk.choices[0].text async for chunk in stream]
        plain = await client.completions.create(prompt="Once", **options)
        assert "".join(texts) == plain.choices[0].text
        async with client.responses.stream(
            model="", input="Once", max_output_tokens=30, extra_headers=back
        ) as response:
            kinds = [event.type async for event in response]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
        assert b": alive\n" in sent
    await engines.settle()


class Heard(RequestWatch):
    """What a watch was told of streams."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def streams_detached(self, num: int) -> None:
        self.heard.append(f"detached {num}")

    def stream_resumed(self, how: str) -> None:
        self.heard.append(f"resumed {how}")

    def stream_expired(self) -> None:
        self.heard.append("expired")


async def test_a_stream_without_ids_that_is_cut_is_an_error_and_does_not_begin_again() -> None:
    asked: list[httpx.Request] = []

    def answered(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, content=b'data: {"object": "text_completion"}\n\n')

    async with httpx.AsyncClient(transport=httpx.MockTransport(answered), base_url="http://here") as http:
        with pytest.raises(httpx.RemoteProtocolError, match="before its last event"):
            _ = [event async for event in events(http, COMPLETIONS, {"prompt": "Once"})]
    assert [request.url.path for request in asked] == [COMPLETIONS, "/abort_request"]


class Hangs(httpx.AsyncBaseTransport):
    """Three connections: one says something and falls silent, one never opens, one says the rest."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.headers.get("last-event-id", ""))
        if len(self.asked) == 2:
            await asyncio.Event().wait()
        return httpx.Response(200, headers={"x-manta-alive": "0.02"}, stream=Said(len(self.asked)))


class Said(httpx.AsyncByteStream):
    def __init__(self, number: int) -> None:
        self._number = number

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"id: 1\ndata: {}\n\n" if self._number == 1 else b": alive\nid: 2\ndata: [DONE]\n\n"
        await asyncio.Event().wait()


async def test_a_router_that_does_not_go_on_is_given_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed_client, "OPENS_S", 0.05)
    transport = Hangs()
    async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=None) as http:
        got = [event.id async for event in events(http, COMPLETIONS, {"prompt": "Once"})]
    assert got == ["1", "2"]
    assert transport.asked == ["", "1", "1"]
