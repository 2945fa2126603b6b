"""How each family of models writes a tool call. One value says it to the reader of calls and to the maker of grammars.

A call is ``before_name`` NAME ``after_name`` ARGUMENTS ``end``. Several are divided by ``between``, and all together
stand between ``whole_begin`` and ``whole_end``. The readers (call_readers.py) accept more than what is written here:
other whitespace, tags that are left out, keys in another order. To add a format: docs/extending.md.

Source: the chat templates of Qwen2.5 and Hermes 2 Pro, Llama 3.1 to 3.3, Mistral 7B v0.3 to Small 3.2, Qwen3-Coder,
        DeepSeek V3 and V3.1; SGLang's and vLLM's parsers for what models write beside them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from deployments.output.call_readers import DeepseekReader, HermesReader, LlamaReader, MistralReader, QwenCoderReader
from deployments.output.parts import Reader


class MakesReader(Protocol):
    """Makes a reader of calls: the class of one (call_readers.py), for most."""

    def __call__(self, schemas: Mapping[str, Any], *, must_call: bool = False) -> Reader:
        """Args: schemas: of each tool's parameters, by the tool's name. must_call: the text is held to calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """What finds calls in a chat template and in a text, and the text around their names and arguments."""

    marker: Callable[[str], bool]  # whether a chat template writes calls so
    reader: MakesReader
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
    name_tag: str = ""  # what the reader takes a call by, where that is not one of ``tags`` with which calls begin

    def begin(self, name: str) -> str:
        """Return what stands before the arguments of a call of ``name``."""
        written = json.dumps(name, ensure_ascii=False)[1:-1] if self.is_json_name else name
        return f"{self.before_name}{written}{self.after_name}"

    def parameter_begin(self, name: str) -> str:
        """Return what stands before the value of a parameter, where arguments are parameters."""
        return f"<parameter={name}>\n"

    @property
    def trigger(self) -> str | None:
        """The text behind which the reader takes what comes for a call; None where a call needs none."""
        begin = self.whole_begin + self.before_name
        return self.name_tag or next((tag for tag in self.tags if begin.startswith(tag)), None)


HERMES = ToolFormat(
    marker=lambda template: "<tool_call>" in template and "arguments" in template and "<arg_key>" not in template,
    reader=HermesReader, before_name='<tool_call>\n{"name": "', after_name='", "arguments": ', end="}\n</tool_call>",
    between="\n", is_json_name=True, tags=("<tool_call>", "</tool_call>"),
)  # fmt: skip
LLAMA3_JSON = ToolFormat(
    marker=lambda template: (
        "<|python_tag|>" in template or ('"name": ' in template and '"parameters": ' in template)
    ),
    reader=LlamaReader, before_name='{"name": "', after_name='", "parameters": ', end="}",
    between="; ", is_json_name=True, tags=("<|python_tag|>",),
)  # fmt: skip
_MISTRAL_TAGS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MISTRAL = ToolFormat(
    marker=lambda template: "[TOOL_CALLS]" in template,
    reader=MistralReader, before_name='{"name": "', after_name='", "arguments": ', end="}",
    between=", ", whole_begin="[TOOL_CALLS][", whole_end="]", is_json_name=True, tags=_MISTRAL_TAGS,
)  # fmt: skip
MISTRAL_NAMED = ToolFormat(
    marker=lambda template: "[ARGS]" in template,
    reader=MistralReader, before_name="[TOOL_CALLS]", after_name="[ARGS]", end="", tags=_MISTRAL_TAGS,
)  # fmt: skip
QWEN3_CODER = ToolFormat(
    marker=lambda template: "<function=" in template and "<parameter=" in template,
    reader=QwenCoderReader, before_name="<tool_call>\n<function=", after_name=">\n", end="</function>\n</tool_call>",
    between="\n", arguments="parameters", tags=("<tool_call>", "</tool_call>"), name_tag="<function=",
)  # fmt: skip
_DEEPSEEK_TAGS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
DEEPSEEK_V31 = ToolFormat(
    marker=lambda template: "<｜tool▁sep｜>" in template and "```json" not in template,
    reader=DeepseekReader, before_name="<｜tool▁call▁begin｜>", after_name="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>",
    whole_begin="<｜tool▁calls▁begin｜>", whole_end="<｜tool▁calls▁end｜>", tags=_DEEPSEEK_TAGS,
)  # fmt: skip
DEEPSEEK_V3 = replace(
    DEEPSEEK_V31, marker=lambda template: "<｜tool▁calls▁begin｜>" in template,
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", after_name="\n```json\n",
    end="\n```<｜tool▁call▁end｜>", between="\n",
)  # fmt: skip


# By the name in settings, from general to special: a template that the markers of several fit has the last of them.
# A name has its forms, whose last one's marker finds it; a template has the first that fits, or else the last.
TOOL_FORMATS: dict[str, tuple[ToolFormat, ...]] = {
    "llama3_json": (LLAMA3_JSON,),
    "hermes": (HERMES,),
    "qwen3_coder": (QWEN3_CODER,),
    "mistral": (MISTRAL_NAMED, MISTRAL),
    "deepseek_v3": (DEEPSEEK_V31, DEEPSEEK_V3),
}


def format_of(name: str, template: str) -> ToolFormat:
    """Return the format of this name, in the form that the chat template has where there are two."""
    forms = TOOL_FORMATS[name]
    return next((form for form in forms if form.marker(template)), forms[-1])


def sniffed(template: str) -> str | None:
    """Return the name of the format that the chat template writes calls in; None if it is none that is known here."""
    return next((name for name, forms in reversed(TOOL_FORMATS.items()) if forms[-1].marker(template)), None)
