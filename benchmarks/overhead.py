"""CPU time around the engine: what a token costs on its way to a client, what metrics cost, what being watched costs.

`path`: one local Ray with two applications over the same token source, an engine without a model (token_source.py):
Manta's own deployments, and Ray Serve's plain way, ``handle.options(stream=True)``. An HTTP client reads both in turn,
behind HAProxy and behind Serve's own proxy, a Ray each. CPU a token: user and system time of every server process
(Ray's too, never the client's) over a window, less what they use in windows without requests before and after it, over
the tokens that the client read meanwhile. What idles differs from one window to the next by as much as steady tokens
cost; "on the way" leaves out the processes that no token passes. "engine alone" is the same engine in this process
without a reader: what remains of the others' figures without it is the path. Steady: 16 streams at 20 tokens/s, as a
model would make them. Flat out: 32 streams as fast as they come. Added to a request: the median over single requests,
one after the other, less that of the engine called directly; of a whole answer of one token, and of a stream to its
first event.

`watch`: serve_config.yaml with its observatory, without a reader and with two: a scraper that asks for targets and
reads all of them every three seconds as Prometheus does, and one open live view. CPU time a second of each part of the
application, at rest and under eight streams. The readers are in this process and count in no CPU time.

`metrics`: microseconds a token and a request in the router, milliseconds a scrape; the least of several repeats, so
that other work on the machine counts little. A step of the engine costs the same with and without metrics.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import time
import timeit
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np
from prometheus_client import generate_latest

from benchmarks import harness, live_app
from benchmarks.client import Client, ClosedLoop
from benchmarks.harness import MODEL, Part, Row, Table, rounds_of, say
from benchmarks.live_app import ServerCpu, difference
from benchmarks.token_source import PACES, WARM_S, Alone, Count, Streams, times_of
from benchmarks.workloads import random_lengths
from dashboards.catalog import Process
from deployments.command import haproxy
from deployments.dispatch.route_log import OBJECTIVES, Following, RequestWatch, RouteLog
from deployments.dispatch.timeline import Arrival
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.metrics.router_events import RouterEvents
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta, Usage

SECTION = "the token path: CPU a token, and what is added to a request"
PROXIES = {"HAProxy": "1", "Serve's proxy": "0"}  # -> RAY_SERVE_ENABLE_HA_PROXY
PREFIXES = {"Manta": "", "plain": "/plain"}
PROCESSES = {
    "ModelReplica": "replica", ":Router": "router", "haproxy": "HAProxy", "PlainEngine": "plain engine",
    "PlainIngress": "plain ingress", "ProxyActor": "Serve's proxy", "ServeController": "controller",
}  # fmt: skip
BESIDE = ("controller", live_app.REST)  # parts that no token passes
WARM_REQUESTS = 30
TARGETS = {"steady": 100.0, "flat out": 50.0, "unary": 6.0, "TTFT": 8.0}  # us, us, ms, ms
SCRAPE_S = 3.0
POLL_S = 1.0  # of a live view
USAGE = Usage(prompt_tokens=4, completion_tokens=1, cached_tokens=0)
TOKEN = TokenDelta(rid="a", token_ids=(5,), usage=USAGE)
LAST = TokenDelta(rid="a", token_ids=(5,), usage=USAGE, finish=Finish(reason=FinishReason.LENGTH))
REQUEST = GenerateRequest(rid="a.0-b", token_ids=np.arange(4, dtype=np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """One window of load."""

    cpu: Mapping[str, float]  # part -> seconds, idle taken off
    tokens: int
    events: int
    wall_s: float

    @property
    def us_a_token(self) -> float:
        return 1e6 * sum(self.cpu.values()) / self.tokens

    @property
    def on_the_way_us(self) -> float:
        """CPU a token of the processes that tokens pass."""
        return 1e6 * sum(used_s for part, used_s in self.cpu.items() if part not in BESIDE) / self.tokens

    @staticmethod
    def of(cpu: Mapping[str, float], idle: Mapping[str, float], count: Count, wall_s: float) -> "Spent":
        """Take off ``idle``: part -> CPU seconds a second without requests."""
        spent = {part: used_s - idle[part] * wall_s for part, used_s in cpu.items()}
        return Spent(cpu=spent, tokens=count.tokens, events=count.events, wall_s=wall_s)


@dataclass(slots=True, kw_only=True)
class Path:
    """What was found of one way to the client."""

    spent: dict[str, list[Spent]] = field(default_factory=lambda: {name: [] for name in PACES})
    added_ms: dict[str, list[float]] = field(default_factory=lambda: {"unary": [], "TTFT": []})


async def cpu_a_second(cpu: ServerCpu, window_s: float) -> dict[str, float]:
    """Return part -> CPU seconds a second of a window from now."""
    before, started_s = cpu.by_part(), time.perf_counter()
    await asyncio.sleep(window_s)
    used, wall_s = difference(before, cpu.by_part()), time.perf_counter() - started_s
    return {part: used_s / wall_s for part, used_s in used.items()}


async def paths_of(url: str, rounds: int, window_s: float, requests: int, alone: Alone) -> dict[str, Path]:
    """Measure both applications behind one proxy, in turn."""
    found, cpu = {name: Path() for name in PREFIXES}, ServerCpu(PROCESSES)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for prefix in PREFIXES.values():  # what happens once is not counted
            for stream in (True, False):
                await times_of(session, f"{url}{prefix}/v1/completions", stream=stream, numbers=range(WARM_REQUESTS))
        await asyncio.sleep(WARM_S)
        idle = await cpu_a_second(cpu, window_s)
        for round_ in range(rounds):
            for name, prefix in PREFIXES.items():
                address = f"{url}{prefix}/v1/completions"
                for kind, times in found[name].added_ms.items():
                    numbers = range(1000 * round_, 1000 * round_ + requests)
                    took = await times_of(session, address, stream=kind == "TTFT", numbers=numbers)
                    times.append(1e3 * (statistics.median(took) - alone.latency_s[kind]))
                for load, pace in PACES.items():
                    async with Streams(session, address, pace) as streams:
                        await asyncio.sleep(WARM_S)
                        before, count, started_s = cpu.by_part(), streams.total(), time.perf_counter()
                        await asyncio.sleep(pace.windows * window_s)
                        used, later = difference(before, cpu.by_part()), streams.total()
                        wall_s = time.perf_counter() - started_s
                    came = Count(later.tokens - count.tokens, later.events - count.events)
                    await asyncio.sleep(WARM_S)
                    before_it, idle = idle, await cpu_a_second(cpu, window_s)
                    around = {part: (before_it[part] + idle[part]) / 2 for part in idle}
                    found[name].spent[load].append(Spent.of(used, around, came, wall_s))
    return found


def rows_of(alone: Alone, found: Mapping[str, Mapping[str, Path]]) -> list[Row]:
    """Return the table of what was found by proxy and application."""
    table = Table(SECTION)
    for load in PACES:
        table.add(f"{load}: engine alone", [alone.us_a_token[load]], "us/token")
        for proxy, paths in found.items():
            for name, path in paths.items():
                spent = path.spent[load]
                target = f"<= {TARGETS[load]:g}" if name == "Manta" else None
                per_s = statistics.median([each.tokens / each.wall_s for each in spent])
                per_event = statistics.median([each.tokens / each.events for each in spent])
                note = f"{per_s:,.0f} tokens/s, {per_event:.2f} an event; {_most(spent)}"
                values = [each.us_a_token for each in spent]
                table.add(f"{load}: {name}, {proxy}", values, "us/token", target=target, note=note)
                table.add(f"{load}: {name}, {proxy}, on the way", [each.on_the_way_us for each in spent], "us/token")
            pairs = zip(paths["plain"].spent[load], paths["Manta"].spent[load], strict=True)
            ratios = [plain.us_a_token / manta.us_a_token for plain, manta in pairs]
            table.add(f"{load}: plain / Manta, {proxy}", ratios, "x", note="by round")
    for kind in ("unary", "TTFT"):
        table.add(f"{kind}: engine called directly", [1e3 * alone.latency_s[kind]], "ms")
        for proxy, paths in found.items():
            for name, path in paths.items():
                target = f"<= {TARGETS[kind]:g}" if name == "Manta" else None
                table.add(f"{kind}: added by {name}, {proxy}", path.added_ms[kind], "ms", target=target)
    return table.rows


def _most(spent: Sequence[Spent]) -> str:
    """Write the parts that cost most, us a token."""
    us = {part: statistics.median([1e6 * each.cpu[part] / each.tokens for each in spent]) for part in spent[0].cpu}
    return ", ".join(f"{part} {value:.0f}" for part, value in sorted(us.items(), key=lambda item: -item[1])[:4])


def proxies_of(asked: Sequence[str] | None, unusable: str) -> tuple[list[str], str]:
    """Return what to measure behind, and why HAProxy is not among it though wanted: Serve would take its own unasked.

    Args: asked: names, None for all; unusable: why HAProxy cannot be used, "" where it can.
    """
    wanted = list(asked or PROXIES)
    if not unusable or "HAProxy" not in wanted:
        return wanted, ""
    return [] if asked else [each for each in wanted if each != "HAProxy"], unusable


def path_rows(options: argparse.Namespace) -> list[Row]:
    """Measure the token path behind each proxy. Raises: SystemExit if the one that is asked for cannot be used."""
    proxies, why_not = proxies_of(options.proxy, haproxy.unusable(haproxy.found(os.environ), host=live_app.HOST))
    if not proxies:
        raise SystemExit(f"--proxy HAProxy cannot be measured here: {why_not}")
    if why_not:
        say(f"not measured behind HAProxy: {why_not}")
    window_s, requests = (2.0, 10) if options.quick else (options.window, options.requests)
    alone = Alone.measure(str(harness.ROOT / options.model), window_s=window_s, requests=requests)
    args = {"model": {"path": options.model}, "replicas": {"count": 1, "cpus": 1}}
    source = "benchmarks.token_source"
    applications = [
        {"name": "manta", "route_prefix": "/", "import_path": f"{source}:manta", "args": args},
        {"name": "plain", "route_prefix": "/plain", "import_path": f"{source}:plain", "args": {"model": options.model}},
    ]
    found = {}
    for proxy in proxies:
        environment = {"RAY_SERVE_ENABLE_HA_PROXY": PROXIES[proxy]}
        paths = [f"{prefix}/health" for prefix in PREFIXES.values()]
        with live_app.running(applications, answers_at=paths, environment=environment) as url:
            found[proxy] = asyncio.run(paths_of(url, rounds_of(options, 3), window_s, requests, alone))
        say(f"behind {proxy}: measured")
    return rows_of(alone, found)


@dataclass(slots=True)
class Readings:
    """What the readers of a watched application have read."""

    scrapes: int = 0
    polls: int = 0


@contextlib.asynccontextmanager
async def watching(url: str) -> AsyncIterator[Readings]:
    """Scrape, and hold a live view open, until the end."""
    read = Readings()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        tasks = [asyncio.create_task(_scrape(session, url, read)), asyncio.create_task(_view(session, url, read))]
        try:
            yield read
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _scrape(session: aiohttp.ClientSession, url: str, read: Readings) -> None:
    groups: list[dict[str, list[str]]] = []
    while True:
        async with session.get(f"{url}/manta/sd") as answer:
            if answer.status == 200:  # else it knows nothing yet, and Prometheus keeps the targets that it has
                groups = await answer.json()
        for address in (address for group in groups for address in group["targets"]):
            headers = {"Accept-Encoding": "gzip"}  # as Prometheus asks
            async with session.get(f"http://{address}/metrics", headers=headers) as answer:
                await answer.read()
                read.scrapes += answer.status == 200
        await asyncio.sleep(SCRAPE_S)


async def _view(session: aiohttp.ClientSession, url: str, read: Readings) -> None:
    version = 0
    while True:
        async with session.get(f"{url}/manta/api/state?since={version}") as answer:
            answer.raise_for_status()
            version = (await answer.json())["version"]
            read.polls += 1
        await asyncio.sleep(POLL_S)


async def watch_cpu(url: str, rounds: int, window_s: float) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Return CPU seconds a second by part, of each round: (at rest or under load, read or not)."""
    cpu, client = ServerCpu(), Client(url, MODEL.rpartition("/")[2])
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for round_, reader in harness.in_turn(("no reader", "read"), rounds):
        async with watching(url) if reader == "read" else contextlib.nullcontext(Readings()) as readings:
            await asyncio.sleep(WARM_S)
            found.setdefault(("at rest", reader), []).append(await cpu_a_second(cpu, window_s))
            load = random_lengths(num_requests=500, input_len=64, output_len=32, vocab_size=32_000, seed=2 * round_)
            busy = asyncio.create_task(client.run(load, ClosedLoop(concurrency=8), max_s=window_s + 2 * WARM_S))
            await asyncio.sleep(WARM_S)
            found.setdefault(("8 streams", reader), []).append(await cpu_a_second(cpu, window_s))
            await busy
        if reader == "read" and not (readings.scrapes and readings.polls):
            raise RuntimeError(f"the application was not read: {readings}")
    return found


def watch_rows(options: argparse.Namespace) -> list[Row]:
    """Measure an application that is watched: a line for each state, a column for each part."""
    with live_app.serving("serve_config.yaml", {}) as url:
        window_s = 4.0 if options.quick else max(options.window, 2 * SCRAPE_S)
        found = asyncio.run(watch_cpu(url, rounds_of(options, 3), window_s))
    table = Table("CPU a second of an application with its observatory, ms")
    for (load, reader), rounds in sorted(found.items()):
        name = f"{load}, {reader}"
        table.add(name, [1000 * sum(each.values()) for each in rounds], figure="all")
        for part in rounds[0]:
            table.add(name, [1000 * each[part] for each in rounds], figure=part)
    return table.rows


def metrics_watch() -> tuple[Emitter, RouterEvents]:
    """Return a router's metrics, and what counts its requests."""
    emitter = Emitter(Process.ROUTER, Identity(model="m", role="router", replica="r"), disaggregated=True)
    return emitter, RouterEvents(emitter, objectives=OBJECTIVES, disaggregated=True)


def _following(watch: RequestWatch) -> Following:
    """Return a request that has its first token; no decision is made of it."""
    arrival = Arrival(endpoint="chat", arrived_s=time.monotonic())
    found = Following(REQUEST, arrival, routes=RouteLog(), watch=watch, clock=time.monotonic)
    found.timeline.saw(TOKEN, time.monotonic())
    return found


def token_us(watch: RequestWatch) -> float:
    one = _following(watch)
    return _best_us(lambda: one.saw(TOKEN), number=20_000)


def request_us(watch: RequestWatch) -> float:
    """Time all of a request but its decision and its tokens."""

    def whole() -> None:
        with _following(watch) as one:
            one.timeline.saw(LAST, time.monotonic())

    return _best_us(whole, number=2_000)


def scrape_ms(emitter: Emitter) -> float:
    return _best_us(lambda: generate_latest(emitter.registry), number=10) / 1e3


def _best_us(work: Callable[[], object], *, number: int) -> float:
    """Measure the processor's time: on a machine that others use too most of a clock's is theirs."""
    return min(timeit.repeat(work, number=number, repeat=7, timer=time.thread_time)) / number * 1e6


def metrics_rows(options: argparse.Namespace) -> list[Row]:
    """Measure a router's metrics, and nothing in their place."""
    table, (emitter, watch) = Table("what metrics cost a router"), metrics_watch()
    for name, each in (("metrics", watch), ("none", RequestWatch())):
        table.add(f"{name}: a token", [token_us(each)], "us")
        table.add(f"{name}: a request", [request_us(each)], "us")
    num_lines = generate_latest(emitter.registry).count(b"\n")
    table.add("a scrape", [scrape_ms(emitter)], "ms", note=f"{num_lines} lines")
    return table.rows


def add_options(parse: argparse.ArgumentParser) -> None:
    add = parse.add_argument
    add("--window", type=float, default=10.0, metavar="S", help="seconds of idling and of steady load")
    add("--requests", type=int, default=100, help="path: single ones, of each kind and round")
    add("--proxy", choices=list(PROXIES), action="append", help="path: only behind this one")


PARTS = {
    "metrics": Part(about="what metrics cost a router", measure=metrics_rows),
    "watch": Part(about="the observatory, a scraper and a live view", measure=watch_rows),
    "path": Part(about="CPU a token from engine to client, and what is added to a request", measure=path_rows),
}


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("overhead", __doc__, PARTS, argv, options=add_options)
