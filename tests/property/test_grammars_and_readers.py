"""What a grammar of tool calls lets a model write is what the reader of the format reads: calls, and no text."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from deployments.output.output_format import OutputFormat
from deployments.output.tool_grammar import arguments_schema, tool_constraint
from deployments.output.tools import tool_use
from replicas.grammar.checking import grammar_of
from tests.embedded import MODEL
from tests.pairwise import ALL
from tests.unit.output.outputs import FORMATS, read

PROPERTIES: dict[str, Any] = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "m": {"type": ["string", "null"]},
    "b": {"type": "boolean"},
    "o": {"type": "object", "properties": {"k": {"type": "array", "items": {"type": "string"}}}, "required": ["k"],
          "additionalProperties": False},
    "e": {"enum": ["red", "blue"]},
}  # fmt: skip
F = {"type": "object", "properties": PROPERTIES, "required": ["s", "o"], "additionalProperties": False}
SCHEMAS: dict[str, Any] = {"f": F, "get-g": {"type": "object", "properties": {}, "additionalProperties": False}}
NUM_SEEDS = 60 if ALL else 24
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
EOS = 0
# what a random model likes to write: tags in values, and ends of values
LIKED = [
    '"', "}", "]", ",", " ", "\n", "1", "a", "{", "[", "\\", "\\u00e9", "<", ">", "</parameter>", "\n</parameter>\n",
    "<tool_call>", "</tool_call>", "<parameter=", "</function>", "```", ";", "[TOOL_CALLS]", "[ARGS]", "null",
    "<｜tool▁call▁end｜>", '"}', "é",
]  # fmt: skip


def written(grammar: str, matched: LLTokenizer, tokenizer: Tokenizer, seed: int) -> str | None:
    """A random output that the grammar accepts; None if it did not come to an end."""
    chance, matcher, ids = random.Random(seed), LLMatcher(matched, grammar), list[int]()
    liked = [tokenizer.encode(text, add_special_tokens=False).ids for text in LIKED]
    for _ in range(400):
        tried = chance.choice(liked)
        if matcher.validate_tokens(tried) < len(tried):
            allowed = np.flatnonzero(
                np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            )
            tried = [int(chance.choice(allowed))] if chance.random() < 0.5 and len(allowed) < 40_000 else []
        if EOS in tried:
            continue
        assert matcher.consume_tokens(tried)
        ids += tried
        if matcher.is_accepting() and (matcher.is_stopped() or chance.random() < 0.5):
            return str(tokenizer.decode(ids, skip_special_tokens=False))
    return None


@pytest.fixture(scope="module")
def file() -> str:
    return (Path(MODEL) / "tokenizer.json").read_text()


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_grammar_allows_is_read_as_calls_with_arguments_of_the_schema(file: str, name: str) -> None:
    output = OutputFormat(
        tools=FORMATS[name], reasoning=None, template_has_tools=True, special_tags=frozenset(), dropped=()
    )
    use = tool_use(TOOLS, "required", True)
    assert use is not None
    constraint = tool_constraint(
        output, use, schemas={tool.name: arguments_schema(tool) for tool in use.tools}, token_id=int
    )
    matched, tokenizer, num_read = LLTokenizer(file), Tokenizer.from_str(file), 0
    for seed in range(NUM_SEEDS):
        text = written(grammar_of(constraint), matched, tokenizer, seed)
        if text is None or "\ufffd" in text:  # cut, or in the middle of a character
            continue
        for call in (calls := read(output.reader(schemas=SCHEMAS), [text])):
            assert isinstance(call, tuple), (text, calls)
            jsonschema.validate(json.loads(call[1], strict=False), SCHEMAS[call[0]])
        num_read += len(calls)
    assert num_read > NUM_SEEDS // 6
