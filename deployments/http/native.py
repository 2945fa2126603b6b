"""POST /generate: SGLang's native API, one prompt or a batch, text or token ids; TGI's ``inputs`` as an alias.

Owns:      the form of a native answer.
Invariant: streamed text and ids are cumulative; a batch (or n > 1) answers a list, prompt by prompt, choice by choice.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.http.api_document import EVENT_STREAM, RUN, gives
from deployments.http.arrivals import name_of
from deployments.http.bodies import NativeRequest, NativeSampling, Route
from deployments.http.constraints import form_asked
from deployments.http.convert import (
    FORM_FIELDS,
    Job,
    asked_adapters,
    asked_of,
    asks_form,
    check_count,
    check_together,
    masks_of,
    native_sampling,
    prompts_of_ids,
    refuse_unsupported,
    salt_of,
)
from deployments.http.service import Service, service_of
from deployments.http.streaming import Answer, AnswerSoFar, Change, Form
from deployments.output.validation import FormAsked, SchemaPromise
from deployments.record.rids import check_name, new_rid
from replicas.errors import InvalidRequest
from replicas.text.tokenizer import Tokenizer
from replicas.types import FinishReason, GenerateRequest, TokenDelta, TokenIds, TokenLogprob, finite

router = APIRouter(route_class=Route)
T = TypeVar("T")
DEFAULT_MAX_NEW_TOKENS = 128
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}  # name on the OpenAI routes -> name here


@router.post("/generate", **gives("One answer, or a list of them", *RUN, 410, stream=EVENT_STREAM, many=True))
async def generate(request: Request, body: NativeRequest) -> Response:
    """Continue texts in SGLang's native form, streaming or not."""
    answer = await _answer(request, body, name_of(request))
    return await answer.respond(request, streams=body.stream)


@dataclass(frozen=True, kw_only=True)
class NativeForm(Form):
    """The form of a native answer: one object, or a list with one for each choice of each prompt."""

    is_cumulative = True

    tokenizer: Tokenizer
    requests: list[GenerateRequest]
    names: list[str]  # the client's name of each request
    firsts: list[int]  # index of each request's choice 0 in the list
    is_list: bool  # the answer is a list
    with_text: bool  # logprobs carry the tokens' texts
    tgi: bool
    started_s: float = field(default_factory=time.monotonic)

    def whole(self, choices: Sequence[Change], so_far: AnswerSoFar) -> dict[str, Any] | list[Any]:
        bodies = [self._body(change.key[0], change.delta) for change in choices]
        return bodies if self.is_list else bodies[0]

    def events(self, change: Change, so_far: AnswerSoFar) -> list[dict[str, Any]]:
        number, choice = change.key
        body = self._body(number, change.delta)
        return [{**body, "index": self.firsts[number] + choice} if self.is_list else body]

    def _body(self, number: int, delta: TokenDelta) -> dict[str, Any]:
        request, usage, finish = self.requests[number], delta.usage, delta.finish
        meta: dict[str, Any] = {
            "id": self.names[number],
            "finish_reason": None if finish is None else _finish_body(delta),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": {
                "device": usage.cached_tokens - usage.host_tokens - usage.store_tokens,
                "host": usage.host_tokens,
                "storage": usage.store_tokens,
            },
            "num_retractions": usage.num_retractions,
            "weight_version": "default",
            "dp_rank": None,
            "e2e_latency": time.monotonic() - self.started_s,
        }
        if request.return_logprobs:
            meta |= self._logprobs(request, delta)
        body = {"text": delta.text, "output_ids": list(delta.token_ids), "meta_info": meta}
        return {**body, "generated_text": delta.text} if self.tgi else body

    def _logprobs(self, request: GenerateRequest, delta: TokenDelta) -> dict[str, Any]:
        found: dict[str, Any] = {
            "input_token_logprobs": self._rows(delta.prompt_logprobs),
            "output_token_logprobs": self._rows(delta.logprobs),
        }
        if request.top_logprobs:
            found["input_top_logprobs"] = self._tops(delta.prompt_logprobs)
            found["output_top_logprobs"] = self._tops(delta.logprobs)
        return found

    def _rows(self, logprobs: Sequence[TokenLogprob]) -> list[list[Any]]:
        return [self._row(each.token_id, each.logprob) for each in logprobs]

    def _tops(self, logprobs: Sequence[TokenLogprob]) -> list[list[list[Any]] | None]:
        return [[self._row(*pair) for pair in each.top] if each.logprob is not None else None for each in logprobs]

    def _row(self, token_id: int, logprob: float | None) -> list[Any]:
        return [finite(logprob), token_id, self.tokenizer.token_text(token_id) if self.with_text else None]


def _finish_body(delta: TokenDelta) -> dict[str, Any]:
    finish = delta.finish
    assert finish is not None
    body: dict[str, Any] = {"type": finish.reason.value}
    if finish.reason is FinishReason.STOP:
        body["matched"] = finish.matched
    elif finish.reason is FinishReason.LENGTH:
        body["length"] = delta.usage.completion_tokens
    else:
        body["message"] = finish.message
    return body


async def _answer(request: Request, body: NativeRequest, name: str) -> Answer:
    service = service_of(request)
    # sampling_params has the forms
    refuse_unsupported(body, "lora_path", prompt_logprobs=None, **dict.fromkeys(FORM_FIELDS))
    given = body.sampling_params if body.sampling_params is not None else body.parameters
    sampling = given or NativeSampling()
    cuts = any(each.truncate is not None for each in (sampling if isinstance(sampling, list) else [sampling]))
    must_fit = body.truncate_prompt_tokens is None and not cuts
    whole, is_batch, param = await _prompts(service, body, must_fit=must_fit)
    count = len(whole)
    samplings = _each(sampling, count, "sampling_params")
    names = _names(body.rid, count, name)
    with_logprobs = _each(body.return_logprob or False, count, "return_logprob")
    starts = _each(-1 if body.logprob_start_len is None else body.logprob_start_len, count, "logprob_start_len")
    tops = _each(body.top_logprobs_num or 0, count, "top_logprobs_num")
    adapters = await asked_adapters(request, body.model, _each(body.lora_path, count, "lora_path"))
    job = Job(
        http=request, name=name, cache_salt=salt_of(body.cache_salt, body.extra_key),
        fields=asked_of(GenerateRequest, body, request.headers), names={**_NAMES, "prompt": param},
    )  # fmt: skip
    fitted = [_fit(job, ids, body, each) for ids, each in zip(whole, samplings, strict=True)]
    masks = masks_of(service, samplings)
    forms = [await form_asked(request, each) if asks_form(each) else FormAsked() for each in samplings]
    requests = []
    for i, (ids, limit) in enumerate(fitted):
        made = native_sampling(
            samplings[i], service.model.sampling, max_new_tokens=limit, masks=masks[i], constraint=forms[i].constraint
        )
        asked = job.request(
            ids, made, rid=new_rid(names[i]), adapter=adapters[i], return_logprobs=with_logprobs[i],
            top_logprobs=tops[i] if with_logprobs[i] else 0,
            prompt_logprobs_from=starts[i] if with_logprobs[i] and starts[i] != -1 else None,
        )  # fmt: skip
        requests.append(asked)
        await asyncio.sleep(0)  # 256 of them take long
    check_together(requests)
    form = NativeForm(
        tokenizer=service.tokenizer,
        requests=requests,
        names=names,
        firsts=[0, *itertools.accumulate(each.sampling.n for each in requests)],
        is_list=is_batch or any(each.sampling.n > 1 for each in requests),
        with_text=bool(body.return_text_in_logprobs),
        tgi=body.inputs is not None,
    )
    answer_id = names[0] if count == 1 else None
    return Answer(requests=requests, form=form, answer_id=answer_id, promise=_shared(forms))


def _shared(forms: list[FormAsked]) -> SchemaPromise | None:
    """The promise of the prompts' schemas, if it is one for all of them."""
    promises = {form.promise for form in forms}
    return promises.pop() if len(promises) == 1 else None


def _fit(job: Job, ids: TokenIds, body: NativeRequest, sampling: NativeSampling) -> tuple[TokenIds, int]:
    keep, param = body.truncate_prompt_tokens, "truncate_prompt_tokens"
    if keep is None:
        keep, param = sampling.truncate, "truncate"
    return job.fit(ids, keep, sampling.max_new_tokens, DEFAULT_MAX_NEW_TOKENS, param=param)


async def _prompts(service: Service, body: NativeRequest, *, must_fit: bool) -> tuple[list[TokenIds], bool, str]:
    """Read the ids of each prompt, whether they were given as a list, and the name of their field."""
    given = {"text": body.text, "input_ids": body.input_ids, "inputs": body.inputs}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise InvalidRequest(f"give exactly one of text, input_ids and inputs; got {named or 'none'}", param="text")
    param = named[0]
    if body.input_ids is not None:
        is_batch = bool(body.input_ids) and isinstance(body.input_ids[0], list)
        rows: list[Any] = body.input_ids if is_batch else [body.input_ids]
        check_count(len(rows), param=param)
        return await prompts_of_ids(service, rows, param=param, must_fit=must_fit), is_batch, param
    texts = body.text if isinstance(body.text, list) else [body.text if body.text is not None else body.inputs or ""]
    check_count(len(texts), param=param)
    return await service.encode_all(texts, param=param, must_fit=must_fit), isinstance(body.text, list), param


def _each(value: T | list[T], count: int, param: str) -> list[T]:
    """Spread a value over the prompts. Raises: InvalidRequest if a list has another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{param}: has {len(value)} entries for {count} prompts", param=param)
    return value


def _names(rid: str | list[str] | None, count: int, name: str) -> list[str]:
    if isinstance(rid, list):
        each_rid: list[str] = _each(rid, count, "rid")
        return [check_name(each) for each in each_rid]
    base = check_name(rid) if rid else name
    return [base] if count == 1 else [f"{base}_{i}" for i in range(count)]
