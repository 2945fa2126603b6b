// The stages of a request as bars, alike in the list and in the timeline. Stages are consecutive.

import { html } from "./vendor/htm/preact_standalone.js";
import { seconds } from "./format.js";

export const STAGES = [
  ["route", "arrival until the router had sent it"],
  ["queue", "waiting at the replica"],
  ["prefill", "computing the prompt"],
  ["transfer", "K/V on its way from prefill to decode"],
  ["decode", "after the first token"],
];

const DRAWN = ["route", "queue", "prefill", "transfer", "decode"];

// One line: all stages on a scale of `scale` seconds, the first token marked.
export function Waterfall({ row, scale, now }) {
  if (row.stages === null) {
    const elapsed = row.total_s ?? (row.outcome === "running" ? Math.max(0, now - row.time) : 0);
    return html`<div class="waterfall" role="img" aria-label=${`${row.outcome}, ${seconds(elapsed)} so far`}>
      <span class="stage running" style=${place(0, elapsed, scale)}></span>
    </div>`;
  }
  const said = DRAWN.map((name) => `${name} ${seconds(row.stages[`${name}_s`])}`).join(", ");
  return html`<div class="waterfall" role="img" aria-label=${said} title=${said}>
    ${spans(row.stages).map(([name, from, long]) => html`<span key=${name} class=${`stage ${name}`} style=${place(from, long, scale)}></span>`)}
    ${row.ttft_s != null && html`<span class="first-token" style=${{ left: `${share(row.ttft_s, scale)}%` }}></span>`}
  </div>`;
}

// A line a stage, with its time.
export function Timeline({ row }) {
  if (row.stages === null) return html`<p class="note">Stages are known once the request has finished.</p>`;
  const total = row.total_s || 1;
  return html`<div class="timeline">
    ${spans(row.stages).map(
      ([name, from, long]) => html`<div class="timeline-row" key=${name}>
        <span>${name}</span><span class="num">${seconds(long)}</span>
        <span class="waterfall"><span class=${`stage ${name}`} style=${place(from, long, total)}></span>
          ${row.ttft_s != null && html`<span class="first-token" style=${{ left: `${share(row.ttft_s, total)}%` }}></span>`}</span>
      </div>`,
    )}
    <p class="note">first token after ${seconds(row.ttft_s)}, last after ${seconds(row.total_s)}</p>
  </div>`;
}

function spans(stages) {
  let from = 0;
  return DRAWN.map((name) => {
    const long = stages[`${name}_s`] ?? 0;
    from += long;
    return [name, from - long, long];
  }).filter(([, , long]) => long > 0);
}

function place(from, long, scale) {
  return { left: `${share(from, scale)}%`, width: `${share(long, scale)}%` };
}

function share(value, scale) {
  return Math.min(100, (value / (scale || 1)) * 100);
}
