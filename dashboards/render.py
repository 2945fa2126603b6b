"""Boards as Grafana's JSON, by Grafana's own SDK.

Owns:      how panels look; the only module that imports grafana_foundation_sdk (extra ``boards``).
Never:     knows what a panel is about.
Invariant: the JSON has stable ids, and comes out of the SDK's models as it went in.
"""

import json

from grafana_foundation_sdk.builders import bargauge, common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as make
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as c
from grafana_foundation_sdk.models import dashboard as d
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models import prometheus as prom

from dashboards.board import Board, Box, Limits, Line, Panel, Row, Shape
from dashboards.catalog import CATALOG

TAG = "manta"
SOURCE = c.DataSourceRef(type_val="prometheus", uid="${datasource}")
ADDED_BY_SDK = ("auto", "auto_count", "auto_min")  # to every variable, where only interval variables have them
NARROWING = {"model": "build_info", "role": "replica_info", "replica": "replica_info"}  # -> whose label it is
PanelBuilder = timeseries.Panel | stat.Panel | bargauge.Panel | heatmap.Panel


def to_json(board: Board, boards: tuple[Board, ...]) -> str:
    """The board's file: ``boards`` are those it links to."""
    return _text(_dashboard(board, boards))


def round_trip(text: str) -> str:
    """A board's file once through the SDK's models: what they do not know is lost."""
    return _text(d.Dashboard.from_json(json.loads(text)))


def _text(dashboard: d.Dashboard) -> str:
    document = json.loads(json.dumps(dashboard, cls=JSONEncoder))
    for variable in document["templating"]["list"]:
        for key in ADDED_BY_SDK:
            variable.pop(key, None)
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _dashboard(board: Board, boards: tuple[Board, ...]) -> d.Dashboard:
    whole = (
        make.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .editable()
        .tooltip(d.DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .variables(_variables())
        .links([_link(each) for each in boards if each is not board])
    )
    built = whole.build()
    built.panels = [_placed(board, what, box) for what, box in board.places()]
    return built


def _variables() -> list[Builder[d.VariableModel]]:
    """datasource, then model, role and replica, each narrowed by those before it."""
    found: list[Builder[d.VariableModel]] = [
        make.DatasourceVariable("datasource").label("Data source").type("prometheus")
    ]
    chosen: list[str] = []
    for name, metric in NARROWING.items():
        matchers = ",".join(f'{each}=~"${each}"' for each in chosen)
        series = CATALOG[metric].full_name + (f"{{{matchers}}}" if matchers else "")
        everything = d.VariableOption(selected=True, text="All", value="$__all")
        found.append(
            make.QueryVariable(name)
            .label(name.capitalize())
            .datasource(SOURCE)
            .query(f"label_values({series}, {name})")
            .refresh(d.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(d.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(everything)
        )
        chosen.append(name)
    return found


def _link(other: Board) -> make.DashboardLink:
    return (
        make.DashboardLink(other.title)
        .type(d.DashboardLinkType.LINK)
        .url(f"/d/{other.uid}")
        .tooltip(other.description)
        .icon("dashboard")
        .include_vars(True)
        .keep_time(True)
    )


def _placed(board: Board, what: Row | Panel, box: Box) -> d.Panel | d.RowPanel:
    place = d.GridPos(x=box.x, y=box.y, w=box.w, h=box.h)
    built: d.Panel | d.RowPanel
    if isinstance(what, Row):
        built = make.Row(what.title).grid_pos(place).build()
    else:
        built = _panel(what).grid_pos(place).build()
    built.id_val = board.id_of(what.title)
    return built


def _panel(panel: Panel) -> PanelBuilder:
    shapes = {
        Shape.LINES: _lines,
        Shape.STACKED: _lines,
        Shape.STAT: _stat,
        Shape.BARS: _bars,
        Shape.HEATMAP: _heatmap,
    }
    built = shapes[panel.shape](panel)
    built.title(panel.title).description(panel.description).datasource(SOURCE).unit(panel.unit.value)
    built.thresholds(_thresholds(panel.limits))
    for number, line in enumerate(panel.lines):
        built.with_target(_target(line, chr(ord("A") + number), panel.shape))
    return built


def _target(line: Line, ref: str, shape: Shape) -> prometheus.Dataquery:
    query = prometheus.Dataquery().ref_id(ref).expr(line.query.text).legend_format(line.legend).datasource(SOURCE)
    if shape is Shape.BARS:
        return query.instant().format(prom.PromQueryFormat.TIME_SERIES)
    return query.range().format(
        prom.PromQueryFormat.HEATMAP if shape is Shape.HEATMAP else prom.PromQueryFormat.TIME_SERIES
    )


def _thresholds(limits: Limits | None) -> make.ThresholdsConfig:
    steps = [d.Threshold(value=None, color="green")]
    if limits and limits.falling:
        steps = [
            d.Threshold(value=None, color="red"),
            d.Threshold(value=limits.bad, color="orange"),
            d.Threshold(value=limits.warn, color="green"),
        ]
    elif limits:
        steps += [d.Threshold(value=limits.warn, color="orange"), d.Threshold(value=limits.bad, color="red")]
    return make.ThresholdsConfig().mode(d.ThresholdsMode.ABSOLUTE).steps(steps)


def _lines(panel: Panel) -> PanelBuilder:
    built = (
        timeseries.Panel()
        .line_width(1)
        .show_points(c.VisibilityMode.NEVER)
        .span_nulls(False)
        .min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(c.LegendDisplayMode.LIST)
            .placement(c.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(c.TooltipDisplayMode.MULTI).sort(c.SortOrder.DESCENDING))
    )
    if panel.limits:
        built.thresholds_style(common.GraphThresholdsStyleConfig().mode(c.GraphThresholdsStyleMode.DASHED))
    if panel.shape is Shape.STACKED:
        return built.fill_opacity(50).stacking(common.StackingConfig().mode(c.StackingMode.NORMAL).group("A"))
    return built.fill_opacity(5)


def _last_value() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _stat(panel: Panel) -> PanelBuilder:
    return (
        stat.Panel()
        .reduce_options(_last_value())
        .graph_mode(c.BigValueGraphMode.AREA)
        .color_mode(c.BigValueColorMode.VALUE)
        .no_value("no traffic")
    )


def _bars(panel: Panel) -> PanelBuilder:
    built = (
        bargauge.Panel()
        .reduce_options(_last_value())
        .orientation(c.VizOrientation.HORIZONTAL)
        .display_mode(c.BarGaugeDisplayMode.BASIC)
        .value_mode(c.BarGaugeValueMode.COLOR)
        .min(0)
    )
    return built.max(1) if panel.unit.value == "percentunit" else built


def _heatmap(panel: Panel) -> PanelBuilder:
    return (
        heatmap.Panel()
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heat.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .scale(heat.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .y_axis(heatmap.YAxisConfig().unit(panel.unit.value).axis_placement(c.AxisPlacement.LEFT))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(c.HeatmapCellLayout.AUTO))
        .tooltip(heatmap.HeatmapTooltip().mode(c.TooltipDisplayMode.SINGLE).y_histogram(True))
        .show_legend()
    )
