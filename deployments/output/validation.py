"""Whether a finished document is valid, where its schema has keywords that no grammar enforces; what is promised of it.

Owns:      the words of the header x-manta-schema.
Never:     fetches a schema; uses Python's regular expressions on a pattern of a client, which could hold the GIL for
           years: patterns run in linear time (pydantic's Rust engine), and those it does not know, or that are large,
           leave the document unchecked. Keeps a compiled pattern after the check; pydantic keeps some fifty.
Invariant: a document that could not be checked is never called valid. Each keyword looks at the deadline.
Thread:    documents are checked on two threads, until DEADLINE_S.
"""

import asyncio
import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
from jsonschema.validators import extend, validator_for
from pydantic_core import SchemaValidator, ValidationError, core_schema
from referencing import Registry

from replicas.grammar.checking import Problem
from replicas.types import Constraint, Finish, FinishReason

DEADLINE_S = 2.0
MAX_STATES = 6500  # of a pattern, as `_num_states` estimates them: 6 MB
MAX_SEARCH = 20_000_000  # states * characters of one search, which holds the GIL: 0.1 s
_MAX_COMPILED = 8  # patterns of a check that are kept
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="manta-validate")
SchemaWord = Literal["enforced", "validated", "partial"]
_FORMATS = jsonschema.FormatChecker()
# held by the grammar wherever it can be
_ENFORCED = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_NEWEST, _OLD = jsonschema.Draft202012Validator, jsonschema.Draft7Validator
_Errors = Iterator[Any]
# what a pattern is made of; a class with a "[" in it means other things elsewhere, and "(?x)" ignores white space
_PARTS = re.compile(
    r"\\[pPxuUb]\{[^}]*\}|\\.|\[\^?(?:\\.|[^]\\[])+\]|\{[^}]*\}|\(\?[a-zA-Z-]*x|.", re.DOTALL
)
_LARGE = re.compile(r"\\[wWdDsSpP]")  # classes of Unicode's characters


class _UncheckedError(Exception):
    """It cannot be told whether the document is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPromise:
    """What is promised of documents that were asked for by a schema.

    enforced:  all of the schema is held by the grammar, and the document was not cut.
    validated: some of it is not, or it was cut; the finished document was validated, and is valid.
    partial:   as before, and the document is not valid, was not finished, or could not be validated. Or it is
               not finished yet: the header of a stream.
    """

    schema: str  # as it was asked for
    problems: tuple[Problem, ...]  # what of it the grammar does not hold
    after: str = ""  # the document begins behind it

    @property
    def at_first(self) -> SchemaWord:
        return "partial" if self.problems else "enforced"

    async def of(self, outputs: Sequence[tuple[str, Finish | None]]) -> SchemaWord:
        """What holds of finished outputs, by their texts and ends: one that a limit or a stop text ended may be cut."""
        ends = [finish for _, finish in outputs if finish is not None]
        cut = any(each.reason is not FinishReason.STOP or isinstance(each.matched, str) for each in ends)
        if not self.problems and not cut:
            return "enforced"
        texts = [text for text, _ in outputs]
        documents = [text.partition(self.after)[2] if self.after and self.after in text else text for text in texts]
        until = time.monotonic() + DEADLINE_S
        check = asyncio.get_running_loop().run_in_executor(
            _THREADS, lambda: all(is_valid(self.schema, each, until=until) for each in documents)
        )
        try:
            return "validated" if await asyncio.wait_for(check, 2 * DEADLINE_S) else "partial"
        except TimeoutError:
            return "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormAsked:
    """What an output is held to, and what is promised of it if that is a schema."""

    constraint: Constraint | None = None
    promise: SchemaPromise | None = None


def is_valid(schema_text: str, text: str, *, until: float) -> bool:
    """Whether ``text`` is a JSON document that is valid; False also if that cannot be told, or not ``until`` then."""
    check = _Check(until)
    try:
        document, schema = json.loads(text, parse_constant=_no_constant), json.loads(schema_text)
        return bool(check.validator(schema).is_valid(document))
    except Exception:  # noqa: BLE001 - no JSON, a reference to nowhere, a keyword of the wrong type, too deep
        return False
    finally:
        check.forget()


class _Check:
    """The deadline of one check, and its patterns."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._searcher = functools.lru_cache(maxsize=_MAX_COMPILED)(_searcher)
        self._classes: dict[tuple[Any, bool], Any] = {}  # of validators, by jsonschema's, and whether $schema named it

    def forget(self) -> None:
        """Drop the patterns: the validator's class refers to itself, so it stays for a while."""
        self._searcher.cache_clear()

    def validator(self, schema: Any, **more: Any) -> Any:
        """Make a validator of ``schema``, by the draft that it names; a schema within it may name another."""
        base, dated = validator_for(schema, default=_NEWEST), isinstance(schema, dict) and "$schema" in schema
        made = self._classes.get((base, dated))
        if made is None:
            made = self._classes[base, dated] = extend(base, _keywords(base.VALIDATORS, self, dated=dated))
            evolve = made.evolve

            def evolved(validator: Any, **changes: Any) -> Any:
                inner = changes["schema"]
                if isinstance(inner, dict) and "$schema" in inner:  # jsonschema would go on with its own keywords
                    return self.validator(inner, _resolver=changes.get("_resolver", validator._resolver))
                return evolve(validator, **changes)

            made.evolve = evolved
        if dated:
            schema = {name: value for name, value in schema.items() if name != "$schema"}
        return made(schema, registry=Registry(), format_checker=_FORMATS, **more)

    def look(self) -> None:
        """Raises: _UncheckedError after the deadline."""
        if time.monotonic() > self._until:
            raise _UncheckedError

    def timed(self, evaluate: Callable[..., _Errors]) -> Callable[..., _Errors]:
        def evaluated(*args: Any) -> _Errors:
            self.look()
            return evaluate(*args)

        return evaluated

    def found(self, pattern: str, text: str) -> bool:
        self.look()
        searcher, num_states = self._searcher(pattern)
        if num_states * len(text) > MAX_SEARCH:
            raise _UncheckedError
        try:
            searcher.validate_python(text)
        except ValidationError as error:
            if error.errors()[0]["type"] != "string_pattern_mismatch":
                raise _UncheckedError from error
            return False
        return True

    def pattern(self, validator: Any, pattern: Any, instance: Any, schema: Any) -> _Errors:
        if isinstance(instance, str) and not self.found(pattern, instance):
            yield jsonschema.ValidationError("pattern")

    def pattern_properties(self, validator: Any, named: Any, instance: Any, schema: Any) -> _Errors:
        for pattern, subschema in named.items() if isinstance(instance, dict) else ():
            for name, value in instance.items():
                if self.found(pattern, name):
                    yield from validator.descend(value, subschema, path=name, schema_path=pattern)

    def additional_properties(self, validator: Any, subschema: Any, instance: Any, schema: Any) -> _Errors:
        if not isinstance(instance, dict):
            return
        left = [name for name in instance if name not in schema.get("properties", {})]
        for pattern in schema.get("patternProperties", {}):
            left = [name for name in left if not self.found(pattern, name)]
        for name in left:
            yield from validator.descend(instance[name], subschema, path=name)


def _keywords(of_draft: Mapping[str, Any], check: _Check, *, dated: bool) -> dict[str, Callable[..., _Errors]]:
    """All keywords, some of them evaluated otherwise than by jsonschema."""
    made: dict[str, Callable[..., _Errors]] = {
        **of_draft,
        "pattern": check.pattern,
        "patternProperties": check.pattern_properties,
        "additionalProperties": check.additional_properties,
        "uniqueItems": functools.partial(_unique_items, check),
        "format": functools.partial(_format, of_draft["format"]),
    }
    if "unevaluatedProperties" in of_draft:
        made["unevaluatedProperties"] = functools.partial(_unevaluated, of_draft["unevaluatedProperties"])
    if not dated:  # clients leave $schema out, and write what older drafts had
        for name in ("dependencies", "additionalItems"):
            made[name] = _OLD.VALIDATORS[name]
        made["items"] = _items
    return {name: check.timed(evaluate) for name, evaluate in made.items()}


def _items(validator: Any, items: Any, instance: Any, schema: Any) -> _Errors:
    yield from (_OLD if isinstance(items, list) else _NEWEST).VALIDATORS["items"](validator, items, instance, schema)


def _unique_items(check: _Check, validator: Any, unique: Any, instance: Any, schema: Any) -> _Errors:
    """Of a list of 5,000 objects, jsonschema compares all pairs."""
    seen = set()
    for item in instance if unique and isinstance(instance, list) else ():
        check.look()
        seen.add(_comparable(item))
    if unique and isinstance(instance, list) and len(seen) < len(instance):
        yield jsonschema.ValidationError("uniqueItems")


def _comparable(value: Any) -> Any:
    """A value that is equal, and has the same hash, where JSON Schema calls two values equal."""
    if isinstance(value, dict):
        return frozenset((name, _comparable(each)) for name, each in value.items())
    if isinstance(value, list):
        return tuple(map(_comparable, value))
    return (bool, value) if isinstance(value, bool) else value


def _unevaluated(evaluate: Callable[..., _Errors], validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    if "patternProperties" in json.dumps(validator.schema):  # it would search them itself
        raise _UncheckedError
    yield from evaluate(validator, value, instance, schema)


def _format(check: Callable[..., _Errors], validator: Any, name: Any, instance: Any, schema: Any) -> _Errors:
    if name in _FORMATS.checkers:
        yield from check(validator, name, instance, schema)
    elif name not in _ENFORCED and isinstance(instance, str):
        raise _UncheckedError


def _searcher(pattern: str) -> tuple[SchemaValidator, int]:
    num_states = _num_states(pattern)
    if num_states > MAX_STATES:
        raise _UncheckedError
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")), num_states


def _num_states(pattern: str) -> int:
    """Estimate the states of a pattern's automaton, of which each takes up to 1 kB."""
    groups = [[0, 0]]  # of each open group: the states of its parts, and of the last one, which may be repeated
    for part in _PARTS.findall(pattern):
        if part == "[" or part.startswith("(?"):
            raise _UncheckedError
        if part == "(":
            groups.append([1, 0])
        elif part == ")" and len(groups) > 1:
            size = sum(groups.pop())
            groups[-1] = [sum(groups[-1]), size]
        elif part[0] == "{":
            groups[-1][1] *= max([1, *map(int, re.findall(r"\d+", part))])
        elif part not in "*+?":
            size = 100 if _LARGE.search(part) else 4 if part == "." or part.startswith("[^") else 1
            groups[-1] = [sum(groups[-1]), size]
    return sum(map(sum, groups))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
