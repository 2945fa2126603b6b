// The health strip: all well, or each thing that is wrong as a sentence, since when, and where to look.
// What is wrong, and what of it comes first, the observatory decides: the state's alerts (dashboards/alerts.py).

import { html, useEffect, useState } from "./vendor/htm/preact_standalone.js";
import { clock, plural, span } from "./format.js";
import { once } from "./panel.js";

const RECENT_S = 600;
const MOST_EVENTS = 3;
const MOST_FINDINGS = 3; // the others on demand
const BAD = ["lost", "silent", "unhealthy", "shedding", "died", "deploy_failed", "stalled"];

export const Health = once(({ state, choose }) => {
  const [all, setAll] = useState(false);
  const { alerts } = state;
  const worst = alerts.find((each) => each.state !== "pending");
  const ready = state.replicas.filter((each) => each.state === "accepting").length;
  useEffect(() => {
    document.title = worst ? `! ${worst.summary.slice(0, 60)} – Manta` : "Manta";
  }, [worst?.summary]);
  const wanted = wantedOf(state);
  const well = ready >= wanted && !alerts.length;
  const level = worst?.severity ?? (!ready ? "waiting" : well ? "well" : "warning");
  const words = !ready ? "No replica is ready" : ready < wanted ? `${ready} of ${plural(wanted, "replica")} ready` : well ? "All well" : "Something may be wrong";
  return html`<section class=${`health ${level}`} aria-label="Health">
    <p class="unseen" role="status">${worst ? `${worst.severity}: ${worst.name}` : words}</p>
    ${!worst && html`<p class="finding"><strong>${ready ? words : "No replica is ready yet"}</strong><span class="note">${summary(state, ready, wanted)}</span></p>`}
    ${alerts.slice(0, all ? Infinity : MOST_FINDINGS).map((each) => html`<${Finding} key=${`${each.name} ${each.replica}`} it=${each} now=${state.time} choose=${choose} />`)}
    ${worst && ready < wanted && html`<p class="finding"><strong>${words}</strong></p>`}
    ${alerts.length > MOST_FINDINGS && html`<button type="button" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Show less" : `and ${alerts.length - MOST_FINDINGS} more`}</button>`}
    <${Events} events=${state.events} now=${state.time} choose=${choose} />
  </section>`;
});

// How many replicas there should be; what drains is not counted where Serve's target is known.
export function wantedOf({ replicas, autoscaling }) {
  const targets = autoscaling?.targets ?? [];
  return targets.length ? targets.reduce((sum, each) => sum + each.desired, 0) : replicas.length;
}

// The last of the last ten minutes, the newest first.
function Events({ events, now, choose }) {
  const last = (events ?? []).filter((each) => now - each.time < RECENT_S).slice(-MOST_EVENTS).reverse();
  if (!last.length) return null;
  return html`<ol class="events" aria-label="What happened in the last ten minutes">
    ${last.map(({ seq, time, kind, text, replica }) => html`<li key=${seq} class=${BAD.includes(kind) ? "bad" : ""}>
      <span class="note">${clock(time)}</span> ${text}
      ${replica && html`<button type="button" onClick=${() => choose({ replica })}>Replica</button>`}
    </li>`)}
  </ol>`;
}

function Finding({ it, now, choose }) {
  const { severity, state, summary, since, figure, replica, runbook, name } = it;
  const word = state === "pending" ? "Pending" : severity === "critical" ? "Critical" : "Warning";
  return html`<p class="finding" title=${name}>
    <span class=${severity === "critical" ? "bad" : "warn"}>${word}</span><strong>${summary}</strong>
    <span class="note">for ${span(Math.max(0, now - since))}</span>
    ${figure && html`<button type="button" onClick=${() => choose({ tile: figure })}>Chart</button>`}
    ${replica && html`<button type="button" onClick=${() => choose({ replica })}>Replica</button>`}
    <a href=${runbook}>Runbook</a>
  </p>`;
}

function summary({ replicas, requests, routers }, ready, wanted) {
  const open = requests.filter((each) => each.outcome === "running").length;
  if (!routers.length) return "No router has answered yet.";
  if (!replicas.length) return "No replica has started.";
  const told = ready && ready < wanted; // beside it, as the strip's own words
  return `${told ? "" : `${ready ? plural(ready, "replica") : `0 of ${plural(wanted, "replica")}`} ready · `}${plural(open, "request")} open`;
}
