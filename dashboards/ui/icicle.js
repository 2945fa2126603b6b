// A radix cache drawn as an icicle: a row a level, width = tokens in the subtree, the rest that was left out hatched.
// Arrow keys move between nodes, Enter widens one to the whole width, Escape goes back.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm/preact_standalone.js";
import { count, plural, seconds } from "./format.js";
import { once } from "./panel.js";

const ROW = 34; // px
const THINNEST = 0.6; // px; thinner cells are not drawn
const LONG_IDLE_S = 600; // faded most

// All cells of a tree, parents first: { id, node, rest, depth, parent, children, x, width } with x and width as shares.
function cellsOf(root) {
  const total = Math.max(1, root.subtree_tokens);
  const cells = [];
  const add = (node, rest, parent, x, place) => {
    const id = parent ? (node?.key ?? `${parent.id}/${rest ? "rest" : place}`) : "root";
    const tokens = rest ? rest.tokens : node.subtree_tokens;
    const cell = { id, node, rest, parent, x, width: tokens / total, depth: parent ? parent.depth + 1 : 0, children: [] };
    parent?.children.push(cell);
    cells.push(cell);
    let at = x;
    const below = (child, left) => (at += add(child, left, cell, at, cell.children.length).width);
    node?.children.forEach((child) => below(child, null));
    if (node?.left_out) below(null, node.left_out);
    return cell;
  };
  add(root, null, null, 0, 0);
  return cells;
}

function describe({ node, rest, parent }) {
  if (rest) return `${plural(rest.nodes, "smaller node")} left out: ${count(rest.tokens)} tokens`;
  const below = node.subtree_nodes > 1 ? `, ${count(node.subtree_tokens)} with the ${plural(node.subtree_nodes - 1, "node")} below` : "";
  if (!parent) return `the whole cache: ${count(node.subtree_tokens)} tokens in ${plural(node.subtree_nodes, "node")}`;
  const use = node.protected ? "a request uses it now" : `evictable, last used ${seconds(node.idle_s)} ago`;
  const parts = Object.entries(node.parts ?? {}).map(([kind, number]) => `; ${plural(number, kind)}`).join("");
  return `${count(node.tokens)} tokens${below}; ${plural(node.hits, "hit")}${parts}; ${use}`;
}

export const Icicle = once(({ tree, pageKeys, width, onDetail, label }) => {
  const active = useRef("root"); // the node that Tab reaches; keys may come faster than it is drawn
  const [moves, setMoves] = useState(0);
  const [zoomed, setZoomed] = useState("root");
  const frame = useRef(null);
  const moved = useRef(false);
  const focused = useRef(false);
  const cells = cellsOf(tree.root);
  const byId = new Map(cells.map((each) => [each.id, each]));
  const zoom = byId.get(zoomed) ?? cells[0];
  const current = byId.has(active.current) ? active.current : "root";
  const at = (share) => Math.min(width, Math.max(0, ((share - zoom.x) / zoom.width) * width));
  const drawn = cells.map((cell) => ({ cell, left: at(cell.x), right: at(cell.x + cell.width) }))
    .filter(({ left, right, cell }) => right - left >= THINNEST || cell.id === current);
  const rows = 1 + Math.max(...drawn.map(({ cell }) => cell.depth));
  useLayoutEffect(() => {
    if (moved.current) frame.current.querySelector('[tabindex="0"]')?.focus();
    moved.current = false;
  }, [moves, zoomed]);
  useLayoutEffect(() => {
    // a refreshed tree may lack the node that had the focus: Escape and arrow keys go on from the root
    if (focused.current && document.activeElement === document.body) frame.current.querySelector('[tabindex="0"]')?.focus();
  }, [tree]);
  const go = (id) => {
    active.current = id;
    setMoves((before) => before + 1);
  };
  const cellOf = (event) => byId.get(event.target.closest("[data-id]")?.dataset.id);
  const onKey = (event) => {
    const from = byId.get(active.current) ?? cells[0];
    const to = neighbour(from, event.key, drawn);
    if (to) go(to.id);
    else if (event.key === "Enter") setZoomed(from.id);
    else if (event.key === "Escape") setZoomed("root");
    else return;
    moved.current = true; // nodes that are put elsewhere in the document lose the focus
    event.preventDefault();
  };
  const show = (event) => cellOf(event) && onDetail(describe(cellOf(event)));
  const choose = (event) => {
    const cell = cellOf(event);
    if (!cell) return;
    go(cell.id);
    setZoomed(cell.rest || cell.id === zoomed ? "root" : cell.id);
  };
  // the handlers stand on a div: an svg that listens for focus would be reached by Tab itself
  return html`<div ref=${frame} onKeyDown=${onKey} onPointerOver=${show} onfocusin=${(event) => { focused.current = true; show(event); }}
    onfocusout=${(event) => { if (event.target.isConnected) focused.current = false; }} onPointerLeave=${() => onDetail(null)} onClick=${choose}>
    ${zoom !== cells[0] && html`<p class="crumbs">${pathOf(zoom).map((each) => html`<button type="button" key=${each.id} disabled=${each === zoom}
      onClick=${() => setZoomed(each.id)}>${each.parent ? `${count(each.node.tokens)} tokens` : "Whole cache"}</button>`)}</p>`}
  <svg class="icicle" width=${width} height=${rows * ROW} role="tree" aria-label=${label}>
    <defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
      <rect class="hatch-ground" width="6" height="6" /><rect class="hatch-line" width="2" height="6" /></pattern></defs>
    ${drawn.map(({ cell, left, right }) => {
      const onPath = cell.node?.key != null && pageKeys?.has(cell.node.key);
      return html`<${Cell} key=${cell.id} cell=${cell} left=${left} wide=${Math.max(1, right - left - 1)} onPath=${onPath} active=${cell.id === current} />`;
    })}
  </svg></div>`;
});

function Cell({ cell, left, wide, onPath, active }) {
  const { node, rest, depth } = cell;
  const kind = rest ? "rest" : node.protected ? "protected" : depth === 0 ? "whole" : "evictable";
  const fade = kind === "evictable" ? Math.min(1, Math.log1p(node.idle_s) / Math.log1p(LONG_IDLE_S)) : 0;
  const [first, second] = rest ? [`+${count(rest.nodes)}`, count(rest.tokens)]
    : depth === 0 ? [`${count(node.subtree_tokens)} tokens`, plural(node.subtree_nodes, "node")]
    : [`${count(node.tokens)} tokens`, `${count(node.hits)} hits`];
  const fits = (text) => text.length * 6.3 + 8 <= wide;
  const y = depth * ROW;
  return html`<g class=${`cell ${kind}${onPath ? " on-path" : ""}`} data-id=${cell.id} role="treeitem" aria-level=${depth + 1}
    aria-selected=${Boolean(onPath)} aria-label=${describe(cell) + (onPath ? "; holds a part of the chosen request's prompt" : "")}
    tabindex=${active ? 0 : -1}>
    <rect x=${left} y=${y} width=${wide} height=${ROW - 2} rx=${wide > 8 ? 2 : 0} style=${{ "--fade": `${Math.round(fade * 80)}%` }} />
    ${onPath && html`<rect class="outline" x=${left + 1} y=${y + 1} width=${Math.max(1, wide - 2)} height=${ROW - 4} />`}
    ${fits(first) && html`<text x=${left + 5} y=${y + 13}>${first}</text>`}
    ${fits(first) && fits(second) && html`<text x=${left + 5} y=${y + 26}>${second}</text>`}
  </g>`;
}

// A cell and those above it, from the root down.
function pathOf(cell) {
  return cell.parent ? [...pathOf(cell.parent), cell] : [cell];
}

// Where an arrow key leads: up to the parent, down to the first child, aside along the row.
function neighbour(cell, key, drawn) {
  const visible = new Set(drawn.map((each) => each.cell));
  if (key === "ArrowUp") return cell.parent;
  if (key === "ArrowDown") return cell.children.find((each) => visible.has(each));
  const row = drawn.map((each) => each.cell).filter((each) => each.depth === cell.depth).sort((a, b) => a.x - b.x);
  const place = row.indexOf(cell);
  if (key === "ArrowRight") return row[place + 1];
  if (key === "ArrowLeft") return row[place - 1];
  return undefined;
}
