"""Pieces that the plots share. SVG by hand: no dependency, and a picture can be read in a diff."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#555555")  # Okabe and Ito
TOP = 40  # where the part below the title begins


def picture(width: int, height: int, title: str, parts: Sequence[str], *, left: int) -> str:
    """A whole picture on white, with its title."""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([opening + 'font-size="12">', ground, text(left, 22, title, size=14), *parts, "</svg>", ""])


def polyline(index: int, places: Sequence[tuple[float, float]]) -> str:
    """The line of series ``index`` through ``places``."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline fill="none" stroke="{colour(index)}" stroke-width="2" points="{path}"/>'


def legend(index: int, x: float, name: str) -> list[str]:
    """The entry of series ``index``, below those before it."""
    y = TOP + 14 + 20 * index
    key = f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{colour(index)}"/>'
    return [key, text(x + 20, y - 3, name)]


def grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'
