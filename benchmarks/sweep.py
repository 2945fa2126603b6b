"""How a served Manta behaves as load grows: `python -m benchmarks.sweep` serves the embedded model and draws two plots
a workload, throughput against requests at once, and TTFT against conversations started a second.

The rates of the second are shares of the throughput that the first reached in the same run, so that the plot shows the
same part of the curve on a fast machine and on a slow one.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.client import Client, ClosedLoop, OpenLoop, Run
from benchmarks.line_plot import Series, draw
from benchmarks.live_app import serving
from benchmarks.report import Row, publish
from benchmarks.serving import first_model, percentile
from benchmarks.workloads import Workload, multi_turn, random_lengths, shared_prefix

CONCURRENCY = (1, 2, 4, 8, 16, 32)
SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the highest throughput, in requests
VOCAB_SIZE = 32_000
MAX_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A workload of about ``num`` conversations, by (num, seed)."""

    name: str
    file: str  # of its plots, without their ending
    make: Callable[[int, int], Workload]


SHAPES = (
    Shape(
        name="random, 256 in, 64 out",
        file="random",
        make=lambda num, seed: random_lengths(
            num_requests=num, input_len=256, output_len=64, vocab_size=VOCAB_SIZE, seed=seed
        ),
    ),
    Shape(
        name="shared prefixes, 8 of 1,024, 64 in, 32 out",
        file="shared_prefix",
        make=lambda num, seed: shared_prefix(
            num_groups=8,
            per_group=max(1, num // 8),
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
        make=lambda num, seed: multi_turn(
            num_users=max(1, num // 4), num_turns=5, turn_len=64, output_len=64, vocab_size=VOCAB_SIZE, seed=seed
        ),
    ),
)


def requests_per_s(run: Run) -> float:
    return len(run.answered) / run.wall_s


def output_tokens_per_s(run: Run) -> float:
    return sum(sample.completion_tokens for sample in run.answered) / run.wall_s


def ttft_s(run: Run, q: float) -> float:
    return percentile([sample.ttft_s for sample in run.answered if sample.ttft_s is not None], q)


class Sweep:
    """One shape of load against one server; every run has a seed of its own, so that none finds another's prefixes."""

    def __init__(self, client: Client, shape: Shape) -> None:
        self._client, self._shape, self._seed = client, shape, 0

    def closed(self, concurrency: int) -> Run:
        """Two conversations for each that may be open, at least 4 (of shared prefixes: one a prefix)."""
        return self._run(max(4, 2 * concurrency), ClosedLoop(concurrency=concurrency))

    def open(self, conversations_per_s: float, num: int) -> Run:
        return self._run(num, OpenLoop(rate=conversations_per_s, seed=self._seed))

    def _run(self, num: int, load: ClosedLoop | OpenLoop) -> Run:
        self._seed += 1
        run = asyncio.run(self._client.run(self._shape.make(num, self._seed), load, max_s=MAX_S))
        if run.errors:
            error, count = next(iter(run.errors.items()))
            raise RuntimeError(f"{self._shape.name}: {count} requests failed, the first with: {error}")
        return run


def measure(url: str, shape: Shape, *, quick: bool) -> tuple[list[Row], str, str]:
    """Rows, and the two plots as SVG."""
    concurrency, shares, num_open = (CONCURRENCY[:2], SHARES[:2], 4) if quick else (CONCURRENCY, SHARES, 24)
    sweep = Sweep(Client(url, first_model(url)), shape)
    sweep.closed(1)  # what the first requests compile or touch is not the load's
    rows: list[Row] = []
    section = f"load: {shape.name}"
    throughput: Series = []
    best = 0.0
    for at_once in concurrency:
        run = sweep.closed(at_once)
        throughput.append((at_once, output_tokens_per_s(run)))
        turns = len(run.samples) / len({sample.name.split("/")[0] for sample in run.samples})
        best = max(best, requests_per_s(run) / turns)
        rows.append(Row.of(section, f"{at_once} at once, output", [throughput[-1][1]], "tok/s"))
        rows.append(Row.of(section, f"{at_once} at once, TTFT p50", [ttft_s(run, 50)], "s"))
    p50: Series = []
    p95: Series = []
    for share in shares:
        run = sweep.open(share * best, num_open)
        rate = share * best
        p50.append((rate, ttft_s(run, 50)))
        p95.append((rate, ttft_s(run, 95)))
        for name, series in (("p50", p50), ("p95", p95)):
            rows.append(Row.of(section, f"{rate:.2f} conversations/s, TTFT {name}", [series[-1][1]], "s"))
    return (
        rows,
        draw({"Manta": throughput}, title=shape.name, x="requests at once", y="output tokens/s"),
        draw({"p50": p50, "p95": p95}, title=shape.name, x="conversations started a second", y="TTFT, s"),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("--url", help="a server that runs already, without /v1; default: serve serve_config.yaml")
    parse.add_argument("--quick", action="store_true", help="two points a plot: a check, not a measurement")
    parse.add_argument("--pictures", type=Path, default=Path("docs/pictures"), help="folder of the plots")
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    if options.url:
        rows = sweep_all(options.url, options.pictures, quick=options.quick)
    else:
        with serving("serve_config.yaml", {}, observatory=False) as url:
            rows = sweep_all(url, options.pictures, quick=options.quick)
    publish(rows, json_path=options.json)


def sweep_all(url: str, pictures: Path, *, quick: bool) -> list[Row]:
    """All shapes; writes the plots into ``pictures``."""
    rows: list[Row] = []
    pictures.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        more, throughput, ttft = measure(url, shape, quick=quick)
        (pictures / f"throughput_{shape.file}.svg").write_text(throughput)
        (pictures / f"ttft_{shape.file}.svg").write_text(ttft)
        rows += more
    return rows


if __name__ == "__main__":
    main()
