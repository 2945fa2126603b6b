"""Assembles the HTTP API of one router as an ASGI app.

Never: holds state of its own; everything is in ``app.state.service``.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute

from deployments.http import admin, api_document, chat, completions, http_errors, native, occupation, routes
from deployments.http.access import BrowserCheck, BrowserRules, CloseUnread, KeyCheck, Unforeseen
from deployments.http.apis import adapters, batches, messages, ollama, pooling, responses, streams
from deployments.http.arrivals import ALIVE, DROPPED, RESUME, Arrivals
from deployments.http.service import Service
from deployments.http.tracing import Traces, Tracing
from deployments.tenancy.keys import NO_KEYS, KeyDigests

ROUTERS = (
    chat.router, completions.router, native.router, responses.router, messages.router, ollama.router, streams.router,
    pooling.router, batches.router, adapters.router, routes.router, admin.router, occupation.router,
)  # fmt: skip
# headers that pages may read
EXPOSED = ["x-request-id", "request-id", "x-manta-route", "x-manta-schema", DROPPED, RESUME, ALIVE, "retry-after"]


def make_app(
    service: Service,
    *,
    echo_request_id: bool = True,
    tracing: Tracing | None = None,
    keys: KeyDigests = NO_KEYS,
    browsers: BrowserRules | None = None,
    cors_origins: Collection[str] = (),
    live_view: Callable[[], Awaitable[str | None]] | None = None,
) -> FastAPI:
    """Make the app; ``service`` must be ready to answer.

    Args: echo_request_id: False if a proxy in front does it.
          browsers: the rules on web pages; None if keys protect the server (`browser_rules`).
          cors_origins: of pages that may read the answers; "*": all.
          live_view: gives the path to which browsers are led from /, None while there is none.
    """
    app = FastAPI(title="Manta", version=service.version, openapi_url=None, lifespan=_lifespan)
    app.state.service = service
    app.state.keys = keys
    app.state.live_view = live_view if live_view is not None else _no_live_view
    own = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    for route in own:
        if route.methods == {"GET"}:
            route.methods.add("HEAD")  # the server leaves the body out
    for router in ROUTERS:
        app.include_router(router)
    api_document.describe(app, service.model, any_model=service.adapters.are_possible)
    http_errors.install(app, own)
    app.add_middleware(Unforeseen)
    if tracing is not None:
        app.add_middleware(Traces, tracing=tracing, routes=service.dispatcher.routes)
    app.add_middleware(KeyCheck, keys=keys, quotas=service.dispatcher.quotas)
    if browsers is not None:
        app.add_middleware(BrowserCheck, rules=browsers)
    if cors_origins:
        methods, headers = ["GET", "POST", "DELETE"], ["*"]
        app.add_middleware(
            CORSMiddleware, allow_origins=cors_origins, allow_methods=methods, allow_headers=headers,
            expose_headers=EXPOSED, allow_private_network=True,
        )  # fmt: skip
    app.add_middleware(CloseUnread)
    dispatcher = service.dispatcher
    app.add_middleware(Arrivals, watch=dispatcher.watch, routes=dispatcher.routes, echo=echo_request_id)
    return app


async def _no_live_view() -> str | None:
    return None


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    examined = app.state.service.examined
    examined.start(several_callers=app.state.keys.exist)
    yield
    app.state.service.streams.stop()
    app.state.service.background.stop()
    examined.close()
