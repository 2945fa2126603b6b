"""Asks HTTP requests for the API key, and routes of the admin for the admin key (settings/keys.py has both).

Owns:      the middleware, and the check before routes that ask for the admin key.
Invariant: with API keys, nothing but the OPEN paths is answered without one, and no body is read before.
"""

from collections.abc import Mapping
from dataclasses import replace

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.dispatch.rids import owned
from deployments.http.http_errors import error_response
from deployments.settings.keys import ANYBODY, KEY_VARIABLE, Caller, KeyDigests, shown_keys
from replicas.errors import MantaError
from replicas.types import GenerateRequest

OPEN = ("/health", "/ready", "/ping")


class KeyNeeded(MantaError):
    """A key was not shown, or is wrong."""

    http_status = 401

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class KeyCheck:
    """ASGI middleware: a request without an API key, where there are any, is answered before its body is read."""

    def __init__(self, app: ASGIApp, *, keys: KeyDigests) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            caller = self._keys.caller(headers)
            if caller is None and path_of(scope) not in OPEN:
                await error_response(_key_needed(headers))(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller or ANYBODY
        await self._app(scope, receive, send)


def _key_needed(headers: Mapping[str, str]) -> KeyNeeded:
    what = "the API key is wrong" if shown_keys(headers) else "an API key is asked for"
    return KeyNeeded(f"{what}: send Authorization: Bearer KEY, or x-api-key: KEY", code="invalid_api_key")


def path_of(scope: Scope) -> str:
    """The path below the application's route prefix, as routes are matched."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def caller_of(request: Request) -> Caller:
    caller = getattr(request.state, "caller", ANYBODY)
    assert isinstance(caller, Caller)
    return caller


def admin_only(request: Request) -> None:
    """Before routes that show or change what is everybody's. Raises: KeyNeeded."""
    if request.app.state.keys.exist and not caller_of(request).is_admin:
        raise KeyNeeded(
            f"the admin key is asked for (router.admin_key, or {KEY_VARIABLE}): send Authorization: Bearer KEY",
            code="admin_key_needed",
        )


def scoped(request: GenerateRequest, caller: Caller, *, isolates: bool) -> GenerateRequest:
    """``request`` as its caller's: its id says whose it is; with ``isolates`` it shares cached prefixes with requests
    of the same key alone, and of them with those of the same salt."""
    if not caller.name:
        return request
    salt = f"\0{caller.name}\0{request.cache_salt}" if isolates else request.cache_salt  # clients cannot send NUL
    return replace(request, rid=owned(request.rid, caller.name), cache_salt=salt)
