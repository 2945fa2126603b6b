"""Adapters (LoRA) over real Ray, asked for over HTTP: two routers, two replicas, and a name that stands for another
adapter again and again while hundreds of requests ask for it."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.embedded import short_model
from tests.serve.running import HTTP, Running
from tests.serve.two_routers.conftest import FIRST, FIXED, SECOND

pytestmark = [pytest.mark.serve, pytest.mark.model]
NUM_REQUESTS, NUM_AT_ONCE = 600, 12
RELOAD_S = 0.5
PROMPTS = [
    f"{'Once upon a time there was a king who had a daughter. ' * 12}She asked him {n} things:" for n in range(4)
]


@dataclass(slots=True)
class Version:
    """What the name ``poet`` was made to stand for, from when on at the earliest and at the latest."""

    of: str
    asked_s: float
    done_s: float = field(default=float("inf"))


class Asker:
    """Asks an application for completions, and knows what each adapter answers alone."""

    def __init__(self, app: Running, model: str) -> None:
        self.app, self.model = app, model
        self.alone: dict[tuple[str, str], str] = {}  # (adapter, prompt) -> answer; "": the model's own
        self.versions: list[Version] = []

    def ask(self, name: str, prompt: str, *, salt: str = "") -> str:
        """Ask for a completion; ``salt``: whose cached prefixes it may meet."""
        body = {"model": name or self.model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = HTTP.post(f"{self.app.url}/v1/completions", json=body | {"cache_salt": salt}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == (name or self.model)
        return str(answer.json()["choices"][0]["text"])

    def load(self, name: str, path: str, status: int = 200) -> str:
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        answer = HTTP.post(f"{self.app.url}/v1/load_lora_adapter", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.text

    def reload(self, of: str) -> None:
        version = Version(of, time.monotonic())
        self.versions.append(version)
        self.load("poet", of)
        version.done_s = time.monotonic()

    def wrong(self, number: int) -> str:
        """Ask one of the mixed requests. Returns: what is wrong with its answer; "" if nothing is."""
        name, prompt = ("poet", "", "poet", FIXED)[number % 4], PROMPTS[number // 4 % len(PROMPTS)]
        sent_s = time.monotonic()
        text = self.ask(name, prompt)
        ended_s = time.monotonic()
        may_be = [name]
        if name == "poet":
            before = [each for each in self.versions if each.done_s <= sent_s][-1:]
            meanwhile = [each for each in self.versions if each.asked_s <= ended_s and each.done_s > sent_s]
            may_be = [each.of for each in (*before, *meanwhile)]
        if text in [self.alone[each, prompt] for each in may_be]:
            return ""
        return f"{name} may be {may_be}: {text!r}, and not {[who for who, told in self.alone.items() if told == text]}"


def states(app: Running) -> list[dict[str, Any]]:
    return [dict(state["stats"]["adapters"]) for state in app.states()]


def test_a_name_that_is_given_again_under_load_never_meets_the_pages_of_what_it_was(
    app: Running, folder: Path, refs: set[str]
) -> None:
    root, asker = folder / "all", Asker(app, Path(short_model()).name)
    asker.load(FIRST, FIRST)
    asker.load(SECOND, str(root / SECOND))
    assert "is no folder below adapters.roots" in asker.load("other", str(folder), 400)
    for prompt in PROMPTS:
        for who in ("", FIXED, FIRST, SECOND):
            asker.alone[who, prompt] = asker.ask(who, prompt, salt=f"alone {who}")
        assert len({asker.alone[who, prompt] for who in ("", FIXED, FIRST, SECOND)}) == 4
    listed = HTTP.get(f"{app.url}/v1/models", timeout=30).json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [
        (asker.model, None), *((name, asker.model) for name in (FIRST, FIXED, SECOND))
    ]  # fmt: skip
    assert {identity for state in states(app) for identity in state["held"]} == refs
    asker.reload(FIRST)
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        asked = [threads.submit(asker.wrong, number) for number in range(NUM_REQUESTS)]
        while not all(each.done() for each in asked):
            asker.reload(SECOND if asker.versions[-1].of == FIRST else FIRST)
            Event().wait(RELOAD_S)
        assert [each.result() for each in asked if each.result()] == []
    assert len(asker.versions) >= 10
    app.until(app.idle, 60)
    assert sum(state["num_loads"] for state in states(app)) <= 2 * len(refs), "what is held is loaded once"
