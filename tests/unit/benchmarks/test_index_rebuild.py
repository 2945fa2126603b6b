"""The benchmark of a router that starts: every page arrives over real sockets, and its times are told."""

import json
import pathlib

import pytest

from benchmarks import index_rebuild


def test_every_replicas_pages_reach_the_index_and_the_times_are_told(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 x 500 pages; that the router knows them all is asserted inside."""
    out = tmp_path / "out.json"
    index_rebuild.main(["--replicas", "3", "--pages", "500", "--runs", "2", "--json", str(out)])
    found = json.loads(out.read_text())
    assert (found["num_replicas"], found["pages_per_replica"], found["runs"]) == (3, 500, 2)
    assert 0 < found["index_s"] < found["wall_s"]
    said = capsys.readouterr().out
    assert said.startswith("3 x 500 pages, none shared, known after ")
    assert "target" not in said
