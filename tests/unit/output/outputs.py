"""What the tests of readers share: parts written short, and the reading of a text in pieces."""

from collections.abc import Iterable, Mapping
from typing import Any

from deployments.output import tool_formats
from deployments.output.call_readers import reader_of
from deployments.output.parts import ArgumentsPart, CallPart, Part, Reader, TextPart

FORMATS = {
    "hermes": tool_formats.HERMES,
    "llama3_json": tool_formats.LLAMA3_JSON,
    "mistral": tool_formats.MISTRAL,
    "mistral_named": tool_formats.MISTRAL_NAMED,
    "qwen3_coder": tool_formats.QWEN3_CODER,
    "deepseek_v3": tool_formats.DEEPSEEK_V3,
    "deepseek_v31": tool_formats.DEEPSEEK_V31,
}
SCHEMAS: Mapping[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
            "o": {"type": "object"}, "a": {"type": "array"}, "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {}, "ref": {"$ref": "#/$defs/x"}, "e": {"enum": ["red", 1]}, "c": {"const": 5},
        },
    }
}  # fmt: skip

TEXT, THINK = "text", "think"  # kinds of what is no call; no tool of these tests has such a name
Short = str | tuple[str, ...]


def short(parts: Iterable[Part]) -> list[Short]:
    """Text as itself, ("think", text), and a call as (name, arguments); neighbours of one kind are joined."""
    found: list[tuple[str, list[str]]] = []
    num_calls = 0
    for part in parts:
        if isinstance(part, CallPart):
            assert part.index == num_calls
            num_calls += 1
            found.append((part.name, []))
        elif isinstance(part, ArgumentsPart):
            assert part.index == num_calls - 1, "arguments are of the last call"
            call = next(each for each in reversed(found) if each[0] not in (TEXT, THINK))
            call[1].append(part.text)
        else:
            kind = TEXT if isinstance(part, TextPart) else THINK
            if not found or found[-1][0] != kind:
                found.append((kind, []))
            found[-1][1].append(part.text)
    return ["".join(texts) if kind == TEXT else (kind, "".join(texts)) for kind, texts in found]


def read(reader: Reader, pieces: Iterable[str]) -> list[Short]:
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.push(piece)
    return short([*parts, *reader.end()])


def calls_of(name: str, *pieces: str) -> list[Short]:
    return read(reader_of(FORMATS[name], SCHEMAS), pieces)
