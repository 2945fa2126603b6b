"""`make pictures`: the pictures of the live view in docs/pictures, taken anew from a Manta that runs under load.

    live_view.png    prefill and decode apart, light
    request.png      two replicas, dark, one request explained
"""

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import httpx

from deployments.settings.places import ROOT
from tests.browser.chromium import Page, open_chromium
from tests.serve.running import Running, serving

FOLDER = ROOT / "docs" / "pictures"
MOST_BYTES = 300_000
LOAD_S = 25.0  # until there is something to see
TOPICS = ("harbours", "winters", "letters", "engines")
QUESTIONS = ("Who was first?", "What came of it?", "Tell it shorter.", "And in other countries?")


class Load:
    """Users who each hold a conversation under one of a few system prompts, until `stop`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = Event()
        self._names = count(1)
        self._pool = ThreadPoolExecutor(6)
        self._users = [self._pool.submit(self._talk, number) for number in range(6)]

    def stop(self) -> None:
        self._over.set()
        for user in self._users:
            user.result()
        self._pool.shutdown()

    def _talk(self, user: int) -> None:
        round_ = 0
        while not self._over.is_set():
            topic = TOPICS[(user + round_) % len(TOPICS)]
            system = f"You are a patient teller of stories about {topic}, and you never hurry. " * (8 + 4 * (user % 3))
            messages = [{"role": "system", "content": system}]
            for question in QUESTIONS[: 2 + user % 3]:
                if not self._over.is_set():
                    messages.append({"role": "user", "content": f"({user}, {round_}) {question}"})
                    messages.append({"role": "assistant", "content": self._ask(messages)})
            round_ += 1

    def _ask(self, messages: list[dict[str, str]]) -> str:
        body = {"messages": messages, "max_tokens": 24, "temperature": 0.7}
        headers = {"X-Request-Id": f"chat-{next(self._names)}"}
        answer = httpx.post(f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=120)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


@contextmanager
def loaded(folder: Path, **settings: Any) -> Iterator[Running]:
    """An application under load, with some history."""
    with serving(folder, observatory=True, **settings) as app:
        load = Load(app.url)
        try:
            Event().wait(LOAD_S)
            yield app
        finally:
            load.stop()


def main() -> int:
    """Take the pictures; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="manta-pictures-") as name:
        page = open_chromium(Path(name) / "chromium")
        try:
            take(page, Path(name))
        finally:
            page.close()
    for path in sorted(FOLDER.glob("*.png")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
        assert path.stat().st_size < MOST_BYTES, f"{path} is larger than {MOST_BYTES} bytes"
    return 0


def take(page: Page, folder: Path) -> None:
    """Both pictures."""
    for name in ("apart", "unified"):
        (folder / name).mkdir()
    cache = {"max_total_tokens": 6_000}
    with loaded(folder / "apart", base="docs/examples/disaggregated.yaml", cache=cache) as app:
        page.open(f"{app.url}/manta/", width=1280)
        page.until(lambda: page.all(".lines path"), "a line between prefill and decode")
        page.one(".cell")
        page.picture("live_view", FOLDER)
    with loaded(folder / "unified", replicas={"count": 2}, cache=cache) as app:
        page.open(f"{app.url}/manta/", width=1280, theme="dark")
        choose_one(page)
        page.picture("request", FOLDER)


def choose_one(page: Page) -> None:
    """The newest finished request, explained, with its path in the cache."""
    page.one(".requests tr:has(.outcome.finished) .request-name").click()
    page.one("#why .sentence")
    page.one(".cell.on-path")


if __name__ == "__main__":
    sys.exit(main())
