"""The admin key at the door of the observatory's HTTP routes.

Thread: the observatory's event loop.
"""

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from deployments.http.http_errors import error_response
from deployments.http.key_check import KeyNeeded
from deployments.settings.keys import KEY_VARIABLE
from deployments.watch.observatory.parts import parts_of


async def admit(request: Request) -> None:
    """Before every route but the login. Raises: KeyNeeded."""
    parts = parts_of(request)
    if parts.closed:
        message = f"the API asks for keys, and the observatory has none: set its admin_key, or {KEY_VARIABLE}"
        raise KeyNeeded(message, code="admin_key_needed")
    if not parts.key.admits(request.headers, request.cookies, parts.clock()):
        message = "the admin key is asked for: Authorization: Bearer KEY, or log in with a browser at login"
        raise KeyNeeded(message, code="admin_key_needed")


async def ask_for_key(request: Request, error: Exception) -> Response:
    """A browser that wants a page is led to the login."""
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"{home(request)}login", status_code=303)
    return error_response(error)


def home(request: Request) -> str:
    """Path of the live view, as browsers see it."""
    return f"{request.scope.get('root_path', '')}/"
