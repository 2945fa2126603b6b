// Use of each pool over the last five minutes: a line a replica (uPlot, a global of its own script).

import { html, useLayoutEffect, useRef } from "./vendor/htm/preact_standalone.js";
import { percent, shortId } from "./format.js";
import { Notice, Panel, once, useWidth } from "./panel.js";

const WINDOW_S = 300;
const HEIGHT = 170;
const NUM_COLOURS = 7;

export const History = once(({ history, replicas, theme }) => {
  const ids = Object.keys(history.used).sort();
  const known = new Map(replicas.map((each) => [each.id, each.role]));
  const last = (id) => history.used[id].at(-1);
  return html`<${Panel} id="history" title="KV pool in use" note="last five minutes, what a new request cannot have">
    ${ids.length === 0
      ? html`<${Notice} title="Nothing measured yet."><p>A line for each replica starts with its first report.</p><//>`
      : html`<${Chart} history=${history} ids=${ids} names=${ids.join()} theme=${theme} />
          <ul class="legend" aria-label="Pool in use now">
            ${ids.map(
              (id, index) => html`<li key=${id} title=${id}>
                <span class=${`swatch series-${index % NUM_COLOURS}${index < NUM_COLOURS ? "" : " dashed"}`} aria-hidden="true"></span>
                ${known.get(id) && known.get(id) !== "unified" ? `${known.get(id)} ` : ""}${shortId(id)} ${percent(last(id))}
              </li>`,
            )}
          </ul>`}
  <//>`;
});

function Chart({ history, ids, names, theme }) {
  const [place, width] = useWidth();
  const plot = useRef(null);
  useLayoutEffect(() => {
    if (!width) return undefined;
    plot.current = new uPlot(options(ids, width, place.current), dataOf(history, ids), place.current);
    return () => plot.current.destroy();
  }, [names, theme, width > 0]);
  useLayoutEffect(() => {
    if (plot.current && width) plot.current.setSize({ width, height: HEIGHT });
  }, [width]);
  useLayoutEffect(() => plot.current?.setData(dataOf(history, ids)), [history]);
  const said = ids.map((id) => `${id} ${percent(history.used[id].at(-1))}`).join(", ");
  return html`<div class="chart" ref=${place} role="img" aria-label=${`Share of each pool in use over five minutes. Now: ${said}`}></div>`;
}

function dataOf(history, ids) {
  return [history.times, ...ids.map((id) => history.used[id])];
}

function options(ids, width, place) {
  const style = getComputedStyle(place);
  const agos = width < 420 ? [300, 150, 0] : [300, 240, 180, 120, 60, 0];
  const colours = Array.from({ length: NUM_COLOURS }, (_, index) => colourOf(place, `series-${index}`));
  const axis = { stroke: style.color, grid: { stroke: colourOf(place, "grid"), width: 1 }, ticks: { show: false }, font: `11px ${style.fontFamily}` };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    padding: [10, 14, 0, 0],
    scales: { x: { range: (_plot, _min, max) => [max - WINDOW_S, max] }, y: { range: [0, 1] } },
    axes: [
      { ...axis, size: 26, splits: (plot) => agos.map((ago) => plot.scales.x.max - ago), values: (plot, at) => at.map((each) => agoOf(Math.round(plot.scales.x.max - each))) },
      { ...axis, size: 48, splits: () => [0, 0.25, 0.5, 0.75, 1], values: (_plot, at) => at.map(percent) },
    ],
    series: [
      {},
      ...ids.map((_id, index) => ({
        stroke: colours[index % NUM_COLOURS],
        width: 1.75,
        dash: index < NUM_COLOURS ? undefined : [5, 3],
        points: { show: false },
        spanGaps: false,
      })),
    ],
  };
}

// A canvas needs colours as they come out: those of a class, in the theme that is on.
function colourOf(place, name) {
  const probe = place.appendChild(document.createElement("span"));
  probe.className = `swatch ${name}`;
  const { backgroundColor } = getComputedStyle(probe);
  probe.remove();
  return backgroundColor;
}

function agoOf(secondsAgo) {
  return secondsAgo < 1 ? "now" : `−${secondsAgo / 60} min`;
}
