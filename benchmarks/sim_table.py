"""Results as a table: drawn with rich on a terminal, plain columns anywhere else."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.sim_result import Result
from benchmarks.sim_routers import Apart


def show(results: Sequence[Result], *, title: str, console: Console | None = None) -> None:
    """One line a policy, then its decisions by reason."""
    console = console or Console()
    header, lines = _header(results[0]), [_cells(result) for result in results]
    if console.is_terminal:
        table = Table(  # so narrow that nothing is cut off in 80 columns
            title=title,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
        )
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index else "left", no_wrap=not index)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    else:
        console.file.write(_plain(title, [header, *lines]))
    for result in results:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in result.decisions.items())
        console.file.write(f"{result.policy} decided by: {reasons}\n")
        if result.apart is not None:
            console.file.write(_apart(result.policy, result.apart))


def _header(result: Result) -> tuple[str, ...]:
    return (
        "policy",
        "hit ratio",
        "TTFT mean",
        "p50",
        "p90",
        "p99 s",
        f"per s within {result.objective_s:g} s",
        "skew",  # Result.imbalance
        "choice p50",
        "p99 us",
    )


def _cells(result: Result) -> tuple[str, ...]:
    ttft, decision = result.ttft_s, result.decision_us
    return (
        result.policy,
        f"{result.hit_ratio:.1%}",
        *(f"{value:.2f}" for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)),
        f"{result.goodput_rps:.3f}",
        f"{result.imbalance:.2f}",
        f"{decision.p50:.0f}",
        f"{decision.p99:.0f}",
    )


def _apart(policy: str, apart: Apart) -> str:
    return (
        f"{policy}, {apart.routers} routers: pages that not all believe in: mean {apart.pages_mean:.2%}, max "
        f"{apart.pages_max:.2%} of {apart.samples} samples, {apart.pages_at_end:.2%} at the end; decisions that the "
        f"next router would have made differently: {apart.decisions:.2%}\n"
    )


def _plain(title: str, grid: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
    lines = [
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(row))
        for row in (list(zip(line, widths, strict=True)) for line in grid)
    ]
    return "\n".join([title, *lines, ""])
