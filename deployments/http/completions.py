"""POST /v1/completions: one or many prompts, text or token ids, streaming or not.

Owns:      the form of a text completion.
Invariant: choice ``i * n + j`` is choice j of prompt i; every chunk has a choice, except a requested usage chunk.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.http.api_document import EVENT_STREAM, RUN, gives
from deployments.http.arrivals import name_of
from deployments.http.bodies import CompletionRequest, Route
from deployments.http.constraints import form_asked
from deployments.http.convert import (
    Job,
    asked_of,
    asks_form,
    check_count,
    check_together,
    logprobs_wanted,
    masks_of,
    openai_sampling,
    prompts_of_ids,
    refuse_unsupported,
)
from deployments.http.openai_format import OpenAIForm, TextOffsets, completion_logprobs, prompt_logprobs_body
from deployments.http.service import Service
from deployments.http.streaming import Answer, Change, Key
from deployments.output.validation import FormAsked
from replicas.errors import InvalidRequest
from replicas.types import GenerateRequest, SamplingParams, TokenDelta, TokenIds

router = APIRouter(route_class=Route)
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", **gives("OpenAI's `text_completion`", *RUN, 410, stream=EVENT_STREAM))
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue texts, streaming or not."""
    answer = await _answer(request, body, name_of(request, body.rid))
    return await answer.respond(request, streams=body.stream)


@dataclass(frozen=True, kw_only=True)
class CompletionForm(OpenAIForm):
    """The form of a text completion: each choice is text, after its prompt if that is echoed."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"
    body: CompletionRequest
    requests: list[GenerateRequest]
    prompts: list[str]  # the text to echo for each request; empty without echo
    offsets: dict[Key, TextOffsets] = field(default_factory=dict)  # of the choices with logprobs that have begun

    def choice(self, change: Change) -> dict[str, Any]:
        return self._completion(change, self.prompts[change.key[0]] + change.delta.text)

    def chunks(self, change: Change) -> list[dict[str, Any]]:
        text = (self.prompts[change.key[0]] if change.begins else "") + change.delta.text
        return [self._completion(change, text)] if text or self.has_news(change.delta) else []

    def _completion(self, change: Change, text: str) -> dict[str, Any]:
        (number, index), delta = change.key, change.delta
        place = number * self.requests[number].sampling.n + index
        choice = self.choice_body(place, change.key, delta, {"text": text})
        num_top = self.body.prompt_logprobs
        if num_top is not None:
            rows = delta.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs_body(self.job.service.tokenizer, rows, num_top=num_top)
        return choice

    def logprobs(self, key: Key, delta: TokenDelta) -> dict[str, Any]:
        if key not in self.offsets:
            self.offsets[key] = self._offsets(key[0])
        offsets = self.offsets[key]
        prompt = delta.prompt_logprobs if self.body.echo else ()
        return completion_logprobs(
            self.job.service.tokenizer,
            (*prompt, *delta.logprobs),
            num_top=self.body.logprobs or 0,
            offsets=(offsets.of_prompt([each.token_id for each in prompt]) if prompt else [])
            + offsets.of_output([each.token_id for each in delta.logprobs]),
            by_id=bool(self.body.return_tokens_as_token_ids),
        )

    def _offsets(self, number: int) -> TextOffsets:
        skip = self.requests[number].sampling.skip_special_tokens
        echo = self.prompts[number] if self.body.echo else None
        return TextOffsets(self.job.service.tokenizer, echo=echo, skip_special_tokens=skip)


async def _answer(request: Request, body: CompletionRequest, name: str) -> Answer:
    job = await Job.of(request, body, name)
    service = job.service
    _refuse(body)
    num_prompt, has_logprobs = logprobs_wanted(body), body.logprobs is not None
    scores_prompt = num_prompt is not None or (body.echo and has_logprobs)
    [masks] = masks_of(service, [body])
    held = await form_asked(request, body) if asks_form(body) else FormAsked()
    requests, prompts = [], []
    for given, whole in await _prompts(service, body):
        ids, limit = job.fit(whole, body.truncate_prompt_tokens, body.max_tokens, DEFAULT_MAX_TOKENS)
        sampling = openai_sampling(
            body, service.model.sampling, max_new_tokens=limit, masks=masks, constraint=held.constraint
        )
        made = job.request(
            ids, sampling, return_logprobs=has_logprobs, top_logprobs=max(body.logprobs or 0, num_prompt or 0),
            prompt_logprobs_from=0 if scores_prompt else None,
        )  # fmt: skip
        requests.append(made)
        text = given if len(ids) == len(whole) else None
        prompts.append("" if not body.echo else text if text is not None else service.tokenizer.decode(ids, False))
        await asyncio.sleep(0)  # echoes of 256 prompts take long
    check_together(requests)
    form = CompletionForm.of(job, body, has_logprobs=has_logprobs, requests=requests, prompts=prompts)
    return Answer(requests=requests, form=form, answer_id=form.answer_id, promise=held.promise)


def _refuse(body: CompletionRequest) -> None:
    refuse_unsupported(body, "lora_path", "return_tokens_as_token_ids", suffix=None)
    n = asked_of(SamplingParams, body).get("n", 1)
    if body.best_of not in (None, 1, n):
        raise InvalidRequest(f"best_of: {body.best_of} is not supported; leave it out or give {n}", param="best_of")


async def _prompts(service: Service, body: CompletionRequest) -> list[tuple[str | None, TokenIds]]:
    """List (text if given as text, ids) of each prompt."""
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
