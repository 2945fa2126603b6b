"""One frame for every measurement: a command line, rounds in turn, rows -> tables for people and JSON for comparisons.

Owns:      what a row holds, how it is shown, and the facts of the machine that make it comparable.
Invariant: a row's value is the median of its runs, and its spread is shown beside it; the file is written after each
           row, so that a measurement that is broken off leaves what it has measured.

    command: part ──measure(options)──> rows ─┐
             part ──measure(options)──> rows ─┴──> show: one table a section; write: one JSON file
"""

import argparse
import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = "models/SmolLM2-135M-Instruct"
VERSION = 2  # of the JSON's form
PACKAGES = ("torch", "transformers", "numba", "numpy", "ray")
HEADER = ("", "median", "unit", "low .. high", "runs", "limit", "share", "target", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured quantity. Rows with a figure are drawn as a grid: a line for each name, a column for each figure."""

    section: str  # the table it belongs to
    name: str
    figure: str = ""
    value: float | None  # median of the runs; None: it could not be measured, and the note says why
    unit: str = ""
    low: float | None = None
    high: float | None = None
    runs: int = 0
    limit: float | None = None  # what the machine allows, in ``unit``
    share: float | None = None  # of the limit that is reached, or what part of a whole this is; 1.0 is all
    target: str | None = None  # the share or ratio asked for, in words
    note: str = ""

    @staticmethod
    def of(section: str, name: str, values: Sequence[float], unit: str = "", **more: Any) -> "Row":
        """Return the row of several runs; ``more``: other fields. With a limit and no share, the share is their ratio.

        Raises: ValueError without runs.
        """
        if not values:
            raise ValueError(f"{section}: {name} has no runs; measure it at least once")
        value, limit = statistics.median(values), more.get("limit")
        if limit and more.get("share") is None:
            more["share"] = value / limit
        return Row(
            section=section, name=name, value=value, unit=unit, low=min(values), high=max(values), runs=len(values),
            **more,
        )  # fmt: skip


class Table:
    """The rows of one section, in the order in which they are added."""

    def __init__(self, section: str) -> None:
        self.section, self.rows = section, list[Row]()

    def add(self, name: str, values: Sequence[float], unit: str = "", **more: Any) -> None:
        self.rows.append(Row.of(self.section, name, values, unit, **more))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a command can measure by itself."""

    about: str
    measure: Callable[[argparse.Namespace], Iterable[Row]]
    asked: bool = False  # measured only where it is named


def run(
    name: str,
    about: str | None,
    parts: Mapping[str, Part],
    argv: Sequence[str] | None,
    *,
    options: Callable[[argparse.ArgumentParser], None] = lambda parse: None,
) -> list[Row]:
    """Parse one command's line, measure the parts that are named (or those that need no name), and show their rows.
    Returns: the rows.

    Args: options: adds the command's own options to those that every command has.
    """
    listed = "\n".join(f"  {part:<10} {each.about}{' (named only)' * each.asked}" for part, each in parts.items())
    parse = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=f"{about}\nParts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parse.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(parts)}")
    parse.add_argument("--quick", action="store_true", help="small sizes, one round: a check, not a measurement")
    parse.add_argument("--rounds", type=int, help="repeats of what is compared, in turn; each part has its own default")
    parse.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parse.add_argument("--model", default=MODEL, help="folder that Transformers can load")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--json", metavar="OUT", type=pathlib.Path, help="also write the rows here")
    options(parse)
    chosen = parse.parse_args(argv)
    if unknown := [each for each in chosen.parts if each not in parts]:
        parse.error(f"no part is called {', '.join(unknown)}; there are: {', '.join(parts)}")
    wanted = chosen.parts or [part for part, each in parts.items() if not each.asked]
    rows = list[Row]()
    for part in wanted:
        for row in parts[part].measure(chosen):
            rows.append(row)
            write(rows, chosen.json)
    show(rows)
    return rows


def rounds_of(options: argparse.Namespace, full: int) -> int:
    """Return how often to measure: as asked, else once for a check, else ``full`` times."""
    return int(options.rounds or (1 if options.quick else full))


def in_turn(ways: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, way): every way once a round, every second round from the last, so that drift hits all alike."""
    ways = list(ways)
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            yield number, way


def timed(work: Callable[[], object], runs: int) -> list[float]:
    """Return the seconds of each of ``runs`` runs, after one that warms up."""
    work()
    times_s = []
    for _ in range(runs):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return times_s


def percentile(values: Sequence[float], q: float) -> float:
    """Return the ``q``-th percentile (0 to 100), linear between the two nearest ranks."""
    if not values:
        raise ValueError("the percentile of no values does not exist; check that requests were answered")
    return float(np.percentile(values, q))


def say(line: str) -> None:
    """Tell the user how far a long measurement is."""
    print(f"  {line}", file=sys.stderr, flush=True)


def write(rows: Sequence[Row], path: pathlib.Path | None) -> None:
    """Write JSON where a path is given; the file there is the old one or the new one, never half of one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(f"{path.name}.tmp")
        whole.write_text(json.dumps(to_json(rows, command=sys.orig_argv), indent=1) + "\n")
        whole.replace(path)


def to_json(rows: Sequence[Row], *, command: Sequence[str]) -> dict[str, Any]:
    """Return everything needed to compare this run with another."""
    return {
        "version": VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": list(command),
        "git": _git_state(),
        "machine": machine_facts(),
        "rows": [asdict(row) for row in rows],
    }


def machine_facts() -> dict[str, Any]:
    """Return what a number depends on besides the code."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, platform.processor() or platform.machine()),
        "instructions": os.environ.get("MANTA_CPU") or "native",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def show(rows: Sequence[Row]) -> None:
    """Print one table a section, in plain columns: a GPU machine has no more than Python and PyTorch."""
    for section, grid in tables(rows).items():
        widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
        print(f"\n{section}")
        for line in grid:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def tables(rows: Iterable[Row]) -> dict[str, list[list[str]]]:
    """Return the lines of each section's table, its header first, without columns that are empty."""
    by_section: dict[str, list[Row]] = {}
    for row in rows:
        by_section.setdefault(row.section, []).append(row)
    found = {}
    for section, mine in by_section.items():
        header, lines = _grid(mine) if any(row.figure for row in mine) else (HEADER, [_cells(row) for row in mine])
        used = [index for index in range(len(header)) if any(line[index] for line in lines)]
        found[section] = [[line[index] for index in used] for line in (header, *lines)]
    return found


def _grid(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and lines of rows that have figures; the notes of a line stand in its last column."""
    figures = list(dict.fromkeys((row.figure, row.unit) for row in rows if row.value is not None))
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        of_line = {(row.figure, row.unit): row for row in rows if row.name == name}
        cells = [_whole(of_line[each]) if each in of_line else "" for each in figures]
        notes = "; ".join(dict.fromkeys(row.note for row in of_line.values() if row.note))
        lines.append((name, *cells, notes))
    return ("", *(" ".join(each).strip() for each in figures), "note"), lines


def _whole(row: Row) -> str:
    spread = _spread(row).replace(" ", "")
    return "-" if row.value is None else _number(row.value) + (f" ({spread})" if spread else "")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        "" if row.value is None else _number(row.value),
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
    """Write four significant digits, thousands separated."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 1000 else f"{value:.4g}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _git_state() -> dict[str, Any]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed": None}


def need_plots() -> Any:
    """Import what draws. Raises: SystemExit that says what to install."""
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError as error:
        raise SystemExit(
            f"drawing needs matplotlib ({error}): install it with `{sys.executable} -m pip install -e '.[plots]'`, "
            "or leave the plots out"
        ) from error
    return pyplot


def draw(
    path: pathlib.Path, lines: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x: str, y: str,
    log_x: bool = False, marker: str = "",
) -> None:  # fmt: skip
    """Write an SVG with a line through the points of each name. Raises: as `need_plots`; ValueError without a point."""
    if not any(lines.values()):
        raise ValueError(f"{title}: no line has a point; measure something first")
    pyplot = need_plots()
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    for name, points in lines.items():
        axes.plot([px for px, _ in points], [py for _, py in points], marker=marker or None, label=name)
    axes.set(title=title, xlabel=x, ylabel=y, ylim=(0, None), **({"xscale": "log"} if log_x else {"xlim": (0, None)}))
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
