// The bar at the top: what is served, the state of the connection, pause, theme, and the keys.

import { html, useEffect, useState } from "./vendor/htm/preact_standalone.js";
import { count, span } from "./format.js";
import { keep, once } from "./panel.js";

const WORDS = { connecting: "connecting", live: "live", snapshot: "snapshot", lost: "connection lost" };
const THEMES = { auto: ["Theme: system", "M8 2a6 6 0 0 1 0 12z"], light: ["Theme: light", ""], dark: ["Theme: dark", "M8 2a6 6 0 1 0 0 12A6 6 0 1 0 8 2z"] }; // filled: dark

export const Header = once(({ model, mode, facts, up, link, paused, onPause, onTheme, onHelp, onTry }) => html`<header class="top">
  <h1 class="brand"><svg viewBox="0 0 32 32" aria-hidden="true"><path d="M2 9c7 0 11 3 14 8 3-5 7-8 14-8-3 7-7 11-11 13l-3 9-3-9C9 20 5 16 2 9z" /></svg>Manta</h1>
  <ul class="facts-line" aria-label="What is served">
    ${told({ model, mode, up, ...facts }).map(([name, text]) => html`<li key=${name} title=${name}>${text}</li>`)}
  </ul>
  <div class="top-end">
    <p class=${`link ${paused ? "paused" : link.status}`} role="status"><span class="dot" aria-hidden="true"></span>${paused ? "frozen" : WORDS[link.status]}</p>
    ${facts?.grafana && html`<a href=${`${facts.grafana.replace(/\/$/, "")}/d/manta-fleet`} target="_blank" rel="noreferrer">Grafana</a>`}
    <button type="button" id="to-try" onClick=${onTry}>Try</button>
    <button type="button" id="pause" aria-pressed=${paused} onClick=${onPause} title="Space">${paused ? "Resume" : "Freeze"}</button>
    <${Theme} onTheme=${onTheme} />
    <button type="button" id="help" class="icon" onClick=${onHelp} aria-label="Keys and words" title="Keys and words: ?">?</button>
  </div>
</header>`);

// [name, text] of what is known, the most telling first.
function told({ model, dtype, quantization, context_len: context, page_size: page, tp, device, mode, version, up }) {
  return [
    ["model", model],
    ["dtype", [dtype?.replace("torch.", ""), quantization].filter(Boolean).join(" ")],
    ["context", context && `${count(context)} context`],
    ["page size", page && `page ${page}`],
    ["tensor parallel", tp > 1 && `TP ${tp}`],
    ["device", device],
    ["mode", mode],
    ["version", version && `v${version}`],
    ["uptime", up != null && `up ${span(up)}`],
  ].filter(([, text]) => text);
}

function Theme({ onTheme }) {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "auto");
  const next = { auto: "light", light: "dark", dark: "auto" }[theme];
  const choose = () => {
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    keep("manta-theme", next);
    setTheme(next);
    onTheme();
  };
  const [name, filled] = THEMES[theme];
  return html`<button type="button" id="theme" class="icon" onClick=${choose} title=${name}>
    <svg viewBox="0 0 16 16" aria-hidden="true"><circle cx="8" cy="8" r="6" /><path d=${filled} /></svg><span class="unseen">${name}</span></button>`;
}

// Shown while the connection is lost: since when, when the next try is, and a way to try at once.
export function LostBanner({ link, known, onRetry }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  const ago = Math.max(0, Math.round((now - link.since) / 1e3));
  const wait = Math.max(0, Math.ceil((link.retryAt - now) / 1e3));
  return html`<div class="banner">
    <p role="alert">Connection lost${link.why ? `: ${link.why}` : ""}.</p>
    <p>${known && `What is shown is ${ago} s old. `}Next try in ${wait} s.</p>
    <button type="button" onClick=${onRetry}>Try now</button>
  </div>`;
}
