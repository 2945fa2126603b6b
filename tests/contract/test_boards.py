"""The committed boards and docs/metrics.md are what the catalogue says; Grafana's own SDK reads the boards."""

import itertools
import json
import pathlib
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.board import Board, Needs, Panel, Row
from dashboards.files import BOARD_FILES, BOARDS, committed_board, generated

TEXTS = generated()
ADDED_BY_SDK = ("auto", "auto_count", "auto_min")  # to every variable, where only interval variables have them


def round_trip(document: Any) -> Any:
    """A board once through the models of Grafana's SDK: what they do not know is lost."""
    through = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))
    for variable in through["templating"]["list"]:
        for key in ADDED_BY_SDK:
            variable.pop(key, None)
    return through


def laid_out(*rows: Row) -> dict[str, dict[str, Any]]:
    """The panels of a board with these rows, by title."""
    panels = json.loads(Board(uid="b", title="B", description="d", rows=rows).to_json(()))["panels"]
    return {panel["title"]: panel for panel in panels}


def panel(title: str, width: int = 8, height: int = 8) -> Panel:
    return Panel(title, shows="It shows.", act="Do this.", queries={"all": "up"}, width=width, height=height)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_the_file_is_as_the_catalogue_says(path: pathlib.Path) -> None:
    assert path.read_text() == TEXTS[path], "run `make dashboards` and commit what it writes"


def test_no_other_board_lies_beside_them() -> None:
    files = list(BOARD_FILES.values())
    assert sorted(files[0].parent.iterdir()) == sorted(files)


@pytest.mark.parametrize("uid", BOARD_FILES)
def test_no_panels_overlap_or_stick_out_and_each_has_its_own_id(uid: str) -> None:
    panels = committed_board(uid)["panels"]
    assert len({each["id"] for each in panels}) == len({each["title"] for each in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (each["gridPos"] for each in panels):
        x, y, w, h = (place[key] for key in "xywh")
        cells = set(itertools.product(range(x, x + w), range(y, y + h)))
        assert not taken & cells, place
        assert x + w <= 24, place
        taken |= cells


def test_panels_fill_a_row_and_wrap_below_the_highest_of_them() -> None:
    first = Row("first", (panel("a", width=12, height=5), panel("b"), panel("c", width=6)))
    placed = laid_out(first, Row("second", (panel("d"),)))
    assert {title: tuple(each["gridPos"][key] for key in "xywh") for title, each in placed.items()} == {
        "first": (0, 0, 24, 1),
        "a": (0, 1, 12, 5),
        "b": (12, 1, 8, 8),
        "c": (0, 9, 6, 8),
        "second": (0, 17, 24, 1),
        "d": (0, 18, 8, 8),
    }


def test_a_panels_id_stays_when_others_are_added_before_it() -> None:
    later = laid_out(Row("zero", (panel("z"),)), Row("first", (panel("b"), panel("a"))))
    assert laid_out(Row("first", (panel("a"),)))["a"]["id"] == later["a"]["id"]


@pytest.mark.parametrize("uid", BOARD_FILES)
def test_a_board_is_the_same_after_going_through_the_sdk(uid: str) -> None:
    assert round_trip(committed_board(uid)) == committed_board(uid)


def test_the_round_trip_loses_what_the_sdk_does_not_know() -> None:
    document = committed_board("manta-kv")
    document["panels"][1]["titel"] = "a key that Grafana does not have"
    assert "titel" not in json.dumps(round_trip(document))


def test_what_needs_prefill_and_decode_apart_has_a_row_of_its_own() -> None:
    rows = {row.title for board in BOARDS for row in board.rows for panel in row.panels if panel.needs is Needs.APART}
    assert rows == {"Prefill and decode apart"}


@pytest.mark.parametrize("uid", BOARD_FILES)
def test_a_board_has_what_its_readers_expect(uid: str) -> None:
    document = committed_board(uid)
    assert document["graphTooltip"] == 1  # a shared crosshair
    assert [each["name"] for each in document["templating"]["list"]] == ["datasource", "model", "role", "replica"]
    others = {f"/d/{other}" for other in BOARD_FILES if other != uid}
    assert {link["url"] for link in document["links"]} == others
    assert all(link["includeVars"] and link["keepTime"] for link in document["links"])
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert all(len(panel["description"]) > 60 for panel in panels)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
