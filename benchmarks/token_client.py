"""The client of token_path.py: streams whose tokens are counted, and single requests whose time is taken.

Invariant: tokens are counted by their text (token_source.WORD), whole events only; an error, or a stream that ends
early, raises.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.token_source import WORD, prompt

LONGEST = 8000  # tokens of a stream


@dataclass(slots=True)
class Count:
    """What has come of one stream."""

    tokens: int = 0
    events: int = 0


class Load:
    """Streams that run at once against one URL; a context manager that closes them."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, streams: int, tokens_per_s: int) -> None:
        self._session = session
        self._url = url
        self._tokens_per_s = tokens_per_s
        self._counts = [Count() for _ in range(streams)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        """Returns once every stream has had a token."""
        self._tasks = [asyncio.create_task(self._stream(i, count)) for i, count in enumerate(self._counts)]
        while not all(count.tokens for count in self._counts):
            self._raise_if_ended()
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def total(self) -> Count:
        """Of all streams so far."""
        self._raise_if_ended()
        return Count(sum(each.tokens for each in self._counts), sum(each.events for each in self._counts))

    def _raise_if_ended(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()  # raises: a stream goes on until it is cancelled

    async def _stream(self, number: int, count: Count) -> None:
        """One request after the other, the next when one has had all its tokens."""
        word = WORD.encode()
        while True:
            body = asked(number, stream=True, max_tokens=LONGEST, tokens_per_s=self._tokens_per_s)
            begun, rest = count.tokens, b""
            async with self._session.post(self._url, json=body) as response:
                response.raise_for_status()
                async for data in response.content.iter_any():
                    whole, _, rest = (rest + data).rpartition(b"\n\n")
                    count.tokens += whole.count(word)
                    count.events += whole.count(b"data: ")
            if count.tokens - begun != LONGEST:
                raise RuntimeError(f"a stream of {self._url} had {count.tokens - begun} tokens of {LONGEST}")


def asked(number: int, *, stream: bool, max_tokens: int, tokens_per_s: int) -> dict[str, Any]:
    """A request's body; ``number`` makes its prompt its own."""
    return {
        "prompt": prompt(number), "max_tokens": max_tokens, "temperature": 0, "seed": tokens_per_s, "stream": stream,
        "ignore_eos": True,
    }  # fmt: skip


async def times_of(session: aiohttp.ClientSession, url: str, *, stream: bool, numbers: Sequence[int]) -> list[float]:
    """Seconds of each of so many requests, one after the other: of one token to the end, or of a stream of two to its
    first event."""
    found = []
    for number in numbers:
        body = asked(number, stream=stream, max_tokens=2 if stream else 1, tokens_per_s=0)
        started_s = time.perf_counter()
        async with session.post(url, json=body) as response:
            response.raise_for_status()
            first = await response.content.readany() if stream else await response.read()
            found.append(time.perf_counter() - started_s)
            if WORD.encode() not in first:
                raise RuntimeError(f"{url} answered without the token: {first[:200]!r}")
            await response.read()
    return found
