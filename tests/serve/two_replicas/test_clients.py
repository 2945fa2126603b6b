"""End to end: two replicas of SmolLM2 on a real local Ray, asked by the openai client."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.serve.running import HTTP, Running

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.timeout(400)]
NAME = "SmolLM2-135M-Instruct"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The capital of France is"


@pytest.fixture
def client(app: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{app.url}/v1", api_key="any", max_retries=0, timeout=120)


def text(client: openai.OpenAI, **options: Any) -> str:
    answer = client.completions.create(**{"model": NAME, "prompt": PROMPT, "max_tokens": 24, **options})
    return str(answer.choices[0].text)


def test_a_chat_and_its_stream_answer_alike(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=NAME, messages=FRANCE, temperature=0)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 37
    stream = client.chat.completions.create(
        model=NAME, messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    last = chunks[-1].usage
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens) == (37, whole.usage.completion_tokens)


def test_completions_have_n_choices_logprobs_stops_and_seeds(app: Running, client: openai.OpenAI) -> None:
    many = client.completions.create(model=NAME, prompt=PROMPT, n=3, seed=1, temperature=1.5, max_tokens=8)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    scored = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1, temperature=0, logprobs=2, echo=True)
    assert scored.choices[0].logprobs is not None
    assert len(scored.choices[0].logprobs.token_logprobs or []) == 6
    assert text(client, prompt="One, two, three,", temperature=0, stop=[" six"]) == " four, five,"
    replicas = [{"x-manta-replicas": state["replica"]["replica_id"]} for state in app.states()]
    one, other = (text(client, seed=4, temperature=2.0, extra_headers=replica) for replica in replicas)
    assert one == other


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        text(client, model="gpt-9")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        text(client, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens") as overflow:
        text(client, prompt="word " * 9000)
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError, match="at most 4,194,304") as error:
        text(client, prompt="a" * 10_000_000)
    assert error.value.status_code == 413


def test_a_repeated_prefix_shows_in_cached_tokens(app: Running, client: openai.OpenAI) -> None:
    HTTP.post(f"{app.url}/flush_cache", timeout=30).raise_for_status()
    prompt = "A story about pages, trees and replicas. " * 12
    cached = []
    for _ in range(2):
        usage = client.completions.create(model=NAME, prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert (cached[1] or 0) >= 64


def test_32_clients_at_once_get_what_each_would_alone(app: Running, client: openai.OpenAI) -> None:
    prompts = [f"Question {i % 4}: what comes after {i % 4}?" for i in range(32)]
    alone = {prompt: text(client, prompt=prompt, temperature=0, max_tokens=16) for prompt in set(prompts)}
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda prompt: text(client, prompt=prompt, temperature=0, max_tokens=16), prompts))
    assert together == [alone[prompt] for prompt in prompts]
    app.until(app.idle, 30)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_frees_its_pages_within_a_second(app: Running, streaming: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6000, "ignore_eos": True, "stream": streaming}
    async with httpx.AsyncClient(timeout=60) as http:
        pending = asyncio.create_task(_first_bytes(http, f"{app.url}/v1/completions", body))
        async with asyncio.timeout(20):
            while not any(state["num_open"] for state in await asyncio.to_thread(app.states)):
                await asyncio.sleep(0.02)
        pending.cancel()
    assert await asyncio.to_thread(app.until, app.idle, 30) < 1.0


async def _first_bytes(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
    async with http.stream("POST", url, json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


def test_idle_pools_are_all_free_or_evictable(app: Running) -> None:
    app.until(app.idle, 30)
    assert len(app.states()) == 2
    assert HTTP.post(f"{app.url}/flush_cache", timeout=30).status_code == 200
    assert [state["stats"]["pool"]["free_pages"] for state in app.states()] == [1000, 1000]
