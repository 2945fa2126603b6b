"""Tables, bars and sparklines, drawn by rich on a terminal or as plain lines; and how numbers are written.

Never: knows what the numbers mean.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

NOTHING = "-"
BAR_WIDTH = 24
GAP = "  "
PLAIN_WIDTH = 10_000  # of lines that are not for a terminal


Cell = str | Text


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells by their column, the same columns in each; one whose name starts with ``>`` is set to the right."""

    rows: Sequence[Mapping[str, Cell]]
    _: KW_ONLY
    styles: Mapping[int, str] = field(default_factory=dict)  # of rows, by index
    spare: tuple[str, ...] = ()  # columns to leave out on a narrow terminal, in this order
    tells_left_out: bool = True  # name those columns in a line below

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, left_out = list[str](self.rows[0] if self.rows else ()), list[str]()
        for name in filter(shown.__contains__, self.spare):  # leave columns out until the table fits
            measured = Measurement.get(console, options.update(width=PLAIN_WIDTH), self._drawn(shown))
            if measured.maximum <= options.max_width:
                break
            shown.remove(name)
            left_out.append(name.removeprefix(">"))
        yield self._drawn(shown)
        if left_out and self.tells_left_out:
            yield Text(f"(a wider terminal shows: {', '.join(left_out)})", style="bright_black")

    def _drawn(self, columns: Sequence[str]) -> RichTable:
        drawn = RichTable(box=None, padding=(0, len(GAP), 0, 0), pad_edge=False, header_style="bright_black")
        for name in columns:
            drawn.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
        for index, row in enumerate(self.rows):  # of a plain string rich would read "[...]" as markup
            cells = (Text(cell) if isinstance(cell, str) else cell for cell in map(row.__getitem__, columns))
            drawn.add_row(*cells, style=self.styles.get(index))
        return drawn


def spaced(parts: Iterable[str | Table]) -> RenderableType:
    """Put texts and tables under one another, with an empty line between."""
    lines = [each for part in parts for each in (Text(part) if isinstance(part, str) else part, Text())]
    return Group(*lines[:-1])


def plain(drawn: RenderableType) -> str:
    """Return lines without any escape sequence."""
    out = io.StringIO()
    Console(file=out, width=PLAIN_WIDTH, no_color=True, force_terminal=False).print(drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def bar(parts: Iterable[tuple[str, str, float]], words: str, *, width: int = BAR_WIDTH) -> Text:
    """Draw parts of a whole side by side, each (character, colour, share of the whole), with words behind the bar."""
    drawn, reached, at = Text("["), 0.0, 0
    for character, colour, share in parts:
        reached += share
        until = min(round(reached * width), width)
        drawn.append(character * (until - at), colour)
        at = until
    return drawn.append(f"{' ' * (width - at)}] {words}")


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
