"""The live view's page and its files, and the login.

Owns:      the form of these answers.
Never:     answers a path outside the known files; without the key only those that the login page needs are served.
"""

import html
import logging
import re
import urllib.parse

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from deployments.http.http_errors import error_body
from deployments.watch.observatory.page_files import INDEX, LOGIN, RUNBOOK, SAFETY, PageFile, login_needs
from deployments.watch.observatory.parts import COOKIE, LASTS_S, admit, home, parts_of

log = logging.getLogger(__name__)

MOST_WRONG, WRONG_S = 20, 60.0  # logins with a wrong key within WRONG_S; further ones are told to wait
ABSENT = "The live view's files (dashboards/ui) are not installed; api/state, sd and metrics are served all the same."
NOTE = re.compile(r' aria-describedby="about">\n<p class="note" id="about">[^<]*')  # of the login page
WRONG = ' aria-invalid="true" aria-describedby="about">\n<p class="bad" role="alert" id="about">'

pages = APIRouter()  # routes behind the key
open_pages = APIRouter()  # routes before it


@pages.get("/")
async def index(request: Request) -> Response:
    return _page(request, INDEX)


@pages.get("/runbook")
async def runbook(request: Request) -> Response:
    return _page(request, RUNBOOK)


@open_pages.get("/ui/{path:path}")
async def page_file(request: Request, path: str) -> Response:
    """Raises: KeyNeeded."""
    files = parts_of(request).files
    if path not in login_needs(files):
        await admit(request)
    if path not in files:
        return JSONResponse(error_body(f"there is no file {path[:200]!r}", status=404), status_code=404)
    return _file(request, files[path])


@open_pages.get("/login")
async def show_login(request: Request) -> Response:
    parts = parts_of(request)
    if parts.key.admits(request.headers, request.cookies, parts.clock()):
        return RedirectResponse(home(request), status_code=303)
    return _login(request)


@open_pages.post("/login")
async def log_in(request: Request) -> Response:
    """Raises: BodyTooLarge, BodyTooSlow, RequestAborted."""
    parts = parts_of(request)
    if not parts.key.is_set:
        return RedirectResponse(home(request), status_code=303)
    body = await parts.logins.read(request)
    given = urllib.parse.parse_qs(body.decode(errors="replace")).get("key", [""])[0]
    if not parts.key.is_right(given):
        return _refuse(request)
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


def _refuse(request: Request) -> Response:
    """Answer a wrong key, and count it; the right one is compared first, so that no number of these keeps it out."""
    parts = parts_of(request)
    now_s = parts.clock()
    parts.wrong_s[:] = [then_s for then_s in parts.wrong_s if 0 <= now_s - then_s < WRONG_S]
    if len(parts.wrong_s) >= MOST_WRONG:
        return _login(request, "That is not the key; there were too many wrong ones: wait a minute.", status=429)
    parts.wrong_s.append(now_s)
    if len(parts.wrong_s) == MOST_WRONG:
        log.warning("%d logins with a wrong key came within %g s", MOST_WRONG, WRONG_S)
    return _login(
        request, "That is not the key: it is the value of MANTA_ADMIN_KEY where Manta was started.", status=401
    )


def _login(request: Request, said: str = "", *, status: int = 200) -> Response:
    """Return the login page, with ``said`` in place of its note."""
    file = parts_of(request).files.get(LOGIN)
    headers = {**SAFETY, "Cache-Control": "no-store"}
    if file is None:
        return Response(said or ABSENT, status_code=status, media_type="text/plain", headers=headers)
    page = file.body.decode()
    if said:
        page = NOTE.sub(lambda _: WRONG + html.escape(said), page)
    return Response(page, status_code=status, headers=headers, media_type=file.content_type)


def _page(request: Request, name: str) -> Response:
    file = parts_of(request).files.get(name)
    if file is None:
        return Response(ABSENT, media_type="text/plain", headers=dict(SAFETY))
    return _file(request, file)


def _file(request: Request, file: PageFile) -> Response:
    """Return a file, or 304: browsers ask each time."""
    headers = {**SAFETY, "ETag": file.etag, "Cache-Control": "no-cache"}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.content_type)
