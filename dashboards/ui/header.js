// The strip at the top: what the whole fleet does, the state of the connection, light and dark.

import { html, useEffect, useState } from "./vendor/htm/preact_standalone.js";
import { percent, rate, seconds } from "./format.js";
import { once } from "./panel.js";

const WORDS = { connecting: "connecting", live: "live", snapshot: "snapshot", lost: "connection lost" };
const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

export const Header = once(({ model, mode, replicas, totals, link, onTheme }) => {
  const ready = replicas?.filter((each) => each.state === "accepting").length;
  const figures = totals && [
    ["replicas ready", `${ready} / ${replicas.length}`],
    ["requests/s", rate(totals.requests_per_s)],
    ["TTFT p50 / p90", `${seconds(totals.ttft_p50_s)} / ${seconds(totals.ttft_p90_s)}`],
    ["prompt tokens reused", percent(totals.reuse_ratio)],
    ["fullest pool", percent(totals.fullest_pool_ratio)],
  ];
  return html`<header class="top">
    <div class="brand"><h1>Manta</h1>${model && html`<p class="note" title=${model}>${model}, ${mode}</p>`}</div>
    <dl class="figures">
      ${figures?.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>
    <div class="top-end">
      <p class=${`link ${link.status}`} role="status"><span class="dot" aria-hidden="true"></span>${WORDS[link.status]}</p>
      <${Theme} onTheme=${onTheme} />
    </div>
  </header>`;
});

function Theme({ onTheme }) {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "auto");
  const next = { auto: "light", light: "dark", dark: "auto" }[theme];
  const choose = () => {
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("manta-theme", next);
    } catch {
      // not kept then
    }
    setTheme(next);
    onTheme();
  };
  return html`<button type="button" class="quiet" id="theme" onClick=${choose}>${THEMES[theme]}</button>`;
}

// Shown while the connection is lost: since when, when the next try is, and a way to try at once.
export function LostBanner({ link, onRetry }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  const ago = Math.max(0, Math.round((now - link.since) / 1e3));
  const wait = Math.max(0, Math.ceil((link.retryAt - now) / 1e3));
  return html`<div class="banner">
    <p role="alert">Connection lost${link.why ? `: ${link.why}` : ""}.</p>
    <p>What is shown is ${ago} s old. Next try in ${wait} s.</p>
    <button type="button" onClick=${onRetry}>Try now</button>
  </div>`;
}
