"""replicas/grammar/checking.py: what a constraint's grammar takes, with llguidance and the embedded model's tokens."""

import functools
import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from replicas.errors import InvalidRequest
from replicas.grammar.checking import LIMITS, MAX_TEXT, examine, explained, grammar_of
from replicas.grammar.matcher import Matcher, Vocabulary
from replicas.types import Constraint
from tests.embedded import MODEL

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "object"}},
    "required": ["a"],
}
INT = {"type": "integer"}
DOCUMENT = {"a": [1, 2], "b": {"x": [1, {"y": "z"}]}}


@functools.cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((Path(MODEL) / "tokenizer.json").read_text())


def takes(grammar: str, text: str, *, parse_special: bool = False) -> bool:
    """Whether the grammar takes every token of ``text``, and the text may end there."""
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer().tokenize_str(text, parse_special=parse_special)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def begins(grammar: str, text: str) -> bool:
    """Whether the grammar takes every token of ``text``, and then has one more or ends."""
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    tokens = tokenizer().tokenize_str(text)
    taken = matcher.try_consume_tokens(tokens) == len(tokens)
    matcher.compute_bitmask()
    return taken and not matcher.is_error()


def of_schema(schema: object) -> str:
    return grammar_of(Constraint(kind="json_schema", text=json.dumps(schema)))


@pytest.mark.parametrize("form", [{}, {"separators": (",", ":")}, {"indent": 4}, {"indent": "\t"}])
def test_every_usual_layout_of_a_document_is_taken(form: dict[str, object]) -> None:
    assert takes(of_schema(SCHEMA), json.dumps(DOCUMENT, **form))


@pytest.mark.parametrize("space", [" " * 200, "\n" + " " * 200, "\n" * 200, "\t" * 200])
def test_white_space_without_end_is_refused(space: str) -> None:
    assert takes(of_schema(SCHEMA), '{ "a":[1]}')
    assert not takes(of_schema(SCHEMA), "{" + space + '"a":[1]}')


def test_a_schema_cannot_change_how_it_is_compiled() -> None:
    asks = {"x-guidance": {"whitespace_pattern": " *", "key_separator": "="}}
    assert takes(of_schema(SCHEMA | asks), '{"a":[1]}')
    assert not takes(of_schema(SCHEMA | asks), "{" + " " * 200 + '"a":[1]}')
    matcher = LLMatcher(tokenizer(), of_schema({"not": {}, "x-guidance": {"lenient": True}}), log_level=0)
    assert "not" in matcher.get_error()


def test_a_regular_expression_spans_the_whole_output() -> None:
    grammar = grammar_of(Constraint(kind="regex", text="a/b|c\nd"))
    assert takes(grammar, "a/b")
    assert takes(grammar, "c\nd")
    assert not takes(grammar, "xa/b")


@pytest.mark.parametrize(("pattern", "ascii_only", "wider"), [
    (r"\d", "7", "\u0667\U0001fbf8"), (r"\w", "aZ_0", "\xe9\u6f22"), (r"[^\d]", "a\u0667", "7"), (r"\D", "\u0667", "0"),
    (r"\W", "\xe9-", "a"), (r"[\d-]", "7-", "\u0667"), (r"[-\w.]", "-a.", "\xe9"), (r"[]\d]", "]7", "\u0667"),
    (r"[\D7]", "7\u0667", "8"), (r"[^]\w]", "\xe9-", "]a"),
])  # fmt: skip
def test_classes_of_an_expression_are_ascii_as_in_a_schema(pattern: str, ascii_only: str, wider: str) -> None:
    """Peers and ECMA-262 mean ASCII; a grammar's expressions and a schema's patterns mean the same here."""
    for text in ascii_only + wider:
        taken = [
            takes(grammar_of(Constraint(kind="regex", text=pattern)), text),
            takes(grammar_of(Constraint(kind="lark", text=f"start: /{pattern}/")), text),
            takes(of_schema({"pattern": f"^{pattern}$"}), json.dumps(text, ensure_ascii=False)),
        ]
        assert taken == [text in ascii_only] * 3, text


def test_an_escaped_backslash_begins_no_class_and_a_range_ends_in_none() -> None:
    for pattern, text in ((r"\\d", "\\d"), (r"\d{3}-\d{4}", "123-4567"), (r"\\\d[\[\-]\d", "\\1-2")):
        assert takes(grammar_of(Constraint(kind="regex", text=pattern)), text)
    with pytest.raises(InvalidRequest, match="range"):
        examine("regex", r"[+-\d]", error_of)
    nested = grammar_of(Constraint(kind="lark", text=r'start: %json {"pattern": "^\\d$"} "\\d"'))
    assert takes(nested, '"7"\\d')


def test_a_grammar_in_lark_is_taken_as_it_is() -> None:
    assert takes(grammar_of(Constraint(kind="lark", text='start: "a" | "b" start')), "bba")


def test_a_constraint_that_is_too_long_is_refused() -> None:
    assert takes(grammar_of(Constraint(kind="regex", text="a" * 100)), "a" * 100)
    with pytest.raises(InvalidRequest, match="65,537 bytes; at most 65,536"):
        grammar_of(Constraint(kind="regex", text="a" * (MAX_TEXT + 1)))


@pytest.mark.parametrize("text", ["[1]", '{"a":', "true", "[" * 30_000, '"\ud800"'])
def test_a_schema_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        grammar_of(Constraint(kind="json_schema", text=text))


REFUSED: list[tuple[dict[str, object], list[str], dict[str, object]]] = [  # schema, places, what is left of it
    ({"type": "array", "uniqueItems": True}, ["/uniqueItems"], {"type": "array"}),
    ({"items": {"contains": {}, "minContains": 2}}, ["/items/contains", "/items/minContains"], {"items": {}}),
    ({"properties": {"not": {"not": {}}}}, ["/properties/not/not"], {"properties": {"not": {}}}),
    ({"if": {}, "then": {}, "else": {}}, ["/if", "/then", "/else"], {}),
    ({"$defs": {"a/b": {"propertyNames": {}}}, "$ref": "#/$defs/a~1b"}, ["/$defs/a~1b/propertyNames"], {
        "$defs": {"a/b": {}}, "$ref": "#/$defs/a~1b"}),
    ({"oneOf": [{"type": "integer"}, {}]}, ["/oneOf"], {"anyOf": [{"type": "integer"}, {}]}),
    ({"anyOf": [{"format": "color"}, {"format": "date"}]}, ["/anyOf/0/format"], {"anyOf": [{}, {"format": "date"}]}),
    ({"properties": {"a": {}}, "minProperties": 1}, ["/minProperties"], {"properties": {"a": {}}}),
    ({"allOf": [{"pattern": "(?=a)"}, {"pattern": "b"}]}, ["/allOf/0/pattern"], {"allOf": [{}, {"pattern": "b"}]}),
    ({"dependentRequired": {"a": ["b"]}, "dependencies": {}}, ["/dependentRequired", "/dependencies"], {}),
    ({"type": "number", "maximum": 1e30, "minimum": 2}, ["/maximum"], {"type": "number", "minimum": 2}),
    ({"items": {"exclusiveMinimum": -1e300}}, ["/items/exclusiveMinimum"], {"items": {}}),
    ({"type": "integer", "minimum": -(10**30)}, ["/minimum"], {"type": "integer"}),
    ({"allOf": [{"multipleOf": 1e30}, {"multipleOf": 3}]}, ["/allOf/0/multipleOf"], {"allOf": [{}, {"multipleOf": 3}]}),
    ({"maxLength": 2**33, "minLength": 1}, ["/maxLength"], {"minLength": 1}),
    ({"maxItems": 1e30, "minItems": 1}, ["/maxItems"], {"minItems": 1}),
]  # fmt: skip


def error_of(grammar: str) -> str:
    matcher = LLMatcher(tokenizer(), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error())


@pytest.mark.parametrize(("schema", "places", "left"), REFUSED, ids=[places[0] for _, places, _ in REFUSED])
def test_what_of_a_schema_cannot_be_enforced_is_found_with_its_place(
    schema: dict[str, object], places: list[str], left: dict[str, object]
) -> None:
    found = examine("json_schema", json.dumps(schema), error_of)
    assert [problem.pointer for problem in found.problems] == places
    assert json.loads(found.constraint.text) == left


def test_one_bound_of_many_is_found() -> None:
    fine = {f"p{i}": {"type": "number", "maximum": i} for i in range(100)}
    schema = {"properties": fine | {"p50": {"type": "number", "maximum": 1e30}}}
    found = examine("json_schema", json.dumps(schema), error_of)
    assert found.problems == (("maximum", "/properties/p50/maximum"),)


@pytest.mark.parametrize(("keyword", "value"), [("maximum", "x"), ("maxLength", "1"), ("maxItems", -1), ("pattern", 1)])
def test_a_value_that_no_schema_may_have_is_not_left_out(keyword: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=keyword):
        examine("json_schema", json.dumps({keyword: value}), error_of)


NEW = "https://json-schema.org/draft"
PUBLISHED = {  # meta-schemas, and a keyword of each that a grammar does not hold
    "http://json-schema.org/draft-04/schema#": "dependencies",
    "http://json-schema.org/draft-06/schema#": "propertyNames",
    "https://json-schema.org/draft-07/schema": "format",  # as many write it
    "http://json-schema.org/draft-07/schema#": "format",
    f"{NEW}/2019-09/schema": "$recursiveRef",
    f"{NEW}/2020-12/schema": "$dynamicRef",
}


@pytest.mark.parametrize("uri", PUBLISHED)
def test_keywords_of_a_published_meta_schema_are_left_out_too(uri: str) -> None:
    """They are told of at the $ref that brings them in, which may stand in a definition."""
    schema = {"$defs": {"a/b": {"$ref": uri}}, "properties": {"s": {"$ref": "#/$defs/a~1b"}}}
    found = examine("json_schema", json.dumps(schema), error_of)
    assert (PUBLISHED[uri], "/$defs/a~1b/$ref") in found.problems
    assert {place for _, place in found.problems} == {"/$defs/a~1b/$ref"}
    grammar = grammar_of(found.constraint)
    assert takes(grammar, '{"s": {"type": "object"}}')
    assert not takes(grammar, '{"s": {"type": "objects"}}')


def test_a_schema_that_leads_back_to_itself_is_refused_and_told_why() -> None:
    for schema in ({"$ref": "#"}, {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}}):
        with pytest.raises(InvalidRequest, match="leads back to itself before any value"):
            examine("json_schema", json.dumps(schema), error_of)
    with pytest.raises(InvalidRequest, match="leads back to itself before any value"):
        examine("lark", "start: s\ns: s", error_of)
    assert examine("json_schema", '{"properties": {"a": {"$ref": "#"}}}', error_of).problems == ()


def test_an_error_in_the_midst_of_an_output_says_what_to_do() -> None:
    vocabulary = Vocabulary(tokens=tokenizer(), size=tokenizer().vocab_size, pieces=(), eos_ids=frozenset())
    schema = {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"], "$defs": {"a": {"$ref": "#/$defs/a"}}}
    matcher = Matcher(LLMatcher(tokenizer(), of_schema(schema), log_level=0), vocabulary)
    for token_id in tokenizer().tokenize_str('{"a":'):
        matcher.consume(token_id)
        matcher.words()
    assert "leads back to itself" in str(matcher.error)
    said = "parser error: Too many items (limit 50000; mask); try avoiding single-byte/short lexemes"
    assert "make it unambiguous" in explained(said)


@pytest.mark.parametrize(("patterns", "left", "good", "bad"), [
    ({"^a$": INT}, {}, '{"a":1}', '{"a":1,"a"'),
    ({"^a$|^b/$": INT, "^c": INT}, {"^c": INT}, '{"a":1,"b/":2}', '{"a":"x"'),
    ({"^(a|b/)$": {"minimum": 3}}, {}, '{"a":3}', '{"a":2}'), ({"^[ab]$": INT}, {"^[ab]$": INT}, '{"b":1}', '{"b":"x"'),
    ({"a$": INT}, {"a$": INT}, '{"ca":1}', '{"c"'), (dict.fromkeys(("^a$", "^b/$"), INT), {}, '{"b/":1}', '{"b/":1,"'),
])  # fmt: skip
def test_a_pattern_that_fits_named_properties_alone_is_asked_of_them(
    patterns: dict[str, object], left: dict[str, object], good: str, bad: str
) -> None:
    """As it is, llguidance allows a comma behind the last property, where no name can come."""
    closed = {"type": "object", "additionalProperties": False}
    schema = closed | {"properties": {"a": INT, "b/": INT}, "patternProperties": patterns}
    found = examine("json_schema", json.dumps({"items": schema}), error_of)
    assert (found.problems, json.loads(found.constraint.text)["items"]["patternProperties"]) == ((), left)
    grammar = grammar_of(found.constraint)
    assert takes(grammar, f"[{good}]")
    assert not begins(grammar, f"[{bad}")


def test_an_expression_that_no_text_fits_is_not_said_to_lead_back_to_itself_alone() -> None:
    for kind, text in (("regex", r"[^\s\S]"), ("lark", "start: A\nA: /a/ & /b/")):
        with pytest.raises(InvalidRequest, match="no text fits an expression of it"):
            examine(kind, text, error_of)  # type: ignore[arg-type]


def test_what_asks_for_nothing_is_no_problem() -> None:
    found = examine("json_schema", '{"uniqueItems": false, "oneOf": [{"type": "null"}, {"type": "string"}]}', error_of)
    assert found.problems == ()


def test_only_the_oneof_that_overlaps_is_found() -> None:
    apart = {"oneOf": [{"type": "null"}, {"type": "string"}]}
    overlapping = {"oneOf": [{"type": "string"}, {"minLength": 2}]}
    schema = {"properties": {"a": apart, "b": overlapping, "c": apart}}
    found = examine("json_schema", json.dumps(schema), error_of)
    assert [problem.pointer for problem in found.problems] == ["/properties/b/oneOf"]


def test_beside_a_reference_nothing_counts_in_old_drafts() -> None:
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    schema = {"definitions": {"a": {"type": "integer"}}, "items": {"$ref": "#/definitions/a", "minimum": 5}}
    assert takes(of_schema(draft | schema), "[1]")
    assert not takes(of_schema(schema), "[1]")


@pytest.mark.parametrize(("kind", "text", "output"), [
    ("gbnf", 'root ::= "a" | "b" root', "bba"), ("gbnf", 'start: "a"', "a"),
    ("choice", '["", "a\\"b\\u0000"]', 'a"b\0'),
    ("choice", '["", "a"]', ""), ("choice", '["a|b", "/\\\\d"]', "/\\d"), ("regex", "", ""),
])  # fmt: skip
def test_grammars_and_choices_are_converted(kind: str, text: str, output: str) -> None:
    assert takes(grammar_of(examine(kind, text, error_of).constraint), output)
