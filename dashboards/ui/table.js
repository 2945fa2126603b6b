// A table from a list of columns: [name, cell(row), { num, title }]. The first column heads its row.

import { html } from "./vendor/htm/preact_standalone.js";
import { nameOf } from "./format.js";

export function Table({ columns, rows, keyOf, chosen, caption, kind }) {
  return html`<table class=${kind}>
    <caption>${caption}</caption>
    <thead><tr>${columns.map(([name, , { num, title } = {}]) => html`<th scope="col" class=${num && "num"} title=${title}>${name}</th>`)}</tr></thead>
    <tbody>
      ${rows.map((row) => html`<tr key=${keyOf(row)} class=${chosen?.(row) && "chosen"}>
        ${columns.map(([, cell, { num } = {}], index) =>
          index ? html`<td class=${num && "num"}>${cell(row)}</td>` : html`<th scope="row">${chosen?.(row) && html`<span aria-label="chosen">▸ </span>`}${cell(row)}</th>`)}
      </tr>`)}
    </tbody>
  </table>`;
}

export function number(name, cell, title) {
  return [name, cell, { num: true, title }];
}

export function Id({ id }) {
  return html`<span title=${id}>${nameOf(id)}</span>`;
}
