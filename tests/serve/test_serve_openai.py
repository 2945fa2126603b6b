"""End to end: two replicas of SmolLM2 on a real local Ray, spoken to with the openai client."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.serve.running import Running, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.timeout(400)]
NAME = "SmolLM2-135M-Instruct"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        tmp_path_factory.mktemp("serve"),
        replicas={"count": 2, "cpus": 1, "health_period_s": 1},
        cache={"max_total_tokens": 16_000},
        router={"policy": "round_robin"},
    ) as running:
        yield running


@pytest.fixture
def client(app: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{app.url}/v1", api_key="any", max_retries=0, timeout=120)


def text(client: openai.OpenAI, **options: Any) -> str:
    answer = client.completions.create(**{"model": NAME, "prompt": PROMPT, "max_tokens": 24, **options})
    return str(answer.choices[0].text)


def test_it_says_what_is_served_where_with_a_line_to_try(app: Running) -> None:
    log = app.log.read_text()
    assert "\n  KV pool   16,000 tokens, 1,000 pages, 703 MiB, each of 2\n" in log
    assert "\n  computes  on the CPU in float32, attention: " in log
    assert f"\n  API       {app.url}/v1\n" in log
    assert f"ready: {NAME} on 2 replicas at {app.url}/v1" in log
    line = next(line for line in log.splitlines() if line.startswith("curl "))
    assert f"{app.url}/v1/chat/completions" in line


def test_haproxy_is_what_clients_speak_to_and_it_speaks_to_the_router_alone(app: Running) -> None:
    """Issue 6, section 1; test_serve_tp.py goes without. Serve's own proxy, its fallback, has answered nothing."""
    assert app.has_haproxy

    def five_answered() -> bool:  # it counts anew when Serve has it read new settings
        assert httpx.get(f"{app.url}/v1/models", timeout=30).status_code == 200
        answers = app.haproxy_answers()
        [fallback] = [name for name in answers if name.startswith("SERVE_PROXY_ACTOR-")]
        assert answers[fallback] == 0
        return sum(count for name, count in answers.items() if name.startswith("SERVE_REPLICA_manta-Router-")) >= 5

    app.until(five_answered, 20)


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


def test_completions_have_n_choices_logprobs_stops_and_seeds(client: openai.OpenAI) -> None:
    many = client.completions.create(model=NAME, prompt=PROMPT, n=3, seed=1, temperature=1.5, max_tokens=8)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    scored = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1, temperature=0, logprobs=2, echo=True)
    assert scored.choices[0].logprobs is not None
    assert len(scored.choices[0].logprobs.token_logprobs or []) == 6
    assert text(client, prompt="One, two, three,", temperature=0, stop=[" six"]) == " four, five,"
    once, again = (text(client, seed=4, temperature=2.0) for _ in range(2))  # round robin: one on each replica
    assert once == again


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
    httpx.post(f"{app.url}/flush_cache", timeout=30).raise_for_status()
    prompt = "A story about pages, trees and replicas. " * 12
    cached = []
    for _ in range(3):  # round robin: the third meets the first's replica again
        usage = client.completions.create(model=NAME, prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert (cached[2] or 0) >= 64


def test_32_clients_at_once_get_what_each_would_alone(app: Running, client: openai.OpenAI) -> None:
    prompts = [f"Question {i % 4}: what comes after {i % 4}?" for i in range(32)]
    alone = {prompt: text(client, prompt=prompt, temperature=0, max_tokens=16) for prompt in set(prompts)}
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda prompt: text(client, prompt=prompt, temperature=0, max_tokens=16), prompts))
    assert together == [alone[prompt] for prompt in prompts]
    app.until(app.idle, 5.0)


def test_a_request_id_is_echoed_once(app: Running) -> None:
    answer = httpx.get(f"{app.url}/ping", headers={"X-Request-Id": "abc-1"})
    assert answer.headers.get_list("x-request-id") == ["abc-1"]


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


def test_a_killed_replica_costs_no_request_a_token(app: Running, client: openai.OpenAI) -> None:
    """kill -9 under load: the other goes on, requests in flight complete with the same tokens, Serve replaces it."""
    options = [{"prompt": f"Story {i}:", "seed": i, "temperature": 0.8, "max_tokens": 64} for i in range(8)]
    body = {"extra_body": {"ignore_eos": True}}
    expected = [text(client, **each, **body) for each in options]
    before = {state["replica"]["replica_id"]: state["replica"]["pid"] for state in app.states()}
    with ThreadPoolExecutor(9) as pool:
        pending = [pool.submit(text, client, **each, **body) for each in options]
        streamed = pool.submit(_streamed, client, options[0])
        app.until(lambda: all(state["stats"]["decode_tokens"] and state["num_open"] >= 3 for state in app.states()), 20)
        victim, pid = sorted(before.items())[0]
        os.kill(pid, signal.SIGKILL)
        assert [each.result() for each in pending] == expected
        assert streamed.result() == expected[0]
    retries = [retry for retry in app.info()["recent_retries"] if retry["replica_id"] == victim]
    assert len(retries) >= 3
    assert any(retry["num_delivered"] > 0 for retry in retries)
    assert httpx.get(f"{app.url}/health").status_code == 200  # the other one
    app.until(lambda: len({state["replica"]["replica_id"] for state in app.states()} - {victim}) == 2, 60)
    app.until(app.idle, 5.0)
    assert text(client, **options[1], **body) == expected[1]


def _streamed(client: openai.OpenAI, options: dict[str, Any]) -> str:
    stream = client.completions.create(model=NAME, **options, stream=True, extra_body={"ignore_eos": True})
    return "".join(chunk.choices[0].text for chunk in stream)


def test_idle_pools_are_all_free_or_evictable(app: Running) -> None:
    app.until(app.idle, 5.0)
    assert len(app.states()) == 2
    assert httpx.post(f"{app.url}/flush_cache", timeout=30).status_code == 200
    assert [state["stats"]["pool"]["free_pages"] for state in app.states()] == [1000, 1000]
