// One figure large: its series over five minutes or an hour. What is pointed at is read in all tiles too (tiles.js).

import { html, useEffect, useState } from "./vendor/htm/preact_standalone.js";
import { getJson } from "./connection.js";
import { ticksOf } from "./decision.js";
import { clock, span as lengthOf } from "./format.js";
import { Choice, Panel, useWidth } from "./panel.js";
import { ticks } from "./river_layout.js";

const HEIGHT = 240;
const EDGE = { left: 84, right: 28, top: 10, bottom: 26 }; // px
const SPANS = [[300, "5 min"], [3600, "1 h"]];
const AGAIN_MS = 15000; // the hour has a point each 15 s

export function Chart({ figure, history, at, setAt, format, onClose }) {
  const [span, setSpan] = useState(300);
  const [hour, error] = useHour(span === 3600);
  const columns = (span === 300 ? history : hour) ?? { times: [], series: {} };
  const end = html`<${Choice} label="Time span" options=${SPANS} value=${span} onChoose=${setSpan} /> <button type="button" onClick=${onClose}>Close</button>`;
  return html`<div class="chart-panel"><${Panel} id="chart" title=${figure.title} note=${error ?? ""} end=${end}>
    <${Plot} figure=${figure} ...${columns} span=${span} at=${at} setAt=${setAt} format=${format} />
  <//></div>`;
}

// The last hour, while it is looked at: [columns | null, why not | null]
function useHour(wanted) {
  const [known, setKnown] = useState([null, null]);
  useEffect(() => {
    if (!wanted) return undefined;
    const ask = () =>
      document.hidden || getJson("api/history?span_s=3600").then(
        (history) => setKnown([columnsOf(history), null]),
        (error) => setKnown(([before]) => [before, `The last hour cannot be shown: ${error.message}.`]),
      );
    ask();
    const timer = setInterval(ask, AGAIN_MS);
    return () => clearInterval(timer);
  }, [wanted]);
  return known;
}

function columnsOf({ names, points }) {
  const series = Object.fromEntries(names.map((name, index) => [name, points.map((point) => point[index + 1])]));
  return { times: points.map(([time]) => time), series };
}

function Plot({ figure, times, series, span, at, setAt, format }) {
  const [place, width] = useWidth();
  const to = times.at(-1) ?? 0;
  const inner = Math.max(1, width - EDGE.left - EDGE.right);
  const lines = figure.series.map((name, index) => ({ name, word: wordOf(name, figure) || figure.title, points: series[name] ?? [],
    kind: figure.unit === "tokens/s" ? `as-${name}` : `series-${index}` }));
  const from = to - span;
  const first = times.findIndex((time) => time >= from);
  const highest = lines.reduce((most, { points }) => Math.max(most, ...points.slice(first)), 0); // null counts as 0
  const near = figure.objective != null && figure.objective <= 4 * highest; // else all lines would lie at the bottom
  const top = Math.max(highest, near ? figure.objective : 0) * 1.08 || 1;
  const x = (time) => EDGE.left + ((time - from) / span) * inner;
  const y = (value) => HEIGHT - EDGE.bottom - (value / top) * (HEIGHT - EDGE.top - EDGE.bottom);
  const drawn = (points) => lineOf(points.slice(first).map((value, index) => [x(times[first + index]), value == null ? null : y(value)])).line;
  const index = at === null ? times.length - 1 : nearest(times, to - at, span / 20);
  const point = (event) => {
    const ago = span * (1 - (event.clientX - place.current.getBoundingClientRect().left - EDGE.left) / inner);
    setAt(ago >= 0 && ago <= span ? Math.round(ago) : null);
  };
  const said = lines.map(({ word, points }) => `${word} ${format(points.at(-1))}`).join(", ");
  return html`<div class="chart" ref=${place} onPointerMove=${point} onPointerLeave=${() => setAt(null)}>
    <svg width=${width} height=${HEIGHT} role="img" aria-label=${`${figure.title} over ${lengthOf(span)}. Now: ${said}`}>
      ${[0, ...ticksOf(top)].map((value) => html`<g key=${value}><path class="grid" d=${`M${EDGE.left} ${y(value)}h${inner}`} />
        <text x=${EDGE.left - 8} y=${y(value) + 4} text-anchor="end">${format(value)}</text></g>`)}
      ${ticks(from, to, inner / span, 90).times.map((time) => html`<text key=${time} x=${x(time)} y=${HEIGHT - 6} text-anchor="middle">${clock(time).slice(0, span > 600 ? 5 : 8)}</text>`)}
      ${near && html`<path class="objective" d=${`M${EDGE.left} ${y(figure.objective)}h${inner}`} />`}
      ${first >= 0 && lines.map(({ name, kind, points }) => html`<path key=${name} class=${`curve ${kind}`} d=${drawn(points)} />`)}
      ${at !== null && index >= 0 && html`<path class="at" d=${`M${x(times[index])} ${EDGE.top}V${HEIGHT - EDGE.bottom}`} />`}
    </svg>
    <ul class="legend">
      <li>${at === null || index < 0 ? "now" : clock(times[index])}</li>
      ${lines.map(({ name, word, kind, points }) => html`<li key=${name}><span class=${`swatch ${kind}`} aria-hidden="true"></span>${word}
        <strong>${format(points[index])}</strong></li>`)}
      ${figure.objective != null && html`<li><span class="swatch objective" aria-hidden="true"></span>objective <strong>${format(figure.objective)}</strong>${near ? "" : " (above)"}</li>`}
    </ul>
  </div>`;
}

// What a series is called beside its figure: ttft_p95 of ttft is p95; "" for the figure itself.
export function wordOf(name, figure) {
  return !name || name === figure.name ? "" : name.replace(`${figure.name}_`, "").replaceAll("_", " ");
}

// The path through points [x, y], with gaps where y is null, and the runs that it has. Pure.
export function lineOf(points) {
  const runs = [];
  let run = null;
  for (const [x, y] of points) {
    if (y === null) run = null;
    else if (run) run.push(`${x.toFixed(1)} ${y.toFixed(1)}`);
    else runs.push((run = [`${x.toFixed(1)} ${y.toFixed(1)}`]));
  }
  return { runs, line: runs.map((each) => `M${each.join("L")}${each.length === 1 ? "h1" : ""}`).join("") };
}

// Index of the time that is nearest, -1 if none is within `reach` seconds.
export function nearest(times, wanted, reach) {
  let best = -1;
  for (let index = times.length - 1; index >= 0 && times[index] >= wanted - reach; index -= 1)
    if (Math.abs(times[index] - wanted) <= Math.min(reach, Math.abs((times[best] ?? -Infinity) - wanted))) best = index;
  return best;
}
