// The live view: connection, what is chosen, and the panels.
// Invariant: a panel is drawn again only when what it shows has changed; a hidden page is not drawn at all.
// `html[data-ready]` says that the first state, and all that was asked for with it, is on the screen.

import { html, render, useLayoutEffect, useRef, useState } from "./vendor/htm/preact_standalone.js";
import { Autoscaling } from "./autoscaling.js";
import { CacheTree } from "./cache_tree.js";
import { Cluster } from "./cluster.js";
import { Connection, onIdle } from "./connection.js";
import { Header, LostBanner } from "./header.js";
import { History } from "./history.js";
import { Notice } from "./panel.js";
import { useDetails } from "./request_details.js";
import { Requests } from "./requests.js";
import { useSelection } from "./selection.js";
import { Why } from "./why.js";

const shown = { state: null, link: { status: "connecting" } };
const root = document.getElementById("view");

function App({ state, link }) {
  const [theme, setTheme] = useState(0); // counts changes
  const [selection, choose] = useSelection();
  const rows = useRef(new Map());
  const row = state?.requests.find((each) => each.rid === selection.request) ?? rows.current.get(selection.request);
  rows.current = new Map(row && [[row.rid, row]]); // of a chosen request that has left the list
  const details = useDetails(selection.request, row);
  const stable = useRef({
    theme: () => setTheme((count) => count + 1),
    replica: (replica) => choose({ replica }),
    request: null,
  }).current;
  stable.request ??= (request) => {
    const chosen = shown.state.requests.find((each) => each.rid === request);
    choose({ request, replica: chosen?.prefill ?? chosen?.replica });
  };
  useLayoutEffect(() => {
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", stable.theme);
    return () => system.removeEventListener("change", stable.theme);
  }, []);
  return html`
    <${Header} model=${state?.model} mode=${state?.mode} replicas=${state?.replicas} totals=${state?.totals} link=${link} onTheme=${stable.theme} />
    ${link.status === "lost" && html`<${LostBanner} link=${link} onRetry=${retry} />`}
    ${state
      ? html`<${Panels} state=${state} selection=${selection} row=${row} details=${details} stable=${stable} theme=${theme} old=${link.status === "lost"} />`
      : html`<main><${Notice} title=${link.status === "lost" ? "The observatory does not answer." : "Asking for the state of the cluster …"}>
          ${link.status === "lost" && html`<p>It starts with the application. <code>serve status</code> says whether it runs.</p>`}<//></main>`}`;
}

function Panels({ state, selection, row, details, stable, theme, old }) {
  const { replicas, requests, model } = state;
  const wanted = selection.replica ?? row?.prefill ?? row?.replica;
  const first = replicas.find((each) => each.state === "accepting") ?? replicas[0];
  const chosen = replicas.some((each) => each.id === wanted) ? wanted : first?.id;
  const now = requests.some((each) => each.outcome === "running") ? state.time : 0;
  return html`<main class=${old ? "old" : ""}>
    <div class="column">
      <${Cluster} mode=${state.mode} replicas=${replicas} routers=${state.routers} links=${state.links} chosen=${chosen} onChoose=${stable.replica} />
      <${History} history=${state.history} replicas=${replicas} theme=${theme} />
      ${chosen && html`<${CacheTree} replicas=${replicas} chosen=${chosen} onChoose=${stable.replica} pageKeys=${details.keys} />`}
    </div>
    <div class="column">
      <${Requests} requests=${requests} replicas=${replicas} model=${model} now=${now} chosen=${selection.request} onChoose=${stable.request} />
      <${Why} rid=${selection.request} row=${row} details=${details} />
      <${Autoscaling} autoscaling=${state.autoscaling} />
    </div>
  </main>`;
}

function draw() {
  if (document.hidden && document.documentElement.dataset.ready) return;
  render(html`<${App} state=${shown.state} link=${shown.link} />`, root);
  if (shown.state && !document.documentElement.dataset.ready) onIdle(() => (document.documentElement.dataset.ready = "1"));
}

function retry() {
  connection.open();
}

document.addEventListener("visibilitychange", draw);
const connection = new Connection({
  snapshot: new URLSearchParams(location.search).has("snapshot"),
  onState: (state) => {
    shown.state = state;
    draw();
  },
  onLink: (link) => {
    shown.link = link;
    draw();
  },
});
