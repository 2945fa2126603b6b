"""Reads a request's body: bounded, as JSON, as one of our wire types; whatever is wrong with it is an InvalidRequest.

Never: lets a malformed body become a 422 or a 500.
"""

import json
import logging
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from deployments.http_errors import BodyTooLarge
from replicas.errors import InvalidRequest

log = logging.getLogger(__name__)


class WireType(BaseModel):
    """A request body. Unknown fields are accepted, since clients send many, and logged once each. Types are JSON's:
    true is no number, "2" is none, and 2.0 is no integer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), strict=True)


WireT = TypeVar("WireT", bound=WireType)
_logged: set[tuple[str, str]] = set()
_LOGGED_MOST = 1000  # names come from clients; do not remember them without end


async def read_body(request: Request, wire: type[WireT], *, max_bytes: int) -> WireT:
    """The body as ``wire``. Raises: BodyTooLarge, or InvalidRequest naming the field."""
    raw = parse_json(await _read(request, max_bytes))
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(raw).__name__}")
    try:
        value = wire.model_validate(raw)
    except ValidationError as error:
        raise _named(error) from error
    _log_unknown(wire.__name__, value.model_extra or {})
    return value


def parse_json(data: bytes) -> Any:
    """Raises: InvalidRequest for what is not JSON, not UTF-8, too deep, or not Unicode."""
    try:
        value = json.loads(data)
        if b"\\u" in data:  # only escapes can smuggle in a lone surrogate, which no text may hold
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error.reason} at position {error.start}") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(len(data), max_bytes)
    return bytes(data)


def _too_large(num_bytes: int, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {num_bytes:,} bytes or more; at most {max_bytes:,} are accepted")


def _named(error: ValidationError) -> InvalidRequest:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    param = str(errors[0]["loc"][0]) if errors[0]["loc"] else None
    ways = [
        f"{'.'.join(str(part) for part in e['loc'][1:])} {e['msg']}".strip() for e in errors if e["loc"][:1] == (param,)
    ]
    return InvalidRequest(f"{param}: {'; or '.join(ways[:5])}", param=param)


def _log_unknown(wire: str, extra: dict[str, Any]) -> None:
    for name in extra:
        if (wire, name) not in _logged and len(_logged) < _LOGGED_MOST:
            _logged.add((wire, name))
            log.info("%s: the field %.64r is not known here and is ignored", wire, name)
