// Transfers of K/V from prefill to decode replicas: a line a pair, the busiest first, its rate as a bar.

import { html } from "./vendor/htm/preact_standalone.js";
import { bytes, rate } from "./format.js";
import { once } from "./panel.js";
import { Id, Table, number } from "./table.js";

const MOST_ROWS = 12;

export const TransferTable = once(({ links }) => {
  if (!links.length) return html`<p class="note">No K/V was handed over in the last 10 s.</p>`;
  const busiest = [...links].sort((a, b) => b.failed_per_s - a.failed_per_s || b.bytes_per_s - a.bytes_per_s).slice(0, MOST_ROWS);
  const highest = Math.max(...busiest.map((each) => each.bytes_per_s), 1);
  const columns = [
    ["from", (link) => html`<${Id} id=${link.from} />`],
    ["to", (link) => html`<${Id} id=${link.to} />`],
    ["K/V, last 10 s", (link) => html`<span class="rate-bar" style=${{ width: `${(100 * link.bytes_per_s) / highest}%` }}></span>`],
    number("rate", (link) => `${bytes(link.bytes_per_s)}/s`),
    number("per s", (link) => rate(link.kv_transfers_per_s)),
    number("failed", (link) => html`<span class=${link.failed_per_s > 0 ? "bad" : ""}>${rate(link.failed_per_s)}</span>`),
  ];
  const caption = links.length > MOST_ROWS ? `KV transfers: ${MOST_ROWS} of ${links.length} pairs` : "KV transfers";
  return html`<${Table} kind="transfers" columns=${columns} rows=${busiest} keyOf=${(link) => `${link.from} ${link.to}`} caption=${caption} />`;
});
