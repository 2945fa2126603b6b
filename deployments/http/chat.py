"""POST /v1/chat/completions: a conversation through the model's chat template, streaming or not.

Owns:      the form of a chat completion.
Never:     ignores tools: it refuses a constraint that it cannot enforce.
Invariant: each choice's first chunk carries the role, and its last the finish reason.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.dispatch.rids import new_rid
from deployments.http.answer_bodies import ChatCompletionBody, ChatCompletionChunkBody
from deployments.http.api_document import RUN, gives
from deployments.http.arrivals import name_of
from deployments.http.bodies import ChatRequest, Route, TemplateFields
from deployments.http.constraints import form_asked, tools_asked
from deployments.http.convert import (
    asks_form,
    check_model,
    checked,
    logprobs_wanted,
    masks_of,
    openai_sampling,
    output_limit,
    refuse_unsupported,
    salt_of,
    truncated,
)
from deployments.http.openai_format import OpenAIForm, chat_logprobs, prompt_logprobs_body, usage_body
from deployments.http.service import service_of
from deployments.http.streaming import Answer, Deltas, Key
from deployments.output.parts import ArgumentsPart, CallPart, Part, Reader, ReasoningPart, TextPart, TextReader
from deployments.output.reading import ChoiceReading, call_id
from deployments.output.reasoning import ReasoningCount
from deployments.output.tools import ToolUse, tool_use
from deployments.output.validation import SchemaPromise
from replicas.errors import InvalidRequest
from replicas.types import FinishReason, GenerateRequest, TokenDelta

router = APIRouter(route_class=Route)
# arguments of `Service.encode_chat` and `Tokenizer.chat` beside the template's variables
_TAKEN = frozenset({"self", "messages", "tools", "check", "marks", "use"})
_PROMPT_END = 16  # tokens that tell whether the prompt leaves reasoning open


@router.post("/v1/chat/completions", **gives(ChatCompletionBody, *RUN, event=ChatCompletionChunkBody))
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Continue a chat, streaming or not."""
    answer = await _answer(request, body, name_of(request, body.rid))
    return await answer.respond(request, streams=body.stream)


@dataclass(frozen=True, kw_only=True)
class ChatForm(OpenAIForm):
    """The form of a chat completion: each choice is a message, or the new part of one."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    body: ChatRequest

    def choice(self, key: Key, delta: TokenDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text}
        return self._choice(delta.index, delta, {"message": message}, self._logprobs(delta))

    def chunks(self, key: Key, delta: TokenDelta, *, begins: bool) -> list[dict[str, Any]]:
        content: dict[str, Any] = {"role": "assistant"} if begins else {}
        if begins or delta.text:
            content["content"] = delta.text
        if not (content or self._has_news(delta)):
            return []
        return [self._choice(delta.index, delta, {"delta": content}, self._logprobs(delta))]

    def beside_choices(self, deltas: Deltas) -> dict[str, Any]:
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return {}
        rows = deltas[0, 0].prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs_body(self.service.tokenizer, rows, num_top=num_top)}

    def _logprobs(self, delta: TokenDelta) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        return chat_logprobs(self.service.tokenizer, delta.logprobs, num_top=self.body.top_logprobs or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A conversation that is ready to be sent to a replica, and what reads its answer."""

    request: GenerateRequest
    use: ToolUse | None = None  # the tools that may be called
    # None where the answer is all text, whatever it says
    make_reader: Callable[[], Reader] | None = None
    make_count: Callable[[], ReasoningCount] | None = None  # None where the model does not reason
    shows_reasoning: bool = True
    promise: SchemaPromise | None = None  # of the content, if it was asked for by a schema

    def new_reader(self) -> Reader:
        """Make the reader of one choice's text."""
        return TextReader() if self.make_reader is None else self.make_reader()

    def new_reading(self) -> ChoiceReading:
        """Make the state of reading one choice: its parts, and how many tokens were reasoning."""
        count = None if self.make_count is None else self.make_count()
        return ChoiceReading(self.new_reader(), count, shows_reasoning=self.shows_reasoning)


@dataclass(frozen=True, kw_only=True)
class ChatPartsForm(ChatForm):
    """The form of a chat completion with tool calls or reasoning."""

    prepared: Prepared
    read: dict[int, ChoiceReading] = field(default_factory=dict)  # by choice

    @property
    def only_text(self) -> bool:
        return False

    def usage(self, deltas: Deltas) -> dict[str, Any]:
        return usage_body(deltas, num_reasoning=sum(each.num_reasoning for each in self.read.values()))

    def choice(self, key: Key, delta: TokenDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for part in self._parts(delta):
            match part:
                case TextPart(text):
                    message["content"] = (message["content"] or "") + text
                case ReasoningPart(text):
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case CallPart():
                    message.setdefault("tool_calls", []).append(self._call(delta.index, part))
                case ArgumentsPart(index, text):
                    message["tool_calls"][index]["function"]["arguments"] += text
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        return self._with_reason(self._choice(delta.index, delta, {"message": message}, self._logprobs(delta)), delta)

    def chunks(self, key: Key, delta: TokenDelta, *, begins: bool) -> list[dict[str, Any]]:
        contents = [self._content(delta.index, part) for part in self._parts(delta)]
        if begins:
            contents[:1] = [{"role": "assistant", **(contents[0] if contents else {})}]
        if not contents and (delta.logprobs or (self.body.return_token_ids and delta.token_ids)):
            contents = [{}]
        first, later = replace(delta, finish=None), replace(delta, finish=None, token_ids=(), logprobs=())
        made = [
            self._choice(delta.index, each, {"delta": content}, self._logprobs(each))
            for content, each in zip(contents, [first, *[later] * len(contents)], strict=False)
        ]
        if delta.finish is not None:  # in an event of its own, as OpenAI's
            last = replace(later, finish=delta.finish)
            made.append(self._with_reason(self._choice(delta.index, last, {"delta": {}}, self._logprobs(last)), delta))
        return made

    def _parts(self, delta: TokenDelta) -> list[Part]:
        if delta.index not in self.read:
            self.read[delta.index] = self.prepared.new_reading()
        return self.read[delta.index].read(delta)

    def _content(self, choice: int, part: Part) -> dict[str, Any]:
        match part:
            case TextPart(text):
                return {"content": text}
            case ReasoningPart(text):
                return {"reasoning_content": text}
            case CallPart(index):
                return {"tool_calls": [{"index": index, **self._call(choice, part)}]}
            case ArgumentsPart(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, choice: int, part: CallPart) -> dict[str, Any]:
        name = call_id(self.prepared.request.rid, choice, part.index)
        return {"id": name, "type": "function", "function": {"name": part.name, "arguments": ""}}

    def _with_reason(self, choice: dict[str, Any], delta: TokenDelta) -> dict[str, Any]:
        """Say that calls ended it; where tool_choice names the tool, it is "stop", as at OpenAI."""
        stopped = delta.finish is not None and delta.finish.reason is FinishReason.STOP
        use = self.prepared.use
        if stopped and self.read[delta.index].num_calls and not (use is not None and use.choice == "named"):
            choice["finish_reason"] = "tool_calls"
        return choice


async def prepare(request: Request, body: ChatRequest, name: str) -> Prepared:
    """Check and tokenise a conversation, of this endpoint or of another that has converted its body to one.

    Raises: InvalidRequest, PromptTooLong, UnknownModel, Busy, Overloaded, TooManyForms, ClientGone.
    """
    service = service_of(request)
    check_model(service, body.model)
    _refuse(body)
    num_prompt, num_top = logprobs_wanted(body), body.top_logprobs or 0
    [masks] = masks_of(service, [body])
    use = tools_of(body)
    whole = await service.encode_chat(body.messages, use=use, **template_options(body))
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    ids = truncated(service, whole, body.truncate_prompt_tokens, max_new_tokens=getattr(body, limit_name))
    limit = output_limit(service, len(ids), getattr(body, limit_name))
    form = await form_asked(request, body) if asks_form(body) else None
    promise = None if form is None or (use is not None and use.must_call) else form.promise
    asked = GenerateRequest(
        rid=new_rid(name),
        token_ids=ids,
        sampling=openai_sampling(body, max_new_tokens=limit, masks=masks, form=form),
        cache_salt=salt_of(body.cache_salt),
        priority=body.priority or 0,
        deadline_s=body.timeout,
        return_logprobs=bool(body.logprobs),
        top_logprobs=max(num_top, num_prompt or num_top),
        prompt_logprobs_from=None if num_prompt is None else 0,
    )
    checked(service, asked, names={"prompt": "messages", "max_tokens": limit_name})
    output = service.prompting.output
    prepared = Prepared(request=asked, use=use, promise=promise)
    return prepared if use is None and output.reasoning is None else await _read_in_parts(request, body, prepared)


async def _read_in_parts(request: Request, body: ChatRequest, prepared: Prepared) -> Prepared:
    """Add what reads calls and reasoning, and what holds the answer to the calls that were asked for."""
    service = service_of(request)
    output, tokenizer = service.prompting.output, service.tokenizer
    asked, use, promise = prepared.request, prepared.use, prepared.promise
    prompt_end = tokenizer.decode(asked.token_ids[-_PROMPT_END:], skip_special_tokens=False)
    is_open, after = output.opens_in_prompt(prompt_end), output.before_answer(prompt_end)
    sampling = asked.sampling
    constraint = sampling.constraint
    if use is not None:
        constraint = await tools_asked(request, use, content=constraint)
    if constraint is not None:
        opens = None if is_open else output.reasoning_token(tokenizer.id_of)
        sampling = replace(sampling, constraint=replace(constraint, after=after, opens=opens))
    if output.needs_special:
        sampling = replace(sampling, skip_special_tokens=False)
    reader = partial(
        output.reader,
        schemas=None if use is None else use.schemas,
        must_call=use is not None and use.must_call,
        reasoning_open=is_open,
        separate_reasoning=body.separate_reasoning is not False,
    )
    count = None
    if output.reasoning is not None:
        pieces = tokenizer.pieces(skip_special_tokens=False)
        count = partial(ReasoningCount, pieces, output.reasoning, is_open=is_open)
    return replace(
        prepared,
        request=replace(asked, sampling=sampling),
        make_reader=reader,
        make_count=count,
        shows_reasoning=body.include_reasoning is not False,
        promise=None if promise is None else replace(promise, after=after),
    )


async def _answer(request: Request, body: ChatRequest, name: str) -> Answer:
    prepared = await prepare(request, body, name)
    answer_id = f"chatcmpl-{name}"
    of_body: dict[str, Any] = {
        "service": service_of(request),
        "body": body,
        "answer_id": answer_id,
        "created": int(time.time()),
        "has_logprobs": prepared.request.return_logprobs,
    }
    form = ChatForm(**of_body) if prepared.make_reader is None else ChatPartsForm(**of_body, prepared=prepared)
    return Answer(requests=[prepared.request], form=form, answer_id=answer_id, promise=prepared.promise)


def template_options(body: TemplateFields) -> dict[str, Any]:
    """Collect the template's variables; a field of the body wins over a variable of the same name.

    Raises: InvalidRequest for a reserved name.
    """
    options = dict(body.chat_template_kwargs or {})
    taken = sorted(_TAKEN & options.keys())
    if taken:
        raise InvalidRequest(f"chat_template_kwargs may not set {taken}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    for name, value in (
        ("add_generation_prompt", body.add_generation_prompt),
        ("continue_final_message", body.continue_final_message),
    ):
        given = options.pop(name, None) if value is None else value
        if given is not None and not isinstance(given, bool):
            raise InvalidRequest(
                f"chat_template_kwargs: {name} must be true or false, got {str(given)[:64]!r}",
                param="chat_template_kwargs",
            )
        options[name] = given
    continues = bool(options["continue_final_message"])
    generates = not continues if options["add_generation_prompt"] is None else options["add_generation_prompt"]
    return {**options, "continue_final_message": continues, "add_generation_prompt": generates}


def tools_of(body: TemplateFields) -> ToolUse | None:
    """Read the tools of a body; None where none may be called. Raises: InvalidRequest, also for the old form."""
    if body.functions or body.function_call not in (None, "none", "auto"):
        name = "functions" if body.functions else "function_call"
        raise InvalidRequest(f"{name}: the old form of tools is not supported; use tools and tool_choice", param=name)
    if not body.tools and body.tool_choice is None:
        return None
    return tool_use(body.tools, body.tool_choice, getattr(body, "parallel_tool_calls", None))


def _refuse(body: ChatRequest) -> None:
    refuse_unsupported(body, echo=None, best_of=1, add_special_tokens=None)
    if body.modalities not in (None, ["text"]):
        raise InvalidRequest(f"modalities: {body.modalities} is not supported; supported: ['text']", param="modalities")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
