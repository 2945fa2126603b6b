"""What a board is: rows of panels, each with its queries, before it becomes Grafana's JSON.

Invariant: a panel says what it shows and what to do when it looks bad; its legends name labels that its queries return;
           titles, and so ids, are unique in a board.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from dashboards.query import Kit, Query, QueryError

WIDTH = 24  # of Grafana's grid
KIT = Kit()  # what boards make their queries with
QUANTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class Shape(StrEnum):
    LINES = "lines"
    STACKED = "stacked"  # lines that add up to something
    STAT = "stat"
    BARS = "bars"  # one bar a series, its newest value
    HEATMAP = "heatmap"


class Unit(StrEnum):
    """Grafana's names of units."""

    SECONDS = "s"
    RATIO = "percentunit"
    BYTES = "bytes"
    BYTES_PER_S = "Bps"
    NUMBER = "short"
    PER_S = "cps"
    REQUESTS_PER_S = "reqps"
    COUNT = "none"


class Needs(StrEnum):
    """What must be the case before a panel shows anything."""

    TRAFFIC = "traffic"
    APART = "prefill and decode apart"
    AUTOSCALING = "autoscaling"
    EVENT = "an event"  # that may never come: an eviction, a failure


@dataclass(frozen=True, slots=True)
class Line:
    """A query and how its series are called: text with ``{{label}}``."""

    query: Query
    legend: str

    def __post_init__(self) -> None:
        if unknown := set(LEGEND_LABEL.findall(self.legend)) - self.query.labels:
            has = sorted(self.query.labels)
            raise QueryError(f"legend {self.legend!r} names {sorted(unknown)}; {self.query} has only {has}")


def quantiles(name: str) -> tuple[Line, ...]:
    """Of the histogram ``name``: QUANTILES, over all its series."""
    return tuple(Line(KIT.quantile(share, name), legend) for share, legend in QUANTILES)


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a value turns orange, then red; falling: low values are the bad ones."""

    warn: float
    bad: float
    falling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    shows: str  # what it shows
    act: str  # what to do when it looks bad
    lines: tuple[Line, ...]
    shape: Shape = Shape.LINES
    unit: Unit = Unit.COUNT
    limits: Limits | None = None
    width: int = 8
    height: int = 8
    needs: Needs = Needs.TRAFFIC

    def __post_init__(self) -> None:
        assert self.lines, f"{self.title}: a panel has queries"
        assert 1 <= self.width <= WIDTH, f"{self.title}: width {self.width} of {WIDTH}"
        assert self.shows.endswith("."), f"{self.title}: shows is a sentence"
        assert self.act.endswith("."), f"{self.title}: act is a sentence"
        apart = all(line.query.disaggregated for line in self.lines)
        assert apart == (self.needs is Needs.APART), f"{self.title}: needs {self.needs}, but its metrics say otherwise"

    @property
    def description(self) -> str:
        return f"{self.shows} {self.act}"


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Place of a panel in the grid."""

    x: int
    y: int
    w: int
    h: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        titles = [panel.title for panel in self.panels] + [row.title for row in self.rows]
        assert len({self.id_of(title) for title in titles}) == len(titles), f"{self.uid}: a title is there twice"

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)

    def id_of(self, title: str) -> int:
        """Stable while the title is: links to a panel survive what is added around it."""
        return zlib.crc32(f"{self.uid}/{title}".encode()) % 1_000_000 + 1

    def places(self) -> Iterator[tuple[Row | Panel, Box]]:
        """Rows and panels from the top, panels filled from left to right."""
        y = 0
        for row in self.rows:
            yield row, Box(0, y, WIDTH, 1)
            x, y, line_height = 0, y + 1, 0
            for panel in row.panels:
                if x + panel.width > WIDTH:
                    x, y, line_height = 0, y + line_height, 0
                yield panel, Box(x, y, panel.width, panel.height)
                x, line_height = x + panel.width, max(line_height, panel.height)
            y += line_height
