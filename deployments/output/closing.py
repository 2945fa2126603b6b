"""Closes the objects of a schema: they have the properties that it names, and no others.

JSON Schema lets an object have any other property where it says nothing, and a small model goes on inventing them until
its output is at an end. Every document of the closed schema is one of the given.
"""

import json
from collections.abc import Mapping
from typing import Any

from replicas.grammar.checking import keywords_of

# where a document must fit several subschemas, or exactly one: closing them would refuse all, or accept others
_COMBINING = {
    "allOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef"
}  # fmt: skip
_NAMED = {"properties", "$defs", "definitions"}  # of which each value is a subschema
_ONE_OR_MORE = {"items", "prefixItems", "additionalProperties", "anyOf"}  # which are subschemas
_SAYS_MORE = {"additionalProperties", "patternProperties", "minProperties", "$ref", "anyOf"}


def closed_text(text: str) -> str:
    """Return the text of a schema, closed; as it is, if it cannot be read: who examines it says what is wrong."""
    try:
        return json.dumps(closed(json.loads(text)), ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return text


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``schema`` with each object closed that names properties and does not say more; as it is, if it combines
    subschemas."""
    combines = any(keyword in _COMBINING for _, keyword, _, _ in keywords_of(dict(schema)))
    return schema if combines else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {name: _closed(each) if name in _ONE_OR_MORE else each for name, each in schema.items()}
    for name in _NAMED & made.keys():
        if isinstance(made[name], Mapping):
            made[name] = {key: _closed(each) for key, each in made[name].items()}
    named, needed = made.get("properties"), made.get("required", [])
    if not isinstance(named, Mapping) or not isinstance(needed, list) or made.keys() & _SAYS_MORE:
        return made
    return {**made, "additionalProperties": False} if named.keys() >= set(needed) else made
