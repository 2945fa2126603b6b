"""How each family of models writes a tool call. One value says it to the reader of calls and to the maker of grammars.

A call is ``before_name`` NAME ``after_name`` ARGUMENTS ``end``. Several are divided by ``between``, and all together
stand between ``whole_begin`` and ``whole_end``. The readers (call_readers.py) accept more than what is written here:
other whitespace, tags that are left out, keys in another order.

Source: the chat templates of Qwen2.5 and Hermes 2 Pro, Llama 3.1 to 3.3, Mistral 7B v0.3 to Small 3.2, Qwen3-Coder,
        DeepSeek V3 and V3.1; SGLang's and vLLM's parsers for what models write beside them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from deployments.settings.groups import ToolFormatName


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The text around the names and the arguments of calls."""

    name: ToolFormatName
    before_name: str
    after_name: str
    end: str
    between: str = ""
    whole_begin: str = ""
    whole_end: str = ""
    is_json_name: bool = False  # the name is written as JSON would have it between quotes
    arguments: Literal["json", "parameters"] = "json"  # one JSON object, or a tag around each parameter
    parameter_end: str = "\n</parameter>\n"  # where arguments are parameters
    tags: tuple[str, ...] = ()  # the texts of it that are one token of their own in the models that have it

    def begin(self, name: str) -> str:
        """Return what stands before the arguments of a call of ``name``."""
        written = json.dumps(name, ensure_ascii=False)[1:-1] if self.is_json_name else name
        return f"{self.before_name}{written}{self.after_name}"

    def parameter_begin(self, name: str) -> str:
        """Return what stands before the value of a parameter, where arguments are parameters."""
        return f"<parameter={name}>\n"

    @property
    def trigger(self) -> str:
        """The text with which the first call begins, whichever tool it calls."""
        return self.whole_begin or self.before_name


HERMES = ToolFormat(
    name="hermes", before_name='<tool_call>\n{"name": "', after_name='", "arguments": ', end="}\n</tool_call>",
    between="\n", is_json_name=True, tags=("<tool_call>", "</tool_call>"),
)  # fmt: skip
LLAMA3_JSON = ToolFormat(
    name="llama3_json", before_name='{"name": "', after_name='", "parameters": ', end="}",
    between="; ", is_json_name=True, tags=("<|python_tag|>",),
)  # fmt: skip
_MISTRAL_TAGS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MISTRAL = ToolFormat(
    name="mistral", before_name='{"name": "', after_name='", "arguments": ', end="}",
    between=", ", whole_begin="[TOOL_CALLS][", whole_end="]", is_json_name=True, tags=_MISTRAL_TAGS,
)  # fmt: skip
MISTRAL_NAMED = ToolFormat(
    name="mistral", before_name="[TOOL_CALLS]", after_name="[ARGS]", end="", tags=_MISTRAL_TAGS
)  # fmt: skip
QWEN3_CODER = ToolFormat(
    name="qwen3_coder", before_name="<tool_call>\n<function=", after_name=">\n", end="</function>\n</tool_call>",
    between="\n", arguments="parameters", tags=("<tool_call>", "</tool_call>"),
)  # fmt: skip
_DEEPSEEK_TAGS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v3", before_name="<｜tool▁call▁begin｜>", after_name="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>",
    whole_begin="<｜tool▁calls▁begin｜>", whole_end="<｜tool▁calls▁end｜>", tags=_DEEPSEEK_TAGS,
)  # fmt: skip
DEEPSEEK_V3 = replace(
    DEEPSEEK_V31, before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", after_name="\n```json\n",
    end="\n```<｜tool▁call▁end｜>", between="\n",
)  # fmt: skip


def format_of(name: ToolFormatName, template: str) -> ToolFormat:
    """Return the format of this name, in the form that the chat template has where there are two."""
    if name == "mistral":
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if name == "deepseek_v3":
        return DEEPSEEK_V31 if "<｜tool▁sep｜>" in template and "```json" not in template else DEEPSEEK_V3
    return {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "qwen3_coder": QWEN3_CODER}[name]


def sniffed(template: str) -> ToolFormatName | None:
    """Return the name of the format that the chat template writes calls in; None if it is none that is known here."""
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and "arguments" in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_tag|>" in template or ('"name": ' in template and '"parameters": ' in template):
        return "llama3_json"
    return None


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


_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates show values so, and models write them


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the text of a tagged parameter as JSON: itself where it is JSON of one of ``types``, else a string."""
    stripped = text.strip()
    written = _PYTHON.get(stripped, stripped)
    try:
        kind = type_of(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = kind in types or (kind in ("integer", "number") and not types.isdisjoint({"integer", "number"}))
    return written if fits and types != TEXT else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
