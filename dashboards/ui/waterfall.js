// The stages of a request as a bar of one line. Stages are consecutive.

import { html } from "./vendor/htm/preact_standalone.js";
import { seconds } from "./format.js";
import { stagesAt } from "./river_layout.js";

// Seconds from arrival to the end, or until `now`.
export function lengthOf(row, now) {
  return row.total_s ?? (row.outcome === "running" ? Math.max(0.001, now - row.time) : 0.001);
}

// One line: all stages on a scale of `scale` seconds, the first token marked; what is longer than the scale ends in a mark.
export function Waterfall({ row, scale, now }) {
  const drawn = stagesAt(row, now);
  const said = drawn.map(([name, start, end]) => `${name} ${seconds(end - start)}`).join(", ") || row.outcome;
  return html`<div class="waterfall" role="img" aria-label=${said} title=${said}>
    ${drawn.map(([name, start, end]) => html`<span key=${name} class=${`stage ${name}`} style=${place(start, end, scale)}></span>`)}
    ${row.ttft_s != null && row.ttft_s <= scale && html`<span class="first-token" style=${{ left: share(row.ttft_s, scale) }}></span>`}
    ${lengthOf(row, now) > scale * 1.001 && html`<span class="beyond"></span>`}
  </div>`;
}

// Where a part from one moment to another is on a bar that ends at `end`.
export function place(from, to, end) {
  return { left: share(from, end), width: share(to - from, end) };
}

export function share(value, end) {
  return `${Math.min(100, (100 * value) / (end || 1))}%`;
}
