"""The token path's two ends: an engine without a model in two Serve applications, and the client that counts its
tokens.

Owns:      the pace of the steps: a request's ``seed`` is the tokens a second that it wants, 0 all that it can get. A
           step waits for the slowest pace among its requests; prefill does not wait. Scheduler, prefix cache and
           detokeniser are real, over steps that compute nothing.
Invariant: every token is WORD, so that a reader of an answer counts its tokens by counting that.
Thread:    the engine's.

``manta`` is `deployments.app:build` but for the engine in the replica. ``plain`` is what Serve's documents show: an
ingress that iterates over ``handle.options(stream=True)`` and sends one event a token, of the same form as Manta's.
"""

import asyncio
import json
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from deployments.app import build_of
from deployments.replica.model_replica import ModelReplica
from deployments.settings.places import local_path
from deployments.settings.schema import AppConfig
from replicas.cache.kv import KvCache
from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine.engine import Engine, Executor
from replicas.engine.loop import EngineLoop
from replicas.resolve import resolve
from replicas.runner.device import measure_hardware
from replicas.runner.model_files import load_model_config
from replicas.scheduler.plan import DecodePlan, DoneStep, PendingStep, StepPlan, StepResult
from replicas.text.tokenizer import Tokenizer
from replicas.types import GenerateRequest, SamplingParams, TokenDelta
from routing.types import Role

WORD = " the"
MAX_RUNNING = 64
MOST_ONGOING = 4096
LONGEST = 8000  # tokens of a stream
WARM_S = 1.0


class PacedSteps:
    """Launches steps that compute nothing and take the time they should."""

    def __init__(
        self,
        token: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._token, self._clock, self._sleep = token, clock, sleep
        self._last_due_s = 0.0

    def launch(self, plan: StepPlan) -> PendingStep:
        made = StepResult(token_ids=np.full(len(plan.sampling), self._token, dtype=np.int32))
        tokens_per_s = 0
        if isinstance(plan, DecodePlan):
            tokens_per_s = min((row.params.seed for row in plan.sampling if row.params.seed), default=0)
        if not tokens_per_s:
            return DoneStep(made)
        self._last_due_s = max(self._last_due_s + 1 / tokens_per_s, self._clock())
        return PacedStep(made, self._last_due_s, self._clock, self._sleep)


@dataclass(frozen=True, slots=True)
class PacedStep:
    """A step that is over at ``due_s``."""

    made: StepResult
    due_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def result(self) -> StepResult:
        left_s = self.due_s - self.clock()
        if left_s > 0:
            self.sleep(left_s)
        return self.made


def paced_engine(model: str, *, record_events: bool = True) -> Engine:
    """Return an engine with the tokenizer and the shape of ``model``, and none of its weights."""
    shape = load_model_config(model, dtype=None, context_len=None)
    scheduler = SchedulerConfig(max_running_requests=MAX_RUNNING)
    config = resolve(shape, measure_hardware(), cache=CacheConfig(page_size=16), scheduler=scheduler)
    tokenizer = Tokenizer(config.model.path)
    [token] = tokenizer.encode(WORD)
    kv = KvCache(
        num_pages=MAX_RUNNING * shape.context_len // config.cache.page_size,  # no request ever waits for a page
        page_size=config.cache.page_size,
        max_requests=MAX_RUNNING,
        context_len=shape.context_len,
        record_events=record_events,
    )
    executor = Executor(launch=PacedSteps(int(token)).launch)
    return Engine(config, kv=kv, max_running=MAX_RUNNING, executor=executor, tokenizer=tokenizer)


def request(rid: str, *, max_new_tokens: int, tokens_per_s: int, number: int) -> GenerateRequest:
    """Return a request; ``number`` makes its prompt its own."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0, seed=tokens_per_s, ignore_eos=True)
    return GenerateRequest(rid=rid, token_ids=np.array(prompt(number), dtype=np.int32), sampling=sampling)


def prompt(number: int) -> list[int]:
    """Return [32] token ids."""
    return [1000 + (number * 37 + i * i) % 20_000 for i in range(32)]


class PacedReplica(ModelReplica):
    """A model replica whose engine has no model."""

    @staticmethod
    def load(config: AppConfig, role: Role) -> Engine:
        return paced_engine(local_path(config.model.path))


def manta(args: dict[str, Any]) -> Application:
    return build_of(PacedReplica, args)


class PlainEngine:
    """The same engine behind Serve's own streaming."""

    def __init__(self, model: str) -> None:
        self._loop = EngineLoop(paced_engine(local_path(model), record_events=False))
        self._loop.start()

    async def generate(self, asked: GenerateRequest) -> AsyncIterator[TokenDelta]:
        async for delta in self._loop.generate(asked):
            yield delta


class PlainIngress:
    """The part of /v1/completions that overhead.py asks for."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine.options(method_name="generate", stream=True)
        self._count = 0

    async def __call__(self, received: Request) -> Response:
        if received.method == "GET":  # whether it is up
            return Response()
        body = await received.json()
        self._count += 1
        name = f"plain-{self._count}"
        asked = request(name, max_new_tokens=body["max_tokens"], tokens_per_s=body["seed"], number=self._count)
        deltas = self._engine.remote(asked)
        if body["stream"]:
            return StreamingResponse(_events(name, deltas), media_type="text/event-stream")
        return JSONResponse(_chunk(name, "".join([delta.text async for delta in deltas]), None))


def plain(args: dict[str, Any]) -> Application:
    options: dict[str, Any] = {"max_ongoing_requests": MOST_ONGOING, "ray_actor_options": {"num_cpus": 0}}
    engine = serve.deployment(PlainEngine).options(**options).bind(args["model"])
    application: Application = serve.deployment(PlainIngress).options(**options).bind(engine)
    return application


async def _events(name: str, deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[bytes]:
    async for delta in deltas:
        finish = None if delta.finish is None else delta.finish.reason.value
        yield b"data: " + json.dumps(_chunk(name, delta.text, finish), separators=(",", ":")).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _chunk(name: str, text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return {
        "id": f"cmpl-{name}", "object": "text_completion", "created": 0, "model": "SmolLM2-135M-Instruct",
        "choices": [choice], "system_fingerprint": None,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A load of streams."""

    streams: int
    tokens_per_s: int  # of each stream; 0: flat out
    windows: float  # how long, in windows: where tokens are few, what idle processes do weighs more


PACES = {
    "steady": Pace(streams=16, tokens_per_s=20, windows=1.0),
    "flat out": Pace(streams=32, tokens_per_s=0, windows=0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What the engine costs with nothing around it."""

    us_a_token: Mapping[str, float]  # by load
    latency_s: Mapping[str, float]  # median, by kind of request

    @staticmethod
    def measure(model: str, *, window_s: float, requests: int) -> "Alone":
        """Run the engine in this process. ``requests``: single ones, of each kind."""
        loop = EngineLoop(paced_engine(model))
        loop.start()
        try:
            latencies = {"unary": _latency_s(loop, requests, 1), "TTFT": _latency_s(loop, requests, 2)}
            return Alone(
                us_a_token={name: _engine_us(loop, pace, pace.windows * window_s) for name, pace in PACES.items()},
                latency_s={kind: asyncio.run(latency) for kind, latency in latencies.items()},
            )
        finally:
            loop.stop()


def _engine_us(loop: EngineLoop, pace: Pace, window_s: float) -> float:
    """Return the CPU of the engine's thread a token, in us; the tokens are thrown away."""
    num_tokens = 0
    [thread] = [each for each in threading.enumerate() if each.name == "manta-engine"]
    assert thread.ident is not None, "an engine that runs has a thread"
    clock = time.pthread_getcpuclockid(thread.ident)

    def sink(deltas: list[TokenDelta]) -> None:
        nonlocal num_tokens
        num_tokens += sum(len(delta.token_ids) for delta in deltas)

    names = [f"alone-{i}" for i in range(pace.streams)]
    for i, name in enumerate(names):
        loop.submit(request(name, max_new_tokens=LONGEST, tokens_per_s=pace.tokens_per_s, number=i), sink)
    time.sleep(WARM_S)
    begun, cpu_s = num_tokens, time.clock_gettime(clock)
    time.sleep(window_s)
    used_s, made = time.clock_gettime(clock) - cpu_s, num_tokens - begun
    for name in names:
        loop.abort(name)
    while loop.num_open:
        time.sleep(0.01)
    return 1e6 * used_s / made


async def _latency_s(loop: EngineLoop, num: int, max_new_tokens: int) -> float:
    """Return the median seconds to the first token."""
    found = []
    for number in range(num):
        name = f"direct-{max_new_tokens}-{number}"
        started_s, first_s = time.perf_counter(), 0.0
        async for _ in loop.generate(request(name, max_new_tokens=max_new_tokens, tokens_per_s=0, number=number)):
            first_s = first_s or time.perf_counter() - started_s
        found.append(first_s)
    return statistics.median(found)


@dataclass(slots=True)
class Count:
    """What has come of streams: tokens by their text, whole events only."""

    tokens: int = 0
    events: int = 0


class Streams:
    """Streams that run at once against one URL; a context manager that closes them. One that ends early raises."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pace: Pace) -> None:
        self._session, self._url, self._pace = session, url, pace
        self._counts = [Count() for _ in range(pace.streams)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Streams":
        """Return once every stream has had a token."""
        self._tasks = [asyncio.create_task(self._stream(i, count)) for i, count in enumerate(self._counts)]
        while not all(count.tokens for count in self._counts):
            self.total()
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def total(self) -> Count:
        """Return what has come of all streams so far."""
        for task in self._tasks:
            if task.done():
                task.result()  # raises: a stream goes on until it is cancelled
        return Count(sum(each.tokens for each in self._counts), sum(each.events for each in self._counts))

    async def _stream(self, number: int, count: Count) -> None:
        """Send one request after the other, the next when one has had all its tokens."""
        word = WORD.encode()
        while True:
            body = _asked(number, stream=True, max_tokens=LONGEST, tokens_per_s=self._pace.tokens_per_s)
            begun, rest = count.tokens, b""
            async with self._session.post(self._url, json=body) as response:
                response.raise_for_status()
                async for data in response.content.iter_any():
                    whole, _, rest = (rest + data).rpartition(b"\n\n")
                    count.tokens += whole.count(word)
                    count.events += whole.count(b"data: ")
            if count.tokens - begun != LONGEST:
                raise RuntimeError(f"a stream of {self._url} had {count.tokens - begun} tokens of {LONGEST}")


def _asked(number: int, *, stream: bool, max_tokens: int, tokens_per_s: int) -> dict[str, Any]:
    """Return a request's body; ``number`` makes its prompt its own."""
    return {
        "prompt": prompt(number), "max_tokens": max_tokens, "temperature": 0, "seed": tokens_per_s, "stream": stream,
        "ignore_eos": True,
    }  # fmt: skip


async def times_of(session: aiohttp.ClientSession, url: str, *, stream: bool, numbers: Sequence[int]) -> list[float]:
    """Return the seconds of single requests, one after the other: of one token to the end, or of a stream of two to
    its first event."""
    found = []
    for number in numbers:
        body = _asked(number, stream=stream, max_tokens=2 if stream else 1, tokens_per_s=0)
        started_s = time.perf_counter()
        async with session.post(url, json=body) as response:
            response.raise_for_status()
            first = await response.content.readany() if stream else await response.read()
            found.append(time.perf_counter() - started_s)
            if WORD.encode() not in first:
                raise RuntimeError(f"{url} answered without the token: {first[:200]!r}")
            await response.read()
    return found
