"""Grafana's boards: PromQL over the catalogue's names, panels in rows, and their JSON.

Owns:      how a panel looks and what every board has (variables, annotations, links, the time range).
Never:     knows what a panel is about (boards/), or asks a server (check.py).
Invariant: a panel says what it shows and what to do when it looks bad. Titles, and so ids, are unique in a board. What
           queries name is checked where they are parsed (tests/contract/test_promql.py). Whatever names a replica links
           to that replica in the live view.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any

from dashboards.catalog import CATALOG, Process

WIDTH = 24  # columns of Grafana's grid
WINDOW = "$__rate_interval"  # Grafana's: long enough for a rate at the board's zoom
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
QUANTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
# variable -> what it chooses by: the metric that has its values, the label, and the series of the metric that count
NARROWING = {
    "model": ("build_info", "model", ""),
    "instance": ("build_info", "instance", ""),
    "role": ("replica_info", "role", ""),
    "replica": ("replica_info", "replica", ""),
    "router": ("build_info", "replica", 'role="router"'),
}
OF_EVERY = ("model", "instance")  # those that narrow every metric
OF_PROCESS = {Process.REPLICA: (*OF_EVERY, "role", "replica"), Process.ROUTER: (*OF_EVERY, "router")}
LIVE_VIEW = "http://127.0.0.1:8000/manta"  # the hidden variable ``live``; `python -m dashboards export` replaces it
SHOW = ("Show in the live view", "${live}/#replica=")  # a link's title, and its address before the replica's id
OBJECTIVE = "objective"  # the legend of a query that is drawn as a dashed line in red
GREEN, ORANGE, RED, BLUE, SKY, GOLD, PURPLE, GREY = (
    "#009E73", "#E69F00", "#D55E00", "#0072B2", "#56B4E9", "#F0E442", "#CC79A7", "#8E8E8E",
)  # fmt: skip
# Colours of label values, the same on every board: Okabe and Ito's, as on the live view's page.
COLORS = {
    "outcome": {"ok": GREEN, "error": RED, "timeout": PURPLE, "shed": ORANGE, "invalid": SKY, "cancelled": GREY},
    "stage": {"route": SKY, "queue": GREY, "prefill": BLUE, "transfer": ORANGE, "decode": GREEN},
    "phase": {"prefill": BLUE, "decode": GREEN},
    "kind": {"prefill_computed": BLUE, "prefill_cached": GOLD, "decode": GREEN},
    "state": {"free": GREY, "evictable": GOLD, "protected": GREEN, "reserved": BLUE, "quarantined": RED},
    "severity": {"critical": RED, "warning": ORANGE},
}
# Queries. ``by``: the labels that keep series apart. ``where``: a label's value; "a|b" is one of, "!a|b" is none of.


def gauge(name: str, *by: str, over: str = "sum", **where: str) -> str:
    """Aggregate a gauge with ``over`` (sum, max, min, count)."""
    return _aggregate(over, by, _series(name, "", where))


def rate(name: str, *by: str, **where: str) -> str:
    """Sum a counter's increase per second."""
    return _aggregate("sum", by, f"rate({_series(name, '', where)}[{WINDOW}])")


def quantile(share: float, name: str, *by: str, **where: str) -> str:
    """Estimate a histogram's quantile over all series that ``by`` does not keep apart."""
    buckets = _aggregate("sum", (*by, "le"), f"rate({_series(name, '_bucket', where)}[{WINDOW}])")
    return f"histogram_quantile({share:g}, {buckets})"


def quantiles(name: str) -> dict[str, str]:
    """Query each of QUANTILES of the histogram ``name``."""
    return {legend: quantile(share, name) for share, legend in QUANTILES}


def heatmap(name: str, **where: str) -> str:
    """Sum a histogram's cumulative buckets; Grafana's heatmap takes the differences."""
    return _aggregate("sum", ("le",), f"increase({_series(name, '_bucket', where)}[{WINDOW}])")


def mean(name: str, *by: str, **where: str) -> str:
    """Divide a histogram's sum by its count."""
    parts = (_aggregate("sum", by, f"rate({_series(name, each, where)}[{WINDOW}])") for each in ("_sum", "_count"))
    return ratio(*parts)


def ratio(part: str, whole: str, *, of_all: bool = False) -> str:
    """Divide two sums (ratios are never averaged); no value while the whole is 0.

    Both have the same labels, or the whole has none (``of_all``).
    """
    return f"({part} /{' on () group_left ()' if of_all else ''} ({whole} > 0))"


def _series(name: str, part: str, where: Mapping[str, str]) -> str:
    """Select a metric's series, narrowed by the board's variables."""
    metric = CATALOG[name]
    matchers = []
    for label, value in where.items():
        values = value.removeprefix("!")
        operator = ("!" if values != value else "") + ("=~" if "|" in values else "=")
        matchers.append(f'{label}{operator.replace("!=~", "!~")}"{values}"')
    chosen = {variable: NARROWING[variable][1] for variable in OF_PROCESS.get(metric.process, OF_EVERY)}
    matchers += [f'{label}=~"${variable}"' for variable, label in chosen.items() if label not in where]
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
    TABLE = "table"  # one line per series, its labels as columns


class Unit(StrEnum):
    """The units of values, by Grafana's names."""

    SECONDS = "s"
    RATIO = "percentunit"
    BYTES = "bytes"
    BYTES_PER_S = "Bps"
    NUMBER = "short"
    PER_S = "ops"
    TOKENS_PER_S = "si:tok/s"
    REQUESTS_PER_S = "reqps"
    COUNT = "none"


class Needs(StrEnum):
    """Conditions without which a panel shows nothing."""

    TRAFFIC = "traffic"
    APART = "prefill and decode apart"
    AUTOSCALING = "autoscaling"
    GPU = "a GPU"
    FETCH = "replicas that fetch"
    EVENT = "an event"  # that may never come: an eviction, a failure
    TROUBLE = "trouble"  # no series while all is well


EMPTY = {
    Needs.TRAFFIC: "No traffic",
    Needs.APART: "Only with separate prefill replicas",
    Needs.AUTOSCALING: "Only with autoscaling",
    Needs.GPU: "Only on GPUs",
    Needs.FETCH: "Only with transfer.fetch",
    Needs.EVENT: "None yet",
    Needs.TROUBLE: "None",
}
# an axis goes up to this at least: Grafana draws nothing but zeros as 0 to 100
LEAST = {Unit.SECONDS: 0.001, Unit.RATIO: 0.01, Unit.PER_S: 0.1, Unit.TOKENS_PER_S: 10, Unit.BYTES: 1e6}


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
    asks: str | Mapping[str, str]  # PromQL; of several queries, or for a legend of its own: legend -> PromQL
    unit: Unit
    shows: str  # what it shows: a sentence
    act: str  # what to do when it looks bad: a sentence
    _: KW_ONLY
    shape: Shape = Shape.LINES
    limits: Thresholds | None = None
    width: int = 8
    height: int = 8
    needs: Needs = Needs.TRAFFIC
    columns: Mapping[str, str] = field(default_factory=dict)  # of a table: label -> heading
    link: tuple[str, str] | None = None  # of a table's first column: title, URL
    empty: str = ""  # said in the place of a panel without series; else what it needs
    exemplars: bool = False  # dots of single requests that lead to their traces

    @property
    def queries(self) -> Mapping[str, str]:
        """PromQL by legend (text with ``{{label}}``); the legend of a query alone is the labels that it keeps apart."""
        if not isinstance(self.asks, str):
            return self.asks
        kept = re.search(r" by \((.+?)(, le)?\) \(", self.asks)
        assert kept is not None, f"{self.title}: a query that keeps no labels apart needs a legend"
        return {" ".join(f"{{{{{label}}}}}" for label in kept[1].split(", ")): self.asks}


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, each placed as far up as it fits, then as far left."""

    title: str
    panels: tuple[Panel, ...]
    is_open: bool = False  # else only the heading is shown, and its queries are not asked, until it is clicked


@dataclass(frozen=True, slots=True)
class Annotation:
    """Events that are marked on all charts of a board: wherever the query's value is above 0."""

    name: str
    query: str
    color: str
    title: str  # of one mark, with ``{{label}}``


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard of Grafana: rows of panels under a uid."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    annotations: tuple[Annotation, ...] = ()

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The panels of all rows, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def to_json(self, boards: Sequence["Board"]) -> str:
        """Write the board's file, with links to the others of ``boards``."""
        document = {
            "annotations": {"list": [_annotation(each) for each in self.annotations]},
            "description": self.description,
            "editable": True,
            "fiscalYearStartMonth": 0,
            "graphTooltip": 1,  # a shared crosshair
            "links": [
                *(_board_link(each) for each in boards if each is not self),
                _link("Live view", "${live}/", "Requests, replicas and caches as they are now.", here=False),
            ],
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
        """Place rows from the top; the panels of a closed row lie in it, where they appear when it is opened."""
        y = 0
        for row in self.rows:
            tops = [y + 1] * WIDTH  # [column] first line that is free
            inside = []
            for panel in row.panels:
                x = min(range(WIDTH - panel.width + 1), key=lambda at: max(tops[at : at + panel.width]))
                top = max(tops[x : x + panel.width])
                inside.append(self._at(x, top, panel.width, panel.height, _panel(panel)))
                tops[x : x + panel.width] = [top + panel.height] * panel.width
            heading = {"title": row.title, "type": "row", "collapsed": not row.is_open}
            yield self._at(0, y, WIDTH, 1, heading | {"panels": [] if row.is_open else inside})
            if row.is_open:
                yield from inside
            y = max(tops) if row.is_open else y + 1

    def _at(self, x: int, y: int, w: int, h: int, content: dict[str, Any]) -> dict[str, Any]:
        """Add place and id; the id is stable while the title is, so links to a panel survive changes around it."""
        number = zlib.crc32(f"{self.uid}/{content['title']}".encode()) % 1_000_000 + 1
        return {"id": number, "gridPos": {"x": x, "y": y, "w": w, "h": h}, **content}


def _board_link(other: Board) -> dict[str, Any]:
    title = other.title.removeprefix("Manta: ")
    return _link(title[0].upper() + title[1:], f"/d/{other.uid}", other.description, here=True)


def _link(title: str, url: str, tooltip: str, *, here: bool) -> dict[str, Any]:
    """Make a button at the top of a board; ``here``: to another board, which takes over variables and time."""
    return {
        "type": "link", "title": title, "url": url, "tooltip": tooltip,
        "icon": "dashboard" if here else "external link", "includeVars": here, "keepTime": here,
        "targetBlank": not here, "asDropdown": False, "tags": [],
    }  # fmt: skip


def _annotation(events: Annotation) -> dict[str, Any]:
    return {
        "name": events.name, "enable": True, "hide": False, "iconColor": events.color, "datasource": SOURCE,
        "target": {"refId": "Anno", "expr": events.query, "interval": "60s"},
        "titleFormat": events.title, "textFormat": "", "tagKeys": "severity,role",
    }  # fmt: skip


def _variables() -> list[dict[str, Any]]:
    """Make datasource, then those of NARROWING, each narrowed by the ones before it that its metric has."""
    common = {"allowCustomValue": True, "skipUrlSync": False}
    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "multi": False,
         "includeAll": False, **common}
    ]  # fmt: skip
    for name, (metric, label, where) in NARROWING.items():
        narrowing = OF_PROCESS.get(CATALOG[metric].process, OF_EVERY)
        before = [each for each in narrowing if each in [known["name"] for known in found]]
        matchers = ",".join([*([where] if where else []), *(f'{each}=~"${each}"' for each in before)])
        series = CATALOG[metric].full_name + (f"{{{matchers}}}" if matchers else "")
        found.append({
            "name": name, "label": name.capitalize(), "type": "query", "query": f"label_values({series}, {label})",
            "datasource": SOURCE, "refresh": 2, "sort": 1, "multi": True, "includeAll": True, "allValue": ".*",
            "current": {"selected": True, "text": "All", "value": "$__all"}, **common,
        })  # fmt: skip
    value = {"selected": True, "text": LIVE_VIEW, "value": LIVE_VIEW}
    hidden = {"name": "live", "label": "Live view", "type": "textbox", "query": LIVE_VIEW, "hide": 2}
    return [*found, {**hidden, "current": value, "options": [value], **common}]


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit.value, "thresholds": _thresholds(panel.limits)}
    defaults["noValue"] = panel.empty or EMPTY[panel.needs]
    own, options = _look(panel)
    is_now = panel.shape in (Shape.BARS, Shape.TABLE)
    kind = {Shape.HEATMAP: "heatmap", Shape.TABLE: "table"}.get(panel.shape, "time_series")
    drawn: dict[str, Any] = {
        "title": panel.title,
        "description": f"{panel.shows} {panel.act}",
        "type": panel.shape.value.partition("/")[0],
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {**defaults, **own, **_replica_link(panel)}, "overrides": _overrides(panel)},
        "options": options,
        "repeatDirection": "h",
        "transparent": False,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "expr": query,
                "legendFormat": legend,
                "datasource": SOURCE,
                "format": kind,
                "instant": is_now,
                "range": not is_now,
                **({"exemplar": True} if panel.exemplars and legend == QUANTILES[-1][1] else {}),
            }
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }
    if panel.shape is Shape.TABLE:
        order = {name: number for number, name in enumerate(panel.columns)}
        drawn["transformations"] = [
            {"id": "filterFieldsByName", "options": {"include": {"names": list(panel.columns)}}},
            {"id": "organize", "options": {"indexByName": order, "renameByName": panel.columns, "excludeByName": {}}},
        ]
    return drawn


def _replica_link(panel: Panel) -> dict[str, Any]:
    """Lead from a series that names a replica to that replica in the live view."""
    named = re.search(r"\{\{(replica|target)\}\}", " ".join(panel.queries))
    return {"links": _opens(*SHOW, f"__field.labels.{named[1]}") if named else []}


def _opens(title: str, url: str, value: str) -> list[dict[str, Any]]:
    return [{"title": title, "url": f"{url}${{{value}}}", "targetBlank": True}]


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    """Give objectives their dashed line, and label values that have a colour of their own that one."""
    found = []
    if OBJECTIVE in panel.queries:
        dashes = {"fill": "dash", "dash": [8, 6]}
        found.append(_override(OBJECTIVE, color=_fixed(RED), lineStyle=dashes, lineWidth=2, fillOpacity=0))
    for legend in panel.queries:
        for value, color in COLORS.get(legend.strip("{}"), {}).items():
            found.append(_override(value, color=_fixed(color)))
    for label in COLORS.keys() & panel.columns.keys():
        values = enumerate(COLORS[label].items())
        options = {value: {"color": color, "index": number} for number, (value, color) in values}
        mappings = [{"type": "value", "options": options}]
        found.append(_override(panel.columns[label], mappings=mappings, cellOptions={"type": "color-text"}))
    if panel.link:
        found.append(_override(next(iter(panel.columns.values())), links=_opens(*panel.link, "__value.raw")))
    return found


def _override(series: str, **changes: Any) -> dict[str, Any]:
    """Draw the series of this name otherwise; what is not of every kind of panel is ``custom`` in Grafana."""
    common = {"color", "mappings", "links"}
    properties = [
        {"id": name if name in common else f"custom.{name}", "value": value} for name, value in changes.items()
    ]
    return {"matcher": {"id": "byName", "options": series}, "properties": properties}


def _fixed(color: str) -> dict[str, str]:
    return {"mode": "fixed", "fixedColor": color}


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
            custom: dict[str, Any] = {"lineWidth": 1, "showPoints": "never", "spanNulls": False, "fillOpacity": 0}
            custom["axisSoftMax"] = LEAST.get(panel.unit, 1)
            if panel.shape is Shape.STACKED:
                custom |= {"fillOpacity": 70, "lineWidth": 0, "stacking": {"group": "A", "mode": "normal"}}
            if panel.limits:
                custom["thresholdsStyle"] = {"mode": "dashed"}
            return {"min": 0, "color": {"mode": "palette-classic"}, "custom": custom}, {
                "legend": {**legend, "showLegend": True}, "tooltip": {"mode": "multi", "sort": "desc"},
            }  # fmt: skip
        case Shape.STAT:
            return {}, {
                "colorMode": "value" if panel.limits else "none", "graphMode": "area", "justifyMode": "auto",
                "orientation": "auto", "text": {"titleSize": 13, "valueSize": 28}, "percentChangeColorMode": "standard",
                "reduceOptions": last, "showPercentChange": False, "textMode": "value_and_name", "wideLayout": True,
            }  # fmt: skip
        case Shape.BARS:
            return {"min": 0, **({"max": 1} if panel.unit is Unit.RATIO else {})}, {
                "displayMode": "basic", "legend": {**legend, "showLegend": False}, "maxVizHeight": 24,
                "minVizHeight": 16, "minVizWidth": 8, "namePlacement": "left", "orientation": "horizontal",
                "reduceOptions": last, "showUnfilled": True, "sizing": "manual", "valueMode": "color",
                "text": {"titleSize": 13, "valueSize": 14},
            }  # fmt: skip
        case Shape.TABLE:
            return {"custom": {"align": "left", "minWidth": 80}}, {
                "cellHeight": "sm", "frameIndex": 0, "showHeader": True, "sortBy": [],
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
