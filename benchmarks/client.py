"""A load client for any OpenAI-compatible URL: token-id prompts, streaming, times as a client sees them.

Owns:      when requests start (open loop: Poisson arrivals; closed loop: a number of conversations at once); how a
           server's completions differ from OpenAI's with vLLM's extensions, which the client speaks.
Never:     retries, or counts a failed request among the times; errors are reported beside them.
Invariant: every request of the workload ends in exactly one Sample: answered, failed, or cut off by the time limit.
Thread:    one event loop.

aiohttp rather than httpx: it parses a streamed token at a fraction of the CPU, and the client shares the machine with
the server that it measures.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any

import aiohttp

from benchmarks.harness import percentile
from benchmarks.workloads import Conversation, Workload

FIELDS: Mapping[str, Any] = {
    "temperature": 0,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "return_token_ids": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What one server takes and says otherwise than OpenAI's completions."""

    fields: Mapping[str, Any] = field(default_factory=lambda: FIELDS)  # besides model, prompt, max_tokens and stream
    as_text: Callable[[Sequence[int]], str] | None = None  # for a server that takes text alone; None: it takes ids
    keeps_alive: bool = True  # False: a connection for each request, as the server hangs up on kept ones without notice
    says_done: bool = True  # the stream ends with [DONE]; otherwise with the chunk that tells why it ended


OPENAI = Dialect()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """``concurrency`` conversations at once; the next starts when one ends."""

    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Conversations arrive at ``rate`` a second on average, whatever the server does (seeded Poisson process)."""

    rate: float
    seed: int = 0

    def arrivals_s(self, num: int) -> list[float]:
        """Return [num] seconds from the start, ascending; the first is 0."""
        rng = Random(self.seed)
        return list(accumulate((rng.expovariate(self.rate) for _ in range(num - 1)), initial=0.0))[:num]


@dataclass(slots=True, kw_only=True)
class Sample:
    """One request as the client saw it. Times in seconds."""

    name: str  # conversation/turn
    start_s: float = 0.0  # from the start of the run
    ttft_s: float | None = None  # to the first chunk that carries a token
    gaps_s: list[float] = field(default_factory=list)  # between chunks that carry tokens
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tells_cached: bool = False  # the server said how many of the prompt's tokens it had
    token_ids: list[int] = field(default_factory=list)  # the answer's, where the server tells them
    text: str = ""
    error: str | None = None
    retry_after_s: float | None = None  # where it was refused, and told when to ask again

    @property
    def answer_known(self) -> bool:
        """Whether the server sent the ids of every token."""
        return len(self.token_ids) == self.completion_tokens

    @property
    def tpot_s(self) -> float | None:
        """The mean time of each token after the first."""
        if self.ttft_s is None or self.completion_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All samples of one run."""

    samples: tuple[Sample, ...]
    wall_s: float
    client_cpu_s: float
    answers_known: bool  # every answer's ids were told, so that resent histories are exact

    @property
    def answered(self) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.samples if sample.error is None)

    @property
    def errors(self) -> Counter[str]:
        return Counter(sample.error for sample in self.samples if sample.error is not None)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(sample.completion_tokens for sample in self.answered) / self.wall_s

    @property
    def hit_percent(self) -> float | None:
        """Return how much of the prompts the server says it had; None: it does not say."""
        if not any(sample.tells_cached for sample in self.answered):  # vllm leaves it out where it is 0
            return None
        prompt_tokens = sum(sample.prompt_tokens for sample in self.answered)
        return 100 * sum(sample.cached_tokens for sample in self.answered) / prompt_tokens

    def quantile(self, of: str, q: float) -> float | None:
        """Return the ``q``-th percentile of a time of the answered requests, by its name; None where none has it."""
        known = [value for sample in self.answered if (value := getattr(sample, of)) is not None]
        return percentile(known, q) if known else None

    def gap_s(self, q: float) -> float | None:
        """Return the ``q``-th percentile of the gaps between tokens."""
        gaps = [gap for sample in self.answered for gap in sample.gaps_s]
        return percentile(gaps, q) if gaps else None


class Client:
    """Runs workloads against ``url`` (its root, without /v1)."""

    def __init__(self, url: str, model: str, *, dialect: Dialect = OPENAI, silent_s: float | None = None) -> None:
        """``silent_s``: after which a silent answer fails; None: never."""
        self._url = url.rstrip("/") + "/v1/completions"
        self._model, self._dialect, self._silent_s = model, dialect, silent_s

    async def run(self, workload: Workload, load: ClosedLoop | OpenLoop, *, max_s: float) -> Run:
        """Run all of ``workload``, at most ``max_s`` seconds; what is open or unsent then counts as cut off."""
        samples = {
            conversation.name: [Sample(name=f"{conversation.name}/{turn}") for turn in range(len(conversation.turns))]
            for conversation in workload.conversations
        }
        started_s, cpu_s = time.perf_counter(), time.process_time()
        async with self.exchange() as exchange:
            num = len(workload.conversations)
            waits = load.arrivals_s(num) if isinstance(load, OpenLoop) else [0.0] * num
            gate = asyncio.Semaphore(load.concurrency if isinstance(load, ClosedLoop) else len(waits) or 1)
            tasks = [
                asyncio.create_task(exchange.converse(conversation, samples[conversation.name], gate, wait_s))
                for conversation, wait_s in zip(workload.conversations, waits, strict=True)
            ]
            _, late = await asyncio.wait(tasks, timeout=max_s) if tasks else (set(), set())
            for task in late:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        flat = tuple(sample for turns in samples.values() for sample in turns)
        for sample in flat:
            if sample.error is None and sample.e2e_s == 0.0:
                sample.error = f"cut off after {max_s:g} s"
        return Run(
            samples=flat,
            wall_s=time.perf_counter() - started_s,
            client_cpu_s=time.process_time() - cpu_s,
            answers_known=all(sample.answer_known for sample in flat if sample.error is None),
        )

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator["Exchange"]:
        """Open a session; the run starts now."""
        connector = aiohttp.TCPConnector(limit=0, force_close=not self._dialect.keeps_alive)
        timeout, headers = aiohttp.ClientTimeout(total=None, sock_read=self._silent_s), {"Authorization": "Bearer none"}
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            yield Exchange(session, self._url, self._model, self._dialect, time.perf_counter())


@dataclass(frozen=True, slots=True)
class Exchange:
    """The requests of one run over one session."""

    session: aiohttp.ClientSession
    url: str
    model: str
    dialect: Dialect
    started_s: float

    async def converse(
        self, conversation: Conversation, samples: list[Sample], gate: asyncio.Semaphore, wait_s: float
    ) -> None:
        """Send the turns one after another, each with the whole history; stop at the first failure."""
        await asyncio.sleep(wait_s)
        async with gate:
            ids, text, as_text = list[int](), "", self.dialect.as_text
            for turn, sample in zip(conversation.turns, samples, strict=True):
                ids += turn.token_ids
                text += as_text(turn.token_ids) if as_text else ""
                await self.request(text if as_text else ids, turn.max_new_tokens, sample)
                if sample.error is not None:
                    for unsent in samples[samples.index(sample) + 1 :]:
                        unsent.error = "not sent: an earlier turn failed"
                    return
                stand_ins = turn.token_ids[:1] * (sample.completion_tokens or turn.max_new_tokens)  # no prefix hit
                ids += sample.token_ids if sample.answer_known else stand_ins
                text += sample.text

    async def request(self, prompt: list[int] | str, max_new_tokens: int, sample: Sample) -> None:
        """Send one streamed completion, and take it into ``sample``."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_new_tokens,
            "stream": True,
            **self.dialect.fields,
        }
        sent_s = time.perf_counter()
        sample.start_s = sent_s - self.started_s
        try:
            async with self.session.post(self.url, json=body) as response:
                if response.status != 200:
                    sample.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                    if response.status == 429 and (again := response.headers.get("Retry-After")):
                        sample.retry_after_s = float(again)
                else:
                    await _read_stream(response, sample, sent_s, says_done=self.dialect.says_done)
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: not JSON, or a line without end
            sample.error = f"{type(error).__name__}: {error}"
        sample.e2e_s = time.perf_counter() - sent_s


async def _read_stream(response: aiohttp.ClientResponse, sample: Sample, sent_s: float, *, says_done: bool) -> None:
    """Read server-sent events into ``sample``. A stream that ends without its last event is an error."""
    last_s = sent_s
    ended = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            break
        now_s = time.perf_counter()
        chunk = json.loads(data)
        if "error" in chunk:
            error = chunk["error"]
            sample.error = f"in the stream: {error.get('message', error) if isinstance(error, dict) else error}"
            return
        usage = chunk.get("usage") or {}
        if isinstance(usage.get("prompt_tokens"), int) and isinstance(usage.get("completion_tokens"), int):
            sample.prompt_tokens, sample.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if isinstance(details := usage.get("prompt_tokens_details"), dict):
            sample.cached_tokens, sample.tells_cached = int(details.get("cached_tokens") or 0), True
        for choice in chunk.get("choices", ()):
            ended = ended or (not says_done and choice.get("finish_reason") is not None)
            token_ids = choice.get("token_ids") or ()
            sample.token_ids += token_ids
            sample.text += choice.get("text") or ""
            if not (token_ids or choice.get("text")):
                continue
            if sample.ttft_s is None:
                sample.ttft_s = now_s - sent_s
            else:
                sample.gaps_s.append(now_s - last_s)
            last_s = now_s
    if not ended:
        sample.error = "the stream ended without [DONE]" if says_done else "the stream ended without a reason to end"
    elif sample.ttft_s is None:
        sample.error = "the stream ended without a token"
