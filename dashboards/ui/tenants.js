// Whose requests the replicas serve, a line a tenant, and how far batches are. Shown where there are any.

import { html } from "./vendor/htm/preact_standalone.js";
import { count, percent, span } from "./format.js";
import { Panel, once } from "./panel.js";
import { Table, number } from "./table.js";

const MOST_ROWS = 12, WINDOW_S = 60;

// A row a tenant, those who used most tokens first, and one for all that are too many. Pure.
export function tenantsOf(requests, time) {
  const found = new Map();
  const of = (tenant) => found.get(tenant) ?? found.set(tenant, { tenant, waiting: 0, running: 0, tokens: 0 }).get(tenant);
  const add = (tenant, more) => Object.entries(more).forEach(([name, value]) => (of(tenant)[name] += value));
  for (const { tenant, outcome, ...row } of requests) {
    const open = outcome === "running";
    if (!tenant || (!open && row.time + (row.total_s ?? 0) < time - WINDOW_S)) continue;
    const computed = row.cached_tokens == null ? 0 : row.prompt_tokens - row.cached_tokens;
    add(tenant, { waiting: open && row.ttft_s == null, running: open && row.ttft_s != null, tokens: computed + row.output_tokens });
  }
  const rows = [...found.values()].sort((a, b) => b.tokens - a.tokens);
  const all = rows.reduce((sum, each) => sum + each.tokens, 0) || 1;
  const rest = rows.splice(MOST_ROWS), name = `${rest.length} others`;
  for (const { tenant, ...more } of rest) add(name, more);
  return [...rows, ...(rest.length ? [of(name)] : [])].map((each) => ({ ...each, share: each.tokens / all }));
}

const bar = (share) => html`<span class="rate-bar" style=${{ width: `${100 * share}%` }}></span>`;
const doneOf = ({ total, completed, failed }) => (completed + failed) / (total || 1);
const TENANTS = [
  ["tenant", (each) => each.tenant], number("waiting", (each) => count(each.waiting)),
  ["tokens, open and last minute", (each) => bar(each.share)], number("running", (each) => count(each.running)),
  number("share", (each) => percent(each.share)), number("tokens", (each) => count(each.tokens), "computed of prompts, and made"),
];
const batchesAt = (time) => [
  ["batch", (each) => html`<span title=${each.id}>${each.id.slice(0, 12)}</span>`], ["status", (each) => each.status.replace("_", " ")],
  ["lines", (each) => bar(doneOf(each))], number("done", (each) => percent(doneOf(each))),
  number("of", (each) => count(each.total)), number("failed", (each) => html`<span class=${each.failed ? "bad" : ""}>${count(each.failed)}</span>`),
  number("expires in", (each) => span(Math.max(0, each.expires_at - time))),
];

export const Tenants = once(({ requests, batches, time }) => {
  const tenants = tenantsOf(requests, time);
  if (!tenants.length && !batches.length) return null;
  return html`<${Panel} id="tenants" title=${tenants.length ? "Tenants" : "Batches"}>
    ${tenants.length > 0 && html`<${Table} kind="transfers" columns=${TENANTS} rows=${tenants} keyOf=${(each) => each.tenant} caption="Of the requests that are shown here" />`}
    ${batches.length > 0 && html`<${Table} kind="transfers" columns=${batchesAt(time)} rows=${batches} keyOf=${(each) => each.id} caption="Batches that routers run" />`}
  <//>`;
});
