"""Refuses HTTP requests before a route works on them: those without the right key, those of other sites' web pages, and
those whose bodies are too long or too slow.

Owns:      the check of the API key and of the admin key (tenancy/keys.py reads both); the rules on Host, Origin and
           body type where no key is needed; every read of a body, here and in the observatory, with bounds on its bytes
           and time; the answer to an exception that no handler knows. CORS headers are Starlette's (http_app.py).
Never:     parses a body. Applies the rules on web pages where a key protects
           the server: a page has no key, and browsers add none by themselves.
Invariant: with API keys, only the OPEN paths are answered without one.
Thread:    the event loop; pure ASGI, so that streams pass through untouched.

A web page can send almost what a program on this machine can: by a form or `fetch` without a preflight (POST of text,
forms, or nothing; any GET), or from a host name that it has pointed at 127.0.0.1 (DNS rebinding), where it can
also read the answers. Without keys, these are refused:

    Host          a name that is not the loopback's, while the server listens on the loopback only                403
    Origin        another site's, on anything except GET and HEAD                                                 403
    Sec-Fetch-Site  another site's, on anything except GET and HEAD                                               403
    Content-Type  text/plain or a multipart form, which only pages send (and programs to `UPLOADS`, without any header
                  that only browsers add); with an Origin or Sec-Fetch-Site also everything that is not JSON. Others
                  are read: `curl -d` declares a form, `requests` nothing                                       415
    GET /flush_cache with any header that only browsers add                                                       403
"""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.http_errors import BodyTooLarge, BodyTooSlow, error_response
from deployments.places import is_loopback
from deployments.record.rids import owned
from deployments.tenancy.keys import ANYBODY, CALLER, KEY_VARIABLE, CacheIsolation, Caller, KeyDigests, shown_keys
from deployments.tenancy.quotas import Quotas
from deployments.tenancy.tenants import TenantKey
from replicas.errors import Fault, InvalidRequest, MantaError, RequestAborted
from replicas.types import GenerateRequest

OPEN = ("/", "/health", "/ready", "/ping")


class KeyNeeded(MantaError):
    """A request that needs a key has none, or a wrong one."""

    fault = Fault.UNAUTHENTICATED

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class NotAllowed(KeyNeeded):
    """The key is right, and may not do this."""

    fault = Fault.FORBIDDEN


class Turns:
    """Begins requests one by one, callers by turns: a caller that sends thousands at once does not delay another one's.

    Each begins in a pass of the event loop of its own, between whose passes what has begun goes on.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, in the order of their next turns

    async def wait(self, caller: str) -> None:
        """Return when the next request of ``caller`` may begin."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._give)
        turn = loop.create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        await turn

    def _give(self) -> None:
        caller = next(iter(self._waiting))
        turns = self._waiting.pop(caller)
        turn = turns.popleft()
        if turns:
            self._waiting[caller] = turns
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give)
        if not turn.done():  # its client may have left
            turn.set_result(None)


class KeyCheck:
    """ASGI middleware: if API keys exist, answers a request without one before its body is read. The others begin by
    turns."""

    def __init__(self, app: ASGIApp, *, keys: KeyDigests, quotas: Quotas | None = None) -> None:
        self._app = app
        self._keys = keys
        self._quotas = quotas
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            caller = self._keys.caller(headers)
            if path_of(scope) not in OPEN:
                if caller is None:
                    await error_response(_key_needed(headers), scope)(scope, receive, send)
                    return
                await self._turns.wait(caller.name)
            scope.setdefault("state", {})["caller"] = caller = caller or ANYBODY
            CALLER.set(caller.name)
            if caller.key is not None and self._quotas is not None:
                send = _telling(self._quotas, caller.key, send)
        await self._app(scope, receive, send)


def _telling(quotas: Quotas, key: TenantKey, send: Send) -> Send:
    """Return ``send`` with headers that say what the key has left."""

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *quotas.headers(key)]
        await send(message)

    return telling


def _key_needed(headers: Mapping[str, str]) -> KeyNeeded:
    what = "the API key is wrong" if shown_keys(headers) else "an API key is asked for"
    return KeyNeeded(f"{what}: send Authorization: Bearer KEY, or x-api-key: KEY", code="invalid_api_key")


def path_of(scope: Scope) -> str:
    """Read the path below the application's route prefix, as routes are matched."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def caller_of(request: HTTPConnection) -> Caller:
    """Read the caller that `KeyCheck` has identified."""
    caller = getattr(request.state, "caller", ANYBODY)
    assert isinstance(caller, Caller)
    return caller


def admin_only(request: Request) -> None:
    """Guard a route that shows or changes the state of all callers. Raises: KeyNeeded without the admin key."""
    if request.app.state.keys.exist and not caller_of(request).is_admin:
        raise KeyNeeded(
            f"the admin key is asked for (router.admin_key, or {KEY_VARIABLE}): send Authorization: Bearer KEY",
            code="admin_key_needed",
        )


def scoped(request: GenerateRequest, caller: Caller, *, isolation: CacheIsolation, model: str) -> GenerateRequest:
    """Put the caller into the id of ``request``, its tenant beside it, and one of both into its salt, as ``isolation``
    says: it shares cached prefixes only with requests of the same salt.

    Args:   model: the name of what answers it: the model's, or its adapter's.
    Raises: NotAllowed, InvalidRequest for what its key may not ask for of ``model``.
    """
    if not caller.name:
        return request
    space = {"key": caller.name, "tenant": f"tenant {caller.tenant}", "none": ""}[isolation]
    salt = f"\0{space}\0{request.cache_salt}" if space else request.cache_salt  # clients cannot send NUL
    routing_key = owned(request.routing_key, caller.name) if request.routing_key else ""
    key, weight, priority = caller.key, 1.0, request.priority
    if key is not None:
        _check_limits(request, key, model)
        weight, priority = key.weight, min(priority, key.highest_priority)
    rid = owned(request.rid, caller.name)
    return replace(
        request,
        rid=rid,
        cache_salt=salt,
        routing_key=routing_key,
        tenant=caller.tenant,
        weight=weight,
        priority=priority,
    )


def _check_limits(request: GenerateRequest, key: TenantKey, model: str) -> None:
    limits, sampling = key.limits, request.sampling
    if key.models is not None and model not in key.models:
        raise NotAllowed(f"this key may not use the model {model!r}", code="model_not_allowed")
    if limits.n is not None and sampling.n > limits.n:
        raise InvalidRequest(f"n: this key may ask for at most {limits.n} choices, got {sampling.n}", param="n")


ANY = "*"
USUAL = ("127.0.0.1", "localhost")
SAFE = ("GET", "HEAD", "OPTIONS")
CHANGES = ("/flush_cache",)  # paths where a GET changes state
UPLOADS = ("/v1/files",)  # paths that take a form, but of programs only: browsers say that they send one (ADDED)
OF_PAGES = ("text/plain", "multipart/form-data")
JSON = "application/json"
ADDED = ("origin", "sec-fetch-site", "referer")  # headers of browsers; curl and HTTP libraries do not send them


class Refused(MantaError):
    """A browser sent the request for a page that may not call this server."""

    def __init__(self, message: str, *, code: str, fault: Fault = Fault.FORBIDDEN) -> None:
        super().__init__(message)
        self.code = code
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserRules:
    """The hosts and origins from which requests are accepted."""

    hosts: frozenset[str] | None  # names, in lower case, beside the loopback's; None: any
    origins: frozenset[str]  # of pages that may call, such as http://localhost:3000; "*": all

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Check one request. Raises: Refused."""
        host = headers.get("host", "")
        if host and self.hosts is not None and not self._is_known(host):
            raise Refused(
                f"Host: {host[:200]!r} is not this machine's loopback: list it in router.allowed_hosts (or "
                "allowed_hosts of the observatory), or serve with API keys",
                code="host_not_allowed",
            )
        if method in SAFE:
            if path in CHANGES and any(name in headers for name in ADDED):
                raise Refused(f"{method} {path} came from a browser; POST it from a program", code="from_a_browser")
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "")
        if origin is not None:
            if not self._is_allowed(origin, host):
                raise Refused(
                    f"Origin: {origin[:200]!r} may not call this server: list it in router.cors_origins",
                    code="origin_not_allowed",
                )
        elif site in ("cross-site", "same-site"):  # another port of localhost is same-site
            raise Refused("a page of another site may not call this server", code="origin_not_allowed")
        if path in UPLOADS and not any(name in headers for name in ADDED):
            return
        self._check_kind(headers.get("content-type", ""), by_browser=origin is not None or bool(site))

    def _check_kind(self, content_type: str, *, by_browser: bool) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        if kind in OF_PAGES or (by_browser and kind not in ("", JSON) and not kind.endswith("+json")):
            message = f"Content-Type: {kind[:100]!r} is not accepted: send {JSON}"
            raise Refused(message, code="not_json", fault=Fault.WRONG_TYPE)

    def _is_known(self, host: str) -> bool:
        name = _name(host)
        assert self.hosts is not None
        return name is not None and (name in self.hosts or name in USUAL or is_loopback(name))

    def _is_allowed(self, origin: str, host: str) -> bool:
        """Whether the origin is this server's own or an allowed one."""
        own = origin.partition("://")[2].lower() == host.lower() != ""
        return own or origin in self.origins or ANY in self.origins


def browser_rules(
    *, listens_on: str, has_keys: bool, allowed_hosts: Iterable[str], origins: Iterable[str] = ()
) -> BrowserRules | None:
    """Choose the rules for a server on ``listens_on`` (http_options.host); None if keys protect it."""
    if has_keys:
        return None
    names = frozenset(host.lower() for host in allowed_hosts)
    guarded = is_loopback(listens_on) and ANY not in names
    return BrowserRules(hosts=names if guarded else None, origins=frozenset(origins))


@functools.lru_cache(maxsize=64)  # clients send the same few names repeatedly
def _name(host: str) -> str | None:
    """Parse ``host`` without port and brackets; None if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class BrowserCheck:
    """ASGI middleware: applies the rules, except on the OPEN paths, which load balancers poll."""

    def __init__(self, app: ASGIApp, *, rules: BrowserRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope["type"] == "http" else OPEN[0]
        if path not in OPEN:
            try:
                self._rules.check(scope["method"], path, Headers(scope=scope))
            except Refused as refused:
                await error_response(refused, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


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


async def read_chunks(request: Request, *, timeout_s: float) -> AsyncGenerator[bytes, None]:
    """Yield a body of any length as it comes, for a reader that bounds its bytes. Raises: BodyTooSlow where nothing
    comes for ``timeout_s``; RequestAborted."""
    async with contextlib.aclosing(request.stream()) as stream:
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except ClientDisconnect as error:
                raise RequestAborted("the client closed the connection before the end of its body") from error
            except TimeoutError as error:
                raise BodyTooSlow(f"nothing of the body came for {timeout_s:g} s") from error
            yield chunk


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
        """Read a body, and raise as `read_bytes` does."""
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


class Unforeseen:
    """ASGI middleware: logs and answers an exception that no handler knows, and stops it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(error, scope)(scope, receive, send)


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
