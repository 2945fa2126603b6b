"""How tools, calls and their results get into a prompt: through the model's chat template, or described in messages.

Owns:      what the model's template can take, which is tried once; the description of tools for a template without.
Never:     writes a call's arguments anew where the template lets them be: a call in the history has the text that the
           model generated, so that the next turn finds it in the cache.
Invariant: what a client wrote stays text, also behind a mark (`Tokenizer.chat`).
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from deployments.output.output_format import OutputFormat
from deployments.output.tool_formats import ToolFormat
from deployments.output.tools import Tool, ToolUse
from replicas.errors import InvalidRequest
from replicas.text.chat_template import ChatTemplate
from replicas.text.tokenizer import MARK

Messages = Sequence[Mapping[str, Any]]
_ID = "a1b2c3d4e"  # as Mistral's templates want them
_NINE_CHARACTERS = re.compile(r"length\s*!=\s*9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is given to the chat template."""

    messages: list[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None = None
    marks: Mapping[str, str]  # texts in the rendered prompt, and what each stands for


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompting:
    """What one model's template takes of tools, and what its output means."""

    output: OutputFormat
    # how it writes a call's arguments: as the string that they are, as JSON of a mapping, or part by part
    arguments: Literal["string", "json", "parts"]
    short_ids: bool = False  # it wants ids of calls of nine characters
    takes_system: bool = True  # else tools are described in the first message of the user

    @staticmethod
    def of(output: OutputFormat, template: ChatTemplate, render: Callable[..., str]) -> "ChatPrompting":
        """Try the template. ``render``: as `Tokenizer.chat_text`."""
        short_ids = bool(_NINE_CHARACTERS.search(template.source(with_tools=True) or ""))
        made = partial(ChatPrompting, output=output, short_ids=short_ids, takes_system=template.takes_system)
        tries: tuple[tuple[Literal["string", "json"], Any, str], ...] = (
            ("string", '{"a":  1}', '{"a":  1}'),
            ("json", {"a": 1}, '{"a": 1}'),
        )
        for arguments, given, written in tries:
            calls = [{"id": _ID, "type": "function", "function": {"name": "f", "arguments": given}}]
            turns = [
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "tool_call_id": _ID, "name": "f", "content": "c"},
            ]
            tool = Tool(name="f", description="d", parameters={}, strict=False).body
            with contextlib.suppress(InvalidRequest):
                if written in render(turns, tools=[tool], add_generation_prompt=False):
                    return made(arguments=arguments)
        return made(arguments="parts")

    def prompt(self, messages: Messages, use: ToolUse | None) -> Prompt:
        """Make what the template is given. Raises: InvalidRequest for a malformed call in ``messages``."""
        marks: dict[str, str] = {}
        if self.output.plain_has_tools if use is None else self.output.template_has_tools:
            shown = [self._for_template(i, message, marks) for i, message in enumerate(messages)]
            return Prompt(messages=shown, tools=None if use is None else [tool.body for tool in use.tools], marks=marks)
        written = self._in_words(messages, marks)
        return Prompt(messages=written if use is None else self._described(written, use), marks=marks)

    def _for_template(self, index: int, message: Mapping[str, Any], marks: dict[str, str]) -> Mapping[str, Any]:
        if self.short_ids and isinstance(message.get("tool_call_id"), str):
            message = {**message, "tool_call_id": _short(message["tool_call_id"])}
        called = calls_of(index, message)
        if not called:
            return message
        calls = []
        for call, name, arguments in called:
            given: Any = arguments
            value = _object_of(arguments)
            if value is not None and self.arguments == "json":
                mark = MARK.format(len(marks))
                given, marks[json.dumps({mark: ""})] = {mark: ""}, arguments
            elif value is not None and self.arguments == "parts":
                given = value
            function = {**call["function"], "name": name, "arguments": given}
            shown = {**call, "type": "function", "function": function}
            calls.append(shown | {"id": _short(str(call.get("id")))} if self.short_ids else shown)
        return {**message, "tool_calls": calls}

    def _in_words(self, messages: Messages, marks: dict[str, str]) -> list[Mapping[str, Any]]:
        """Write calls as the model does, and their results as a user's turn, which neighbouring results share."""
        written: list[Mapping[str, Any]] = []
        results: list[str] = []
        for i, message in enumerate(messages):
            called = calls_of(i, message)
            if message.get("role") == "tool":
                result = f"<tool_response>\n{text_of(i, message)}\n</tool_response>"
                if results:
                    written.pop()
                results.append(result)
                written.append({"role": "user", "content": "\n".join(results)})
                continue
            results = []
            if not called:
                written.append(message)
                continue
            text = text_of(i, message)
            calls = self._written(called, marks)
            written.append({"role": "assistant", "content": f"{text}\n{calls}" if text else calls})
        return written

    def _written(self, calls: Sequence[tuple[Any, str, str]], marks: dict[str, str]) -> str:
        form = self.output.tools
        if form is None:
            raise InvalidRequest("messages: this model writes no tool calls (model.tool_format)", param="messages")

        def ours(text: str) -> str:
            for tag in self.output.special_tags:
                if tag in text:
                    mark = MARK.format(len(marks))
                    marks[mark], text = tag, text.replace(tag, mark)
            return text

        before, end = ours(form.before_name), ours(form.end)
        texts = [
            f"{before}{form.begin(name).removeprefix(form.before_name)}{_arguments(form, arguments)}{end}"
            for _, name, arguments in calls
        ]
        return f"{ours(form.whole_begin)}{form.between.join(texts)}{ours(form.whole_end)}"

    def _described(self, messages: list[Mapping[str, Any]], use: ToolUse) -> list[Mapping[str, Any]]:
        """Add the tools to the system message."""
        form = self.output.tools
        if form is None:
            raise InvalidRequest("tools: this model writes no tool calls (model.tool_format)", param="tools")
        shown = "\n".join(json.dumps(tool.body, ensure_ascii=False) for tool in use.tools)
        call = f"{form.whole_begin}{form.begin('NAME')}{_arguments(form, '{...}')}{form.end}{form.whole_end}"
        text = (
            "You can call tools. These are their names, what they do, and the JSON schemas of their parameters:\n"
            f"<tools>\n{shown}\n</tools>\n\n"
            f"To call a tool, answer with its name and its arguments in this form, once for each call:\n{call}"
        )
        first = messages[0] if messages else {}
        if not self.takes_system and first.get("role") == "user":
            return [{**first, "content": f"{text}\n\n{text_of(0, first)}"}, *messages[1:]]
        if first.get("role") in ("system", "developer"):
            return [{**first, "content": f"{text_of(0, first)}\n\n{text}".lstrip()}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


def calls_of(index: int, message: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str, str]]:
    """List the calls of an assistant's message, each with its name and its arguments as text. Raises: InvalidRequest"""
    path = f"messages[{index}].tool_calls"
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if message.get("role") != "assistant" or not isinstance(calls, list):
        raise InvalidRequest(f"{path}: must be a list, in a message of the assistant", param="messages")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments", "{}") if isinstance(function, Mapping) else None
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(name, str) or not isinstance(arguments, str):
            wanted = f"{path}[{i}].function: must have a name and arguments, both strings"
            raise InvalidRequest(wanted, param="messages")
        found.append((call, name, arguments or "{}"))
    return found


def text_of(index: int, message: Mapping[str, Any]) -> str:
    """Return a message's content as one text. Raises: InvalidRequest for parts that are none."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ["" if content is None else content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"messages[{index}].content: must be a string or a list of text parts", param="messages")
    return "\n".join(str(text) for text in texts)


def _arguments(form: ToolFormat, arguments: str) -> str:
    value = _object_of(arguments) if form.arguments == "parameters" else None
    if value is None:
        return arguments

    def text(each: Any) -> str:
        return each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)

    return "".join(f"{form.parameter_begin(name)}{text(each)}{form.parameter_end}" for name, each in value.items())


def _object_of(arguments: str) -> dict[str, Any] | None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _short(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=5).hexdigest()[:9]
