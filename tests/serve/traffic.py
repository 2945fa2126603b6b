"""Requests over HTTP as clients send them, and what their answers say: the truth that metrics are held against.

Owns:      the count of what was sent, how each ended, and the usage of each answer.
Invariant: every request has a name of its own that begins with NAME, so that it can be looked for in what must not
           hold it.
"""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.serve.running import HTTP

NAME = "watched-request"
SHARED = "A long story about pages and trees, told slowly. " * 16
TOO_LONG = 9_000  # tokens asked for; no model of the tests has so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request that came to a token. Counts in tokens."""

    name: str
    endpoint: str
    whole: bool  # the client read all of it
    prompt: int
    cached: int
    output: int


class Traffic:
    """`round` after round; the lists grow."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._number = 0
        self.answered: list[Answered] = []
        self.ended: Counter[tuple[str, str]] = Counter()  # (endpoint, outcome) -> requests

    @property
    def num_sent(self) -> int:
        return self.ended.total()

    def sum_of(self, field: str, *, whole: bool) -> int:
        """Over answers that were read to their end, or also over those that were not."""
        return sum(getattr(each, field) for each in self.answered if each.whole or not whole)

    def last(self, endpoint: str) -> Answered:
        return next(each for each in reversed(self.answered) if each.endpoint == endpoint and each.whole)

    def round(self) -> None:
        """Eight requests at once: prompts with a shared prefix, chats, streams, one given up, one that cannot be."""
        work = [self._complete, self._complete, self._chat, self._chat, self._stream, self._stream]
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(each, self._name()) for each in (*work, self._leave, self._ask_too_much)]
        for each in running:
            each.result()

    def _name(self) -> str:
        with self._lock:
            self._number += 1
            return f"{NAME}-{self._number}"

    def _complete(self, name: str) -> None:
        answer = self._post("completions", name, prompt=f"{SHARED}What of {name}?", max_tokens=8)
        self._note("completions", name, answer.json()["usage"])

    def _chat(self, name: str) -> None:
        messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": f"And what of {name}?"}]
        answer = self._post("chat/completions", name, messages=messages, max_tokens=8)
        self._note("chat", name, answer.json()["usage"])

    def _post(self, path: str, name: str, **body: Any) -> httpx.Response:
        body = {"temperature": 0, "ignore_eos": True, **body}
        answer = HTTP.post(f"{self._url}/v1/{path}", json=body, headers={"X-Request-Id": name}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer

    def _stream(self, name: str) -> None:
        usage = None
        with self._streaming(name, f"{SHARED}What of {name}?", max_tokens=16) as answer:
            for chunk in chunks(answer):
                usage = chunk.get("usage") or usage
        assert usage is not None
        self._note("completions", name, usage)

    def _leave(self, name: str) -> None:
        """Closes its stream at the first chunk; the router's record says what it got until then."""
        with self._streaming(name, f"{SHARED}What of {name}?", max_tokens=400) as answer:
            next(chunks(answer))
        route = HTTP.get(f"{self._url}/route/{name}", timeout=30).json()["tries"][-1]  # behind its moves
        with self._lock:
            self.ended["completions", "cancelled"] += 1
            cached, prompt = route["actual"]["cached_tokens"], route["num_tokens"]
            self.answered.append(
                Answered(name=name, endpoint="completions", whole=False, prompt=prompt, cached=cached, output=0)
            )

    def _streaming(self, name: str, prompt: str, *, max_tokens: int) -> Any:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        headers = {"X-Request-Id": name}
        return HTTP.stream("POST", f"{self._url}/v1/completions", json=body, headers=headers, timeout=120)

    def _ask_too_much(self, name: str) -> None:
        body = {"prompt": SHARED, "max_tokens": TOO_LONG}
        answer = HTTP.post(f"{self._url}/v1/completions", json=body, headers={"X-Request-Id": name}, timeout=30)
        assert answer.status_code == 400, answer.text
        with self._lock:
            self.ended["completions", "invalid"] += 1

    def _note(self, endpoint: str, name: str, usage: dict[str, Any]) -> None:
        with self._lock:
            self.ended[endpoint, "ok"] += 1
            self.answered.append(
                Answered(
                    name=name, endpoint=endpoint, whole=True, prompt=usage["prompt_tokens"],
                    cached=usage["prompt_tokens_details"]["cached_tokens"], output=usage["completion_tokens"],
                )
            )  # fmt: skip


def chunks(answer: httpx.Response) -> Any:
    """The events of a stream."""
    for line in answer.iter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)
