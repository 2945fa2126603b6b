"""Prefill and decode apart on a real local Ray, over NIXL: the answers are those of one replica, whoever is killed.

SPEC H06, H08, H19; issue 4, end to end. One prefill and one decode replica of the embedded model.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.serve.running import HTTP, Running

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = "SmolLM2-135M-Instruct"


def replica(app: Running, role: str) -> dict[str, Any]:
    """What the one replica of ``role`` says of itself now."""
    [state] = [state for state in app.states() if state["replica"]["role"] == role]
    return state


def ids_of(app: Running, role: str) -> set[str]:
    return {state["replica"]["replica_id"] for state in app.states() if state["replica"]["role"] == role}


def until_both_are_there(app: Running) -> None:
    def there() -> bool:
        try:
            return [len(ids_of(app, role)) for role in ("prefill", "decode")] == [1, 1]
        except (httpx.HTTPError, ValueError, KeyError):
            return False

    app.until(there, 120)


@pytest.fixture
def both(app: Running) -> Iterator[Running]:
    """Both replicas are there, nothing runs; and so it is again afterwards."""
    until_both_are_there(app)
    app.until(app.idle, 30)
    yield app
    until_both_are_there(app)
    app.until(app.idle, 30)


def client(app: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{app.url}/v1", api_key="unused", timeout=120, max_retries=0)


def story(topic: str, times: int = 20) -> str:
    return f"A long story about {topic}, told slowly. " * times


def body(text: str, **sampling: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True, **sampling}}


def generate(app: Running, text: str, *, name: str, **sampling: Any) -> list[int]:
    answer = HTTP.post(f"{app.url}/generate", json=body(text, **sampling), headers={"X-Request-Id": name}, timeout=180)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["output_ids"])


def alone(app: Running, text: str, **sampling: Any) -> list[int]:
    """What the decode replica says when it may not use the other one, nor what it has cached."""
    app.until(app.idle, 30)
    HTTP.get(f"{app.url}/flush_cache?timeout=10", timeout=30).raise_for_status()
    [decode] = ids_of(app, "decode")
    answer = HTTP.post(
        f"{app.url}/generate", json=body(text, **sampling), headers={"x-manta-replicas": decode}, timeout=180
    )
    assert fields(answer)["pair"] == "no_prefill_replica"
    HTTP.get(f"{app.url}/flush_cache?timeout=10", timeout=30).raise_for_status()
    return list(answer.json()["output_ids"])


def fields(answer: Any) -> dict[str, str]:
    return dict(part.split("=", 1) for part in answer.headers["x-manta-route"].split("; "))


def route(app: Running, name: str) -> dict[str, Any]:
    return dict(HTTP.get(f"{app.url}/route/{name}", timeout=30).json())


def test_both_roles_are_deployments_of_their_own_and_no_secret_is_shown(both: Running) -> None:
    assert "1 prefill replica and 1 decode replica" in both.log.read_text()
    assert "PrefillReplica" in both.log.read_text()
    info = both.info()
    assert (info["mode"], info["transfer"]["disaggregation"]) == ("disaggregated", "always")
    assert "token" not in info["transfer"]


def test_a_chat_over_two_replicas_is_that_of_one(both: Running) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    raw = client(both).chat.completions.with_raw_response.create(model=MODEL, messages=messages, temperature=0)
    told = fields(raw)
    assert (told["policy"], told["pair"], told["kv_transfer"]) == ("pd_pair", "kv_transfer_always", "ok")
    assert {told["prefill"]} == ids_of(both, "prefill")
    assert raw.parse().choices[0].message.content == "The capital of France is Paris."
    chunks = client(both).chat.completions.create(model=MODEL, messages=messages, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "sampling_seed": 3}])
def test_the_tokens_are_those_of_one_replica(both: Running, sampling: dict[str, Any]) -> None:
    """About 200 and 1,000 prompt tokens: one chunk and several."""
    for number, times in enumerate((20, 100)):
        text = story("harbours", times)
        expected = alone(both, text, **sampling)
        name = f"same-{number}-{len(sampling)}"
        assert generate(both, text, name=name, **sampling) == expected
        report = route(both, name)["tries"][0]["kv_transfer"]
        assert (report["transferred"], report["num_pages"] > 0) == (True, True)


def test_a_prefill_replica_killed_while_requests_queue_there_loses_none(both: Running) -> None:
    assert any(killed_before_they_were_through(both, f"queued-{number}") for number in range(3))


def killed_before_they_were_through(app: Running, name: str) -> bool:
    """Kill the prefill replica while it has four requests, none of which is lost. Returns: whether all but one had to
    be computed elsewhere; a busy machine may tell of them when they are through."""
    texts = [story(topic, 130) for topic in ("pages", "trees", "winters", "letters")]
    until_both_are_there(app)
    expected = [alone(app, text) for text in texts]
    victim = replica(app, "prefill")["replica"]
    with ThreadPoolExecutor(len(texts)) as pool:
        pending = [pool.submit(generate, app, text, name=f"{name}-{number}") for number, text in enumerate(texts)]
        app.until(
            lambda: all(each.done() for each in pending) or replica(app, "prefill")["num_open"] == len(texts), 60
        )
        os.kill(victim["pid"], signal.SIGKILL)
        killed_s = time.monotonic()
        assert [each.result() for each in pending] == expected
    print(f"all answers were complete {time.monotonic() - killed_s:.1f} s after kill -9 of prefill")
    routes = [route(app, f"{name}-{number}") for number in range(len(texts))]
    moved = [each for each in routes if each["num_retries"]]
    for each in moved:
        first = next(tried for tried in each["tries"] if not tried["moved"])
        assert first["failure"].startswith("PrefillLost")
        assert each["outcome"] == "ok"
    return len(moved) >= len(texts) - 1  # one may have been through already


def test_a_new_prefill_replica_on_the_same_node_is_used(both: Running) -> None:
    """After the kill: another process, another incarnation."""
    text = story("engines")
    expected = alone(both, text)
    assert generate(both, text, name="again") == expected
    assert route(both, "again")["tries"][0]["kv_transfer"]["transferred"]


def stream_and_kill(app: Running, role: str, text: str, *, name: str) -> list[int]:
    """The output ids of a stream during which the replica of ``role`` is killed, after the first token."""
    pid, ids = replica(app, role)["replica"]["pid"], []
    request = {**body(text, max_new_tokens=60), "stream": True}
    with HTTP.stream(
        "POST", f"{app.url}/generate", json=request, headers={"X-Request-Id": name}, timeout=180
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                ids = json.loads(line.removeprefix("data: "))["output_ids"]
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    pid = 0
    return list(ids)


def test_a_decode_replica_killed_while_streaming_is_replaced_without_a_seam(both: Running) -> None:
    text = story("mountains", 60)
    expected = alone(both, text, max_new_tokens=60)
    assert stream_and_kill(both, "decode", text, name="seamless") == expected
    told = route(both, "seamless")
    assert told["num_retries"] == 1
    assert "ReplicaGone" in told["tries"][0]["failure"]


def test_a_prefill_replica_that_hangs_is_found_by_its_silence(both: Running) -> None:
    """SIGSTOP: no connection ends, no call fails. Heartbeats tell (1 s, 3 misses), not the deadline."""
    assert any(stopped_before_its_pages_came(both, f"hung-{number}") for number in range(3))


def stopped_before_its_pages_came(app: Running, name: str) -> bool:
    """Stop the prefill replica while it has a request, which is answered in time. Returns: whether it had to be
    computed elsewhere; a busy machine may tell of the request when its pages are through."""
    until_both_are_there(app)
    text = story("glaciers", 130)
    expected = alone(app, text)
    pid = replica(app, "prefill")["replica"]["pid"]
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(generate, app, text, name=name)
        app.until(lambda: pending.done() or replica(app, "prefill")["num_open"] == 1, 20)
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        try:
            answer = pending.result()
        finally:
            os.kill(pid, signal.SIGCONT)
    took_s = time.monotonic() - stopped_s
    print(f"the answer was complete {took_s:.1f} s after prefill stopped")
    assert answer == expected
    assert took_s < 30  # the deadlines are 60 s
    [only] = route(app, name)["tries"]
    assert only["failure"] is None
    return not only["kv_transfer"]["transferred"]
