// The cluster: a card for each replica, by role and node, with its pools and load; the routers; transfers (transfers.js).

import { html, useRef } from "./vendor/htm/preact_standalone.js";
import { bytes, count, seconds, shortId } from "./format.js";
import { Notice, Panel, once } from "./panel.js";
import { Legend, PoolBar, STATES } from "./pools.js";
import { TransferLines, TransferTable } from "./transfers.js";

const GROUPS = { prefill: "Prefill", decode: "Decode", unified: "Replicas" };
const OLD_REPORT_S = 3;

export const Cluster = once(({ mode, replicas, routers, links, chosen, onChoose }) => {
  const split = mode === "disaggregated";
  const frame = useRef(null);
  const roles = split ? ["prefill", "decode"] : ["unified"];
  const groups = roles.map((role) => [role, replicas.filter((each) => (split ? each.role === role : true)).sort(byNode)]);
  const note = split ? "KV pools now; width of a line = rate of KV transfer" : "KV pools now";
  return html`<${Panel} id="cluster" title="Cluster" note=${note}>
    ${!replicas.some((each) => each.state === "accepting") && html`<${Waiting} replicas=${replicas} routers=${routers} />`}
    ${replicas.length > 0 && html`<div class=${split ? "groups split" : "groups"} ref=${frame}>
      ${groups.map(
        ([role, members]) => html`<div class="group" key=${role}>
          <h3>${GROUPS[role]} <span class="note">${members.length}</span></h3>
          <ul class="cards">
            ${members.map(
              (each) =>
                html`<${Card} key=${each.id} replica=${each} split=${split} chosen=${each.id === chosen} onChoose=${onChoose} />`,
            )}
          </ul>
        </div>`,
      )}
      ${split && html`<${TransferLines} links=${links} frame=${frame} order=${replicas} />`}
    </div>`}
    ${split && replicas.length > 0 && html`<${TransferTable} links=${links} />`}
    ${replicas.length > 0 && html`<${Legend} entries=${STATES} label="States of a pool" />`}
    <${Routers} routers=${routers} />
  <//>`;
});

const Card = once(({ replica, split, chosen, onChoose }) => {
  const { rates, tiers } = replica;
  const work = [
    ["running", replica.running_limit ? `${count(replica.running)} / ${count(replica.running_limit)}` : count(replica.running)],
    ["waiting", count(replica.waiting)],
    ["queued", count(replica.queued_tokens)],
    ...(split && replica.role === "prefill" ? [["handing off", count(replica.handing_off)]] : []),
    ...(split && replica.role === "decode" ? [["receiving", `${count(replica.receiving)} + ${count(replica.preallocating)}`]] : []),
    ["pool tokens", count(replica.pools?.[0]?.capacity)],
    ["computed tok/s", count(rates?.prefill_tokens_per_s)],
    ["reused tok/s", count(rates?.cached_tokens_per_s)],
    ...(tiers ? [["from host", count(tiers.host_hit_tokens)], ["prefill saved", seconds(tiers.saved_s)]] : []),
    ...(tiers?.store_bytes != null ? [["from store", count(tiers.store_hit_tokens)], ["in store", bytes(tiers.store_bytes)]] : []),
    ["decoded tok/s", count(rates?.decode_tokens_per_s)],
    ["decode step", seconds(replica.decode_step_s || null)], // 0: none yet
    ["attention", replica.attention ?? "–"],
  ];
  const hints = {
    receiving: "receiving K/V, and waiting for pages to receive it in",
    queued: "prompt tokens not computed yet",
    "from host": "prompt tokens loaded from host memory instead of computed, since the start",
    "from store": "prompt tokens read from the store instead of computed, since the start",
    "prefill saved": "what computing the loaded tokens would have taken, less what loading took",
    "in store": "of all replicas that share it",
    attention: replica.attention_why,
  };
  return html`<li class=${`card ${replica.state}${chosen ? " chosen" : ""}`} data-replica=${replica.id}>
    <div class="card-head">
      <span class="dot" aria-hidden="true"></span>
      <button type="button" class="card-name" aria-pressed=${chosen} title=${replica.id} onClick=${() => onChoose(replica.id)}>
        ${shortId(replica.id)}
      </button>
      <span class="state">${replica.state}</span>
      <span class="note node" title=${`node ${replica.node}`}>${shortId(replica.node)}</span>
    </div>
    ${replica.error && html`<p class="warn">${replica.error}</p>`}
    ${replica.report_age_s > OLD_REPORT_S && html`<p class="warn">last report ${seconds(replica.report_age_s)} ago</p>`}
    ${tiers?.wrong_pages > 0 && html`<p class="warn">${count(tiers.wrong_pages)} wrong pages were read back and dropped</p>`}
    ${tiers?.store_error && html`<p class="warn">the store cannot be used: ${tiers.store_error}</p>`}
    ${replica.pools?.map((pool) => html`<${PoolBar} key=${pool.tier} pool=${pool} />`)}
    ${replica.running == null ? html`<p class="note">no report yet</p>` : html`<dl class="facts">
      ${work.map(([name, value]) => html`<div key=${name} title=${hints[name]}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>`}
  </li>`;
});

function Routers({ routers }) {
  if (!routers.length) return null;
  return html`<p class="routers">
    <strong>Routers</strong>
    ${routers.map(
      (each) => html`<span key=${each.id} class=${each.answering ? "" : "warn"} title=${`${each.id} on node ${each.node}`}>
        ${shortId(each.id)}: ${each.answering ? `${count(each.open)} open` : "no answer"}
      </span>`,
    )}
  </p>`;
}

// What is being waited for until a request can be served.
function Waiting({ replicas, routers }) {
  if (!routers.length) return html`<${Notice} title="No router has answered yet.">
    <p>Routers start first, then replicas. <code>serve status</code> shows what Ray Serve is starting.</p>
  <//>`;
  if (!replicas.length) return html`<${Notice} title="No replicas yet.">
    <p>The router answers and waits for the first replica: it needs a place in the cluster, then loads the model's weights.
      <code>serve status</code> says whether Ray finds the CPUs and GPUs that it asks for.</p>
  <//>`;
  const states = replicas.map((each) => each.state);
  const told = [...new Set(states)].map((state) => `${states.filter((each) => each === state).length} ${state}`).join(", ");
  return html`<${Notice} title=${`No replica takes requests now: ${told}.`}>
    <p>${states.includes("starting") ? "A starting replica loads the model's weights and warms up." : "Ray Serve replaces what is unhealthy."}</p>
  <//>`;
}

function byNode(a, b) {
  return a.node < b.node ? -1 : a.node > b.node ? 1 : a.id < b.id ? -1 : 1;
}
