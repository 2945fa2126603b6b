"""Runs a workload against a server that is up, and takes what the comparison needs from it.

Owns:      which figures of a run are kept, and what counts as not having finished.
Invariant: a run that did not answer every request has a ``problem``, and none of its times is compared with anything.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psutil

from benchmarks.client import Client, ClosedLoop, Run
from benchmarks.harness import percentile
from benchmarks.live_app import ServerCpu
from benchmarks.peers.cells import Cell
from benchmarks.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of one workload against one system. Times in seconds."""

    cell: str
    system: str
    round: int
    wall_s: float
    answered: int
    asked: int
    output_tokens: int
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    hit_percent: float | None = None  # prompt tokens that the server says it had; None: it does not say
    server_cpu_s: float
    elsewhere_cpu_s: float  # of everything but the server and the client: what disturbed
    problem: str | None = None  # why it does not count

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds so far."""

    server_s: float
    client_s: float
    machine_s: float  # all cores, everything that runs; time that a hypervisor took away too

    @staticmethod
    def now(server: ServerCpu) -> "CpuUse":
        times = psutil.cpu_times()
        return CpuUse(
            server_s=sum(server.by_part().values()),
            client_s=time.process_time(),
            machine_s=times.user + times.nice + times.system + times.irq + times.softirq + times.steal,
        )


def measure(
    client: Client,
    cell: Cell,
    workload: Workload,
    *,
    system: str,
    round_: int,
    use: Callable[[], CpuUse] | None = None,
) -> Measured:
    """One run, cut off after the cell's limit. ``use``: CPU time so far; None: what /proc says."""
    use = use or partial(CpuUse.now, ServerCpu())
    before = use()
    run = asyncio.run(client.run(workload, ClosedLoop(concurrency=cell.concurrency), max_s=cell.max_s))
    return figures(run, cell, system=system, round_=round_, before=before, after=use())


def figures(run: Run, cell: Cell, *, system: str, round_: int, before: CpuUse, after: CpuUse) -> Measured:
    """What is kept of ``run``."""
    server_s = after.server_s - before.server_s
    client_s = after.client_s - before.client_s
    answered = run.answered
    ttfts = [sample.ttft_s for sample in answered if sample.ttft_s is not None]
    tpots = [sample.tpot_s for sample in answered if sample.tpot_s is not None]
    prompt_tokens = sum(sample.prompt_tokens for sample in answered)
    tells_cached = any(sample.tells_cached for sample in answered)  # vllm leaves it out where it is 0
    return Measured(
        cell=cell.name,
        system=system,
        round=round_,
        wall_s=run.wall_s,
        answered=len(answered),
        asked=len(run.samples),
        output_tokens=sum(sample.completion_tokens for sample in answered),
        ttft_p50_s=percentile(ttfts, 50) if ttfts else None,
        ttft_p95_s=percentile(ttfts, 95) if ttfts else None,
        tpot_p50_s=percentile(tpots, 50) if tpots else None,
        hit_percent=100 * sum(sample.cached_tokens for sample in answered) / prompt_tokens if tells_cached else None,
        server_cpu_s=server_s,
        elsewhere_cpu_s=max(0.0, after.machine_s - before.machine_s - server_s - client_s),
        problem=_problem(run),
    )


def _problem(run: Run) -> str | None:
    if not run.errors:
        return None
    error, count = max(run.errors.items(), key=lambda each: each[1])
    return f"{len(run.answered)} of {len(run.samples)} answered; {count} x {error}"
