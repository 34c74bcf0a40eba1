"use strict";

const drawn = Promise.all([...document.querySelectorAll("[data-chart]")].map((box) => {
  const spec = JSON.parse(document.getElementById(box.dataset.chart).textContent);
  const {columns, rows} = spec.data?.values ?? {};
  if (columns) spec.data.values = rows.map((row) => Object.fromEntries(row.map((cell, at) => [columns[at], cell])));
  return vegaEmbed(box, spec, {mode: "vega-lite", renderer: "hybrid", actions: false, ast: true});
}));

function compared(one, other) {
  const keys = [one.dataset.key, other.dataset.key];
  if (keys.every((key) => key !== undefined)) return keys[0] - keys[1];
  return one.textContent.localeCompare(other.textContent, "en", {numeric: true});
}

function sort(head) {
  const [rows, at] = [head.closest("table").tBodies[0], head.cellIndex];
  const descends = head.getAttribute("aria-sort") === "ascending";
  for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descends ? "descending" : "ascending");
  const empty = (row) => row.cells[at].textContent === "";
  const sorted = [...rows.rows].sort((one, other) =>
    empty(one) - empty(other) || (descends ? -1 : 1) * compared(one.cells[at], other.cells[at]));
  rows.append(...sorted);
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.parentElement));
}
