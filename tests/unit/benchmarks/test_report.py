"""Rows, tables, JSON, percentiles."""

import io
import json

import pytest
from rich.console import Console

from benchmarks.report import Row, show, to_json
from benchmarks.serving import percentile


def test_a_row_is_the_median_with_its_spread_and_its_share_of_the_limit() -> None:
    row = Row.of("decode", "batch 1", [30.0, 20.0, 28.0], "tok/s", limit=40.0)
    assert (row.value, row.low, row.high, row.runs, row.share) == (28.0, 20.0, 30.0, 3, 0.7)


def test_a_row_without_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="decode: batch 1 has no runs"):
        Row.of("decode", "batch 1", [], "tok/s")


def test_percentiles_are_linear_between_ranks() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, q) for q in (0, 50, 75, 100)] == [1.0, 2.5, 3.25, 4.0]
    assert percentile([7.0], 99) == 7.0


def test_percentiles_of_nothing_or_beyond_100_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="q = 101"):
        percentile([1.0], 101)


def test_off_a_terminal_the_table_is_plain_and_drops_columns_nobody_used() -> None:
    out = io.StringIO()
    rows = [Row.of("decode", "batch 1", [30.0, 20.0, 28.0], "tok/s"), Row.of("decode", "batch 32", [12345.6], "tok/s")]
    show(rows, console=Console(file=out))
    assert out.getvalue().splitlines() == [
        "",
        "decode",
        "          median  unit   low .. high  runs",
        "batch 1   28      tok/s  20 .. 30     3",
        "batch 32  12,346  tok/s               1",
    ]


def test_on_a_terminal_it_draws_a_table() -> None:
    out = io.StringIO()
    show([Row.of("decode", "batch 1", [30.0], "tok/s")], console=Console(file=out, force_terminal=True, width=80))
    assert "┃" in out.getvalue()


def test_json_has_rows_and_what_they_depend_on() -> None:
    report = json.loads(json.dumps(to_json([Row.of("s", "n", [1.0], "s", limit=2.0)], command=["python", "-m", "x"])))
    assert set(report) == {"version", "time", "command", "git", "machine", "rows"}
    assert set(report["git"]) == {"commit", "changed"}
    assert {"cpu", "cores", "memory_gib", "load_average", "python", "packages"} <= set(report["machine"])
    assert report["machine"]["packages"]["numpy"]
    assert report["rows"] == [
        {
            "section": "s",
            "name": "n",
            "value": 1.0,
            "unit": "s",
            "low": 1.0,
            "high": 1.0,
            "runs": 1,
            "limit": 2.0,
            "share": 0.5,
            "target": None,
            "note": "",
        }
    ]
