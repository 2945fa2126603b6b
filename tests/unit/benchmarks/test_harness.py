"""The frame of all measurements: rows, tables, grids, JSON, percentiles, rounds in turn, plots."""

import json
import pathlib
import sys

import pytest

from benchmarks import harness
from benchmarks.__main__ import COMMANDS
from benchmarks.__main__ import main as list_commands
from benchmarks.harness import Part, Row, in_turn, percentile, show, to_json


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


def test_a_table_has_plain_columns_and_drops_those_that_are_unused(capsys: pytest.CaptureFixture[str]) -> None:
    show([Row.of("decode", "batch 1", [30.0, 20.0, 28.0], "tok/s"), Row.of("decode", "batch 32", [12345.6], "tok/s")])
    assert capsys.readouterr().out.splitlines() == [
        "",
        "decode",
        "          median  unit   low .. high  runs",
        "batch 1   28      tok/s  20 .. 30     3",
        "batch 32  12,346  tok/s               1",
    ]


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
            "figure": "",
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


def test_rows_with_figures_are_a_grid_and_what_is_missing_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row.of("peers", "a", [1.0, 3.0], "s", figure="wall"),
        Row.of("peers", "a", [7.0], "%", figure="hit", note="n"),
        Row(section="peers", name="b", figure="wall", unit="s", value=None, note="not installed"),
    ]
    show(rows)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "   wall s    hit %  note",
        "a  2 (1..3)  7      n",
        "b  -                not installed",
    ]


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


def test_without_a_command_all_are_listed_and_an_unknown_one_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(COMMANDS) > 5
    assert (list_commands([]), list_commands(["x"])) == (0, 2)
    said = capsys.readouterr().out
    assert all(f"  {name}" in said for name in COMMANDS)


def test_without_matplotlib_drawing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"drawing needs matplotlib .* pip install -e '\.\[plots\]'"):
        harness.need_plots()


def test_a_plot_is_an_svg_with_its_title_and_one_of_nothing_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="t: no line has a point"):
        harness.draw(tmp_path / "x.svg", {"ours": []}, title="t", x="x", y="y")
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra test")
    harness.draw(tmp_path / "deep" / "x.svg", {"a<b": [(1, 2), (3, 4)]}, title="t", x="x", y="y", log_x=True)
    assert "<svg" in (tmp_path / "deep" / "x.svg").read_text()
