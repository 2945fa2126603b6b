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

export function Panel({ id, title, note, children }) {
  return html`<section class="panel" id=${id} aria-labelledby=${`${id}-title`}>
    <header class="panel-head"><h2 id=${`${id}-title`}>${title}</h2>${note && html`<p class="note">${note}</p>`}</header>
    ${children}
  </section>`;
}

export function Notice({ title, children, error }) {
  return html`<div class=${error ? "notice error" : "notice"} role=${error ? "alert" : undefined}>
    <p class="notice-title">${title}</p>${children}
  </div>`;
}

// A table that may be wider than its place: it scrolls by itself, and the keyboard reaches it.
export function Scroller({ label, tall, children }) {
  return html`<div class=${tall ? "scroller tall" : "scroller"} role="region" aria-label=${label} tabindex="0">${children}</div>`;
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
