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
from deployments.http.constraints import held_to
from deployments.http.convert import Job, asks_form, logprobs_wanted, masks_of, openai_sampling, refuse_unsupported
from deployments.http.openai_format import OpenAIForm, chat_logprobs, prompt_logprobs_body
from deployments.http.service import Service
from deployments.http.streaming import Answer, Change, Form, Key
from deployments.output.output_format import Thought
from deployments.output.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from deployments.output.reading import ChoiceReading, call_id
from deployments.output.reasoning import ReasoningCount
from deployments.output.tools import ToolUse, tool_use
from deployments.output.validation import FormAsked, SchemaPromise
from replicas.errors import InvalidRequest
from replicas.types import FinishReason, GenerateRequest, TokenDelta

router = APIRouter(route_class=Route)
# arguments of `Service.encode_chat` and `Tokenizer.chat` beside the template's variables
_TAKEN = frozenset({"self", "messages", "tools", "check", "marks", "use"})


@router.post("/v1/chat/completions", **gives("OpenAI's `chat.completion`", *RUN, 410, stream=EVENT_STREAM))
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Continue a chat, streaming or not."""
    name = name_of(request, body.rid)
    prepared = await prepare(request, body, name)
    form = ChatForm.of(prepared.job, body, has_logprobs=prepared.request.return_logprobs, prepared=prepared)
    return await prepared.answer(form, form.answer_id).respond(request, streams=body.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A conversation that is ready to be sent to a replica, and what reads its answer."""

    job: Job
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

    prefix = "chatcmpl"
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
        return chat_logprobs(self.job.service.tokenizer, delta.logprobs, num_top=num_top, by_id=by_id)

    def beside_choices(self, choices: Sequence[Change]) -> dict[str, Any]:
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return {}
        rows = choices[0].delta.prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs_body(self.job.service.tokenizer, rows, num_top=num_top)}

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


async def prepare(request: Request, body: ChatRequest, name: str, *, most_tokens: int | None = None) -> Prepared:
    """Make a request of a conversation, of this endpoint or of another that has converted its body to one.

    Args:   most_tokens: of the output, where the body gives no limit; the context may leave fewer.
    Raises: InvalidRequest, PromptTooLong, UnknownModel, Busy, Overloaded, TooManyForms, ClientGone.
    """
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    job = await Job.of(request, body, name, prompt="messages", max_tokens=limit_name)
    service, output = job.service, job.service.prompting.output
    _refuse(body)
    num_prompt, num_top = logprobs_wanted(body), body.top_logprobs or 0
    [masks] = masks_of(service, [body])
    use, options = tools_of(body), template_options(body)
    tools = () if use is None else [tool.body for tool in use.tools]
    whole = await service.encode_chat(body.messages, use=use, **options)
    ids, limit = job.fit(whole, body.truncate_prompt_tokens, getattr(body, limit_name), most_tokens)
    if len(ids) == len(whole):  # else its messages do not begin where those of the turn before do
        request.state.arrival.parts = service.dispatcher.prompts.parts(body.messages, tools)
    has_parts, thought = use is not None or output.reasoning is not None, Thought()
    if has_parts:
        thought = output.thought(
            lambda length: service.tokenizer.decode(ids[-length:], skip_special_tokens=False), len(ids),
            continues=options["continue_final_message"],
        )  # fmt: skip
    held = await held_to(request, body, use, thought) if use is not None or asks_form(body) else FormAsked()
    sampling = openai_sampling(
        body, service.model.sampling, max_new_tokens=limit, masks=masks, constraint=held.constraint,
        shows_special=has_parts and output.needs_special,
    )  # fmt: skip
    asked = job.request(
        ids, sampling, return_logprobs=bool(body.logprobs), top_logprobs=max(num_top, num_prompt or num_top),
        prompt_logprobs_from=None if num_prompt is None else 0,
    )  # fmt: skip
    return Prepared(
        job=job, request=asked, use=use, new_reading=_reading(service, body, use, thought) if has_parts else None,
        promise=held.promise, calls_of=f"{opening_of(request).digits}-{name}",
    )  # fmt: skip


def _reading(service: Service, body: ChatRequest, use: ToolUse | None, thought: Thought) -> Callable[[], ChoiceReading]:
    """Return what makes the reader of each choice, for calls and reasoning."""
    output, pieces = service.prompting.output, service.tokenizer.pieces(skip_special_tokens=False)
    reader = partial(
        output.reader,
        schemas=None if use is None else use.schemas,
        must_call=use is not None and use.must_call,
        reasoning_open=thought.is_open,
        separate_reasoning=body.separate_reasoning is not False,
    )

    def new_reading() -> ChoiceReading:
        form = output.reasoning
        count = None if form is None else ReasoningCount(pieces, form, is_open=thought.is_open)
        return ChoiceReading(reader(), count, shows_reasoning=body.include_reasoning is not False)

    return new_reading


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
