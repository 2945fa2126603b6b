"""What the token source itself costs, with nothing around it: the part of token_path.py's figures that is not the path.

Thread: the caller's, beside the engine's.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.token_client import LONGEST
from benchmarks.token_source import paced_engine, request
from replicas.engine.loop import EngineLoop
from replicas.types import TokenDelta

WARM_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A load."""

    streams: int
    tokens_per_s: int  # of each stream; 0: flat out
    windows: float  # how long, in windows: where tokens are few, what idle processes do weighs more


PACES = {
    "steady": Pace(streams=16, tokens_per_s=20, windows=1.0),
    "flat out": Pace(streams=32, tokens_per_s=0, windows=0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The engine with nothing around it."""

    us_a_token: Mapping[str, float]  # by load
    latency_s: Mapping[str, float]  # median, by kind of request

    @staticmethod
    def measure(model: str, *, window_s: float, requests: int) -> "Alone":
        """``requests``: single ones, of each kind."""
        loop = EngineLoop(paced_engine(model))
        loop.start()
        try:
            return Alone(
                us_a_token={name: _engine_cost(loop, pace, pace.windows * window_s) for name, pace in PACES.items()},
                latency_s={
                    "unary": asyncio.run(_engine_latency(loop, requests, max_new_tokens=1)),
                    "TTFT": asyncio.run(_engine_latency(loop, requests, max_new_tokens=2)),
                },
            )
        finally:
            loop.stop()


def _engine_cost(loop: EngineLoop, pace: Pace, window_s: float) -> float:
    """CPU of the engine's thread a token, in us; the tokens are thrown away."""
    num_tokens = 0
    [thread] = [each for each in threading.enumerate() if each.name == "manta-engine"]
    assert thread.ident is not None, "an engine that runs has a thread"
    clock = time.pthread_getcpuclockid(thread.ident)

    def sink(deltas: list[TokenDelta]) -> None:
        nonlocal num_tokens
        num_tokens += sum(len(delta.token_ids) for delta in deltas)

    asks = [
        request(f"alone-{i}", max_new_tokens=LONGEST, tokens_per_s=pace.tokens_per_s, number=i)
        for i in range(pace.streams)
    ]
    for each in asks:
        loop.submit(each, sink)
    time.sleep(WARM_S)
    begun, cpu_s = num_tokens, time.clock_gettime(clock)
    time.sleep(window_s)
    used_s, made = time.clock_gettime(clock) - cpu_s, num_tokens - begun
    for each in asks:
        loop.abort(each.rid)
    while loop.num_open:
        time.sleep(0.01)
    return 1e6 * used_s / made


async def _engine_latency(loop: EngineLoop, num: int, *, max_new_tokens: int) -> float:
    """Median seconds to the first token."""
    found = []
    for number in range(num):
        name = f"direct-{max_new_tokens}-{number}"
        asked = request(name, max_new_tokens=max_new_tokens, tokens_per_s=0, number=number)
        started_s, first_s = time.perf_counter(), None
        async for _ in loop.generate(asked):
            first_s = first_s or time.perf_counter() - started_s
        assert first_s is not None, f"{name} ended without a token"
        found.append(first_s)
    return statistics.median(found)
