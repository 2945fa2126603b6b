"""The body of POST /v1/responses, and the chat that it asks for.

Owns:      what each kind of input item, tool and option means as a chat.
Never:     keeps anything between requests: what asks for that is refused by name, but for `background`.
Invariant: items that a model gave in one answer become one message again, so that the next turn's prompt begins with
           this turn's prompt and output.
"""

import base64
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import WithJsonSchema

from deployments.http import bodies
from deployments.http.api_document import about, body_like, said, shape, shown
from deployments.http.bodies import ChatRequest, Items, Named, SamplingFields, WireType
from deployments.http.convert import refuse_unsupported
from deployments.output.tools import tool_use
from replicas.errors import InvalidRequest

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
INCLUDES = (
    ENCRYPTED, LOGPROBS, "web_search_call.results", "web_search_call.action.sources", "file_search_call.results",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url",
)  # fmt: skip
_STATEFUL = ("previous_response_id", "conversation")
# Codex sends these with every request, whatever the model: they are dropped, and a header says so
_DROPPED = re.compile(
    r"(web_search|image_generation|tool_search|local_shell|custom)(?:_preview[a-z0-9_]*|_[0-9]{4}[0-9_]*)?"
)
_OURS = "manta:"  # begins the `encrypted_content` that this server gave
# a response has neither the field nor what it asks for
_NOT_SHARED = ("max_tokens", "response_format", "prompt_logprobs", "return_token_ids")
PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


_TEXTS = [shape(type={"enum": [each for each in PARTS if each != "refusal"]}, text=bodies.TEXT)]
_PARTS = {"type": "array", "items": {"anyOf": [*_TEXTS, shape(type={"const": "refusal"}, refusal=bodies.TEXT)]}}
_CONTENT = {"anyOf": [bodies.TEXT, bodies.NULL, _PARTS]}
_ITEMS = [
    shape({"type": {"const": "message"}, "content": _CONTENT}, role=bodies.ROLE),
    shape(type={"const": "reasoning"}),
    shape(type={"const": "function_call"}, call_id=bodies.TEXT, name=bodies.TEXT, arguments=bodies.TEXT),
    shape(type={"const": "function_call_output"}, call_id=bodies.TEXT, output=_CONTENT),
]
_Item = Annotated[bodies.Object, WithJsonSchema({"anyOf": _ITEMS})]
_Tool = Annotated[bodies.Object, WithJsonSchema(shape(type=bodies.FUNCTION, name=bodies.TOOL_NAME))]
_ALLOWED = shape(
    type={"const": "allowed_tools"},
    mode={"enum": ["auto", "required"]},
    tools={"type": "array", "items": {"type": "object"}},
)
_CHOICE = {"anyOf": [shape(type=bodies.FUNCTION, name=bodies.TOOL_NAME), _ALLOWED]}
_ToolChoice = bodies.ToolUse | Annotated[bodies.Object, WithJsonSchema(_CHOICE)]


class TextOptions(WireType):
    """The form that the text of an answer is to have."""

    format: bodies.Object | None = said("The form of the output: `text`, `json_object` or `json_schema`.")
    verbosity: str | None = said("Accepted, without effect.")


class ReasoningOptions(WireType):
    """What a request says about reasoning: the effort for the template. No summary is made of it."""

    effort: str | None = said("A variable for the chat template.")
    summary: str | None = said("Accepted, without effect: no summary is made.")


class ResponsesRequest(SamplingFields):
    """The body of a request for a response. OpenAI's has few of the fields that it shares with chats."""

    model_config = body_like({"input": "Hello", "max_output_tokens": 8})

    input: str | Annotated[Items[_Item], shown(minItems=1)] = about(
        "A text, or the items of the conversation ([more](#openais-responses-api))."
    )
    n: Annotated[int, shown(const=1)] | None = said("Only 1.")
    instructions: str | None = said("The system message.")
    max_output_tokens: bodies.UpToContext | None = said(
        "The most output tokens, reasoning included. Without it: what the context leaves."
    )
    tools: Items[_Tool] | None = said(bodies.TOOLS)
    tool_choice: _ToolChoice | None = said(bodies.TOOL_CHOICE)
    parallel_tool_calls: bodies.SingleCall = None
    text: TextOptions | None = said("`format`: the form of the output; `verbosity` has no effect.")
    reasoning: ReasoningOptions | None = said("`effort` is a variable for the chat template; no summary is made.")
    include: Items[Annotated[str, shown(enum=[*INCLUDES])]] | None = said(
        "Parts that the answer lacks otherwise ([more](#openais-responses-api))."
    )
    top_logprobs: bodies.TopLogprobs = None
    chat_template_kwargs: bodies.TemplateVariables = None
    metadata: Named[str] | None = said("The answer repeats it.")
    store: bool | None = said("As `background`, or left out: nothing else is stored.")
    background: bool | None = said("Made without this connection, and kept for a while ([more](#in-the-background)).")
    previous_response_id: Annotated[str, shown(maxLength=0)] | None = said(
        "Nothing is stored: send the whole conversation."
    )
    conversation: bodies.Refused = None
    prompt: bodies.Refused = None
    response_format: Any = said("Refused: use `text.format`.", enum=bodies.NOTHING)
    max_tokens: Any = said("Refused: use `max_output_tokens`.", enum=bodies.NOTHING)
    prompt_logprobs: bodies.Refused = None
    return_token_ids: bodies.Refused = None
    return_tokens_as_token_ids: bodies.Refused = None

    def includes(self, name: str) -> bool:
        """Whether the answer is to have a part that it lacks otherwise."""
        return name in (self.include or ())


@dataclass(slots=True)
class ToolSet:
    """The tools of a request: those that the model is told of, and those that it is not."""

    functions: list[dict[str, Any]] = field(default_factory=list)  # as a chat has them
    kept: list[dict[str, Any]] = field(default_factory=list)  # as the client gave them
    dropped: list[str] = field(default_factory=list)  # their types, in our words: they go into a header
    spaced: dict[str, tuple[str, str]] = field(default_factory=dict)  # name for the model -> namespace, name in it


def tools_of(body: ResponsesRequest) -> ToolSet:
    """Sort the tools of ``body``; those of a namespace become functions. Raises: InvalidRequest."""
    tools = ToolSet()
    for index, tool in enumerate(body.tools or ()):
        kind, where = str(tool.get("type")), f"tools[{index}]"
        if kind == "function":
            tools.functions.append(_function(tool, _text(tool, "name", where)))
        elif kind == "namespace":
            _add_namespace(tools, tool, where)
        elif found := _DROPPED.fullmatch(kind):
            tools.dropped.append(found[1])
            continue
        else:
            raise InvalidRequest(
                f"{where}: type {kind[:64]!r} is not supported by this server; supported: function, namespace",
                param="tools",
            )
        tools.kept.append(tool)
    return tools


def chat_of(body: ResponsesRequest, tools: ToolSet) -> ChatRequest:
    """Convert ``body`` to a chat. Raises: InvalidRequest."""
    _refuse(body)
    functions, choice = _chosen(body, tools)
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    of_chat = {
        "messages": with_one_head(_messages(body)),
        "max_completion_tokens": body.max_output_tokens,
        "tools": functions or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(text.format),
        "reasoning_effort": reasoning.effort,
        "logprobs": body.includes(LOGPROBS) or bool(body.top_logprobs),
        "top_logprobs": body.top_logprobs,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    return ChatRequest(**shared | of_chat)


NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}


def renamed(error: InvalidRequest, names: Mapping[str, str] = NAMES) -> InvalidRequest:
    """Return an error about a chat in the words of an API, whose ``names`` for a chat's fields are given."""
    if error.param is None or error.param not in names:
        return error
    name = names[error.param]
    text = str(error).replace("response_format.json_schema", name).replace(error.param, name, 1)
    return type(error)(text, param=name)


def sealed(reasoning: str) -> str:
    """Write reasoning as the opaque text that clients send back; nothing in it is secret from its client."""
    return _OURS + base64.b64encode(reasoning.encode()).decode()


def _refuse(body: ResponsesRequest) -> None:
    if body.background and body.store is False:
        raise InvalidRequest(
            "store: false does not go with background: true: the response is kept to be asked for; leave it out",
            param="store",
        )
    for name in _STATEFUL if body.background else ("store", *_STATEFUL):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name}: this server keeps no responses; leave it out, and send the whole conversation as input",
                param=name,
            )
    refuse_unsupported(body, prompt=None, logprobs=None, echo=None, n=1, **dict.fromkeys(_NOT_SHARED))
    for name in body.include or ():
        if name not in INCLUDES:
            raise InvalidRequest(
                f"include: {name[:64]!r} is not known here; known: {', '.join(INCLUDES)}", param="include"
            )


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message" if item.get("role") != "assistant":
            content = _content(item.get("content"), where)
            messages.append({"role": _text(item, "role", where), "content": content})
        case "message":
            message = _open_message(messages, but_with=("content", "tool_calls"))
            message["content"] = _content(item.get("content"), where)
        case "reasoning":
            text = _reasoning_text(item, where)
            if text:
                message = _open_message(messages, but_with=("content", "tool_calls"))
                message["reasoning_content"] = message.get("reasoning_content", "") + text
        case "function_call":
            name = _full_name(item.get("namespace"), _text(item, "name", where))
            function = {"name": name, "arguments": _text(item, "arguments", where)}
            call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
            _open_message(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            if "output" not in item:
                raise InvalidRequest(f"{where}: has no output", param="input")
            output = _content(item["output"], where)
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})
        case other:
            raise InvalidRequest(
                f"{where}: items of type {str(other)[:64]!r} are not supported by this server; supported: message, "
                "reasoning, function_call, function_call_output",
                param="input",
            )


def _open_message(messages: list[dict[str, Any]], *, but_with: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the last message if the model gave it and it has none of ``but_with``, else a new one of the model's."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) is not None for name in but_with):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def with_one_head(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the instructions that a conversation begins with: many templates take one system message, at the head."""
    head = [*itertools.takewhile(lambda message: message["role"] in ("system", "developer"), messages)]
    if len(head) < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(each["content"] for each in head)}, *messages[len(head) :]]


def _content(content: Any, where: str) -> str:
    """Join the texts of a content. Raises: InvalidRequest for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: its text must be a string or a list of parts", param="input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if kind in PARTS else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{where}: a part of type {str(kind)[:64]!r} is not supported; only text is", param="input"
            )
        texts.append(text)
    return "\n".join(texts)


def _reasoning_text(item: Mapping[str, Any], where: str) -> str:
    """Return the reasoning of an item, as far as it can be read here; that of another server may be encrypted."""
    text, sent = _content(item.get("content"), where), item.get("encrypted_content")
    if not text and isinstance(sent, str) and sent.startswith(_OURS):
        try:
            text = base64.b64decode(sent.removeprefix(_OURS), validate=True).decode()
        except ValueError as error:
            raise InvalidRequest(f"{where}: encrypted_content is not as this server gave it", param="input") from error
    return text or _content(item.get("summary"), where)


def _response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: each for name, each in form.items() if name != "type"}}


def _chosen(body: ResponsesRequest, tools: ToolSet) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """Return the functions that the model may call, and the choice as a chat has it. Raises: InvalidRequest."""
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return tools.functions, choice
    if choice.get("type") == "function":
        name = _full_name(choice.get("namespace"), _text(choice, "name", "tool_choice"))
        return tools.functions, {"type": "function", "function": {"name": name}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        if not all(isinstance(each, dict) for each in choice["tools"]):
            raise InvalidRequest("tool_choice.tools: each must be an object", param="tool_choice")
        tool_use(tools.functions, None, None)  # those that are not allowed must be well formed too
        allowed = [_full_name(each.get("namespace"), str(each.get("name"))) for each in choice["tools"]]
        return [each for each in tools.functions if each["function"]["name"] in allowed], str(choice.get("mode"))
    raise InvalidRequest(
        f"tool_choice: type {str(choice.get('type'))[:64]!r} is not supported by this server; supported: function, "
        "allowed_tools",
        param="tool_choice",
    )


def _add_namespace(tools: ToolSet, space: Mapping[str, Any], where: str) -> None:
    members = space.get("tools")
    for index, tool in enumerate(members if isinstance(members, list) else ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            tools.dropped.append("namespace")
            continue
        own = (_text(space, "name", where), _text(tool, "name", f"{where}.tools[{index}]"))
        tools.spaced[_full_name(*own)] = own
        tools.functions.append(_function(tool, _full_name(*own)))


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": name, **given}}


def _full_name(space: Any, name: str) -> str:
    """Name a tool for the model, with as much of its namespace as a name may have."""
    return f"{space}__{name}"[-64:] if space else name


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    text = item.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{name}: must be a text, got {str(text)[:64]!r}", param=where.partition("[")[0])
    return text
