// A prompt by page: what was reused, from which tier, and what was computed. Pure, but for the two components at the end.

import { html, useLayoutEffect, useRef } from "./vendor/htm/preact_standalone.js";
import { count } from "./format.js";

export const KINDS = {
  device: "reused",
  host: "loaded from host memory",
  store: "loaded from the store",
  computed: "computed",
  unknown: "not known yet",
};

// Pieces of a prompt in order, cut at each page and where the kind changes: { page, from, to, kind, text }.
// `texts`: of each token, or their number. `cached`: { device, host, store } in tokens, from the start; null while it is not known.
export function pieces(texts, pageSize, cached) {
  const tokens = typeof texts === "number" ? texts : texts.length;
  const { device = 0, host = 0, store = 0 } = cached ?? {};
  const ends = cached
    ? [["device", device], ["host", device + host], ["store", device + host + store], ["computed", tokens]]
    : [["unknown", tokens]];
  const found = [];
  let from = 0;
  for (const [kind, end] of ends)
    while (from < Math.min(end, tokens)) {
      const page = Math.floor(from / pageSize);
      const to = Math.min((page + 1) * pageSize, end, tokens);
      found.push({ page, from, to, kind, text: typeof texts === "number" ? "" : texts.slice(from, to).join("") });
      from = to;
    }
  return found;
}

// The tokens that came from each tier, as x-manta-route tells them; null before the first token.
export function cachedOf(route) {
  if (route?.overlap_actual == null) return null;
  const [device, host, store] = String(route.tiers_actual ?? route.overlap_actual).split("+").map(Number);
  return { device, host: host ?? 0, store: store ?? 0 };
}

// "31 pages of 16 tokens: 464 tokens reused, 21 computed"
export function summary(list, pageSize) {
  if (!list.length) return "empty";
  const sums = {};
  for (const { kind, from, to } of list) sums[kind] = (sums[kind] ?? 0) + to - from;
  const pages = list.at(-1).page + 1;
  const parts = Object.entries(sums).map(([kind, tokens]) => `${count(tokens)} tokens ${KINDS[kind]}`);
  return `${count(pages)} ${pages === 1 ? "page" : "pages"} of ${count(pageSize)} tokens: ${parts.join(", ")}`;
}

const said = ({ page, from, to, kind }) => `page ${count(page + 1)}, tokens ${count(from + 1)} to ${count(to)}: ${KINDS[kind]}`;
const MOST_CELLS = 512; // pages; a longer prompt has several in a cell

// One cell a page, as wide as it has tokens.
export function Strip({ list, pageSize }) {
  const step = Math.ceil(list.length / MOST_CELLS);
  const cells = step === 1 ? list : list.filter((_, index) => index % step === 0);
  return html`<div class="strip" role="img" aria-label=${summary(list, pageSize)}>
    ${cells.map((each) => html`<span key=${`${each.from}-${each.kind}`} class=${`page-cell ${each.kind}${each.to - each.from < pageSize ? " part-page" : ""}`} title=${said(each)} />`)}
  </div>`;
}

// The prompt's text on its pages. Control tokens are in it as the template wrote them.
export function PaintedText({ list }) {
  const box = useRef(null);
  const border = list.find((each) => each.kind === "computed")?.from;
  useLayoutEffect(() => {
    const first = border && box.current.querySelector(".computed");
    if (first) box.current.scrollTop = first.offsetTop - box.current.clientHeight / 2; // to the end of what was reused
  }, [border]);
  return html`<pre class="painted" ref=${box} tabindex="0" role="group" aria-label="The prompt by page">${list.map((each) => html`<span key=${`${each.from}-${each.kind}`}
    class=${`page-text ${each.kind}`} title=${said(each)}>${each.text}</span>`)}</pre>`;
}
