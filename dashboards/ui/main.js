// The live view: connection, what is chosen, layout, and keys.
// Invariant: a panel is drawn again only when what it shows has changed; a hidden page is not drawn at all; a paused page
// shows the state at which it was paused.
// `html[data-ready]` says that the first state, and all that was asked for with it, is on the screen.

import { html, render, useLayoutEffect, useRef, useState } from "./vendor/htm/preact_standalone.js";
import { CacheTree } from "./cache_tree.js";
import { Connection, onIdle } from "./connection.js";
import { takeNames } from "./format.js";
import { Fleet, worstFirst } from "./fleet.js";
import { Header, LostBanner } from "./header.js";
import { Health } from "./health.js";
import { Keys, onKeys } from "./keys.js";
import { Notice } from "./panel.js";
import { Playground } from "./playground.js";
import { ReplicaDrawer, remember } from "./replica_drawer.js";
import { Requests } from "./requests.js";
import { River } from "./river.js";
import { useSelection } from "./selection.js";
import { Tenants } from "./tenants.js";
import { Tiles } from "./tiles.js";
import { Tour } from "./tour.js";
import { Why, useDetails } from "./why.js";

const TABS = { try: "Try", why: "Why", replica: "Replica" };
const shown = { state: null, link: { status: "connecting" }, paused: false };
const root = document.getElementById("view");

function App({ state, link, paused }) {
  const [theme, setTheme] = useState(0); // counts changes
  const [help, setHelp] = useState(false);
  const [selection, select] = useSelection();
  const stable = useRef({}).current; // functions that stay the same, so that nothing is drawn for them
  stable.selection = selection;
  stable.theme ??= () => setTheme((count) => count + 1);
  stable.tryIt ??= () => {
    stable.choose({ tab: "try" });
    requestAnimationFrame(() => {
      toSide();
      document.querySelector("#pane-try textarea")?.focus({ preventScroll: true });
    });
  };
  stable.help ??= () => setHelp((before) => !before);
  stable.choose ??= (change) => {
    const { request, replica, tab = request ? "why" : replica ? "replica" : undefined, stay, ...rest } = change;
    // a request brings its own replica, unless one is named with it
    const named = Object.entries({ request, replica: request && !replica ? null : replica, tab }).filter(([, value]) => value !== undefined);
    select({ ...rest, ...Object.fromEntries(named) });
    if ((request || replica) && !stay && !matchMedia("(min-width: 1280px)").matches) requestAnimationFrame(toSide);
  };
  useLayoutEffect(() => {
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", stable.theme);
    const rest = onKeys({
      pause,
      help: stable.help,
      move: (step) => move(step, stable),
      tab: (tab) => stable.choose({ tab }),
      back: () => stable.choose({ request: null, replica: null, tile: null }),
    });
    return () => {
      system.removeEventListener("change", stable.theme);
      rest();
    };
  }, []);
  return html`
    <button type="button" class="skip" onClick=${() => document.querySelector("#requests tbody button, #requests input")?.focus()}>Skip to the requests</button>
    ${state && link.status === "live" && html`<${Tour} calm=${!state.alerts.some((each) => each.severity === "critical" && each.state !== "pending")} />`}
    <${Header} model=${state?.model} mode=${state?.mode} facts=${state?.facts} up=${upOf(state)} link=${link} paused=${paused}
      onPause=${pause} onTheme=${stable.theme} onHelp=${stable.help} onTry=${stable.tryIt} />
    ${link.status === "lost" && html`<${LostBanner} link=${link} known=${state} onRetry=${() => connection.open()} />`}
    ${help && html`<${Keys} onClose=${stable.help} />`}
    ${state
      ? html`<${Page} state=${state} selection=${selection} choose=${stable.choose} theme=${theme} paused=${paused} old=${link.status === "lost"} />`
      : html`<main class="page"><${Notice} title=${link.status === "lost" ? "The observatory does not answer." : "Asking for the state of the cluster …"}>
          ${link.status === "lost" && html`<p>It starts with the application. <code>serve status</code> says whether it runs.</p>`}<//></main>`}`;
}

function Page({ state, selection, choose, theme, paused, old }) {
  const { replicas, requests } = state;
  const rows = useRef(new Map());
  const row = requests.find((each) => each.rid === selection.request) ?? rows.current.get(selection.request);
  rows.current = new Map(row && [[row.rid, row]]); // of a chosen request that has left the list
  const details = useDetails(selection.request, row);
  const wanted = selection.replica ?? row?.prefill ?? row?.replica;
  const first = replicas.find((each) => each.state === "accepting") ?? replicas[0];
  const replica = replicas.some((each) => each.id === wanted) ? wanted : first?.id;
  const now = requests.some((each) => each.outcome === "running") ? state.time : 0;
  const tab = useRef(null);
  tab.current = tabOf(selection);
  const byReplica = useRef((id) => choose({ replica: id, tab: tab.current, stay: true })).current; // the cache's own list
  return html`<main class=${old ? "page old" : "page"}>
    <${Health} state=${state} choose=${choose} />
    <${Tiles} figures=${state.figures} history=${state.history} time=${state.time} tile=${selection.tile} choose=${choose} />
    <${Fleet} mode=${state.mode} replicas=${replicas} ended=${state.ended} routers=${state.routers} links=${state.links} autoscaling=${state.autoscaling}
      chosen=${selection.replica} choose=${choose} />
    <div class="column">
      <${River} state=${state} selection=${selection} choose=${choose} theme=${theme} paused=${paused} />
      <${Requests} requests=${requests} replicas=${replicas} model=${state.model} api=${state.api} now=${now} chosen=${selection.request} choose=${choose} />
      <${Tenants} requests=${requests} batches=${state.batches} time=${state.time} />
    </div>
    <${Side} tab=${tabOf(selection)} choose=${choose}>
      ${{
        try: html`<${Playground} state=${state} selection=${selection} choose=${choose} />`,
        why: html`<${Why} rid=${selection.request} row=${row} details=${details} state=${state} />`,
        replica: html`<${ReplicaDrawer} state=${state} replica=${wanted ?? worstFirst(replicas)[0]?.id} choose=${choose} />`,
      }}
    <//>
    <div class="below">${replica && html`<${CacheTree} replicas=${replicas} chosen=${replica} onChoose=${byReplica} pageKeys=${details.keys} />`}</div>
  </main>`;
}

// The right third, or where there is no room for one below the requests, where a choice and the header's Try lead to: tabs. The playground stays in place while another is shown, so that a conversation is not lost.
function Side({ tab, choose, children }) {
  const names = Object.keys(TABS);
  const onKey = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = names[(names.indexOf(tab) + step + names.length) % names.length];
    choose({ tab: next });
    event.currentTarget.querySelector(`#tab-${next}`).focus();
  };
  return html`<aside id="side" class="side" aria-label="Try, why, replica">
    <div class="tabs" role="tablist" onKeyDown=${onKey}>
      ${names.map((name) => html`<button type="button" role="tab" key=${name} id=${`tab-${name}`} aria-selected=${name === tab}
        aria-controls=${`pane-${name}`} tabindex=${name === tab ? 0 : -1} onClick=${() => choose({ tab: name })}>${TABS[name]}</button>`)}
    </div>
    ${names.map((name) => html`<div class="pane" role="tabpanel" key=${name} id=${`pane-${name}`} aria-labelledby=${`tab-${name}`}
      tabindex="-1" hidden=${name !== tab}>${(name === tab || name === "try") && children[name]}</div>`)}
  </aside>`;
}

function toSide() {
  document.getElementById("side")?.scrollIntoView();
}

function tabOf({ tab, request, replica }) {
  return tab in TABS ? tab : request ? "why" : replica ? "replica" : "try";
}

// The request `step` places further down the list that is shown.
function move(step, { selection, choose }) {
  const rids = [...document.querySelectorAll("#requests tbody [data-rid]")].map((each) => each.dataset.rid);
  const at = rids.indexOf(selection.request);
  const rid = rids[at < 0 ? 0 : Math.min(rids.length - 1, Math.max(0, at + step))];
  if (rid) choose({ request: rid });
}

function upOf(state) {
  if (!state?.started) return null;
  const up = state.time - state.started;
  return up < 60 ? Math.floor(up / 10) * 10 : Math.floor(up / 60) * 60; // the header is not drawn each second for it
}

function draw() {
  if (document.hidden && document.documentElement.dataset.ready) return;
  render(html`<${App} state=${shown.state} link=${shown.link} paused=${shown.paused} />`, root);
  if (shown.state && !document.documentElement.dataset.ready) onIdle(() => (document.documentElement.dataset.ready = "1"));
}

function pause() {
  if (!shown.state) return; // nothing that could stand still
  shown.paused = !shown.paused;
  if (!shown.paused) shown.state = shown.latest;
  draw();
}

document.addEventListener("visibilitychange", draw);
const connection = new Connection({
  snapshot: new URLSearchParams(location.search).has("snapshot"),
  onState: (state) => {
    shown.latest = state;
    takeNames([...state.ended, ...state.replicas], state.whole);
    remember(state);
    if (shown.paused) return;
    shown.state = state;
    draw();
  },
  onLink: (link) => {
    shown.link = link;
    draw();
  },
});
