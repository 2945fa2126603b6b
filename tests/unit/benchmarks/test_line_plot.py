"""Plots of series: round ticks, points in their places, names that cannot break the picture."""

from xml.etree import ElementTree

import pytest

from benchmarks.line_plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (32.0, [0, 10, 20, 30, 40]),
        (10.0, [0, 2, 4, 6, 8, 10]),
        (0.7, [0, 0.2, 0.4, 0.6000000000000001, 0.8]),
        (230.0, [0, 50, 100, 150, 200, 250]),
        (0.0, [0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]),
    ],
)
def test_ticks_are_round_numbers_from_zero_to_the_largest_value(most: float, expected: list[float]) -> None:
    assert ticks([most / 2, most]) == pytest.approx(expected)


def test_each_point_lies_where_its_numbers_are_on_the_axes() -> None:
    picture = ElementTree.fromstring(draw({"ours": [(0, 0), (5, 20), (10, 10)]}, title="t", x="x", y="y"))
    width, height = WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in picture.iter(f"{SVG}circle")]  # type: ignore[arg-type]
    bottom = HEIGHT - BOTTOM
    assert places == [(LEFT, bottom), (LEFT + width / 2, TOP), (LEFT + width, bottom - height / 2)]


def test_names_with_markup_in_them_are_text_in_the_picture() -> None:
    picture = ElementTree.fromstring(draw({"a<b & c": [(1, 1)]}, title="<t>", x="x", y="y"))
    texts = {text.text for text in picture.iter(f"{SVG}text")}
    assert {"a<b & c", "<t>"} <= texts


def test_a_plot_of_nothing_is_refused_with_its_title() -> None:
    with pytest.raises(ValueError, match="empty one: no series has a point"):
        draw({"ours": []}, title="empty one", x="x", y="y")
