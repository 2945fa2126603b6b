// The replicas, worst first: a card for each, from nine on a cell each, coloured by the share of its KV pool in use; the
// routers, what K/V moves between them (transfers.js), and the autoscaler where the number of replicas may change.

import { html, useState } from "./vendor/htm/preact_standalone.js";
import { clock, count, nameOf, percent, plural, seconds, shortId } from "./format.js";
import { wantedOf } from "./health.js";
import { Notice, Panel, once } from "./panel.js";
import { PoolBar, usedOf } from "./pools.js";
import { Sparks } from "./replica_drawer.js";
import { TransferTable } from "./transfers.js";

const GROUPS = { prefill: "Prefill", decode: "Decode", unified: "Replicas" };
const MOST_CARDS = 8;
const OLD_REPORT_S = 3;
const RANK = { silent: 0, unhealthy: 0, draining: 2, released: 2, starting: 3, accepting: 4 };
const SIGNALS = { queue: "queue", kv_pool: "KV pool", slots: "running slots" };

// Those in trouble first, else as they come, by number: an order that followed the load would make all jump. Pure.
export function worstFirst(replicas) {
  const rank = (each) => Math.min(RANK[each.state] ?? 1, each.error || each.report_age_s > OLD_REPORT_S ? 1 : 9);
  return [...replicas].sort((a, b) => rank(a) - rank(b));
}

export const Fleet = once(({ mode, replicas, ended, routers, links, autoscaling, chosen, choose }) => {
  const split = mode === "disaggregated";
  const roles = split ? ["prefill", "decode"] : ["unified"];
  const groups = roles.map((role) => [role, worstFirst(split ? replicas.filter((each) => each.role === role) : replicas)]);
  const many = replicas.length > MOST_CARDS;
  const hosts = new Set(replicas.map((each) => each.node).filter(Boolean)).size > 1; // else all are on one: it is not said
  const wanted = wantedOf({ replicas, autoscaling });
  const missing = wanted - replicas.filter((each) => each.state !== "draining").length;
  const ready = readyOf(replicas);
  const note = replicas.length > 0 && html`<span class=${ready < wanted ? "warn" : ""}>${count(ready)} of ${count(Math.max(wanted, ready))} ready</span>`;
  return html`<${Panel} id="fleet" title="Replicas" note=${note}>
    ${!ready && html`<${Waiting} replicas=${replicas} routers=${routers} />`}
    ${replicas.length > 0 && html`<div class=${split ? "groups split" : "groups"}>
      ${groups.map(([role, members]) => html`<div class="group" key=${role}>
        ${split && html`<h3>${GROUPS[role]} <span class="note">${members.length}</span></h3>`}
        ${many ? html`<${Grid} replicas=${members} chosen=${chosen} choose=${choose} label=${GROUPS[role]} />` : html`<ul class="cards">
          ${members.map((each) => html`<${Card} key=${each.id} replica=${each} split=${split} host=${hosts} chosen=${each.id === chosen} choose=${choose} />`)}
          ${missing > 0 && !split && html`<li class="card missing note">${plural(missing, "more replica")} wanted: Ray Serve has not started ${missing > 1 ? "them" : "it"} yet.</li>`}
        </ul>`}
      </div>`)}
    </div>`}
    ${split && replicas.length > 0 && html`<${TransferTable} links=${links} />`}
    <${Ended} ended=${ended} chosen=${chosen} choose=${choose} />
    <${Routers} routers=${routers} />
    <${Autoscaling} autoscaling=${autoscaling} />
  <//>`;
});

const PAIRS = [["running", "waiting"], ["used"], ["output"]];

const Card = once(({ replica, split, host, chosen, choose }) => {
  const { id, state, role, rates, tiers, running } = replica;
  const work = [
    split && role === "prefill" ? ["handing off", count(replica.handing_off)]
      : split ? ["receiving", count(replica.receiving), `${count(replica.preallocating)} more wait for pages to receive in`]
      : ["step", running ? seconds(replica.decode_step_s || null) : "–", "a decode step now: a token for each running request, more where drafts come true"],
    ["prefill", perS(rates?.prefill_tokens_per_s), "prompt tokens computed a second"],
    ["cached", perS(rates?.cached_tokens_per_s), "prompt tokens found in the cache a second"],
  ];
  return html`<li class=${`card ${state}${chosen ? " chosen" : ""}`} data-replica=${id}>
    <div class="card-head">
      <span class="dot" aria-hidden="true"></span>
      <button type="button" class="card-name" aria-pressed=${chosen} title=${id} onClick=${() => choose({ replica: id })}>${nameOf(id)}</button>
      <span class=${state === "accepting" ? "unseen" : "state"}>${state}</span>
      <span class="note node" title=${`node ${replica.node}`}>${host && replica.node ? `on ${hostOf(replica)}` : shortId(id)}</span>
    </div>
    ${replica.error && html`<p class="bad">${replica.error}</p>`}
    ${!replica.error && replica.report_age_s > OLD_REPORT_S && html`<p class="warn">last report ${seconds(replica.report_age_s)} ago</p>`}
    ${tiers?.wrong_pages > 0 && html`<p class="warn">${plural(tiers.wrong_pages, "wrong page")} read back and dropped</p>`}
    ${tiers?.store_error && html`<p class="warn">The store cannot be used: ${tiers.store_error}</p>`}
    ${replica.pools?.map((pool) => html`<${PoolBar} key=${pool.tier} pool=${pool} />`)}
    ${running == null ? html`<p class="note">no report yet</p>` : html`<${Sparks} replica=${replica} pairs=${PAIRS} /><dl class="facts">
      ${work.map(([name, value, hint]) => html`<div key=${name} title=${hint}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>`}
  </li>`;
});

const hostOf = ({ host, node }) => host || `node ${node}`;
const perS = (value) => (value == null ? count(value) : `${count(value)}/s`);

// One cell a replica; arrow keys move between them, and what is pointed at is told below.
function Grid({ replicas, chosen, choose, label }) {
  const [at, setAt] = useState(null);
  const size = replicas.length <= 128 ? "large" : replicas.length <= 400 ? "middle" : "small";
  const told = replicas.find((each) => each.id === (at ?? chosen));
  const idOf = (event) => event.target.closest("[data-replica]")?.dataset.replica ?? null;
  const stop = replicas.some((each) => each.id === (at ?? chosen)) ? (at ?? chosen) : replicas[0]?.id;
  const nodes = new Map(); // the first of a node is its worst: so are nodes in order
  for (const each of replicas) nodes.set(each.node, [...(nodes.get(each.node) ?? []), each]);
  const onKey = (event) => {
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const cells = [...event.currentTarget.querySelectorAll(".heat-cell")];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    (step ? cells[cells.indexOf(event.target) + step] : below(cells, event.target, event.key === "ArrowDown" ? 1 : -1))?.focus();
  };
  return html`<div class=${`heat ${size}`} role="group" aria-label=${label} onKeyDown=${onKey} onPointerOver=${(event) => setAt(idOf(event))}
      onPointerLeave=${() => setAt(null)} onfocusin=${(event) => setAt(idOf(event))} onClick=${(event) => idOf(event) && choose({ replica: idOf(event) })}>
      ${[...nodes].map(([node, members]) => html`<div class="heat-node" key=${node}>
        ${nodes.size > 1 && html`<p class="note" title=${`node ${node}`}>${hostOf(members[0])} <span class=${readyOf(members) < members.length ? "warn" : ""}>${readyOf(members)} of ${members.length} ready</span></p>`}
        ${members.map((each) => html`<${Cell} key=${each.id} id=${each.id} state=${each.state} running=${each.running}
          heat=${Math.round(20 * usedOf(each))} known=${each.running != null} chosen=${each.id === chosen} stop=${each.id === stop} />`)}
      </div>`)}
    </div>
    <p class="detail">${told ? describe(told) : "Fill: KV pool in use. Number: running requests. Point at a replica, or reach it with the arrow keys."}</p>`;
}

const Cell = once(({ id, state, running, heat, known, chosen, stop }) => html`<button type="button" data-replica=${id} tabindex=${stop ? 0 : -1}
    class=${`heat-cell ${state}${chosen ? " chosen" : ""}${heat > 9 ? " full" : ""}`} style=${{ "--heat": `${heat * 5}%` }} aria-pressed=${chosen}
    aria-label=${`${nameOf(id)}, ${state}${known ? `, ${running} running, ${heat * 5} % of its KV pool in use` : ""}`}>${RANK[state] === 0 ? "!" : known ? running : ""}</button>`);

const readyOf = (replicas) => replicas.filter((each) => each.state === "accepting").length;

// The cell nearest below (1) or above (-1) one.
function below(cells, from, sign) {
  const at = from.getBoundingClientRect();
  const far = (each) => {
    const { top, left } = each.getBoundingClientRect();
    return (top - at.top) * sign > 1 ? (top - at.top) * sign * 1e4 + Math.abs(left - at.left) : Infinity;
  };
  const best = cells.reduce((found, each) => (far(each) < far(found) ? each : found));
  return far(best) < Infinity ? best : null;
}

function describe(replica) {
  const { id, state, running, running_limit: limit, waiting, error } = replica;
  const work = running == null ? "no report yet" : `${running}${limit ? ` of ${limit}` : ""} running, ${count(waiting)} waiting, KV ${percent(usedOf(replica))} in use`;
  return [`${nameOf(id)} (${shortId(id)})`, state, error, work, `on ${hostOf(replica)}`].filter(Boolean).join(" · ");
}

// Those of the last hour: their logs can still be read.
function Ended({ ended, chosen, choose }) {
  if (!ended?.length) return null;
  return html`<ul class="ended" aria-label="Replicas that ended in the last hour">
    ${ended.map(({ id, time, died }) => html`<li key=${id}><button type="button" class=${died ? "bad" : ""} data-ended=${id} aria-pressed=${id === chosen}
      title=${id} onClick=${() => choose({ replica: id })}>${nameOf(id)} ${died ? "lost" : "ended"} <span class="note">${clock(time)}</span></button></li>`)}
  </ul>`;
}

function Routers({ routers }) {
  if (!routers.length) return null;
  return html`<p class="routers"><span>${plural(routers.length, "router")}</span>
    ${routers.map((each) => html`<span key=${each.id} class=${each.answering ? "" : "warn"} title=${`${each.id} on node ${each.node}`}>
      ${shortId(each.id)}: ${each.answering ? plural(each.open, "open request") : "no answer"}</span>`)}
  </p>`;
}

// Only where the number of replicas may change.
function Autoscaling({ autoscaling }) {
  const targets = autoscaling?.targets.filter((each) => each.minimum !== each.maximum) ?? [];
  if (!targets.length) return null;
  return html`${targets.map(({ role, running, desired, minimum, maximum, pressure }) => html`<p class="routers" key=${role}>
      <span>autoscaler, ${role}: <strong>${running}</strong> of <strong>${desired}</strong> wanted (${minimum} to ${maximum})</span>
      ${Object.entries(pressure ?? {}).filter(([, value]) => value != null).map(([name, value]) => html`<span key=${name}
        class=${value > 1 ? "warn" : ""} title="above 100 % asks for more replicas">${SIGNALS[name] ?? name} ${percent(value)}</span>`)}
    </p>`)}
    ${autoscaling.log.length > 0 && html`<details><summary>${plural(autoscaling.log.length, "change")}</summary><ul>
      ${autoscaling.log.map((each) => html`<li key=${`${each.time} ${each.role}`}><span class="note">${clock(each.time)}</span>
        ${" "}${each.role} ${each.from} → ${each.to} <span class="note">${each.reason}</span></li>`)}</ul></details>`}`;
}

// What is being waited for until a request can be served.
function Waiting({ replicas, routers }) {
  if (!routers.length) return html`<${Notice} title="No router has answered yet.">
    <p>Routers start first, then replicas. <code>serve status</code> shows what Ray Serve is starting.</p><//>`;
  if (!replicas.length) return html`<${Notice} title="No replicas yet.">
    <p>The router answers and waits for the first replica: it needs a place in the cluster, then loads the model's weights.
      <code>serve status</code> says whether Ray finds the CPUs and GPUs that it asks for.</p><//>`;
  const states = replicas.map((each) => each.state);
  const told = [...new Set(states)].map((state) => `${states.filter((each) => each === state).length} ${state}`).join(", ");
  return html`<${Notice} title=${`No replica takes requests now: ${told}.`}>
    <p>${states.includes("starting") ? "A starting replica loads the model's weights and warms up." : "Ray Serve replaces what is unhealthy; what stays silent is killed and replaced."}</p><//>`;
}
