"""What being watched costs: `python -m benchmarks.watch_overhead`.

Two replicas on a local Ray, alternately watched and not. Watched: metrics are on, a scraper asks the observatory for
targets and reads all of them every three seconds as Prometheus does, and one live view is open (a reader of its event
stream). Not watched: `observability.metrics` is off and there is no observatory. Both answer the same requests, eight
streams at once in a closed loop, in batches; a round is one start of each, in alternating order.

Three figures. Requests a second, which move with whatever else the machine does. The CPU time, user and system, of all
processes that the application consists of (Ray's too) over the requests answered meanwhile, whole and by part: that of
the replicas moves with the machine too (how many requests share a step, whose caches are cold), that of the other parts
less. And the CPU time a second while no request runs: what watching costs that goes on all the time, the steadiest of
the three. The readers themselves (scraper, view, clients) are in the benchmark's process and count in no CPU time, but
take their share of the cores.

What to expect. A request of 32 tokens costs the replicas 0.4 s of CPU on the machine of docs/observability.md. Metrics
add microseconds a token and some 50 us a request; the observatory's poll, the view and the scrapes some tens of
milliseconds a second, whatever runs. So about a percent of two cores or two, and far less than the noise of throughput
on a busy machine.
"""

import argparse
import asyncio
import contextlib
import pathlib
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks import live_app
from benchmarks.client import Client, ClosedLoop
from benchmarks.harness import Row, publish
from benchmarks.live_app import ServerCpu, difference
from benchmarks.workloads import random_lengths

SECTION = "watched (metrics, scrapes, one live view) and not, 2 replicas, 8 streams"
MODES = {"not watched": False, "watched": True}
SCRAPE_S = 3.0
IDLE_S = 15.0
MAX_S = 240.0
VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    requests: int  # of a batch
    input_len: int
    output_len: int
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One batch."""

    requests_per_s: float
    cpu: Mapping[str, float]  # part of the application -> seconds a request
    num_failed: int

    @property
    def cpu_s(self) -> float:
        """Of all parts, a request."""
        return sum(self.cpu.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the application."""

    batches: tuple[Measured, ...]
    idle: Mapping[str, float]  # part -> CPU seconds a second while no request ran


@dataclass(slots=True)
class Seen:
    """That somebody did watch."""

    scrapes: int = 0
    events: int = 0


async def measure(url: str, sizes: Sizes, seed: int, *, watched: bool) -> tuple[Start, Seen]:
    """All batches of one start, after one that does not count; then nothing for a while."""
    client = Client(url, "SmolLM2-135M-Instruct")
    found, cpu = [], ServerCpu()
    async with watching(url) if watched else contextlib.nullcontext(Seen()) as seen:
        for batch in range(-1, sizes.batches):
            workload = random_lengths(
                num_requests=sizes.requests if batch >= 0 else 8, input_len=sizes.input_len,
                output_len=sizes.output_len, vocab_size=VOCAB_SIZE, seed=1000 * seed + batch,
            )  # fmt: skip
            before = cpu.by_part()
            run = await client.run(workload, ClosedLoop(concurrency=8), max_s=MAX_S)
            used = difference(before, cpu.by_part())
            found.append(
                Measured(
                    requests_per_s=len(run.answered) / run.wall_s,
                    cpu={part: used_s / len(run.answered) for part, used_s in used.items()},
                    num_failed=sum(run.errors.values()),
                )
            )
        before = cpu.by_part()
        await asyncio.sleep(IDLE_S)
        idle = {part: used_s / IDLE_S for part, used_s in difference(before, cpu.by_part()).items()}
    return Start(batches=tuple(found[1:]), idle=idle), seen


@contextlib.asynccontextmanager
async def watching(url: str) -> AsyncIterator[Seen]:
    """A scraper and an open view, until the end."""
    seen = Seen()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        tasks = [asyncio.create_task(_scrape(session, url, seen)), asyncio.create_task(_view(session, url, seen))]
        try:
            yield seen
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _scrape(session: aiohttp.ClientSession, url: str, seen: Seen) -> None:
    groups: list[dict[str, list[str]]] = []
    while True:
        async with session.get(f"{url}/manta/sd") as answer:
            if answer.status == 200:  # else it knows nothing yet, and Prometheus keeps the targets that it has
                groups = await answer.json()
        for address in (address for group in groups for address in group["targets"]):
            headers = {"Accept-Encoding": "gzip"}  # as Prometheus asks
            async with session.get(f"http://{address}/metrics", headers=headers) as answer:
                await answer.read()
                seen.scrapes += answer.status == 200
        await asyncio.sleep(SCRAPE_S)


async def _view(session: aiohttp.ClientSession, url: str, seen: Seen) -> None:
    async with session.get(f"{url}/manta/api/events") as answer:
        answer.raise_for_status()
        async for line in answer.content:
            seen.events += line.startswith(b"event:")
    raise RuntimeError("the event stream ended")


def rows_of(found: dict[str, list[Start]]) -> list[Row]:
    """Each mode's figures by batch and by start, and their ratios by round (medians of its batches)."""
    rows = []

    def add(name: str, values: Sequence[float], unit: str, *, target: str | None = None, note: str = "") -> None:
        rows.append(Row.of(SECTION, name, values, unit, target=target, note=note))

    for mode, starts in found.items():
        batches = [batch for each in starts for batch in each.batches]
        add(f"{mode}: requests/s", [each.requests_per_s for each in batches], "1/s")
        add(f"{mode}: failed", [float(each.num_failed) for each in batches], "")
        add(f"{mode}: CPU a request", [1000 * each.cpu_s for each in batches], "ms")
        for part in batches[0].cpu:
            add(f"{mode}: of it, {part}", [1000 * each.cpu[part] for each in batches], "ms")
        add(f"{mode}: CPU a second, idle", [1000 * sum(each.idle.values()) for each in starts], "ms")
        for part in starts[0].idle:
            add(f"{mode}: of it, {part}", [1000 * each.idle[part] for each in starts], "ms")
    pairs = list(zip(found["not watched"], found["watched"], strict=True))
    for name, field, target in (("requests/s", "requests_per_s", "> 0.98x"), ("CPU a request", "cpu_s", "< 1.02x")):
        ratios = [_median(watched, field) / _median(alone, field) for alone, watched in pairs]
        add(f"{name}, watched / not", ratios, "x", target=target, note="by round")
    more = [1000 * (sum(watched.idle.values()) - sum(alone.idle.values())) for alone, watched in pairs]
    add("CPU a second, idle: watched more than not", more, "ms", note="by round")
    return rows


def _median(start: Start, field: str) -> float:
    values: list[float] = [getattr(batch, field) for batch in start.batches]
    return statistics.median(values)


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.watch_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parse.add_argument("--rounds", type=int, default=3, help="each starts both modes, in alternating order")
    parse.add_argument("--batches", type=int, default=2, help="of each start")
    parse.add_argument("--requests", type=int, default=24, help="of a batch")
    parse.add_argument("--input-len", type=int, default=64)
    parse.add_argument("--output-len", type=int, default=32)
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    sizes = Sizes(
        requests=options.requests, input_len=options.input_len, output_len=options.output_len, batches=options.batches
    )
    found: dict[str, list[Start]] = {mode: [] for mode in MODES}
    for round_ in range(options.rounds):
        for mode in list(MODES) if round_ % 2 == 0 else list(reversed(MODES)):
            watched = MODES[mode]
            args = {"replicas": {"count": 2, "cpus": 1}, "observability": {"metrics": watched}}
            with live_app.serving("serve_config.yaml", args, observatory=watched) as url:
                measured, seen = asyncio.run(measure(url, sizes, options.seed, watched=watched))
            if watched and not (seen.scrapes and seen.events):
                raise RuntimeError(f"nobody watched: {seen}")
            found[mode].append(measured)
            told = ", ".join(f"{each.requests_per_s:.2f}/s {1000 * each.cpu_s:.0f} ms" for each in measured.batches)
            idle_ms = 1000 * sum(measured.idle.values())
            print(f"  {mode}: {told}; idle {idle_ms:.0f} ms/s; {seen}", file=sys.stderr, flush=True)
    publish(rows_of(found), options.json and pathlib.Path(options.json))


if __name__ == "__main__":
    main()
