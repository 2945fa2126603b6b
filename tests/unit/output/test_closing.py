"""A closed schema takes nothing that the given one refuses, and no property that it does not name."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.output.closing import closed

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
