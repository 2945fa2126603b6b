// Paints what river_layout.js lays out, as river.js asks for it.
// Owns:      the colours as a canvas takes them, and what covers what.
// Never:     keeps anything between two pictures, or knows a pointer.

import { clock, count, percent } from "./format.js";
import { ROW, isBad, missesOf, stagesAt, ticks } from "./river_layout.js";

export const AXIS = 20; // px, above the lanes
export const BAR = 3; // px of a bar of arrivals
const TICK = "#0003";
const ON_BARS = "#06110c"; // text on any of the stages' colours
const COLOURS = ["route", "queue", "prefill", "transfer", "decode", "cached", "warn", "bad", "ink", "muted", "edge", "raised", "surface"];

// The page's colours and font as they are in the present theme: { name: colour, hatch, font }.
export function paletteOf(element) {
  const probe = element.appendChild(document.createElement("span"));
  const colours = COLOURS.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  });
  const palette = { ...Object.fromEntries(colours), font: `11px ${getComputedStyle(probe).fontFamily}` };
  probe.remove();
  const tile = sized(document.createElement("canvas"), 4, 4, 1);
  tile.fillStyle = palette.cached;
  tile.fillRect(0, 0, 4, 4);
  tile.fillStyle = "#0007";
  for (let at = 0; at < 4; at += 1) tile.fillRect(at, 3 - at, 1, 1);
  palette.hatch = tile.createPattern(tile.canvas, "repeat");
  return palette;
}

// A cleared canvas of that size in px, to be painted on.
export function sized(canvas, width, height, ratio = devicePixelRatio) {
  const paint = canvas.getContext("2d");
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    Object.assign(canvas, { width: wide, height: high });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  paint.clearRect(0, 0, width, height);
  return paint;
}

// [top, height] of a row of the lane at a place, px.
export function rowAt({ tops, heights, rows }, place, slot) {
  const high = Math.min(ROW, (heights[place] - 4) / rows[place]);
  return [AXIS + tops[place] + 2 + slot * high, Math.max(1, high >= 4 ? high - 1 : high * 0.85)];
}

// `view`: of Layout.view, with from, until, scale (px a second), tops and heights of the lanes, places (lane -> which), and
// the objectives.
// `piecesOf(rid)`: all pieces of a request.
export function paintRiver(paint, view, palette, piecesOf) {
  paint.font = palette.font;
  paint.textBaseline = "middle";
  paintGround(paint, view, palette);
  paintPieces(paint, view, palette);
  paintThreads(paint, view, palette, piecesOf);
  paintEnds(paint, view, palette);
}

export function paintArrivals(paint, counts, palette) {
  const tall = paint.canvas.clientHeight;
  const most = Math.max(1, ...counts.map(([good, bad]) => good + bad));
  const mostMissed = Math.max(1, ...counts.map((each) => each[2]));
  const low = (bad) => bad && Math.max(2, (bad / most) * (tall - 4));
  paint.fillStyle = palette.decode;
  counts.forEach(([good, bad], at) => good && paint.fillRect(at * BAR, tall - (good / most) * (tall - 4) - low(bad), BAR - 1, (good / most) * (tall - 4)));
  paint.fillStyle = palette.bad;
  counts.forEach(([, bad], at) => bad && paint.fillRect(at * BAR, tall - low(bad), BAR - 1, low(bad)));
  paint.fillStyle = palette.warn; // from above: when objectives began to be missed
  counts.forEach(([, , missed], at) => missed && paint.fillRect(at * BAR, 0, BAR - 1, 2 + (missed / mostMissed) * (tall / 2 - 2)));
}

// The time that each replica was there, the time axis, and the lines between lanes.
function paintGround(paint, { lanes, from, until, scale, tops, heights }, palette) {
  const wide = (until - from) * scale;
  lanes.forEach((lane, at) => {
    const [start, end] = [Math.max(0, (lane.from - from) * scale), Math.min(wide, (lane.until - from) * scale)];
    const sick = lane.dead && lane.until === Infinity;
    paint.globalAlpha = sick ? 0.16 : 0.55;
    paint.fillStyle = sick ? palette.bad : palette.raised;
    if (end > start) paint.fillRect(start, AXIS + tops[at] + 1, end - start, heights[at] - 1);
  });
  paint.globalAlpha = 1;
  const low = AXIS + (tops.at(-1) ?? 0) + (heights.at(-1) ?? 0);
  const { step, times } = ticks(from, until, scale);
  for (const time of times) {
    const x = Math.round((time - from) * scale);
    paint.fillStyle = palette.edge;
    paint.fillRect(x, AXIS, 1, low - AXIS);
    paint.fillStyle = palette.muted;
    paint.fillText(clock(time) + (step < 1 ? (time % 1).toFixed(1).slice(1) : ""), x + 4, AXIS / 2);
  }
  paint.fillStyle = palette.edge;
  for (const top of [...tops.map((each) => AXIS + each), low]) paint.fillRect(0, top, wide, 1);
}

function paintPieces(paint, view, palette) {
  const { from, until, scale, places, objectives } = view;
  const layers = ["route", "queue", "prefill", "transfer", "decode"].map((name) => palette[name]); // what comes later covers
  const boxes = new Map([...layers, TICK, palette.hatch, palette.warn, palette.ink, palette.bad].map((style) => [style, []]));
  const box = (style, x, y, wide, high) => boxes.get(style).push(x, y, wide, high);
  const labels = [];
  const x = (time) => Math.round((Math.min(time, until) - from) * scale);
  for (const piece of view.pieces) {
    const { row } = piece;
    const [y, high] = rowAt(view, places.get(piece.replica), piece.slot);
    const left = x(piece.start);
    const right = Math.max(x(piece.end), left + 2);
    let [text, room] = [0, 0]; // where its name has most room
    const spans = spansOf(piece, until);
    for (const [index, [name, start, end]] of spans.entries()) {
      const at = x(start);
      if (x(end) === at && index < spans.length - 1 && !(name === "prefill" && row.cached_tokens > 0)) continue; // the next covers it
      const to = Math.min(Math.max(x(end), at + 1), right);
      const begin = Math.max(at, 0) + (name === "prefill" ? 12 : 5);
      if (to - begin > room) [text, room] = [begin, to - begin];
      const unsure = name === "queue" && row.outcome === "running" && row.ttft_s == null; // it may be computed already
      const thin = name === "route" || unsure;
      box(palette[name], at, thin ? y + high * 0.3 : y, to - at - (to === right && right - left > 4 ? 1 : 0), thin ? Math.max(1, high * 0.4) : high);
      if (name === "prefill" && row.cached_tokens > 0 && high >= 2)
        box(palette.hatch, at, y, Math.min(2 + (6 * row.cached_tokens) / row.prompt_tokens, Math.max(2, (right - at) * 0.6)), high);
      if (name === "decode" && row.itl_s * scale >= 4 && high >= 4)
        for (let tick = start + row.itl_s; tick < Math.min(end, until); tick += row.itl_s) box(TICK, x(tick), y + high - 3, 1, 3);
    }
    const ends = piece.why == null; // the last of its request
    if (piece.failure != null || (ends && isBad(row))) box(palette.bad, right - 3, y - 1, 3, high + 2);
    else if (ends && row.outcome === "cancelled") box(palette.ink, right - 2, y, 2, high);
    for (const [late, to] of missesOf(row, objectives, until)) {
      const [begins, over] = [x(Math.max(piece.start, row.time + late)), x(Math.min(piece.end, row.time + to))];
      if (row.time + late >= piece.end || row.time + to <= piece.start) continue;
      if (row.time + late >= piece.start) box(palette.warn, begins, y, 2, high); // the moment
      if (high >= 4) box(palette.warn, begins, y + high - Math.round(high / 5), Math.max(2, over - begins), Math.round(high / 5));
    }
    if (high >= 10 && room > 40 && row.outcome !== "running") labels.push([labelsOf(row).find((each) => each.length * 6.6 < room) ?? "", text, y + high / 2 + 0.5]);
  }
  for (const [style, each] of boxes) {
    paint.fillStyle = style;
    for (let at = 0; at < each.length; at += 4) paint.fillRect(each[at], each[at + 1], each[at + 2], each[at + 3]);
  }
  paint.fillStyle = ON_BARS;
  for (const label of labels) paint.fillText(...label);
}

// What came of a request, the longest first: its name is told where one points at it.
function labelsOf({ prompt_tokens: prompt, output_tokens: output, cached_tokens: cached }) {
  const short = `${count(prompt)} → ${count(output)}`;
  return cached > 0 ? [`${short}, ${percent(cached / prompt)} cached`, short] : [short];
}

// KV transfers and retries, from where a piece ends to where the next begins; retries stand out. Fetches, from the lane of
// the replica that had the pages.
function paintThreads(paint, view, palette, piecesOf) {
  const { from, scale, places, tops, heights } = view;
  const many = view.pieces.length > 1500; // then straight lines: they cost less
  const paths = { transfer: new Path2D(), retry: new Path2D(), dots: new Path2D(), fetched: new Path2D() };
  for (const piece of view.pieces) {
    if (piece.fetch && places.has(piece.fetch.from)) {
      const [at, [top, high]] = [places.get(piece.fetch.from), rowAt(view, places.get(piece.replica), piece.slot)];
      const [x, y] = [(piece.fetch.end - from) * scale, top + high / 2];
      paths.transfer.moveTo((piece.fetch.start - from) * scale, AXIS + tops[at] + heights[at] / 2);
      paths.transfer.lineTo(x, y);
      paths.fetched.moveTo(x, y), paths.fetched.arc(x, y, 3, 0, 7);
    }
    if (piece.why == null) continue;
    const pieces = piecesOf(piece.rid);
    const next = pieces[pieces.indexOf(piece) + 1];
    if (!places.has(next?.replica)) continue;
    const ends = [[piece, piece.end], [next, next.start]].map(([each, time]) => {
      const [top, high] = rowAt(view, places.get(each.replica), each.slot);
      return [(time - from) * scale, top + high / 2];
    });
    const [[x0, y0], [x1, y1]] = ends;
    const retry = piece.why === "retry";
    const bend = Math.max(retry ? 30 : 10, (x1 - x0) / 2);
    const path = paths[piece.why];
    path.moveTo(x0, y0);
    if (many && !retry) path.lineTo(x1, y1);
    else path.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    if (retry) for (const [x, y] of ends) paths.dots.moveTo(x, y), paths.dots.arc(x, y, 3, 0, 7);
  }
  for (const [path, colour, wide] of [[paths.transfer, palette.transfer, 1], [paths.retry, palette.surface, 5], [paths.retry, palette.ink, 2]]) {
    Object.assign(paint, { strokeStyle: colour, lineWidth: wide });
    paint.stroke(path);
  }
  for (const [path, colour] of [[paths.dots, palette.ink], [paths.fetched, palette.transfer]]) {
    paint.fillStyle = colour;
    paint.fill(path);
  }
}

// Where replicas went.
function paintEnds(paint, { lanes, from, scale, tops, heights }, palette) {
  lanes.forEach(({ dead, until }, at) => {
    if (until === Infinity) return;
    const x = Math.round((until - from) * scale);
    paint.fillStyle = dead ? palette.bad : palette.muted;
    paint.fillRect(x, AXIS + tops[at] + 1, dead ? 3 : 1, heights[at] - 1);
    if (heights[at] > 15) paint.fillText(dead ? "replica lost" : "replica left", x + 8, AXIS + tops[at] + heights[at] / 2);
  });
}

// The stages of a piece until a time: those of its request while it was there. Of a piece that is over they are kept.
function spansOf(piece, until) {
  if (piece.spans) return piece.spans;
  const { row, start, end } = piece;
  const spans = stagesAt(row, until)
    .map(([name, from, to]) => [name, Math.max(start, row.time + from), Math.min(end, row.time + to)])
    .filter(([, from, to]) => to > from);
  if (end !== Infinity) piece.spans = spans;
  return spans;
}
