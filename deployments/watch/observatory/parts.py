"""What the observatory's HTTP routes share: the parts behind them, and the admin key in front of them.

Owns:      the check of the key, as a bearer token or as a login's cookie; the cookie's form, ``expires.mac``, which is
           made with the key and does not help to find it.
Never:     tells how a wrong key differs, logs a key, or puts one into a cookie.
Invariant: a comparison takes the same time wherever two values differ, and however long they are.
Thread:    the observatory's event loop.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from starlette.requests import HTTPConnection

from deployments.fleet.seen import Target
from deployments.http.access import FewReads, KeyNeeded
from deployments.http.http_errors import error_response
from deployments.tenancy.keys import KEY_VARIABLE, digest
from deployments.watch.observatory.fan_in import Fetch, fetch_text
from deployments.watch.observatory.page_files import PageFile
from deployments.watch.observatory.state import State
from deployments.watch.observatory.trees import Trees
from deployments.watch.observatory.watch import Routers
from replicas.errors import InvalidRequest

COOKIE = "manta_observatory"
LASTS_S = 12 * 3600  # a login
MOST_DIGITS = 20  # of a number in a query


class AdminKey:
    """The admin key, or none. White space around it does not count: headers, files and shells add some."""

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else digest(key)

    @property
    def is_set(self) -> bool:
        return self._digest is not None

    def is_right(self, given: str) -> bool:
        """Return whether ``given`` is the key."""
        return self._digest is not None and hmac.compare_digest(self._digest, digest(given))

    def admits(self, headers: Mapping[str, str], cookies: Mapping[str, str], now_s: float) -> bool:
        """Return whether a request with these may see everything. ``now_s``: seconds since 1970."""
        if self._digest is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.is_right(given)
        return self._is_login(cookies.get(COOKIE, ""), now_s)

    def login(self, now_s: float) -> str:
        """Return the cookie's value for a client that has shown the key."""
        expires = str(int(now_s) + LASTS_S)
        return f"{expires}.{self._mac(expires)}"

    def _is_login(self, value: str, now_s: float) -> bool:
        expires, _, mac = value.partition(".")
        right = hmac.compare_digest(mac.encode(), self._mac(expires).encode())
        return right and expires.isdecimal() and int(expires) > now_s

    def _mac(self, expires: str) -> str:
        assert self._digest is not None, "there is no login without a key"
        return hmac.new(self._digest, b"manta observatory login " + expires.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the routes work with; they find it in ``app.state.parts``."""

    state: State
    routers: Routers
    trees: Trees
    key: AdminKey
    files: Mapping[str, PageFile]
    own_target: Callable[[], Target | None]  # where the observatory's own metrics are served
    clock: Callable[[], float]  # seconds since 1970
    fetch: Fetch = field(default=fetch_text)
    wrong_s: list[float] = field(default_factory=list)  # when a login showed a wrong key
    # far fewer than the calls that Serve lets in (app.py): half a login keeps no scrape waiting
    logins: FewReads = field(default_factory=lambda: FewReads(most=8, max_bytes=4096, timeout_s=5.0))

    @property
    def closed(self) -> bool:
        """Whether the routers ask for a key and the observatory has none: it then shows nothing."""
        latest = self.state.merged.latest
        return not self.key.is_set and latest is not None and latest.asks_for_key

    def targets(self) -> list[Target]:
        """Return the processes that serve metrics: the observatory alone until a router has answered."""
        own = self.own_target()
        return [*self.state.merged.targets(), *([own] if own is not None else [])]


def parts_of(request: HTTPConnection) -> Parts:
    parts = request.app.state.parts
    assert isinstance(parts, Parts)
    return parts


def number_in(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    """Return a number of the query. Raises: InvalidRequest."""
    given = request.query_params.get(name)
    if given is None:
        return default
    is_number = given.isascii() and given.isdecimal() and len(given) <= MOST_DIGITS
    if not is_number or not least <= int(given) <= most:
        raise InvalidRequest(f"{name}: must be a number from {least} to {most}, got {given[:40]!r}", param=name)
    return int(given)


async def admit(request: Request) -> None:
    """Check the key before every route but the login. Raises: KeyNeeded."""
    parts = parts_of(request)
    if parts.closed:
        message = f"the API asks for keys, and the observatory has none: set its admin_key, or {KEY_VARIABLE}"
        raise KeyNeeded(message, code="admin_key_needed")
    if not parts.key.admits(request.headers, request.cookies, parts.clock()):
        message = "the admin key is asked for: Authorization: Bearer KEY, or log in with a browser at login"
        raise KeyNeeded(message, code="admin_key_needed")


async def ask_for_key(request: Request, error: Exception) -> Response:
    """Answer a request without the key: a browser that wants a page is redirected to the login."""
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"{home(request)}login", status_code=303)
    return error_response(error, request.scope)


def home(request: Request) -> str:
    """Return the path of the live view, as browsers see it."""
    return f"{request.scope.get('root_path', '')}/"
