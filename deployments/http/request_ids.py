"""The name of each HTTP request: the client's X-Request-Id or a new one, echoed in the answer and in log lines.

Thread: the router's event loop; pure ASGI, so that streams pass through untouched.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments import logs
from deployments.dispatch.rids import check_name, clean_name

HEADER = "x-request-id"


class RequestIds:
    """ASGI middleware. ``echo``: write the header; Ray Serve's proxy does so itself, and two would be joined."""

    def __init__(self, app: ASGIApp, *, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = clean_name(Headers(scope=scope).get(HEADER))
        scope.setdefault("state", {})["request_name"] = name

        async def named(message: Message) -> None:
            if self._echo and message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        with logs.about(request=name):
            await self._app(scope, receive, named)


def name_of(request: Request, rid: str | None = None) -> str:
    """What clients call this request: the ``rid`` of its body, or its X-Request-Id."""
    return check_name(rid) if rid else str(request.state.request_name)
