"use strict";
// A click on a heading sorts its table, and a second click reverses the order. In both orders, numbers come first, then
// words such as "out of memory", then empty cells. The sort is stable.
const collator = new Intl.Collator("en", { numeric: true });

function keyOf(row, column) {
  const cell = row.cells[column], text = cell.textContent.trim();
  return "value" in cell.dataset ? [0, Number(cell.dataset.value)] : [text ? 1 : 2, text];
}

for (const table of document.querySelectorAll("table")) {
  const headings = [...table.querySelectorAll("thead th")];
  headings.forEach((heading, column) => heading.firstElementChild.addEventListener("click", () => {
    const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    headings.forEach((each) => each.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const keyed = [...table.tBodies[0].rows].map((row) => [...keyOf(row, column), row]);
    keyed.sort((a, b) => a[0] - b[0] || sign * (a[0] ? collator.compare(a[1], b[1]) : a[1] - b[1]));
    table.tBodies[0].append(...keyed.map((entry) => entry[2]));
  }));
}
