"""Results -> one plot: for each policy, which share of the requests had its first token after how long."""

import math
from collections.abc import Mapping, Sequence

from benchmarks import svg
from benchmarks.svg import TOP

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, BOTTOM = 60, 190, 50
NUM_POINTS = 100
LEAST_S = 0.01  # left edge of the axis, which is logarithmic


def plot_ttft(ttft_s: Mapping[str, Sequence[float]], title: str) -> str:
    """Returns: an SVG. ``ttft_s``: at least one policy, with the TTFT of each of its requests."""
    most_s = max(max(values) for values in ttft_s.values())
    decades = max(1, math.ceil(math.log10(most_s / LEAST_S)))
    parts = _axes(decades)
    for index, (policy, values) in enumerate(ttft_s.items()):
        parts.append(svg.polyline(index, [(_x(s, decades), _y(share)) for s, share in _quantiles(values)]))
        parts += svg.legend(index, WIDTH - RIGHT + 15, f"{policy} ({sum(values) / len(values):.2f} s)")
    return svg.picture(WIDTH, HEIGHT, title, parts, left=LEFT)


def _quantiles(values: Sequence[float]) -> list[tuple[float, float]]:
    """(seconds, share of the requests that took at most so long), few enough to draw."""
    ordered = sorted(values)
    return [
        (ordered[min(len(ordered) - 1, len(ordered) * point // NUM_POINTS)], point / NUM_POINTS)
        for point in range(NUM_POINTS + 1)
    ]


def _axes(decades: int) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for decade in range(decades + 1):
        x, label = _x(LEAST_S * 10**decade, decades), f"{LEAST_S * 10**decade:g}"
        parts.append(svg.grid(x, TOP, x, bottom))
        parts.append(svg.text(x, bottom + 18, label, anchor="middle"))
    for percent in (0, 25, 50, 75, 90, 100):
        y = _y(percent / 100)
        parts.append(svg.grid(LEFT, y, right, y))
        parts.append(svg.text(LEFT - 8, y + 4, f"{percent}%", anchor="end"))
    middle = (LEFT + right) / 2
    parts.append(svg.text(middle, HEIGHT - 12, "time to first token, s (mean in brackets)", anchor="middle"))
    return parts


def _x(seconds: float, decades: int) -> float:
    share = math.log10(max(seconds, LEAST_S) / LEAST_S) / decades
    return LEFT + share * (WIDTH - RIGHT - LEFT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
