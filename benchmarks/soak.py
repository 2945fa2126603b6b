"""More load than two replicas carry, clients that leave, a replica killed each minute: what grows, what is lost.

    python -m benchmarks soak --minutes 60

Requests arrive at 1.5 times the rate that was answered just before; a client of twenty leaves after a random time. Each
minute the busiest replica is killed, if both are there. Every ten seconds the soak looks at the queues, and at the
memory and open files of the processes that live as long as the run (router, proxies, observatory, Serve's controller,
Ray's GCS and raylet). It fails

- where a request has an error that is no refusal with Retry-After, or a page is neither free nor evictable at the end;
- where a queue was longer than what two replicas answer in twice `router.max_wait_s`, and what ran at a killed one;
- where, after the first ten minutes, the memory of a part rises by over MEMORY an hour, or it opens over FILES files.
  Of a run that ends within twenty the second half is shown, and not judged.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks import harness
from benchmarks.chaos import REPLICA, WHOLE_S, OneMachine, num_files, quietly
from benchmarks.client import Client, ClosedLoop, Dialect, Exchange, Sample
from benchmarks.harness import Part, Row, Table, say
from benchmarks.serving import VOCAB_SIZE
from benchmarks.workloads import random_lengths
from deployments.watch.terminal.ask import first_model
from tests.cluster.cluster import SILENT_S

OVERLOAD = 1.5
LEAVE, LEAVE_S = 0.05, 3.0  # the share of clients, and the most that they wait
KILL_S, LOOK_S = 60.0, 10.0
WARM_S = 600.0  # memory may rise before
MAX_RUNNING = 8  # at a replica: with fewer, a queue forms within a minute
AT_ONCE = 2 * MAX_RUNNING
MAX_WAIT_S = 10.0
FILES = 16
MEMORY = 0.05
requests = partial(random_lengths, input_len=128, output_len=32, spread=0.5, vocab_size=VOCAB_SIZE)
LIVES = {  # in the title of a process -> what it is called here
    ":Router": "router", ":Observatory": "observatory", "haproxy": "HAProxy", "ProxyActor": "HTTP proxy",
    "ServeController": "Serve controller", "gcs_server": "GCS", "raylet/raylet": "raylet",
    "HAProxyManager": "HAProxy's manager",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Look:
    """How things are at one time: of each part that lives as long as the run, its memory in MB and its open files."""

    at_s: float
    longest_queue: int  # of a replica
    memory: Mapping[str, float]
    files: Mapping[str, int]


@dataclass(kw_only=True)
class Soak:
    """What came of a run."""

    rate: float = 0.0  # requests a second
    ended: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0
    looks: list[Look] = field(default_factory=list)
    is_whole: bool = False

    def note(self, sample: Sample) -> None:
        refused = "refused, with Retry-After"
        came = "answered" if sample.error is None else refused if sample.retry_after_s is not None else "failed"
        self.ended[came] += 1
        if came == "failed":
            self.errors[sample.error or ""] += 1


def look(place: OneMachine, at_s: float) -> Look:
    parts: dict[str, list[int]] = {}
    for pid, title in place.processes().items():
        if part := next((part for name, part in LIVES.items() if name in title), ""):
            parts.setdefault(part, []).append(pid)
    return Look(
        at_s=at_s,
        longest_queue=max((state["stats"]["num_waiting"] for state in place.running.states()), default=0),
        memory={part: sum(psutil.Process(pid).memory_info().rss / 1e6 for pid in pids) for part, pids in parts.items()},
        files={part: sum(num_files(pids).values()) for part, pids in parts.items()},
    )


async def load(exchange: Exchange, soak: Soak, until_s: float) -> None:
    """Send requests until then, and wait for their ends."""
    sent: set[asyncio.Task[None]] = set()
    most = round((until_s - time.monotonic()) * soak.rate * 2) + 1
    conversations = iter(requests(num_requests=most, seed=1).conversations)

    async def one(token_ids: Sequence[int], num_tokens: int) -> None:
        sample = Sample(name="")
        leaves_s = random.uniform(0, LEAVE_S) if random.random() < LEAVE else None
        try:
            await asyncio.wait_for(exchange.request(list(token_ids), num_tokens, sample), leaves_s)
        except TimeoutError:
            soak.ended["left by their clients"] += 1
        else:
            soak.note(sample)

    while time.monotonic() < until_s:
        [turn] = next(conversations).turns
        task = asyncio.create_task(one(turn.token_ids, turn.max_new_tokens))
        sent.add(task)
        task.add_done_callback(sent.discard)
        await asyncio.sleep(random.expovariate(soak.rate))
    await asyncio.gather(*sent)


async def every(seconds: float, do: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(do)


async def run(place: OneMachine, minutes: float) -> Soak:
    """Find the rate that is answered, exceed it for ``minutes``, and see what is left."""
    url, soak = place.running.url, Soak()
    model, before = first_model(url, None), requests(num_requests=4 * AT_ONCE, seed=0)
    answered = await Client(url, model).run(before, ClosedLoop(concurrency=AT_ONCE), max_s=600)
    soak.rate = OVERLOAD * len(answered.answered) / answered.wall_s
    say(f"{soak.rate:.2f} requests a second, {OVERLOAD} times what was answered")
    started_s = time.monotonic()

    def look_on() -> None:
        if now := quietly(lambda: look(place, time.monotonic() - started_s)):
            soak.looks.append(now)

    def kill() -> None:
        say(f"{dict(soak.ended)}, {soak.num_kills} kills, {soak.looks[-1]}")
        if quietly(lambda: place.running.serves_with(place.num_replicas)):
            os.kill(place.pids(REPLICA)[0], signal.SIGKILL)
            soak.num_kills += 1

    look_on()
    async with Client(url, model, dialect=Dialect(keeps_alive=False), silent_s=SILENT_S).exchange() as exchange:
        beside = [asyncio.create_task(every(LOOK_S, look_on)), asyncio.create_task(every(KILL_S, kill))]
        await load(exchange, soak, started_s + 60 * minutes)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    ends_s = time.monotonic() + WHOLE_S
    while not (quietly(place.is_whole) or time.monotonic() > ends_s):
        await asyncio.sleep(1.0)
    soak.is_whole = bool(quietly(place.is_whole))
    look_on()
    return soak


def rise_an_hour(looks: Sequence[Look], part: str) -> float:
    """Return the slope of a part's memory, in MB an hour, over those looks (least squares)."""
    hours = [each.at_s / 3600 for each in looks if part in each.memory]
    return float(np.polyfit(hours, [each.memory[part] for each in looks if part in each.memory], 1)[0])


def faults_of(soak: Soak) -> Iterator[str]:
    """Say what must not have happened."""
    for error, number in soak.errors.most_common(5):
        yield f"{number} requests failed: {error}"
    if not soak.is_whole:
        yield f"{WHOLE_S:g} s after the load a replica is missing, or a page of one is neither free nor evictable"
    longest, most = max(each.longest_queue for each in soak.looks), 2 * MAX_WAIT_S * soak.rate + MAX_RUNNING
    if longest > most:
        yield f"a queue of {longest}, where {most:.0f} may be"
    settled, last = [each for each in soak.looks if each.at_s >= WARM_S], soak.looks[-1]
    for part in last.files if last.at_s >= 2 * WARM_S else ():
        if (more := last.files[part] - settled[0].files.get(part, 0)) > FILES:
            yield f"{part} has {more} open files more"
        if (rise := rise_an_hour(settled, part)) > MEMORY * last.memory[part]:
            yield f"the memory of {part} rises by {rise:.0f} MB an hour"


def measure(options: argparse.Namespace) -> list[Row]:
    minutes = 1.0 if options.quick else options.minutes
    with tempfile.TemporaryDirectory(prefix="manta-soak-") as folder:
        place = OneMachine(Path(folder), max_wait_s=MAX_WAIT_S, max_running=MAX_RUNNING)
        place.start()
        try:
            soak = asyncio.run(run(place, minutes))
        finally:
            place.stop()
    return rows_of(soak, minutes)


def rows_of(soak: Soak, minutes: float) -> list[Row]:
    table = Table(f"soak: {minutes:g} minutes at {OVERLOAD} times the rate that is answered")
    table.add("requests sent", [soak.rate], "1/s")
    for came, number in soak.ended.most_common():
        table.add(came, [number])
    table.add("replicas killed", [soak.num_kills])
    table.add("longest queue of a replica", [each.longest_queue for each in soak.looks])
    settled = [each for each in soak.looks if each.at_s >= min(WARM_S, 30 * minutes)]
    for part in soak.looks[-1].files:
        files = [each.files.get(part, 0) for each in (soak.looks[0], soak.looks[-1])]
        note = f"{rise_an_hour(settled, part):+.0f} MB an hour; open files {files[0]} before, {files[1]} after"
        table.add(f"memory of {part}", [each.memory.get(part, 0.0) for each in settled], "MB", note=note)
    for fault in faults_of(soak):
        table.add("FAILED", [1], note=fault)
    return table.rows


def main(argv: Sequence[str] | None = None) -> int:
    def add_options(parse: argparse.ArgumentParser) -> None:
        parse.add_argument("--minutes", type=float, default=60.0, help="how long requests are sent")

    parts = {"soak": Part(about="overload, clients that leave, a replica killed each minute", measure=measure)}
    rows = harness.run("soak", __doc__, parts, argv, options=add_options)
    return int(any(row.name == "FAILED" for row in rows))
