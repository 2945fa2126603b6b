"""Replicas leave and come under conversations that go on, on a real local Ray: what they had computed is kept."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.serve.running import HTTP, Running
from tests.serve.scaled import FILE

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
THINK_S = 1.0
PUSH = float(os.environ.get("MANTA_TEST_PUSH", "0.5"))  # 0: what it is like without


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("migration")
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

    took_s: float
    replica: str
    known: int  # of the prompt, those of the turn before: at best all of them are cached
    cached: int


class Talk:
    """A conversation; each turn repeats what was said before and adds a sentence."""

    def __init__(self, app: Running, number: int, *, sentences: int = 25) -> None:
        self.url = app.url
        self.text = f"{number}: the tale of winter number {number}, told slowly. " * sentences
        self.turns: list[Turn] = []
        self.known = 0

    def go_on(self, *, only_on: str | None = None) -> Turn:
        """Ask for the next turn. ``only_on``: the replica that must answer; None: whichever the router chooses."""
        body = {"prompt": self.text, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        headers = {} if only_on is None else {"x-manta-replicas": only_on}
        began_s = time.monotonic()
        answer = HTTP.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=120)
        took_s = time.monotonic() - began_s
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        route = dict(part.split("=", 1) for part in answer.headers["x-manta-route"].split("; "))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turn = Turn(took_s=took_s, replica=route["replica"], known=self.known, cached=cached)
        self.turns.append(turn)
        self.known = (usage["prompt_tokens"] - 1) // 16 * 16
        self.text += f" And then, in chapter {len(self.turns)}, snow fell again."
        return turn

    def expected(self) -> int:
        """The cached tokens that the router expects of the next turn now."""
        dry = HTTP.post(f"{self.url}/route/explain", json={"prompt": self.text}, timeout=30)
        return int(dry.json()["predicted"]["cached_tokens"])


def names(app: Running) -> set[str]:
    """The replicas in service; one that is too busy to tell of itself has not left."""
    info = app.info()
    return {state["replica"]["replica_id"] for state in info["internal_states"]} | set(info["not_answering"])


def lost(turns: list[Turn]) -> int:
    return sum(max(turn.known - turn.cached, 0) for turn in turns)


def test_conversations_keep_their_caches_while_three_replicas_become_two_and_three_again(app: Running) -> None:
    """One goes on all the time and no request of it fails. The others wait while a replica leaves or comes, so that
    what they find afterwards does not depend on how fast this machine is."""
    stop, restless = threading.Event(), Talk(app, 0, sentences=1)  # short: nobody waits long for it

    def goes_on() -> None:
        while not stop.wait(THINK_S):
            restless.go_on()

    three = sorted(names(app))
    talks = {replica: [Talk(app, 1 + 10 * at + i) for i in range(3)] for at, replica in enumerate(three)}
    every = [talk for each in talks.values() for talk in each]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(goes_on)
        try:
            for replica, each in talks.items():
                for talk in each:
                    talk.go_on(only_on=replica)
            before = [talk.go_on(only_on=replica) for replica, each in talks.items() for talk in each]
            scale(app, 2)
            app.until(lambda: len(names(app)) == 2, 120)
            [victim] = set(three) - names(app)
            orphans = [talk for talk in every if talk.turns[-1].replica == victim]
            at_stake = sum(talk.known for talk in orphans)
            if PUSH:  # the router has heard of it
                app.until(lambda: sum(talk.expected() for talk in orphans) >= 0.8 * at_stake, 60)
            during = [talk.go_on() for talk in orphans]
            others = [talk.go_on() for talk in every if talk not in orphans]
            scale(app, 3)
            app.until(lambda: len(names(app)) == 3, 120)
            [new] = names(app) - set(three)
            after = [talk.go_on(only_on=new) for talk in every]
        finally:
            stop.set()
        running.result()
    print(
        f"\n{at_stake} tokens of {len(orphans)} talks were on the one that left, {lost(during)} of them were computed "
        f"again, of the others' {lost(others)} (before it left {lost(before)}); the new one computed {lost(after)} of "
        f"{sum(turn.known for turn in after)}; the restless talk had {len(restless.turns)} turns, the longest of "
        f"{max(turn.took_s for turn in restless.turns):.2f} s"
    )
    assert len(orphans) == 3
    assert lost(before) == 0
    if PUSH:
        assert lost(during) <= 0.2 * at_stake
        assert lost(after) < sum(turn.known for turn in after), "a new replica has taken over what was hot"
