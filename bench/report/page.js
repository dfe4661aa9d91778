"use strict";
// A click on a heading sorts its table, a second one turns the order. Numbers come first, then words such as "out of
// memory", then empty cells, whatever the direction; the sort is stable.
const collator = new Intl.Collator("en", { numeric: true });

function keyOf(row, column) {
  const cell = row.cells[column];
  if (cell.dataset.value !== undefined) return { rank: 0, value: Number(cell.dataset.value) };
  const text = cell.textContent.trim();
  return { rank: text ? 1 : 2, value: text };
}

function compare(a, b, sign) {
  if (a.rank !== b.rank) return a.rank - b.rank;
  return sign * (a.rank === 0 ? a.value - b.value : collator.compare(a.value, b.value));
}

for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => {
    head.firstElementChild.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction);
      const keyed = [...table.tBodies[0].rows].map((row) => ({ row, key: keyOf(row, column) }));
      keyed.sort((a, b) => compare(a.key, b.key, direction === "ascending" ? 1 : -1));
      table.tBodies[0].append(...keyed.map(({ row }) => row));
    });
  });
}
