// Bars of KV pools by state, and their legend. The order of the states and their colours are the same everywhere.

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

export function Legend({ entries, label }) {
  return html`<ul class="legend" aria-label=${label}>
    ${entries.map(
      ([name, meaning]) =>
        html`<li key=${name} title=${meaning}><span class=${`swatch part ${name}`} aria-hidden="true"></span>${name}</li>`,
    )}
  </ul>`;
}
