"""The observatory's HTTP application: its JSON, Prometheus and page routes behind the admin key.

Owns:      the form of the JSON answers (README.md); errors have the house's form (http_errors.py).
Never:     holds state of its own (``app.state.parts`` does); asks a replica itself (a router does).
Thread:    the observatory's event loop.
"""

import time
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http import http_errors
from deployments.http.access import BrowserCheck, BrowserRules, CloseUnread, KeyNeeded, Unforeseen
from deployments.http.http_errors import RETRY_AFTER_S, error_body
from deployments.watch.observatory.actions import Actions, routes
from deployments.watch.observatory.fan_in import CONTENT_TYPE, gather, service_discovery
from deployments.watch.observatory.pages import open_pages, pages
from deployments.watch.observatory.parts import Parts, admit, ask_for_key, number_in, parts_of
from deployments.watch.observatory.watch import NoRouter
from replicas.cache.tree_view import MAX_DEPTH

api = APIRouter()
MOST_TOKENS = 1 << 40
UNHEARD = "no router has answered in the last 30 s: who serves metrics is not known"
NOT_KEPT = {"Cache-Control": "no-store"}
ZIPPED = {**NOT_KEPT, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}


@api.get("/sd")
async def sd(request: Request) -> list[dict[str, Any]]:
    """Answer Prometheus' http_sd. Raises: NoRouter while no router is heard: Prometheus then keeps its targets."""
    parts = parts_of(request)
    if not parts.state.merged.heard_any:
        raise NoRouter(UNHEARD)
    return service_discovery(parts.targets())


@api.get("/metrics")
async def metrics(request: Request) -> Response:
    parts = parts_of(request)
    text = await gather(parts.targets(), parts.fetch)
    if not parts.state.merged.heard_any:
        text += f"# {UNHEARD}\n"
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


@api.get("/api/state")
async def state(request: Request) -> Response:
    """Answer with what changed since version ``since``; without it with all. Raises: InvalidRequest."""
    since = number_in(request, "since", 0, least=0, most=MOST_TOKENS)
    zipped = "gzip" in request.headers.get("accept-encoding", "")
    body = parts_of(request).state.answer(since, zipped=zipped, now_s=time.monotonic())
    return Response(body, media_type="application/json", headers=ZIPPED if zipped else NOT_KEPT)


@api.get("/api/history")
async def history(request: Request) -> Response:
    """Raises: InvalidRequest."""
    span_s = number_in(request, "span_s", 3600, least=1, most=3600)
    return JSONResponse(parts_of(request).state.history(span_s), headers=NOT_KEPT)


@api.get("/api/events")
async def events(request: Request) -> Response:
    """Answer with the events of the last hour after number ``since``, the oldest first. Raises: InvalidRequest."""
    since = number_in(request, "since", 0, least=0, most=MOST_TOKENS)
    return JSONResponse({"events": parts_of(request).state.feed.body(since=since)}, headers=NOT_KEPT)


@api.get("/api/tree")
async def tree(request: Request) -> Response:
    """Raises: InvalidRequest; NoRouter, ReplicaGone."""
    parts = parts_of(request)
    replica_id = request.query_params.get("replica", "")
    depth = number_in(request, "depth", 6, least=1, most=MAX_DEPTH)
    min_tokens = number_in(request, "min_tokens", 0, least=0, most=MOST_TOKENS)
    if not parts.state.knows(replica_id):
        known = ", ".join(parts.state.replica_ids) or "none"
        message = f"replica: there is no replica {replica_id[:200]!r}; there are: {known}"
        return JSONResponse(error_body(message, status=404, param="replica", code="replica_not_found"), status_code=404)
    found = await parts.trees.get(replica_id, max_depth=depth, min_tokens=min_tokens)
    return Response(found, media_type="application/json", headers=NOT_KEPT)


@api.get("/api/requests/{rid:path}")
async def request_(request: Request, rid: str) -> Response:
    """Answer for one request with the newest row known: a router may have forgotten a request still shown."""
    parts = parts_of(request)
    shown, found = parts.state.row(rid), await parts.routers.find_request(rid)
    if found.body is not None:
        keys = parts.trees.names.of_hex(found.body["page_keys"])
        body = {"row": found.body["row"], "page_keys": keys, "route": found.body["route"]}
        return JSONResponse(body, headers=NOT_KEPT)
    if found.unanswered:
        message = f"no request {rid[:200]!r} was found, but {found.unanswered}: try again in a moment"
        silent, again = error_body(message, status=503, code="routers_silent"), {"Retry-After": str(RETRY_AFTER_S)}
        return JSONResponse(silent, status_code=503, headers=again)
    if shown is not None:
        return JSONResponse({"row": shown, "page_keys": [], "route": None}, headers=NOT_KEPT)
    message = f"no router keeps a request {rid[:200]!r}: each keeps its last 1,000 until it ends"
    return JSONResponse(error_body(message, status=404, code="request_not_found"), status_code=404)


def make_app(parts: Parts, *, browsers: BrowserRules | None = None, actions: Actions | None = None) -> FastAPI:
    """Make the app over ``parts``. ``browsers``: None where pages cannot do harm (`browser_rules`). ``actions``: None
    where there is no Serve to ask."""
    app = FastAPI(title="Manta: observatory", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.parts = parts
    app.include_router(open_pages)
    for part in (pages, api, *([routes(actions)] if actions is not None else [])):
        app.include_router(part, dependencies=[Depends(admit)])
    http_errors.install(app)
    app.add_exception_handler(KeyNeeded, ask_for_key)
    app.add_middleware(Unforeseen)
    if browsers is not None:
        app.add_middleware(BrowserCheck, rules=browsers)
    app.add_middleware(TrailingSlash)
    app.add_middleware(CloseUnread)
    return app


class TrailingSlash:
    """ASGI middleware that redirects the application's path without a slash to the one with it, for relative links."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        if scope["type"] == "http" and root and scope["path"] == root:
            await RedirectResponse(f"{root}/", status_code=307)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
