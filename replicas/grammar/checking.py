"""The grammar of a constraint, in llguidance's form, and the limits on what it may be.

Owns:      how much text, nesting and white space a constraint may have.
Never:     compiles for a model (compiler.py), or knows the name of a client's field (deployments/http/constraints.py).
Invariant: white space between the values of a document is bounded: no model can fill its output with it.
Thread:    any; a pure function of the constraint.
"""

import json
from typing import Any

from llguidance import LLMatcher

from replicas.errors import InvalidRequest
from replicas.types import Constraint

MAX_TEXT = 64 << 10  # bytes of a constraint in UTF-8
MAX_NESTING = 32  # lists and objects of a schema within each other, on the way to a subschema twice that
# a few characters, or a line break with the indentation of a deep value; `json.dumps` stays in it for any indent to 4
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}|\r?\n(\x20{0,64}|\x09{0,32})"


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of ``constraint`` for llguidance. It begins where the constraint does: behind ``after``.

    Raises: InvalidRequest for a text that is too long, nested too deeply, or no JSON object where it must be one.
    """
    check_text(constraint.text)
    if constraint.kind == "regex":
        return str(LLMatcher.grammar_from_regex(constraint.text))
    if constraint.kind == "lark":
        return str(LLMatcher.grammar_from_lark(constraint.text))
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if constraint.lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    return json.dumps({"grammars": [{"json_schema": read_schema(constraint.text) | {"x-guidance": options}}]})


def read_schema(text: str) -> dict[str, Any]:
    """Parse a schema. Raises: InvalidRequest if it is no JSON object, or nested too deeply."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the schema is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(f"the schema is nested too deeply; at most {MAX_NESTING} levels are accepted") from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the schema must be a JSON object, got {type(schema).__name__}")
    return schema


def check_text(text: str) -> None:
    """Raises: InvalidRequest for a text that is too long, or has no UTF-8 form."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text of the constraint is not Unicode: {error}") from error
    if size > MAX_TEXT:
        raise InvalidRequest(f"the constraint has {size:,} bytes; at most {MAX_TEXT:,} are accepted")
