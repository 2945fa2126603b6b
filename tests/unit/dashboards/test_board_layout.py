"""Panels fill rows from the left, ids stay, and half a panel is refused."""

from typing import Any

import pytest

from dashboards.board import KIT, Board, Box, Line, Needs, Panel, Row
from dashboards.lint import check_places

LINE = Line(KIT.gauge("cache_nodes"), "nodes")


def panel(title: str, **others: Any) -> Panel:
    values: dict[str, Any] = {"shows": "It shows.", "act": "Do this.", "lines": (LINE,), **others}
    return Panel(title=title, **values)


def board(*rows: Row) -> Board:
    return Board(uid="b", title="B", description="d", rows=rows)


def test_panels_fill_a_row_and_wrap_below_the_highest_of_them() -> None:
    row = Row("first", (panel("a", width=12, height=5), panel("b", width=8), panel("c", width=6)))
    places = {what.title: box for what, box in board(row, Row("second", (panel("d"),))).places()}
    assert places == {
        "first": Box(0, 0, 24, 1),
        "a": Box(0, 1, 12, 5),
        "b": Box(12, 1, 8, 8),
        "c": Box(0, 9, 6, 8),
        "second": Box(0, 17, 24, 1),
        "d": Box(0, 18, 8, 8),
    }


def test_the_layout_passes_the_check_that_hand_written_boards_get() -> None:
    row = Row("first", tuple(panel(f"p{n}", width=1 + n % 12, height=3 + n % 5) for n in range(40)))
    built = board(row)
    panels = [
        {"title": what.title, "id": built.id_of(what.title), "gridPos": {"x": b.x, "y": b.y, "w": b.w, "h": b.h}}
        for what, b in built.places()
    ]
    assert check_places({"title": "B", "panels": panels}) == []


def test_a_panels_id_stays_when_others_are_added_before_it() -> None:
    alone = board(Row("first", (panel("a"),)))
    later = board(Row("zero", (panel("z"),)), Row("first", (panel("b"), panel("a"))))
    assert alone.id_of("a") == later.id_of("a")


def test_two_panels_of_one_title_are_refused() -> None:
    with pytest.raises(AssertionError, match="a title is there twice"):
        board(Row("first", (panel("a"),)), Row("second", (panel("a"),)))


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"lines": ()}, "a panel has queries"),
        ({"act": "nothing"}, "act is a sentence"),
        ({"width": 25}, "width 25 of 24"),
        ({"lines": (Line(KIT.gauge("transfer_peers"), "peers"),)}, "needs traffic, but its metrics say otherwise"),
        ({"needs": Needs.APART}, "needs prefill and decode apart, but its metrics say otherwise"),
    ],
)
def test_half_a_panel_is_refused(others: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        panel("a", **others)
