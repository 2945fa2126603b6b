"""What the tests of readers share: parts written short, and the reading of a text in pieces."""

from collections.abc import Iterable, Mapping
from typing import Any

from deployments.output import tool_formats
from deployments.output.parts import ArgumentsPart, CallPart, Part, Reader, TextPart
from deployments.output.tool_formats import ToolFormat

# every form of every format, by the name of its constant
FORMATS = {name.lower(): form for name, form in vars(tool_formats).items() if isinstance(form, ToolFormat)}
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
    return read(FORMATS[name].reader(SCHEMAS), pieces)
