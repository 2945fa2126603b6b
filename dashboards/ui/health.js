// The health strip: all well, or the worst that is wrong as a sentence, since when, and where to look.
// What is wrong, and what of it comes first, the observatory decides: the state's alerts (dashboards/alerts.py).

import { html, useEffect, useState } from "./vendor/htm/preact_standalone.js";
import { plural, span } from "./format.js";
import { once } from "./panel.js";

export const Health = once(({ state, choose }) => {
  const [all, setAll] = useState(false);
  const [worst] = state.alerts.filter((each) => each.state !== "pending");
  const ready = state.replicas.filter((each) => each.state === "accepting").length;
  useEffect(() => {
    document.title = worst ? `! ${worst.summary.slice(0, 60)} – Manta` : "Manta";
  }, [worst?.summary]);
  const rest = state.alerts.filter((each) => each !== worst);
  const level = worst?.severity ?? (ready ? "well" : "waiting");
  return html`<section class=${`health ${level}`} aria-label="Health">
    <p class="unseen" role="status">${worst ? `${worst.severity}: ${worst.name}` : ready ? "All well" : "No replica is ready"}</p>
    ${worst ? html`<${Finding} it=${worst} now=${state.time} choose=${choose}>
        ${rest.length > 0 && html`<button type="button" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Show less" : `and ${rest.length} more`}</button>`}
      <//>` : html`<p class="finding"><strong>${ready ? "All well" : "No replica is ready yet"}</strong><span class="note">${summary(state, ready)}</span>
        ${rest.length > 0 && html`<button type="button" aria-expanded=${all} onClick=${() => setAll(!all)}>${rest.length} pending</button>`}</p>`}
    ${all && rest.map((each) => html`<${Finding} key=${`${each.name} ${each.replica}`} it=${each} now=${state.time} choose=${choose} />`)}
  </section>`;
});

function Finding({ it, now, choose, children }) {
  const { severity, state, summary, since, figure, replica, runbook, name } = it;
  const word = state === "pending" ? "Pending" : severity === "critical" ? "Critical" : "Warning";
  return html`<p class="finding" title=${name}>
    <span class=${severity === "critical" ? "bad" : "warn"}>${word}</span><strong>${summary}</strong>
    <span class="note">for ${span(Math.max(0, now - since))}</span>
    ${figure && html`<button type="button" onClick=${() => choose({ tile: figure })}>Chart</button>`}
    ${replica && html`<button type="button" onClick=${() => choose({ replica })}>Replica</button>`}
    <a href=${runbook}>Runbook</a>
    ${children}
  </p>`;
}

function summary({ replicas, requests, routers }, ready) {
  const running = requests.filter((each) => each.outcome === "running").length;
  if (!routers.length) return "No router has answered yet.";
  if (!replicas.length) return "No replica has started.";
  return `${ready === replicas.length ? plural(ready, "replica") : `${ready} of ${plural(replicas.length, "replica")}`} ready · ${plural(running, "request")} running`;
}
