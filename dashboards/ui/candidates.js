// Every replica that could have taken the request, with each term of its expected time to the first token.

import { html } from "./vendor/htm/preact_standalone.js";
import { count, millis, percent, seconds } from "./format.js";
import { Scroller } from "./panel.js";
import { Legend } from "./pools.js";
import { Id, Table, number } from "./table.js";
import { CANDIDATE } from "./terms.js"; // made by the server from routing/terms.py: field, heading, unit, meaning

const TERMS = Object.fromEntries(CANDIDATE.map((term) => [term.field, term]));
const PARTS = ["queue_s", "own_s", "load_s", "decode_s", "pressure_s"].map((field) => TERMS[field]); // of the time to the first token
const FORMAT = { s: millis, tokens: count, requests: count, ratio: percent };

const column = (field, cell, sign = "") => {
  const { heading, unit, meaning } = TERMS[field];
  return number(`${sign}${heading}`, cell ?? ((one) => FORMAT[unit](one[field])), meaning);
};

export function Candidates({ each }) {
  const highest = Math.max(...each.candidates.map((one) => one.ttft_s ?? 0), 1e-9);
  const roles = new Set(each.candidates.map((one) => one.role)).size > 1;
  const below = each.candidates.some((one) => one.host_tokens || one.store_tokens);
  const columns = [
    ["replica", (one) => html`<${Id} id=${one.replica} />${roles && html`<br /><span class="note">${one.role}</span>`}`],
    column("cached_tokens"),
    ...(below ? ["host_tokens", "store_tokens"].map((field) => column(field)) : []),
    column("own_tokens"),
    ...PARTS.map(({ field }) => column(field)),
    column("ttft_s", (one) => html`<strong>${millis(one.ttft_s)}</strong><${Bar} one=${one} highest=${highest} />`, "= "),
    ...["behind_s", "queued_tokens", "num_requests", "pool_utilization"].map((field) => column(field)),
    column("report_age_s", (one) => seconds(one.report_age_s)),
  ];
  return html`<${Scroller} label="Candidates">
      <${Table} kind="candidates" columns=${columns} rows=${each.candidates} keyOf=${(one) => one.replica}
        chosen=${(one) => one.chosen} caption="Candidates: expected time to first token, in ms" />
    <//>
    <${Legend} entries=${PARTS.map(({ heading, meaning }) => [`${heading} term`, meaning])} label="Terms" />`;
}

function Bar({ one, highest }) {
  const width = (field) => `${(100 * (one[field] ?? 0)) / highest}%`;
  return html`<span class="terms" aria-hidden="true">
    ${PARTS.map(({ field, heading }) => html`<span key=${field} class=${`part ${heading} term`} style=${{ width: width(field) }}></span>`)}
  </span>`;
}
