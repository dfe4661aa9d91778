"use strict";
// Tables sort by a click on a heading, a second one turns the order, a third restores it; a box keeps rows that have
// every word in it.
const collator = new Intl.Collator("en", { numeric: true });
const DIRECTIONS = ["ascending", "descending", null];

// Numbers come first, then words such as "out of memory", then empty cells, whatever the direction.
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

for (const article of document.querySelectorAll("article.table")) {
  const body = article.querySelector("tbody");
  const given = [...body.rows];
  const heads = [...article.querySelectorAll("thead th")];
  heads.forEach((head, column) => {
    head.firstElementChild.addEventListener("click", () => {
      const direction = DIRECTIONS[(DIRECTIONS.indexOf(head.getAttribute("aria-sort")) + 1) % DIRECTIONS.length];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (direction === null) return body.append(...given);
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const keyed = [...body.rows].map((row) => ({ row, key: keyOf(row, column) })); // the sort is stable
      body.append(...keyed.sort((a, b) => compare(a.key, b.key, sign)).map(({ row }) => row));
    });
  });
  const box = article.querySelector("input");
  if (!box) continue;
  const count = article.querySelector("output");
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/);
    given.forEach((row) => { row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word)); });
    const left = given.filter((row) => !row.hidden).length;
    count.textContent = left === given.length ? "" : `${left} of ${given.length} rows`;
  };
  box.addEventListener("input", filter);
  box.parentElement.hidden = false;
  filter(); // a browser may have restored what was typed before
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
