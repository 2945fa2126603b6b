"""How a served Manta behaves as load grows: `python -m benchmarks.sweep` serves the embedded model and draws two plots
a workload, throughput against requests at once, and TTFT against conversations started a second. About 12 minutes.

The rates of the second are shares of the throughput that the first reached in the same run, so that the plot shows the
same part of the curve on a fast machine and on a slow one.

A point where a request failed has a row that says so, and no figures; a workload with such a point is not drawn.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.client import Client, ClosedLoop, OpenLoop, Run
from benchmarks.line_plot import Series, draw
from benchmarks.live_app import serving
from benchmarks.report import Row, publish
from benchmarks.serving import first_model, percentile
from benchmarks.workloads import Workload, multi_turn, random_lengths, shared_prefix

CONCURRENCY: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
SHARES: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the highest throughput, in conversations
LEAST = 4  # conversations of a run
VOCAB_SIZE = 32_000
MAX_S = 240.0  # of a run
TRACKED, UNTRACKED = Path("docs/pictures"), Path("bench_results/pictures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of workload."""

    name: str
    file: str  # of its plots, without their ending
    make: Callable[[int, int], Workload]  # of at least so many conversations, with this seed
    a_slot: int  # conversations of a run for each that may be open
    arriving: int  # conversations of a run at a rate


SHAPES = (
    Shape(
        name="random, 256 in, 64 out",
        file="random",
        a_slot=2,
        arriving=24,
        make=lambda num, seed: random_lengths(
            num_requests=num, input_len=256, output_len=64, vocab_size=VOCAB_SIZE, seed=seed
        ),
    ),
    Shape(
        name="shared prefixes, 8 of 1,024, 64 in, 32 out",
        file="shared_prefix",
        a_slot=2,
        arriving=24,
        make=lambda num, seed: shared_prefix(
            num_groups=8,
            per_group=-(-num // 8),
            prefix_len=1024,
            question_len=64,
            output_len=32,
            vocab_size=VOCAB_SIZE,
            seed=seed,
        ),
    ),
    Shape(
        name="multi-turn, 5 turns of 64 in, 64 out",
        file="multi_turn",
        a_slot=1,
        arriving=12,
        make=lambda num, seed: multi_turn(
            num_users=num, num_turns=5, turn_len=64, output_len=64, vocab_size=VOCAB_SIZE, seed=seed
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """What is taken from a run."""

    name: str
    unit: str
    of: Callable[[Run], float]


def output_tokens_per_s(run: Run) -> float:
    return sum(sample.completion_tokens for sample in run.answered) / run.wall_s


def conversations_per_s(run: Run) -> float:
    return len({sample.name.split("/")[0] for sample in run.samples}) / run.wall_s


def ttft(q: float) -> Figure:
    def of(run: Run) -> float:
        return percentile([sample.ttft_s for sample in run.answered if sample.ttft_s is not None], q)

    return Figure(f"TTFT p{q:g}", "s", of)


OUTPUT = Figure("output", "tok/s", output_tokens_per_s)


class Sweep:
    """One shape of load against one server; every run has a seed of its own, so that none finds another's prefixes."""

    def __init__(self, client: Client, shape: Shape) -> None:
        self._client, self.shape, self._seed = client, shape, 0

    def closed(self, concurrency: int) -> Run:
        return self._run(max(LEAST, self.shape.a_slot * concurrency), ClosedLoop(concurrency=concurrency))

    def open(self, conversations_per_s: float, num: int) -> Run:
        return self._run(num, OpenLoop(rate=conversations_per_s, seed=self._seed))

    def _run(self, num: int, load: ClosedLoop | OpenLoop) -> Run:
        self._seed += 1
        return asyncio.run(self._client.run(self.shape.make(num, self._seed), load, max_s=MAX_S))


class Points:
    """Rows and lines of one plot."""

    def __init__(self, section: str, figures: Sequence[Figure]) -> None:
        self._section, self._figures = section, figures
        self.rows: list[Row] = []
        self.lines: dict[str, Series] = {figure.name: [] for figure in figures}
        self.whole = True

    def add(self, name: str, x: float, runs: Sequence[Run]) -> bool:
        """One point. Returns: whether every request of it was answered."""
        errors = [error for run in runs for error in run.errors]
        if errors:
            self.whole = False
            note = f"FAILED, of {len(runs[0].samples)}: {errors[0]}"
            failed = [float(sum(run.errors.values())) for run in runs]
            self.rows.append(Row.of(self._section, f"{name}, requests without an answer", failed, "", note=note))
            return False
        for figure in self._figures:
            values = [figure.of(run) for run in runs]
            self.rows.append(Row.of(self._section, f"{name}, {figure.name}", values, figure.unit))
            self.lines[figure.name].append((x, statistics.median(values)))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one shape."""

    rows: list[Row]
    plots: Mapping[str, str]  # file -> SVG; none where a point failed


def measure(sweep: Sweep, *, quick: bool, repeats: int) -> Measured:
    """``repeats``: runs a point."""
    shape, section = sweep.shape, f"load: {sweep.shape.name}"
    concurrency, shares, arriving = CONCURRENCY, SHARES, shape.arriving
    if quick:
        concurrency, shares, arriving = CONCURRENCY[:2], SHARES[:2], LEAST
    at_once, by_rate = Points(section, (OUTPUT, ttft(50))), Points(section, (ttft(50), ttft(95)))
    sweep.closed(1)  # what the first requests compile or touch is not the load's
    best = 0.0
    for many in concurrency:
        runs = [sweep.closed(many) for _ in range(repeats)]
        if at_once.add(f"{many} at once", many, runs):
            best = max(best, statistics.median([conversations_per_s(run) for run in runs]))
    for rate in [share * best for share in shares if best]:
        runs = [sweep.open(rate, arriving) for _ in range(repeats)]
        by_rate.add(f"{rate:.2f} conversations/s", rate, runs)
    return Measured(rows=at_once.rows + by_rate.rows, plots=plots(shape, at_once, by_rate))


def plots(shape: Shape, at_once: Points, by_rate: Points) -> dict[str, str]:
    """File -> SVG."""
    if not (at_once.whole and by_rate.whole):
        print(f"  {shape.name}: requests failed, so it is not drawn", file=sys.stderr, flush=True)
        return {}
    throughput = {"Manta": at_once.lines[OUTPUT.name]}
    by_rate_lines = {name.removeprefix("TTFT "): line for name, line in by_rate.lines.items()}
    drawn = {
        "throughput": draw(throughput, title=shape.name, x="requests at once", y="output tokens/s"),
        "ttft": draw(by_rate_lines, title=shape.name, x="conversations started a second", y="TTFT, s"),
    }
    return {f"{name}_{shape.file}.svg": plot for name, plot in drawn.items()}


def sweep_all(url: str, pictures: Path, *, quick: bool, repeats: int) -> list[Row]:
    """All shapes; writes the plots into ``pictures``."""
    rows: list[Row] = []
    pictures.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        measured = measure(Sweep(Client(url, first_model(url)), shape), quick=quick, repeats=repeats)
        for file, plot in measured.plots.items():
            (pictures / file).write_text(plot)
        rows += measured.rows
        print(f"  {shape.name}: measured", file=sys.stderr, flush=True)
    return rows


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("--url", help="a server that runs already, without /v1; default: serve serve_config.yaml")
    parse.add_argument("--quick", action="store_true", help="two points a plot: a check, not a measurement")
    parse.add_argument("--repeats", type=int, default=1, help="runs a point: each takes the whole time again")
    parse.add_argument("--pictures", type=Path, help=f"folder of the plots; {TRACKED}, or {UNTRACKED} with --quick")
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    options.pictures = options.pictures or (UNTRACKED if options.quick else TRACKED)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parsed(argv)
    if options.url:
        rows = sweep_all(options.url, options.pictures, quick=options.quick, repeats=options.repeats)
    else:
        with serving("serve_config.yaml", {}, observatory=False) as url:
            rows = sweep_all(url, options.pictures, quick=options.quick, repeats=options.repeats)
    publish(rows, json_path=options.json)


if __name__ == "__main__":
    main()
