"""POST /v1/embeddings, /v1/score and /v1/rerank: what the model makes of prompts, read out where they end.

Owns:      the bodies and answers of the three, and the prompt of a reranking.
Never:     generates text: each prompt takes one token's step (replicas/runner/pooling.py), whose token is dropped.
Invariant: the prompts of one score or reranking begin alike, and are computed from there on: the scheduler lets those
           that share a prefix wait for the first of them.
"""

import asyncio
import base64
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from deployments.http import bodies
from deployments.http.api_document import RUN, about, body_like, gives, said, shape, shown
from deployments.http.arrivals import generations_of, name_of
from deployments.http.bodies import Few, Items, RequestFields, Route
from deployments.http.convert import Job, check_count, prompts_of_ids, refuse_unsupported
from deployments.http.service import LONG_TEXT, Service, service_of
from deployments.http.streaming import AnswerSoFar, JsonAnswer, answer, joined, run
from replicas.errors import InvalidRequest
from replicas.types import PoolingParams, SamplingParams, TokenIds, TokenLogprob

router = APIRouter(route_class=Route)
_Document = Annotated[bodies.Object, WithJsonSchema(shape(text=bodies.TEXT))]
LONG_ANSWER = 10_000  # numbers of embeddings; longer answers are made on another thread
JUDGE = 'Judge whether the document answers the query. Answer only "yes" or "no".'
Body = dict[str, Any]


class PoolingRequest(RequestFields):
    """The fields that embeddings, scores and rerankings share."""

    user: bodies.User = None
    lora_path: bodies.LoraPath = None


class EmbeddingRequest(PoolingRequest):
    """The body of /v1/embeddings, as OpenAI's."""

    model_config = body_like({"input": ["Hello"]})

    input: bodies.Prompts = about("Texts, or token ids.")
    encoding_format: Literal["float", "base64"] | None = said("`base64`: little-endian float32.")
    dimensions: Annotated[int, Field(ge=1)] | None = said("Keep the first of them, scaled to length 1 again.")
    pooling: Literal["last", "mean"] | None = said(
        "`last` (the default): the last token's state, which has seen the whole text; `mean`: of all tokens."
    )


class ScoreRequest(PoolingRequest):
    """The body of /v1/score, as SGLang's."""

    model_config = body_like({"query": "Is this a city? ", "items": ["Paris", "Rhine"], "label_token_ids": [19, 20]})

    query: str | Items[bodies.Token] = about("The text that items or documents are judged by.")
    items: str | Few[str] | Few[Items[bodies.Token]] = about("Each makes a prompt with the query.")
    label_token_ids: Annotated[Items[bodies.Token], Field(min_length=1), shown(maxItems=1024)] = about(
        "The tokens whose probabilities are the scores."
    )
    apply_softmax: bool | None = said("Scores are shares among the labels; else probabilities among all tokens.")
    item_first: bool | None = said("The item stands before the query.")


class RerankRequest(PoolingRequest):
    """The body of /v1/rerank, as Cohere's and Jina's."""

    model_config = body_like({"query": "capital of France", "documents": ["Paris", "Rhine"]})

    query: str = about("The text that items or documents are judged by.")
    documents: Few[str] | Few[_Document] = about("Texts, or objects with a `text`.")
    top_n: Annotated[int, Field(ge=1)] | None = said("Return this many documents, the most relevant first.")
    return_documents: bool | None = said("Results carry their documents.")


@router.post("/v1/embeddings", **gives("OpenAI's `list` of embeddings", *RUN))
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Embed texts: pooled hidden states behind the last norm, of length 1."""
    service = service_of(request)
    size = body.dimensions
    prompts = await _prompts(service, body.input, param="input")

    def embedded(logprob: TokenLogprob) -> list[float] | str:
        if size is not None and size > len(logprob.hidden):
            text = f"dimensions: the model's states have {len(logprob.hidden)}, got {size}"
            raise InvalidRequest(text, param="dimensions")
        vector = np.array(logprob.hidden[:size])
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
        if body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers

    def made(read: Sequence[TokenLogprob]) -> Body:
        data = [{"object": "embedding", "index": i, "embedding": embedded(each)} for i, each in enumerate(read)]
        return {"object": "list", "data": data}

    return await _read_out(request, body, prompts, PoolingParams(method=body.pooling or "last"), made, param="input")


@router.post("/v1/score", **gives("For each item, a score of each label", *RUN))
async def score(request: Request, body: ScoreRequest) -> Response:
    """Score items behind a query: the probabilities of label tokens as the next one."""
    service = service_of(request)
    items = body.items if isinstance(body.items, list) else [body.items]
    if any(isinstance(item, str) != isinstance(body.query, str) for item in items):
        raise InvalidRequest("items: must be texts where the query is a text, else token ids", param="items")
    query: Any = body.query  # of the type that the items have
    joined = [item + query if body.item_first else query + item for item in items]
    prompts = await _prompts(service, joined, param="items")
    of_labels = _softmax if body.apply_softmax else lambda logprobs: [math.exp(each) for each in logprobs]

    def made(read: Sequence[TokenLogprob]) -> Body:
        return {"object": "scoring", "scores": [of_labels([value for _, value in each.top]) for each in read]}

    pooling = PoolingParams(labels=tuple(body.label_token_ids))
    return await _read_out(request, body, prompts, pooling, made, param="items")


@router.post("/v1/rerank", **gives("The documents by relevance", *RUN))
@router.post("/v2/rerank", **gives("The documents by relevance", *RUN))  # as vLLM, which has all three
@router.post("/rerank", **gives("The documents by relevance", *RUN))
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Order documents by how well each answers a query: the score is the probability that the model says "yes"."""
    service = service_of(request)
    texts = [document if isinstance(document, str) else document.get("text") for document in body.documents]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("documents: each must be a string, or an object with a text", param="documents")
    check_count(len(texts), param="documents")
    prompts = await _judged(service, body.query, [str(text) for text in texts])
    labels = tuple(int(service.tokenizer.encode(word, add_special_tokens=False)[0]) for word in ("yes", "no"))

    def made(read: Sequence[TokenLogprob]) -> Body:
        scores = [_softmax([value for _, value in each.top])[0] for each in read]
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[Body] = [{"index": index, "relevance_score": scores[index]} for index in ranked]
        for result in results if body.return_documents else ():
            result["document"] = {"text": texts[result["index"]]}
        return {"id": f"rerank-{name_of(request)}", "results": results}

    return await _read_out(request, body, prompts, PoolingParams(labels=labels), made, param="documents")


async def _prompts(
    service: Service, given: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]], *, param: str
) -> list[TokenIds]:
    """Read the ids of one prompt or of several. Raises: InvalidRequest, PromptTooLong, Busy."""
    rows: Sequence[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    check_count(len(rows), param=param)
    if isinstance(rows[0], str):
        return await service.encode_all(rows, param=param, must_fit=True)
    return await prompts_of_ids(service, rows, param=param)


async def _judged(service: Service, query: str, texts: Sequence[str]) -> list[TokenIds]:
    """Tokenise the question about each document, without delaying other requests. Raises: PromptTooLong, Busy."""

    def work() -> list[TokenIds]:
        rows = []
        for text in texts:
            num_tokens = service.tokenizer.least_tokens(len(query) + len(text))
            service.check_length(num_tokens, param="documents", at_least=True)
            question = {"role": "user", "content": f"Query: {query}\n\nDocument: {text}"}
            ids = service.tokenizer.chat([{"role": "system", "content": JUDGE}, question], enable_thinking=False)
            service.check_length(len(ids), param="documents")
            rows.append(ids)
        return rows

    size = sum(map(len, texts)) + len(texts) * (len(JUDGE) + len(query))
    return work() if size <= LONG_TEXT else await service.encoding.run(work, size=size)


async def _read_out(
    request: Request,
    body: PoolingRequest,
    prompts: Sequence[TokenIds],
    pooling: PoolingParams,
    made: Callable[[Sequence[TokenLogprob]], Body],
    *,
    param: str,
) -> Response:
    """Run ``prompts`` and answer with what ``made`` makes of what was read."""
    refuse_unsupported(body, *type(body).model_fields)
    job = await Job.of(request, body, name_of(request), prompt=param, max_tokens=param)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, pooling=pooling)
    fitted = [job.fit(ids, given=1) for ids in prompts]
    requests = [job.request(ids, sampling, return_logprobs=True) for ids, _ in fitted]
    generations = generations_of(request, None)

    async def work() -> Response:
        so_far = AnswerSoFar(None)
        deltas = [so_far.add(*each).delta async for each in joined(run(generations, requests))]
        tokens = so_far.tokens
        details = {"cached_tokens": tokens.cached}
        counts = {"prompt_tokens": tokens.prompt, "total_tokens": tokens.prompt, "prompt_tokens_details": details}
        read = [delta.logprobs[0] for delta in deltas]

        def whole() -> Response:
            return JsonAnswer({"model": job.model, **made(read), "usage": counts})

        size = sum(len(each.hidden) for each in read)
        return whole() if size <= LONG_ANSWER else await asyncio.to_thread(whole)

    return await answer(request, work())


def _softmax(logprobs: Sequence[float]) -> list[float]:
    most = max(logprobs)
    weights = [math.exp(each - most) for each in logprobs]
    return [weight / sum(weights) for weight in weights]
