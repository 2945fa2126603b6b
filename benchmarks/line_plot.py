"""Series of points -> one plot with two linear axes from 0."""

import math
from collections.abc import Mapping, Sequence

from benchmarks import svg
from benchmarks.svg import TOP

Series = list[tuple[float, float]]  # (x, y), x ascending
WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, BOTTOM = 64, 150, 50
NUM_TICKS = 5


def draw(series: Mapping[str, Series], *, title: str, x: str, y: str) -> str:
    """Returns: an SVG with a line and its points for each named series; ``x`` and ``y`` name the axes.

    Raises: ValueError when no series has a point.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError(f"{title}: no series has a point; measure something first")
    frame = _Frame(ticks([px for px, _ in points]), ticks([py for _, py in points]))
    parts = frame.axes(x, y)
    for index, (name, line) in enumerate(series.items()):
        places = [(frame.x(px), frame.y(py)) for px, py in line]
        parts.append(svg.polyline(index, places))
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{svg.colour(index)}"/>' for px, py in places]
        parts += svg.legend(index, WIDTH - RIGHT + 15, name)
    return svg.picture(WIDTH, HEIGHT, title, parts, left=LEFT)


def ticks(values: Sequence[float]) -> list[float]:
    """Round numbers from 0 to at least the largest of ``values`` (none negative): steps of 1, 2 or 5 times 10**n."""
    most = max(values) or 1.0
    rough = most / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


class _Frame:
    """Where numbers lie in the picture."""

    def __init__(self, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> None:
        self._x_ticks, self._y_ticks = x_ticks, y_ticks

    def x(self, value: float) -> float:
        return LEFT + value / self._x_ticks[-1] * (WIDTH - RIGHT - LEFT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._y_ticks[-1] * (HEIGHT - BOTTOM - TOP)

    def axes(self, x_name: str, y_name: str) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        for value in self._x_ticks:
            at = self.x(value)
            parts.append(svg.grid(at, TOP, at, bottom))
            parts.append(svg.text(at, bottom + 18, f"{value:g}", anchor="middle"))
        for value in self._y_ticks:
            at = self.y(value)
            parts.append(svg.grid(LEFT, at, right, at))
            parts.append(svg.text(LEFT - 8, at + 4, f"{value:g}", anchor="end"))
        parts.append(svg.text((LEFT + right) / 2, HEIGHT - 12, x_name, anchor="middle"))
        parts.append(svg.text(LEFT - 40, TOP - 8, y_name))
        return parts
