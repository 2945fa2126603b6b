"""Results -> one plot: for each policy, which share of the requests had its first token after how long. SVG by hand: no
dependency, and it can be read in a diff.
"""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 60, 190, 40, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#555555")  # Okabe and Ito
NUM_POINTS = 100
LEAST_S = 0.01  # left edge of the axis, which is logarithmic


def plot_ttft(ttft_s: Mapping[str, Sequence[float]], title: str) -> str:
    """Returns: an SVG. ``ttft_s``: at least one policy, with the TTFT of each of its requests."""
    most_s = max(max(values) for values in ttft_s.values())
    decades = max(1, math.ceil(math.log10(most_s / LEAST_S)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=14),
        *_axes(decades),
    ]
    for index, (policy, values) in enumerate(ttft_s.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(f"{_x(s, decades):.1f},{_y(share):.1f}" for s, share in _quantiles(values))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        legend_y = TOP + 14 + 20 * index
        parts.append(f'<rect x="{WIDTH - RIGHT + 15}" y="{legend_y - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 35, legend_y - 3, f"{policy} ({sum(values) / len(values):.2f} s)"))
    return "\n".join([*parts, "</svg>", ""])


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
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(_text(x, bottom + 18, label, anchor="middle"))
    for percent in (0, 25, 50, 75, 90, 100):
        y = _y(percent / 100)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{percent}%", anchor="end"))
    middle = (LEFT + right) / 2
    parts.append(_text(middle, HEIGHT - 12, "time to first token, s (mean in brackets)", anchor="middle"))
    return parts


def _x(seconds: float, decades: int) -> float:
    share = math.log10(max(seconds, LEAST_S) / LEAST_S) / decades
    return LEFT + share * (WIDTH - RIGHT - LEFT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
