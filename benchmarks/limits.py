"""What this machine can do at best, measured now: bytes read a second and fp32 multiply-adds a second.

Shares of these limits are comparable between machines and busy hours; absolute numbers are not.
Source: notes/cpu.md, "Limits".
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.report import Row

READ_BYTES = 256 << 20  # far beyond any cache
GEMM_SIZE = 2048


def memory_read_bandwidth(num_threads: int, *, runs: int = 5) -> float:
    """Bytes a second of summing 256 MiB of float32, median of ``runs``."""
    source = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _median_s(source.sum, num_threads, runs)


def gemm_rate(num_threads: int, *, runs: int = 5) -> float:
    """Floating-point operations a second of a 2048 x 2048 x 2048 fp32 product, median of ``runs``."""
    left, right = torch.randn(GEMM_SIZE, GEMM_SIZE), torch.randn(GEMM_SIZE, GEMM_SIZE)
    out = torch.empty(GEMM_SIZE, GEMM_SIZE)
    return 2 * GEMM_SIZE**3 / _median_s(lambda: torch.mm(left, right, out=out), num_threads, runs)


@dataclass(slots=True)
class Limits:
    """The machine's limits, sampled through the run."""

    num_threads: int
    bandwidth: list[float] = field(default_factory=list)  # bytes/s
    flops: list[float] = field(default_factory=list)  # 1/s

    def sample(self) -> None:
        self.bandwidth.append(memory_read_bandwidth(self.num_threads))
        self.flops.append(gemm_rate(self.num_threads))

    def rows(self) -> list[Row]:
        section = f"limits of the machine, {self.num_threads} threads"
        return [
            Row.of(section, "memory read", [b / 1e9 for b in self.bandwidth], "GB/s"),
            Row.of(section, "fp32 GEMM 2048^3", [f / 1e9 for f in self.flops], "GFLOP/s"),
        ]

    @property
    def median_bandwidth(self) -> float:
        return statistics.median(self.bandwidth)

    @property
    def median_flops(self) -> float:
        return statistics.median(self.flops)


def _median_s(work: Callable[[], object], num_threads: int, runs: int) -> float:
    """Median seconds of ``work`` on ``num_threads`` threads, after one warm-up; the thread count is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        times = []
        for _ in range(runs + 1):
            started_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - started_s)
        return statistics.median(times[1:])
    finally:
        torch.set_num_threads(before)
