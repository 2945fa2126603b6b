// Draws one board over a Prometheus, with Grafana's own components from npm: the frame of a panel, lines, stats, bars,
// tables, and what overrides, transformations, units and thresholds do to data. Not on npm, so stood in for here: the
// heatmap, the marks of annotations, rows, the bar at the top, and the conversion of Prometheus' answers that Grafana's
// server does. window.ASKED: {board, prometheus, from, to, light, width, open}; times in seconds since 1970.

import React, { useEffect, useRef, useState } from "react";
import { createRoot } from "react-dom/client";
import {
  applyFieldOverrides, cacheFieldDisplayNames, createTheme, dateTime, FieldConfigOptionsRegistry, FieldType,
  formattedValueToString, getDisplayValueAlignmentFactors, getFieldDisplayValues, getValueFormat, LoadingState,
  renderLegendFormat, standardTransformers, standardTransformersRegistry, ThemeContext, toDataFrame, transformDataFrame,
  VizOrientation,
} from "@grafana/data";
import {
  BarGauge, BigValue, GlobalStyles, Icon, PanelChrome, TimeSeries, UPlotChart, UPlotConfigBuilder, VizRepeater,
} from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable";

const { board, prometheus, from, to, light, width, open } = window.ASKED;
const LINE = 30, GAP = 8, EDGE = 16, TOP = 60; // Grafana's grid, in pixels
const SCRAPE_S = 3; // as `python -m dashboards export` sets it
const theme = createTheme({ colors: { mode: light ? "light" : "dark" } });
const ends = { from: dateTime(from * 1000), to: dateTime(to * 1000) };
const shared = { theme, timeZone: "utc", replaceVariables: (text) => text };
const timeRange = { ...ends, raw: ends };

// the settings of fields that our boards use; a panel of Grafana brings this list with it
const STANDARD = [
  "unit", "min", "max", "decimals", "thresholds", "mappings", "color", "noValue", "links", "displayName",
];
const CUSTOM = [
  "lineWidth", "fillOpacity", "showPoints", "spanNulls", "stacking", "thresholdsStyle", "lineStyle", "axisSoftMax",
  "align", "minWidth", "cellOptions",
];
const setting = (path, isCustom) => ({
  id: isCustom ? `custom.${path}` : path, path, name: path, isCustom,
  process: (value) => value, shouldApply: () => true,
});
const fieldConfigRegistry = new FieldConfigOptionsRegistry();
fieldConfigRegistry.setInit(() => [
  ...STANDARD.map((path) => setting(path, false)), ...CUSTOM.map((path) => setting(path, true)),
]);
const transformers = new Map(Object.values(standardTransformers).map((each) => [each.id, each]));
standardTransformersRegistry.setInit(() => [...transformers.values()].map((each) => (
  { id: each.id, name: each.name, transformation: () => Promise.resolve(each), editor: () => null }
)));

async function answer(path, query) {
  const reply = await (await fetch(`${prometheus}/api/v1/${path}&query=${encodeURIComponent(query)}`)).json();
  if (reply.status !== "success") throw Error(`${query}: ${reply.error}`);
  return reply.data.result;
}

async function ask(target, pixels) {
  const step = Math.max(Math.ceil((to - from) / pixels), SCRAPE_S);
  const interval = `${Math.max(step + SCRAPE_S, 4 * SCRAPE_S)}s`;
  const query = target.expr.replaceAll("$__rate_interval", interval)
    .replace(/"\$(model|instance|role|replica|router)"/g, '".*"');
  const path = target.instant ? `query?time=${to}` : `query_range?start=${from}&end=${to}&step=${step}`;
  const found = await answer(path, query);
  if (target.format === "table") {
    const labels = [...new Set(found.flatMap((each) => Object.keys(each.metric)))];
    const column = (name) => ({ name, type: FieldType.string, values: found.map((each) => each.metric[name] ?? "") });
    return labels.length ? [toDataFrame({ refId: target.refId, fields: labels.map(column) })] : [];
  }
  return found.map(({ metric, values, value }) => {
    const points = values ?? [value];
    const legend = renderLegendFormat(target.legendFormat, metric);
    const time = { name: "Time", type: FieldType.time, config: { interval: step * 1000 } };
    const number = { name: "Value", type: FieldType.number, labels: metric, config: { displayNameFromDS: legend } };
    return toDataFrame({ refId: target.refId, name: legend, fields: [
      { ...time, values: points.map(([at]) => at * 1000) },
      { ...number, values: points.map(([, read]) => Number(read)) },
    ] });
  });
}

async function framesOf(panel, pixels) {
  let frames = (await Promise.all(panel.targets.map((target) => ask(target, pixels)))).flat();
  if (panel.transformations && frames.length) {
    const context = { interpolate: (text) => text };
    frames = await new Promise((done) => transformDataFrame(panel.transformations, frames, context).subscribe(done));
  }
  const drawn = applyFieldOverrides({ ...shared, data: frames, fieldConfig: panel.fieldConfig, fieldConfigRegistry });
  cacheFieldDisplayNames(drawn);
  return drawn;
}

async function marks() {
  const path = `query_range?start=${from}&end=${to}&step=60`;
  const found = await Promise.all(board.annotations.list.map(async (each) =>
    (await answer(path, each.target.expr)).map(({ values }) => {
      const times = values.filter(([, value]) => Number(value) > 0).map(([time]) => time * 1000);
      return { color: each.iconColor, from: times[0], to: times.at(-1) };
    })));
  return found.flat();
}

function addMarks(builder, events) {
  builder.addHook("draw", (u) => {
    const { ctx, bbox: { top, height } } = u;
    for (const each of events) {
      const [left, right] = [each.from, each.to].map((time) => Math.round(u.valToPos(time, "x", true)));
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = each.color;
      ctx.globalAlpha = 0.1;
      ctx.fillRect(left, top, right - left, height);
      ctx.globalAlpha = 1;
      ctx.setLineDash([5, 5]);
      ctx.lineWidth = 1.5;
      ctx.stroke(new Path2D(`M${left} ${top}V${top + height}`));
      ctx.fill(new Path2D(`M${left - 5} ${top + height}h10l-5 -7z`));
      ctx.restore();
    }
  });
}

function Lines({ panel, frames, size, events }) {
  const marked = useRef(new Set());
  const finite = (field) => field.values.map((value) => (Number.isFinite(value) ? value : null)); // else a gap
  const cleaned = (each) => ({ ...each, values: finite(each) });
  const drawn = frames.map((frame) => ({ ...frame, fields: frame.fields.map(cleaned) }));
  const mark = (builder) => {
    if (!marked.current.has(builder)) addMarks(builder, events);
    marked.current.add(builder);
    return null;
  };
  const { legend } = panel.options;
  return (
    <TimeSeries {...size} frames={drawn} legend={legend} options={panel.options} timeRange={timeRange} timeZone="utc">
      {mark}
    </TimeSeries>
  );
}

const displayed = ({ fieldConfig, options }, frames, sparkline) =>
  getFieldDisplayValues({ ...shared, data: frames, fieldConfig, reduceOptions: options.reduceOptions, sparkline });

const Stat = ({ panel, frames, size }) => (
  <VizRepeater {...size} source={frames} orientation={VizOrientation.Auto} renderCounter={0}
    getValues={() => displayed(panel, frames, true)}
    renderValue={({ value, count, width, height }) => (
      <BigValue {...panel.options} {...{ theme, count, width, height }} value={value.display}
        sparkline={value.sparkline && { ...value.sparkline, timeRange }} />
    )} />
);

const Bars = ({ panel, frames, size }) => (
  <VizRepeater {...size} source={frames} orientation={VizOrientation.Horizontal} itemSpacing={8} renderCounter={0}
    minVizHeight={panel.options.minVizHeight} maxVizHeight={panel.options.maxVizHeight}
    getValues={() => displayed(panel, frames, false)} getAlignmentFactors={getDisplayValueAlignmentFactors}
    renderValue={({ value, width, height, alignmentFactors }) => (
      <BarGauge {...panel.options} {...{ theme, width, height, alignmentFactors }} value={value.display}
        field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)}
        valueDisplayMode={panel.options.valueMode} />
    )} />
);

const Grid = ({ panel, frames, size }) => <TableNG {...size} data={frames[0]} cellHeight={panel.options.cellHeight} />;

const bound = (frame) => (frame.fields[1].labels.le === "+Inf" ? Infinity : Number(frame.fields[1].labels.le));

function Heat({ panel, frames, size, events }) {
  const sorted = [...frames].sort((one, other) => bound(one) - bound(other));
  const times = [...new Set(sorted.flatMap((each) => each.fields[0].values))].sort((one, other) => one - other);
  const byTime = ({ fields: [time, { values }] }) => new Map(time.values.map((at, row) => [at, values[row]]));
  const counts = sorted.map(byTime);
  const below = (row, at) => (row ? counts[row - 1].get(at) ?? 0 : 0); // buckets are cumulative
  const cells = counts.map((each, row) => times.map((at) => Math.max(0, (each.get(at) ?? 0) - below(row, at))));
  const most = Math.max(...cells.flat(), 1e-9);
  const format = getValueFormat(panel.options.yAxis.unit);
  const named = (le) => (Number.isFinite(le) ? formattedValueToString(format(le)) : "+Inf");
  const every = Math.ceil(cells.length / 6);
  const shown = sorted.map((_, row) => row + 1).filter((row) => (cells.length - row) % every === 0);
  const builder = new UPlotConfigBuilder("utc");
  const range = () => [from * 1000, to * 1000];
  builder.addScale({ scaleKey: "x", isTime: true, orientation: 0, direction: 1, range });
  builder.addScale({ scaleKey: "y", orientation: 1, direction: 1, range: () => [0, cells.length] });
  builder.addAxis({ scaleKey: "x", isTime: true, placement: "bottom", theme, timeZone: "utc" });
  builder.addAxis({
    scaleKey: "y", placement: "left", theme, size: 70, grid: { show: false }, splits: () => shown,
    values: (_, at) => at.map((row) => named(bound(sorted[row - 1]))),
  });
  builder.addSeries({ scaleKey: "y", theme, pathBuilder: () => null, show: true, lineWidth: 0 });
  builder.addHook("draw", (u) => {
    const wide = Math.abs(u.valToPos(times[1], "x", true) - u.valToPos(times[0], "x", true));
    cells.forEach((each, row) => each.forEach((count, at) => {
      const right = u.valToPos(times[at], "x", true);
      const [top, bottom] = [row + 1, row].map((y) => u.valToPos(y, "y", true));
      u.ctx.fillStyle = `rgb(255 120 20 / ${count ? 0.15 + 0.85 * (count / most) ** 0.5 : 0})`;
      u.ctx.fillRect(right - wide + 1, top + 1, wide - 1, bottom - top - 1);
    }));
  });
  addMarks(builder, events);
  return <UPlotChart {...size} data={[times, times.map(() => 0)]} config={builder} />;
}

const KINDS = { timeseries: Lines, stat: Stat, bargauge: Bars, heatmap: Heat, table: Grid };
let waiting = 0;

function Panel({ panel, place, events }) {
  const [frames, setFrames] = useState(null);
  useEffect(() => {
    waiting += 1;
    framesOf(panel, Math.round(place.width))
      .then(setFrames, (error) => console.error(`${panel.title}: ${error.message}`))
      .finally(() => { waiting -= 1; });
  }, []);
  const Kind = KINDS[panel.type];
  const draw = (size) => frames?.some((each) => each.length)
    ? <Kind {...{ panel, frames, size, events }} />
    : frames && <div className="none">{panel.fieldConfig.defaults.noValue}</div>;
  return (
    <div style={{ position: "absolute", ...place }}>
      <PanelChrome title={panel.title} description={panel.description} width={place.width} height={place.height}
        loadingState={LoadingState.Done}>
        {(width, height) => draw({ width, height })}
      </PanelChrome>
    </div>
  );
}

const Heading = ({ row, place }) => (
  <div className="row" style={{ position: "absolute", ...place }}>
    <Icon name={row.collapsed && !open ? "angle-right" : "angle-down"} size="lg" /> {row.title}
    {row.collapsed && !open && <small>({row.panels.length} panels)</small>}
  </div>
);

function placed() {
  const column = (width - 2 * EDGE + GAP) / 24;
  let down = 0; // lines that opened rows have taken
  const at = ({ x, y, w, h }) => ({
    left: EDGE + x * column, top: TOP + (y + down) * (LINE + GAP),
    width: w * column - GAP, height: h * (LINE + GAP) - GAP,
  });
  return board.panels.flatMap((each) => {
    const inside = open && each.type === "row" ? each.panels : [];
    const found = [each, ...inside].map((panel) => [panel, at(panel.gridPos)]);
    down += Math.max(0, ...inside.map(({ gridPos: { y, h } }) => y + h - each.gridPos.y - 1));
    return found;
  });
}

function Board() {
  const [events, setEvents] = useState(null);
  useEffect(() => { marks().then(setEvents, (error) => console.error(error.message)); }, []);
  const all = placed();
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div className="top">
        <b>{board.title}</b>
        {board.templating.list.filter((each) => each.hide !== 2).map((each) => (
          <span key={each.name}>{each.label} <i>{each.current?.text ?? "Manta"}</i></span>
        ))}
        <div>
          {board.links.map((each) => (
            <a key={each.title}>
              <Icon name={each.icon === "dashboard" ? "apps" : "external-link-alt"} /> {each.title}
            </a>
          ))}
        </div>
      </div>
      <div style={{ height: EDGE + Math.max(...all.map(([, { top, height }]) => top + height)) }}>
        {events && all.map(([panel, place]) => panel.type === "row"
          ? <Heading key={panel.id} row={panel} place={place} />
          : <Panel key={panel.id} {...{ panel, place, events }} />)}
      </div>
    </ThemeContext.Provider>
  );
}

const { background, border, text } = theme.colors;
document.head.append(Object.assign(document.createElement("style"), { textContent: `
  body { background: ${background.canvas}; height: auto !important; overflow: hidden !important }
  .top, .row, .top div { display: flex; align-items: center; gap: 16px }
  .top { position: absolute; inset: 12px 16px auto; height: 36px; color: ${text.secondary}; font-size: 13px }
  .top b { font-size: 16px; color: ${text.primary} }
  .top i { font-style: normal; border: 1px solid ${border.medium}; padding: 3px 8px; color: ${text.primary} }
  .top div { margin-left: auto } .top a { color: ${text.link} }
  .row { gap: 6px; font-size: 16px; color: ${text.primary} } .row small, .none { color: ${text.secondary} }
  .none { display: flex; height: 100%; align-items: center; justify-content: center }` }));
createRoot(document.getElementById("root")).render(<Board />);
const timer = setInterval(() => {
  if (waiting > 0 || !document.querySelector("canvas")) return;
  clearInterval(timer);
  setTimeout(() => { document.documentElement.dataset.ready = "1"; }, 700); // the charts' last frame
}, 200);
