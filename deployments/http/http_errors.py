"""Errors as HTTP answers: the status, and one body for the OpenAI SDK, SGLang's clients and people.

    {"object": "error", "message": ..., "error": {"message", "type", "param", "code"}}

Under /v1/messages it is Anthropic's:

    {"type": "error", "error": {"type", "message"}, "request_id": ...}
"""

import logging
import math
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from replicas.errors import EngineDead, Fault, InvalidRequest, MantaError, PromptTooLong
from replicas.types import Finish
from routing.types import NoReplica

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CLIENT_CLOSED = 499
STATUS = {Fault.INVALID: 400, Fault.UNAUTHENTICATED: 401, Fault.FORBIDDEN: 403, Fault.NOT_FOUND: 404,
          Fault.TOO_SLOW: 408, Fault.CONFLICT: 409, Fault.GONE: 410, Fault.TOO_LARGE: 413, Fault.WRONG_TYPE: 415,
          Fault.TOO_MANY: 429, Fault.CANCELLED: CLIENT_CLOSED, Fault.INTERNAL: 500, Fault.UNAVAILABLE: 503,
          Fault.TIMED_OUT: 504, Fault.DISK_FULL: 507}  # fmt: skip
_FAULTS = {status: fault for fault, status in STATUS.items()}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          405: "invalid_request_error", 408: "timeout", 410: "not_found_error", 413: "invalid_request_error",
          415: "invalid_request_error", 429: "rate_limit_error", 499: "request_aborted", 503: "service_unavailable",
          504: "timeout"}  # fmt: skip
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")  # the paths whose errors have Anthropic's form
OLLAMA = ("/api/chat", "/api/generate", "/api/tags", "/api/version")  # those of Ollama's: a text alone
_MESSAGES_TYPES = {408: "timeout_error", 413: "request_too_large", 499: "api_error", 500: "api_error",
                   503: "overloaded_error", 504: "timeout_error"}  # others as above  # fmt: skip


class BodyTooLarge(InvalidRequest):
    """The body has more bytes than ``router.max_body_bytes``."""

    fault = Fault.TOO_LARGE


class BodyTooSlow(InvalidRequest):
    """The body was not complete within the time for bodies."""

    fault = Fault.TOO_SLOW


class Busy(MantaError):
    """Too many long bodies or prompts wait to be read."""

    fault = Fault.TOO_MANY


class GenerationFailed(MantaError):
    """The engine ended a request before its first token; carries the kind of failure that the engine gave."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.message or f"the request ended with {finish.reason.value}")
        self.fault = finish.fault or Fault.INTERNAL


def error_body(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code or status}
    return {"object": "error", "message": message, "error": error}


def fault_of(status: int) -> Fault:
    """Return what kind of failure HTTP answers with ``status``."""
    return _FAULTS.get(status, Fault.INVALID if status < 500 else Fault.INTERNAL)


def body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Make status and body for any exception; an unexpected one is logged, and its text is not shown."""
    if isinstance(error, MantaError | NoReplica):
        status = STATUS[Fault.UNAVAILABLE if isinstance(error, NoReplica) else error.fault]
        param = error.param if isinstance(error, InvalidRequest) else None
        code = error.code if isinstance(error, MantaError) else None
        if isinstance(error, EngineDead):  # its text is internal; `GET /route/{rid}` and the logs have it
            text = "the replica that ran this request failed, and no other replica could continue it: try again"
            return status, error_body(text, status=status)
        return status, error_body(str(error), status=status, param=param, code=code)
    log.error("a request failed", exc_info=error)
    return 500, error_body(f"internal error: {type(error).__name__}; the router's log has the details", status=500)


def messages_error(status: int, body: dict[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """Put an error's ``body`` into Anthropic's form, which names no field and no code. Its clients know a prompt that
    is too long by these words."""
    error = body["error"]
    too_long = "prompt is too long: " if error["code"] == PromptTooLong.code else ""
    shown = {"type": _MESSAGES_TYPES.get(status, error["type"]), "message": too_long + error["message"]}
    return {"type": "error", "error": shown, "request_id": request_id}


def _in_form_of(scope: Scope, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Put an error's body into the form that the route of ``scope`` has."""
    if scope["path"].endswith(OLLAMA):
        return {"error": body["message"]}
    if not scope["path"].endswith(MESSAGES):
        return body
    return messages_error(status, body, scope.get("state", {}).get("request_name"))


def error_response(error: Exception, scope: Scope) -> Response:
    status, body = body_of(error)
    wait_s = getattr(error, "retry_after_s", RETRY_AFTER_S)
    headers = {"Retry-After": str(max(math.ceil(wait_s), RETRY_AFTER_S))} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="manta"'
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(_in_form_of(scope, status, body), status_code=status, headers=headers)


def install(app: FastAPI, routes: Collection[APIRoute] = ()) -> None:
    """Install the handlers for all errors of ``app``. ``routes``: its own, where several may have one path."""

    async def ours(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope)

    async def starlettes(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = error_body(message, status=error.status_code)
        body = _in_form_of(request.scope, error.status_code, body)
        headers = error.headers
        if error.status_code == 405:  # with the methods of the first route of its path, which may have others
            path = next((each.path for each in routes if each.matches(request.scope)[0] is Match.PARTIAL), None)
            methods = {method for each in routes if each.path == path for method in each.methods or ()}
            headers = {"Allow": ", ".join(sorted(methods))} if methods else headers
        return JSONResponse(body, status_code=error.status_code, headers=headers)

    app.add_exception_handler(MantaError, ours)
    app.add_exception_handler(NoReplica, ours)
    app.add_exception_handler(HTTPException, starlettes)
