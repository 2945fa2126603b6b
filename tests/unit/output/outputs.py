"""What the tests of readers share: parts written short, and the reading of a text in pieces."""

from collections.abc import Iterable, Mapping
from typing import Any

from deployments.output import tool_formats
from deployments.output.call_readers import reader_of
from deployments.output.parts import ArgumentsPart, CallPart, Part, Reader, ReasoningPart, TextPart

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

Short = str | tuple[str, ...]


def short(parts: Iterable[Part]) -> list[Short]:
    """Text as itself, ("think", text), and a call as (name, arguments); neighbours of one kind are joined."""
    out: list[Short] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, TextPart):
            if isinstance(last, str):
                out[-1] = last + part.text
            else:
                out.append(part.text)
        elif isinstance(part, ReasoningPart):
            if isinstance(last, tuple) and last[0] == "think":
                out[-1] = ("think", last[1] + part.text)
            else:
                out.append(("think", part.text))
        elif isinstance(part, CallPart):
            assert part.index == sum(isinstance(each, tuple) and each[0] != "think" for each in out)
            out.append((part.name, ""))
        else:
            assert isinstance(part, ArgumentsPart)
            calls = [at for at, each in enumerate(out) if isinstance(each, tuple) and each[0] != "think"]
            assert part.index == len(calls) - 1, "arguments are of the last call"
            name, arguments = out[calls[-1]]
            out[calls[-1]] = (name, arguments + part.text)
    return out


def read(reader: Reader, pieces: Iterable[str]) -> list[Short]:
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.push(piece)
    return short([*parts, *reader.end()])


def calls_of(name: str, *pieces: str) -> list[Short]:
    return read(reader_of(FORMATS[name], SCHEMAS), pieces)
