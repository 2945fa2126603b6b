// Transfers of K/V between prefill and decode replicas: lines between their cards, and the same as a table, which is what
// a narrow screen shows and a screen reader reads.

import { html, useLayoutEffect, useState } from "./vendor/htm/preact_standalone.js";
import { bytes, rate } from "./format.js";
import { once } from "./panel.js";
import { Id, Table, number } from "./table.js";

const MOST_ROWS = 12; // of the table
const WIDEST = 10; // px, of the line with the highest rate

export const TransferLines = once(({ links, frame, order }) => {
  const [places, setPlaces] = useState(null);
  useLayoutEffect(() => {
    const measure = () => setPlaces((before) => changed(before, placesOf(frame.current)));
    const watch = new ResizeObserver(measure);
    watch.observe(frame.current);
    frame.current.querySelectorAll("[data-replica]").forEach((card) => watch.observe(card));
    measure();
    return () => watch.disconnect();
  }, [order.map((each) => each.id).join()]);
  if (!places || places.right <= places.left) return null; // one column: the table shows them
  const highest = Math.max(...links.map((each) => each.bytes_per_s), 1);
  return html`<svg class="lines" width=${places.width} height=${places.height} aria-hidden="true">
    ${links.map((link) => {
      const [from, to] = [places.middle[link.from], places.middle[link.to]];
      if (from === undefined || to === undefined) return null;
      const { left, right } = places;
      const bend = (right - left) / 2;
      const kind = link.failed_per_s > 0 ? "line failed" : link.bytes_per_s > 0 ? "line" : "line idle";
      return html`<path
        key=${`${link.from} ${link.to}`}
        class=${kind}
        d=${`M${left} ${from}C${left + bend} ${from} ${right - bend} ${to} ${right} ${to}`}
        stroke-width=${Math.max(1.5, (WIDEST * link.bytes_per_s) / highest).toFixed(1)}
      ><title>${told(link)}</title></path>`;
    })}
  </svg>`;
});

const COLUMNS = [
  ["from", (link) => html`<${Id} id=${link.from} />`],
  ["to", (link) => html`<${Id} id=${link.to} />`],
  number("rate", (link) => `${bytes(link.bytes_per_s)}/s`),
  number("per s", (link) => rate(link.hand_offs_per_s)),
  number("failed", (link) => rate(link.failed_per_s)),
];

export const TransferTable = once(({ links }) => {
  if (!links.length) return html`<p class="note">No K/V was handed over in the last 10 s.</p>`;
  const busiest = [...links].sort((a, b) => b.bytes_per_s - a.bytes_per_s).slice(0, MOST_ROWS);
  const caption = links.length > MOST_ROWS ? `KV transfers, last 10 s: the ${MOST_ROWS} busiest of ${links.length} pairs` : "KV transfers, last 10 s";
  return html`<div class="transfers"><${Table} columns=${COLUMNS} rows=${busiest} keyOf=${(link) => `${link.from} ${link.to}`} caption=${caption} /></div>`;
});

function told(link) {
  const failed = link.failed_per_s ? `, ${rate(link.failed_per_s)} failed/s` : "";
  return `${link.from} → ${link.to}: ${bytes(link.bytes_per_s)}/s, ${rate(link.hand_offs_per_s)} hand-offs/s${failed}`;
}

// Where lines start and end, in px from the frame's corner: right edges of prefill cards, left edges of decode cards.
function placesOf(frame) {
  const corner = frame.getBoundingClientRect();
  const [prefill, decode] = frame.querySelectorAll(".cards");
  const middle = {};
  for (const card of frame.querySelectorAll("[data-replica]")) {
    const box = card.getBoundingClientRect();
    middle[card.dataset.replica] = Math.round(box.top + box.height / 2 - corner.top);
  }
  return {
    width: Math.round(corner.width),
    height: Math.round(corner.height),
    left: Math.round(prefill.getBoundingClientRect().right - corner.left),
    right: Math.round(decode.getBoundingClientRect().left - corner.left),
    middle,
  };
}

function changed(before, after) {
  return JSON.stringify(before) === JSON.stringify(after) ? before : after;
}
