"""What was measured -> one table, for people. Pure.

Invariant: every workload has a line for every system that was asked for; one that could not be measured says why.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.cells import Cell
from benchmarks.peers.measure import Measured

HEADER = ("tok/s", "wall s", "TTFT p50 s", "TTFT p95 s", "TPOT ms", "hit %", "CPU s", "elsewhere s", "runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """All runs, and why systems are missing."""

    runs: Sequence[Measured]
    absent: Mapping[str, str]  # system -> why it was not measured at all

    def of(self, cell: str, system: str) -> list[Measured]:
        return [run for run in self.runs if (run.cell, run.system) == (cell, system)]

    def whole(self, cell: str, system: str) -> list[Measured]:
        """The runs that count: every request was answered."""
        return [run for run in self.of(cell, system) if run.problem is None]

    def problem(self, cell: str, system: str) -> str | None:
        """Why there is no number; None if there is one."""
        if self.whole(cell, system):
            return None
        failed = self.of(cell, system)
        if failed:
            return failed[-1].problem
        return self.absent.get(system, "not run")

    def tokens_per_s(self, cell: str, system: str) -> float | None:
        whole = self.whole(cell, system)
        return statistics.median(run.tokens_per_s for run in whole) if whole else None


def ratio(book: Book, cell: str, ours: str, other: str) -> float | None:
    """Our throughput over another's, medians; None where one of them has none."""
    mine, theirs = book.tokens_per_s(cell, ours), book.tokens_per_s(cell, other)
    return mine / theirs if mine is not None and theirs else None


def table(book: Book, cells: Sequence[Cell], systems: Sequence[str], ours: Sequence[str]) -> str:
    """Markdown, columns aligned; ``ours``: the systems of which each line tells the ratio to its own system."""
    header = ("workload", "system", *HEADER, *(f"{name} /" for name in ours))
    lines = [header]
    for cell in cells:
        for index, system in enumerate(systems):
            lines.append((cell.name if index == 0 else "", system, *_cells(book, cell.name, system, ours)))
    return _aligned(lines)


def reasons(book: Book, cells: Sequence[Cell], systems: Sequence[str]) -> list[str]:
    """A sentence for each system and workload without numbers, and for repeats that failed where others did not."""
    found = []
    for system in systems:
        if system in book.absent:
            found.append(f"{system}: {book.absent[system]}")
        for cell in cells:
            failed = [run for run in book.of(cell.name, system) if run.problem is not None]
            found += [f"{system}, {cell.name}, round {run.round + 1}: {run.problem}" for run in failed]
    return found


def _cells(book: Book, cell: str, system: str, ours: Sequence[str]) -> tuple[str, ...]:
    whole = book.whole(cell, system)
    if not whole:
        why = "not run" if not book.of(cell, system) else "did not finish"
        why = "not installed or not started" if system in book.absent else why
        return (why, *[""] * (len(HEADER) - 1 + len(ours)))
    figures: tuple[tuple[Callable[[Measured], float | None], float], ...] = (
        (lambda run: run.tokens_per_s, 1),
        (lambda run: run.wall_s, 1),
        (lambda run: run.ttft_p50_s, 1),
        (lambda run: run.ttft_p95_s, 1),
        (lambda run: run.tpot_p50_s, 1000),
        (lambda run: run.hit_percent, 1),
        (lambda run: run.server_cpu_s, 1),
        (lambda run: run.elsewhere_cpu_s, 1),
    )
    values = [_spread([figure(run) for run in whole], scale) for figure, scale in figures]
    ratios = [ratio(book, cell, mine, system) for mine in ours]
    num_all = len(book.of(cell, system))
    return (*values, f"{len(whole)} of {num_all}", *("" if each is None else f"{each:.2f}x" for each in ratios))


def _spread(values: Sequence[float | None], scale: float) -> str:
    """Median, and the least and the most where there are several."""
    known = [value * scale for value in values if value is not None]
    if not known:
        return "-"
    median = _number(statistics.median(known))
    return median if len(known) < 2 else f"{median} ({_number(min(known))}..{_number(max(known))})"


def _number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    rows = ["| " + " | ".join(line) + " |" for line in padded]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])
