"""A client of streams that comes back by itself: when its connection or its router dies, it goes on where it was.

A machine that vanishes closes no connection. The server says how long it is silent at most once an answer has begun
(`ALIVE`), so a connection that is silent for three times as long is lost.

    async with httpx.AsyncClient(base_url="http://127.0.0.1:8000", timeout=60) as http:
        async for event in events(http, "/v1/chat/completions", {"messages": [...]}):
            print(event.data)

Never:     gives an event twice or leaves one out: a stream without ids (docs/api.md says of which) that is cut is an
           error. Imports anything of Manta, so that the file can be copied.
Invariant: a caller that stops early aborts its request: a stream that outlives its connection does not end with it.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, NamedTuple, TypeVar

import httpx

LATER = (408, 429)  # statuses of which a retry may be answered well, beside those from 500 on
LAST = {"response.completed", "response.incomplete", "response.failed", "message_stop", "error"}
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # before a retry; the last one again and again
RESUME = "x-manta-resume"  # what an answer says and its resumption sends back
ALIVE = "x-manta-alive"  # what an answer says: it sends something each so many seconds
OPENS_S = 6.0  # that a router has to go on with an answer: it asks the replicas for 2 s, and computes what none has
T = TypeVar("T")


class ServerEvent(NamedTuple):
    """One event of a stream."""

    id: str
    data: str  # JSON, or [DONE]
    name: str = ""

    @property
    def is_last(self) -> bool:
        """Whether the answer ends with it, well or not."""
        return self.data == "[DONE]" or self.name in LAST or self.data.startswith('{"object":"error"')


async def events(
    http: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    within_s: float = 30.0,
) -> AsyncGenerator[ServerEvent, None]:
    """Yield the events of the streamed answer to ``body``, over as many connections as it takes.

    Args:   headers: of the request, such as Authorization; X-Request-Id, by default a made-up one, names the stream.
            within_s: how long to try after a connection is lost; 30 s or less.
    Raises: httpx.HTTPStatusError for a refusal; httpx.TransportError if no router answered in time, or a stream without
            ids was cut.
    """
    sent = httpx.Headers({"x-request-id": secrets.token_hex(8), **(headers or {}), "x-manta-reconnect": "1"})
    give_up_s, pauses, ended, resumable = None, iter(PAUSES_S), False, True
    opens_s: float | None = None  # within which a lost stream must go on, at the first try: that router may be lost too
    try:
        while not ended:
            try:
                went_on = False
                async with contextlib.AsyncExitStack() as stack:
                    opened = http.stream("POST", path, json={**body, "stream": True}, headers=sent)
                    response = await _within(opens_s, stack.enter_async_context(opened))
                    ended = 400 <= response.status_code < 500 and response.status_code not in LATER
                    if response.is_error:
                        await response.aread()
                        response.raise_for_status()
                    if RESUME in response.headers:
                        sent[RESUME] = response.headers[RESUME]
                    alive_s = float(response.headers.get(ALIVE, 0))
                    async for event in _read(response, 3 * alive_s or None):
                        give_up_s, pauses, ended = None, iter(PAUSES_S), event.is_last
                        went_on, opens_s = True, OPENS_S if alive_s else None
                        resumable = bool(event.id)
                        if resumable:
                            sent["last-event-id"] = event.id
                        yield event
                if not ended:
                    raise httpx.RemoteProtocolError("the stream ended before its last event")
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if ended and went_on:
                    break  # the answer is whole
                now_s = time.monotonic()
                give_up_s = now_s + within_s if give_up_s is None else give_up_s
                if ended or not resumable or now_s > give_up_s:
                    raise
                if not went_on and isinstance(error, httpx.ReadTimeout):
                    opens_s = None  # it takes long
                pause_s = max(next(pauses, PAUSES_S[-1]), _told_s(error))
                await asyncio.sleep(min(pause_s, give_up_s - now_s))
    finally:
        if not ended:
            with contextlib.suppress(httpx.HTTPError):
                await http.post("/abort_request", json={"rid": sent["x-request-id"]}, headers=headers)


def _told_s(error: httpx.TransportError | httpx.HTTPStatusError) -> float:
    """Return for how many seconds a refusal asks to wait."""
    told = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
    return float(told) if told.isdecimal() else 0.0


async def _within(silent_s: float | None, work: Awaitable[T]) -> T:
    """Await what reads from a connection. Raises: httpx.ReadTimeout if nothing came for so long."""
    try:
        async with asyncio.timeout(silent_s):
            return await work
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"the connection was silent for {silent_s:g} s") from error


async def _read(response: httpx.Response, silent_s: float | None) -> AsyncGenerator[ServerEvent, None]:
    """Yield the events of one connection that have come whole; a line without a name is a comment."""
    buffer = b""
    pieces = response.aiter_bytes()
    while piece := await _within(silent_s, anext(pieces, b"")):
        *whole, buffer = (buffer + piece).split(b"\n\n")
        for event in whole:
            lines = (line.partition(": ") for line in event.decode().split("\n"))  # text may hold other line ends
            fields = {name: value for name, _, value in lines}
            yield ServerEvent(fields.get("id", ""), fields["data"], fields.get("event", ""))
