"""POST /v1/completions: one or many prompts, text or token ids, streaming or not.

Owns:      the form of a text completion.
Invariant: choice ``i * n + j`` is choice j of prompt i; every chunk has a choice, except the usage
           chunk that was asked for.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.dispatch.rids import new_rid
from deployments.http.body import read_body
from deployments.http.convert import (
    check_count,
    check_model,
    check_together,
    checked,
    logprobs_wanted,
    masks_of,
    openai_sampling,
    output_limit,
    prompts_of_ids,
    refuse_response_format,
    refuse_unsupported,
    salt_of,
    truncated,
)
from deployments.http.openai_format import (
    TextOffsets,
    completion_logprobs,
    finish_reason,
    matched_stop,
    prompt_logprobs_body,
    usage_body,
)
from deployments.http.openai_types import CompletionRequest
from deployments.http.request_ids import name_of
from deployments.http.routed import Routed, routed_of
from deployments.http.service import Service, service_of
from deployments.http.streaming import DONE, JsonAnswer, TextEvents, answer, collected, made, merged, sse, stream
from replicas.errors import InvalidRequest
from replicas.types import GenerateRequest, TokenDelta, TokenIds, Usage

router = APIRouter()
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    service = service_of(request)
    body = await read_body(request, CompletionRequest, max_bytes=service.max_body_bytes)
    job = await _job(service, body, name_of(request, body.rid))
    routed = routed_of(request, job.answer_id)
    return await (stream(request, job.events(routed)) if body.stream else answer(request, job.whole(routed)))


@dataclass(frozen=True, kw_only=True)
class CompletionJob:
    """One request on its way to one answer."""

    service: Service
    body: CompletionRequest
    name: str
    requests: list[GenerateRequest]
    prompts: list[str]  # the text to echo for each request; empty without echo
    created: int

    @property
    def answer_id(self) -> str:
        return f"cmpl-{self.name}"

    async def whole(self, routed: Routed) -> Response:
        done = await collected(merged([routed.stream(request) for request in self.requests]))
        return await made(lambda: JsonAnswer(self._whole(done)), done.values())

    def _whole(self, done: dict[tuple[int, int], TokenDelta]) -> dict[str, Any]:
        choices = [
            self._choice(number, delta, self.prompts[number] + delta.text, self._offsets(number))
            for (number, _), delta in done.items()
        ]
        return self._body(choices, usage_body({key: delta.usage for key, delta in done.items()}))

    async def events(self, routed: Routed) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        only_text = not (continuous or self.body.return_token_ids or self.body.logprobs is not None)
        usages: dict[tuple[int, int], Usage] = {}
        offsets: dict[tuple[int, int], TextOffsets] = {}
        plain: dict[tuple[int, int], TextEvents] = {}
        async for number, delta in merged([routed.stream(request) for request in self.requests]):
            key = (number, delta.index)
            begins = key not in usages
            usages[key] = delta.usage
            text = (self.prompts[number] if begins else "") + delta.text
            if not (text or delta.finish or delta.logprobs or (self.body.return_token_ids and delta.token_ids)):
                continue
            if only_text and delta.finish is None:
                if key not in plain:
                    plain[key] = self._text_events(number, delta)
                yield plain[key].event(text)
                continue
            if key not in offsets:
                offsets[key] = self._offsets(number)
            usage = usage_body(usages) if continuous else None
            yield await made(partial(self._event, number, delta, text, offsets[key], usage), [delta])
        if options is not None and options.include_usage:
            yield sse(self._body([], usage_body(usages)))
        yield DONE

    def _event(
        self, number: int, delta: TokenDelta, text: str, offsets: TextOffsets, usage: dict[str, Any] | None
    ) -> bytes:
        return sse(self._body([self._choice(number, delta, text, offsets)], usage))

    def _text_events(self, number: int, delta: TokenDelta) -> TextEvents:
        """Of the choice that ``delta`` is of, while it has nothing but text."""
        return TextEvents(lambda text: self._body([self._choice(number, delta, text)], None))

    def _offsets(self, number: int) -> TextOffsets:
        skip = self.requests[number].sampling.skip_special_tokens
        echo = self.prompts[number] if self.body.echo else None
        return TextOffsets(self.service.tokenizer, echo=echo, skip_special_tokens=skip)

    def _choice(self, number: int, delta: TokenDelta, text: str, offsets: TextOffsets | None = None) -> dict[str, Any]:
        """``offsets``: of the choice, which has been told every token before this delta; needed for logprobs."""
        logprobs = None
        if self.body.logprobs is not None and offsets is not None:
            prompt = delta.prompt_logprobs if self.body.echo else ()
            logprobs = completion_logprobs(
                self.service.tokenizer,
                (*prompt, *delta.logprobs),
                num_top=self.body.logprobs,
                offsets=(offsets.of_prompt([each.token_id for each in prompt]) if prompt else [])
                + offsets.of_output([each.token_id for each in delta.logprobs]),
            )
        choice: dict[str, Any] = {
            "index": number * self.requests[number].sampling.n + delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(delta.finish),
            "matched_stop": matched_stop(delta.finish),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if self.body.prompt_logprobs is not None:
            tokenizer, num_top = self.service.tokenizer, self.body.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs_body(tokenizer, delta.prompt_logprobs, num_top=num_top)
        return choice

    def _body(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        body = {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.model.name,
            "choices": choices,
            "system_fingerprint": None,
        }
        return body if usage is None else {**body, "usage": usage}


async def _job(service: Service, body: CompletionRequest, name: str) -> CompletionJob:
    check_model(service, body.model)
    _refuse(body)
    num_prompt = logprobs_wanted(body)
    [masks] = masks_of(service, [body])
    requests, prompts = [], []
    for given, whole in await _prompts(service, body):
        asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        ids = truncated(service, whole, body.truncate_prompt_tokens, max_new_tokens=asked)
        text = given if len(ids) == len(whole) else None
        limit = output_limit(service, len(ids), body.max_tokens, DEFAULT_MAX_TOKENS)
        scores_prompt = num_prompt is not None or (body.echo and body.logprobs is not None)
        request = GenerateRequest(
            rid=new_rid(name),
            token_ids=ids,
            sampling=openai_sampling(body, max_new_tokens=limit, masks=masks),
            cache_salt=salt_of(body.cache_salt),
            priority=body.priority or 0,
            deadline_s=body.timeout,
            return_logprobs=body.logprobs is not None,
            top_logprobs=max(body.logprobs or 0, num_prompt or 0),
            prompt_logprobs_from=0 if scores_prompt else None,
        )
        requests.append(checked(service, request, names={}))
        prompts.append("" if not body.echo else text if text is not None else service.tokenizer.decode(ids, False))
        await asyncio.sleep(0)  # to make the echo of 256 prompts takes long
    check_together(requests)
    return CompletionJob(
        service=service, body=body, name=name, requests=requests, prompts=prompts, created=int(time.time())
    )


def _refuse(body: CompletionRequest) -> None:
    refuse_unsupported(body, suffix=None)
    refuse_response_format(body.response_format)
    n = 1 if body.n is None else body.n
    if body.best_of not in (None, 1, n):
        raise InvalidRequest(f"best_of: {body.best_of} is not supported; leave it out or give {n}", param="best_of")
    if body.logprobs is not None and not 0 <= body.logprobs <= 20:
        raise InvalidRequest(f"logprobs: must be between 0 and 20, got {body.logprobs}", param="logprobs")


async def _prompts(service: Service, body: CompletionRequest) -> list[tuple[str | None, TokenIds]]:
    """(text if it came as text, ids) of each prompt."""
    prompt = body.prompt
    if prompt is None:
        raise InvalidRequest("prompt: is missing; give a string, a list of strings, or token ids", param="prompt")
    rows = prompt if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)) else [prompt]
    check_count(len(rows), param="prompt")
    must_fit = body.truncate_prompt_tokens is None
    special = True if body.add_special_tokens is None else body.add_special_tokens
    texts = [each for each in rows if isinstance(each, str)]
    if texts:
        encoded = await service.encode_all(texts, add_special_tokens=special, must_fit=must_fit)
        return list(zip(texts, encoded, strict=True))
    lists = [each for each in rows if isinstance(each, list)]
    ids = await prompts_of_ids(service, lists, param="prompt", must_fit=must_fit)
    return [(None, each) for each in ids]
