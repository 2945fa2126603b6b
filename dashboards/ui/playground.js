// The playground: while a prompt is typed, where it would go and how much of it is cached there; then the prompt painted by
// page, the answer as it comes, and what came true. Its state is in conversation.js, so that another tab does not end it.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm/preact_standalone.js";
import { apiKey, asCurl, asPython, setApiKey } from "./api.js";
import { postJson } from "./connection.js";
import { Conversation, figuresOf, inEvents, jumps } from "./conversation.js";
import { count, nameOf, rate, seconds } from "./format.js";
import { cachedOf, KINDS, PaintedText, pieces, Strip, summary } from "./painted.js";
import { copied, Notice, once } from "./panel.js";

const MOST_GHOSTS = 3;
const DOCUMENT = `You answer questions about this text, in one or two short sentences.

Manta rays are the largest rays in the world. Two species are recognised. The reef manta ray lives along coasts and reefs and grows to about five metres from wing tip to wing tip. The giant oceanic manta ray crosses open oceans and reaches seven metres and two tonnes. Both lack the stinging barb of other rays.

Mantas feed on plankton. They swim with the mouth open and guide the water into it with two flaps beside the head, the cephalic lobes. Plates at the gills, covered with fine filaments, hold back shrimps, krill and other small animals. When plankton is dense, mantas feed in chains of dozens of animals, or turn somersaults in one place.

A manta visits the same cleaning stations for years. There small wrasses and angelfish eat parasites and dead skin off its body. The pattern of spots on its belly is different in each animal, so that divers can tell them apart in photographs. The manta's brain is the largest of any fish in proportion to its body.

Females carry a single pup for about a year, and several years may pass before the next. This is why mantas recover slowly from fishing. They are caught for their gill plates, and drown in nets that were set for tuna. International trade in them has been limited since 2014. Mantas live for forty years or more.`;
const QUESTIONS = ["How do mantas feed?", "How can divers tell them apart?", "Why do they recover slowly from fishing?"];

const talk = new Conversation(() => {});

export function Playground({ state, selection, choose }) {
  const [, setDrawn] = useState(0); // counts changes of the conversation
  const box = useRef(null);
  const place = useFollowed();
  talk.onChange = () => setDrawn((before) => before + 1);
  talk.api = `${(state.api ?? "").replace(/\/$/, "")}/`;
  talk.model = state.model;
  const pageSize = state.replicas.find((each) => each.page_size)?.page_size ?? state.facts?.page_size ?? 16;
  talk.tab = selection.tab ?? "try"; // stays, when a request of the playground is chosen on the page
  const show = (turn) => choose({ request: turn.rid, replica: turn.route?.replica, tab: talk.tab, stay: true });
  const inView = () => box.current.closest(".play-dock").scrollIntoView({ block: "nearest" });
  const refused = talk.guess?.status === 400; // it would be refused as it is: too long, for one
  const send = () => talk.draft.trim() && !talk.running && !refused && (talk.send(show), inView());
  const fill = (text, system = talk.system) => {
    talk.system = system;
    talk.type(text);
    box.current.focus();
  };
  const acts = useRef({
    again: (turn) => talk.send(show, turn),
    fork: (turn) => {
      talk.fork(turn);
      box.current.focus();
    },
    why: (turn) => choose({ request: turn.rid, tab: "why" }),
    replica: (id) => choose({ replica: id, tab: "replica" }),
  }).current;
  const asked = new Set(talk.turns.map((turn) => turn.user));
  const questions = talk.system === DOCUMENT && !talk.running && !talk.draft ? QUESTIONS.filter((each) => !asked.has(each)) : [];
  const last = talk.turns.length - 1;
  return html`<div class="play" ref=${place}>
    ${talk.turns.length === 0 && html`<${Welcome} onFill=${fill} />`}
    ${talk.turns.length > 0 && html`<div class="play-turns" role="log" aria-label="Conversation" aria-live="off">
      ${talk.turns.map((turn, at) => html`<${Turn} key=${turn.rid} turn=${turn} version=${turn.version} isLast=${at === last} pageSize=${pageSize} acts=${acts}
        row=${at === last ? state.requests.find((each) => each.rid === turn.rid) : null} admin=${Boolean(state.keys?.admin)} />`)}
    </div>`}
    <p class="unseen" role="status">${statusOf(talk.turns[last])}</p>
    ${talk.failure && !talk.needsKey && html`<${Notice} error title=${`No answer: ${talk.failure}.`} />`}
    ${(talk.needsKey || talk.asksKey) && html`<${KeyField} onGiven=${() => {
      Object.assign(talk, { needsKey: false, asksKey: false, failure: null });
      talk.type(talk.draft);
    }} />`}
    <div class="play-dock"><form class="play-form" onSubmit=${(event) => (event.preventDefault(), send())}>
      <label class="unseen" for="play-text">Prompt</label>
      <textarea id="play-text" ref=${box} rows=${talk.turns.length ? 2 : 3} onFocus=${inView} placeholder=${talk.turns.length ? "Go on …" : "Type a prompt …"} value=${talk.draft}
        onInput=${(event) => ((talk.failure = null), talk.type(event.target.value))}
        onKeyDown=${(event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && (event.preventDefault(), send())} />
      <div class="play-row">
        ${talk.running
          ? html`<button type="button" class="play-send" onClick=${() => talk.stop()}>Stop</button>`
          : html`<button type="submit" class="play-send primary" disabled=${!talk.draft.trim() || refused}>Send</button>`}
        ${talk.turns.length > 0 && html`<button type="button" onClick=${() => acts.fork(null)}>New chat</button>`}
        ${questions.slice(0, 1).map((each) => html`<button type="button" class="quiet" key=${each} onClick=${() => fill(each)}>${each}</button>`)}
        <span class="note play-hint">Enter sends</span>
      </div>
    </form>
    <${Ghost} guess=${talk.guess} onKey=${() => ((talk.asksKey = true), talk.changed())} />
    <${Settings} state=${state} /></div>
  </div>`;
}

// [ref] of what stays scrolled to its end while it grows, until somebody scrolls up. Only where its pane scrolls by itself.
function useFollowed() {
  const place = useRef(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    const pane = place.current.parentElement;
    const note = () => (follows.current = pane.scrollTop + pane.clientHeight >= pane.scrollHeight - 40);
    pane.addEventListener("scroll", note, { passive: true });
    return () => pane.removeEventListener("scroll", note);
  }, []);
  const seen = `${talk.turns.length} ${talk.turns.at(-1)?.version}`;
  useLayoutEffect(() => {
    const pane = place.current.parentElement;
    if (follows.current && talk.turns.length) pane.scrollTop = pane.scrollHeight;
  }, [seen]);
  return place;
}

function Welcome({ onFill }) {
  return html`<div class="play-welcome">
    <h2>Ask the model something</h2>
    <p class="note">While you type, the text is sent to the router, and you see where the prompt would go and how much of it is
      cached there. Only this browser keeps the text.</p>
    <div class="play-row">
      <button type="button" onClick=${() => onFill(QUESTIONS[0], DOCUMENT)}>Ask about a document</button>
      <button type="button" onClick=${() => onFill("Name three colours.", "")}>Ask something short</button>
    </div>
  </div>`;
}

// Where the draft would go: a row a replica, its bar is the prompt: gold what is cached there, blue what it would compute.
function Ghost({ guess, onKey }) {
  if (!guess) return null;
  if (guess.code === "admin_key_needed")
    return html`<p class="note">Where it would go is shown to the admin key only. <button type="button" class="link-button" onClick=${onKey}>Give a key</button></p>`;
  if (guess.error) return html`<p class="note warn">${guess.error}</p>`;
  const { candidates, num_tokens: tokens, replica, predicted, pair } = guess.body;
  const sorted = [...candidates].sort((a, b) => (b.replica === replica) - (a.replica === replica) || b.chosen - a.chosen || a.ttft_s - b.ttft_s);
  const more = sorted.length - MOST_GHOSTS;
  const place = pair?.prefill ? `${nameOf(replica)}, its prompt to ${nameOf(pair.prefill)}` : nameOf(replica);
  return html`<div class="ghost" aria-live="polite">
    <p>Would go to <b>${place}</b>: <b>${count(predicted.cached_tokens)} of ${count(tokens)}</b> tokens cached, first token in
      ${" "}<b>${seconds(predicted.ttft_s)}</b>.</p>
    <ul>
      ${sorted.slice(0, MOST_GHOSTS).map((each) => html`<li key=${each.replica} class=${each.chosen ? "chosen" : ""}>
        <span class="ghost-name" title=${each.replica}>${nameOf(each.replica)}</span>
        <span class="prompt-bar">${["device", "host", "store"].map((tier) => html`<span key=${tier} class=${tier} style=${{ width: `${(100 * each[`${tier}_tokens`]) / tokens}%` }} />`)}</span>
        <span class="num">${count(each.cached_tokens)} cached</span><span class="num">${seconds(each.ttft_s)}</span></li>`)}
    </ul>
    ${more > 0 && html`<p class="note">and ${count(more)} more ${more === 1 ? "replica" : "replicas"}</p>`}
  </div>`;
}

const Turn = once(({ turn, isLast, pageSize, acts, row, admin }) => {
  const tried = jumps(turn.arrivals, row?.tries_at ?? turn.triesAt);
  const figures = figuresOf(turn);
  const replica = tried.at(-1)?.to ?? turn.route?.replica;
  const isOpen = turn.status === "waiting" || turn.status === "streaming";
  return html`<article class="turn">
    <div class="said"><p>${turn.again ? html`<span class="note">the same prompt again</span>` : turn.user}</p></div>
    <div class=${`answer ${turn.status}`} aria-busy=${isOpen}>
      ${turn.status === "waiting" ? html`<p class="note waiting">Waiting for the first token …</p>` : html`<p>${marked(turn, tried)}</p>`}
    </div>
    ${turn.status === "failed" && html`<p class="bad">It ended early: ${turn.error}.</p>`}
    ${turn.status === "stopped" && html`<p class="note">You stopped it.</p>`}
    <details class="turn-figures" open=${isLast}>
      <summary>${lineOf(turn, figures)}</summary>
      <${FirstToken} figures=${figures} />
      <${Prompt} turn=${turn} pageSize=${pageSize} isLast=${isLast} />
      ${turn.route && html`<p class="note">Answered by <button type="button" class="link-button" onClick=${() => acts.replica(turn.route.replica)}>
        ${nameOf(replica)}</button>${tried.map(({ from, how }) => html`, after ${nameOf(from)} ${how}`)}</p>`}
    </details>
    <div class="play-row">
      ${isOpen
        ? html`<${Kill} key=${replica} replica=${replica} admin=${admin} />`
        : html`${isLast && html`<button type="button" onClick=${() => acts.again(turn)}>Same again</button>`}
          <button type="button" onClick=${() => acts.fork(turn)}>Edit and fork</button>
          ${turn.route && html`<button type="button" class="link-button" onClick=${() => acts.why(turn)}>Why there?</button>`}
          <${Copy} turn=${turn} />`}
    </div>
  </article>`;
});

// The answer, with a mark where another replica went on, and a shade behind what came in one step.
function marked({ answer, arrivals }, tried) {
  const parts = [];
  let from = 0;
  for (const { at, from: before, how, to } of [...tried, { at: answer.length }]) {
    if (at == null) continue;
    parts.push(...shaded(answer.slice(0, at), arrivals.filter(([, start]) => start >= from && start < at)));
    if (to) parts.push(html`<span class="jump">${nameOf(before)} ${how}, ${nameOf(to)} goes on</span>`);
    from = at;
  }
  return parts;
}

function shaded(text, arrivals) {
  return inEvents(text, arrivals).map(([piece, tokens]) => tokens > 1 ? html`<span class="at-once" title=${`${tokens} tokens in one step`}>${piece}</span>` : piece);
}

function lineOf({ status, finish }, { ttft, cached, prompt, output, rate: speed }) {
  if (status === "waiting") return "Sent";
  const cache = cached == null || prompt == null ? "" : `${count(cached)} of ${count(prompt)} tokens cached`;
  const size = `${count(output)} ${output === 1 ? "token" : "tokens"}${finish === "length" ? " (its limit)" : ""}${speed ? ` at ${rate(speed)}/s` : ""}`;
  const parts = [`first token ${seconds(ttft)}`, cache, size];
  return parts.filter(Boolean).join(" · ");
}

// One bar: what was measured, then what the cache saved; the mark is what the router predicted.
function FirstToken({ figures }) {
  const { ttft, predicted, saved } = figures;
  if (ttft == null) return null;
  const scale = Math.max(ttft + saved, predicted ?? 0, 1e-6);
  const share = (value) => `${(100 * value) / scale}%`;
  const said = [`first token after ${seconds(ttft)}`, predicted != null && `predicted ${seconds(predicted)}`, saved > 0 && `about ${seconds(saved)} saved by the cache`];
  return html`<div class="first-bar" role="img" aria-label=${said.filter(Boolean).join(", ")}>
      <span class="measured" style=${{ width: share(ttft) }} /><span class="saved" style=${{ width: share(saved) }} />
      ${predicted != null && html`<span class="predicted" style=${{ left: share(predicted) }} />`}
    </div>
    <ul class="play-legend" aria-hidden="true">
      <li><i class="measured" /> measured ${seconds(ttft)}</li>
      ${predicted != null && html`<li><i class="predicted" /> predicted ${seconds(predicted)}</li>`}
      ${saved > 0 && html`<li><i class="saved" /> saved by the cache, about ${seconds(saved)}</li>`}
    </ul>`;
}

function Prompt({ turn, pageSize, isLast }) {
  const length = turn.texts ?? turn.usage?.prompt_tokens;
  if (!length) return null;
  const list = pieces(length, pageSize, cachedOf(turn.route));
  const kinds = [...new Set(list.map((each) => each.kind))];
  return html`<${Strip} list=${list} pageSize=${pageSize} />
    <p class="note">${summary(list, pageSize)}</p>
    ${turn.texts && html`<details class="prompt-text" open=${isLast}><summary>The prompt as the model reads it</summary>
      <${PaintedText} list=${list} />
      <ul class="play-legend">${kinds.map((kind) => html`<li key=${kind}><i class=${kind} /> ${KINDS[kind]}</li>`)}</ul></details>`}`;
}

function Kill({ replica, admin }) {
  const [step, setStep] = useState("");
  if (!admin || !replica) return null;
  const kill = async () => {
    setStep("asked");
    try {
      await postJson(`api/replicas/${encodeURIComponent(replica)}/kill`);
      setStep("");
    } catch (error) {
      setStep(`It was not killed: ${error.message}.`);
    }
  };
  if (step === "sure")
    return html`<button type="button" class="danger" onClick=${kill}>Kill ${nameOf(replica)} now</button><button type="button" onClick=${() => setStep("")}>Cancel</button>`;
  return html`<button type="button" disabled=${step === "asked"} onClick=${() => setStep("sure")}>Kill ${nameOf(replica)} …</button>
    ${step !== "asked" && step && html`<span class="bad" role="alert">${step}</span>`}`;
}

function Copy({ turn }) {
  const [shown, setShown] = useState(null);
  const url = new URL(`${talk.api}v1`, location.href).href;
  const copy = async (name, text) => setShown(await copied(text, `Copied as ${name}.`));
  const body = talk.body(turn);
  return html`<span class="note">Copy as ${" "}
      <button type="button" class="link-button" aria-label="Copy as curl" onClick=${() => copy("curl", asCurl(url, { ...body, stream_options: undefined }))}>curl</button>${" or "}
      <button type="button" class="link-button" aria-label="Copy as Python" onClick=${() => copy("Python", asPython(url, body))}>Python</button></span>
    <span class="note" role="status">${shown?.said}</span>
    ${shown?.text && html`<pre class="painted" tabindex="0">${shown.text}</pre>`}`;
}

function KeyField({ onGiven }) {
  const box = useRef(null);
  useLayoutEffect(() => box.current.focus(), []);
  const give = (event) => {
    event.preventDefault();
    setApiKey(box.current.value);
    onGiven();
  };
  return html`<form class="play-key" onSubmit=${give}>
    <label for="play-key">${apiKey() ? "The API refuses this key" : "The API asks for a key"}</label>
    <div class="play-row"><input id="play-key" ref=${box} type="password" autocomplete="off" /><button type="submit">Use it</button></div>
    <p class="note">It is kept in this tab until you close it.</p>
  </form>`;
}

function Settings({ state }) {
  const change = (name) => ({ target: { value } }) => {
    if (value === "") return; // or no number
    talk.options = { ...talk.options, [name]: Number(value) };
    talk.type(talk.draft); // another length may be taken, or refused
  };
  return html`<details class="play-settings"><summary>System prompt, length, temperature</summary>
    <label>System prompt <textarea rows="4" value=${talk.system}
      onInput=${(event) => ((talk.system = event.target.value), talk.type(talk.draft))} /></label>
    <div class="play-row">
      <label>Longest answer, tokens <input type="number" min="1" max=${state.facts?.context_len ?? 8192} value=${talk.options.max_tokens} onInput=${change("max_tokens")} /></label>
      <label>Temperature <input type="number" min="0" max="2" step="0.1" value=${talk.options.temperature} onInput=${change("temperature")} /></label>
    </div>
    ${!state.keys?.admin && html`<p class="note">Served with an admin key (<code>MANTA_ADMIN_KEY</code>), this page can also kill the
      replica that answers, and you see the answer go on.</p>`}
  </details>`;
}

// What a screen reader is told of the last turn: its beginning and its end, not each token.
function statusOf(turn) {
  if (!turn) return "";
  if (turn.status === "waiting") return "Sent.";
  return turn.status === "streaming" ? "The answer is coming." : turn.status === "done" ? `Answer: ${turn.answer}` : "The answer has ended.";
}
