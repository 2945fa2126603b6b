// Bars of KV pools by state, and the page's legend. The order of the states and their colours are the same everywhere.

import { html } from "./vendor/htm/preact_standalone.js";
import { count, percent } from "./format.js";

const TIERS = { L1: "KV", L2: "Host KV" };

export const STATES = [
  ["protected", "requests use it now"],
  ["reserved", "set aside for running requests and transfers"],
  ["quarantined", "a transfer may still write to it"],
  ["evictable", "cached prefixes, given up when room is needed"],
  ["free", "empty"],
];

// Share of the first pool that a new request cannot have.
export function usedOf({ pools }) {
  const pool = pools?.[0];
  return pool?.capacity ? (pool.protected + pool.reserved + pool.quarantined) / pool.capacity : 0;
}

export function PoolBar({ pool }) {
  const share = (state) => (pool.capacity ? pool[state] / pool.capacity : 0);
  const used = share("protected") + share("reserved") + share("quarantined");
  const said = STATES.map(([state]) => `${state} ${percent(share(state))}`).join(", ");
  return html`<div class="pool">
    <p class="pool-line" title=${`${count(pool.capacity)} tokens`}>
      ${TIERS[pool.tier] ?? pool.tier} <strong>${percent(used)}</strong> in use, ${percent(share("evictable"))} evictable
    </p>
    <div class="bar" role="img" aria-label=${`${pool.tier} pool of ${count(pool.capacity)} tokens: ${said}`}>
      ${STATES.map(([state]) => {
        const title = `${state}: ${count(pool[state])} tokens, ${percent(share(state))}`;
        return html`<span key=${state} class=${`part ${state}`} style=${{ width: `${share(state) * 100}%` }} title=${title}></span>`;
      })}
    </div>
  </div>`;
}

// The colours of the whole page, each with one meaning: of requests' bars, of pools, of the cache.
export const COLOURS = [
  ["route", "route", "at the router, until it was sent to a replica"],
  ["queue", "queue", "waiting at a replica"],
  ["prefill", "prefill", "computing the prompt"],
  ["transfer", "transfer", "K/V on its way from prefill to decode"],
  ["decode", "decode", "making output tokens"],
  ["evictable", "cached", "prompt tokens that were reused; in a pool evictable: kept, and given up when room is needed"],
  ...STATES.filter(([name]) => name !== "evictable").map(([name, meaning]) => [name, name, meaning]),
  ["river-missed", "missed", "an objective was missed: from when"],
  ["river-failed", "failed", "a request failed, or a replica was lost"],
  ["river-retry", "went on", "a request went on at another replica"],
];

export function Legend() {
  return html`<ul class="legend" aria-label="Colours">${COLOURS.map(([kind, name, meaning]) => html`<li key=${kind} title=${meaning}><span
    class=${`swatch part ${kind}`} aria-hidden="true"></span>${name}</li>`)}</ul>`;
}
