"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, for Claude Code and Anthropic's SDKs.

Owns:      the conversion of a message's request to a chat; each turn gives the same chat, so that the next one finds
           it in the cache.
Never:     drops what the model should see: a block or tool that it cannot is refused by its name. The attribution
           line of Claude Code, other in each request and meant for Anthropic's servers, is left out, and the answer's
           `DROPPED` header says so: at the head of the prompt it would keep all behind it from the cache.
"""

import bisect
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import WithJsonSchema

from deployments.http import bodies
from deployments.http.api_document import BODY, NAMED_EVENTS, RUN, about, body_like, gives, said, shape, shown
from deployments.http.apis.breakpoints import AN_ANSWER, NO_WORDS, Cut, breakpoints
from deployments.http.apis.message_form import ContentBlocks, MessageForm
from deployments.http.apis.response_input import with_one_head
from deployments.http.arrivals import DROPPED, name_of
from deployments.http.bodies import ChatRequest, Items, RequestFields, Route, WireType
from deployments.http.chat import prepare, template_options, tools_of
from deployments.http.convert import asked_adapter, refuse_unsupported
from deployments.http.http_errors import Busy
from deployments.http.service import Service, service_of
from deployments.http.streaming import JsonAnswer
from deployments.output.reading import call_id
from replicas.errors import InvalidRequest
from replicas.text.tokenizer import Rendered
from replicas.types import CacheBreakpoint, SamplingParams

router = APIRouter(route_class=Route)
_ATTRIBUTION = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Block = Mapping[str, Any]


_TURN = shape(
    role={"enum": ["user", "assistant", "system"]},
    content={"anyOf": [bodies.TEXT, {"type": "array", "items": shape(type=bodies.TEXT)}]},
)
_TURNS = Annotated[Items[Annotated[bodies.Object, WithJsonSchema(_TURN)]], shown(minItems=1)]
_Tool = Annotated[bodies.Object, WithJsonSchema(shape(name=bodies.TOOL_NAME, input_schema={"type": "object"}))]
_CHOICE = shape({"type": {"enum": ["auto", "any", "tool", "none"]}})


class CountTokensRequest(WireType):
    """The body of /v1/messages/count_tokens: what a prompt is made from."""

    model_config = body_like({"messages": [{"role": "user", "content": "Hello"}]})

    model: bodies.Model = None
    messages: _TURNS = about("The conversation: turns of user, assistant and system.")
    system: str | Items[bodies.Object] | None = said("The system message.")
    tools: Items[_Tool] | None = said("Functions, each with an `input_schema`.")
    tool_choice: Annotated[bodies.Object, WithJsonSchema(_CHOICE)] | None = said(
        "`auto`, `any`, `tool` or `none`, and `disable_parallel_tool_use`."
    )
    thinking: bodies.Object | None = said(
        "`enabled` and `disabled` set the template's `enable_thinking`; a budget has no effect."
    )
    output_config: bodies.Object | None = said(
        "`effort` is the template's `reasoning_effort`, `format` a schema that is enforced."
    )
    cache_control: bodies.Object | None = said("Accepted as for /v1/messages; counting keeps nothing.")


class MessagesRequest(CountTokensRequest, RequestFields):
    """The body of /v1/messages: a prompt, and how it is to be answered."""

    model_config = body_like({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})
    __annotations__ = bodies.asked_fields(SamplingParams, "temperature", "top_p")

    cache_control: bodies.Object | None = said(
        "Keep the whole prompt in the cache for its `ttl`, `5m` or `1h`; on a block or tool: the prompt up to there."
    )
    max_tokens: Annotated[int, shown(minimum=0)] = about("The most output tokens; the context may leave fewer.")
    stop_sequences: bodies.StopTexts | None = said(bodies.STOPS)
    top_k: bodies.TopK = None
    stream: bodies.Stream = None
    metadata: bodies.Object | None = said("Accepted, without effect.")


@router.post("/v1/messages", **gives("Anthropic's `message`", *RUN, 410, stream=NAMED_EVENTS))
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Continue a conversation."""
    service = service_of(request)
    refuse_unsupported(body, mcp_servers=None, container=None)
    system, dropped = _system(body.system)
    cuts = _breakpoints(body)
    name = name_of(request)
    chat = chat_of(body, system, _sampling(body))
    prepared = await prepare(request, chat, name, most_tokens=body.max_tokens)
    found = await _cache_breakpoints(service, body, cuts, chat, len(prepared.request.token_ids)) if cuts else ()
    asked = dataclasses.replace(prepared.request, cache_breakpoints=found)
    form = MessageForm(
        answer_id=f"msg_{name}",
        model=service.name_of(asked),
        max_tokens=body.max_tokens,
        stop=asked.sampling.stop,
        is_text=prepared.new_reading is None,
        breakpoints=found,
        blocks=ContentBlocks(functools.partial(call_id, prepared.calls_of, 0, prefix="toolu_")),
    )
    answer = dataclasses.replace(prepared, request=asked).answer(form, form.answer_id)
    return _told(await answer.respond(request, streams=body.stream), dropped)


@router.post("/v1/messages/count_tokens", **gives("`input_tokens`, as Anthropic's", *BODY))
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """Count the tokens of the prompt that /v1/messages makes from the same fields; also of one that is longer than the
    context: clients ask in order to know when to shorten it."""
    service = service_of(request)
    system, dropped = _system(body.system)
    _breakpoints(body)
    await asked_adapter(request, body.model)
    chat = chat_of(body, system, {})
    ids = await service.encode_chat(chat.messages, use=tools_of(chat), **template_options(chat))
    return _told(JsonAnswer({"input_tokens": len(ids)}), dropped)


def _breakpoints(body: CountTokensRequest) -> dict[float, Cut]:
    return breakpoints(tools=body.tools, system=body.system, messages=body.messages, cache_control=body.cache_control)


def _told(response: Response, dropped: bool) -> Response:
    if dropped:
        response.headers[DROPPED] = "attribution"
    return response


async def _cache_breakpoints(
    service: Service, body: MessagesRequest, cuts: Mapping[float, Cut], chat: ChatRequest, num_tokens: int
) -> tuple[CacheBreakpoint, ...]:
    """Find how many of the ``num_tokens`` of ``chat``, the prompt of ``body``, are before each breakpoint, as
    `Tokenizer.num_before` counts. None are where the chat template refuses a prompt that ends there, and where too
    many long requests are being read: this one, which was, is answered without."""
    found = []
    with contextlib.suppress(Busy):
        prompt = await _rendered(service, chat)
        for ttl_s, cut in cuts.items():
            with contextlib.suppress(InvalidRequest):
                end = await _end_of(service, body, cut, prompt.text)
                found.append(CacheBreakpoint(await service.num_before(prompt, end, num_tokens=num_tokens), ttl_s))
    return tuple(sorted(found, key=lambda each: each.length))


async def _end_of(service: Service, body: MessagesRequest, cut: Cut, text: str) -> int:
    """Count the characters of ``text``, the prompt of ``body``, before a breakpoint: those with which the prompt that
    ends there begins too, but for a turn that only templates want."""
    if not cut.fields:
        return len(text)
    part = body.model_copy(update=cut.fields)
    turn = await _wanted_turn(service, body) if cut.adds_turn else ""

    def end_in(other: str) -> int:  # what a template writes into that turn stays
        return min(_num_common(text, other), len(other.removesuffix(turn)))

    if "tools" in cut.fields and body.system:  # the template writes it behind the tools, or before them
        alone = end_in(await _beginning(service, part, system=None))
        if alone > _num_common(text, await _beginning(service, part, tools=None)):
            return alone
    return end_in(await _beginning(service, part))


async def _beginning(service: Service, body: MessagesRequest, **fields: Any) -> str:
    """Render the prompt of ``body`` with other ``fields``, as the beginning of another one's."""
    part = body.model_copy(update=fields)
    chat = chat_of(part, _system(part.system)[0], {"add_generation_prompt": False}, is_cut=True)
    return (await _rendered(service, chat)).text


async def _wanted_turn(service: Service, body: MessagesRequest) -> str:
    """Render a turn of no words as it is behind others; some templates take no two turns of a user."""
    for before in ([NO_WORDS], [NO_WORDS, AN_ANSWER]):
        with contextlib.suppress(InvalidRequest):
            less, more = [
                await _beginning(service, body, tools=None, tool_choice=None, system=None, messages=messages)
                for messages in (before, [*before, NO_WORDS])
            ]
            return more.removeprefix(less)
    return ""


def _num_common(text: str, other: str) -> int:
    """Count the characters with which both begin."""
    most = min(len(text), len(other))
    return bisect.bisect_left(range(most), True, key=lambda last: text[: last + 1] != other[: last + 1])


async def _rendered(service: Service, chat: ChatRequest) -> Rendered:
    return await service.render_chat(chat.messages, use=tools_of(chat), **template_options(chat))


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    """Collect the fields of a chat beside its prompt. It has no limit of its own: Claude Code asks for more than small
    contexts have, and as at Anthropic the answer then ends where the context does."""
    names = {"temperature", "top_p", "top_k", "stream", *RequestFields.model_fields} - {"model"}
    return {"stop": body.stop_sequences, **{name: getattr(body, name) for name in names}}


def chat_of(body: CountTokensRequest, system: str, fields: dict[str, Any], *, is_cut: bool = False) -> ChatRequest:
    """Convert a body to a chat. Raises: InvalidRequest. Args: is_cut: it is the beginning of another one's."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(body.messages):
        if message.get("content") == [] and (number + 1 < len(body.messages) or message.get("role") != "assistant"):
            raise _wrong(f"messages.{number}.content", "is empty; only the last message may be, of the assistant")
        turns += _turns(f"messages.{number}", message)
    continues = not is_cut and bool(turns) and turns[-1]["role"] == "assistant"
    if continues and "tool_calls" in turns[-1]:
        raise _wrong("messages", "the last one ends in a tool_use block: give its tool_result")
    thinking = (body.thinking or {}).get("type")
    kwargs = {"enable_thinking": thinking == "enabled"} if thinking in ("enabled", "disabled") else None
    output = body.output_config or {}
    return ChatRequest(
        model=body.model,
        messages=with_one_head(turns),
        tools=[_tool(f"tools.{number}", tool) for number, tool in enumerate(body.tools or ())] or None,
        **_tool_choice(body.tool_choice or {}),
        chat_template_kwargs=kwargs,
        reasoning_effort=_string("output_config", output, "effort") if "effort" in output else None,
        response_format=_response_format(output.get("format")),
        continue_final_message=continues or None,
        **fields,
    )


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {what}", param=where.partition(".")[0])


def _string(where: str, given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", f"must be a string, got {type(value).__name__}")
    return value


def _system(system: str | list[dict[str, Any]] | None) -> tuple[str, bool]:
    """Join the system prompt. Returns: it without the attribution line, and whether it had one."""
    texts = [_text("system", block) for block in _blocks("system", system or [])]
    whole = "\n".join(texts)
    kept = _ATTRIBUTION.sub("", whole, count=1) if _ATTRIBUTION.match(whole) else whole
    return kept, kept != whole


def _blocks(where: str, content: Any) -> Iterator[Block]:
    """Yield the blocks of a content, which may be one text."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}
    elif isinstance(content, list) and all(isinstance(block, dict) for block in content):
        yield from content
    else:
        raise _wrong(where, "must be a string or a list of content blocks")


def _text(where: str, block: Block) -> str:
    """Read a text block; every other is refused."""
    if block.get("type") != "text":
        kind = str(block.get("type"))[:64]
        raise _wrong(where, f"a block of type {kind!r} is not supported here by this server: send text")
    return _string(where, block, "text")


def _turns(where: str, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of the chat that ``message`` stands for: each tool result is one of its own."""
    role, content = message.get("role"), f"{where}.content"
    blocks = _blocks(content, message.get("content"))
    if role == "assistant":
        yield _assistant(content, blocks)
        return
    if role not in ("user", "system"):
        raise _wrong(f"{where}.role", f"must be user, assistant or system, got {str(role)[:64]!r}")
    texts: list[str] = []
    for number, block in enumerate(blocks):
        if role == "system" or block.get("type") != "tool_result":
            texts.append(_text(f"{content}.{number}", block))
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        yield _tool_result(f"{content}.{number}", block)
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _tool_result(where: str, block: Block) -> dict[str, Any]:
    blocks = _blocks(f"{where}.content", block.get("content") or "")
    text = "\n".join(_text(f"{where}.content", each) for each in blocks)
    failed = "Error: " if block.get("is_error") else ""  # a chat has no field for it
    return {"role": "tool", "tool_call_id": _string(where, block, "tool_use_id"), "content": failed + text}


def _assistant(where: str, blocks: Iterator[Block]) -> dict[str, Any]:
    """Convert an assistant's turn; what a model thought comes back as the reasoning that templates may show."""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls = []
    for number, block in enumerate(blocks):
        at, kind = f"{where}.{number}", block.get("type")
        if kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise _wrong(f"{at}.input", "must be an object")
            function = {"name": _string(at, block, "name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": _string(at, block, "id"), "type": "function", "function": function})
        elif kind == "thinking":
            texts[kind].append(_string(at, block, kind))
        elif kind != "redacted_thinking":  # which only Anthropic can read
            texts["text"].append(_text(at, block))
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts["text"])}
    if texts["thinking"]:
        turn["reasoning_content"] = "\n".join(texts["thinking"])
    return {**turn, "tool_calls": calls} if calls else turn


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise _wrong(where, f"the tool {str(tool['type'])[:64]!r} is Anthropic's own, and not supported by this server")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise _wrong(f"{where}.input_schema", "must be an object")
    function = {"name": _string(where, tool, "name"), "parameters": schema}
    return {"type": "function", "function": function | {k: tool[k] for k in ("description", "strict") if k in tool}}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(choice.get("type"))
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        function = {"name": _string("tool_choice", choice, "name")}
        return {**fields, "tool_choice": {"type": "function", "function": function}}
    if choice and kind not in _CHOICES:
        raise _wrong("tool_choice.type", f"must be auto, any, tool or none, got {kind[:64]!r}")
    return {**fields, "tool_choice": _CHOICES[kind]} if choice else fields


def _response_format(output_format: Any) -> dict[str, Any] | None:
    """Convert ``output_config.format``, of which Anthropic has one kind, always enforced."""
    if output_format is None:
        return None
    if not isinstance(output_format, dict) or output_format.get("type") != "json_schema":
        raise _wrong("output_config.format", "must be an object of type json_schema")
    schema = {"name": "output", "schema": output_format.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
