// One replica: what it is, what its process uses, its last minutes, its running requests, its log, and what an operator can
// do with it.
// Owns:      the last five minutes of every replica's figures (`remember`, once a state), of which the observatory gives
//            those before the page was opened, and the questions about one replica, asked while it is looked at.

import { html, useEffect, useRef, useState } from "./vendor/htm/preact_standalone.js";
import { getJson, postJson } from "./connection.js";
import { bytes, count, nameOf, percent, plural, seconds, shortId, span } from "./format.js";
import { Copy, Notice, Panel } from "./panel.js";
import { PoolBar, usedOf } from "./pools.js";
import { Spark } from "./tiles.js";
import { Waterfall, lengthOf } from "./waterfall.js";

const KEPT_S = 300;
const STEP_S = 5; // between two points, as in the state's `past`
const ASK_MS = 2000;
const MOST_RUNNING = 12;
const FIGURES = { // in the order of the points of the state's `past`
  running: ["Running", (each) => each.running, count],
  waiting: ["Waiting", (each) => each.waiting, count],
  queued: ["Queued tokens", (each) => each.queued_tokens, count],
  used: ["KV in use", (each) => (each.pools?.length ? usedOf(each) : null), percent],
  prefill: ["Prefill tok/s", (each) => each.rates?.prefill_tokens_per_s, count],
  cached: ["Cached tok/s", (each) => each.rates?.cached_tokens_per_s, count],
  output: ["Output tok/s", (each) => each.rates?.decode_tokens_per_s, count],
};
const kept = new Map(); // replica -> { times, and a list a figure }, the newest last

// Keeps the figures of all replicas, so that a replica's last minutes are there when it is chosen.
export function remember({ time, replicas, past: before }) {
  for (const each of replicas) {
    if (!kept.has(each.id)) {
      const columns = ["times", ...Object.keys(FIGURES)];
      kept.set(each.id, Object.fromEntries(columns.map((name, at) => [name, (before?.[each.id] ?? []).map((point) => point[at])])));
    }
    const past = kept.get(each.id);
    if (past.times.at(-1) > time - STEP_S) continue;
    past.times.push(time);
    for (const [name, [, value]] of Object.entries(FIGURES)) past[name].push(value(each) ?? null);
    while (past.times[0] < time - KEPT_S) for (const list of Object.values(past)) list.shift();
  }
  if (kept.size > replicas.length) for (const [id, { times }] of kept) if (times.at(-1) < time - KEPT_S) kept.delete(id);
}

export function ReplicaDrawer({ state, replica, choose }) {
  const last = useRef(null); // as it was last seen: a replica that has died is shown until another is chosen
  const now = state.replicas.find((each) => each.id === replica);
  if (now) last.current = now;
  const shown = now ?? (last.current?.id === replica ? last.current : null);
  const facts = useFacts(replica);
  if (!shown) return html`<${Panel} id="replica" title=${replica ? nameOf(replica) : "Replica"}>
    <${Notice} title=${replica ? "There is no such replica any more." : "Choose a replica."} />
    ${replica && html`<${Operate} key=${replica} replica=${{ id: replica }} running=${false} state=${state} />`}<//>`;
  const role = shown.role === "unified" ? "" : `${shown.role}, `;
  const note = html`<span class=${`state-of ${now ? shown.state : "gone"}`}><span class="dot" aria-hidden="true"></span>${role}${now ? shown.state : "gone"}</span>`;
  return html`<${Panel} id="replica" title=${nameOf(shown.id)} note=${note}>
    ${shown.error && now && html`<p class="bad">${shown.error}</p>`}
    <${Identity} key=${shown.id} facts=${facts} replica=${shown} time=${state.time} />
    <${Sparks} replica=${shown} />
    ${shown.pools?.map((pool) => html`<${PoolBar} key=${pool.tier} pool=${pool} />`)}
    <${Running} rows=${state.requests} id=${shown.id} time=${state.time} choose=${choose} />
    <${Operate} key=${`${shown.id} operate`} replica=${shown} running=${now !== undefined} state=${state} />
  <//>`;
}

// Facts of the process, asked for every two seconds; `cpu` is the share of a core since the answer before.
function useFacts(id) {
  const asks = id && !new URLSearchParams(location.search).has("snapshot");
  const [facts, error] = useAsked(asks && `api/replicas/${encodeURIComponent(id)}`, ASK_MS);
  const last = useRef({});
  if (facts && facts !== last.current.facts) {
    const at = performance.now() / 1e3;
    const before = last.current.id === id ? last.current : {};
    const cpu = before.facts?.cpu_s == null || facts.cpu_s == null ? null : Math.max(0, (facts.cpu_s - before.facts.cpu_s) / (at - before.at));
    last.current = { id, facts, at, cpu };
  }
  return { facts, error, cpu: facts && last.current.cpu };
}

function Identity({ facts: { facts, cpu, error }, replica, time }) {
  const is = facts ?? {};
  const tiers = replica.tiers;
  const lines = [
    ["host", is.host && `${is.host}${is.address && is.address !== is.host ? ` (${is.address})` : ""}`],
    ["process", is.pid && `${is.pid}${is.running && is.started ? `, up ${span(time - is.started)}` : ""}`],
    ["device", is.device && `${is.device}, ${is.dtype}${is.tp > 1 ? `, TP ${is.tp}` : ""}${is.device === "cpu" ? `, ${plural(is.num_threads, "thread")}` : ""}`],
    ["weights", is.weights],
    ["KV pool", is.pool],
    ["host tier", is.host_bytes && bytes(is.host_bytes)],
    ["attention", replica.attention && `${replica.attention}${replica.attention_why ? `: ${replica.attention_why}` : ""}`],
    ...(replica.groups ?? []).map(({ group, used_bytes: used, capacity_bytes: size, num_parts: parts, num_holes: holes }) =>
      [group, `${bytes(used)} of ${bytes(size)}, ${plural(parts, group === "full" ? "page" : group)}${holes ? `, ${plural(holes, "hole")}` : ""}`]),
    ["from tiers", tiers && `${count(tiers.host_hit_tokens)} tokens from host${tiers.store_bytes != null ? `, ${count(tiers.store_hit_tokens)} from store` : ""}, ${seconds(tiers.saved_s)} of prefill saved`],
    ["adapters", replica.adapters && `${replica.adapters.held} held in ${bytes(replica.adapters.bytes)}; ${plural(replica.adapters.loads, "load")}, ${seconds(replica.adapters.load_s)} each`],
  ].filter(([, value]) => value);
  const uses = [
    ["CPU", cpu == null ? "–" : percent(cpu), "of one core, over the last two seconds"],
    ["memory", bytes(is.rss_bytes), "resident, with the KV pool of a CPU"],
    ...(is.gpu_used_bytes ? [["GPU memory", bytes(is.gpu_used_bytes), `in use of ${bytes(is.gpu_total_bytes)}, ${bytes(is.gpu_own_bytes)} of it by this process`]] : []),
    ...(is.gpu_utilization != null ? [["GPU", percent(is.gpu_utilization), "of the last moment in which it ran kernels"]] : []),
    ["step", replica.running ? seconds(replica.decode_step_s || null) : "–", "a decode step now: a token for each running request, more where drafts come true"],
  ];
  return html`
    <dl class="uses">${uses.map(([name, value, hint]) => html`<div key=${name} title=${hint}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${error && !facts && html`<p class="note">Its process cannot be asked: ${error}.</p>`}
    <dl class="identity">
      <div><dt>id</dt><dd><code>${replica.id}</code></dd></div>
      ${lines.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>`;
}

// Figures of a replica with their last minutes; a second one of a pair is a thin line.
export function Sparks({ replica, pairs = Object.keys(FIGURES).map((name) => [name]) }) {
  const past = kept.get(replica.id);
  if (!past?.times.length) return null;
  return html`<div class="replica-sparks">${pairs.map(([one, two]) => {
    const [said, also] = [one, two].map((name) => name && FIGURES[name][2](FIGURES[name][1](replica) ?? null));
    const more = also && `${also} ${FIGURES[two][0].toLowerCase()}`;
    return html`<div key=${one} class="replica-spark" role="img" aria-label=${[`${FIGURES[one][0]}: ${said}`, more].filter(Boolean).join(", ")}>
      <span class="note">${FIGURES[one][0]}</span><strong>${said}</strong>${more && html` <span class="also">${more}</span>`}
      <${Spark} times=${past.times} points=${past[one]} upper=${past[two]} time=${past.times.at(-1)} at=${null} />
    </div>`;
  })}</div>`;
}

function Running({ rows, id, time, choose }) {
  const mine = rows.filter((row) => row.outcome === "running" && (row.replica === id || row.prefill === id));
  if (!mine.length) return html`<h3>Open requests</h3><p class="note">None.</p>`;
  const scale = Math.max(...mine.map((row) => lengthOf(row, time)));
  return html`<h3>Open requests <span class="note">${mine.length}</span></h3>
    <ul class="running">${mine.slice(0, MOST_RUNNING).map((row) => html`<li key=${row.rid}>
      <button type="button" onClick=${() => choose({ request: row.rid })} aria-label=${`${row.rid}, ${row.prompt_tokens} prompt tokens, open for ${seconds(lengthOf(row, time))}`}>
        <code>${shortId(row.rid)}</code><span class="num">${count(row.prompt_tokens)} → ${count(row.output_tokens)}</span>
        <${Waterfall} row=${row} scale=${scale} now=${time} /><span class="num">${seconds(lengthOf(row, time))}</span>
      </button></li>`)}</ul>
    ${mine.length > MOST_RUNNING && html`<p class="note">and ${mine.length - MOST_RUNNING} more</p>`}`;
}

const ACTIONS = {
  flush: ["Flush cache", "Forget all its cached prefixes. Refused while requests run on it."],
  drain: ["Drain", "It takes no new requests. Those that run finish; then Ray Serve ends it and starts another replica in its place. This cannot be taken back."],
  kill: ["Kill", "End its process now. Its requests go on at other replicas from the last token sent; Ray Serve starts another replica."],
};

// Log, stacks, and the actions with their confirmation. `running`: whether the replica is there still.
function Operate({ replica, running, state }) {
  const [asked, setAsked] = useState(null);
  const [told, setTold] = useState(null);
  const [shown, setShown] = useState(null); // log, stacks
  if (!state.keys?.admin) return html`<h3>Log and actions</h3><${Notice} title="Log and actions need an admin key.">
    <p>Set <code>MANTA_ADMIN_KEY</code> before you start Manta, or <code>admin_key</code> in the observatory's args, and log in:
      you can then read this replica's log and stacks, and flush, drain or kill it.</p><//>`;
  const act = (action) => {
    setAsked(null);
    setTold({ text: `${ACTIONS[action][0]}: asked …` });
    postJson(`api/replicas/${encodeURIComponent(replica.id)}/${action}`).then(
      (answer) => setTold({ text: `${ACTIONS[action][0]}: ${answer.message}.` }),
      (error) => setTold({ text: `${ACTIONS[action][0]} was not done: ${error.message}.`, bad: true }),
    );
  };
  return html`<h3>Log and actions</h3>
    <div class="operate">
      <button type="button" aria-pressed=${shown === "log"} onClick=${() => setShown(shown === "log" ? null : "log")}>Log</button>
      <button type="button" aria-pressed=${shown === "stacks"} disabled=${!running} onClick=${() => setShown(shown === "stacks" ? null : "stacks")}>Stacks</button>
      <span class="apart"></span>
      ${Object.entries(ACTIONS).map(([action, [name, meaning]]) => html`<button type="button" key=${action} class=${action === "kill" ? "danger" : ""} disabled=${!running}
        title=${meaning} onClick=${() => setAsked(action)}>${name}</button>`)}
    </div>
    <p role="status" class=${told?.bad ? "bad" : "note"}>${told?.text}</p>
    ${asked && html`<${Confirm} action=${asked} replica=${replica} state=${state} onDo=${() => act(asked)} onClose=${() => setAsked(null)} />`}
    ${shown === "log" && html`<${Log} id=${replica.id} />`}
    ${shown === "stacks" && html`<${Stacks} id=${replica.id} />`}`;
}

function Confirm({ action, replica, state, onDo, onClose }) {
  const place = useRef(null);
  useEffect(() => place.current.showModal(), []);
  const [name, meaning] = ACTIONS[action];
  const others = state.replicas.filter((each) => each.id !== replica.id && each.role === replica.role && each.state === "accepting").length;
  return html`<dialog class="confirm" ref=${place} onClose=${onClose} aria-labelledby="confirm-title">
    <h2 id="confirm-title">${name} ${nameOf(replica.id)}?</h2>
    <p>${meaning}</p>
    <p>${plural(replica.running ?? 0, "request")} ${replica.running === 1 ? "runs" : "run"} on it now; ${plural(others, "other replica")} ${others === 1 ? "takes" : "take"} requests.</p>
    ${action !== "flush" && !others && html`<p class="bad">No other replica takes requests: until the new one is ready, new requests are answered with 503${action === "kill" ? ", and those that run wait for it for 30 s at most" : ""}.</p>`}
    <div class="operate"><span class="apart"></span>
      <button type="button" onClick=${() => place.current.close()}>Cancel</button>
      <button type="button" class=${action === "kill" ? "danger sure" : "sure"} onClick=${onDo}>${name}</button></div>
  </dialog>`;
}

// Asks `path`, unless there is none, now and, with `every`, again and again: [answer, error]
function useAsked(path, every) {
  const [known, setKnown] = useState({});
  useEffect(() => {
    if (!path) return undefined;
    const tell = (change) => setKnown((had) => ({ body: had.path === path ? had.body : undefined, path, ...change }));
    const ask = () => document.hidden || getJson(path).then((body) => tell({ body }), (error) => tell({ error: error.message }));
    ask();
    const timer = every && setInterval(ask, every);
    return () => clearInterval(timer);
  }, [path]);
  return known.path === path ? [known.body, known.error] : [];
}

function Log({ id }) {
  const [body, error] = useAsked(`api/replicas/${encodeURIComponent(id)}/logs?lines=200`, ASK_MS);
  const place = useRef(null);
  const follows = useRef(true); // until one scrolls up
  useEffect(() => {
    if (follows.current && place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [body]);
  const onScroll = ({ target }) => (follows.current = target.scrollHeight - target.scrollTop - target.clientHeight < 24);
  return html`${error && html`<p class="bad">${error}</p>`}
    ${body && html`<p class="note">Last ${plural(body.lines.length, "line")} of ${body.file}</p>
      <pre class="log-lines" ref=${place} onScroll=${onScroll} tabindex="0" aria-label="Log">${body.lines.map((line, index) => html`<span key=${index} class=${levelOf(line)}>${line}${"\n"}</span>`)}</pre>`}`;
}

function levelOf(line) {
  return /\b(ERROR|CRITICAL)\b/.test(line) ? "bad" : /\bWARNING\b/.test(line) ? "warn" : "";
}

function Stacks({ id }) {
  const [body, error] = useAsked(`api/replicas/${encodeURIComponent(id)}/stacks`, 0);
  return html`${error && html`<p class="bad">${error}</p>`}
    ${body && html`<p class="note">All threads of process ${body.pid}, as they were just now; innermost call first.
      ${" "}<${Copy} text=${body.stacks} /></p>
      <pre class="log-lines" tabindex="0" aria-label="Stacks">${body.stacks}</pre>`}`;
}
