"""Whether a finished document is valid, where its schema has keywords that no grammar enforces; what is promised of it.

Owns:      the words of the header x-manta-schema.
Never:     fetches a schema; uses Python's regular expressions on a pattern of a client, which could hold the GIL for
           years: patterns run in linear time (pydantic's Rust engine), and those it does not know leave the document
           unchecked.
Invariant: a document that could not be checked is never called valid.
Thread:    a document is checked on a thread of its own, until DEADLINE_S.
"""

import asyncio
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
from jsonschema.validators import extend, validator_for
from pydantic_core import SchemaValidator, ValidationError, core_schema
from referencing import Registry

from replicas.grammar.checking import Problem
from replicas.types import Constraint

DEADLINE_S = 2.0
SchemaWord = Literal["enforced", "validated", "partial"]
_FORMATS = jsonschema.FormatChecker()
# held by the grammar wherever it can be
_ENFORCED = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_NEWEST, _OLD = jsonschema.Draft202012Validator, jsonschema.Draft7Validator
_Errors = Iterator[Any]


class _UncheckedError(Exception):
    """It cannot be told whether the document is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPromise:
    """What is promised of documents that were asked for by a schema.

    enforced:  all of the schema is held by the grammar.
    validated: some of it is not; the finished document was validated, and is valid.
    partial:   some of it is not, and the document is not valid, was not finished, or could not be validated. Or it is
               not finished yet: the header of a stream.
    """

    schema: str  # as it was asked for
    problems: tuple[Problem, ...]  # what of it the grammar does not hold
    after: str = ""  # the document begins behind it

    @property
    def at_first(self) -> SchemaWord:
        return "partial" if self.problems else "enforced"

    async def of(self, texts: Sequence[str]) -> SchemaWord:
        """What holds of finished outputs."""
        if not self.problems:
            return "enforced"
        documents = [text.partition(self.after)[2] if self.after and self.after in text else text for text in texts]
        until = time.monotonic() + DEADLINE_S
        check = asyncio.to_thread(lambda: all(is_valid(self.schema, each, until=until) for each in documents))
        try:
            return "validated" if await asyncio.wait_for(check, 2 * DEADLINE_S) else "partial"
        except TimeoutError:
            return "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormAsked:
    """What an output is held to, and what is promised of it if that is a schema."""

    constraint: Constraint
    promise: SchemaPromise | None


def is_valid(schema_text: str, text: str, *, until: float) -> bool:
    """Whether ``text`` is a JSON document that is valid; False also if that cannot be told, or not ``until`` then."""
    try:
        document, schema = json.loads(text, parse_constant=_no_constant), json.loads(schema_text)
        base = validator_for(schema, default=_NEWEST)
        validator = extend(base, _keywords(base.VALIDATORS, until, dated="$schema" in schema))
        return bool(validator(schema, registry=Registry(), format_checker=_FORMATS).is_valid(document))
    except Exception:  # noqa: BLE001 - no JSON, a reference to nowhere, a keyword of the wrong type, too deep
        return False


def _keywords(of_draft: Mapping[str, Any], until: float, *, dated: bool) -> dict[str, Callable[..., _Errors]]:
    """The keywords that are evaluated otherwise than by jsonschema."""

    def followed(name: str) -> Callable[..., _Errors]:
        def follow(validator: Any, ref: Any, instance: Any, schema: Any) -> _Errors:
            if time.monotonic() > until:  # references can make any schema exponential
                raise _UncheckedError
            yield from of_draft[name](validator, ref, instance, schema)

        return follow

    made: dict[str, Callable[..., _Errors]] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "format": functools.partial(_format, of_draft["format"]),
    }
    made |= {name: followed(name) for name in ("$ref", "$dynamicRef", "$recursiveRef") if name in of_draft}
    if "unevaluatedProperties" in of_draft:
        made["unevaluatedProperties"] = functools.partial(_unevaluated, of_draft["unevaluatedProperties"])
    if not dated:  # clients leave $schema out, and write what older drafts had
        for name in ("dependencies", "additionalItems"):
            made[name] = _OLD.VALIDATORS[name]
        made["items"] = _items
    return made


def _items(validator: Any, items: Any, instance: Any, schema: Any) -> _Errors:
    yield from (_OLD if isinstance(items, list) else _NEWEST).VALIDATORS["items"](validator, items, instance, schema)


def _pattern(validator: Any, pattern: Any, instance: Any, schema: Any) -> _Errors:
    if isinstance(instance, str) and not _found(pattern, instance):
        yield jsonschema.ValidationError("pattern")


def _pattern_properties(validator: Any, named: Any, instance: Any, schema: Any) -> _Errors:
    for pattern, subschema in named.items() if isinstance(instance, dict) else ():
        for name, value in instance.items():
            if _found(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, subschema: Any, instance: Any, schema: Any) -> _Errors:
    for name, value in instance.items() if isinstance(instance, dict) else ():
        known = name in schema.get("properties", {})
        if not known and not any(_found(pattern, name) for pattern in schema.get("patternProperties", {})):
            yield from validator.descend(value, subschema, path=name)


def _unevaluated(evaluate: Callable[..., _Errors], validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    if "patternProperties" in json.dumps(validator.schema):  # it would search them itself
        raise _UncheckedError
    yield from evaluate(validator, value, instance, schema)


def _format(check: Callable[..., _Errors], validator: Any, name: Any, instance: Any, schema: Any) -> _Errors:
    if name in _FORMATS.checkers:
        yield from check(validator, name, instance, schema)
    elif name not in _ENFORCED and isinstance(instance, str):
        raise _UncheckedError


def _found(pattern: str, text: str) -> bool:
    try:
        _searcher(pattern).validate_python(text)
    except ValidationError as error:
        if error.errors()[0]["type"] != "string_pattern_mismatch":
            raise _UncheckedError from error
        return False
    return True


@functools.lru_cache(maxsize=256)
def _searcher(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
