"""/v1/embeddings, /v1/score, /v1/rerank on the real model; Transformers' numbers: tests/numerics/test_pooling.py."""

import base64
import math
import threading
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.http.apis import pooling
from deployments.http.service import Service
from deployments.http.streaming import JsonAnswer
from replicas.types import TokenIds

pytestmark = pytest.mark.model
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
TEXTS = ["The cat sleeps.", "A kitten naps.", "Interest rates rose."]


async def post(client: httpx.AsyncClient, route: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def refusal(client: httpx.AsyncClient, route: str, **body: Any) -> str:
    answer = await client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["message"])


async def vectors(client: httpx.AsyncClient, **body: Any) -> np.ndarray:
    data = (await post(client, EMBEDDINGS, **body))["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return np.array([each["embedding"] for each in data])


async def test_an_embedding_has_length_1_and_is_of_its_text_alone(client: httpx.AsyncClient, service: Service) -> None:
    together = await vectors(client, input=TEXTS)
    assert together.shape == (3, 576)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1.0)
    assert await vectors(client, input=TEXTS[1]) == pytest.approx(together[1:2], abs=1e-4)
    ids = service.tokenizer.encode(TEXTS[1]).tolist()
    assert await vectors(client, input=ids) == pytest.approx(together[1:2], abs=1e-4)
    assert await vectors(client, input=[ids, ids]) == pytest.approx(together[[1, 1]], abs=1e-4)
    assert not np.allclose(await vectors(client, input=TEXTS, pooling="mean"), together, atol=0.01)


async def test_fewer_dimensions_are_the_first_ones_normalised_again(client: httpx.AsyncClient) -> None:
    [whole] = await vectors(client, input="Hello")
    [short] = await vectors(client, input="Hello", dimensions=8)
    assert short == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-4)
    packed = (await post(client, EMBEDDINGS, input="Hello", dimensions=8, encoding_format="base64"))["data"][0]
    assert np.frombuffer(base64.b64decode(packed["embedding"]), dtype="<f4") == pytest.approx(short, abs=1e-4)
    assert "have 576" in await refusal(client, EMBEDDINGS, input="Hello", dimensions=577)
    assert "dimensions" in await refusal(client, EMBEDDINGS, input="Hello", dimensions=0)


async def test_a_score_is_the_probability_of_its_label(client: httpx.AsyncClient, service: Service) -> None:
    """The same numbers come as prompt logprobs of the text with the label behind it."""
    query, items = "The capital of France is", [" Paris. The capital of Spain is", " Rome. The capital of Italy is"]
    labels = [int(service.tokenizer.encode(word)[0]) for word in (" Madrid", " Rome")]
    body = {"query": query, "items": items, "label_token_ids": labels}
    scores = (await post(client, SCORE, **body))["scores"]
    for item, row in zip(items, scores, strict=True):
        for label, mine in zip(labels, row, strict=True):
            prompt = [*service.tokenizer.encode(query + item).tolist(), label]
            asked = {"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 0}
            logprobs = (await post(client, "/v1/completions", **asked))["choices"][0]["prompt_logprobs"]
            assert mine == pytest.approx(math.exp(logprobs[-1][str(label)]["logprob"]), abs=1e-4)
    shares = (await post(client, SCORE, **body, apply_softmax=True))["scores"]
    assert shares[0] == pytest.approx([row / sum(scores[0]) for row in scores[0]], abs=1e-4)
    ids = [service.tokenizer.encode(text).tolist() for text in (query, *items)]
    by_ids = (await post(client, SCORE, query=ids[0], items=ids[1:], label_token_ids=labels))["scores"]
    assert np.array(by_ids) == pytest.approx(np.array(scores), abs=1e-4)
    first = (await post(client, SCORE, query=items[0], items=query, label_token_ids=labels, item_first=True))["scores"]
    assert first[0] == pytest.approx(scores[0], abs=1e-4)


async def test_prompts_that_begin_alike_are_computed_from_where_they_differ(client: httpx.AsyncClient) -> None:
    """96 tokens and more in common, in whole pages of 16; the first prompt computes them, seven find them."""
    query = "It was a quiet evening in the village by the sea. " * 8
    items = [f"Number {i}" for i in range(8)]
    usage = (await post(client, SCORE, query=query, items=items, label_token_ids=[5]))["usage"]
    each = usage["prompt_tokens"] / 8
    assert each > 90
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 7 * (each - 32)


async def test_documents_are_ranked_by_yes_against_no(client: httpx.AsyncClient) -> None:
    documents = ["Berlin lies on the Spree.", {"text": "x"}, "Paris is the capital of France."]
    body: dict[str, Any] = {"query": "What is the capital of France?", "documents": [documents[0], documents[2]]}
    ranked = (await post(client, RERANK, **body))["results"]
    for alias in ("/rerank", "/v2/rerank"):
        assert (await post(client, alias, **body))["results"] == ranked
    assert {each["index"] for each in ranked} == {0, 1}
    assert 1 >= ranked[0]["relevance_score"] >= ranked[1]["relevance_score"] >= 0
    [best] = (await post(client, RERANK, **body, top_n=1, return_documents=True))["results"]
    assert best == {**ranked[0], "document": {"text": body["documents"][best["index"]]}}
    assert "documents" in await refusal(client, RERANK, query="x", documents=[])
    assert "documents" in await refusal(client, RERANK, query="x", documents=documents)


async def test_many_documents_are_read_on_another_thread_and_large_answers_made_on_one(
    client: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap: 256 templates in a row, each of a short text, stall all other requests for seconds."""
    names: list[str] = []
    chat, render = service.tokenizer.chat, JsonAnswer.render

    def watched(*args: Any, **options: Any) -> TokenIds:
        names.append(threading.current_thread().name)
        return chat(*args, **options)

    def rendered(self: JsonAnswer, content: Any) -> bytes:
        names.append(threading.current_thread().name)
        return render(self, content)

    monkeypatch.setattr(service.tokenizer, "chat", watched)
    monkeypatch.setattr(JsonAnswer, "render", rendered)
    here = threading.current_thread().name
    monkeypatch.setattr(pooling, "LONG_TEXT", 500)
    monkeypatch.setattr(pooling, "LONG_ANSWER", 1000)
    body = await post(client, RERANK, query="harbour", documents=[f"Quiet harbour {i}." for i in range(6)])
    assert sorted(each["index"] for each in body["results"]) == list(range(6))
    assert len(names) == 7
    assert all(name.startswith("manta-encode") for name in names[:6])
    assert names[6] == here  # it has 6 numbers
    names.clear()
    assert len(await vectors(client, input=["x", "y"])) == 2
    assert len(await vectors(client, input="x")) == 1
    assert names[0] != here == names[1]
    too_long = await client.post(RERANK, json={"query": "x", "documents": ["a", "word " * 9000]})
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "documents")


async def test_what_cannot_be_read_out_is_refused_by_name(client: httpx.AsyncClient) -> None:
    assert "input" in await refusal(client, EMBEDDINGS, input="")
    assert "pooling" in await refusal(client, EMBEDDINGS, input="x", pooling="max")
    assert "at least one" in await refusal(client, SCORE, query="x", items=["y"], label_token_ids=[])
    assert "not in the vocabulary" in await refusal(client, SCORE, query="x", items=["y"], label_token_ids=[99_999])
    assert "items: must be texts" in await refusal(client, SCORE, query="x", items=[[5]], label_token_ids=[1])
    assert "maximum context length" in await refusal(client, EMBEDDINGS, input="word " * 9000)
