// Every replica that could have taken the request, with each term of its expected time to the first token.

import { html } from "./vendor/htm/preact_standalone.js";
import { count, millis, percent, seconds } from "./format.js";
import { Scroller } from "./panel.js";
import { Legend } from "./pools.js";
import { Id, Table, number } from "./table.js";

const TERMS = [
  ["queue", "prompt tokens that are computed before"],
  ["own", "its own tokens that are not cached there"],
  ["decode", "the decode step in progress"],
  ["pressure", "wait for pages or a place"],
];

export function Candidates({ each }) {
  const highest = Math.max(...each.candidates.map((one) => one.ttft_s ?? 0), 1e-9);
  const roles = new Set(each.candidates.map((one) => one.role)).size > 1;
  const columns = [
    ["replica", (one) => html`<${Id} id=${one.replica} />${roles && html`<br /><span class="note">${one.role}</span>`}`],
    number("cached", (one) => count(one.cached_tokens), "prompt tokens held there"),
    number("to do", (one) => count(one.own_tokens), "prompt tokens to compute there"),
    ...TERMS.map(([name, meaning]) => number(name, (one) => millis(one[`${name}_s`]), meaning)),
    number("= TTFT", (one) => html`<strong>${millis(one.ttft_s)}</strong><${Bar} one=${one} highest=${highest} />`, "expected"),
    number("others", (one) => millis(one.behind_s), "what it takes from others"),
    number("queued", (one) => count(one.queued_tokens), "prompt tokens of others, not computed yet"),
    number("reqs", (one) => count(one.num_requests)),
    number("pool", (one) => percent(one.pool_utilization)),
    number("age", (one) => seconds(one.report_age_s), "of the replica's report"),
  ];
  return html`<${Scroller} label="Candidates">
      <${Table} kind="candidates" columns=${columns} rows=${each.candidates} keyOf=${(one) => one.replica}
        chosen=${(one) => one.chosen} caption="Candidates: expected time to first token, in ms" />
    <//>
    <${Legend} entries=${TERMS.map(([name, meaning]) => [`${name} term`, meaning])} label="Terms" />`;
}

function Bar({ one, highest }) {
  const width = (name) => `${(100 * (one[`${name}_s`] ?? 0)) / highest}%`;
  return html`<span class="terms" aria-hidden="true">
    ${TERMS.map(([name]) => html`<span key=${name} class=${`part ${name} term`} style=${{ width: width(name) }}></span>`)}
  </span>`;
}
