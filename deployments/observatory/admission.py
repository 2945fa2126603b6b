"""The admin key at the door of the observatory's HTTP routes.

Thread: the observatory's event loop.
"""

from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from deployments.http_errors import error_body
from deployments.observatory.parts import parts_of
from replicas.errors import MantaError


class KeyNeeded(MantaError):
    """The admin key was not shown, or is wrong."""

    http_status = 401


async def admit(request: Request) -> None:
    """Before every route but the login. Raises: KeyNeeded."""
    parts = parts_of(request)
    if not parts.key.admits(request.headers, request.cookies, parts.clock()):
        raise KeyNeeded("the admin key is asked for: Authorization: Bearer KEY, or log in with a browser at login")


async def ask_for_key(request: Request, error: Exception) -> Response:
    """A browser that wants a page is led to the login."""
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"{home(request)}login", status_code=303)
    body = error_body(str(error), status=401, code="admin_key_needed")
    return JSONResponse(body, status_code=401, headers={"WWW-Authenticate": 'Bearer realm="manta"'})


def home(request: Request) -> str:
    """Path of the live view, as browsers see it."""
    return f"{request.scope.get('root_path', '')}/"
