"""POST /v1/chat/completions: a conversation through the model's chat template, streaming or not.

Owns:      the form of a chat completion.
Never:     ignores tools: it refuses a constraint that it cannot enforce.
Invariant: each choice's first chunk carries the role, and its last the finish reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.http.api_document import EVENT_STREAM, RUN, gives
from deployments.http.arrivals import name_of, opening_of
from deployments.http.bodies import ChatRequest, Route, TemplateFields
from deployments.http.constraints import form_asked, tools_asked
from deployments.http.convert import (
    asked_adapter,
    asks_form,
    checked,
    logprobs_wanted,
    masks_of,
    openai_sampling,
    output_limit,
    refuse_unsupported,
    salt_of,
    truncated,
)
from deployments.http.openai_format import OpenAIForm, chat_logprobs, prompt_logprobs_body
from deployments.http.service import service_of
from deployments.http.streaming import Answer, Change, Form, Key
from deployments.output.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from deployments.output.reading import ChoiceReading, call_id
from deployments.output.reasoning import ReasoningCount
from deployments.output.tools import ToolUse, tool_use
from deployments.output.validation import SchemaPromise
from deployments.record.rids import new_rid
from replicas.errors import InvalidRequest
from replicas.types import FinishReason, GenerateRequest, TokenDelta

router = APIRouter(route_class=Route)
# arguments of `Service.encode_chat` and `Tokenizer.chat` beside the template's variables
_TAKEN = frozenset({"self", "messages", "tools", "check", "marks", "use"})


@router.post("/v1/chat/completions", **gives("OpenAI's `chat.completion`", *RUN, 410, stream=EVENT_STREAM))
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Continue a chat, streaming or not."""
    answer = await _answer(request, body, name_of(request, body.rid))
    return await answer.respond(request, streams=body.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A conversation that is ready to be sent to a replica, and what reads its answer."""

    request: GenerateRequest
    use: ToolUse | None = None  # the tools that may be called
    # of each choice; None where the answer is all text, whatever it says
    new_reading: Callable[[], ChoiceReading] | None = None
    promise: SchemaPromise | None = None  # of the content, if it was asked for by a schema
    calls_of: str  # what the ids of calls are made of

    def answer(self, form: Form, answer_id: str) -> Answer:
        """Return the answer to it in ``form``."""
        return Answer(
            requests=[self.request], form=form, answer_id=answer_id, promise=self.promise, new_reading=self.new_reading
        )


@dataclass(frozen=True, kw_only=True)
class ChatForm(OpenAIForm):
    """The form of a chat completion: each choice is a message, or the new part of one."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    body: ChatRequest
    prepared: Prepared

    @property
    def only_text(self) -> bool:
        return self.prepared.new_reading is None and super().only_text

    def choice(self, change: Change) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for part in change.parts:
            match part:
                case TextPart(text):
                    message["content"] = (message["content"] or "") + text
                case ReasoningPart(text):
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case CallPart():
                    message.setdefault("tool_calls", []).append(self._call(change, part))
                case ArgumentsPart(index, text):
                    message["tool_calls"][index]["function"]["arguments"] += text
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        return self._choice(change, change.delta, {"message": message})

    def chunks(self, change: Change) -> list[dict[str, Any]]:
        first, role = change.delta, {"role": "assistant"} if change.begins else {}
        if self.prepared.new_reading is None:
            content = {**role, "content": first.text} if first.text or role else {}
            return [self._choice(change, first, {"delta": content})] if content or self.has_news(first) else []
        ends = first.finish is not None  # in an event of its own, as OpenAI's
        if ends:
            first = replace(first, finish=None)
        contents = [self._content(change, part) for part in change.parts]
        if role:
            contents[:1] = [{**role, **(contents[0] if contents else {})}]
        if not contents and self.has_news(first):
            contents = [{}]
        made = [self._choice(change, first, {"delta": contents[0]})] if contents else []
        if len(contents) > 1 or ends:
            later = replace(first, token_ids=(), logprobs=())
            made += [self._choice(change, later, {"delta": content}) for content in contents[1:]]
        if ends:
            made.append(self._choice(change, replace(later, finish=change.delta.finish), {"delta": {}}))
        return made

    def logprobs(self, key: Key, delta: TokenDelta) -> dict[str, Any]:
        num_top, by_id = self.body.top_logprobs or 0, bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(self.service.tokenizer, delta.logprobs, num_top=num_top, by_id=by_id)

    def beside_choices(self, choices: Sequence[Change]) -> dict[str, Any]:
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return {}
        rows = choices[0].delta.prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs_body(self.service.tokenizer, rows, num_top=num_top)}

    def _content(self, change: Change, part: Part) -> dict[str, Any]:
        match part:
            case TextPart(text):
                return {"content": text}
            case ReasoningPart(text):
                return {"reasoning_content": text}
            case CallPart(index):
                return {"tool_calls": [{"index": index, **self._call(change, part)}]}
            case ArgumentsPart(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, change: Change, part: CallPart) -> dict[str, Any]:
        name = call_id(self.prepared.calls_of, change.delta.index, part.index)
        return {"id": name, "type": "function", "function": {"name": part.name, "arguments": ""}}

    def _choice(self, change: Change, delta: TokenDelta, content: dict[str, Any]) -> dict[str, Any]:
        """Calls are the reason of its end; where tool_choice names the tool, it is "stop", as at OpenAI."""
        finish, use, reason = delta.finish, self.prepared.use, None
        if change.num_calls and finish is not None and finish.reason is FinishReason.STOP:
            reason = None if use is not None and use.choice == "named" else "tool_calls"
        return self.choice_body(delta.index, change.key, delta, content, reason)


async def prepare(request: Request, body: ChatRequest, name: str) -> Prepared:
    """Check and tokenise a conversation, of this endpoint or of another that has converted its body to one.

    Raises: InvalidRequest, PromptTooLong, UnknownModel, Busy, Overloaded, TooManyForms, ClientGone.
    """
    service = service_of(request)
    adapter = await asked_adapter(request, body.model, body.lora_path)
    _refuse(body)
    num_prompt, num_top = logprobs_wanted(body), body.top_logprobs or 0
    [masks] = masks_of(service, [body])
    use = tools_of(body)
    whole = await service.encode_chat(body.messages, use=use, **template_options(body))
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    ids = truncated(request, whole, body.truncate_prompt_tokens, max_new_tokens=getattr(body, limit_name))
    limit = output_limit(request, len(ids), getattr(body, limit_name))
    form = await form_asked(request, body) if asks_form(body) else None
    promise = None if form is None or (use is not None and use.must_call) else form.promise
    asked = GenerateRequest(
        rid=new_rid(name),
        token_ids=ids,
        sampling=openai_sampling(body, service.model.sampling, max_new_tokens=limit, masks=masks, form=form),
        cache_salt=salt_of(body.cache_salt),
        priority=body.priority or 0,
        deadline_s=body.timeout,
        return_logprobs=bool(body.logprobs),
        top_logprobs=max(num_top, num_prompt or num_top),
        prompt_logprobs_from=None if num_prompt is None else 0,
        adapter=adapter,
    )
    checked(request, asked, names={"prompt": "messages", "max_tokens": limit_name})
    output = service.prompting.output
    prepared = Prepared(request=asked, use=use, promise=promise, calls_of=f"{opening_of(request).digits}-{name}")
    return prepared if use is None and output.reasoning is None else await _read_in_parts(request, body, prepared)


async def _read_in_parts(request: Request, body: ChatRequest, prepared: Prepared) -> Prepared:
    """Add what reads calls and reasoning, and what holds the answer to the calls that were asked for."""
    service = service_of(request)
    output, tokenizer = service.prompting.output, service.tokenizer
    asked, use, promise = prepared.request, prepared.use, prepared.promise
    thought = output.thought(
        lambda length: tokenizer.decode(asked.token_ids[-length:], skip_special_tokens=False),
        len(asked.token_ids),
        continues=template_options(body)["continue_final_message"],
    )
    sampling = asked.sampling
    constraint = sampling.constraint
    if use is not None:
        constraint = await tools_asked(request, use, content=constraint)
    if constraint is not None:
        held = replace(constraint, after=thought.after, opens=thought.opens)
        sampling = replace(sampling, constraint=held)
    if output.needs_special:
        sampling = replace(sampling, skip_special_tokens=False)
    reader = partial(
        output.reader,
        schemas=None if use is None else use.schemas,
        must_call=use is not None and use.must_call,
        reasoning_open=thought.is_open,
        separate_reasoning=body.separate_reasoning is not False,
    )
    pieces = tokenizer.pieces(skip_special_tokens=False)

    def new_reading() -> ChoiceReading:
        form = output.reasoning
        count = None if form is None else ReasoningCount(pieces, form, is_open=thought.is_open)
        return ChoiceReading(reader(), count, shows_reasoning=body.include_reasoning is not False)

    return replace(
        prepared,
        request=replace(asked, sampling=sampling),
        new_reading=new_reading,
        promise=None if promise is None else replace(promise, after=thought.after),
    )


async def _answer(request: Request, body: ChatRequest, name: str) -> Answer:
    prepared = await prepare(request, body, name)
    answer_id = f"chatcmpl-{name}"
    form = ChatForm(
        service=service_of(request),
        model=service_of(request).name_of(prepared.request),
        body=body,
        answer_id=answer_id,
        created=opening_of(request).created,
        has_logprobs=prepared.request.return_logprobs,
        prepared=prepared,
    )
    return prepared.answer(form, answer_id)


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
    refuse_unsupported(body, "lora_path", "return_tokens_as_token_ids", echo=None, best_of=1, add_special_tokens=None)
    if body.modalities not in (None, ["text"]):
        raise InvalidRequest(f"modalities: {body.modalities} is not supported; supported: ['text']", param="modalities")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
