"""Replicas leave and come under conversations that go on, on a real local Ray: what they had computed is kept."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest

from tests.serve.running import Running
from tests.serve.scaled import FILE

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
SESSIONS = 9
THINK_S = 4.0
PUSH = float(os.environ.get("MANTA_TEST_PUSH", "0.5"))  # 0: what it is like without


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("moves")
    (folder / "replicas").write_text("3")
    running = Running(
        folder,
        import_path="tests.serve.scaled:build",
        environment={FILE: str(folder / "replicas")},
        replicas={
            "autoscaling": {"min_replicas": 1, "max_replicas": 3, "initial_replicas": 3},
            "cpus": 0.3, "health_period_s": 1, "drain_timeout_s": 30,
            "push_share": PUSH, "fill_s": 5.0 if PUSH else 0.0,
        },
        cache={"max_total_tokens": 12_000, "host_memory_bytes": 600 << 20},
    )  # fmt: skip
    try:
        running.start()
        yield running
    finally:
        left = running.stop()
    assert left == []


def scale(app: Running, replicas: int) -> None:
    (app.config.parent / "replicas").write_text(str(replicas))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answered turn of a conversation; tokens."""

    at_s: float
    took_s: float
    replica: str
    prompt: int
    cached: int
    known: int  # of the prompt, those of the turn before: at best all of them are cached


@dataclass
class Talk:
    """A conversation that goes on until ``stop``."""

    number: int
    turns: list[Turn] = field(default_factory=list)

    def run(self, http: httpx.Client, url: str, stop: threading.Event) -> None:
        text, known = f"{self.number}: the tale of winter number {self.number}, told slowly. " * 25, 0
        while not stop.is_set():
            body = {"prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            began_s = time.monotonic()
            answer = http.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            route = dict(part.split("=", 1) for part in answer.headers["x-manta-route"].split("; "))
            self.turns.append(
                Turn(
                    at_s=time.monotonic(),
                    took_s=time.monotonic() - began_s,
                    replica=route["replica"],
                    prompt=usage["prompt_tokens"],
                    cached=usage["prompt_tokens_details"]["cached_tokens"],
                    known=known,
                )
            )
            known = (usage["prompt_tokens"] - 1) // 16 * 16
            text += f" And then, in chapter {len(self.turns)}, snow fell again."
            stop.wait(THINK_S)


def names(app: Running) -> set[str]:
    return {state["replica"]["replica_id"] for state in app.states()}


def hit_rate(turns: list[Turn]) -> float:
    return sum(turn.cached for turn in turns) / max(sum(turn.known for turn in turns), 1)


def p95(turns: list[Turn]) -> float:
    took = sorted(turn.took_s for turn in turns)
    return took[min(int(0.95 * len(took)), len(took) - 1)]


def test_conversations_keep_their_caches_while_three_replicas_become_two_and_three_again(app: Running) -> None:
    talks, stop = [Talk(number) for number in range(SESSIONS)], threading.Event()
    with httpx.Client(timeout=120) as http, ThreadPoolExecutor(SESSIONS) as pool:
        running = [pool.submit(talk.run, http, app.url, stop) for talk in talks]
        try:
            app.until(lambda: all(len(talk.turns) >= 4 for talk in talks), 120)
            three = names(app)
            left_s = time.monotonic()
            last = {talk.number: talk.turns[-1] for talk in talks}
            scale(app, 2)
            app.until(lambda: len(names(app)) == 2, 60)
            [victim] = three - names(app)
            app.until(lambda: all(talk.turns[-1].at_s > left_s + 12 for talk in talks), 60)
            came_s = time.monotonic()
            scale(app, 3)
            app.until(lambda: len(names(app)) == 3, 120)
            back_s = time.monotonic()
            app.until(lambda: all(talk.turns[-1].at_s > back_s + 8 for talk in talks), 60)
        finally:
            stop.set()
        for each in running:
            each.result()  # no request has failed
    every = [turn for talk in talks for turn in talk.turns if turn.known]
    before = [turn for turn in every if turn.at_s < left_s]
    during = [turn for turn in every if left_s <= turn.at_s < came_s]
    after = [turn for turn in every if turn.at_s >= came_s]
    at_stake = sum(turn.prompt for turn in last.values() if turn.replica == victim)
    lost = sum(max(turn.known - turn.cached, 0) for turn in during)
    lost_before = sum(max(turn.known - turn.cached, 0) for turn in before)
    print(
        f"\n{len(every)} turns; hit rate {hit_rate(before):.3f} with three, {hit_rate(during):.3f} with two, "
        f"{hit_rate(after):.3f} with three again; p95 {p95(before):.2f}, {p95(during):.2f}, {p95(after):.2f} s; "
        f"the one that left held {at_stake} tokens of talks, {lost} were computed again (before it left {lost_before})"
    )
    assert at_stake > 0
    if PUSH:
        assert lost <= 0.2 * at_stake
