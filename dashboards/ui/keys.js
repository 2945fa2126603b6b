// Keys that work everywhere on the page, the list of them, and what the page's words mean. A key that a panel has used (preventDefault) is left alone,
// and so is what is typed into a field. Keys of one letter can be switched off.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm/preact_standalone.js";
import { keep, kept } from "./panel.js";

const OFF = "manta-keys-off";
const LIST = [
  ["j, k", "next and previous request"],
  ["Enter", "go to the panel about the chosen request"],
  ["/", "filter the requests"],
  ["Space", "freeze the page, or resume"],
  ["t, w, r", "try, why, replica"],
  ["Esc", "close, or choose nothing"],
  ["?", "this list"],
];
const WORDS = [
  ["open", "at a router, its answer not complete: waiting or running"],
  ["waiting", "at a replica, its prompt not begun"],
  ["running", "in a replica's batch: each step makes a token for it"],
  ["TTFT, ITL", "time to the first token; between tokens"],
  ["KV pool", "a replica's memory of prompts and answers; in use is what a new request cannot have"],
  ["cached", "prompt tokens that a replica still has, and need not compute"],
  ["page", "the tokens of a pool that are kept or given up together"],
  ["unified", "each replica computes prompts and answers; else prefill replicas hand prompts to decode replicas"],
];

// -> a function that takes the keys back
export function onKeys({ pause, help, move, back, tab }) {
  const acts = {
    j: () => move(1),
    k: () => move(-1),
    " ": pause,
    "?": help,
    "/": () => document.querySelector("#requests input[type=search]")?.focus(),
    Enter: () => document.querySelector("#side .pane:not([hidden])")?.focus(),
    Escape: back,
    t: () => tab("try"),
    w: () => tab("why"),
    r: () => tab("replica"),
  };
  const onKey = (event) => {
    const { target, key } = event;
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || !(key in acts)) return;
    if (document.querySelector("dialog[open]") || (isOff() && key !== "Escape")) return;
    if (key === "Escape" && target.closest("input, textarea, select")) return target.blur();
    if (target.closest("input, textarea, select, [contenteditable]")) return;
    if ([" ", "Enter"].includes(key) && target.closest("button, a, summary, [role=treeitem], [role=tab]")) return;
    event.preventDefault();
    acts[key]();
  };
  addEventListener("keydown", onKey);
  return () => removeEventListener("keydown", onKey);
}

export function Keys({ onClose }) {
  const dialog = useRef(null);
  const [off, setOff] = useState(isOff());
  useLayoutEffect(() => dialog.current.showModal(), []);
  const toggle = (event) => {
    setOff(!event.target.checked);
    keep(OFF, event.target.checked ? "" : "1");
  };
  return html`<dialog class="keys" ref=${dialog} onClose=${onClose} aria-labelledby="keys-title">
    <h2 id="keys-title">Keys and words</h2>
    <dl>${LIST.map(([key, what]) => html`<div key=${key}><dt>${key.split(", ").map((each) => html`<kbd>${each}</kbd> `)}</dt><dd>${what}</dd></div>`)}</dl>
    <dl>${WORDS.map(([word, what]) => html`<div key=${word}><dt>${word}</dt><dd>${what}</dd></div>`)}</dl>
    <p><label><input type="checkbox" checked=${!off} onChange=${toggle} /> Use these shortcuts</label></p>
    <form method="dialog"><button>Close</button></form>
  </dialog>`;
}

function isOff() {
  return kept(OFF) === "1";
}
