// A decision as a sentence and as bars of milliseconds. Pure: knows no page.

import { count, nameOf, seconds } from "./format.js";
import { CANDIDATE, DECODE_REPLICA } from "./terms.js"; // made by the server from routing/terms.py

const BECAUSE = {
  soonest_first_token: "", // what follows says why
  only_candidate: "it was the only replica that could take the request",
  next_in_turn: "it was next in turn",
  drawn_at_random: "it was drawn at random",
  soonest_of_those_allowed: "of the replicas whose queue is short enough, its first token was expected first",
  lowest_cost: "the request costs least there",
  least_delay_for_all: "where the first token would have come sooner, computing the prefix again would have delayed other requests by more",
  longest_prefix: "it holds the longest part of the prompt",
  load_out_of_balance: "the load was out of balance, and it had the fewest requests",
  fewer_requests: "it had the fewest requests of those compared",
  fewer_queued_tokens: "it had the fewest prompt tokens waiting of those compared",
  same_session: "it had this session before, and is among the soonest",
  more_free_pages: "its estimate equals the best within the error of the rates, and it has the most free pages",
  tie_broken_at_random: "those compared were equally loaded, and it was drawn at random",
};
const PAIR_BECAUSE = {
  kv_transfer_costs_less: "handing the prompt over costs less",
  kv_transfer_always: "every prompt is handed over (transfer.disaggregation)",
  local_costs_less: "computing the prompt where it decodes costs less",
  no_prefill_replica: "no prefill replica can take it",
  needs_one_replica: "the request needs one replica",
};

// The parts of bars, fields in the order of the tables. A candidate's has what others pay too: it is compared.
const partsOf = (terms, sum) => terms.filter((term) => term.parts_of.includes(sum)).map(({ field }) => field);
const PARTS = partsOf(CANDIDATE, "cost_s");
const HANDED = ["prefill_s", ...partsOf(DECODE_REPLICA, "receive_cost_s")];
const LOCAL = partsOf(DECODE_REPLICA, "local_cost_s");

// [[field, from, to], ...] in seconds, without empty parts.
function barOf(fields, values) {
  const bar = [];
  let at = 0;
  for (const field of fields) {
    const from = at;
    at += values[field] ?? 0;
    if (at > from) bar.push([field, from, at]);
  }
  return bar;
}

const endOf = (bar) => bar.at(-1)?.[2] ?? 0;

// The candidates, the chosen one first, then the cheapest: [{ one, chosen, bar, total, more }], in seconds; `more` is how
// much more than the chosen one it costs.
export function costsOf(each) {
  const rows = each.candidates.map((one) => ({ one, chosen: one.replica === each.replica, bar: barOf(PARTS, one) }));
  for (const row of rows) row.total = endOf(row.bar);
  rows.sort((a, b) => b.chosen - a.chosen || a.total - b.total);
  return rows.map((row) => ({ ...row, more: row.total - rows[0].total }));
}

// With prefill and decode apart: both ways to serve it, the one taken first.
export function waysOf(pair) {
  const chosen = pair.decode_replicas.find((each) => each.replica_id === pair.decode) ?? {};
  const one = { ...chosen, prefill_s: pair.prefill_s };
  const handed = { name: "handed over", one, chosen: Boolean(pair.prefill), bar: barOf(HANDED, one) };
  const local = { name: "in one place", one, chosen: !pair.prefill, bar: barOf(LOCAL, one) };
  const rows = pair.prefill ? [handed, local] : pair.best_prefill ? [local, handed] : [local];
  for (const row of rows) row.total = endOf(row.bar);
  return rows.map((row) => ({ ...row, more: row.total - rows[0].total }));
}

// "2.3 × slower than predicted"; "as predicted" within a fifth.
export function against(value, than) {
  if (value == null || !than) return "";
  const times = value / than;
  if (times > 0.8 && times < 1.25) return "as predicted";
  return times > 1 ? `${factor(times)} × slower than predicted` : `${factor(1 / times)} × faster than predicted`;
}

function factor(times) {
  return times < 9.95 ? times.toFixed(1) : count(times);
}

// One sentence in plain words: where it went, what is cached there, when the first token was expected, and what another
// replica would have needed: the one that holds most of the prompt, if it was not taken, else the next best.
export function verdict(each) {
  const { predicted, pair, num_tokens: prompt, best_overlap: best } = each;
  const where = nameOf(each.replica);
  const expected = `first token was expected after ${seconds(predicted.ttft_s)}`;
  if (pair) {
    const how = pair.prefill ? `Prompt computed on ${nameOf(pair.prefill)}, answer decoded on ${where}` : `Prompt and answer computed on ${where}`;
    return `${how}: ${PAIR_BECAUSE[pair.reason] ?? words(pair.reason)}${pair.why ? `, ${pair.why}` : ""}. Its ${expected}.`;
  }
  const cached = predicted.cached_tokens > 0 ? `${count(predicted.cached_tokens)} of ${count(prompt)} prompt tokens are cached there`
    : best.cached_tokens > 0 ? `nothing of its prompt is cached there` : `nothing of its prompt was cached on any replica`;
  const why = BECAUSE[each.reason] ?? words(each.reason);
  const said = why ? `Sent to ${where}: ${why}; ${cached}, and its ${expected}`
    : `Sent to ${where}: ${cached}, ${predicted.cached_tokens > 0 ? "so" : "and"} its ${expected}`;
  const rows = costsOf(each);
  const other = (best.given_up > 0 && rows.find(({ one }) => one.replica === best.replica)) || rows[1];
  if (!other) return `${said}.`;
  const holds = best.given_up > 0 && other.one.replica === best.replica ? ` holds ${count(best.given_up)} tokens more, but` : "";
  const only = other.one.ttft_s < predicted.ttft_s && !holds ? "only " : "";
  return `${said}; ${nameOf(other.one.replica)}${holds} would have needed ${only}${seconds(other.one.ttft_s)}.`;
}

function words(name) {
  return name.replaceAll("_", " ");
}

// Round marks for an axis from 0 to `end` seconds: two to four of them.
export function ticksOf(end) {
  if (!(end > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(end / 2));
  const step = [5, 2.5, 2, 1].map((each) => each * power).find((each) => each <= end / 2);
  return Array.from({ length: Math.floor(end / step + 1e-9) }, (_, index) => (index + 1) * step);
}
