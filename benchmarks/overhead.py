"""What a token costs on its way from an engine to a client: `python -m benchmarks.token_path`.

One local Ray with two applications over the same token source, an engine without a model (token_source.py): Manta's own
deployments, and Ray Serve's plain way, ``handle.options(stream=True)`` (token_apps.py). An HTTP client reads both in
turn. This is done behind HAProxy and behind Serve's own proxy, a Ray each.

CPU a token: user and system time of every server process (Ray's too, never the client's) over a window, less what they
use in a window without requests, over the tokens that the client read meanwhile. "engine alone" is the same engine in
this process with nobody to read: what remains of the others' figures without it is the path. Steady: 16 streams at 20
tokens/s, as a model would make them. Flat out: 32 streams as fast as they come. Added to a request: the median over
single requests, one after the other, less that of the engine called directly; of a whole answer of one token, and of a
stream to its first event.
"""

import argparse
import asyncio
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks import live_app
from benchmarks.harness import Row, publish
from benchmarks.live_app import ServerCpu, difference
from benchmarks.token_alone import PACES, WARM_S, Alone, Pace
from benchmarks.token_client import Load, times_of
from deployments.command import haproxy

SECTION = "the token path: CPU a token, and what is added to a request"
MODEL = "models/SmolLM2-135M-Instruct"
PROXIES = {"HAProxy": "1", "Serve's proxy": "0"}  # -> RAY_SERVE_ENABLE_HA_PROXY
PREFIXES = {"Manta": "", "plain": "/plain"}
PARTS = {
    "ModelReplica": "replica", ":Router": "router", "haproxy": "HAProxy", "PlainEngine": "plain engine",
    "PlainIngress": "plain ingress", "ProxyActor": "Serve's proxy", "ServeController": "controller",
}  # fmt: skip
WARM_REQUESTS = 30
TARGETS = {"steady": 100.0, "flat out": 50.0, "unary": 6.0, "TTFT": 8.0}  # us, us, ms, ms


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

    @staticmethod
    def of(cpu: Mapping[str, float], idle: Mapping[str, float], *, tokens: int, events: int, wall_s: float) -> "Spent":
        """``idle``: part -> CPU seconds a second without requests."""
        return Spent(
            cpu={part: used_s - idle[part] * wall_s for part, used_s in cpu.items()},
            tokens=tokens, events=events, wall_s=wall_s,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Path:
    """What was found of one way to the client."""

    spent: dict[str, list[Spent]] = field(default_factory=lambda: {name: [] for name in PACES})
    added_ms: dict[str, list[float]] = field(default_factory=lambda: {"unary": [], "TTFT": []})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    rounds: int
    window_s: float
    requests: int  # single ones, of each kind


async def measure(url: str, sizes: Sizes, alone: Alone) -> dict[str, Path]:
    """Both applications behind one proxy, in turn."""
    found, cpu = {name: Path() for name in PREFIXES}, ServerCpu(PARTS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for prefix in PREFIXES.values():  # what happens once is not counted
            for stream in (True, False):
                await times_of(session, f"{url}{prefix}/v1/completions", stream=stream, numbers=range(WARM_REQUESTS))
        for round_ in range(sizes.rounds):
            await asyncio.sleep(WARM_S)
            idle = await cost_of_idling(cpu, sizes.window_s)
            for name, prefix in PREFIXES.items():
                address = f"{url}{prefix}/v1/completions"
                for kind, times in found[name].added_ms.items():
                    numbers = range(1000 * round_, 1000 * round_ + sizes.requests)
                    took = await times_of(session, address, stream=kind == "TTFT", numbers=numbers)
                    times.append(1e3 * (statistics.median(took) - alone.latency_s[kind]))
                for load, pace in PACES.items():
                    window_s = pace.windows * sizes.window_s
                    found[name].spent[load].append(await spend(session, address, pace, window_s, cpu, idle))
    return found


async def cost_of_idling(cpu: ServerCpu, window_s: float) -> dict[str, float]:
    """Part -> CPU seconds a second while nobody asks for anything."""
    before, started_s = cpu.by_part(), time.perf_counter()
    await asyncio.sleep(window_s)
    used, wall_s = difference(before, cpu.by_part()), time.perf_counter() - started_s
    return {part: used_s / wall_s for part, used_s in used.items()}


async def spend(
    session: aiohttp.ClientSession,
    address: str,
    pace: Pace,
    window_s: float,
    cpu: ServerCpu,
    idle: Mapping[str, float],
) -> Spent:
    """One window, begun when all streams run."""
    async with Load(session, address, streams=pace.streams, tokens_per_s=pace.tokens_per_s) as load:
        await asyncio.sleep(WARM_S)
        before, count, started_s = cpu.by_part(), load.total(), time.perf_counter()
        await asyncio.sleep(window_s)
        used, later, wall_s = difference(before, cpu.by_part()), load.total(), time.perf_counter() - started_s
    tokens, events = later.tokens - count.tokens, later.events - count.events
    return Spent.of(used, idle, tokens=tokens, events=events, wall_s=wall_s)


def rows_of(alone: Alone, found: Mapping[str, Mapping[str, Path]]) -> list[Row]:
    """``found``: by proxy and application."""
    rows = []

    def add(name: str, values: Sequence[float], unit: str, *, target: str | None = None, note: str = "") -> None:
        rows.append(Row.of(SECTION, name, values, unit, target=target, note=note))

    for load in PACES:
        add(f"{load}: engine alone", [alone.us_a_token[load]], "us/token")
        for proxy, paths in found.items():
            for name, path in paths.items():
                spent = path.spent[load]
                target = f"<= {TARGETS[load]:g}" if name == "Manta" else None
                per_s = statistics.median([each.tokens / each.wall_s for each in spent])
                per_event = statistics.median([each.tokens / each.events for each in spent])
                note = f"{per_s:,.0f} tokens/s, {per_event:.2f} an event; {_parts(spent)}"
                values = [each.us_a_token for each in spent]
                add(f"{load}: {name}, {proxy}", values, "us/token", target=target, note=note)
            ratios = [
                plain.us_a_token / manta.us_a_token
                for plain, manta in zip(paths["plain"].spent[load], paths["Manta"].spent[load], strict=True)
            ]
            add(f"{load}: plain / Manta, {proxy}", ratios, "x", note="by round")
    for kind in ("unary", "TTFT"):
        add(f"{kind}: engine called directly", [1e3 * alone.latency_s[kind]], "ms")
        for proxy, paths in found.items():
            for name, path in paths.items():
                target = f"<= {TARGETS[kind]:g}" if name == "Manta" else None
                add(f"{kind}: added by {name}, {proxy}", path.added_ms[kind], "ms", target=target)
    return rows


def _parts(spent: Sequence[Spent]) -> str:
    """The parts that cost most, us a token."""
    us = {part: statistics.median([1e6 * each.cpu[part] / each.tokens for each in spent]) for part in spent[0].cpu}
    return ", ".join(f"{part} {value:.0f}" for part, value in sorted(us.items(), key=lambda item: -item[1])[:4])


def applications() -> list[dict[str, Any]]:
    """What Serve runs, as serve_config.yaml has it."""
    manta = {"model": {"path": MODEL}, "replicas": {"count": 1, "cpus": 1}}
    return [
        {"name": "manta", "route_prefix": "/", "import_path": "benchmarks.token_apps:manta", "args": manta},
        {
            "name": "plain", "route_prefix": "/plain", "import_path": "benchmarks.token_apps:plain",
            "args": {"model": MODEL},
        },
    ]  # fmt: skip


def proxies_of(asked: Sequence[str] | None, unusable: str) -> tuple[list[str], str]:
    """What to measure behind, and why HAProxy is not among it though wanted: Serve would take its own proxy unasked.

    Args: asked: names, None for all; unusable: why HAProxy cannot be had, "" where it can.
    """
    wanted = list(asked or PROXIES)
    if not unusable or "HAProxy" not in wanted:
        return wanted, ""
    return [] if asked else [each for each in wanted if each != "HAProxy"], unusable


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.token_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parse.add_argument("--rounds", type=int, default=3, help="of each application, behind each proxy")
    parse.add_argument("--window", type=float, default=10.0, metavar="S", help="seconds of idling and of steady load")
    parse.add_argument("--requests", type=int, default=100, help="single ones, of each kind and round")
    parse.add_argument("--proxy", choices=list(PROXIES), action="append", help="only behind this one")
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    unusable = haproxy.unusable(haproxy.found(os.environ), host=live_app.HOST)
    proxies, why_not = proxies_of(options.proxy, unusable)
    if not proxies:
        parse.error(f"--proxy HAProxy cannot be measured here: {why_not}")
    if why_not:
        print(f"  not measured behind HAProxy: {why_not}", file=sys.stderr, flush=True)
    sizes = Sizes(rounds=options.rounds, window_s=options.window, requests=options.requests)
    alone = Alone.measure(str(live_app.ROOT / MODEL), window_s=sizes.window_s, requests=sizes.requests)
    found = {}
    for proxy in proxies:
        environment = {"RAY_SERVE_ENABLE_HA_PROXY": PROXIES[proxy]}
        paths = [f"{prefix}/health" for prefix in PREFIXES.values()]
        with live_app.running(applications(), answers_at=paths, environment=environment) as url:
            found[proxy] = asyncio.run(measure(url, sizes, alone))
        print(f"  behind {proxy}: measured", file=sys.stderr, flush=True)
    publish(rows_of(alone, found), options.json and pathlib.Path(options.json))


if __name__ == "__main__":
    main()
