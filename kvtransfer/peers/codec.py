"""Frozen values as JSON, and back by the types of their fields.

Owns:      what each type looks like in JSON, and every check of it that needs the type alone.
Invariant: what is no value of the wanted type raises BadMessage that names the field, and nothing else.
"""

import base64
import functools
import json
import math
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, Literal

from kvtransfer.errors import BadMessage

MAX_INT = 2**63 - 1


def read_object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BadMessage(f"not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadMessage("a JSON object is wanted")
    return body


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, tuple):
        return list(value) if value and type(value[0]) is int else [plain(item) for item in value]
    return value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def read(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``, a type of the messages' fields. Raises: BadMessage that names the field."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise BadMessage(f"{where}: an object of {sorted(hints)} is wanted")
        try:
            return typing.cast(Any, kind)(**{k: read(hints[k], value[k], f"{where}.{k}") for k in hints})
        except (ValueError, ZeroDivisionError) as error:  # from __post_init__
            raise BadMessage(f"{where}: {error}") from None
    if origin is types.UnionType:
        if value is None and type(None) in args:
            return None
        return read(next(arg for arg in args if arg is not type(None)), value, where)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list):
        return _read_tuple(args, value, where)
    if origin is dict and isinstance(value, dict):
        return {_text(key, where): read(args[1], item, where) for key, item in value.items()}
    if kind is bytes and isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except ValueError:
            raise BadMessage(f"{where}: base64 is wanted") from None
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind is int and type(value) is int and abs(value) <= MAX_INT:
        return value
    if kind is bool and type(value) is bool:
        return value
    if kind is str and type(value) is str:
        return _text(value, where)
    raise BadMessage(f"{where}: {kind} is wanted, there is {type(value).__name__}")


def _text(value: str, where: str) -> str:
    """JSON can name half a character, which no bytes stand for."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadMessage(f"{where}: text is wanted, there is half a character") from None
    return value


def _read_tuple(args: tuple[Any, ...], value: list[Any], where: str) -> tuple[Any, ...]:
    if args == (int, ...) and all(type(item) is int and abs(item) <= MAX_INT for item in value):
        return tuple(value)
    kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(value):
        raise BadMessage(f"{where}: {len(kinds)} items are wanted, there are {len(value)}")
    return tuple(read(kind, item, where) for kind, item in zip(kinds, value, strict=True))
