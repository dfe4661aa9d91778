"use strict";
// What a reader may do with the page: sort, filter and take away its tables, and open its figures at full size.

const collator = new Intl.Collator("en", { numeric: true });
const DIRECTIONS = ["ascending", "descending", null]; // null: as the page gave them

// Numbers come first, then words such as "out of memory", then empty cells, whatever the direction.
function keyOf(row, column) {
  const cell = row.cells[column];
  const text = cell.textContent.trim();
  if (cell.dataset.value !== undefined) return { rank: 0, value: Number(cell.dataset.value) };
  return { rank: text ? 1 : 2, value: text };
}

function compare(a, b, sign) {
  if (a.rank !== b.rank) return a.rank - b.rank;
  return sign * (a.rank === 0 ? a.value - b.value : collator.compare(a.value, b.value));
}

// Array.prototype.sort is stable: rows that are equal keep the order of the sort before.
function sortable(table) {
  const body = table.tBodies[0];
  const given = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.firstElementChild.addEventListener("click", () => {
      const direction = DIRECTIONS[(DIRECTIONS.indexOf(head.getAttribute("aria-sort")) + 1) % DIRECTIONS.length];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      let rows = given;
      if (direction !== null) {
        head.setAttribute("aria-sort", direction);
        const sign = direction === "ascending" ? 1 : -1;
        const keyed = [...body.rows].map((row) => ({ row, key: keyOf(row, column) }));
        rows = keyed.sort((a, b) => compare(a.key, b.key, sign)).map(({ row }) => row);
      }
      body.append(...rows);
    });
  });
}

// A row stays that has every word in the box.
function filterable(table, box, said) {
  const rows = [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
  const apply = () => {
    const words = box.value.toLowerCase().split(/\s+/);
    rows.forEach(([row, text]) => { row.hidden = !words.every((word) => text.includes(word)); });
    const left = rows.filter(([row]) => !row.hidden).length;
    said.textContent = left === rows.length ? "" : `${left} of ${rows.length} rows`;
  };
  box.addEventListener("input", apply);
  apply(); // a browser may have kept what was typed before
}

// The content of a data: address.
function bytesOf(url) {
  return Uint8Array.from(atob(url.split(",")[1]), (letter) => letter.charCodeAt(0));
}

async function copy(text, said) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or a browser that gives files no clipboard
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = said.textContent;
  said.textContent = "copied";
  setTimeout(() => { said.textContent = before; }, 2000);
}

function show(element, change) {
  Object.assign(element, change, { hidden: false });
}

for (const article of document.querySelectorAll("article.table")) {
  const find = (selector) => article.querySelector(selector);
  const [table, box, said] = [find("table"), find("input"), find("output")];
  sortable(table);
  if (box) {
    filterable(table, box, said);
    show(box.parentElement);
  }
  const csv = () => new TextDecoder().decode(bytesOf(find(".csv").href));
  show(find(".copy"), { onclick: () => copy(csv(), said) });
}

for (const article of document.querySelectorAll("article.drawing")) {
  const image = new Blob([bytesOf(article.querySelector("img").src)], { type: "image/svg+xml" });
  const href = URL.createObjectURL(image);
  show(article.querySelector(".open"), { href, target: "_blank", rel: "noopener", title: "Open at full size" });
  show(article.querySelector(".svg"), { href });
}

const commands = document.querySelector("#commands");
if (commands) {
  const [code, said] = [commands.querySelector("code"), commands.querySelector("output")];
  show(commands.querySelector(".copy"), { onclick: () => copy(code.textContent, said) });
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
