// The request river: a lane for each replica, a bar for each request, its stages over time; retries and KV transfers lead
// from lane to lane. One canvas is drawn when a state comes and scrolls by itself until the next (Stage).
// Owns:      the time range that is shown, and the piece that the arrow keys are at.
// Never:     decides where a piece belongs (river_layout.js), or knows what a request asked.
// Invariant: what is shown while it follows is DELAY_S old: all of it is known, and nothing appears late.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm/preact_standalone.js";
import { clock, count, nameOf, seconds } from "./format.js";
import { Choice, Panel, once } from "./panel.js";
import { Legend } from "./pools.js";
import { GROUPS, Layout, clamped, laneHeights, neighbour, pieceAt } from "./river_layout.js";
import { AXIS, BAR, paintArrivals, paintRiver, paletteOf, rowAt, sized } from "./river_paint.js";
import { describe, noteOf, summary } from "./river_words.js";

const SPANS_S = [10, 60, 300, 600];
const KEPT_S = 600;
const DELAY_S = 1;
const AHEAD_S = 2.5; // drawn beyond the right edge, to be scrolled into view
const OVERVIEW = 30; // px
const FEW_LANES = 16; // until all are asked for
const MOST_LANES = 64;
const KEYS = "Drag to go back in time. To zoom: drag in the strip, Shift and drag, or Ctrl and wheel. Keys: arrows, Enter, + and −, Space, End.";

export const River = once(({ state, selection, choose, theme, paused }) => {
  const frame = useRef(null);
  const stage = useRef(null);
  const [shown, setShown] = useState({ lanes: [], by: null, all: 0, most: 0, span: 60, following: true });
  const [told, setTold] = useState("");
  useLayoutEffect(() => {
    stage.current = new Stage(frame.current, { setShown, setTold });
    return () => stage.current.close();
  }, []);
  useLayoutEffect(() => stage.current.hold(paused), [paused]);
  useLayoutEffect(() => (stage.current.choose = choose), [choose]);
  useLayoutEffect(() => stage.current.restyle(), [theme]);
  useLayoutEffect(() => stage.current.select(selection), [selection.request, selection.replica]);
  useLayoutEffect(() => stage.current.take(state), [state]);
  const { lanes, following, span } = shown;
  const running = new Map(state.replicas.map((each) => [each.id, each.running]));
  return html`<${Panel} id="river" title="Requests over time" note=${summary(state, lanes)}>
    <div class="controls river-controls">
      <button type="button" aria-pressed=${!following} onClick=${() => stage.current.follow(!following)}>${following ? "Hold timeline" : "Follow"}</button>
      <${Choice} label="Time shown" options=${SPANS_S.map((each) => [each, each < 60 ? `${each} s` : `${each / 60} min`])} value=${span}
        onChoose=${(each) => stage.current.zoomTo(each)} />
      <label>Lanes <select value=${shown.by ?? "replica"} onChange=${(event) => stage.current.group(event.target.value)}>
        ${["replica", ...Object.keys(GROUPS)].map((each) => html`<option key=${each} value=${each}>by ${each}</option>`)}</select></label>
      <span class="note" role="status">${following ? "" : `Held at ${clock(shown.to)}, ${seconds(shown.span)} shown`}</span>
      ${shown.all > FEW_LANES && html`<button type="button" aria-pressed=${shown.most > FEW_LANES} onClick=${() => stage.current.showMost()}>
          ${shown.most > FEW_LANES ? "Fewer lanes" : `${Math.min(shown.all, MOST_LANES)} lanes`}</button>
        <span class="note">${count(lanes.length)} of ${count(shown.all)} shown: those in trouble, then those with requests</span>`}
    </div>
    <div class="river-frame" hidden=${state.requests.length + state.replicas.length === 0} ref=${frame} tabindex="0" role="application" aria-label="Requests over time, by replica" aria-describedby="river-keys">
      <div class="river-scroller">
        <div class="river-lanes">${lanes.map((lane) => html`<button type="button" tabindex="-1" key=${lane.id} title=${shown.by ? `${shown.by} ${lane.id}` : `${lane.id}, ${lane.state}`}
          class=${`river-lane ${lane.state} ${lane.dead ? "dead" : ""} ${lane.id === selection.replica ? "chosen" : ""}`} style=${{ height: `${lane.height}px` }}
          onClick=${() => shown.by || choose({ replica: lane.id })}>
          ${!shown.by && html`<span class="dot" aria-hidden="true"></span>`}${lane.height > 13 && html`<span>${nameOf(lane.id)}</span>`}
          ${lane.height > 32 && !shown.by && html`<span class="note">${noteOf(lane, running)}</span>`}
        </button>`)}</div>
        <div class="river-window"><div class="river-move"><canvas class="river-canvas"></canvas><div class="river-marks"></div></div>
          <div class="river-brush" hidden></div><div class="river-tip" hidden></div></div>
      </div>
      <div class="river-overview"><canvas></canvas><div class="river-range"></div></div>
    </div>
    <p class="note river-keys" id="river-keys">${KEYS}</p>
    <p class="unseen" aria-live="polite">${told}</p>
    <${Legend} />
  <//>`;
});

// What is on the screen, and what a pointer and keys do with it.
class Stage {
  constructor(frame, { setShown, setTold }) {
    const one = (name) => frame.querySelector(name);
    Object.assign(this, { frame, setShown, setTold, scroller: one(".river-scroller"), window: one(".river-window"), move: one(".river-move"), marks: one(".river-marks"),
      canvas: one(".river-canvas"), tip: one(".river-tip"), brush: one(".river-brush"), overview: one(".river-overview"), range: one(".river-range") });
    this.layout = new Layout();
    this.view = null; // what is drawn, and where
    this.span = 60;
    this.most = FEW_LANES;
    this.to = null; // the right edge while paused; null: it follows
    this.offset = null; // server's time less the page's, s
    this.width = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.window);
    this.listen();
    this.resize();
  }

  close() {
    this.sizes.disconnect();
    this.scroll?.cancel();
    cancelAnimationFrame(this.asked);
  }

  now() {
    return performance.now() / 1e3 + this.offset;
  }

  // Lanes by replica, or by what requests have in common (GROUPS).
  group(by) {
    this.by = GROUPS[by] ? by : null;
    this.layout = new Layout(GROUPS[by]);
    this.view = this.at = null;
    this.take(this.state);
  }

  take(state) {
    this.state = state;
    this.objectives = Object.fromEntries(state.figures.map(({ name, objective }) => [name, objective]));
    const offset = state.time - performance.now() / 1e3;
    const off = this.offset == null ? Infinity : offset - this.offset;
    this.offset = Math.abs(off) > 1 ? offset : this.offset + off * 0.1; // what comes late does not move the picture
    this.time = state.time;
    this.first = Math.max(state.time - KEPT_S, Math.min(state.time - 60, state.requests.at(-1)?.time ?? Infinity));
    this.layout.take(state);
    this.drawAll();
  }

  hold(paused) {
    if (Boolean(paused) === (this.held != null)) return;
    this.held = paused ? this.edge() : null;
    this.scroll?.pause();
    if (this.offset != null) this.ask();
  }

  follow(on) {
    this.to = on ? null : this.edge();
    this.draw();
  }

  showMost() {
    this.most = this.most > FEW_LANES ? FEW_LANES : MOST_LANES;
    this.draw();
  }

  zoomTo(span) {
    Object.assign(this, { span, to: null });
    this.draw();
  }

  // Shows a range; one that ends now follows.
  show(range) {
    const { from, to } = clamped(range, Math.min(this.first, this.edge() - this.span), this.edge());
    this.span = to - from;
    this.to = to >= this.edge() - 0.01 ? null : to;
    this.ask();
  }

  // The newest moment to be shown; without new states it stands still soon.
  edge() {
    return this.held ?? Math.min(this.now() - (this.still.matches ? 0 : DELAY_S), this.time + AHEAD_S);
  }

  ask() {
    cancelAnimationFrame(this.asked);
    this.asked = requestAnimationFrame(() => this.draw());
  }

  restyle() {
    this.palette = paletteOf(this.frame);
    this.drawAll();
  }

  resize() {
    const width = Math.floor(this.window.clientWidth);
    if (width === this.width) return;
    this.width = width;
    this.drawAll();
  }

  drawAll() {
    this.draw();
    this.drawOverview();
  }

  draw() {
    if (!this.width || !this.palette || this.offset == null) return;
    const { canvas, width, span } = this;
    const ratio = devicePixelRatio;
    const follows = this.to == null;
    const to = follows ? this.edge() : this.to;
    const scale = width / span; // px a second
    const from = Math.round((to - span) * scale * ratio) / (scale * ratio); // a whole pixel: bars keep their form
    const moves = follows && !this.still.matches && this.held == null && to < this.time + AHEAD_S;
    const ahead = moves ? Math.ceil(Math.min(AHEAD_S * scale, width)) : 0;
    const kept = new Set([...(this.view?.lanes ?? []).map((lane) => lane.id), this.replica]); // so that lanes stay where they are
    const view = this.layout.view(from, to + ahead / scale, this.most, kept);
    const heights = laneHeights(view.rows);
    let high = 0;
    const tops = heights.map((each) => (high += each) - each);
    const places = new Map(view.lanes.map((lane, at) => [lane.id, at]));
    this.view = Object.assign(view, { from, scale, tops, heights, places, until: to + ahead / scale, objectives: this.objectives });
    paintRiver(sized(canvas, width + ahead, AXIS + high), view, this.palette, (rid) => this.layout.requests.get(rid).pieces);
    this.mark();
    this.tell(to, follows);
    this.scroll?.cancel();
    this.scroll = null;
    if (!ahead) return;
    const steps = Math.max(1, Math.round(ahead * ratio)); // by whole pixels: a part of one would blur
    this.scroll = this.move.animate({ transform: ["translateX(0)", `translateX(${-ahead}px)`] },
      { duration: (ahead / scale) * 1e3, easing: `steps(${steps})`, fill: "forwards" });
    this.scroll.onfinish = () => this.ask(); // no state has come: what runs is taken to run on
    this.began = performance.now();
  }

  // How far the picture has been scrolled, px.
  scrolled() {
    return this.scroll ? Math.min((performance.now() - this.began) / 1e3 * this.view.scale, this.canvas.offsetWidth - this.width) : 0;
  }

  // Frames around the request that is chosen and the piece that pointer or keys are at.
  mark() {
    const { view } = this;
    if (!view) return;
    const marks = [];
    for (const piece of view.pieces) {
      const kind = piece.rid === this.at?.rid ? "at" : piece.rid === this.selected ? "selected" : null;
      if (!kind) continue;
      const [top, high] = rowAt(view, view.places.get(piece.replica), piece.slot);
      const left = (piece.start - view.from) * view.scale;
      const right = Math.min((piece.end - view.from) * view.scale, this.canvas.offsetWidth);
      const mark = Object.assign(document.createElement("div"), { className: `river-mark ${kind}` });
      Object.assign(mark.style, { left: `${left - 3}px`, top: `${top - 3}px`, width: `${Math.max(right - left, 2) + 6}px`, height: `${high + 6}px` });
      marks.push(mark);
    }
    this.marks.replaceChildren(...marks);
  }

  tell(to, following) {
    const lanes = this.view.lanes.map(({ id, role, state, dead }, at) => ({ id, role, state, dead, height: this.view.heights[at] }));
    const shown = { lanes, by: this.by ?? null, all: this.view.all, most: this.most, span: this.span, following, to: following ? 0 : to };
    const now = JSON.stringify(shown);
    if (now !== this.told) this.setShown(shown);
    this.told = now;
    const total = this.edge() - this.first;
    const share = (time) => `${Math.min(100, Math.max(0, ((time - this.first) / total) * 100))}%`;
    Object.assign(this.range.style, { left: share(this.view.from), right: `calc(100% - ${share(to)})` });
  }

  drawOverview() {
    const width = this.overview.clientWidth;
    if (!width || !this.palette || this.offset == null) return;
    const steps = Math.floor(width / BAR);
    paintArrivals(sized(this.overview.firstElementChild, width, OVERVIEW), this.layout.arrivals(this.first, (this.time - this.first) / steps, steps, this.objectives, this.time), this.palette);
  }

  select({ request, replica }) {
    Object.assign(this, { selected: request, replica });
    this.mark();
  }

  // Moves the keyboard's or pointer's mark to a piece.
  goTo(piece, told) {
    this.at = piece;
    if (told && piece) {
      this.setTold(describe(piece, this.edge(), this.by).join("; "));
      const place = this.view.places.get(piece.replica);
      const [top, high] = [this.view.tops[place], this.view.heights[place]];
      this.scroller.scrollTop = Math.min(Math.max(this.scroller.scrollTop, top + high + AXIS - this.scroller.clientHeight), top);
      if (piece.start < this.view.from || piece.start > this.view.from + this.span) this.show({ from: piece.start - this.span / 2, to: piece.start + this.span / 2 });
    }
    this.mark();
  }

  pick(piece) {
    if (piece) this.choose({ request: piece.rid, replica: this.by ? piece.row.replica : piece.replica, tab: "why" });
  }

  under(event) {
    const place = this.window.getBoundingClientRect();
    const [x, y] = [event.clientX - place.left, event.clientY - place.top];
    const time = this.view.from + (x + this.scrolled()) / this.view.scale;
    const at = this.view.tops.findLastIndex((top) => y - AXIS >= top);
    const lane = this.view.lanes[at];
    const [top, high] = lane ? rowAt(this.view, at, 0) : [0, 1];
    const row = (y - top) / (high >= 3 ? high + 1 : high / 0.85) - 0.5;
    return { x, y, time, piece: lane && pieceAt(this.view.pieces, lane.id, time, row, 5 / this.view.scale) };
  }

  hover(event) {
    if (!this.view) return;
    const { x, y, piece } = this.under(event);
    if (piece !== this.at) this.goTo(piece, false);
    this.window.style.cursor = piece ? "pointer" : "grab";
    this.tip.hidden = !piece;
    if (!piece) return;
    this.tip.replaceChildren(...describe(piece, this.edge(), this.by).map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    const left = Math.min(Math.max(0, x + 14), this.width - this.tip.offsetWidth - 4);
    const below = y + 18 + this.tip.offsetHeight < this.window.clientHeight;
    Object.assign(this.tip.style, { left: `${Math.max(0, left)}px`, top: `${below ? y + 18 : Math.max(0, y - this.tip.offsetHeight - 10)}px` });
  }

  leave() {
    this.tip.hidden = true;
    if (this.at && document.activeElement !== this.frame) this.goTo(null, false);
  }

  listen() {
    const { window: place, overview } = this;
    place.addEventListener("pointermove", (event) => !this.drag && this.hover(event));
    place.addEventListener("pointerleave", () => this.leave());
    place.addEventListener("pointerdown", (event) => this.grab(event, place, event.shiftKey));
    place.addEventListener("dblclick", () => this.follow(true));
    place.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    overview.addEventListener("pointerdown", (event) => this.grab(event, overview, true));
    this.frame.addEventListener("keydown", (event) => this.key(event));
    this.frame.addEventListener("blur", () => this.goTo(null, false));
  }

  // A drag: in the river it moves the time, or with Shift it marks a range; in the strip below it marks one.
  grab(event, place, marks) {
    if (event.button !== 0 || this.offset == null) return;
    const { left } = place.getBoundingClientRect();
    const begin = { x: event.clientX, time: this.under(event).time, to: this.view.from + this.span + this.scrolled() / this.view.scale };
    const total = this.edge() - this.first;
    const timeAt = (x) => (place === this.overview ? this.first + ((x - left) / place.clientWidth) * total : this.view.from + (x - left + this.scrolled()) / this.view.scale);
    const bar = place === this.overview ? this.range : this.brush;
    this.drag = true;
    this.tip.hidden = true;
    const move = (now) => {
      if (!now.buttons) return end(now); // it was let go outside
      const far = now.clientX - begin.x;
      if (Math.abs(far) < 4 && !begin.moved) return;
      if (!begin.moved) place.setPointerCapture(event.pointerId);
      begin.moved = true;
      if (!marks) return this.show({ from: begin.to - this.span - far / this.view.scale, to: begin.to - far / this.view.scale });
      bar.hidden = false;
      Object.assign(bar.style, { left: `${Math.min(begin.x, now.clientX) - left}px`, width: `${Math.abs(far)}px`, right: "auto" });
    };
    const end = (now) => {
      for (const name of ["pointermove", "pointerup", "pointercancel"]) place.removeEventListener(name, name === "pointermove" ? move : end);
      this.drag = false;
      this.brush.hidden = true;
      this.range.style.width = "";
      if (begin.moved && marks) this.show({ from: timeAt(Math.min(begin.x, now.clientX)), to: timeAt(Math.max(begin.x, now.clientX)) });
      else if (begin.moved || now.type !== "pointerup") return;
      else if (place === this.overview) this.show({ from: timeAt(begin.x) - this.span / 2, to: timeAt(begin.x) + this.span / 2 });
      else this.pick(this.under(now).piece);
    };
    place.addEventListener("pointermove", move);
    place.addEventListener("pointerup", end);
    place.addEventListener("pointercancel", end);
  }

  // Ctrl and wheel, or a pinch, zooms about the pointer; sideways it moves the time. Else the page scrolls.
  wheel(event) {
    const aside = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    const to = this.view.from + this.span + this.scrolled() / this.view.scale;
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY * 0.004), this.to == null ? to : this.under(event).time, to);
    else if (Math.abs(aside) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.show({ from: to - this.span + aside / this.view.scale, to: to + aside / this.view.scale });
    else return;
    event.preventDefault();
  }

  zoom(factor, about, to = this.to ?? this.edge()) {
    const from = to - this.span;
    this.show({ from: about - (about - from) * factor, to: about + (to - about) * factor });
  }

  key(event) {
    const to = this.to ?? this.edge();
    if (event.target !== this.frame || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) {
      if (event.shiftKey) this.show({ from: to - this.span * (event.key === "ArrowLeft" ? 1.25 : 0.75), to: to + this.span * (event.key === "ArrowLeft" ? -0.25 : 0.25) });
      else this.goTo((this.at ? neighbour(this.view, this.at, event.key) : this.newest()) ?? this.at, true);
    } else if (event.key === "Enter" && this.at) this.pick(this.at);
    else if (event.key === " ") this.follow(this.to != null);
    else if (event.key === "+" || event.key === "=" || event.key === "-") this.zoom(event.key === "-" ? 1.5 : 1 / 1.5, this.at?.start ?? to);
    else if (event.key === "End") this.follow(true);
    else if (event.key === "Home") this.show({ from: this.first, to: this.first + this.span });
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  newest() {
    return this.view.pieces.reduce((best, each) => (best && best.start >= each.start ? best : each), null);
  }
}
