"""What metrics may cost, with room for a busy machine."""

import time
import timeit
from collections.abc import Callable

import numpy as np
from prometheus_client import generate_latest

from dashboards.catalog import Process
from deployments.record.route_log import OBJECTIVES, Following, RequestWatch, RouteLog
from deployments.record.timeline import Arrival
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.metrics.router_events import RouterEvents
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta, Usage
from routing.why import PromptHistory

USAGE = Usage(prompt_tokens=4, completion_tokens=1, cached_tokens=0)
TOKEN = TokenDelta(rid="a", token_ids=(5,), usage=USAGE)
LAST = TokenDelta(rid="a", token_ids=(5,), usage=USAGE, finish=Finish(reason=FinishReason.LENGTH))
REQUEST = GenerateRequest(rid="a.0-b", token_ids=np.arange(4, dtype=np.int32))


def following(watch: RequestWatch) -> Following:
    """A request that has its first token; no decision is made of it."""
    arrival = Arrival(endpoint="chat", arrived_s=time.monotonic())
    prompts = PromptHistory(16, time.monotonic)
    found = Following(REQUEST, arrival, routes=RouteLog(), prompts=prompts, watch=watch, clock=time.monotonic)
    found.timeline.saw(TOKEN, time.monotonic())
    return found


def best_us(work: Callable[[], object], *, number: int) -> float:
    """The processor's time: on a machine that others use too most of a clock's is theirs."""
    return min(timeit.repeat(work, number=number, repeat=7, timer=time.thread_time)) / number * 1e6


def test_a_token_costs_microseconds_and_a_scrape_milliseconds() -> None:
    """Measured 0.35 us, 30 us and 4 ms; a router makes thousands of tokens a second."""
    emitter = Emitter(Process.ROUTER, Identity(model="m", role="router", replica="r"), disaggregated=True)
    watch = RouterEvents(emitter, objectives=OBJECTIVES, disaggregated=True)
    one = following(watch)

    def whole() -> None:
        with following(watch) as request:
            request.timeline.saw(LAST, time.monotonic())

    assert best_us(lambda: one.saw(TOKEN), number=20_000) < 5.0
    assert best_us(whole, number=2_000) < 500.0
    assert best_us(lambda: generate_latest(emitter.registry), number=10) < 100_000.0
