"""deployments/output/structural_tags.py: text is free up to a trigger, and what follows it is a tag."""

from typing import Any

import pytest
from llguidance import LLMatcher

from deployments.output.structural_tags import tags_of
from replicas.errors import InvalidRequest
from replicas.grammar.checking import grammar_of
from replicas.types import Constraint
from tests.unit.grammar.test_checking import takes, tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
OLD: dict[str, Any] = {
    "structures": [
        {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=b>", "schema": {}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAGS = [{"begin": each["begin"], "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
        for each in OLD["structures"]]  # fmt: skip


def grammar(asked: Any, **special_ids: int) -> str:
    return grammar_of(Constraint(kind="lark", text=tags_of(asked, special_ids=special_ids)))


@pytest.mark.parametrize(("text", "holds"), [
    ("no tag at all", True), ("", True), ("a < b", True), ('say <f=a>{"n":1}</f> and\n<f=b>[2]</f>.', True),
    ("<f=c>", False), ('<f=a>{"n":"1"}</f>', False), ('<f=a>{"n":1}', False), ("x <f=", False),
])  # fmt: skip
def test_text_is_free_and_what_follows_a_trigger_is_a_tag(text: str, holds: bool) -> None:
    assert takes(grammar(OLD), text) is holds


@pytest.mark.parametrize(("options", "text", "holds"), [
    ({}, "none", True), ({"at_least_one": True}, "none", False),
    ({"at_least_one": True}, 'a <f=a>{"n":1}</f> b', True), ({"stop_after_first": True}, '<f=a>{"n":1}</f> b', False),
    ({"stop_after_first": True}, 'a <f=b>{"n":1}</f>', True),
])  # fmt: skip
def test_the_newer_form_has_the_same_tags_and_options(options: dict[str, bool], text: str, holds: bool) -> None:
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, **options}
    assert takes(grammar({"type": "structural_tag", "format": form}), text) is holds


def test_a_tag_that_is_a_special_token_is_that_token_and_not_its_text() -> None:
    [start] = tokenizer().tokenize_str("<|im_start|>", parse_special=True)
    seven = {"begin": "<|im_start|>", "schema": {"enum": [7]}, "end": "!"}
    asked = {"structures": [seven], "triggers": ["<|im_start|>"]}
    special = grammar(asked, **{"<|im_start|>": start})
    as_text = tokenizer().greedy_tokenize("<|im_start|>8")
    assert LLMatcher(tokenizer(), special).try_consume_tokens(as_text) == len(as_text)
    assert takes(special, "hm <|im_start|>7!", parse_special=True)
    assert not takes(special, "hm <|im_start|>8!", parse_special=True)


@pytest.mark.parametrize("asked", ["{", "5", {}, {"format": {"type": "sequence"}}, OLD | {"triggers": []},
    OLD | {"triggers": ["<g"]}, OLD | {"triggers": ["<f=a"]}, {"structures": [5], "triggers": ["a"]},
    {"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": ["a"]}], ids=str)  # fmt: skip
def test_a_form_that_is_not_known_is_refused(asked: Any) -> None:
    with pytest.raises(InvalidRequest):
        tags_of(asked, special_ids={})
