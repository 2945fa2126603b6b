"""What is called valid is, and what cannot be told is not; a closed schema takes nothing that the given one refuses."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.output.closing import closed
from deployments.output.validation import SchemaPromise, is_valid
from replicas.grammar.checking import Problem
from replicas.types import Finish, FinishReason

UNIQUE = {"type": "array", "uniqueItems": True}
NEW = "https://json-schema.org/draft/2020-12/schema"
META = {"$ref": "http://json-schema.org/draft-04/schema#"}
OLD_LIST = {"items": [{"type": "integer"}], "additionalItems": False, "uniqueItems": True}


def valid(schema: Any, document: str, *, within: float = 30.0) -> bool:
    return is_valid(json.dumps(schema), document, until=time.monotonic() + within)


@pytest.mark.parametrize(("schema", "good", "bad"), [
    (UNIQUE, "[1, 2]", "[1, 1]"),
    (UNIQUE, '[1, true, "1", [1], [true], {}, []]', '[{"a": [1], "b": 2}, {"b": 2.0, "a": [1]}]'),
    ({"not": {"type": "string"}}, "1", '"a"'),
    ({"contains": {"const": 1}}, "[0, 1]", "[0]"),
    ({"if": {"minimum": 5}, "then": {"multipleOf": 2}}, "3", "7"),
    ({"dependencies": {"a": ["b"]}}, '{"a": 1, "b": 1}', '{"a": 1}'),
    ({"dependentRequired": {"a": ["b"]}}, "{}", '{"a": 1}'),
    (OLD_LIST, "[1]", "[1, 2]"),
    ({"pattern": "b$"}, '"ab"', '"ba"'),
    ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False}, '{"ab": null}', '{"b": null}'),
    ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {"const": 1}}, '{"b": 1}', '{"a": 1}'),
    ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]}, '{"a": 1}', '{"b": 1}'),
    ({"format": "regex"}, '"a"', '"("'),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}, "4", "3"),
    (META, '{"type": "object", "minLength": 1}', '{"type": "objects"}'),
    ({"items": META}, '[{"properties": {"a": {"multipleOf": 1}}}]', '[{"properties": {"a": {"multipleOf": 0}}}]'),
    ({"items": {"$ref": NEW}}, '[{"$defs": {"a": {}}}]', '[{"$defs": {"a": {"type": "x"}}}]'),
    ({}, "[]", "["),
    ({}, "1", "NaN"),
    ({}, '{"a": 1}', ""),
])  # fmt: skip
def test_a_document_is_valid_or_not(schema: Any, good: str, bad: str) -> None:
    assert valid(schema, good)
    assert not valid(schema, bad)


@pytest.mark.parametrize(("schema", "document"), [
    ({"$ref": "http://example.com/schema"}, "1"),
    ({"$ref": "#/$defs/none"}, "1"),
    ({"format": "colour"}, '"red"'),
    ({"pattern": "(?=a)a"}, '"a"'),
    ({"properties": 5}, '{"a": 1}'),
    ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, '{"a": 1}'),
    ({"pattern": "a"}, '"\\ud800a"'),
    ({"pattern": r"^\w{80}$"}, json.dumps("a" * 80)),  # 7 MB
    ({"pattern": "(a{100})*{60}"}, json.dumps("a" * 10_000)),  # 0.2 s
    ({"pattern": r"(?x)(\w{9}) {12}"}, json.dumps("a" * 108)),
    ({"pattern": "[[a]]"}, '"a"'),  # "a]" elsewhere
    ({"allOf": [{"$schema": NEW, "format": "colour"}]}, '"red"'),
    ({"$schema": NEW, "items": {"$ref": "#"}, "format": "colour"}, '["red"]'),
    ({}, "[" * 100_000 + "]" * 100_000),
])  # fmt: skip
def test_what_cannot_be_told_is_not_called_valid(schema: Any, document: str) -> None:
    assert not valid(schema, document)


def test_a_pattern_takes_linear_time() -> None:
    assert not valid({"pattern": "^(a+)+$"}, json.dumps("a" * 5000 + "!"))  # years with Python's re


def test_references_that_branch_end_at_the_deadline() -> None:
    items = {"items": {"$ref": "#/$defs/a"}}
    schema = {"$defs": {"a": {"anyOf": [items | {"minItems": 2}, items | {"minItems": 3}]}}, "$ref": "#/$defs/a"}
    began = time.monotonic()
    assert not valid(schema, "[" * 40 + "1" + "]" * 40, within=0.5)  # 2 ** 40 ways
    assert 0.5 <= time.monotonic() - began < 30.0


def test_what_holds_no_reference_ends_at_the_deadline_too() -> None:
    schema = {"allOf": [{"items": {"minimum": i}} for i in range(600)]}
    began = time.monotonic()
    assert not valid(schema, json.dumps([1000] * 10_000), within=0.5)  # 30 s
    assert time.monotonic() - began < 15.0


def test_many_objects_are_compared_without_all_their_pairs() -> None:
    began = time.monotonic()
    assert valid(UNIQUE, json.dumps([{"a": i} for i in range(10_000)]))
    assert time.monotonic() - began < 15.0


def test_few_compiled_patterns_are_kept() -> None:
    def num_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = num_bytes()
    schema = {"not": {"anyOf": [{"pattern": rf"^\w{{60}}{i}$"} for i in range(150)]}}  # 4 MB each
    assert valid(schema, '"a"', within=60.0)
    assert num_bytes() - before < 400e6


async def test_what_is_promised_of_documents() -> None:
    ended, cut = Finish(reason=FinishReason.STOP, matched=2), Finish(reason=FinishReason.LENGTH)
    stopped = Finish(reason=FinishReason.STOP, matched=",")
    held = SchemaPromise(schema=json.dumps(UNIQUE), problems=())
    assert (held.at_first, await held.of([("[1]", ended)])) == ("enforced", "enforced")
    for finish in (cut, stopped):  # what was cut may be whole all the same
        assert await held.of([("[1]", ended), ("[1,", finish)]) == "partial"
        assert await held.of([("[1]", ended), ("[1]", finish)]) == "validated"
    problem = Problem("uniqueItems", "/uniqueItems")
    left_out = SchemaPromise(schema=json.dumps(UNIQUE), problems=(problem,), after="</t>")
    assert left_out.at_first == "partial"
    assert await left_out.of([("[1]</t>[1, 2]", ended), ("</t>[]", ended)]) == "validated"
    assert await left_out.of([("[1, 2]", ended)]) == "validated"  # without a thought
    for text in ("x</t>[1, 1]", "[1, 1]", "</t>[1", "</t>"):
        assert await left_out.of([("</t>[]", ended), (text, ended)]) == "partial"


NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def accepts(schema: Any, document: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(document))


@pytest.mark.parametrize(
    ("schema", "wrap"),
    [
        (NAME, lambda each: each),
        ({"type": "array", "items": NAME}, lambda each: [each]),
        ({"properties": {"of": NAME}}, lambda each: {"of": each}),
        ({"$defs": {"n": NAME}, "properties": {"of": {"$ref": "#/$defs/n"}}}, lambda each: {"of": each}),
        ({"anyOf": [{"type": "null"}, NAME]}, lambda each: each),
        ({"type": "object", "additionalProperties": NAME}, lambda each: {"any": each}),
        ({"properties": {"not": NAME}}, lambda each: {"not": each}),  # a name, no keyword
    ],
)
def test_an_object_that_names_its_properties_has_no_others_wherever_it_is(schema: dict[str, Any], wrap: Any) -> None:
    assert accepts(schema, wrap({"name": "Ann", "more": 1}))
    assert not accepts(closed(schema), wrap({"name": "Ann", "more": 1}))
    assert accepts(closed(schema), wrap({"name": "Ann"}))


@pytest.mark.parametrize(
    "schema",
    [
        {**NAME, "additionalProperties": {"type": "integer"}},
        {**NAME, "required": ["name", "more"]},
        {"allOf": [NAME, {"properties": {"more": {}}}]},
        {"oneOf": [NAME, {"properties": {"other": {}}, "required": ["other"]}]},
        {"type": "object"},
    ],
)
def test_one_that_says_more_or_combines_schemas_is_as_it_was(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
    assert accepts(closed(schema), {"name": "Ann", "more": 1})


LEAVES = st.sampled_from([{"type": "integer"}, {"enum": ["a", 1]}, {}, {"type": "null"}])
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda each: {"type": "array", "items": each}, inner),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(lambda one, other: {"oneOf": [one, other]}, inner, inner),
        st.builds(lambda one, other: {"type": "object", "properties": {"a": one, "b": other}}, inner, inner),
        st.builds(lambda one: {"properties": {"a": one}, "required": ["a"], "minProperties": 1}, inner),
    ),
    max_leaves=6,
)
DOCUMENTS = st.recursive(
    st.sampled_from([1, "a", None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(SCHEMAS, DOCUMENTS)
def test_what_the_closed_schema_takes_the_given_one_takes(schema: dict[str, Any], document: Any) -> None:
    assert accepts(schema, document) or not accepts(closed(schema), document)
