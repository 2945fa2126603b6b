// What the autoscaler wants of each role, by which pressure, and what it did.

import { html } from "./vendor/htm/preact_standalone.js";
import { clock, percent } from "./format.js";
import { Notice, Panel, once } from "./panel.js";

const SIGNALS = { queue: "queue", kv_pool: "KV pool", slots: "running slots" };
const FULL_BAR = 1.5; // pressure at the end of a bar; 1 asks for more

export const Autoscaling = once(({ autoscaling }) => {
  const { targets, log } = autoscaling;
  return html`<${Panel} id="autoscaling" title="Autoscaler" note=${targets.length > 0 && "pressure above 100 % asks for more replicas"}>
    ${targets.length === 0
      ? html`<${Notice} title="The number of replicas is fixed."><p>The settings replicas.autoscaling, prefill.autoscaling and
          decode.autoscaling let it follow the load.</p><//>`
      : targets.map((each) => html`<${Target} key=${each.role} target=${each} />`)}
    ${log.length > 0 && html`<h3>What it did</h3><ul class="log">
      ${log.map((each) => html`<li key=${`${each.time} ${each.role}`}><span class="note">${clock(each.time)}</span>
        ${" "}${each.role} ${each.from} → ${each.to}<span class="note">${each.reason}</span></li>`)}
    </ul>`}
  <//>`;
});

function Target({ target }) {
  const { role, running, desired, minimum, maximum, pressure } = target;
  return html`<div class="target">
    <p><strong>${role}</strong>: ${running} running, ${desired} wanted <span class="note">(${minimum === maximum ? "fixed" : `${minimum} to ${maximum}`})</span></p>
    ${Object.entries(pressure ?? {}).map(([name, value]) => html`<div class="pressure" key=${name}>
      <span>${SIGNALS[name] ?? name}</span>
      <span class="bar" role="img" aria-label=${`${SIGNALS[name] ?? name}: ${percent(value)} of what is allowed`}>
        <span class=${value > 1 ? "part over" : "part under"} style=${{ width: `${Math.min(100, (100 * (value ?? 0)) / FULL_BAR)}%` }}></span>
        <span class="limit"></span></span>
      <span class="num">${percent(value)}</span>
    </div>`)}
  </div>`;
}
