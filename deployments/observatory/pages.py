"""The live view's page and its files, and the login.

Owns:      the form of these answers. No file is written for the login: it is one small page.
Never:     answers a path outside the known files.
"""

import html
import urllib.parse

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from deployments.http_errors import error_body
from deployments.observatory.admin_key import COOKIE, LASTS_S
from deployments.observatory.page_files import INDEX, SAFETY, PageFile
from deployments.observatory.parts import parts_of

MOST_LOGIN_BYTES = 4096
ABSENT = "The live view's files (dashboards/ui) are not installed; api/state, sd and metrics are served all the same."
LOGIN = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Manta: log in</title>
<style>body{{font:1rem system-ui,sans-serif;max-width:22rem;margin:20vh auto;padding:0 1rem}}
label,input,button{{display:block;width:100%;box-sizing:border-box;font:inherit;margin:.4rem 0;padding:.4rem}}</style>
<h1>Manta</h1><form method="post" action="login"><label for="key">Admin key</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<p role="alert">{said}</p><button>Show the live view</button></form></html>
"""

pages = APIRouter()  # behind the key
login_page = APIRouter()  # before it


@pages.get("/")
async def index(request: Request) -> Response:
    file = parts_of(request).files.get(INDEX)
    if file is None:
        return Response(ABSENT, media_type="text/plain", headers=dict(SAFETY))
    return _file(request, file)


@pages.get("/ui/{path:path}")
async def page_file(request: Request, path: str) -> Response:
    file = parts_of(request).files.get(path)
    if file is None:
        return JSONResponse(error_body(f"there is no file {path[:200]!r}", status=404), status_code=404)
    return _file(request, file)


@login_page.get("/login")
async def show_login(request: Request) -> Response:
    parts = parts_of(request)
    if parts.key.admits(request.headers, request.cookies, parts.clock()):
        return RedirectResponse(home(request), status_code=303)
    return _login("")


@login_page.post("/login")
async def log_in(request: Request) -> Response:
    parts = parts_of(request)
    if not parts.key.is_set:
        return RedirectResponse(home(request), status_code=303)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_LOGIN_BYTES:
            return _login("That is too long to be the key.", status=413)
    given = urllib.parse.parse_qs(body.decode(errors="replace")).get("key", [""])[0]
    if not parts.key.is_right(given):
        return _login("That is not the key.", status=401)
    answer = RedirectResponse(home(request), status_code=303)
    answer.set_cookie(
        COOKIE,
        parts.key.login(parts.clock()),
        max_age=LASTS_S,
        path=home(request),
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


def home(request: Request) -> str:
    """Path of the live view, as browsers see it."""
    return f"{request.scope.get('root_path', '')}/"


def _login(said: str, *, status: int = 200) -> Response:
    headers = {**SAFETY, "Cache-Control": "no-store"}
    return Response(LOGIN.format(said=html.escape(said)), status_code=status, media_type="text/html", headers=headers)


def _file(request: Request, file: PageFile) -> Response:
    """Browsers ask each time, and are told that nothing has changed."""
    headers = {**SAFETY, "ETag": file.etag, "Cache-Control": "no-cache"}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.content_type)
