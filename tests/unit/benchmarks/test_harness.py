"""The frame of all measurements: rows, JSON, percentiles, rounds in turn."""

import json
import pathlib

import pytest

from benchmarks import harness
from benchmarks.harness import Part, Row, in_turn, percentile, to_json


def test_a_row_is_the_median_with_its_spread_and_its_share_of_the_limit() -> None:
    row = Row.of("decode", "batch 1", [30.0, 20.0, 28.0], "tok/s", limit=40.0)
    assert (row.value, row.low, row.high, row.runs, row.share) == (28.0, 20.0, 30.0, 3, 0.7)


def test_percentiles_are_linear_between_ranks() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, q) for q in (0, 50, 75, 100)] == [1.0, 2.5, 3.25, 4.0]
    assert percentile([7.0], 99) == 7.0


def test_json_has_rows_and_what_they_depend_on() -> None:
    report = json.loads(json.dumps(to_json([Row.of("s", "n", [1.0], "s", limit=2.0)], command=["python", "-m", "x"])))
    assert set(report) == {"version", "time", "command", "git", "machine", "rows"}
    assert set(report["git"]) == {"commit", "changed"}
    assert {"cpu", "cores", "memory_gib", "load_average", "python", "packages"} <= set(report["machine"])
    assert report["machine"]["packages"]["numpy"]
    told = {"section": "s", "name": "n", "value": 1.0, "unit": "s", "low": 1.0, "high": 1.0, "runs": 1, "limit": 2.0}
    assert report["rows"] == [{**told, "share": 0.5, "figure": "", "target": None, "note": ""}]


def test_every_second_round_begins_with_the_last_way() -> None:
    assert list(in_turn("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_a_command_measures_the_parts_that_are_named_and_keeps_their_rows(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str) -> Part:
        return Part(about=name, measure=lambda options: [Row.of("s", name, [options.seed])], asked=name == "b")

    parts = {name: part(name) for name in "abc"}
    out = tmp_path / "deep" / "out.json"
    harness.run("x", "doc", parts, ["--seed", "7", "--json", str(out)])
    assert [(row["name"], row["value"]) for row in json.loads(out.read_text())["rows"]] == [("a", 7), ("c", 7)]
    harness.run("x", "doc", parts, ["b"])
    assert "\nb  0       1\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        harness.run("x", "doc", parts, ["d"])
    assert "no part is called d; there are: a, b, c" in capsys.readouterr().err
