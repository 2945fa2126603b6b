// The frame of a panel, notices inside one, and `once`: draws a component again only when one of its props changed.

import { Component, h, html, useLayoutEffect, useRef, useState } from "./vendor/htm/preact_standalone.js";

export function once(render) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const names = Object.keys({ ...this.props, ...next });
      return names.some((name) => name !== "children" && next[name] !== this.props[name]);
    }
    render(props) {
      return h(render, props); // a component of its own, so that it may have hooks
    }
  };
}

export function Panel({ id, title, note, end, children }) {
  return html`<section class="panel" id=${id} aria-labelledby=${`${id}-title`}>
    <header class="panel-head"><h2 id=${`${id}-title`}>${title}</h2>${note && html`<p class="note">${note}</p>`}
      ${end && html`<div class="panel-end">${end}</div>`}</header>
    ${children}
  </section>`;
}

export function Notice({ title, children, error }) {
  return html`<div class=${error ? "notice error" : "notice"} role=${error ? "alert" : undefined}>
    <p class="notice-title">${title}</p>${children}
  </div>`;
}

// What this browser keeps; where storage is forbidden, nothing.
export function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // not kept then
  }
}

// Copies a text. Returns: { said }, and the text itself where it has to be marked: browsers refuse it on pages over plain HTTP
// from another machine, where there is no clipboard at all.
export function copied(text, said = "Copied.") {
  const refused = { said: "Copying is not allowed here: mark the text.", text };
  return (navigator.clipboard?.writeText(text) ?? Promise.reject()).then(() => ({ said }), () => refused);
}

export function Copy({ text }) {
  const [told, setTold] = useState(null);
  return html`<button type="button" onClick=${async () => setTold(await copied(text))}>Copy</button> <span role="status">${told?.said}</span>`;
}

// Buttons of which one is pressed: `options` is [[value, text], ...].
export function Choice({ label, options, value, onChoose }) {
  return html`<span class="choice" role="group" aria-label=${label}>
    ${options.map(([each, text]) => html`<button type="button" key=${each} aria-pressed=${each === value} onClick=${() => onChoose(each)}>${text}</button>`)}
  </span>`;
}

// [ref, width in px of the element that has it]
export function useWidth() {
  const place = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const measure = () => setWidth(Math.floor(place.current?.clientWidth ?? 0));
    const watch = new ResizeObserver(measure);
    watch.observe(place.current);
    measure();
    return () => watch.disconnect();
  }, []);
  return [place, width];
}
