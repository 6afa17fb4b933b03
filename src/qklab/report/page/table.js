// A table that can be saved as CSV.

import { fileName, h, save } from "./core.js";

function quote(value) {
  const text = String(value ?? "");
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
// A column: { name, text, raw, csv, kind, small, isHead }. raw is what CSV gets where that is not text, csv its name
// there, small a second line in a cell; a column without text is in the CSV only.
export function makeTable(id, columns, rows, { isTall = false, lead = "" } = {}) {
  const shown = columns.filter((column) => column.text);
  const saveCsv = () => {
    const lines = rows.map((row) => columns.map((column) => (column.raw || column.text)(row)));
    const text = [columns.map((column) => column.csv || column.name), ...lines].map((line) =>
      line.map(quote).join(",")
    );
    save(fileName(id, "csv"), text.join("\r\n") + "\r\n", "text/csv");
  };
  const cell = (row) => (column) => {
    const small = column.small?.(row);
    if (column.isHead) return h("th", { scope: "row" }, column.text(row));
    return h("td", { class: column.kind }, column.text(row), small ? h("small", {}, small) : null);
  };
  const named = { "data-save": "csv", "aria-label": `Download the table ${id} as CSV` };
  const button = h("button", { type: "button", class: "quiet", ...named, onclick: saveCsv }, "CSV");
  const head = h("tr", {}, shown.map(({ name, kind }) => h("th", { scope: "col", class: kind }, name)));
  const body = rows.map((row) => h("tr", {}, shown.map(cell(row))));
  return h(
    "div",
    { class: "table", id: `table-${id}` },
    h("div", { class: "bar" }, h("p", { class: "faint" }, lead), h("div", { class: "save" }, button)),
    h(
      "div",
      { class: isTall ? "scroll tall" : "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${id}` },
      h("table", {}, h("thead", {}, head), h("tbody", {}, body)),
    ),
  );
}
