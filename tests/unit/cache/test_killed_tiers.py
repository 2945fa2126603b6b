"""A process that is killed at any point leaves a store from which the next one answers, and answers right."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.harness import to_host
from tests.tiered_bench import TieredBench

NUM_POINTS = 50
PLACES = ("/kvtransfer/stores/", "/replicas/cache/store_", "/replicas/cache/tiers.py", "/replicas/memory/host.py")
STEMS = [[stem * 100 + at for at in range(20)] for stem in (1, 2, 3)]


def life(root: Path) -> TieredBench:
    """Computes, writes to the store, moves pages to the host and loads them; forgets all and reads it again."""
    bench = TieredBench(root, write="write_through")
    for stem in STEMS:
        bench.submit(stem, max_new_tokens=2)
        bench.run()
        bench.settle()
    to_host(bench.kv)
    for _ in range(2):
        for stem in STEMS:
            bench.submit([*stem, 7], max_new_tokens=2)
            bench.run()
        bench.settle()
        bench.kv.flush()
    return bench


def traced(at_line: Callable[[], None]) -> Callable[..., Any]:
    """A trace function that calls ``at_line`` before each line of `PLACES`."""

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if event == "call":
            return trace if any(place in frame.f_code.co_filename for place in PLACES) else None
        if event == "line":
            at_line()
        return trace

    return trace


def count_lines(root: Path) -> int:
    lines = 0

    def count() -> None:
        nonlocal lines
        lines += 1

    sys.settrace(traced(count))
    try:
        bench = life(root)
    finally:
        sys.settrace(None)
    stats = bench.store.stats()
    assert min(stats.writes, stats.reads, bench.tiers.counters.loaded_pages) >= 12  # there is something to be killed in
    bench.finish()
    return lines


def die_at(root: Path, line: int) -> None:
    """Run `life` in a child that kills itself before its ``line``-th line of `PLACES`."""
    pid = os.fork()
    if pid == 0:
        left = line

        def die() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.settrace(traced(die))
            life(root)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the process outlived line {line}"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.slow
def test_killed_at_50_points_of_writes_and_loads_the_next_process_answers_from_what_is_left(tmp_path: Path) -> None:
    """Points evenly over all lines that stores and tiers run in a life; 0.1 s each."""
    num_lines = count_lines(tmp_path / "whole")
    num_read = []
    for point in range(NUM_POINTS):
        root = tmp_path / f"{point}"
        root.mkdir()
        die_at(root, 1 + point * (num_lines - 1) // NUM_POINTS)
        bench = TieredBench(root)
        for stem in STEMS:
            bench.submit(stem, max_new_tokens=2)
            bench.run()
        bench.finish()  # the oracle's answers, and no page held
        assert bench.store.stats().corrupt == 0  # what has a name is whole
        num_read.append(bench.store.stats().reads)
        bench.close()
    assert num_read[0] == 0
    assert num_read[-1] == 12  # four of the five pages of each: one token is left to compute
    assert len(set(num_read)) > 5
