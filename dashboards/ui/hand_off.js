// With prefill and decode apart: which replica computed the prompt and why, what either way would have cost, how the K/V came.

import { html } from "./vendor/htm/preact_standalone.js";
import { bytes, count, millis, seconds, shortId } from "./format.js";
import { Scroller } from "./panel.js";
import { Id, Table, number } from "./table.js";
import { DECODE_REPLICA } from "./terms.js"; // made by the server from routing/terms.py

const REASONS = {
  hand_off_costs_less: "handing the prompt over costs less",
  hand_off_always: "every prompt is handed over (transfer.hand_off)",
  local_costs_less: "computing the prompt where it decodes costs less",
  no_prefill_replica: "no prefill replica may take it",
  needs_one_replica: "the request needs one replica",
};

const FORMAT = { s: millis, tokens: count, bytes };
const SUMS = { local_cost_s: true, receive_cost_s: true };
const SHOWN = ["cached_tokens", "transfer_bytes", "slower_s", "ttft_s", "stall_s", "local_cost_s",
  "transfer_s", "overhead_s", "load_s", "pressure_s", "receive_cost_s"];

const COLUMNS = [
  ["replica", (one) => html`<${Id} id=${one.replica_id} />`],
  ...SHOWN.map((field) => DECODE_REPLICA.find((term) => term.field === field)).map(({ field, heading, unit, meaning }) => {
    const shown = (one) => FORMAT[unit](one[field]);
    return SUMS[field] ? number(`= ${heading}`, (one) => html`<strong>${shown(one)}</strong>`, meaning) : number(heading, shown, meaning);
  }),
];

export function PairTable({ pair }) {
  const link = `${bytes(pair.link_bytes_per_s)}/s, ${pair.link_measured ? "measured" : "assumed"}`;
  const part = pair.best_prefill ? `, of it ${seconds(pair.prefill_s)} at ${shortId(pair.best_prefill)}` : "";
  return html`<h3>Prefill and decode</h3>
    <p class="pair-line">
      ${pair.prefill && html`<${Id} id=${pair.prefill} /> computes, `}<${Id} id=${pair.decode} /> ${pair.prefill ? "decodes" : "does both"}:
      ${" "}${REASONS[pair.reason] ?? pair.reason}${pair.why ? `, ${pair.why}` : ""}.
      Handed over it costs <strong>${seconds(pair.hand_off_cost_s)}</strong>${part}; computed where it decodes,
      ${" "}<strong>${seconds(pair.local_cost_s)}</strong>. Link: ${link}.
    </p>
    <${Scroller} label="Decode replicas">
      <${Table} kind="candidates" columns=${COLUMNS} rows=${pair.decode_replicas} keyOf=${(one) => one.replica_id}
        chosen=${(one) => one.replica_id === pair.decode} caption="Decode replicas: cost either way, in ms" />
    <//>`;
}

export function HandOff({ each }) {
  const { hand_off: report, prefill_end: end, held_out: held } = each;
  const skipped = Object.entries(held ?? {});
  return html`
    ${(report || end) && html`<p class=${report?.transferred === false ? "pair-line warn" : "pair-line"}>
      ${report && (report.transferred
        ? `${count(report.num_pages)} pages (${bytes(report.num_bytes)}) came over: `
        : `The hand-off failed (${report.reason}); the prompt was computed where it decodes: `)}
      ${report && `room after ${seconds(report.grant_s)}, all there ${seconds(report.wait_s)} later, ${seconds(report.transfer_s)} from first page to last. `}
      ${end && `The prefill leg: ${end}.`}
    </p>`}
    ${skipped.length > 0 && html`<p class="pair-line warn">Not asked after earlier failures: ${skipped.map(([id, why]) => `${shortId(id)} (${why})`).join(", ")}.</p>`}`;
}
