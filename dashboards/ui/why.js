// Why the router sent the chosen request where it went: a sentence, what each replica would have cost as a bar, what was
// predicted and what came, each try, the KV transfer, and where the time went.

import { html, useLayoutEffect, useState } from "./vendor/htm/preact_standalone.js";
import { getJson } from "./connection.js";
import { against, costsOf, ticksOf, verdict, waysOf } from "./decision.js";
import { bytes, count, millis, nameOf, outcomeWord, percent, plural, seconds } from "./format.js";
import { Notice, Panel, once } from "./panel.js";
import { COLOURS } from "./pools.js";
import { silentFor } from "./requests.js";
import { stagesAt } from "./river_layout.js";
import { CANDIDATE, DECODE_REPLICA } from "./terms.js"; // made by the server from routing/terms.py
import { place, share } from "./waterfall.js";

const SHOWN = 8; // candidates drawn before one asks for all
const FORMAT = { s: seconds, tokens: count, requests: count, ratio: percent, bytes, pages: count, "tokens/s": count };
const MEANINGS = Object.fromEntries([...DECODE_REPLICA, ...CANDIDATE].map(({ field, meaning }) => [field, meaning]));
const IN_BARS = [...CANDIDATE, ...DECODE_REPLICA].filter((term) => term.parts_of.length);
const NAMES = { prefill_s: "prefill", ...Object.fromEntries(IN_BARS.map(({ field, heading, bar }) => [field, bar || heading])) };

// What is known of the chosen request, asked for anew when its outcome or its tries change:
// { body, keys, error, gone }: `body` is { row, page_keys, route }, `keys` the set of its page keys.
export function useDetails(rid, row) {
  const [known, setKnown] = useState({});
  useLayoutEffect(() => {
    if (!rid) {
      setKnown({});
      return undefined;
    }
    let stale = false;
    if (known.rid !== rid) setKnown({ rid });
    getJson(`api/requests/${encodeURIComponent(rid)}`).then(
      (body) => stale || setKnown({ rid, body, keys: new Set(body.page_keys ?? []) }),
      (error) => stale || setKnown((before) => ({ rid, body: before.body, keys: before.keys, error: error.message, gone: error.status === 404 })),
    );
    return () => {
      stale = true;
    };
  }, [rid, row?.outcome, row?.tries, row?.ttft_s == null]);
  return known.rid === rid ? known : {};
}

export const Why = once(({ rid, row, details, state }) => {
  if (!rid) return html`<${Panel} id="why" title="Why there?">
    <${Notice} title="Choose a request.">
      <p>This shows where the router could have sent it, what each replica would have cost, and what came of it.</p><//>
  <//>`;
  const { body, error, gone } = details;
  const known = row ?? body?.row;
  const route = body?.route;
  const title = known?.replica ? `Why ${nameOf(known.replica)}?` : "Why there?";
  return html`<${Panel} id="why" title=${title} note=${html`<code title="request id">${rid}</code>`}>
    ${gone && html`<${Notice} error title="This request is no longer kept.">
      <p>A router explains its last requests only (1,000), and forgets them when it ends.</p><//>`}
    ${error && !gone && html`<${Notice} error title=${`Its explanation cannot be shown: ${error}.`} />`}
    ${!body && !error && html`<p class="note">Asking the router …</p>`}
    ${body && !route && html`<${Notice} title="No router keeps this decision any longer." />`}
    ${route && html`<${Decision} key=${rid} route=${route} row=${known} time=${state.time} />`}
    ${known && html`<${Timeline} row=${known} time=${state.time} />`}
    ${route && html`<details><summary>As text</summary><pre class="as-text" tabindex="0">${route.explanation}</pre></details>`}
  <//>`;
});

// Why a request that waited moved, by `moved` of its try (routing/migration.py).
const MOVED = {
  join: "a replica had come", freed: "another one was free", silent: "this one was silent", behind: "this one was slower than estimated",
};

// The last try, or the one chosen of several.
function Decision({ route, row, time }) {
  const [picked, setPicked] = useState(null);
  const last = route.tries.length - 1;
  const at = Math.min(picked ?? last, last);
  const each = route.tries[at];
  return html`
    ${last > 0 && html`<${Tries} route=${route} row=${row} time=${time} at=${at} onPick=${setPicked} />`}
    <p class="sentence">${verdict(each)}</p>
    ${each.failure && html`<p class="sentence failed">This try failed: ${failureOf(each)}${at < last ? "; the next one went on from there" : ""}.</p>`}
    ${each.moved && html`<p class="sentence">It waited there, and moved to begin sooner: ${MOVED[each.moved]}.</p>`}
    ${each.pair ? html`<${Ways} each=${each} />` : html`<${Candidates} each=${each} />`}
    <${Outcome} each=${each} row=${row} />
    ${each.miss && html`<p class="sentence">Not cached: ${each.miss.words}.</p>`}`;
}

function failureOf({ failure, replica }) {
  return failure?.replace(`replica ${replica}`, nameOf(replica)).replace(replica, nameOf(replica));
}

// A line a try: when it ran, on one axis, and how it ended.
function Tries({ route, row, time, at, onPick }) {
  const times = row?.tries_at ?? [];
  const end = row?.total_s ?? Math.max(0, time - route.time);
  return html`<h3 id="tries-title">${plural(route.tries.length, "try").replace("trys", "tries")}</h3>
    <div class="tries" role="group" aria-labelledby="tries-title">
      ${route.tries.map((each, index) => {
        const { start_s: from = 0, end_s: to = null } = times[index] ?? {};
        const until = to ?? end;
        const how = failureOf(each) ?? outcomeWord(each.outcome);
        return html`<button type="button" key=${index} class="try-row" aria-pressed=${index === at} onClick=${() => onPick(index)}>
          <span>${index + 1}</span><span class="id" title=${each.replica}>${nameOf(each.replica)}</span>
          <span class="track" aria-hidden="true"><span class=${each.failure ? "ran failed" : "ran"} style=${place(from, until, end)}></span></span>
          <span class=${each.failure ? "bad" : "note"} title=${how}>${how}</span>
        </button>`;
      })}
    </div>`;
}

// One bar a candidate on one axis, the chosen one first.
function Candidates({ each }) {
  const [all, setAll] = useState(false);
  const rows = costsOf(each).map((row) => ({ ...row, id: row.one.replica, share: row.one.cached_tokens / each.num_tokens,
    note: `${count(row.one.cached_tokens)} of ${count(each.num_tokens)} cached` }));
  return html`<h3>Expected time to the first token, by replica</h3>
    <${Bars} label="Candidates" terms=${CANDIDATE} measured=${each.pair ? null : each.actual.ttft_s} predicted=${each.predicted.ttft_s} rows=${all ? rows : rows.slice(0, SHOWN)} />
    ${rows.length > SHOWN && html`<button type="button" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${rows.length}`}</button>`}`;
}

// With prefill and decode apart: handed over against computed in one place.
function Ways({ each }) {
  const { pair } = each;
  const rows = waysOf(pair).map((row) => ({ ...row, note: row.name === "handed over" ? `${nameOf(pair.best_prefill)} → ${nameOf(pair.decode)}` : nameOf(pair.decode) }));
  const link = `${bytes(pair.link_bytes_per_s)}/s, ${pair.link_measured ? "measured" : "assumed"}`;
  return html`<h3>Expected cost of both ways</h3>
    <${Bars} label="Ways" terms=${DECODE_REPLICA} rows=${rows} />
    <p class="note">Link between the replicas: ${link}.</p>
    <${PdTransfer} each=${each} />
    <details><summary>Candidates for the prompt</summary><${Candidates} each=${{ ...each, replica: pair.prefill ?? pair.decode }} /></details>`;
}

function PdTransfer({ each }) {
  const { kv_transfer: report, prefill_end: end, held_out: held } = each;
  const skipped = Object.entries(held ?? {});
  return html`
    ${report && html`<p class=${report.transferred ? "sentence" : "sentence failed"}>
      ${report.transferred
        ? `${plural(report.num_pages, "page")} (${bytes(report.num_bytes)}) were handed over in ${seconds(report.transfer_s)}. Room for them was made after ${seconds(report.grant_s)}, and the last came ${seconds(report.wait_s)} later.`
        : `The KV transfer failed (${report.reason}); the prompt was computed where it decodes.`}
    </p>`}
    ${end && !end.startsWith("handed off") && html`<p class="note">The prefill part ended: ${end}.</p>`}
    ${skipped.length > 0 && html`<p class="note">Not asked after earlier failures: ${skipped.map(([id, why]) => `${nameOf(id)} (${why})`).join(", ")}.</p>`}`;
}

// Rows { id | name, note, share, one, chosen, bar, total, more } over one axis; a row opens to all figures of `terms`.
// `measured` and `predicted` are marked on the chosen one.
function Bars({ rows, label, terms, measured, predicted }) {
  const [open, setOpen] = useState(null);
  const longest = Math.max(...rows.map((row) => row.total), 1e-9);
  const clipped = measured > 4 * longest;
  const end = 1.02 * (measured == null || clipped ? longest : Math.max(longest, measured));
  const marked = measured != null && predicted != null;
  const ticks = ticksOf(end);
  const names = new Map(rows.flatMap(({ bar }) => bar.map(([field]) => [NAMES[field], field])));
  return html`<div class="bars" role="list" aria-label=${label}>
      ${rows.map((row) => {
        const key = row.id ?? row.name;
        const name = row.id ? nameOf(row.id) : row.name;
        const said = row.bar.map(([field, from, to]) => `${NAMES[field]} ${seconds(to - from)}`).join(", ");
        return html`<div key=${key} role="listitem" class=${row.chosen ? "bar-row chosen" : "bar-row"}>
          <button type="button" class="bar-head" aria-expanded=${open === key} onClick=${() => setOpen(open === key ? null : key)}
            aria-label=${`${row.chosen ? "chosen: " : ""}${name}, ${row.note}, ${seconds(row.total)}${row.chosen ? "" : `, ${more(row.more)}`}: ${said}`}>
            <span class="bar-name"><strong class=${row.id ? "id" : ""} title=${row.id}>${name}</strong><span class="note">${row.note}</span>
              ${row.share > 0 && html`<span class="held" style=${{ width: `${100 * row.share}%` }}></span>`}</span>
            <span class="bar-track">
              ${ticks.map((tick) => html`<span key=${tick} class="tick" style=${{ left: share(tick, end) }}></span>`)}
              ${row.bar.map(([field, from, to]) => html`<span key=${field} class=${`cost ${field}`} style=${place(from, to, end)}></span>`)}
              ${row.chosen && marked && html`<span class="mark predicted" style=${{ left: share(predicted, end) }}></span>
                <span class=${clipped ? "mark measured clipped" : "mark measured"} style=${{ left: share(Math.min(measured, end), end) }}></span>`}
            </span>
            <span class="bar-end">${row.chosen ? seconds(row.total) : more(row.more)}</span>
          </button>
          ${open === key && html`<${Parts} row=${row} terms=${terms} />`}
        </div>`;
      })}
      <div class="bar-axis" aria-hidden="true"><span></span><span class="bar-track">
        ${ticks.map((tick) => html`<span key=${tick} class="tick-name" style=${{ left: share(tick, end) }}>${seconds(tick).replace(/\.0+ s/, " s")}</span>`)}</span><span></span></div>
    </div>
    <ul class="legend" aria-label="Parts of a bar">
      ${[...names].map(([name, field]) => html`<li key=${name} title=${MEANINGS[field]}><span class=${`swatch cost ${field}`} aria-hidden="true"></span>${name}</li>`)}
      ${marked && html`<li><span class="mark predicted"></span>predicted</li><li><span class="mark measured"></span>measured</li>`}
    </ul>`;
}

// All figures of one row: the parts of its bar first.
function Parts({ row: { one, bar }, terms }) {
  const drawn = bar.map(([field, from, to]) => [field, NAMES[field], seconds(to - from), MEANINGS[field] ?? "the prefill replica: its queue, and the prompt"]);
  const rest = terms.filter(({ field }) => one[field] && !bar.some(([name]) => name === field));
  return html`<dl class="parts">
    ${[...drawn, ...rest.map(({ field, heading, unit, meaning }) => [field, heading, FORMAT[unit](one[field]), meaning])].map(([field, name, value, meaning], index) => html`<div key=${field}>
      <dt>${index < bar.length && html`<span class=${`swatch cost ${field}`} aria-hidden="true"></span>`}${name}</dt><dd class="num">${value}</dd><dd class="note">${meaning}</dd></div>`)}
  </dl>`;
}

function more(delta) {
  return `${delta < 0 ? "−" : "+"}${millis(Math.abs(delta))} ms`;
}

// What was predicted against what came, and what was given up.
function Outcome({ each, row }) {
  const { predicted, actual, best_overlap: best, num_tokens: prompt } = each;
  const missed = row?.missed ?? [];
  const tiers = [["host_tokens", "host memory"], ["store_tokens", "the store"]]
    .filter(([field]) => actual[field]).map(([field, name]) => `${count(actual[field])} of them from ${name}`).join(", ");
  const lines = [
    ["first token", predicted.ttft_s, actual.ttft_s, seconds, against(actual.ttft_s, predicted.ttft_s)],
    ["cached", predicted.cached_tokens, actual.cached_tokens, count, tiers || `of ${plural(prompt, "prompt token")}`],
  ];
  return html`<h3>Did it come true?</h3>
    <table class="came"><thead><tr><th></th><th scope="col" class="num">predicted</th><th scope="col" class="num">measured</th><th></th></tr></thead>
      <tbody>${lines.map(([name, before, after, format, said]) => html`<tr key=${name}>
        <th scope="row">${name}</th><td class="num">${format(before)}</td><td class="num">${after == null ? "not yet" : format(after)}</td>
        <td class=${said.includes("slower") ? "warn" : "note"}>${said}</td></tr>`)}</tbody></table>
    ${actual.drafted_tokens > 0 && html`<p class="note">Of ${plural(actual.drafted_tokens, "token")} that were drafted, ${count(actual.accepted_tokens)} came true.</p>`}
    ${best.given_up > 0 && html`<p class="note">Given up: ${plural(best.given_up, "cached token")} that only ${nameOf(best.replica)} holds.</p>`}
    ${missed.length > 0 && html`<p class="warn">Missed its objective for ${missed.map((name) => name.toUpperCase()).join(" and ")}.</p>`}`;
}

// Where the time went: one bar, and a line a stage. A running request's last stage grows.
function Timeline({ row, time }) {
  const drawn = row.stages ? stagesAt(row, time) : [];
  if (!drawn.length) return null;
  const end = Math.max(row.total_s ?? 0, drawn.at(-1)[2]);
  const silent = silentFor(row, time);
  const meanings = Object.fromEntries(COLOURS.map(([kind, , meaning]) => [kind, meaning]));
  return html`<h3>Where the time went</h3>
    <div class="waterfall tall-bar" role="img" aria-label=${drawn.map(([name, from, to]) => `${name} ${seconds(to - from)}`).join(", ")}>
      ${drawn.map(([name, from, to]) => html`<span key=${name} class=${`stage ${name}`} style=${place(from, to, end)}></span>`)}
      ${row.ttft_s != null && html`<span class="first-token" style=${{ left: share(row.ttft_s, end) }}></span>`}
    </div>
    <dl class="stage-list">${drawn.map(([name, from, to]) => html`<div key=${name} class="timeline-row">
      <dt><span class=${`swatch ${name}`} aria-hidden="true"></span>${name}</dt><dd class="num">${seconds(to - from)}</dd><dd class="note">${meanings[name]}</dd></div>`)}</dl>
    <p class="note">${row.ttft_s != null ? `First token after ${seconds(row.ttft_s)}` : "No token yet"}${row.total_s != null
      ? `, last after ${seconds(row.total_s)}` : `, open for ${seconds(end)}${silent == null ? "" : `, last token ${seconds(silent)} ago`}`}${row.output_tokens > 0 ? `: ${plural(row.output_tokens, "token")}` : ""}${row.itl_s != null
      ? `, ${seconds(row.itl_s)} between two` : ""}.${row.outcome === "running" ? "" : ` Ended: ${row.outcome}.`}</p>`;
}
