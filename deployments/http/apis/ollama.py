"""/api/chat, /api/generate, /api/tags and /api/version: Ollama's API, as a chat; a stream is lines of JSON.

Never:     loads, fetches or deletes a model: the one that is served answers. Drops what the model should see: images,
           and a prompt that is to pass no template, are refused. Runs anything for a request without a prompt, by which
           clients load a model.
Invariant: the last line alone is `done`, and has the counts and the tool calls, whose arguments are complete by then.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from deployments.http import bodies
from deployments.http.api_document import JSON_LINES, LINES, RUN, about, body_like, gives, said, shown
from deployments.http.apis.message_form import parsed_input
from deployments.http.apis.response_input import renamed
from deployments.http.arrivals import name_of
from deployments.http.bodies import ChatRequest, Route, WireType
from deployments.http.chat import prepare
from deployments.http.convert import adapters_of, refuse_unsupported
from deployments.http.http_errors import body_of
from deployments.http.service import service_of
from deployments.http.streaming import AnswerSoFar, Change, Form
from deployments.output.parts import ArgumentsPart, CallPart, ReasoningPart, TextPart
from replicas.errors import InvalidRequest
from replicas.types import FinishReason, SamplingParams

router = APIRouter(route_class=Route)
NS = 1_000_000_000


_SAME = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")


class OllamaOptions(WireType):
    """How tokens are chosen, and when to stop; other options of Ollama's have no effect."""

    __annotations__ = {
        **bodies.asked_fields(SamplingParams, *_SAME),
        "repeat_penalty": bodies.asked_fields(SamplingParams)["repetition_penalty"],
    }
    num_predict: Annotated[int, Field(ge=-2), shown(limit="context")] | None = said(
        "The most output tokens; below 0, and without it: what the context leaves."
    )
    top_k: bodies.TopK = None
    seed: bodies.Seed | None = said("The same seed, prompt and options give the same answer.")
    stop: bodies.StopTexts | None = said(bodies.STOPS)


class OllamaFields(WireType):
    """The fields that the bodies of both routes have."""

    model: bodies.Model = None
    stream: bool | None = said("false: one body. Without it: lines of JSON, a piece of the answer each.")
    options: OllamaOptions | None = said("How tokens are chosen, and when to stop.")
    format: Literal["", "json"] | bodies.Object | None = said("`json`, or a JSON schema that the output must fit.")
    think: bool | str | None = said("The template's `enable_thinking`, or its `reasoning_effort`.")
    keep_alive: float | str | None = said("Accepted, without effect: the model stays.")
    lora_path: bodies.LoraPath = None


class OllamaChatRequest(OllamaFields):
    """The body of /api/chat: a conversation, and the tools that may be called."""

    model_config = body_like({"messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 8}})

    messages: bodies.Conversation = about(bodies.CONVERSATION)
    tools: bodies.Tools | None = said("The functions that the model may call.")


class OllamaGenerateRequest(OllamaFields):
    """The body of /api/generate: one message, which is answered as a chat."""

    model_config = body_like({"prompt": "Hello", "options": {"num_predict": 8}})

    prompt: str = about("The user's message.", default="")
    system: str | None = said("The system message.")
    raw: bodies.Refused = None
    template: bodies.Refused = None
    suffix: bodies.Refused = None
    context: bodies.Refused = None
    images: bodies.Refused = None


@router.post("/api/chat", **gives("The answer, as Ollama's", *RUN, stream=JSON_LINES))
async def chat(request: Request, body: OllamaChatRequest) -> Response:
    """Continue a chat, as Ollama does."""
    if any(each.get("images") for each in body.messages):
        raise InvalidRequest("messages: images are not supported by this server", param="messages")
    return await _answered(request, body, body.messages, body.tools)


@router.post("/api/generate", **gives("The answer, as Ollama's", *RUN, stream=JSON_LINES))
async def generate(request: Request, body: OllamaGenerateRequest) -> Response:
    """Answer one message, as Ollama does."""
    system = [] if body.system is None else [{"role": "system", "content": body.system}]
    return await _answered(request, body, [*system, {"role": "user", "content": body.prompt}], None)


@router.get("/api/tags", **gives("The models, as Ollama lists them"))
async def tags(request: Request) -> Response:
    """List the served model, and the adapters of it that the caller may use, as Ollama does."""
    service = service_of(request)
    served = {"modified_at": _rfc3339(service.started_s), "details": {"family": service.model.model_type}}
    names = [service.model.name, *(each.name for each in await adapters_of(request))]
    return JSONResponse({"models": [{"name": name, "model": name, **served} for name in names]})


@router.get("/api/version", **gives("The version"))
async def version(request: Request) -> Response:
    """Show the version of this Manta, where Ollama's clients look."""
    return JSONResponse({"version": service_of(request).version})


async def _answered(
    request: Request, body: OllamaFields, messages: list[bodies.Object], tools: list[bodies.Object] | None
) -> Response:
    refuse_unsupported(body, "lora_path", raw=None, template=None, suffix=None, context=None, images=None)
    options = body.options or OllamaOptions()
    limit = -1 if options.num_predict is None else options.num_predict
    asked: dict[str, Any] = {name: getattr(options, name) for name in (*_SAME, "top_k", "seed", "stop")}
    asked["repetition_penalty"] = getattr(options, "repeat_penalty", None)
    if body.format:
        schema = {"type": "json_schema", "json_schema": {"name": "output", "schema": body.format, "strict": True}}
        asked["response_format"] = {"type": "json_object"} if body.format == "json" else schema
    if isinstance(body.think, bool):
        asked["chat_template_kwargs"] = {"enable_thinking": body.think}
    chat = ChatRequest(
        model=body.model, lora_path=body.lora_path, messages=messages, tools=tools,
        max_tokens=None if limit < 0 else limit, reasoning_effort=body.think if isinstance(body.think, str) else None,
        **asked,
    )  # fmt: skip
    service, name = service_of(request), name_of(request)
    try:
        prepared = await prepare(request, chat, name)
    except InvalidRequest as error:
        raise renamed(error, {"max_tokens": "num_predict"}) from error
    if isinstance(body, OllamaGenerateRequest) and not (body.prompt or body.system):
        return _loaded(service.name_of(prepared.request), streams=body.stream is not False)
    form = OllamaForm(model=service.name_of(prepared.request), is_chat=isinstance(body, OllamaChatRequest))
    return await prepared.answer(form, name).respond(request, streams=body.stream is not False)


def _loaded(model: str, *, streams: bool) -> Response:
    """Answer a request without a prompt, by which Ollama's clients load a model."""
    said = {"model": model, "created_at": _rfc3339(time.time()), "response": "", "done": True, "done_reason": "load"}
    return Response(json.dumps(said) + "\n", media_type=LINES) if streams else JSONResponse(said)


@dataclass(frozen=True, kw_only=True)
class OllamaForm(Form):
    """The form of an answer, which has one choice: each line has the new part of a message, or of a text."""

    is_lines = True

    model: str
    is_chat: bool
    begun_s: float = field(default_factory=time.monotonic)
    first_s: list[float] = field(default_factory=list)  # when the first line was made, once it was; not of a line alone
    calls: list[tuple[str, list[str]]] = field(default_factory=list)  # names and arguments, as far as they have come

    def whole(self, choices: Sequence[Change], so_far: AnswerSoFar) -> dict[str, Any]:
        return self._line(choices[0], so_far)

    def events(self, change: Change, so_far: AnswerSoFar) -> list[dict[str, Any]]:
        return [self._line(change, so_far)]

    def error_events(self, error: Exception) -> list[dict[str, Any]]:
        return [{"error": body_of(error)[1]["message"]}]

    def _line(self, change: Change, so_far: AnswerSoFar) -> dict[str, Any]:
        text = thought = ""
        for part in change.parts:
            match part:
                case TextPart(new):
                    text += new
                case ReasoningPart(new):
                    thought += new
                case CallPart():
                    self.calls.append((part.name, []))
                case ArgumentsPart(index, new):
                    self.calls[index][1].append(new)
        finish, now_s = change.delta.finish, time.monotonic()
        said: dict[str, Any] = {"thinking": thought} if thought else {}
        if finish is not None and self.calls:
            calls = [{"name": name, "arguments": parsed_input("".join(pieces))} for name, pieces in self.calls]
            said["tool_calls"] = [{"function": call} for call in calls]
        message = {"message": {"role": "assistant", "content": text, **said}}
        line = {"model": self.model, "created_at": _rfc3339(time.time()), "done": finish is not None,
                **(message if self.is_chat else {"response": text, **said})}  # fmt: skip
        if finish is None:
            if not self.first_s:
                self.first_s.append(now_s)
            return line
        since_s, prompt = self.begun_s, {}  # of a line alone: clients divide by its duration
        if self.first_s:
            [since_s] = self.first_s
            prompt = {"prompt_eval_duration": round(NS * (since_s - self.begun_s))}
        return {
            **line, "done_reason": "length" if finish.reason is FinishReason.LENGTH else "stop",
            "total_duration": round(NS * (now_s - self.begun_s)), "prompt_eval_count": so_far.tokens.prompt, **prompt,
            "eval_count": so_far.tokens.output, "eval_duration": round(NS * (now_s - since_s)),
        }  # fmt: skip


def _rfc3339(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat()
