"""What metrics cost: microseconds a token and a request in the router, milliseconds a scrape.

    python -m benchmarks.metrics_cost

Minima over repeats, so that other work on the machine counts little. A step of the engine costs the same with and
without: its tallies are kept anyway, and metrics are made of them at the scrape.
"""

import time
import timeit
from collections.abc import Callable

import numpy as np
from prometheus_client import generate_latest

from dashboards.catalog import Process
from deployments.dispatch.following import Following, RequestWatch
from deployments.dispatch.route_log import RouteLog
from deployments.dispatch.timeline import Arrival
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.metrics.router_events import RouterEvents
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta, Usage

USAGE = Usage(prompt_tokens=4, completion_tokens=1, cached_tokens=0)
TOKEN = TokenDelta(rid="a", token_ids=(5,), usage=USAGE)
LAST = TokenDelta(rid="a", token_ids=(5,), usage=USAGE, finish=Finish(reason=FinishReason.LENGTH))
REQUEST = GenerateRequest(rid="a.0-b", token_ids=np.arange(4, dtype=np.int32))
REPEATS = 7


def watched() -> tuple[Emitter, RouterEvents]:
    emitter = Emitter(Process.ROUTER, Identity(model="m", role="router", replica="r"), disaggregated=True)
    return emitter, RouterEvents(emitter, ttft_objective_s=1.0, itl_objective_s=0.1, disaggregated=True)


def following(watch: RequestWatch) -> Following:
    """A request that has its first token; no decision is made of it."""
    arrival = Arrival(endpoint="chat", arrived_s=time.monotonic())
    found = Following(REQUEST, arrival, routes=RouteLog(), watch=watch, clock=time.monotonic)
    found.timeline.saw(TOKEN, time.monotonic())
    return found


def token_us(watch: RequestWatch) -> float:
    one = following(watch)
    return best_us(lambda: one.saw(TOKEN), number=20_000)


def request_us(watch: RequestWatch) -> float:
    """All but its decision and its tokens."""

    def whole() -> None:
        with following(watch) as one:
            one.timeline.saw(LAST, time.monotonic())

    return best_us(whole, number=2_000)


def scrape_ms(emitter: Emitter) -> float:
    return best_us(lambda: generate_latest(emitter.registry), number=10) / 1e3


def best_us(work: Callable[[], object], *, number: int) -> float:
    return min(timeit.repeat(work, number=number, repeat=REPEATS)) / number * 1e6


def main() -> None:
    emitter, watch = watched()
    for name, each in (("metrics", watch), ("none", RequestWatch())):
        print(f"{name:8} a token {token_us(each):5.2f} us   a request {request_us(each):6.1f} us")
    num_lines = generate_latest(emitter.registry).count(b"\n")
    print(f"a router's scrape {scrape_ms(emitter):.1f} ms for {num_lines} lines")


if __name__ == "__main__":
    main()
