"""When each HTTP request came that is counted, and at which endpoint; those that came to no prompt are counted here.

Owns:      which path is which endpoint of the catalogue.
Never:     reads a body; counts health checks, scrapes and the like.
Invariant: a counted HTTP request ends up in ``requests_total`` once for each of its prompts, or once if it had none.
Thread:    the router's event loop; pure ASGI, so that streams pass through untouched.
"""

import time
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.dispatch.following import CLIENT_CLOSED, RequestWatch, outcome_of_status, tell
from deployments.dispatch.timeline import Arrival

# by the end of the path: what stands before it is the application's route prefix
ENDPOINTS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/generate": "generate",
    "/tokenize": "tokens",
    "/detokenize": "tokens",
}


class Arrivals:
    """ASGI middleware; the outermost, so that an arrival is the arrival."""

    def __init__(self, app: ASGIApp, *, watch: RequestWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._watch = watch
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = _endpoint(scope)
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        arrival = Arrival(endpoint=endpoint, arrived_s=self._clock())
        scope.setdefault("state", {})["arrival"] = arrival
        status = CLIENT_CLOSED  # unless it is answered

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if not arrival.num_prompts:
                total_s = self._clock() - arrival.arrived_s
                tell(self._watch.answered, endpoint, outcome=outcome_of_status(status), total_s=total_s)


def arrival_of(request: Request) -> Arrival:
    """Of a request to one of the counted endpoints."""
    arrival = request.state.arrival
    assert isinstance(arrival, Arrival)
    return arrival


def _endpoint(scope: Scope) -> str | None:
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"]
    return next((endpoint for end, endpoint in ENDPOINTS.items() if path.endswith(end)), None)
