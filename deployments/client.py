"""A client of streams that comes back by itself: when its connection or its router dies, it goes on where it was.

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
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

import httpx

LATER = (408, 429)  # statuses of which a retry may be answered well, beside those from 500 on
LAST = {"response.completed", "response.incomplete", "response.failed", "message_stop", "error"}
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # before a retry; the last one again and again
RESUME = "x-manta-resume"  # what an answer says and its resumption sends back


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
            within_s: how long to try after a connection is lost; ``router.reconnect_s`` or less.
    Raises: httpx.HTTPStatusError for a refusal; httpx.TransportError if no router answered in time, or a stream without
            ids was cut.
    """
    sent = httpx.Headers({"x-request-id": secrets.token_hex(8), **(headers or {}), "x-manta-reconnect": "1"})
    give_up_s, pauses, ended, resumable = None, iter(PAUSES_S), False, True
    try:
        while not ended:
            try:
                async with http.stream("POST", path, json={**body, "stream": True}, headers=sent) as response:
                    ended = 400 <= response.status_code < 500 and response.status_code not in LATER
                    if response.is_error:
                        await response.aread()
                        response.raise_for_status()
                    if RESUME in response.headers:
                        sent[RESUME] = response.headers[RESUME]
                    async for event in _read(response):
                        give_up_s, pauses, ended = None, iter(PAUSES_S), event.is_last
                        resumable = bool(event.id)
                        if resumable:
                            sent["last-event-id"] = event.id
                        yield event
                if not ended:
                    raise httpx.RemoteProtocolError("the stream ended before its last event")
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                now_s = time.monotonic()
                give_up_s = now_s + within_s if give_up_s is None else give_up_s
                if ended or not resumable or now_s > give_up_s:
                    raise
                told = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
                pause_s = max(next(pauses, PAUSES_S[-1]), float(told) if told.isdecimal() else 0.0)
                await asyncio.sleep(min(pause_s, give_up_s - now_s))
    finally:
        if not ended:
            with contextlib.suppress(httpx.HTTPError):
                await http.post("/abort_request", json={"rid": sent["x-request-id"]}, headers=headers)


async def _read(response: httpx.Response) -> AsyncGenerator[ServerEvent, None]:
    """Yield the events of one connection that have come whole."""
    buffer = b""
    async for piece in response.aiter_bytes():
        *whole, buffer = (buffer + piece).split(b"\n\n")
        for event in whole:
            lines = (line.partition(": ") for line in event.decode().split("\n"))  # text may hold other line ends
            fields = {name: value for name, _, value in lines}
            yield ServerEvent(fields.get("id", ""), fields["data"], fields.get("event", ""))
