"""Tables, bars and sparklines of text, drawn as plain lines or by rich on a terminal; and how numbers are written.

Never: knows what the numbers mean.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

NOTHING = "-"
BAR_WIDTH = 24
GAP = "  "
PLAIN_WIDTH = 10_000  # of lines that are not for a terminal


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of parts of a whole, drawn side by side, with words behind it."""

    parts: tuple[tuple[str, str, float], ...]  # (character, colour, share of the whole)
    words: str
    width: int = BAR_WIDTH

    def pieces(self) -> list[tuple[str, str]]:
        """Return (text, colour) of each part; the widths sum to ``width``."""
        drawn, reached, at = [], 0.0, 0
        for character, colour, share in self.parts:
            reached += share
            until = min(round(reached * self.width), self.width)
            drawn.append((character * (until - at), colour))
            at = until
        return [*drawn, (" " * (self.width - at), "default")]


Cell = str | Text | Bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; a column is set to the right if its name starts with ``>``. rich draws it as it is."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    styles: Mapping[int, str] = field(default_factory=dict)  # of rows, by index
    spare: tuple[str, ...] = ()  # columns to leave out on a narrow terminal, in this order
    tells_left_out: bool = True  # name those columns in a line below

    def plain(self) -> str:
        """Return lines without any escape sequence."""
        out = io.StringIO()
        Console(file=out, width=PLAIN_WIDTH, no_color=True, force_terminal=False).print(self._drawn())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, left_out = self, []
        for name in filter(self.columns.__contains__, self.spare):  # leave columns out until the table fits
            if Measurement.get(console, options.update(width=PLAIN_WIDTH), table._drawn()).maximum <= options.max_width:
                break
            table = table._without(name)
            left_out.append(name.removeprefix(">"))
        yield table._drawn()
        if left_out and self.tells_left_out:
            yield Text(f"(a wider terminal shows: {', '.join(left_out)})", style="bright_black")

    def _drawn(self) -> RichTable:
        drawn = RichTable(box=None, padding=(0, len(GAP), 0, 0), pad_edge=False, header_style="bright_black")
        for name in self.columns:
            drawn.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
        for index, row in enumerate(self.rows):
            drawn.add_row(*(_rich(cell) for cell in row), style=self.styles.get(index))
        return drawn

    def _without(self, name: str) -> "Table":
        at = self.columns.index(name)
        return replace(
            self,
            columns=self.columns[:at] + self.columns[at + 1 :],
            rows=[[*row[:at], *row[at + 1 :]] for row in self.rows],
        )


def count(value: float | None) -> str:
    """Write a number with two or three digits: 7, 950, 1.2k, 53k, 1.4M."""
    if value is None:
        return NOTHING
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * bound:
            scaled = value / bound
            return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"


def seconds(value: float | None) -> str:
    """Write a duration: 0.3 ms, 91 ms, 1.52 s, 75 s, 42 min, 5 h."""
    if value is None:
        return NOTHING
    if value < 0.9995:
        return f"{value * 1000:.1f} ms" if 0 < value < 0.00995 else f"{value * 1000:.0f} ms"
    if value < 600:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}".replace("%", " %")


def share(part: float, whole: float) -> float | None:
    """Return the ratio; None if the whole is 0."""
    return part / whole if whole else None


_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw the last ``width`` values from 0 to the largest of them, the newest on the right; a space for None."""
    shown = list(values)[-width:]
    most = max((value for value in shown if value is not None), default=0.0) or 1.0
    drawn = (" " if value is None else _LEVELS[round(value / most * (len(_LEVELS) - 1))] for value in shown)
    return "".join(drawn).rjust(width)


def _rich(cell: Cell) -> Text:
    if isinstance(cell, str):
        return Text(cell)
    if isinstance(cell, Text):
        return cell
    drawn = Text()
    for text, colour in cell.pieces():
        drawn.append(text, style=colour)
    return Text("[").append(drawn).append(f"] {cell.words}")
