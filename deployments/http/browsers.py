"""What a web page may not have a browser do to a Manta that asks for no key.

Owns:      which Host, Origin and kind of body are refused, and why; CORS headers are Starlette's (http_app.py).
Never:     reads a body; judges who has shown a key: no page has one, and no browser adds it by itself.
Thread:    the event loop; pure ASGI, so that streams pass through untouched.

A page can send what a program on this machine can: by a form or `fetch` without asking first (POST of text, forms, or
nothing; any GET), or from a host name of its own that it has turned to 127.0.0.1 (DNS rebinding), where it may read the
answers too. What gives it away, and is refused:

    Host          a name that is not the loopback's, while only the loopback is served                            403
    Origin        of another site, on anything but GET and HEAD                                                   403
    Sec-Fetch-Site  says so, on anything but GET and HEAD                                                         403
    Content-Type  text/plain or a multipart form, which only pages send; with an Origin or Sec-Fetch-Site also
                  whatever else is not JSON. Others are taken: `curl -d` says it sends a form, `requests` nothing 415
    GET /flush_cache with anything that browsers add                                                              403
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.http_errors import error_response
from deployments.http.key_check import OPEN, path_of
from deployments.settings.ray_env import is_loopback
from replicas.errors import MantaError

ANY = "*"
USUAL = ("127.0.0.1", "localhost")
SAFE = ("GET", "HEAD", "OPTIONS")
CHANGES = ("/flush_cache",)  # what a GET does more than read
OF_PAGES = ("text/plain", "multipart/form-data")
JSON = "application/json"
ADDED = ("origin", "sec-fetch-site", "referer")  # by browsers, and not by curl or a program's HTTP library


class Refused(MantaError):
    """A browser sent it on behalf of a page that has no business here."""

    def __init__(self, message: str, *, code: str, status: int = 403) -> None:
        super().__init__(message)
        self.code = code
        self.http_status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserRules:
    """What is accepted."""

    hosts: frozenset[str] | None  # names, in lower case, beside the loopback's; None: any
    origins: frozenset[str]  # of pages that may call, such as http://localhost:3000; "*": all

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raises: Refused."""
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
        elif site in ("cross-site", "same-site"):  # same-site: another port of localhost is one
            raise Refused("a page of another site may not call this server", code="origin_not_allowed")
        self._check_kind(headers.get("content-type", ""), by_browser=origin is not None or bool(site))

    def _check_kind(self, content_type: str, *, by_browser: bool) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        if kind in OF_PAGES or (by_browser and kind not in ("", JSON) and not kind.endswith("+json")):
            raise Refused(
                f"Content-Type: {kind[:100]!r} is not accepted: send {JSON}", code="not_json", status=415
            )

    def _is_known(self, host: str) -> bool:
        name = _name(host)
        assert self.hosts is not None
        return name is not None and (name in self.hosts or name in USUAL or is_loopback(name))

    def _is_allowed(self, origin: str, host: str) -> bool:
        """The page is this server's own, or a known one's."""
        own = origin.partition("://")[2].lower() == host.lower() != ""
        return own or origin in self.origins or ANY in self.origins


def browser_rules(
    *, listens_on: str, has_keys: bool, allowed_hosts: Iterable[str], origins: Iterable[str] = ()
) -> BrowserRules | None:
    """The rules of a server that listens on ``listens_on`` (http_options.host); None where a key protects it."""
    if has_keys:
        return None
    names = frozenset(host.lower() for host in allowed_hosts)
    guarded = is_loopback(listens_on) and ANY not in names
    return BrowserRules(hosts=names if guarded else None, origins=frozenset(origins))


@functools.lru_cache(maxsize=64)  # clients say the same few names again and again
def _name(host: str) -> str | None:
    """``host`` without port and brackets; None for what is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class BrowserCheck:
    """ASGI middleware: answers what the rules refuse. OPEN paths, which balancers ask for, are anybody's."""

    def __init__(self, app: ASGIApp, *, rules: BrowserRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope["type"] == "http" else OPEN[0]
        if path not in OPEN:
            try:
                self._rules.check(scope["method"], path, Headers(scope=scope))
            except Refused as refused:
                await error_response(refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)
