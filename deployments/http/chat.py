"""POST /v1/chat/completions: a conversation through the model's chat template, streaming or not.

Owns:      the form of a chat completion.
Never:     ignores tools or a response format: what the model would not be held to is refused.
Invariant: each choice's first chunk carries the role, and its last the finish reason.
"""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.dispatch.rids import new_rid
from deployments.http.body import read_body
from deployments.http.convert import (
    check_model,
    checked,
    logprobs_wanted,
    masks_of,
    openai_sampling,
    output_limit,
    refuse_response_format,
    refuse_unsupported,
    salt_of,
    truncated,
)
from deployments.http.openai_format import chat_logprobs, finish_reason, matched_stop, prompt_logprobs_body, usage_body
from deployments.http.openai_types import ChatRequest, TokenizeRequest
from deployments.http.request_ids import name_of
from deployments.http.routed import Routed, routed_of
from deployments.http.service import Service, service_of
from deployments.http.streaming import DONE, JsonAnswer, TextEvents, answer, collected, made, merged, sse, stream
from replicas.errors import InvalidRequest
from replicas.types import GenerateRequest, TokenDelta, Usage

router = APIRouter()
_TAKEN = frozenset({"self", "messages", "tools", "check"})  # arguments beside the template's variables


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    body = await read_body(request, ChatRequest, max_bytes=service.max_body_bytes)
    job = await _job(service, body, name_of(request, body.rid))
    routed = routed_of(request, job.answer_id)
    return await (stream(request, job.events(routed)) if body.stream else answer(request, job.whole(routed)))


@dataclass(frozen=True, kw_only=True)
class ChatJob:
    """One request on its way to one answer."""

    service: Service
    body: ChatRequest
    name: str
    request: GenerateRequest
    created: int

    @property
    def answer_id(self) -> str:
        return f"chatcmpl-{self.name}"

    async def whole(self, routed: Routed) -> Response:
        done = await collected(merged([routed.stream(self.request)]))
        return await made(lambda: JsonAnswer(self._whole(done)), done.values())

    def _whole(self, done: dict[tuple[int, int], TokenDelta]) -> dict[str, Any]:
        choices = [
            self._choice(delta, "message", {"role": "assistant", "content": delta.text}) for delta in done.values()
        ]
        body = self._body("chat.completion", choices)
        if self.body.prompt_logprobs is not None:
            tokenizer, num_top = self.service.tokenizer, self.body.prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs_body(tokenizer, done[0, 0].prompt_logprobs, num_top=num_top)
        return {**body, "usage": usage_body({key: delta.usage for key, delta in done.items()})}

    async def events(self, routed: Routed) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        only_text = not (continuous or self.body.return_token_ids or self.body.logprobs)
        usages: dict[tuple[int, int], Usage] = {}
        plain: dict[int, TextEvents] = {}  # by choice
        async for _, delta in merged([routed.stream(self.request)]):
            begins = (0, delta.index) not in usages
            usages[0, delta.index] = delta.usage
            content: dict[str, Any] = {"role": "assistant", "content": delta.text} if begins else {}
            if delta.text:
                content["content"] = delta.text
            if not (content or delta.finish or delta.logprobs or (self.body.return_token_ids and delta.token_ids)):
                continue
            if only_text and not begins and delta.finish is None:
                if delta.index not in plain:
                    plain[delta.index] = self._text_events(delta)
                yield plain[delta.index].event(delta.text)
                continue
            chunk = self._body("chat.completion.chunk", [self._choice(delta, "delta", content)])
            yield sse({**chunk, "usage": usage_body(usages)} if continuous else chunk)
        if options is not None and options.include_usage:
            yield sse({**self._body("chat.completion.chunk", []), "usage": usage_body(usages)})
        yield DONE

    def _text_events(self, delta: TokenDelta) -> TextEvents:
        """Of the choice that ``delta`` is of, while it has nothing but text."""
        return TextEvents(
            lambda text: self._body("chat.completion.chunk", [self._choice(delta, "delta", {"content": text})])
        )

    def _choice(self, delta: TokenDelta, part: str, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs:
            logprobs = chat_logprobs(self.service.tokenizer, delta.logprobs, num_top=self.body.top_logprobs or 0)
        choice: dict[str, Any] = {
            "index": delta.index,
            part: content,
            "logprobs": logprobs,
            "finish_reason": finish_reason(delta.finish),
            "matched_stop": matched_stop(delta.finish),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.service.model.name,
            "choices": choices,
            "system_fingerprint": None,
        }


async def _job(service: Service, body: ChatRequest, name: str) -> ChatJob:
    check_model(service, body.model)
    _refuse(body)
    num_prompt = logprobs_wanted(body)
    [masks] = masks_of(service, [body])
    whole = await service.encode_chat(body.messages, **template_options(body))
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    ids = truncated(service, whole, body.truncate_prompt_tokens, max_new_tokens=getattr(body, limit_name))
    limit = output_limit(service, len(ids), getattr(body, limit_name))
    request = GenerateRequest(
        rid=new_rid(name),
        token_ids=ids,
        sampling=openai_sampling(body, max_new_tokens=limit, masks=masks),
        cache_salt=salt_of(body.cache_salt),
        priority=body.priority or 0,
        deadline_s=body.timeout,
        return_logprobs=bool(body.logprobs),
        top_logprobs=max(body.top_logprobs or 0, num_prompt or 0),
        prompt_logprobs_from=None if num_prompt is None else 0,
    )
    return ChatJob(
        service=service,
        body=body,
        name=name,
        request=checked(service, request, names={"prompt": "messages", "max_tokens": limit_name}),
        created=int(time.time()),
    )


def template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The template's variables; what is a field of the body too may come either way, and the body's own field wins.

    Raises: InvalidRequest for a name that is not the template's to have.
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


def refuse_tools(body: ChatRequest | TokenizeRequest) -> None:
    """Raises: InvalidRequest for what is not done: tools that an answer might have to use, a call without any, ..."""
    refuse_unsupported(body, **({} if body.tool_choice == "none" else {"tools": None, "functions": None}))
    for name, choice in (("tool_choice", body.tool_choice), ("function_call", body.function_call)):
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"{name}: asks for a call, and there are no tools; leave it out", param=name)


def _refuse(body: ChatRequest) -> None:
    refuse_tools(body)
    refuse_unsupported(body, echo=None, best_of=1, add_special_tokens=None)
    refuse_response_format(body.response_format)
    if body.modalities not in (None, ["text"]):
        raise InvalidRequest(f"modalities: {body.modalities} is not supported; supported: ['text']", param="modalities")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
