// The radix cache of the chosen replica: asked for when it or the depth changes, and again, at most each five seconds,
// when the replica's pools have changed.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm/preact_standalone.js";
import { getJson } from "./connection.js";
import { count, nameOf, plural } from "./format.js";
import { Icicle } from "./icicle.js";
import { Notice, Panel, once, useWidth } from "./panel.js";

const AGAIN_MS = 5000;
const DEPTHS = [2, 4, 6, 8, 12, 20];

export const CacheTree = once(({ replicas, chosen, onChoose, pageKeys }) => {
  const [depth, setDepth] = useState(6);
  const [detail, setDetail] = useState(null);
  const replica = replicas.find((each) => each.id === chosen);
  const { tree, error, again } = useTree(chosen, depth, replica && `${replica.cache_nodes} ${JSON.stringify(replica.pools)}`);
  const [place, width] = useWidth();
  const empty = tree && tree.root.subtree_tokens === 0;
  const figures = tree && `${count(tree.tokens)} tokens in ${plural(tree.nodes, "node")}${tree.shown < tree.nodes ? `, ${count(tree.shown)} shown` : ""}`;
  return html`<${Panel} id="cache" title=${`Radix cache of ${nameOf(chosen)}`} note=${figures}>
    <div class="controls">
      <label>Replica <select value=${chosen} onChange=${(event) => onChoose(event.target.value)}>
        ${replicas.map((each) => html`<option key=${each.id} value=${each.id}>${nameOf(each.id)}</option>`)}
      </select></label>
      <label>Levels <select value=${depth} onChange=${(event) => setDepth(Number(event.target.value))}>
        ${DEPTHS.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
      </select></label>
    </div>
    ${error && html`<${Notice} error title=${error}><button type="button" onClick=${again}>Ask again</button><//>`}
    ${empty && html`<${Notice} title="No prefix is cached on this replica yet.">
      <p>Each finished prompt leaves its pages here; a prompt that starts alike reuses them.</p><//>`}
    <div class=${error ? "icicle-frame old" : "icicle-frame"} ref=${place}>
      ${tree && !empty && width > 0 && html`<${Icicle} key=${chosen} tree=${tree} pageKeys=${pageKeys} width=${width}
        onDetail=${setDetail} label=${`Radix cache of ${chosen}; arrow keys move, Enter widens a node, Escape shows all`} />`}
    </div>
    ${tree && !empty && html`<p class="detail">${detail ?? "Width: tokens. Paler: longer unused. Hatched: left out. Outlined: of the chosen request. Point at a node, or reach it with the arrow keys; Enter or a click widens it."}</p>`}
  <//>`;
});

function useTree(replica, depth, signature) {
  const [answer, setAnswer] = useState({});
  const asked = useRef({ at: 0, timer: null, number: 0, signature: null });
  const load = async () => {
    const own = asked.current;
    const number = ++own.number;
    clearTimeout(own.timer);
    Object.assign(own, { timer: null, at: Date.now(), signature: own.latest });
    try {
      const tree = await getJson(`api/tree?replica=${encodeURIComponent(replica)}&depth=${depth}`);
      if (number === own.number) setAnswer({ tree });
    } catch (error) {
      const why = error.status === 404 ? "This replica is gone." : `The replica's cache cannot be shown: ${error.message}.`;
      if (number === own.number) setAnswer((before) => ({ ...before, error: why }));
    }
  };
  asked.current.latest = signature;
  useLayoutEffect(() => {
    setAnswer({});
    if (replica) load();
    return () => {
      asked.current.number += 1;
      clearTimeout(asked.current.timer);
      asked.current.timer = null;
    };
  }, [replica, depth]);
  useLayoutEffect(() => {
    const own = asked.current;
    if (replica && own.signature !== signature && !own.timer && signature)
      own.timer = setTimeout(() => load(), Math.max(0, own.at + AGAIN_MS - Date.now()));
  }, [signature]);
  return { ...answer, again: load };
}
