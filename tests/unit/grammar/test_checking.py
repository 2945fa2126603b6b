"""replicas/grammar/checking.py: what a constraint's grammar takes, with llguidance and the embedded model's tokens."""

import functools
import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from replicas.errors import InvalidRequest
from replicas.grammar.checking import MAX_TEXT, grammar_of
from replicas.types import Constraint
from tests.embedded import MODEL

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "object"}},
    "required": ["a"],
}
DOCUMENT = {"a": [1, 2], "b": {"x": [1, {"y": "z"}]}}


@functools.cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((Path(MODEL) / "tokenizer.json").read_text())


def takes(grammar: str, text: str) -> bool:
    """Whether the grammar takes every token of ``text``, and the text may end there."""
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer().tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def of_schema(schema: object, *, lenient: bool = False) -> str:
    return grammar_of(Constraint(kind="json_schema", text=json.dumps(schema), lenient=lenient))


@pytest.mark.parametrize("form", [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}])
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


def test_a_lenient_schema_leaves_out_what_cannot_be_enforced() -> None:
    schema = SCHEMA | {"not": {"required": ["b"]}}
    assert takes(of_schema(schema, lenient=True), '{"a":[1]}')
    assert not takes(of_schema(schema, lenient=True), '{"a":["1"]}')


def test_a_regular_expression_spans_the_whole_output() -> None:
    grammar = grammar_of(Constraint(kind="regex", text="a/b|c\nd"))
    assert takes(grammar, "a/b")
    assert takes(grammar, "c\nd")
    assert not takes(grammar, "xa/b")


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
