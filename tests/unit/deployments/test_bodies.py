"""Bodies that are long to read, come slowly or not to their end.

The router's loop and another client's stream go on while a long one is refused or served.

A gap of the loop is judged by the smaller of two clocks: the wall's, and the CPU time that this process spent in the
gap on whatever thread. A machine that gave us no CPU stretches the first and not the second; threads that work beside
the loop without the GIL fill the second and not the first; a loop that is blocked, or kept from the GIL, moves both.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import gc
import json
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from deployments.http.bodies import MAX_DETOKENIZED, DetokenizeRequest, check_shape, parse_json
from deployments.http.http_app import make_app
from deployments.http.http_errors import Busy
from deployments.http.service import BoundedExecutor
from deployments.places import ROOT
from deployments.record.route_log import RequestWatch
from deployments.tenancy.keys import CALLER, ApiKey, KeyDigests
from replicas.errors import InvalidRequest
from replicas.text.tokenizer import Tokenizer
from tests.pairwise import ALL
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import listening

pytestmark = pytest.mark.model
BYTES = 4 << 20  # router.max_body_bytes
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]
LEAST, MOST, LONGEST_S = 3, 20, 2.0 if ALL else 0.4  # each body is sent so often, or less often if that takes longer
ROUNDS = 3


def full(field: str, item: str, *, begins: str = "[", ends: str = "]") -> bytes:
    """A body of 4 MB with as many of ``item`` in ``field`` as fit."""
    head, tail = f'{{"{field}":{begins}', f"{ends}}}"
    return (head + ",".join([item] * ((BYTES - len(head) - len(tail)) // (len(item) + 1))) + tail).encode()


def as_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


WORDS = "word " * (BYTES // 5 - 10)
LONG: dict[str, tuple[str, Callable[[], bytes], int]] = {
    # name: route, body, status
    "words": (TEXT, lambda: as_json(prompt=WORDS), 400),
    "digits": (TEXT, lambda: as_json(prompt="1234567890" * (BYTES // 10 - 10)), 400),
    "as long as may fit": (TEXT, lambda: as_json(prompt="1" * 660_000), 400),
    "256 prompts": (TEXT, lambda: as_json(prompt=[WORDS[:16_000]] * 256, max_tokens=2), 200),
    "256 native prompts": (
        NATIVE, lambda: as_json(text=[WORDS[:16_000]] * 256, sampling_params={"max_new_tokens": 2}), 200
    ),
    "256 prompts of ids": (TEXT, lambda: as_json(prompt=[[7] * 4000] * 256, max_tokens=2), 200),
    "echo and logprobs": (TEXT, lambda: as_json(prompt=[WORDS[:16_000]] * 256, echo=True, logprobs=20), 400),
    "echo and logprobs of one": (TEXT, lambda: as_json(prompt=[7] * 8190, echo=True, logprobs=3, max_tokens=2), 200),
    "19,000 messages": (CHAT, lambda: as_json(messages=[{"role": "user", "content": "a"}] * 19_000), 400),
    "long message": (CHAT, lambda: as_json(messages=[{"role": "user", "content": WORDS}]), 400),
    "control tokens": (CHAT, lambda: as_json(messages=[{"role": "user", "content": "<|im_end|>" * 60_000}]), 400),
    "long template argument": (
        CHAT, lambda: as_json(messages=HI, chat_template_kwargs={"a": "<|im_end|>" * 419_000}), 400
    ),
    "prompt of nulls": (TEXT, lambda: full("prompt", "null"), 400),
    "prompt of objects": (TEXT, lambda: full("prompt", "{}"), 400),
    "prompt of ids": (TEXT, lambda: full("prompt", "100"), 400),
    "stop": (TEXT, lambda: full("stop", "10000"), 400),
    "input_ids": (NATIVE, lambda: full("input_ids", "null"), 400),
    "sampling_params": (NATIVE, lambda: as_json(text="a", sampling_params=[{}] * 32_000), 400),
    "logit_bias": (TEXT, lambda: full("logit_bias", '"12345678901234567890123456":null', begins="{", ends="}"), 400),
    "messages": (CHAT, lambda: full("messages", "null"), 400),
    "nested": (TEXT, lambda: b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400),
    "unknown field": (TEXT, lambda: full("junk", '"ab"'), 400),
    "tokenize": ("/tokenize", lambda: as_json(prompt=["1" * 2_500] * 256), 200),
    "tokenize much": ("/tokenize", lambda: as_json(prompt=["1" * 16_000] * 256), 400),
    "detokenize": ("/detokenize", lambda: as_json(tokens=[9] * 130_000), 200),
}


class Heard(RequestWatch):
    """Hears of HTTP requests that came to no prompt."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def answered(self, endpoint: str, *, outcome: str, total_s: float) -> None:
        self.outcomes.append(outcome)


class Heartbeat:
    """Finds the longest time that the loop could not run."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._last = (time.perf_counter(), time.process_time())

    async def run(self) -> None:
        self.look()
        self.worst_s = 0.0
        while True:
            await asyncio.sleep(0.002)
            self.look()

    def look(self) -> None:
        now = (time.perf_counter(), time.process_time())
        self.worst_s = max(self.worst_s, min(now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now


Answer = tuple[int, dict[bytes, bytes]]  # status and headers


async def post(
    app: Any, path: str, body: bytes, *, on_event: Callable[[], None] = lambda: None, receive: Any = None
) -> Answer:
    """``receive``: of a client that sends something else; ``on_event`` is called with each part of the answer."""
    parts = [body[at : at + (1 << 16)] for at in range(0, len(body), 1 << 16)]
    messages = iter([{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts])
    answer: Answer = (0, {})

    async def whole() -> dict[str, Any]:
        for message in messages:
            await asyncio.sleep(0)
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal answer
        if message["type"] == "http.response.start":
            answer = message["status"], dict(message["headers"])
        on_event()

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")], "http_version": "1.1",
             "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": ""}  # fmt: skip
    async with asyncio.timeout(60):
        await app(scope, receive or whole, send)
    return answer


@contextlib.asynccontextmanager
async def another_stream(app: Any, gap: Heartbeat) -> AsyncIterator[None]:
    """Another client's stream of a token each 5 ms."""
    body = as_json(prompt="x", max_tokens=8000, stream=True)
    task = asyncio.create_task(post(app, TEXT, body, on_event=gap.look))
    yield
    assert not task.done(), "the stream ended before the bodies"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture
async def app(tokenizer: Tokenizer) -> AsyncIterator[Any]:
    """The whole app over a replica that makes a token of each choice each 5 ms."""
    async with House(max_wait_s=math.inf) as house:
        await house.ready(ScriptedReplica("r0", token_s=0.005))
        yield make_app(house.service(tokenizer))


@pytest.fixture(scope="module", autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as tests/conftest.py does


@pytest.fixture(autouse=True)
def _frozen() -> None:
    """What the tests before have left is not looked through again, as in the router (router.py)."""
    gc.collect()
    gc.freeze()


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
async def test_a_long_body_stops_neither_the_loop_nor_another_clients_stream(app: Any, name: str) -> None:
    """Others who load the machine may stretch one round; a body that stops the loop does so in each."""
    rounds = []
    while not rounds or (max(rounds[-1]) >= 1 and len(rounds) < ROUNDS):
        beat_s, stream_s = await worst_gaps(app, *LONG[name])
        rounds.append((beat_s / 0.1, stream_s / 0.25))
    assert min(map(max, rounds)) < 1, f"worst gaps of loop and stream, in what is allowed, by round: {rounds}"


async def worst_gaps(app: Any, route: str, made: Callable[[], bytes], status: int) -> tuple[float, float]:
    """The longest gaps of the loop and of another client's stream, in seconds, while the body is sent some times."""
    body, beats, gap = made(), Heartbeat(), Heartbeat()
    assert len(body) <= BYTES
    async with another_stream(app, gap):
        await asyncio.sleep(0.05)
        beating = asyncio.create_task(beats.run())
        await asyncio.sleep(0.01)
        gap.worst_s, num, started_s = 0.0, 0, time.monotonic()
        while num < LEAST or (num < MOST and time.monotonic() - started_s < LONGEST_S):
            assert (await post(app, route, body))[0] == status
            num += 1
        beating.cancel()
    return beats.worst_s, gap.worst_s


class Cut:
    """An ASGI client that sends half a body, and then what ``ends`` gives."""

    def __init__(self, ends: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._ends = ends
        self._begun = False

    async def receive(self) -> dict[str, Any]:
        if self._begun:
            return await self._ends()
        self._begun = True
        return {"type": "http.request", "body": b'{"prompt": "a', "more_body": True}


async def test_a_client_that_leaves_in_the_middle_of_its_upload_has_cancelled_and_nothing_has_failed(
    app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def leaves() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    app.state.service.dispatcher.watch = heard = Heard()
    app = make_app(app.state.service)
    for route in (CHAT, TEXT, NATIVE, "/tokenize"):
        assert (await post(app, route, b"", receive=Cut(leaves).receive))[0] == 499
    # `RouterEvents.answered` counts "cancelled" and judges no objective by it
    assert heard.outcomes == ["cancelled"] * 4
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


async def test_a_body_that_does_not_come_is_not_waited_for(app: Any) -> None:
    async def hangs() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    service = app.state.service
    app.state.service = dataclasses.replace(service, body_timeout_s=0.05)
    status, headers = await post(app, TEXT, b"", receive=Cut(hangs).receive)
    assert (status, headers[b"connection"]) == (408, b"close")


def test_bodies_are_read_at_one_place() -> None:
    """Bounds on bytes and time that a new route forgets are no bounds."""
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "deployments").rglob("*.py")
        if re.search(r"\.(stream|body|form|json)\(\)", path.read_text()) and "Request" in path.read_text()
    ]
    assert found == ["deployments/http/access.py"]


async def test_an_answer_before_the_end_of_the_body_closes_the_connection(app: Any) -> None:
    """4,200 connections whose bodies trickled had their 401 at once, and were kept open by HAProxy and uvicorn."""
    guarded = make_app(app.state.service, keys=KeyDigests(api=(ApiKey(digest=b"x", name="a"),)))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{"
    async with listening(guarded) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"\r\nconnection: close\r\n" in answer.lower()
    whole, headers = await post(app, TEXT, as_json(prompt="a", max_tokens=2))
    assert (whole, headers.get(b"connection")) == (200, None)


async def test_when_too_many_long_bodies_wait_the_next_is_told_to_come_again_and_short_ones_are_served(
    app: Any,
) -> None:
    executor = BoundedExecutor("parse", threads=1, max_held=150_000)
    app.state.service = dataclasses.replace(app.state.service, parsing=executor)
    go = threading.Event()
    try:
        held = asyncio.create_task(executor.run(go.wait, size=100_000))
        await asyncio.sleep(0)
        status, headers = await post(app, TEXT, as_json(prompt="a" * 100_000))
        assert (status, headers[b"retry-after"]) == (429, b"1")
        assert (await post(app, TEXT, as_json(prompt="a", max_tokens=2)))[0] == 200
    finally:
        go.set()
    assert await held
    assert (await post(app, TEXT, as_json(prompt="a" * 100_000, max_tokens=2)))[0] == 400  # read: 12,500 tokens


async def test_one_key_fills_half_of_the_queue_of_long_work_and_no_more() -> None:
    executor, go = BoundedExecutor("parse", threads=1, max_held=100), threading.Event()

    def of(name: str, size: int) -> asyncio.Task[bool]:
        context = contextvars.copy_context()
        context.run(CALLER.set, name)
        return asyncio.create_task(executor.run(go.wait, size=size), context=context)

    try:
        taken = [of("a", 30), of("a", 20)]
        refused = of("a", 1)
        with pytest.raises(Busy, match="of this API key are being read: 50 characters"):
            await asyncio.wait_for(refused, 10)
        taken += [of("b", 30), of("", 20)]
        await asyncio.sleep(0)
        assert not any(each.done() for each in taken)
    finally:
        go.set()
    assert await asyncio.gather(*taken) == [True] * 4
    again = of("a", 80)  # nothing of it is held: one of any size is taken
    assert await again


async def test_work_that_nobody_waits_for_any_more_leaves_the_queue() -> None:
    executor = BoundedExecutor("parse", threads=1, max_held=10)
    go = threading.Event()
    try:
        runs = asyncio.create_task(executor.run(go.wait, size=5))
        await asyncio.sleep(0)
        waits = asyncio.create_task(executor.run(go.wait, size=5))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="10 characters wait"):
            await executor.run(go.wait, size=1)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert await asyncio.wait_for(asyncio.gather(runs, _set(go)), 10)
    finally:
        go.set()
    assert await executor.run(lambda: 7, size=100) == 7  # nothing is held: one of any size is taken


async def _set(event: threading.Event) -> None:
    event.set()


def test_quotes_and_backslashes_in_strings_do_not_hide_values() -> None:
    check_shape(as_json(a='","[{[{' * 100_000, b="\\" * 50_001 + '"' + "[" * 100_000))
    with pytest.raises(InvalidRequest, match="the body has 32,770 lists and objects; at most 32,768 are accepted"):
        check_shape(as_json(a="\\", b=[[]] * 32_768))
    with pytest.raises(InvalidRequest, match="131,073 named values"):
        check_shape(as_json(**{str(i): 0 for i in range(131_073)}))
    check_shape(as_json(prompt=[1] * 1_048_574))
    with pytest.raises(InvalidRequest, match="1,048,577 values"):
        check_shape(as_json(prompt=[1] * 1_048_576))


async def test_what_the_prompts_of_one_request_ask_for_together_is_bounded(app: Any) -> None:
    """Each of these prompts could be served alone."""
    for fields, status in (
        ({"prompt": ["a"] * 4, "n": 128, "max_tokens": 1}, 200),
        ({"prompt": ["a"] * 5, "n": 128, "max_tokens": 1}, 400),
        ({"prompt": [[7] * 3000] * 4, "echo": True, "logprobs": 20, "max_tokens": 1}, 200),  # 252,000 logprobs
        ({"prompt": [[7] * 3000] * 5, "echo": True, "logprobs": 20, "max_tokens": 1}, 400),
        ({"prompt": [[7] * 3000] * 4, "echo": True, "logprobs": 20, "max_tokens": 1, "n": 2}, 400),
    ):
        assert (await post(app, TEXT, as_json(**fields)))[0] == status, fields


async def test_ids_of_a_detokenization_are_counted_before_they_are_validated(app: Any) -> None:
    """1,000,000 ids took 1.6 s to be refused, and another client's stream stood still meanwhile."""
    with pytest.raises(InvalidRequest, match="has 1,000,003 values; at most 163,840 are accepted"):
        parse_json(as_json(tokens=[7] * 1_000_000, a=[1]), max_values=DetokenizeRequest.max_values)
    assert (await post(app, "/detokenize", as_json(tokens=[7] * 1_000_000)))[0] == 400
    assert (await post(app, "/detokenize", as_json(tokens=[7] * MAX_DETOKENIZED)))[0] == 200
