"""Reads a request's body: bounded in bytes, time and shape, as JSON, as one of our wire types.

Owns:      what a body may cost before it is known to be one of ours. Long ones are parsed on another thread, but JSON's
           parser holds the GIL there too: what takes it long, many small values, is counted first and refused.
Never:     lets a malformed body become a 422 or a 500: whatever is wrong with it is an InvalidRequest.
"""

import asyncio
import logging
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from deployments.http.http_errors import BodyTooLarge, BodyTooSlow
from deployments.http.service import service_of
from replicas.errors import InvalidRequest, RequestAborted

log = logging.getLogger(__name__)

LONG_BODY = 64 << 10  # bytes; longer ones are parsed on another thread
# of one body; as many of each take the parser 20 to 60 ms
MAX_VALUES = 1 << 20
MAX_NAMES = 1 << 17
MAX_CONTAINERS = 1 << 15
MAX_PROMPTS = 256
_BOM = b"\xef\xbb\xbf"

T = TypeVar("T")
# the first wrong element ends the check: an error for each of a million costs half a minute
Items = Annotated[list[T], Field(fail_fast=True)]
Named = Annotated[dict[str, T], Field(fail_fast=True)]


class WireType(BaseModel):
    """A request body. Unknown fields are accepted, since clients send many, and logged once each. Types are JSON's:
    true is no number, "2" is none, and 2.0 is no integer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), strict=True)


WireT = TypeVar("WireT", bound=WireType)
_logged: set[tuple[str, str]] = set()
_LOGGED_MOST = 1000  # names come from clients; do not remember them without end


async def read_body(request: Request, wire: type[WireT], *, max_bytes: int) -> WireT:
    """The body as ``wire``.

    Raises: BodyTooLarge; BodyTooSlow; RequestAborted when the client leaves before its end; Busy when too many long
            ones wait; or InvalidRequest naming the field.
    """
    service = service_of(request)
    try:
        async with asyncio.timeout(service.body_timeout_s):
            data = await _read(request, max_bytes)
    except ClientDisconnect as error:
        raise RequestAborted("the client closed the connection before the end of its body") from error
    except TimeoutError as error:
        raise BodyTooSlow(f"the body was not complete after {service.body_timeout_s:g} s") from error
    if len(data) <= LONG_BODY:
        return _parse(data, wire)
    return await service.parsing.run(lambda: _parse(data, wire), size=len(data))


def _parse(data: bytes, wire: type[WireT]) -> WireT:
    raw = parse_json(data)
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(raw).__name__}")
    try:
        value = wire.model_validate(raw)
    except ValidationError as error:
        raise _named(error) from error
    _log_unknown(wire.__name__, value.model_extra or {})
    return value


def parse_json(data: bytes) -> Any:
    """Raises: InvalidRequest for what is not JSON, not UTF-8, too deep, or not Unicode, or holds too many values."""
    if len(data) > LONG_BODY:
        check_shape(data)
    try:
        return from_json(data.removeprefix(_BOM))
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}") from error


def check_shape(data: bytes) -> None:
    """Raises: InvalidRequest when JSON of ``data`` would hold too many values, whatever they are."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes begins or ends a string
    chars = np.frombuffer(data, dtype=np.uint8)
    in_string = np.logical_xor.accumulate(chars == ord('"'))
    outside = chars[~in_string]
    counts = {char: np.count_nonzero(outside == ord(char)) for char in ",:[{"}
    num_containers = counts["["] + counts["{"]
    for found, most, what in (
        (num_containers, MAX_CONTAINERS, "lists and objects"),
        (counts[":"], MAX_NAMES, "named values"),
        (counts[","] + num_containers, MAX_VALUES, "values"),
    ):
        if found > most:
            raise InvalidRequest(f"the body has {found:,} {what}; at most {most:,} are accepted")


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
        if len(_logged) >= _LOGGED_MOST:
            return
        if (wire, name) not in _logged:
            _logged.add((wire, name))
            log.info("%s: the field %.64r is not known here and is ignored", wire, name)
