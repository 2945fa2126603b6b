"""Replicas that fetch cached pages from each other, on a real local Ray: answers do not change by it, `manta explain`
tells of it, and memory is given back all the same.

    MANTA_TEST_FETCH=off MANTA_TEST_ROUNDS=4 python -m pytest -s -m slow tests/serve/test_serve_fetches.py -k users

prints what the users' time to first token is without fetches.
"""

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.__main__ import main
from tests.serve.running import HTTP, Running, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
FETCH = os.environ.get("MANTA_TEST_FETCH", "auto")  # off: what it is like without
ROUNDS = int(os.environ.get("MANTA_TEST_ROUNDS", "1"))  # bursts before memory is given back
USERS = 8
PREFIX = "The master of the harbour wrote down what the sea had brought, day after day, for his son. " * 100
QUESTION = "Number {user} asks what was written on the first day, what on the second, and whether the son has read it. "


@pytest.fixture
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        tmp_path_factory.mktemp("fetches"),
        environment={"MANTA_EXPERIMENTS": "1"},
        replicas={"count": 2, "cpus": 1, "health_period_s": 1},
        cache={"max_total_tokens": 24_000},
        **({} if FETCH == "off" else {"transfer": {"fetch": FETCH}}),
    ) as running:
        yield running


@pytest.fixture
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        tmp_path_factory.mktemp("apart"),
        base="docs/examples/disaggregated.yaml",
        environment={"MANTA_EXPERIMENTS": "1"},
        replicas={"cpus": 1, "health_period_s": 1},
        cache={"max_total_tokens": 12_000},
        transfer={"fetch": "auto", "disaggregation": "always"},
    ) as running:
        yield running


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a user was answered."""

    rid: str
    text: str
    ttft_s: float


def ask(app: Running, asked: str, *, only_on: str | None = None, max_tokens: int = 8) -> Answer:
    body = {"prompt": asked, "max_tokens": max_tokens, "min_tokens": max_tokens, "temperature": 0, "stream": True}
    headers = {} if only_on is None else {"x-manta-replicas": only_on}
    began_s, ttft_s, text = time.monotonic(), 0.0, ""
    with HTTP.stream("POST", f"{app.url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                ttft_s = ttft_s or time.monotonic() - began_s
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return Answer(rid=answer.headers["x-request-id"], text=text, ttft_s=ttft_s)


def prompt(user: int) -> str:
    return PREFIX + QUESTION.format(user=user) * 4


def held(app: Running, asked: str) -> int:
    """The tokens of ``asked`` that some replica has, as the router knows."""
    dry = HTTP.post(f"{app.url}/route/explain", json={"prompt": asked}, timeout=30).json()
    return int(max(each["cached_tokens"] for each in dry["candidates"]))


def burst(app: Running) -> list[Answer]:
    """All users at once, after one replica alone has computed the prefix."""
    assert HTTP.post(f"{app.url}/flush_cache", timeout=60).status_code == 200
    donor = app.states()[0]["replica"]["replica_id"]
    ask(app, PREFIX, only_on=donor)

    app.until(lambda: held(app, prompt(0)) >= 1_900, 30)
    with ThreadPoolExecutor(USERS) as pool:
        return list(pool.map(lambda user: ask(app, prompt(user)), range(USERS)))


def fetches(app: Running, answers: list[Answer]) -> dict[str, dict[str, Any]]:
    """What came of each request's fetch, by rid, where it had one."""
    routes = {each.rid: HTTP.get(f"{app.url}/route/{each.rid}", timeout=30).json() for each in answers}
    return {rid: route["tries"][-1]["fetch"] for rid, route in routes.items() if route["tries"][-1].get("fetch")}


def occupy(app: Running, what: str) -> None:
    answer = HTTP.post(f"{app.url}/{what}_memory_occupation?timeout=30", timeout=120)
    assert answer.status_code == 200, answer.text


def test_users_who_share_a_prefix_fetch_it_and_get_the_same_bytes_also_after_memory_was_given_back(
    app: Running,
) -> None:
    bursts = [burst(app) for _ in range(ROUNDS)]
    told = fetches(app, bursts[0])
    occupy(app, "release")
    occupy(app, "resume")
    app.until(lambda: app.serves_with(2), 60)
    bursts.append(burst(app))
    again = fetches(app, bursts[-1])
    for each in bursts:
        print(f"TTFT {[round(ttft_s, 2) for ttft_s in sorted(answer.ttft_s for answer in each)]}")
    for rid, fetch in {**told, **again}.items():
        print(rid, fetch["sentence"], fetch["report"])
    assert HTTP.post(f"{app.url}/flush_cache", timeout=60).status_code == 200
    donor = app.states()[0]["replica"]["replica_id"]
    alone = [ask(app, prompt(user), only_on=donor).text for user in range(USERS)]
    assert [[answer.text for answer in each] for each in bursts] == [alone] * len(bursts)
    if FETCH == "off":
        return
    assert any(fetch["report"]["transferred"] for fetch in again.values())
    rid = next(rid for rid, fetch in {**told, **again}.items() if fetch["report"]["transferred"])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(["explain", rid, "--url", app.url])
    assert "It fetched" in said.getvalue()
    assert "computing them would have taken" in " ".join(said.getvalue().split())


def test_the_second_turn_of_a_prompt_that_is_handed_over_fetches_the_answer_from_the_decode_replica(
    apart: Running,
) -> None:
    turns = list[tuple[str, Answer]]()  # what was asked second, and the answer

    def fetched() -> bool:
        """Have another conversation of two turns: a fetch that is late is computed, and the next one waits for 2 s."""
        text = QUESTION.format(user=len(turns)) * 8
        first = ask(apart, text, max_tokens=300)
        before = held(apart, text)
        text += first.text + QUESTION.format(user="another")
        apart.until(lambda: held(apart, text) >= before + 250, 30)
        turns.append((text, ask(apart, text)))
        told = fetches(apart, [turns[-1][1]])
        print(f"TTFT {turns[-1][1].ttft_s:.2f} s;", *(each["sentence"] for each in told.values()))
        return any(each["report"] and each["report"]["transferred"] for each in told.values())

    apart.until(fetched, 180)
    assert HTTP.post(f"{apart.url}/flush_cache", timeout=60).status_code == 200
    text, second = turns[-1]
    apart.until(lambda: held(apart, text) == 0, 30)
    computed = ask(apart, text)
    print(f"TTFT {computed.ttft_s:.2f} s without a cache")
    assert (fetches(apart, [computed]), computed.text) == ({}, second.text)
