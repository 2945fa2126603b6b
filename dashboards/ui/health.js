// The health strip: all well, or the worst that is wrong as a sentence, since when, and where to look.
// What is wrong: the alerts (evaluated by the observatory with the rules of Prometheus), and what the state shows at once.

import { html, useEffect, useState } from "./vendor/htm/preact_standalone.js";
import { plural, shortId, span } from "./format.js";
import { once } from "./panel.js";

const RANK = { critical: 0, warning: 1 };
const OLD_REPORT_S = 10;

// What is wrong, the worst first: [{ name, severity, pending, since, text, runbook, figure, replica }]. What an alert waits
// to be sure of is told at once where the state shows it: the page does not look well beside an unhealthy replica. Pure.
export function findings({ alerts, replicas, routers }) {
  const found = (alerts ?? []).map(({ summary, state, ...rest }) => ({ ...rest, text: summary.replace(/\w+#/g, ""), pending: state === "pending" }));
  const firing = new Set(found.filter((each) => !each.pending).map((each) => each.name));
  const seen = [];
  const add = (severity, name, text, replica) => firing.has(name) || seen.push({ severity, name, text, pending: false, replica });
  const [sick, ...sicker] = replicas.filter((each) => each.state === "unhealthy");
  if (sick) add("critical", "ReplicaUnhealthy", `Replica ${shortId(sick.id)}${others(sicker)} ${sicker.length ? "are" : "is"} unhealthy${sick.error ? `: ${sick.error}` : ""}`, sick.id);
  const [silent, ...more] = routers.filter((each) => !each.answering);
  if (silent) add("warning", "RouterSilent", `Router ${shortId(silent.id)}${others(more)} ${more.length ? "do" : "does"} not answer`);
  const [old, ...older] = replicas.filter((each) => each.state !== "unhealthy" && each.report_age_s > OLD_REPORT_S);
  if (old) add("warning", "RouterReportsOld", `The newest report of replica ${shortId(old.id)} is ${span(old.report_age_s)} old${others(older)}`, old.id);
  if (replicas.length && !replicas.some((each) => ["accepting", "starting"].includes(each.state)))
    add("critical", "NoReadyReplica", "No replica accepts requests");
  const names = new Set(seen.map((each) => each.name));
  return [...found.filter((each) => !names.has(each.name)), ...seen].sort((a, b) => a.pending - b.pending || RANK[a.severity] - RANK[b.severity]);
}

function others(list) {
  return list.length ? ` and ${list.length} more` : "";
}

export const Health = once(({ state, choose }) => {
  const [all, setAll] = useState(false);
  const found = findings(state);
  const [worst] = found.filter((each) => !each.pending);
  const ready = state.replicas.filter((each) => each.state === "accepting").length;
  useEffect(() => {
    document.title = worst ? `! ${worst.text.slice(0, 60)} – Manta` : "Manta";
  }, [worst?.text]);
  const rest = found.filter((each) => each !== worst);
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
  const { severity, pending, text, since, figure, replica, runbook, name } = it;
  const word = pending ? "Pending" : severity === "critical" ? "Critical" : "Warning";
  return html`<p class="finding" title=${name}>
    <span class=${severity === "critical" ? "bad" : "warn"}>${word}</span><strong>${text}</strong>
    ${since != null && html`<span class="note">for ${span(Math.max(0, now - since))}</span>`}
    ${figure && html`<button type="button" onClick=${() => choose({ tile: figure })}>Chart</button>`}
    ${replica && html`<button type="button" onClick=${() => choose({ replica })}>Replica</button>`}
    ${runbook && html`<a href=${runbook}>Runbook</a>`}
    ${children}
  </p>`;
}

function summary({ replicas, requests, routers }, ready) {
  const running = requests.filter((each) => each.outcome === "running").length;
  if (!routers.length) return "No router has answered yet.";
  if (!replicas.length) return "No replica has started.";
  return `${ready === replicas.length ? plural(ready, "replica") : `${ready} of ${plural(replicas.length, "replica")}`} ready · ${plural(running, "request")} running`;
}
