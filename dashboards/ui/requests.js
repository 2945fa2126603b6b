// The requests of the last ten minutes, newest first: a line each with its stages; choosing one explains it (why.js).
// Invariant: only the lines in view are in the document, and none moves while the pointer or the focus is in the list, or
// while it is scrolled: what is new waits above.

import { html, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm/preact_standalone.js";
import { clock, count, nameOf, outcomeWord, percent, plural, seconds } from "./format.js";
import { Copy, Notice, Panel, once } from "./panel.js";
import { Id } from "./table.js";
import { Waterfall, lengthOf } from "./waterfall.js";

const OUTCOMES = ["running", "ok", "error", "invalid", "cancelled", "shed", "timeout", "unknown"];
const KINDS = {
  slow: ["Slow", "missed its objective for TTFT or ITL"],
  mispredicted: ["Missed prediction", "fewer tokens were cached than the router had predicted"],
  retried: ["Retried", "more than one try"],
  stuck: ["Stuck", "runs, and its last token came longer ago than five of its gaps, and than two seconds"],
};
const ROW = 30; // px
const IN_VIEW = 14; // lines
const BEYOND = 6; // lines drawn above and below those in view
const WORDS = /(?:replica|prefill|decode) \d+|\S+/g; // a replica's name is one
const TEXT_ORDER = new Intl.Collator("en", { numeric: true }).compare; // replica 2, replica 10
const STUCK_S = 2; // without a token, and
const STUCK_GAPS = 5; // as many mean gaps between its tokens
const SCALED_BY = 400; // newest requests that the scale of the bars is taken from

// Seconds since the last token of a request that runs, as of `now`; null before its first. Pure.
export function silentFor(row, now) {
  return row.outcome === "running" && row.last_s != null ? Math.max(0, now - row.time - row.last_s) : null;
}

export function isStuck(row, now) {
  return silentFor(row, now) > Math.max(STUCK_S, STUCK_GAPS * (row.itl_s ?? 0)); // null is less
}

// Is `row` among those asked for? Pure.
export function matches(row, { text = "", outcome = "", replica = "", kinds = [] }, now) {
  if (outcome && row.outcome !== outcome) return false;
  if (replica && row.replica !== replica && row.prefill !== replica) return false;
  const is = { slow: row.missed?.length > 0, retried: row.tries > 1, stuck: isStuck(row, now),
    mispredicted: row.cached_tokens != null && row.cached_tokens < row.predicted_tokens };
  if (!kinds.every((each) => is[each])) return false;
  const words = text.toLowerCase().match(WORDS);
  if (!words) return true;
  const names = [nameOf(row.replica), nameOf(row.prefill)];
  const where = [...names, row.rid, row.replica, row.prefill, row.caller, row.session, row.finish, row.endpoint, row.policy, row.reason, row.outcome, outcomeWord(row.outcome)].join(" ").toLowerCase();
  return words.every((each) => (each.includes(" ") ? names.includes(each) : where.includes(each))); // replica 1 is not replica 10
}

const HEADS = ["time", "request", "replica", "key", "prompt", "cached", "output", "finish", "TTFT", "ITL", "total"];
const TEXTS = ["time", "request", "replica", "key", "finish"]; // set to the left
const FIELDS = { time: "time", replica: "replica", key: "caller", finish: "finish", prompt: "prompt_tokens", cached: "cached_tokens", output: "output_tokens", TTFT: "ttft_s", ITL: "itl_s", total: "total_s" };
const NEWEST = ["time", -1]; // the list is ordered by a column, upwards (1) or downwards

// The cached share of a prompt; null where it is not known.
function reusedOf({ prompt_tokens: prompt, cached_tokens: cached }) {
  return cached == null || !prompt ? null : cached / prompt;
}

// `rows`, which come newest first, in an order; those without a value are last. Pure.
export function ordered(rows, [column, sign]) {
  if (column === "time" && sign < 0) return rows;
  const value = (row) => (column === "cached" ? reusedOf(row) : column === "replica" ? nameOf(row.replica) : row[FIELDS[column]]) ?? null;
  return [...rows].sort((a, b) => {
    const [one, two] = [value(a), value(b)];
    return one === two ? 0 : one === null ? 1 : two === null ? -1 : sign * (typeof one === "string" ? TEXT_ORDER(one, two) : one - two);
  });
}

// Seconds at the end of a bar: 95 of 100 fit, and one very long request does not make all others thin. Pure.
export function scaleOf(rows, now) {
  const lengths = rows.slice(0, SCALED_BY).map((each) => lengthOf(each, now)).sort((a, b) => a - b);
  return lengths[Math.floor(0.95 * (lengths.length - 1))] || 0.001;
}

export const Requests = once(({ requests, replicas, model, api, now, chosen, choose }) => {
  const [filter, setFilter] = useState({ text: "", outcome: "", replica: "", kinds: [] });
  const change = (part) => setFilter((before) => ({ ...before, ...part }));
  const [left, setLeft] = useState(""); // replica that was filtered by and is gone
  const gone = filter.replica !== "" && !replicas.some((each) => each.id === filter.replica);
  useLayoutEffect(() => {
    if (!gone) return;
    setLeft(filter.replica);
    change({ replica: "" });
  }, [gone]);
  const [held, hold] = useHold(requests);
  const [order, setOrder] = useState(NEWEST);
  const shown = useMemo(() => ordered((held ?? requests).filter((each) => matches(each, filter, now)), order), [held ?? requests, filter, order, filter.kinds.includes("stuck") && now]);
  const isNew = held && order === NEWEST && requests.findIndex((each) => each.rid === held[0]?.rid);
  const all = (held ?? requests).length;
  const note = requests.length > 0 && `${shown.length === all ? "" : `${count(shown.length)} of `}the newest ${count(all)}`;
  return html`<${Panel} id="requests" title="Requests" note=${note}>
    ${requests.length === 0 ? html`<${NoRequests} model=${model} api=${api} />` : html`
    <${Filters} filter=${filter} replicas=${replicas} onChange=${(part) => { setLeft(""); change(part); }}
      told=${left && `${nameOf(left)} has left: requests of all replicas are shown`} />
    ${shown.length === 0 ? html`<${Notice} title=${`None of the last ${plural(requests.length, "request")} matches.`} />`
      : html`<${List} rows=${shown} now=${now} chosen=${chosen} choose=${choose} hold=${hold} isNew=${isNew} order=${order} onOrder=${setOrder} />`}`}
  <//>`;
});

function Filters({ filter, replicas, onChange, told }) {
  const toggle = (kind) => onChange({ kinds: filter.kinds.includes(kind) ? filter.kinds.filter((each) => each !== kind) : [...filter.kinds, kind] });
  return html`<div class="controls">
    <input type="search" placeholder="Filter: id, replica, policy" aria-label="Filter requests" value=${filter.text}
      onInput=${(event) => onChange({ text: event.target.value })} title="/" />
    <select aria-label="Outcome" value=${filter.outcome} onChange=${(event) => onChange({ outcome: event.target.value })}>
      <option value="">any outcome</option>${OUTCOMES.map((each) => html`<option key=${each} value=${each}>${outcomeWord(each)}</option>`)}
    </select>
    <select aria-label="Replica" value=${filter.replica} onChange=${(event) => onChange({ replica: event.target.value })}>
      <option value="">any replica</option>${replicas.map((each) => html`<option key=${each.id} value=${each.id}>${nameOf(each.id)}</option>`)}
    </select>
    ${Object.entries(KINDS).map(([kind, [name, title]]) => html`<button type="button" key=${kind} title=${title}
      aria-pressed=${filter.kinds.includes(kind)} onClick=${() => toggle(kind)}>${name}</button>`)}
    <span class="note" role="status">${told}</span>
  </div>`;
}

// [rows as they were when they were held, kept up to date | null, hold(why, holds)]
function useHold(requests) {
  const [rids, setRids] = useState(null);
  const newest = useRef(requests);
  newest.current = requests;
  const reasons = useRef(new Set()).current;
  const hold = useRef((why, holds) => {
    if (holds) reasons.add(why);
    else reasons.delete(why);
    setRids((before) => (reasons.size === 0 ? null : (before ?? newest.current.map((each) => each.rid))));
  }).current;
  const held = useMemo(() => {
    if (!rids) return null;
    const known = new Map(requests.map((each) => [each.rid, each]));
    return rids.map((rid) => known.get(rid)).filter(Boolean);
  }, [rids, requests]);
  return [held, hold];
}

function List({ rows, now, chosen, choose, hold, isNew, order, onOrder }) {
  const place = useRef(null);
  const [top, setTop] = useState(0); // first line in view
  const at = rows.findIndex((each) => each.rid === chosen);
  const from = Math.max(0, Math.min(top, rows.length - IN_VIEW) - BEYOND);
  const drawn = rows.slice(from, from + IN_VIEW + 2 * BEYOND);
  const scale = scaleOf(rows, now);
  const stop = drawn.some((each) => each.rid === chosen) ? chosen : drawn[0]?.rid;
  useLayoutEffect(() => {
    if (at < 0) return;
    const frame = place.current;
    if (at * ROW < frame.scrollTop) frame.scrollTop = at * ROW;
    else if ((at + 2) * ROW > frame.scrollTop + frame.clientHeight) frame.scrollTop = (at + 2) * ROW - frame.clientHeight;
  }, [chosen]);
  useLayoutEffect(() => {
    if (document.activeElement?.closest("#requests tbody")) place.current.querySelector(`[data-rid="${CSS.escape(chosen ?? "")}"]`)?.focus();
  }, [chosen]);
  const onScroll = (event) => {
    const { scrollTop } = event.target;
    setTop(Math.floor(scrollTop / ROW));
    hold("scrolled", scrollTop > 0);
  };
  const onKey = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.closest("tbody")) return;
    event.preventDefault();
    const next = rows[rows.findIndex((each) => each.rid === event.target.dataset.rid) + step];
    if (next) choose({ request: next.rid });
  };
  const release = () => ["scrolled", "over", "focus"].forEach((why) => hold(why, false));
  useLayoutEffect(() => release, []); // a list that is taken away hears of no pointer that leaves it
  const toNew = () => {
    place.current.scrollTop = 0;
    release();
  };
  return html`<div class="request-frame">
    ${isNew > 0 && html`<button type="button" class="news" onClick=${toNew}>${count(isNew)} new</button>`}
    <div class="scroller tall" ref=${place} role="region" aria-label="List of requests" tabindex="-1" onScroll=${onScroll} onKeyDown=${onKey}
        onPointerEnter=${() => hold("over", true)} onPointerLeave=${() => hold("over", false)}
        onfocusin=${() => hold("focus", true)} onfocusout=${() => hold("focus", false)}>
      <table class=${`requests${drawn.some((each) => each.prefill) ? " apart" : ""}${rows.some((each) => each.caller) ? "" : " keyless"}`} aria-rowcount=${rows.length + 1}>
        <thead><tr>${HEADS.map((name) => html`<${Head} key=${name} name=${name} order=${order} onOrder=${onOrder} />`)}
          <th class="c-stages">stages <span title="at the end of the bars; the mark in one is its first token">${seconds(scale)}</span></th></tr></thead>
        <tbody>
          ${from > 0 && html`<tr class="gap" key="above" aria-hidden="true" style=${{ height: `${from * ROW}px` }}></tr>`}
          ${drawn.map((row, index) => html`<${Row} key=${row.rid} row=${row} index=${from + index + 2} chosen=${row.rid === chosen} stop=${row.rid === stop}
            choose=${choose} scale=${scale} now=${row.outcome === "running" ? now : 0} />`)}
          ${from + drawn.length < rows.length && html`<tr class="gap" key="below" aria-hidden="true" style=${{ height: `${(rows.length - from - drawn.length) * ROW}px` }}></tr>`}
        </tbody>
      </table>
    </div>
  </div>`;
}

// Of a column that the list can be ordered by: its highest (of words, the first) on top, then the other way, then the
// newest again.
function Head({ name, order: [column, sign], onOrder }) {
  const kind = `${TEXTS.includes(name) ? "" : "num "}c-${name === "request" ? "rid" : name.toLowerCase()}`;
  if (!FIELDS[name]) return html`<th class=${kind}>${name}</th>`;
  const steps = name === "time" ? [NEWEST, ["time", 1]] : TEXTS.includes(name) ? [[name, 1], [name, -1], NEWEST] : [[name, -1], [name, 1], NEWEST];
  const at = steps.findIndex((each) => each[0] === column && each[1] === sign);
  const mark = column === name && html`<span aria-hidden="true">${sign > 0 ? "▴" : "▾"}</span>`;
  return html`<th class=${kind} aria-sort=${mark ? (sign > 0 ? "ascending" : "descending") : null}>
    <button type="button" class="order" onClick=${() => onOrder(steps[(at + 1) % steps.length])}>${name}${mark}</button></th>`;
}

const Row = once(({ row, index, chosen, stop, choose, scale, now }) => {
  const { rid, outcome, missed } = row;
  const reused = reusedOf(row);
  const silent = silentFor(row, now);
  const slow = (what) => (missed?.includes(what) ? " warn" : "");
  return html`<tr class=${chosen ? "chosen" : ""} aria-rowindex=${index} onClick=${() => choose({ request: rid })}>
    <td class="c-time">${clock(row.time)}</td>
    <td class="c-rid"><button type="button" class="request-name" data-rid=${rid} tabindex=${stop ? 0 : -1} aria-pressed=${chosen} title=${[rid, row.endpoint, outcomeWord(outcome), row.session && `session ${row.session}`].filter(Boolean).join(", ")}>
      <span class=${`dot ${outcome}`} aria-hidden="true"></span>${rid}${outcome !== "ok" && html`<span class=${`outcome ${outcome}`}>${outcomeWord(outcome)}</span>`}</button></td>
    <td class="c-replica">${row.prefill && html`<${Id} id=${row.prefill} /> → `}<${Id} id=${row.replica} />${row.tries > 1 && html` <span class="warn" title=${`${row.tries} tries`}>×${row.tries}</span>`}</td>
    <td class="c-key" title="hash of the API key, as in the log">${row.caller ?? "–"}</td>
    <td class="num c-prompt">${count(row.prompt_tokens)}</td>
    <td class="num c-cached"><span class="reused" style=${{ width: percent(reused ?? 0).replace(" ", "") }}></span>${percent(reused)}</td>
    <td class=${`num c-output${isStuck(row, now) ? " warn" : ""}`} title=${silent == null ? null : `last token ${seconds(silent)} ago`}>${count(row.output_tokens)}</td>
    <td class="c-finish">${row.finish ?? "–"}</td>
    <td class=${`num c-ttft${slow("ttft")}`}>${seconds(row.ttft_s)}</td>
    <td class=${`num c-itl${slow("itl")}`}>${seconds(row.itl_s)}</td>
    <td class="num c-total">${seconds(row.total_s)}</td>
    <td class="c-stages"><${Waterfall} row=${row} scale=${scale} now=${now} /></td>
  </tr>`;
});

function NoRequests({ model, api }) {
  const line = `curl ${location.origin}${(api ?? "").replace(/\/$/, "")}/v1/chat/completions -H 'Content-Type: application/json' -d '${JSON.stringify({
    model, messages: [{ role: "user", content: "Name three colours." }], max_tokens: 32 })}'`;
  return html`<${Notice} title="No requests yet. Type a prompt under Try, or send one:">
    <pre class="curl" tabindex="0">${line}</pre>
    <p><${Copy} text=${line} /></p>
  <//>`;
}
