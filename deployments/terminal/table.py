"""Tables of text that are drawn twice: as plain lines, and by rich on a terminal. Also how numbers are written.

Never: knows what it shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

NOTHING = "-"
BAR_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of a whole, drawn side by side, and words behind it."""

    parts: tuple[tuple[str, str, float], ...]  # (character, colour, share of the whole)
    words: str
    width: int = BAR_WIDTH

    def pieces(self) -> list[tuple[str, str]]:
        """(text, colour) of each part; the widths sum to ``width``."""
        drawn, reached, at = [], 0.0, 0
        for character, colour, share in self.parts:
            reached += share
            until = min(round(reached * self.width), self.width)
            drawn.append((character * (until - at), colour))
            at = until
        return [*drawn, (" " * (self.width - at), "default")]


Cell = str | Bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells by row; a column whose name starts with ``>`` is set to the right."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    marked: int | None = None  # row that stands out

    def plain(self) -> str:
        """Lines without any escape sequence."""
        names = [name.removeprefix(">") for name in self.columns]
        lines = [names, *([_plain(cell) for cell in row] for row in self.rows)]
        widths = [max(len(line[index]) for line in lines) for index in range(len(names))]
        return "\n".join(self._aligned(line, widths) for line in lines)

    def rich(self) -> RichTable:
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in self.columns:
            table.add_column(
                name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True
            )
        for index, row in enumerate(self.rows):
            table.add_row(*(_rich(cell) for cell in row), style="bold" if index == self.marked else None)
        return table

    def _aligned(self, line: list[str], widths: list[int]) -> str:
        cells = [
            text.rjust(width) if name.startswith(">") else text.ljust(width)
            for name, text, width in zip(self.columns, line, widths, strict=True)
        ]
        return "  ".join(cells).rstrip()


def count(value: float | None) -> str:
    """Three digits or so: 7, 950, 1.2k, 53k, 1.4M."""
    if value is None:
        return NOTHING
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * bound:
            scaled = value / bound
            return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"


def seconds(value: float | None) -> str:
    """A duration: 0.3 ms, 91 ms, 1.52 s, 75 s."""
    if value is None:
        return NOTHING
    if value < 0.9995:
        return f"{value * 1000:.1f} ms" if 0 < value < 0.00995 else f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.0f} s"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}".replace("%", " %")


def share(part: float, whole: float) -> float | None:
    """None where there is no whole."""
    return part / whole if whole else None


def _plain(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return f"[{''.join(text for text, _ in cell.pieces())}] {cell.words}"


def _rich(cell: Cell) -> Text:
    if isinstance(cell, str):
        return Text(cell)
    drawn = Text()
    for text, colour in cell.pieces():
        drawn.append(text, style=colour)
    return drawn.append(f" {cell.words}")
