"""What this machine can do at best, measured now: bytes read a second and fp32 multiply-adds a second.

Shares of these limits are comparable between machines and busy hours; absolute numbers are not.
Source: notes/cpu.md, "Limits".
"""

import statistics
import time
from collections.abc import Callable

import torch

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
