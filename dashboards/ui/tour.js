// Three steps at the first visit: what stands where. A card at the lower edge, and a frame around what it is about.
// Invariant: it is not there while something is critical; whoever has left it or gone through it does not see it again.

import { html, useLayoutEffect, useState } from "./vendor/htm/preact_standalone.js";
import { keep, kept } from "./panel.js";

const TOURED = "manta-toured";
const STEPS = [
  [".health", "Trouble comes first", "Here stands all that is wrong, the worst first, each with its chart, its replica and what to do about it."],
  ["#river", "Each bar is a request", "From its arrival to its last token, in the lane of its replica; its colours are its stages. Choose one to see why it went there."],
  ["#side", "Try a prompt", "Before you send it, you see where it would go and what of it is cached there. The key ? lists all keys and words."],
];

export function Tour({ calm }) {
  const [step, setStep] = useState(kept(TOURED) ? STEPS.length : 0);
  const [target, title, text] = (calm && STEPS[step]) || [];
  useLayoutEffect(() => {
    const place = target && document.querySelector(target);
    place?.setAttribute("data-toured", "");
    if (step) place?.scrollIntoView({ block: "nearest" });
    return () => place?.removeAttribute("data-toured");
  }, [target]);
  if (!target) return null;
  const go = (to) => {
    setStep(to);
    if (to >= STEPS.length) keep(TOURED, "1");
  };
  return html`<section class="tour" aria-labelledby="tour-title" onKeyDown=${(event) => event.key === "Escape" && (event.preventDefault(), go(STEPS.length))}>
    <h2 id="tour-title">${title} <span class="note">${step + 1} of ${STEPS.length}</span></h2><p aria-live="polite">${text}</p>
    <button type="button" onClick=${() => go(STEPS.length)}>Leave the tour</button>
    <button type="button" class="sure" onClick=${() => go(step + 1)}>${step < STEPS.length - 1 ? "Next" : "Done"}</button>
  </section>`;
}
