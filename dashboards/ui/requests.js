// The latest requests: a row each with its stages; choosing one explains it (why.js).

import { html, useLayoutEffect, useState } from "./vendor/htm/preact_standalone.js";
import { clock, count, percent, seconds, shortId } from "./format.js";
import { Notice, Panel, Scroller, once } from "./panel.js";
import { Legend } from "./pools.js";
import { Id } from "./table.js";
import { STAGES, Waterfall } from "./waterfall.js";

const OUTCOMES = ["running", "finished", "aborted", "failed", "refused", "unknown"];

export const Requests = once(({ requests, replicas, model, now, chosen, onChoose }) => {
  const [outcome, setOutcome] = useState("");
  const [replica, setReplica] = useState("");
  const [left, setLeft] = useState(""); // replica that was filtered by and is gone
  const [alike, setAlike] = useState(true);
  const gone = replica !== "" && !replicas.some((each) => each.id === replica);
  useLayoutEffect(() => {
    if (!gone) return;
    setLeft(replica);
    setReplica("");
  }, [gone]);
  const by = (id) => {
    setLeft("");
    setReplica(id);
  };
  const shown = requests.filter(
    (each) => (!outcome || each.outcome === outcome) && (!replica || each.replica === replica || each.prefill === replica),
  );
  const longest = Math.max(0, ...shown.map((each) => each.total_s ?? 0)) || Math.max(...shown.map((each) => lengthOf(each, now)), 0.001);
  const note = shown.length === 0 ? "" : alike ? `bars: ${seconds(longest)} from end to end` : "bars: each request at full width";
  return html`<${Panel} id="requests" title="Latest requests" note=${note}>
    ${requests.length === 0 ? html`<${NoRequests} model=${model} />` : html`
    <div class="controls">
      <label>outcome <select value=${outcome} onChange=${(event) => setOutcome(event.target.value)}>
        <option value="">all</option>${OUTCOMES.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
      </select></label>
      <label>replica <select value=${replica} onChange=${(event) => by(event.target.value)}>
        <option value="">all</option>
        ${replicas.map((each) => html`<option key=${each.id} value=${each.id}>${shortId(each.id)}</option>`)}
      </select></label>
      <label><input type="checkbox" checked=${alike} onChange=${(event) => setAlike(event.target.checked)} /> one scale</label>
      <span class="note" role="status">${left && `${shortId(left)} has left: requests of all replicas are shown`}</span>
    </div>
    ${shown.length === 0 ? html`<${Notice} title="No request of the last ${requests.length} is like that." />` : html`
    <${Scroller} label="Latest requests" tall>
      <table class="requests">
        <thead><tr><th>request</th><th class="num wide">prompt</th><th class="num wide">reused</th><th class="num wide">output</th>
          <th>went to</th><th class="num">TTFT</th><th class="stages-head">stages</th></tr></thead>
        <tbody>
          ${shown.map((row) => html`<${Row} key=${row.rid} row=${row} chosen=${row.rid === chosen} onChoose=${onChoose}
            scale=${alike ? longest : lengthOf(row, now)} now=${row.outcome === "running" ? now : 0} />`)}
        </tbody>
      </table>
    <//>`}
    <${Legend} entries=${[...STAGES, ["first token", "where the mark stands"]]} label="Stages" />`}
  <//>`;
});

const Row = once(({ row, chosen, onChoose, scale, now }) => {
  const told = [row.endpoint, row.outcome, clock(row.time), row.tries > 1 ? `${row.tries} tries` : ""].filter(Boolean).join(", ");
  const reused = row.cached_tokens == null || !row.prompt_tokens ? null : row.cached_tokens / row.prompt_tokens;
  return html`<tr class=${chosen ? "chosen" : ""} onClick=${() => onChoose(row.rid)}>
    <td class="request-cell"><button type="button" class="request-name" aria-pressed=${chosen} title=${row.rid}>${row.rid}</button>
      <span class=${`outcome ${row.outcome}`}>${told}</span></td>
    <td class="num wide">${count(row.prompt_tokens)}</td>
    <td class="num wide">${percent(reused)}</td>
    <td class="num wide">${count(row.output_tokens)}</td>
    <td><${Way} row=${row} /></td>
    <td class="num">${seconds(row.ttft_s)}</td>
    <td class="stages-cell"><${Waterfall} row=${row} scale=${scale} now=${now} /></td>
  </tr>`;
});

function Way({ row }) {
  return html`${row.prefill && html`<${Id} id=${row.prefill} /><br />→ `}<${Id} id=${row.replica} />`;
}

function NoRequests({ model }) {
  const line = `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' -d '${JSON.stringify({
    model, messages: [{ role: "user", content: "Name three colours." }], max_tokens: 32 })}'`;
  const [copied, setCopied] = useState("");
  const copy = () =>
    navigator.clipboard.writeText(line).then(() => setCopied("Copied."), () => setCopied("Copying is not allowed here: mark the line."));
  return html`<${Notice} title="No requests yet. Send one:">
    <pre class="curl" tabindex="0">${line}</pre>
    <p><button type="button" onClick=${copy}>Copy</button> <span role="status">${copied}</span></p>
  <//>`;
}

function lengthOf(row, now) {
  return row.total_s ?? (row.outcome === "running" ? Math.max(0.001, now - row.time) : 0.001);
}
