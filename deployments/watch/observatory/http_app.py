"""Puts the observatory's routes together, behind the admin key where one is set.

Never: holds state of its own; everything is in ``app.state.parts``.
"""

from fastapi import Depends, FastAPI
from fastapi.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http import http_errors
from deployments.http.browsers import BrowserCheck, BrowserRules
from deployments.http.key_check import KeyNeeded
from deployments.watch.observatory.admission import admit, ask_for_key
from deployments.watch.observatory.api import api
from deployments.watch.observatory.pages import open_pages, pages
from deployments.watch.observatory.parts import Parts


def make_app(parts: Parts, *, browsers: BrowserRules | None = None) -> FastAPI:
    """The app over ``parts``. ``browsers``: None where pages cannot do harm (`browser_rules`)."""
    app = FastAPI(title="Manta: observatory", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.parts = parts
    app.include_router(open_pages)
    for part in (pages, api):
        app.include_router(part, dependencies=[Depends(admit)])
    http_errors.install(app)
    app.add_exception_handler(KeyNeeded, ask_for_key)
    app.add_middleware(http_errors.Unforeseen)
    if browsers is not None:
        app.add_middleware(BrowserCheck, rules=browsers)
    app.add_middleware(TrailingSlash)
    return app


class TrailingSlash:
    """ASGI middleware: the application's path without its slash leads to it with one, for the page's relative links."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        if scope["type"] == "http" and root and scope["path"] == root:
            await RedirectResponse(f"{root}/", status_code=307)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
