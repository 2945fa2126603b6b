"""Grafana's boards: PromQL over the catalogue's names, panels in rows, and their JSON.

Owns:      how a panel looks and what every board has (variables, links, the time range).
Never:     knows what a panel is about (boards/), or asks a server (check.py).
Invariant: a panel says what it shows and what to do when it looks bad. Titles, and so ids, are unique in a board. What
           queries name is checked where they are parsed (tests/contract/test_promql.py).
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any

from dashboards.catalog import CATALOG, IDENTITY, Process

WIDTH = 24  # columns of Grafana's grid
WINDOW = "$__rate_interval"  # Grafana's: long enough for a rate at the board's zoom
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
QUANTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
NARROWING = {"model": "build_info", "role": "replica_info", "replica": "replica_info"}  # variable -> metric it is from
Where = Mapping[str, str]  # label -> value; "a|b" is one of, "!a|b" is none of


def gauge(name: str, *, by: Sequence[str] = (), where: Where | None = None, over: str = "sum") -> str:
    """Aggregate a gauge with ``over`` (sum, max, min, count)."""
    return _aggregate(over, by, _series(name, "", where))


def rate(name: str, *, by: Sequence[str] = (), where: Where | None = None) -> str:
    """Sum a counter's increase per second."""
    return _aggregate("sum", by, f"rate({_series(name, '', where)}[{WINDOW}])")


def quantile(share: float, name: str, *, by: Sequence[str] = (), where: Where | None = None) -> str:
    """Estimate a histogram's quantile over all series that ``by`` does not keep apart."""
    buckets = _aggregate("sum", (*by, "le"), f"rate({_series(name, '_bucket', where)}[{WINDOW}])")
    return f"histogram_quantile({share:g}, {buckets})"


def quantiles(name: str) -> dict[str, str]:
    """Query each of QUANTILES of the histogram ``name``."""
    return {legend: quantile(share, name) for share, legend in QUANTILES}


def heatmap(name: str, *, where: Where | None = None) -> str:
    """Sum a histogram's cumulative buckets; Grafana's heatmap takes the differences."""
    return _aggregate("sum", ("le",), f"increase({_series(name, '_bucket', where)}[{WINDOW}])")


def mean(name: str, *, by: Sequence[str] = (), where: Where | None = None) -> str:
    """Divide a histogram's sum by its count."""
    parts = (_aggregate("sum", by, f"rate({_series(name, each, where)}[{WINDOW}])") for each in ("_sum", "_count"))
    return ratio(*parts)


def ratio(part: str, whole: str, *, of_all: bool = False) -> str:
    """Divide two sums (ratios are never averaged); no value while the whole is 0.

    Both have the same labels, or the whole has none (``of_all``).
    """
    return f"({part} /{' on () group_left ()' if of_all else ''} ({whole} > 0))"


def _series(name: str, part: str, where: Where | None) -> str:
    """Select a metric's series, narrowed by the board's variables."""
    metric = CATALOG[name]
    matchers = []
    for label, value in (where or {}).items():
        values = value.removeprefix("!")
        operator = ("!" if values != value else "") + ("=~" if "|" in values else "=")
        matchers.append(f'{label}{operator.replace("!=~", "!~")}"{values}"')
    narrowed = IDENTITY if metric.process is Process.REPLICA else ("model",)
    matchers += [f'{label}=~"${label}"' for label in narrowed if label not in (where or {})]
    return f"{metric.full_name}{part}{{{','.join(matchers)}}}"


def _aggregate(function: str, by: Sequence[str], inner: str) -> str:
    clause = f" by ({', '.join(by)}) " if by else ""
    return f"{function}{clause}({inner})"


class Shape(StrEnum):
    """The forms of a panel; the value is Grafana's type, with a variant after the slash."""

    LINES = "timeseries"
    STACKED = "timeseries/stacked"  # lines that add up to something
    STAT = "stat"
    BARS = "bargauge"  # one bar per series, its newest value
    HEATMAP = "heatmap"


class Unit(StrEnum):
    """The units of values, by Grafana's names."""

    SECONDS = "s"
    RATIO = "percentunit"
    BYTES = "bytes"
    BYTES_PER_S = "Bps"
    NUMBER = "short"
    PER_S = "cps"
    REQUESTS_PER_S = "reqps"
    COUNT = "none"


class Needs(StrEnum):
    """Conditions without which a panel shows nothing."""

    TRAFFIC = "traffic"
    APART = "prefill and decode apart"
    AUTOSCALING = "autoscaling"
    EVENT = "an event"  # that may never come: an eviction, a failure


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Values at which a panel turns orange, then red; falling: low values are the bad ones."""

    warn: float
    bad: float
    falling: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a board: its texts, its queries, and how it draws them."""

    title: str
    _: KW_ONLY
    shows: str  # what it shows: a sentence
    act: str  # what to do when it looks bad: a sentence
    queries: Mapping[str, str]  # legend (text with ``{{label}}``) -> PromQL
    shape: Shape = Shape.LINES
    unit: Unit = Unit.COUNT
    limits: Thresholds | None = None
    width: int = 8
    height: int = 8
    needs: Needs = Needs.TRAFFIC


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard of Grafana: rows of panels under a uid."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The panels of all rows, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def to_json(self, boards: Sequence["Board"]) -> str:
        """Write the board's file, with links to the others of ``boards``."""
        document = {
            "annotations": {},
            "description": self.description,
            "editable": True,
            "fiscalYearStartMonth": 0,
            "graphTooltip": 1,  # a shared crosshair
            "links": [_link(each) for each in boards if each is not self],
            "panels": list(self._placed()),
            "refresh": "10s",
            "schemaVersion": 42,
            "tags": ["manta"],
            "templating": {"list": _variables()},
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "title": self.title,
            "uid": self.uid,
        }
        return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def _placed(self) -> Iterator[dict[str, Any]]:
        """Lay rows out from the top, and their panels from left to right."""
        y = 0
        for row in self.rows:
            yield self._at(0, y, WIDTH, 1, {"title": row.title, "type": "row", "collapsed": False, "panels": []})
            x, y, line_height = 0, y + 1, 0
            for panel in row.panels:
                if x + panel.width > WIDTH:
                    x, y, line_height = 0, y + line_height, 0
                yield self._at(x, y, panel.width, panel.height, _panel(panel))
                x, line_height = x + panel.width, max(line_height, panel.height)
            y += line_height

    def _at(self, x: int, y: int, w: int, h: int, content: dict[str, Any]) -> dict[str, Any]:
        """Add place and id; the id is stable while the title is, so links to a panel survive changes around it."""
        number = zlib.crc32(f"{self.uid}/{content['title']}".encode()) % 1_000_000 + 1
        return {"id": number, "gridPos": {"x": x, "y": y, "w": w, "h": h}, **content}


def _link(other: Board) -> dict[str, Any]:
    return {
        "type": "link", "title": other.title, "url": f"/d/{other.uid}", "tooltip": other.description,
        "icon": "dashboard", "includeVars": True, "keepTime": True, "asDropdown": False, "targetBlank": False,
        "placement": "inControlsMenu", "tags": [],
    }  # fmt: skip


def _variables() -> list[dict[str, Any]]:
    """Make datasource, then model, role and replica, each narrowed by those before it."""
    common = {"allowCustomValue": True, "skipUrlSync": False}
    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "multi": False,
         "includeAll": False, **common}
    ]  # fmt: skip
    chosen: list[str] = []
    for name, metric in NARROWING.items():
        matchers = ",".join(f'{label}=~"${label}"' for label in chosen)
        series = CATALOG[metric].full_name + (f"{{{matchers}}}" if matchers else "")
        found.append({
            "name": name, "label": name.capitalize(), "type": "query", "query": f"label_values({series}, {name})",
            "datasource": SOURCE, "refresh": 2, "sort": 1, "multi": True, "includeAll": True, "allValue": ".*",
            "current": {"selected": True, "text": "All", "value": "$__all"}, **common,
        })  # fmt: skip
        chosen.append(name)
    return found


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit.value, "thresholds": _thresholds(panel.limits)}
    own, options = _look(panel)
    return {
        "title": panel.title,
        "description": f"{panel.shows} {panel.act}",
        "type": panel.shape.value.partition("/")[0],
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {**defaults, **own}, "overrides": []},
        "options": options,
        "repeatDirection": "h",
        "transparent": False,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "expr": query,
                "legendFormat": legend,
                "datasource": SOURCE,
                "format": "heatmap" if panel.shape is Shape.HEATMAP else "time_series",
                "instant": panel.shape is Shape.BARS,
                "range": panel.shape is not Shape.BARS,
            }
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _thresholds(limits: Thresholds | None) -> dict[str, Any]:
    steps: list[tuple[str, float | None]] = [("green", None)]
    if limits and limits.falling:
        steps = [("red", None), ("orange", limits.bad), ("green", limits.warn)]
    elif limits:
        steps += [("orange", limits.warn), ("red", limits.bad)]
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in steps]}


def _look(panel: Panel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pick the defaults of a panel's fields and its options, by its shape."""
    legend = {"calcs": [], "displayMode": "list", "placement": "bottom"}
    last = {"calcs": ["lastNotNull"], "values": False}
    match panel.shape:
        case Shape.LINES | Shape.STACKED:
            custom: dict[str, Any] = {"lineWidth": 1, "showPoints": "never", "spanNulls": False, "fillOpacity": 5}
            if panel.shape is Shape.STACKED:
                custom |= {"fillOpacity": 50, "stacking": {"group": "A", "mode": "normal"}}
            if panel.limits:
                custom["thresholdsStyle"] = {"mode": "dashed"}
            return {"min": 0, "custom": custom}, {
                "legend": {**legend, "showLegend": True}, "tooltip": {"mode": "multi", "sort": "desc"},
            }  # fmt: skip
        case Shape.STAT:
            return {"noValue": "no traffic"}, {
                "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "orientation": "auto",
                "percentChangeColorMode": "standard", "reduceOptions": last, "showPercentChange": False,
                "textMode": "auto", "wideLayout": True,
            }  # fmt: skip
        case Shape.BARS:
            return {"min": 0, **({"max": 1} if panel.unit is Unit.RATIO else {})}, {
                "displayMode": "basic", "legend": {**legend, "showLegend": False}, "maxVizHeight": 300,
                "minVizHeight": 16, "minVizWidth": 8, "namePlacement": "auto", "orientation": "horizontal",
                "reduceOptions": last, "showUnfilled": True, "sizing": "auto", "valueMode": "color",
            }  # fmt: skip
        case Shape.HEATMAP:
            color = {
                "exponent": 0.5, "fill": "", "mode": "scheme", "reverse": False, "scale": "exponential",
                "scheme": "Oranges", "steps": 64,
            }  # fmt: skip
            return {"custom": {}}, {
                "calculate": False, "cellGap": 1, "color": color, "exemplars": {"color": "rgba(255,0,255,0.7)"},
                "filterValues": {"le": 1e-9}, "legend": {"show": True}, "rowsFrame": {"layout": "auto"},
                "selectionMode": "x", "showValue": "auto", "tooltip": {"mode": "single", "yHistogram": True},
                "yAxis": {"axisPlacement": "left", "unit": panel.unit.value},
            }  # fmt: skip
