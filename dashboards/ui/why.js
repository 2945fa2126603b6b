// Why the router sent the chosen request where it went: the sentence, the candidates, what was given up, each try, and
// what came of it.

import { html } from "./vendor/htm/preact_standalone.js";
import { Candidates } from "./candidates.js";
import { count, percent, seconds, shortId } from "./format.js";
import { HandOff, PairTable } from "./hand_off.js";
import { Notice, Panel, once } from "./panel.js";
import { Timeline } from "./waterfall.js";

export const Why = once(({ rid, row, details }) => {
  if (!rid) return html`<${Panel} id="why" title="Why there?">
    <${Notice} title="Choose a request above.">
      <p>This shows where the router could have sent it, what each place would have cost, and what became of it.</p><//>
  <//>`;
  const { body, error, gone } = details;
  const known = row ?? body?.row;
  const title = known?.replica ? `Why ${shortId(known.replica)}?` : "Why there?";
  const route = body?.route;
  return html`<${Panel} id="why" title=${title} note=${rid}>
    ${gone && html`<${Notice} error title="This request is no longer kept.">
      <p>A router explains its last requests only (setting router.decisions_kept), and forgets them when it ends.</p><//>`}
    ${error && !gone && html`<${Notice} error title=${`Its explanation cannot be shown: ${error}.`} />`}
    ${!body && !error && html`<p class="note">Asking the router …</p>`}
    ${route && html`<${Tries} route=${route} />`}
    ${body && !route && html`<${Notice} title="No router keeps this decision any longer." />`}
    ${known?.outcome && html`<h3>Timeline</h3><${Timeline} row=${known} />`}
  <//>`;
});

function Tries({ route }) {
  const last = route.tries.length - 1;
  const earlier = route.tries.slice(0, last);
  return html`
    ${last > 0 && html`<p class="warn">${last + 1} tries: the last is shown, the others below it.</p>`}
    <${Try} each=${route.tries[last]} />
    ${earlier.map((each, index) => html`<details key=${index}>
      <summary>Try ${index + 1}: ${shortId(each.replica)}, ${each.failure ?? each.outcome}</summary>
      <${Try} each=${each} />
    </details>`)}`;
}

// How many tokens, and which of them came from a lower tier.
function tokens({ cached_tokens: all, host_tokens: host, store_tokens: store }) {
  const below = [host && `${count(host)} host`, store && `${count(store)} store`].filter(Boolean);
  return below.length ? `${count(all)} (${below.join(", ")})` : count(all);
}

function Try({ each }) {
  const { predicted, actual, best_overlap: best } = each;
  const outcome = [
    ["policy", `${each.policy}: ${each.reason.replaceAll("_", " ")}`],
    ["cached tokens", `${tokens(predicted)} predicted, ${tokens(actual)} found, of ${count(each.num_tokens)}`],
    ["first token", `${seconds(predicted.ttft_s)} predicted, ${seconds(actual.ttft_s)} measured`],
    ["given up", best.given_up > 0
      ? `${count(best.given_up)} tokens: ${shortId(best.replica)} holds ${count(best.cached_tokens)} (${percent(best.cached_tokens / each.num_tokens)})`
      : "nothing: no other holds more of the prompt"],
    ["outcome", each.failure ? `${each.outcome}: ${each.failure}` : each.outcome],
  ];
  return html`<div class="try">
    ${each.sentence && html`<p class="sentence">${each.sentence}</p>`}
    <${Candidates} each=${each} />
    ${each.pair && html`<${PairTable} pair=${each.pair} />`}
    ${each.pair && html`<${HandOff} each=${each} />`}
    <dl class="outcomes">${outcome.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </div>`;
}
