// Seven figures with five minutes of history each; pointing at a line reads all of them at that moment, a click opens one
// large. What a level is, and which series belong to a figure, the observatory says.

import { html, useState } from "./vendor/htm/preact_standalone.js";
import { Chart, lineOf, nearest, wordOf } from "./chart.js";
import { count, nameOf, percent, plain, plural, rate, seconds, share } from "./format.js";
import { once } from "./panel.js";

const WINDOW_S = 300;
const HEIGHT = 36;
const FORMATS = { seconds, "tokens/s": (value) => plain(count(value), "tok/s"), ratio: share, requests: count };

const formatOf = (unit) => FORMATS[unit] ?? count;

export const Tiles = once(({ figures, history, time, tile, choose }) => {
  const [at, setAt] = useState(null); // seconds ago that is pointed at
  const open = figures?.find((each) => each.name === tile);
  const point = (event) => {
    const box = event.target.closest(".spark")?.getBoundingClientRect();
    setAt(box ? Math.round(WINDOW_S * (1 - Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)))) : null);
  };
  return html`<section class="tiles" aria-label="Key figures">
    <div class="tile-row" onPointerMove=${point} onPointerLeave=${() => setAt(null)}>
      ${figures?.map((each) => html`<${Tile} key=${each.name} figure=${each} history=${history} time=${time} at=${at}
        open=${each.name === tile} onChoose=${() => choose({ tile: each.name === tile ? null : each.name })} />`)}
    </div>
    ${open && html`<${Chart} key=${open.name} figure=${open} history=${history} at=${at} setAt=${setAt} format=${formatOf(open.unit)} onClose=${() => choose({ tile: null })} />`}
  </section>`;
});

function Tile({ figure, history, time, at, open, onChoose }) {
  const { title, unit, value, more, objective, met, most, level, series } = figure;
  const format = formatOf(unit), beyond = (number) => (most != null && number >= most ? "> " : "");
  const write = (number) => beyond(number) + format(number);
  const { times = [], series: all = {} } = history ?? {};
  const [first, second] = series ?? [];
  const points = all[first] ?? [];
  const shown = at === null ? value : points[nearest(times, time - at, 2)];
  const [number, ...rest] = format(shown).split(" ");
  const word = wordOf(first, figure);
  const told = toldOf(more ?? {}, unit === "tokens/s" ? count : write, [word, figure.name]);
  if (objective != null) told.unshift(met == null ? `objective ${format(objective)}` : `${percent(met)} within ${format(objective)}`);
  const below = at === null ? told : [at === 0 ? "now" : `${at} s ago`];
  const name = title + (word && (/^p\d/.test(word) ? ` ${word}` : `, ${word}`));
  return html`<button type="button" class=${`tile ${level}`} aria-pressed=${open} onClick=${onChoose} title=${told.join("\n")}
      aria-label=${`${name}: ${write(value)}${told.length ? `, ${told.join(", ")}` : ""}${level === "ok" || level === "idle" ? "" : `; ${level}`}`}>
    <span class="name">${name}</span>
    <span class="value">${beyond(shown)}${number}<span class="unit">${rest.join(" ")}</span></span>
    <span class="more">${below.map((each, index) => html`<span>${each}${index < below.length - 1 ? " ·" : ""}</span> `)}</span>
    <${Spark} times=${times} points=${points} upper=${more?.p95 === undefined ? null : all[second]} time=${time} objective=${objective} at=${at} />
  </button>`;
}

// What stands below a value, of the words that the observatory gives with it.
function toldOf({ count: number, requests_per_s: rps, cached_tokens: cached, prompt_tokens: prompt, tokens, running, replica, without_room: room, ...rest }, format, shown) {
  const told = Object.entries(rest).filter(([name, value]) => !shown.includes(name) && value != null).map(([name, value]) => `${name} ${format(value)}`);
  const [one, two] = told.map((each) => each.split(" "));
  if (two && one.length === 3 && one[2] === two[2]) told[0] = one.slice(0, 2).join(" "); // p95 20.4 · p99 20.8 ms
  if (room) told.push(`${count(room)} ${room === 1 ? "waits" : "wait"} for room`);
  if (replica) told.push(`fullest ${nameOf(replica)}`);
  if (number != null) told.push(plural(number, "failure"));
  if (rps != null) told.push(`${rate(rps)} requests/s`);
  if (prompt) told.push(`${count(cached)} of ${count(prompt)} tokens`);
  if (running != null) told.push(`${count(running)} running`);
  if (tokens != null) told.push(plural(tokens, "token"));
  return told;
}

export const Spark = once(({ times, points, upper, time, objective, at }) => {
  const highest = Math.max(0, ...points, ...(upper ?? [])); // null counts as 0
  const { line, area, level } = sparkOf({ times, points, time, objective, highest });
  return html`<svg class="spark" viewBox=${`0 0 ${WINDOW_S} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
    <path class="area" d=${area} stroke="none" />
    ${upper && html`<path class="upper" d=${sparkOf({ times, points: upper, time, objective, highest }).line} />`}<path d=${line} />
    ${level !== null && html`<path class="objective" d=${`M0 ${level}H${WINDOW_S}`} />`}
    ${at !== null && html`<path class="at" d=${`M${WINDOW_S - at} 0V${HEIGHT}`} />`}
  </svg>`;
});

// The line and the area below it, in a box of WINDOW_S x HEIGHT; `level` is the objective's height, null where it is far
// above all that is drawn: a line squeezed flat would say less. Pure.
export function sparkOf({ times, points, time, objective, highest }) {
  const from = times.findIndex((each) => time - each <= WINDOW_S);
  const drawn = from < 0 ? [] : points.slice(from).map((value, index) => [WINDOW_S - (time - times[from + index]), value]);
  const near = objective != null && highest > 0 && objective <= 4 * highest;
  const top = Math.max(highest, near ? objective : 0) * 1.15 || 1;
  const y = (value) => HEIGHT - 1 - (value / top) * (HEIGHT - 2);
  const { line, runs } = lineOf(drawn.map(([x, value]) => [x, value == null ? null : y(value)]));
  const area = runs.map((each) => `M${each[0].split(" ")[0]} ${HEIGHT}L${each.join("L")}V${HEIGHT}Z`).join("");
  return { line, area, level: near ? y(objective).toFixed(1) : null };
}
