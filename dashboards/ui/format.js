// Numbers and names as a person reads them. Pure. Nothing known is a dash.

const NONE = "–";
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 }); // toLocaleString would make one a call

export function count(value) {
  if (value == null) return NONE;
  if (value < 10000) return WHOLE.format(value);
  return value < 999500 ? `${short(value / 1e3)}k` : `${short(value / 1e6)}M`;
}

export function seconds(value) {
  if (value == null) return NONE;
  if (value < 0.9995) return `${short(value * 1e3)} ms`;
  return value < 120 ? `${value < 9.995 ? value.toFixed(2) : value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

export function millis(value) {
  if (value == null) return NONE;
  const ms = value * 1e3;
  return ms !== 0 && Math.abs(ms) < 9.95 ? ms.toFixed(1) : WHOLE.format(ms);
}

export function percent(ratio) {
  return ratio == null ? NONE : `${Math.round(ratio * 100)} %`;
}

// A share where a little matters: 0.4 %, not 0 %.
export function share(ratio) {
  return ratio > 0 && ratio < 0.0995 ? `${(ratio * 100).toFixed(1)} %` : percent(ratio);
}

// A number with a unit of its own behind it; a dash stays alone.
export function plain(number, unit) {
  return number === NONE ? NONE : `${number} ${unit}`;
}

export function rate(value) {
  return value == null ? NONE : value > 0 && value < 0.95 ? value.toFixed(2) : short(value);
}

export function bytes(value) {
  if (value == null) return NONE;
  const step = value >= 1e9 ? [1e9, "GB"] : value >= 1e6 ? [1e6, "MB"] : value >= 1e3 ? [1e3, "kB"] : [1, "B"];
  return `${short(value / step[0])} ${step[1]}`;
}

// A length of time in one or two words: 42 min, 3 h 10 min, 2 d 4 h.
export function span(value) {
  if (value == null) return NONE;
  const [s, min, h] = [Math.floor(value), Math.floor(value / 60), Math.floor(value / 3600)];
  if (s < 60) return `${s} s`;
  if (min < 60) return `${min} min`;
  return h < 24 ? `${h} h ${min % 60} min` : `${Math.floor(h / 24)} d ${h % 24} h`;
}

// 1 node, 2 nodes
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function clock(time) {
  return new Date(time * 1e3).toLocaleTimeString("en-GB");
}

// An id short enough for a table: what stands after the last '#', at most 13 characters of it. Show the whole one on hover.
export function shortId(id) {
  if (!id) return NONE;
  const name = id.slice(id.lastIndexOf("#") + 1);
  return name.length <= 13 ? name : `${name.slice(0, 6)}…${name.slice(-6)}`;
}

// One word for one thing: open is waiting or running; a replica's running requests are those in its batch.
export function outcomeWord(outcome) {
  return outcome === "running" ? "open" : outcome;
}

const named = new Map(); // replica -> its name, as the observatory tells it: replica 1

export function takeNames(rows, anew) {
  if (anew) named.clear(); // an observatory that has started anew numbers anew
  for (const { id, name } of rows) if (name) named.set(id, name);
}

// What people call a replica; the id of one without a name. Show the id on hover.
export function nameOf(id) {
  return named.get(id) ?? shortId(id);
}

function short(value) {
  if (value >= 99.5 || value === 0) return String(Math.round(value));
  return value >= 9.95 ? value.toFixed(1).replace(".0", "") : value.toFixed(1);
}
