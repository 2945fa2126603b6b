"""Reads request bodies, with bounds on their bytes and time; an answer does not wait for a body that nobody reads.

Owns:      every read of a body: the API's (bodies.py) and the login's of the observatory.
Never:     parses one.
Thread:    the event loop; pure ASGI, so that streams pass through untouched.
"""

import asyncio
from collections import deque

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.http_errors import BodyTooLarge, BodyTooSlow
from replicas.errors import RequestAborted


async def read_bytes(request: Request, *, max_bytes: int, within: asyncio.Timeout) -> bytes:
    """Read a body. Raises: BodyTooLarge; BodyTooSlow; RequestAborted if the client leaves before the body's end."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    try:
        async with within:
            return await _read(request, max_bytes)
    except ClientDisconnect as error:
        raise RequestAborted("the client closed the connection before the end of its body") from error
    except TimeoutError as error:
        raise BodyTooSlow(f"the body was not complete after {loop.time() - started_s:.1f} s") from error


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(len(data), max_bytes)
    return bytes(data)


def _too_large(num_bytes: int, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {num_bytes:,} bytes or more; at most {max_bytes:,} are accepted")


class FewReads:
    """Reads of small bodies that anybody may send, a few at a time: a further one ends the oldest, which an honest
    client would have completed long ago. So half bodies keep neither others out nor each other waiting."""

    def __init__(self, *, most: int, max_bytes: int, timeout_s: float) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self.timeout_s = timeout_s
        self._open: deque[asyncio.Timeout] = deque()

    async def read(self, request: Request) -> bytes:
        """Raises: what `read_bytes` raises."""
        if len(self._open) >= self._most:
            oldest = self._open.popleft()
            if not oldest.expired():
                oldest.reschedule(0)
        within = asyncio.timeout(self.timeout_s)
        self._open.append(within)
        try:
            return await read_bytes(request, max_bytes=self._max_bytes, within=within)
        finally:
            if within in self._open:
                self._open.remove(within)


class CloseUnread:
    """ASGI middleware: an answer that begins before the end of its request's body closes the connection. Without that
    the rest of the body keeps it, however slowly it comes: also of a request without a key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        unread = True

        async def reading() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and unread:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, reading, closing)
