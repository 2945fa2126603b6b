"""Errors as HTTP answers: the status, and one body for the OpenAI SDK, SGLang's clients and people.

    {"object": "error", "message": ..., "error": {"message", "type", "param", "code"}}
"""

import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replicas.errors import EngineDead, InvalidRequest, MantaError
from replicas.types import Finish
from routing.types import NoReplica

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CLIENT_CLOSED = 499
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          405: "invalid_request_error", 408: "timeout", 413: "invalid_request_error", 415: "invalid_request_error",
          429: "rate_limit_error", 499: "request_aborted", 503: "service_unavailable", 504: "timeout"}  # fmt: skip


class BodyTooLarge(InvalidRequest):
    """The body has more bytes than ``router.max_body_bytes``."""

    http_status = 413


class BodyTooSlow(InvalidRequest):
    """The body was not complete within ``router.body_timeout_s``."""

    http_status = 408


class Busy(MantaError):
    """Too many long bodies or prompts wait to be read."""

    http_status = 429


class GenerationFailed(MantaError):
    """The engine ended a request before its first token; carries the status that the engine gave."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.message or f"the request ended with {finish.reason.value}")
        self.http_status = finish.http_status if finish.http_status >= 400 else 500


def error_body(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code or status}
    return {"object": "error", "message": message, "error": error}


def body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Make status and body for any exception; an unexpected one is logged, and its text is not shown."""
    if isinstance(error, MantaError | NoReplica):
        status = error.http_status
        param = error.param if isinstance(error, InvalidRequest) else None
        code = error.code if isinstance(error, MantaError) else None
        if isinstance(error, EngineDead):  # its text is internal; `GET /route/{rid}` and the logs have it
            text = "the replica that ran this request failed, and no other replica could continue it: try again"
            return status, error_body(text, status=status)
        return status, error_body(str(error), status=status, param=param, code=code)
    log.error("a request failed", exc_info=error)
    return 500, error_body(f"internal error: {type(error).__name__}; the router's log has the details", status=500)


def error_response(error: Exception) -> Response:
    status, body = body_of(error)
    wait_s = getattr(error, "retry_after_s", RETRY_AFTER_S)
    headers = {"Retry-After": str(max(math.ceil(wait_s), RETRY_AFTER_S))} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="manta"'
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(body, status_code=status, headers=headers)


class Unforeseen:
    """ASGI middleware: logs and answers an exception that no handler knows, and stops it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Install the handlers for all errors of ``app``."""

    async def ours(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def starlettes(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = error_body(message, status=error.status_code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    app.add_exception_handler(MantaError, ours)
    app.add_exception_handler(NoReplica, ours)
    app.add_exception_handler(HTTPException, starlettes)
