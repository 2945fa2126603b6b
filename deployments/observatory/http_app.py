"""Puts the observatory's routes together, behind the admin key where one is set.

Never: holds state of its own; everything is in ``app.state.parts``.
"""

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments import http_errors
from deployments.http_errors import error_body
from deployments.observatory.api import api
from deployments.observatory.pages import home, login_page, pages
from deployments.observatory.parts import Parts, parts_of
from replicas.errors import MantaError


class KeyNeeded(MantaError):
    """The admin key was not shown, or is wrong."""

    http_status = 401


def make_app(parts: Parts) -> FastAPI:
    """The app over ``parts``."""
    app = FastAPI(title="Manta: observatory", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.parts = parts
    app.include_router(login_page)
    for part in (pages, api):
        app.include_router(part, dependencies=[Depends(_admit)])
    http_errors.install(app)
    app.add_exception_handler(KeyNeeded, _ask_for_key)
    app.add_middleware(http_errors.Unforeseen)
    app.add_middleware(TrailingSlash)
    return app


async def _admit(request: Request) -> None:
    parts = parts_of(request)
    if not parts.key.admits(request.headers, request.cookies, parts.clock()):
        raise KeyNeeded("the admin key is asked for: Authorization: Bearer KEY, or log in with a browser at login")


async def _ask_for_key(request: Request, error: Exception) -> Response:
    """A browser that wants a page is led to the login."""
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"{home(request)}login", status_code=303)
    body = error_body(str(error), status=401, code="admin_key_needed")
    return JSONResponse(body, status_code=401, headers={"WWW-Authenticate": 'Bearer realm="manta"'})


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
