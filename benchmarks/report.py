"""Rows of measured numbers -> a table for people and JSON for comparisons.

Owns:      what a row holds, and the facts of the machine that make it comparable.
Invariant: a row's value is the median of its runs; its spread is shown beside it.
"""

import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table

SCHEMA_VERSION = 1
PACKAGES = ("torch", "transformers", "numba", "numpy", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured quantity."""

    section: str  # the table it belongs to
    name: str
    value: float  # median of the runs
    unit: str
    low: float | None  # None where only the median was kept
    high: float | None
    runs: int
    limit: float | None = None  # what the machine allows, in ``unit``
    share: float | None = None  # how much of the limit is reached, or what part of a whole this is; 1.0 is all
    target: str | None = None  # the share or ratio asked for, in words
    note: str = ""

    @staticmethod
    def of(
        section: str,
        name: str,
        values: Sequence[float],
        unit: str,
        *,
        limit: float | None = None,
        share: float | None = None,
        target: str | None = None,
        note: str = "",
    ) -> "Row":
        """The row of several runs. With a ``limit`` and no ``share``, the share is the median over the limit."""
        if not values:
            raise ValueError(f"{section}: {name} has no runs; measure it at least once")
        value = statistics.median(values)
        return Row(
            section=section,
            name=name,
            value=value,
            unit=unit,
            low=min(values),
            high=max(values),
            runs=len(values),
            limit=limit,
            share=value / limit if share is None and limit else share,
            target=target,
            note=note,
        )


def machine_facts() -> dict[str, Any]:
    """What a number depends on besides the code."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def to_json(rows: Sequence[Row], *, command: Sequence[str]) -> dict[str, Any]:
    """Everything needed to compare this run with another."""
    return {
        "version": SCHEMA_VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": list(command),
        "git": _git_state(),
        "machine": machine_facts(),
        "rows": [asdict(row) for row in rows],
    }


def publish(rows: Sequence[Row], *, json_path: str | None) -> None:
    """Print the tables; also write JSON where a path is given."""
    show(rows)
    if json_path is not None:
        path = pathlib.Path(json_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_json(rows, command=sys.orig_argv), indent=1) + "\n")


def show(rows: Sequence[Row], *, console: Console | None = None) -> None:
    """One table a section: drawn with rich on a terminal, plain columns anywhere else."""
    console = console or Console()
    for section in dict.fromkeys(row.section for row in rows):
        lines = [_cells(row) for row in rows if row.section == section]
        if console.is_terminal:
            console.print(_rich_table(section, lines))
        else:
            console.file.write(_plain_table(section, lines))


HEADER = ("", "median", "unit", "low .. high", "runs", "limit", "share", "target", "note")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        _number(row.value),
        row.unit,
        _spread(row),
        str(row.runs),
        "" if row.limit is None else _number(row.limit),
        "" if row.share is None else f"{row.share:.1%}",
        row.target or "",
        row.note,
    )


def _spread(row: Row) -> str:
    if row.low is None or row.high is None or row.runs < 2:
        return ""
    return f"{_number(row.low)} .. {_number(row.high)}"


def _number(value: float) -> str:
    """Four significant digits, thousands separated."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _rich_table(section: str, lines: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=section, title_justify="left", title_style="bold")
    used = _used_columns(lines)
    for index in used:
        table.add_column(HEADER[index], justify="right" if index in (1, 4, 5, 6) else "left")
    for line in lines:
        table.add_row(*(line[index] for index in used))
    return table


def _plain_table(section: str, lines: Sequence[tuple[str, ...]]) -> str:
    used = _used_columns(lines)
    grid = [[line[index] for index in used] for line in [HEADER, *lines]]
    widths = [max(len(line[column]) for line in grid) for column in range(len(used))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in grid]
    return "\n".join(["", section, *("  ".join(line).rstrip() for line in padded), ""])


def _used_columns(lines: Sequence[tuple[str, ...]]) -> list[int]:
    return [index for index in range(len(HEADER)) if any(line[index] for line in lines)]


def _cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any]:
    root = pathlib.Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed": None}
    return {"commit": commit.stdout.strip(), "changed": bool(status.stdout.strip())}
