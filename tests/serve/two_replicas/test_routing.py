"""The cache-aware router on a real local Ray: hits, explanations, and its own death."""

import json
import os
import signal
import time
from typing import Any

import httpx
import pytest

from tests.serve.running import HTTP, Running

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.timeout(400)]
TOPICS = ["pages", "trees", "harbours", "winters", "engines", "letters"]

# For Serve to notice, start a process that imports Ray and the tokenizer, and the index to be there. It depends on what
# else the machine does: the limit is wide, and the time is printed.
BACK_S = 60.0


def prompt(topic: str, question: str = "") -> str:
    return f"A long story about {topic}, told slowly. " * 20 + question


def ask(app: Running, text: str, *, name: str | None = None, **options: Any) -> httpx.Response:
    body = {"prompt": text, "max_tokens": 4, "temperature": 0, **options}
    headers = {} if name is None else {"X-Request-Id": name}
    return HTTP.post(f"{app.url}/v1/completions", json=body, headers=headers, timeout=120)


def fields(answer: httpx.Response) -> dict[str, str]:
    return dict(part.split("=", 1) for part in answer.headers["x-manta-route"].split("; "))


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prefix_is_routed_to_the_replica_that_holds_it_and_the_header_says_so(app: Running) -> None:
    first = {topic: fields(ask(app, prompt(topic)))["replica"] for topic in TOPICS}
    for topic in TOPICS:
        answer = ask(app, prompt(topic, f"What of {topic}?"))
        route = fields(answer)
        assert (answer.status_code, route["replica"], route["policy"]) == (200, first[topic], "estimated_ttft")
        assert int(route["overlap_predicted"]) == int(route["overlap_actual"]) == cached(answer) >= 128


def test_a_stream_tells_its_route_before_its_tokens(app: Running) -> None:
    body = {"prompt": prompt("pages", "And then?"), "max_tokens": 4, "stream": True}
    with HTTP.stream("POST", f"{app.url}/v1/completions", json=body, timeout=60) as answer:
        assert int(fields(answer)["overlap_predicted"]) >= 128
        answer.read()


def test_a_recent_request_can_be_explained_and_a_dry_run_changes_nothing(app: Running) -> None:
    text = prompt("explanations")
    ask(app, text, name="explain-me")
    route = HTTP.get(f"{app.url}/route/explain-me", timeout=30).json()
    assert (route["rid"], route["outcome"], len(route["tries"])) == ("explain-me", "ok", 1)
    assert len(route["tries"][0]["candidates"]) == 2
    assert "explain-me" in route["explanation"]
    dry = [HTTP.post(f"{app.url}/route/explain", json={"prompt": text + "?"}, timeout=30).json() for _ in range(3)]
    assert {each["replica"] for each in dry} == {route["replica"]}
    assert {each["predicted"]["cached_tokens"] for each in dry} == {dry[0]["predicted"]["cached_tokens"]}
    assert dry[0]["predicted"]["cached_tokens"] >= 128
    new = HTTP.post(f"{app.url}/route/explain", json={"prompt": prompt("nothing known")}, timeout=30).json()
    assert new["predicted"]["cached_tokens"] < 32
    assert HTTP.get(f"{app.url}/route/never-heard-of", timeout=30).status_code == 404


def test_a_killed_router_is_back_with_its_hit_ratio_within_seconds(app: Running) -> None:
    """Serve restarts the process. Before the new router has had a request it knows what the replicas hold."""
    for topic in TOPICS:
        ask(app, prompt(topic))
    before, router = hit_ratio(app), app.info()["router"]
    assert before >= 0.9
    os.kill(router["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    app.until(lambda: snapshots_of_another(app, router["router_id"]) == 2, BACK_S)
    dry = [predicted(app, prompt(topic, f"What of {topic}?")) for topic in TOPICS]
    back_s = time.monotonic() - killed_s
    new = {router_id for router_id, _ in dry}
    assert len(new) == 1
    assert router["router_id"] not in new
    assert [tokens >= 128 for _, tokens in dry] == [True] * len(TOPICS)  # no request has come: this is the snapshots'
    after = hit_ratio(app)
    print(f"pages known again {back_s:.1f} s after kill -9 of the router; hit ratio {before:.3f}, then {after:.3f}")
    assert after >= 0.95 * before
    now = app.info()
    assert now["router"]["pid"] != router["pid"]
    assert (now["num_retries"], now["router"]["cache_snapshots"]) == (0, 2)
    app.until(app.idle, 30)


def snapshots_of_another(app: Running, router_id: str) -> int:
    """How many snapshots a router other than ``router_id`` has; 0 while none answers."""
    try:
        router = app.info()["router"]
    except (httpx.HTTPError, KeyError, json.JSONDecodeError):
        return 0
    return 0 if router["router_id"] == router_id else int(router["cache_snapshots"])


def predicted(app: Running, text: str) -> tuple[str, int]:
    """(router, tokens of ``text`` that it believes some replica to hold), asked without a request."""
    dry = HTTP.post(f"{app.url}/route/explain", json={"prompt": text}, timeout=30).json()
    return dry["router"], max(each["cached_tokens"] for each in dry["candidates"])


def hit_ratio(app: Running) -> float:
    """Cached share of the prompts of a round over all topics; a request that fails has none."""
    prompt_tokens = cached_tokens = 0
    for topic in TOPICS:
        try:
            answer = ask(app, prompt(topic, f"What of {topic}?"))
        except httpx.HTTPError:
            return 0.0
        if answer.status_code != 200:
            return 0.0
        prompt_tokens += answer.json()["usage"]["prompt_tokens"]
        cached_tokens += cached(answer)
    return cached_tokens / prompt_tokens
