// A table from a list of columns: [name, cell(row), { num, title, hide }]. The first column heads its row.

import { html } from "./vendor/htm/preact_standalone.js";
import { shortId } from "./format.js";

export function Table({ columns, rows, keyOf, chosen, caption, kind }) {
  const used = columns.filter(Boolean);
  return html`<table class=${kind}>
    <caption>${caption}</caption>
    <thead><tr>${used.map(([name, , { num, title } = {}]) => html`<th scope="col" class=${num && "num"} title=${title}>${name}</th>`)}</tr></thead>
    <tbody>
      ${rows.map((row) => html`<tr key=${keyOf(row)} class=${chosen?.(row) && "chosen"}>
        ${used.map(([, cell, { num } = {}], index) =>
          index ? html`<td class=${num && "num"}>${cell(row)}</td>` : html`<th scope="row">${chosen?.(row) && html`<span aria-label="chosen">▸ </span>`}${cell(row)}</th>`)}
      </tr>`)}
    </tbody>
  </table>`;
}

// A number's column; `strong` for sums.
export function number(name, cell, title, strong) {
  return [name, strong ? (row) => html`<strong>${cell(row)}</strong>` : cell, { num: true, title }];
}

export function Id({ id }) {
  return html`<span title=${id}>${shortId(id)}</span>`;
}
