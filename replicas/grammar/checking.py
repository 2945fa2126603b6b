"""The grammar of a constraint, in llguidance's form; the limits on what it may be; and what of a schema cannot be held.

Owns:      how much text, nesting and white space a constraint may have; which keywords a grammar cannot enforce.
Never:     compiles for a model (compiler.py), or knows the name of a client's field (deployments/http/constraints.py).
Invariant: white space between the values of a document is bounded: no model can fill its output with it.
Thread:    any; pure functions. `examine` is for a process that may be killed (examiner.py): it has no bound in time.
"""

import collections
import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import urljoin

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from replicas.errors import InvalidRequest
from replicas.types import Constraint

MAX_TEXT = 64 << 10  # bytes of a constraint in UTF-8
MAX_SCHEMA = 4 << 20  # of a schema, or of a grammar that was made of several; routers accept 1 MiB
MAX_NESTING = 64  # lists and objects of a schema within each other; an object within an object takes two
MAX_PROPERTIES = 10_000  # of a schema, in all
MAX_ENUM = 10_000  # values, in all
MAX_CHOICES = 1000
# a few characters, or a line break with the indentation of a deep value
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}|\r?\n(\x20{0,32}|\x09{0,16})"
ANY_TEXT = r"/(.|\n)*/"  # in Lark
# llguidance's own, but for a tenth of the lexer's states, which can take 500 MB, and of a mask's items: 8 ms of CPU,
# not 400. examiner.py bounds what they do not
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=5_000,
    max_lexer_states=25_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
_MOST_TRIED = 32  # places of a keyword that are tried one by one
_OLD_DRAFT = re.compile(r"draft-0[4-7]")
# keywords that hold schemas by name, and those that hold none
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"enum", "const", "default", "examples", "example"})
# what llguidance says, and the keywords that it may mean
_BLAME = (
    (re.compile(r"Unimplemented keys: (\[.*\])"), None),
    (re.compile(r"Unknown format: (.*)"), ("format",)),
    (re.compile(r"oneOf constraints are not supported"), ("oneOf",)),
    (re.compile(r"min/maxProperties only supported"), ("minProperties", "maxProperties")),
    (re.compile(r"patternProperty regexes"), ("patternProperties",)),
    (re.compile(r"circular references with sibling"), ("$ref",)),
    (
        re.compile(r"regex parse error|lookarounds|if regex is empty"),
        ("pattern", "patternProperties", "minLength", "maxLength"),
    ),
    (
        re.compile(r"Failed to generate regex for \w+ range"),
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ),
    (re.compile(r"Value for 'multipleOf' has too many digits"), ("multipleOf",)),
    (
        re.compile(r"Expected positive integer for '"),
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    ),
)
# what llguidance says of a grammar that compiles, or of an output in it, and what that means
_MEANINGS = (
    ("NoExtensionBias", "nothing can come here: no text fits an expression of it, or a $ref, or a rule, leads back to "
                        "itself before any value or text"),
    ("Too many items", "the grammar can be read in too many ways here: make it unambiguous, as by [a-z]+ instead of "
                       "s ::= s s | [a-z]"),
    ("too many expressions", "a repetition in it, as a{1000000000}, is too large: ask for fewer, or for any number"),
)  # fmt: skip
_NEUTRAL = (("uniqueItems", False), ("minProperties", 0))  # ask for nothing
_TRIED = frozenset({"oneOf", "minProperties", "maxProperties", "patternProperties", "$ref"})
# keywords that are wrong by themselves, or beside these types
_TRIED_ALONE = frozenset({
    "pattern", "minLength", "maxLength", "minItems", "maxItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip
_IDENTITIES = frozenset({
    "$id", "id", "$schema", "$vocabulary", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$comment", "default",
})  # fmt: skip

# an escape; the beginning of a class, with what is no operator there; plain characters; any other
_REGEX_PARTS = re.compile(r"\\.?|\[\^?(?:\]|-+)?|[^\\\[\]()|^$/-]+|.", re.DOTALL)
_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}

ErrorOf = Callable[[str], str]  # what llguidance says of a grammar; empty if it compiles


class Problem(NamedTuple):
    """A keyword of a schema that a grammar cannot enforce, and where it stands."""

    keyword: str
    pointer: str  # RFC 6901, from the root of the schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What can be held of what a client asked for."""

    constraint: Constraint
    problems: tuple[Problem, ...] = ()  # left out of the constraint


def explained(error: str) -> str:
    """Say what llguidance's ``error`` means for a client, where that is known."""
    return next((meaning for sign, meaning in _MEANINGS if sign in error), error)


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of ``constraint`` for llguidance. It begins where the constraint does: behind ``after``.

    Raises: InvalidRequest for a text that passes a limit, or is no JSON object where it must be one.
    """
    check_text(constraint.text, MAX_TEXT if constraint.kind == "regex" else MAX_SCHEMA)
    if constraint.kind == "regex":
        return str(LLMatcher.grammar_from_regex(_in_ascii(constraint.text)))
    if constraint.kind == "lark":
        return str(LLMatcher.grammar_from_lark(_in_ascii(constraint.text)))
    return _grammar(read_schema(constraint.text))


def _in_ascii(text: str) -> str:
    r"""Write \d and \w of an expression, or of those of a grammar, as what they are in a schema's ``pattern``: ASCII.

    At the end of a range, as in [+-\d], they stay what they are: an error.
    """
    made, in_class, before = list[str](), False, ""
    for part in _REGEX_PARTS.findall(text):
        made.append(part if in_class and before == "-" else _ASCII.get(part, part))
        in_class, before = part[0] == "[" or (in_class and part != "]"), part
    return "".join(made)


def _grammar(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": _bounded(schema)}]})


def _bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def lark_document(schema: Mapping[str, Any]) -> str:
    """Write a document of ``schema`` in llguidance's dialect of Lark."""
    return f"%json {json.dumps(_bounded(schema), ensure_ascii=False)}"


def lark_text(text: str, special_ids: Mapping[str, int]) -> str:
    """Write ``text`` in llguidance's dialect of Lark, as strings and special tokens; nothing if it is empty.

    Args: special_ids: the ids of special tokens, by their texts.
    """
    for special, token_id in special_ids.items():
        before, found, behind = text.partition(special)
        if found:
            return f"{lark_text(before, special_ids)} <[{token_id}]> {lark_text(behind, special_ids)}".strip()
    return json.dumps(text, ensure_ascii=False) if text else ""


def check_text(text: str, most: int = MAX_TEXT) -> None:
    """Raises: InvalidRequest for a text that is too long, or has no UTF-8 form."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not Unicode: {error}") from error
    if size > most:
        raise InvalidRequest(f"has {size:,} bytes; at most {most:,} are accepted")


def read_schema(text: str) -> dict[str, Any]:
    """Parse a schema. Raises: InvalidRequest if it is no JSON object, or passes a limit."""
    too_deep = f"the schema is nested too deeply: {MAX_NESTING} lists and objects within each other are accepted"
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the schema is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(too_deep) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the schema must be a JSON object, got {type(schema).__name__}")
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
    if level:
        raise InvalidRequest(too_deep)
    if _OLD_DRAFT.search(str(schema.get("$schema"))):
        for node, keyword, _, _ in list(keywords_of(schema)):
            if keyword == "$ref":  # in these drafts nothing beside it counts
                for name in node.keys() - _NAMED - {"$ref", "$schema"}:
                    del node[name]
    counts = {"properties": 0, "enum": 0}
    for _, keyword, value, _ in keywords_of(schema):
        if keyword in counts and isinstance(value, dict | list):
            counts[keyword] += len(value)
    for (keyword, count), most in zip(counts.items(), (MAX_PROPERTIES, MAX_ENUM), strict=True):
        if count > most:
            raise InvalidRequest(f"the schema has {count:,} values in {keyword}; at most {most:,} are accepted")
    return schema


def examine(kind: Literal["json_schema", "regex", "lark", "gbnf", "choice"], text: str, error_of: ErrorOf) -> Examined:
    """Find what can be held of ``text``: a schema without the keywords that cannot be enforced, anything else whole.

    Args:   kind: lark: a grammar that was made here; gbnf: a client's, in llama.cpp's form, or in Lark's; choice: a
                  JSON list of strings.
    Raises: InvalidRequest if it does not compile.
    """
    check_text(text, MAX_SCHEMA if kind in ("json_schema", "lark") else MAX_TEXT)
    if kind == "json_schema":
        schema = read_schema(text)
        brought = _bring_in(schema)
        found = _leave_out(schema, error_of, brought)
        if moved := _move_patterns(schema, error_of):
            found += _leave_out(schema, error_of, brought)
        left = json.dumps(schema, ensure_ascii=False) if found or brought or moved else text
        return Examined(constraint=Constraint(kind="json_schema", text=left), problems=tuple(found))
    if kind == "gbnf":
        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter's own, and what it runs into
            raise InvalidRequest(f"is not a grammar in GBNF: {error}"[:500]) from error
    elif kind == "choice":
        text = "|".join(map(_literal, json.loads(text)))
    constraint = Constraint(kind="lark" if kind in ("lark", "gbnf") else "regex", text=text)
    if said := error_of(grammar_of(constraint)):
        raise InvalidRequest(f"does not compile: {_shown(said)}")
    return Examined(constraint=constraint)


def _bring_in(schema: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Put the published meta-schemas that ``schema`` refers to among its $defs, so that keywords can be left out of
    them, and refer to them there. Returns: the place of the $ref that brought each in, by its name in $defs.
    """
    brought: dict[str, tuple[str, ...]] = {}
    left: collections.deque[tuple[dict[str, Any], str, tuple[Any, ...]]] = collections.deque([(schema, "", ())])
    while left:
        within, base, by = left.popleft()
        for node, keyword, value, path in list(keywords_of(within)):
            if keyword != "$ref" or not isinstance(value, str):
                continue
            uri, _, pointer = urljoin(base, value).partition("#")
            if (meta := _published(uri)) is None or not isinstance(schema.setdefault("$defs", {}), dict):
                continue
            node["$ref"] = f"#/$defs/{_escaped(uri)}{pointer}"
            if uri not in brought:
                brought[uri] = by or path
                schema["$defs"][uri] = copy.deepcopy({name: meta[name] for name in meta.keys() - _IDENTITIES})
                left.append((schema["$defs"][uri], uri, brought[uri]))
    return brought


def _move_patterns(schema: dict[str, Any], error_of: ErrorOf) -> bool:
    """Move a pattern of patternProperties that fits named properties alone to those: else the grammar offers a comma
    behind the last of them, and no name can follow it. Returns: whether there was such a pattern."""

    def is_empty(terminal: str) -> bool:
        return "NoExtensionBias" in error_of(str(LLMatcher.grammar_from_lark(f"start: A\nA: {_in_ascii(terminal)}")))

    moved = False
    for node, keyword, patterns, _ in list(keywords_of(schema)):
        named = node.get("properties")
        if keyword != "patternProperties" or not isinstance(patterns, dict) or not isinstance(named, dict):
            continue
        of_name = {name: _literal(name).replace("/", r"\/") for name in named}
        for pattern, asked in list(patterns.items()):
            whole = _without_anchors(pattern)
            if whole is None or not is_empty(f"/{whole}/ & ~/{'|'.join(of_name.values())}/"):
                continue
            moved = True
            del patterns[pattern]
            for name, literal in of_name.items():
                if named[name] != asked and not is_empty(f"/{whole}/ & /{literal}/"):
                    named[name] = {"allOf": [named[name], asked]}
    return moved


def _without_anchors(pattern: str) -> str | None:
    """Return ``pattern`` in Lark without ^ and $; None if an alternative lacks them, and so fits names without end."""
    ways, depth, in_class = list[list[str]]([[]]), 0, False
    for part in _REGEX_PARTS.findall(pattern):
        in_class = part[0] == "[" or (in_class and part != "]")
        depth += 0 if in_class else (part == "(") - (part == ")")
        if part == "|" and not depth and not in_class:
            ways.append([])
        else:
            ways[-1].append(r"\/" if part == "/" else part)
    if not all(way[:1] == ["^"] and way[-1:] == ["$"] for way in ways):
        return None
    return "|".join("".join(way[1:-1]) for way in ways)


def _published(uri: str) -> dict[str, Any] | None:
    if "json-schema.org/" not in uri:
        return None
    from jsonschema_specifications import REGISTRY  # half as long as all other imports of the examiner

    name = uri.partition("://")[2]  # many write https where a draft has http
    found = next(filter(None, map(REGISTRY.get, (uri, f"http://{name}", f"https://{name}"))), None)
    return None if found is None else dict(found.contents)


def _leave_out(schema: dict[str, Any], error_of: ErrorOf, brought: Mapping[str, tuple[str, ...]]) -> list[Problem]:
    """Take the keywords that cannot be enforced out of ``schema``. Raises: InvalidRequest if the rest is no schema."""
    found: dict[Problem, None] = {}
    while error := error_of(_grammar(schema)):
        blamed = _blamed(schema, error, error_of)
        if not blamed:
            raise InvalidRequest(f"the schema does not compile: {_shown(error)}")
        for pointer in blamed:
            value = _remove(schema, pointer)
            if (pointer[-1], value) not in _NEUTRAL:
                place = brought.get(pointer[1], pointer) if pointer[0] == "$defs" else pointer
                found[Problem(pointer[-1], "".join(f"/{_escaped(part)}" for part in place))] = None
    return list(found)


def _blamed(schema: dict[str, Any], error: str, error_of: ErrorOf) -> list[tuple[str, ...]]:
    """List the places of the keywords that ``error`` is about."""
    for pattern, names in _BLAME:
        said = pattern.search(error)
        if said is None:
            continue
        keywords = set(json.loads(said[1])) if names is None else set(names)
        places = [
            pointer
            for node, keyword, value, pointer in keywords_of(schema)
            if keyword in keywords
            and (keyword != "format" or value == said[1])
            and (keyword not in _TRIED_ALONE or _fails_alone(node, keyword, pattern, error_of))
        ]
        if not keywords & _TRIED or not 1 < len(places) <= _MOST_TRIED:
            return places
        return [each for each in places if pattern.search(_error_of_one(schema, each, places, error_of))] or places
    return []


def _fails_alone(node: dict[str, Any], keyword: str, error: re.Pattern[str], error_of: ErrorOf) -> bool:
    """Whether ``keyword`` of ``node`` is what makes that ``error``; False where no schema may have such a value."""
    value = node[keyword]
    if keyword != "pattern" and (not isinstance(value, int | float) or (value < 0 and not keyword.endswith("imum"))):
        return False
    alone = {name: node[name] for name in ("type", keyword) if name in node}
    return error.search(error_of(_grammar(alone))) is not None


def _error_of_one(
    schema: dict[str, Any], pointer: tuple[str, ...], places: list[tuple[str, ...]], error_of: ErrorOf
) -> str:
    """What llguidance says where, of ``places``, ``pointer`` alone is left."""
    rest = copy.deepcopy(schema)
    for other in places:
        if other != pointer:
            _remove(rest, other)
    return error_of(_grammar(rest))


def _remove(schema: dict[str, Any], pointer: tuple[str, ...]) -> Any:
    """Remove a keyword; oneOf becomes anyOf, which asks for less. Returns: its value; None if it went with another."""
    at: Any = schema
    for part in pointer[:-1]:
        at = at[int(part)] if isinstance(at, list) else at.get(part)
        if at is None:
            return None
    value = at.pop(pointer[-1], None)
    if pointer[-1] == "oneOf" and value is not None:
        if "anyOf" in at:
            at["allOf"] = [*at.get("allOf", []), {"anyOf": value}]
        else:
            at["anyOf"] = value
    return value


def keywords_of(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any, tuple[str, ...]]]:
    """Walk all schemas within ``schema``. Yields: the schema, keyword, its value, and its path from the root."""
    left = collections.deque[tuple[Any, tuple[str, ...], bool]]([(schema, (), False)])
    while left:
        node, path, is_named = left.popleft()
        items = list(node.items()) if isinstance(node, dict) else [(str(i), each) for i, each in enumerate(node)]
        for name, value in items:
            if isinstance(node, dict) and not is_named:
                yield node, name, value, (*path, name)
                if name in _DATA:
                    continue
            if isinstance(value, dict | list):
                left.append((value, (*path, name), isinstance(node, dict) and not is_named and name in _NAMED))


def _literal(text: str) -> str:
    """Write ``text`` as a regular expression."""
    return "".join(f"\\x{{{ord(c):x}}}" if c < " " or c == "\x7f" else re.escape(c) for c in text)


def _shown(error: str) -> str:
    return " ".join(explained(error).split())[:300]


def _escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")
