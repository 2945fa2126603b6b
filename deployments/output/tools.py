"""Reads and checks the tools of a chat, and what it asks about calling them (``tool_choice``).

Owns:      the limits on tools, and the meaning of an absent field about them; the types that a parameter may have.
Never:     changes what a client wrote about a tool, except that ``strict`` is not for the model.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from replicas.errors import InvalidRequest

MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]  # JSON schema of an object; empty: any object
    strict: bool  # its arguments are held to the schema wherever it is called

    @property
    def body(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that a model is shown, and which of them it may or must call."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "required", "named"]
    named: str | None = None  # the only one that may be called
    parallel: bool = True  # there may be several calls

    @property
    def must_call(self) -> bool:
        return self.choice != "auto"

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))

    @property
    def schemas(self) -> dict[str, Any]:
        """The schema of each tool's parameters, by its name."""
        return {tool.name: tool.parameters for tool in self.tools}


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``. Returns: None if no tool may be called.

    Raises: InvalidRequest, which names the field.
    """
    if tools is not None and len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: {len(tools):,} tools; at most {MAX_TOOLS} are accepted", param="tools")
    known = tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools or ()))
    names = set[str]()
    for i, tool in enumerate(known):
        if tool.name in names:
            raise _wrong(f"tools[{i}].function.name", f"{tool.name!r} is the name of two tools; give each its own")
        names.add(tool.name)
    kind, named = _choice(choice, names)
    if kind == "none" or not known:
        return None
    is_single = kind == "named" or parallel is False
    return ToolUse(tools=known, choice=kind, named=named, parallel=not is_single)


def _choice(
    choice: str | Mapping[str, Any] | None, names: Set[str]
) -> tuple[Literal["none", "auto", "required", "named"], str | None]:
    if choice is None or choice == "auto":
        return "auto", None
    if choice == "none":
        return "none", None
    if choice == "required":
        if not names:
            raise _wrong("tool_choice", "'required' asks for a call, and there are no tools; give some")
        return "required", None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(
            "tool_choice",
            "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': NAME}}, "
            f"got {str(choice)[:64]!r}",
        )
    name = function["name"]
    if name not in names:
        raise _wrong("tool_choice", f"{name[:64]!r} is not among the tools")
    return "named", name


def _tool(path: str, tool: Mapping[str, Any]) -> Tool:
    if tool.get("type", "function") != "function" or not isinstance(tool.get("function"), Mapping):
        raise _wrong(path, f'must be {{"type": "function", "function": ...}}, got type {str(tool.get("type"))[:64]!r}')
    function = tool["function"]
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    path = f"{path}.function"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{path}.name", f"must be 1 to 64 of the characters a-z A-Z 0-9 _ . -, got {str(name)[:64]!r}")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{path}.description", "must be a string")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _wrong(f"{path}.parameters", "must be a JSON schema, which is an object")
    if parameters and parameters.get("type", "object") != "object":
        raise _wrong(f"{path}.parameters.type", f"must be 'object', got {str(parameters['type'])[:64]!r}")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(f"{path}.strict", "must be true or false")
    return Tool(name=name, description=description, parameters=parameters or {}, strict=bool(strict))


def _wrong(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {message}", param=param)


TEXT = frozenset({"string"})
ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})


def value_types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a parameter of this schema may have, as far as its first level tells.

    Where arguments are tagged parameters, a value of `TEXT` is written as it is, and any other one as JSON.
    """
    if not isinstance(schema, Mapping):
        return TEXT
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return frozenset().union(*map(value_types, schema[key]))
    given = schema.get("type")
    if isinstance(given, str | list):
        return frozenset([given] if isinstance(given, str) else map(str, given))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(type_of, values)) if isinstance(values, list) else ANY


def type_of(value: Any) -> str:
    """Return the JSON type of a value that was read from JSON."""
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (dict, "object"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null"
