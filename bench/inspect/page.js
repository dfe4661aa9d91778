"use strict";
// What a model sees, drawn from the page's block of data: a passage by surprise, attention maps, soft masks, attention by
// distance, learned vectors and loss. A passage's bytes become text here, and only by textContent and fillText.

const seen = JSON.parse(document.querySelector("#seen").textContent);
const find = (selector) => document.querySelector(selector);
const make = (name, change = {}, ...inside) => {
  const made = Object.assign(document.createElement(name), change);
  made.append(...inside);
  return made;
};
const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
const short = (weight) => (weight >= 0.0005 ? weight.toFixed(3) : weight > 0 ? "below 0.001" : "0");
const percent = (share) => `${(100 * share).toFixed(1)} %`;

const mapped = seen.sublayers.filter((own) => own.maps);
const passages = seen.passages.map((own) => ({ ...own, content: bytesOf(own.bytes) }));
passages.forEach((own) => { own.glyphs = glyphs(own.content); });
const at = { passage: 0, layer: 0, head: 0, query: 0, key: 0 };
const view = { x: 0, y: 0, cells: 1 }; // what of the map is shown, in bytes
const passage = () => passages[at.passage];
const length = () => passage().content.length;

// --- bytes as text

// One glyph a byte: a character of several bytes stands at its first, and what cannot be seen is its number.
function glyphs(content) {
  const strict = new TextDecoder("utf-8", { fatal: true });
  const named = { 10: "\u21b5\n", 9: "\u21e5", 32: " " };
  const found = [...content].map((byte) => {
    if (named[byte]) return { text: named[byte], odd: byte !== 32 };
    if (byte > 32 && byte < 127) return { text: String.fromCharCode(byte), odd: false };
    return { text: byte.toString(16).padStart(2, "0").toUpperCase(), odd: true };
  });
  content.forEach((byte, place) => {
    const bytes = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc2 ? 2 : 0;
    if (!bytes) return;
    try {
      const text = strict.decode(content.slice(place, place + bytes));
      if (!/^[\p{L}\p{N}\p{P}\p{S}]$/u.test(text)) return;
      found[place] = { text, odd: false };
      for (let next = 1; next < bytes; next += 1) found[place + next] = { text: "\u00b7", odd: true };
    } catch { /* no UTF-8: its numbers stand */ }
  });
  return found;
}

const quoted = (byte) => glyphs(Uint8Array.of(byte))[0].text.trim() || "space";

// A byte of the passage in words.
function told(place) {
  const text = passage().glyphs[place].text.trim();
  return `byte ${place} \u201c${text || "space"}\u201d`;
}

function textOf(own, first = 0, last = own.content.length) {
  return own.glyphs.slice(first, last).map(({ text, odd }, place) => {
    const made = make("i", { textContent: text, className: odd ? "odd" : "" });
    made.dataset.place = first + place;
    return made;
  });
}

// Shades from 0 to 1 behind the bytes of a text.
function shade(box, shares, colour) {
  [...box.children].forEach((made, place) => {
    const full = Math.round(100 * clamp(shares[place] ?? 0, 0, 1));
    made.style.background = full ? `color-mix(in srgb, var(${colour}) ${full}%, transparent)` : "";
  });
}

function onByte(box, event, act) {
  box.addEventListener(event, ({ target }) => {
    if (target.dataset.place !== undefined) act(Number(target.dataset.place));
  });
}

function sayGuess(place) {
  const own = passage();
  if (!place) return `${told(0)} is the first: nothing predicted it`;
  const guesses = own.guesses[place - 1];
  const words = [0, 2, 4].filter((i) => i < guesses.length).map((i) => `\u201c${quoted(guesses[i])}\u201d ${guesses[i + 1]} %`);
  return `${told(place)}: ${own.bits[place - 1].toFixed(2)} bits. Expected: ${words.join(", ")}`;
}

// --- maps

const inflated = new Map();

// 8 bits a weight: the lower triangles of all heads, then what each query gives to learned vectors.
function codesOf(layer) {
  const key = `${at.passage} ${layer}`;
  if (!inflated.has(key)) {
    const packed = new Blob([bytesOf(mapped[layer].maps[at.passage])]);
    const stream = packed.stream().pipeThrough(new DecompressionStream("deflate"));
    inflated.set(key, new Response(stream).arrayBuffer().then((buffer) => new Uint8Array(buffer)));
  }
  return inflated.get(key);
}

const triangle = (size) => (size * (size + 1)) / 2;
const weightOf = (code) => (code / 255) ** 1.5;
let codes = null; // of the chosen passage and layer
let image = null; // the chosen map, a pixel a weight

const weight = (query, key) => (key > query ? 0 : weightOf(codes[at.head * triangle(length()) + triangle(query) + key]));
const beside = (query) => {
  const own = mapped[at.layer];
  return own.beside ? weightOf(codes[own.heads * triangle(length()) + at.head * length() + query]) : 0;
};

const dark = matchMedia("(prefers-color-scheme: dark)");
const STOPS = {
  false: [[255, 255, 255], [198, 221, 247], [98, 157, 222], [11, 87, 164], [5, 36, 80]],
  true: [[20, 23, 28], [24, 52, 92], [36, 98, 176], [118, 178, 246], [240, 247, 255]],
};

// From 0 to 1, by the root of a weight. Only five of a thousand weights are beyond `brightest`, else many maps were blank.
const shadeOf = (code, brightest) => Math.min(code / brightest, 1) ** 0.75;

function brightestOf(image, side) {
  const number = new Uint32Array(256);
  for (let y = 0; y < side; y += 1) for (let x = 0; x <= y; x += 1) number[image[y * side + x]] += 1;
  let code = 255;
  for (let beyond = number[255]; beyond < triangle(side) / 200 && code > 4; beyond += number[code]) code -= 1;
  return code;
}

// A colour for each code.
function palette(brightest) {
  const stops = STOPS[dark.matches];
  return Uint32Array.from({ length: 256 }, (_, code) => {
    const x = shadeOf(code, brightest) * (stops.length - 1);
    const low = Math.min(Math.floor(x), stops.length - 2);
    const [r, g, b] = stops[low].map((from, i) => Math.round(from + (x - low) * (stops[low + 1][i] - from)));
    return (255 << 24) | (b << 16) | (g << 8) | r;
  });
}

// A map as an image of at most `most` pixels a side, each the largest of the weights in it.
function imageOf(from, head, most) {
  const size = length();
  const side = Math.min(size, most);
  const largest = new Uint8Array(side * side);
  const pixel = Int32Array.from({ length: size }, (_, place) => Math.floor((place * side) / size));
  for (let query = 0, next = head * triangle(size); query < size; query += 1) {
    const row = pixel[query] * side;
    for (let key = 0; key <= query; key += 1, next += 1) {
      const place = row + pixel[key];
      if (from[next] > largest[place]) largest[place] = from[next];
    }
  }
  const brightest = brightestOf(largest, side);
  const colours = palette(brightest);
  const drawn = new ImageData(side, side);
  const pixels = new Uint32Array(drawn.data.buffer);
  for (let y = 0; y < side; y += 1) for (let x = 0; x <= y; x += 1) pixels[y * side + x] = colours[largest[y * side + x]];
  const canvas = make("canvas", { width: side, height: side });
  canvas.getContext("2d").putImageData(drawn, 0, 0);
  return { canvas, brightest };
}

const map = find("#map");
const MARGIN = 36; // of the map: numbers of bytes, or the bytes themselves
const geometry = () => {
  const side = map.clientWidth - MARGIN;
  return { side, cell: side / view.cells };
};
const onMap = (event) => {
  const box = map.getBoundingClientRect();
  const { cell } = geometry();
  return { x: view.x + (event.clientX - box.left - MARGIN) / cell, y: view.y + (event.clientY - box.top - MARGIN) / cell };
};

function drawMap() {
  if (!map || !image || !map.clientWidth) return;
  const { side, cell } = geometry();
  const ratio = devicePixelRatio || 1;
  const style = getComputedStyle(document.documentElement);
  const [ink, faint, raised, accent] = ["--ink", "--faint", "--raised", "--accent"].map((name) => style.getPropertyValue(name).trim());
  map.width = map.height = Math.round(map.clientWidth * ratio);
  const context = map.getContext("2d");
  context.scale(ratio, ratio);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = raised;
  context.fillRect(MARGIN, MARGIN, side, side);
  context.save();
  context.beginPath();
  context.rect(MARGIN, MARGIN, side, side);
  context.clip();
  context.imageSmoothingEnabled = cell < 1;
  context.drawImage(image.canvas, view.x, view.y, view.cells, view.cells, MARGIN, MARGIN, side, side);
  const [x, y] = [MARGIN + (at.key - view.x) * cell, MARGIN + (at.query - view.y) * cell];
  context.strokeStyle = accent;
  context.globalAlpha = cell < 6 ? 0.3 : 0.7;
  context.strokeRect(MARGIN - 1, y, side + 2, cell);
  context.strokeRect(x, MARGIN - 1, cell, side + 2);
  context.globalAlpha = 1;
  context.lineWidth = 2;
  context.strokeRect(x, y, cell, cell);
  context.lineWidth = 1;
  const shown = [Math.floor(view.x), Math.floor(view.y)].map((first) => [first, Math.min(Math.ceil(first + view.cells + 1), length())]);
  if (cell >= 38) {
    context.font = `${Math.min(cell / 3.6, 14)}px system-ui, sans-serif`;
    for (let query = shown[1][0]; query < shown[1][1]; query += 1) {
      for (let key = shown[0][0]; key < Math.min(shown[0][1], query + 1); key += 1) {
        const value = weight(query, key);
        if (value < 0.005) continue;
        const strong = shadeOf(255 * value ** (2 / 3), image.brightest) > (dark.matches ? 0.65 : 0.5);
        context.fillStyle = strong !== dark.matches ? "#ffffff" : "#14171c";
        context.fillText(value.toFixed(2), MARGIN + (key - view.x + 0.5) * cell, MARGIN + (query - view.y + 0.5) * cell);
      }
    }
  }
  context.restore();
  const readable = cell >= 11;
  const step = readable ? 1 : 2 ** Math.ceil(Math.log2(60 / cell));
  const { glyphs: own } = passage();
  context.font = readable ? `${clamp(cell * 0.75, 10, 18)}px ui-monospace, Menlo, Consolas, "Liberation Mono", monospace` : "11px system-ui, sans-serif";
  shown.forEach(([first, last], down) => {
    for (let place = Math.ceil(first / step) * step; place < last; place += step) {
      const along = MARGIN + (place - (down ? view.y : view.x) + 0.5) * cell;
      if (along < MARGIN || along > MARGIN + side) continue;
      context.fillStyle = place === (down ? at.query : at.key) ? accent : readable && !own[place].odd ? ink : faint;
      const text = readable ? own[place].text.trim() || "\u2423" : String(place);
      context.fillText(text, down ? MARGIN / 2 : along, down ? along : MARGIN / 2, MARGIN - 2);
    }
  });
  map.classList.toggle("closer", view.cells < length());
}

function zoom(factor, x = at.key + 0.5, y = at.query + 0.5) {
  const cells = clamp(view.cells * factor, Math.min(8, length()), length());
  const kept = cells / view.cells; // the place under the pointer stays where it is
  Object.assign(view, { x: x - (x - view.x) * kept, y: y - (y - view.y) * kept, cells });
  move(0, 0);
}

function move(x, y) {
  view.x = clamp(view.x + x, 0, length() - view.cells);
  view.y = clamp(view.y + y, 0, length() - view.cells);
  drawMap();
}

function sayWeight(query, key) {
  if (key > query) return `${told(query)} cannot see ${told(key)}, which comes later`;
  const far = query === key ? "itself" : `${told(key)}, ${query - key} back`;
  const others = mapped[at.layer].beside ? `; ${percent(beside(query))} of all goes to learned vectors` : "";
  return `${told(query)} takes ${short(weight(query, key))} of ${far}${others}`;
}

// Keep a byte: its row is what the text below the map shows.
function keep(query, key = null) {
  at.query = clamp(query, 0, length() - 1);
  const row = Array.from({ length: at.query + 1 }, (_, place) => weight(at.query, place));
  const most = Math.max(...row, 1e-9);
  at.key = key === null ? Math.max(row.indexOf(most), 0) : clamp(key, 0, at.query);
  const box = find("#row-text");
  shade(box, row.map((value) => Math.sqrt(value / most)), "--cool");
  [box, find("#surprise-text")].forEach((text) => {
    text.querySelector(".kept")?.classList.remove("kept");
    text.children[at.query].classList.add("kept");
  });
  const first = row.map((value, place) => [value, place]).sort((a, b) => b[0] - a[0]).slice(0, 4).filter(([value]) => value >= 0.0005);
  const words = first.map(([value, place]) => `\u201c${passage().glyphs[place].text.trim() || "space"}\u201d ${at.query - place} back ${value.toFixed(3)}`);
  const others = mapped[at.layer].beside ? `; learned vectors ${percent(beside(at.query))}` : "";
  find("#row-said").textContent = `${told(at.query)} looks most at: ${words.join(", ") || "nothing"}${others}`;
  find("#map-said").textContent = sayWeight(at.query, at.key);
  drawMap();
}

function mapControls() {
  const held = new Map(); // pointers that are down: a mouse, a finger or two
  let moved = false;
  const middle = () => {
    const places = [...held.values()];
    const mean = (name) => places.reduce((sum, place) => sum + place[name], 0) / places.length;
    const [clientX, clientY] = [mean("clientX"), mean("clientY")];
    return { clientX, clientY, apart: Math.max(16, ...places.map((place) => 2 * Math.hypot(place.clientX - clientX, place.clientY - clientY))) };
  };
  const placeOf = ({ clientX, clientY }) => ({ clientX, clientY });
  map.addEventListener("pointerdown", (event) => {
    moved = held.size > 0;
    held.set(event.pointerId, placeOf(event));
    map.setPointerCapture(event.pointerId);
  });
  map.addEventListener("pointermove", (event) => {
    if (held.has(event.pointerId)) {
      const before = middle();
      const old = held.get(event.pointerId);
      if (!moved && Math.hypot(old.clientX - event.clientX, old.clientY - event.clientY) <= 4) return;
      moved = true;
      held.set(event.pointerId, placeOf(event));
      const now = middle();
      const { cell } = geometry();
      move((before.clientX - now.clientX) / cell, (before.clientY - now.clientY) / cell);
      const { x, y } = onMap(now);
      if (held.size > 1) zoom(before.apart / now.apart, x, y);
    } else {
      const { x, y } = onMap(event);
      const inside = x >= view.x && y >= view.y && x < length() && y < length();
      find("#map-said").textContent = inside ? sayWeight(Math.floor(y), Math.floor(x)) : sayWeight(at.query, at.key);
    }
  });
  map.addEventListener("pointerup", (event) => {
    held.delete(event.pointerId);
    const { x, y } = onMap(event);
    if (!moved && x >= view.x && y >= view.y) keep(Math.floor(y), Math.floor(x));
  });
  map.addEventListener("pointercancel", (event) => { held.delete(event.pointerId); });
  // Two fingers are the map's also where one scrolls the page.
  map.addEventListener("touchstart", (event) => { if (event.touches.length > 1) event.preventDefault(); }, { passive: false });
  map.addEventListener("pointerleave", () => { find("#map-said").textContent = sayWeight(at.query, at.key); });
  map.addEventListener("dblclick", (event) => {
    const { x, y } = onMap(event);
    zoom(0.4, x, y);
  });
  // A wheel scrolls the page until the map was clicked.
  map.addEventListener("wheel", (event) => {
    if (document.activeElement !== map && !event.ctrlKey) return;
    event.preventDefault();
    const { x, y } = onMap(event);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, x, y);
  }, { passive: false });
  const keys = {
    ArrowLeft: () => keep(at.query, at.key - 1),
    ArrowRight: () => keep(at.query, at.key + 1),
    ArrowUp: () => keep(at.query - 1, at.key),
    ArrowDown: () => keep(at.query + 1, at.key),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    0: () => zoom(length()),
  };
  map.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
    const outside = (place, first) => (place < first ? place - first : place >= first + view.cells ? place - first - view.cells + 1 : 0);
    move(outside(at.key, view.x), outside(at.query, view.y));
  });
  find("#closer").onclick = () => zoom(0.5);
  find("#farther").onclick = () => zoom(2);
  find("#whole").onclick = () => zoom(length());
  new ResizeObserver(drawMap).observe(map);
}

// --- all maps, small

const nameOf = (own) => own.name.replace(/^layers\.(\d+)\.(.*)$/, "$1 $2");
const layerOf = (own) => own.name.split(".")[1] ?? own.name;
const brief = new Set(mapped.map(layerOf)).size === mapped.length ? layerOf : nameOf; // a layer may have several

function headButtons() {
  const box = find("#heads");
  const most = Math.max(...mapped.map((own) => own.heads));
  const columns = `minmax(1.5rem, max-content) repeat(${most}, minmax(1.6rem, 5rem))`;
  box.replaceChildren(...mapped.map((own, layer) => {
    const buttons = Array.from({ length: own.heads }, (_, head) => {
      const button = make("button", { type: "button", tabIndex: -1, onclick: () => choose({ layer, head }) }, make("canvas", { width: 64, height: 64 }));
      button.setAttribute("aria-label", `${nameOf(own)}, head ${head}`);
      return button;
    });
    const row = make("div", {}, make("span", { textContent: brief(own), title: own.name }), ...buttons);
    row.style.gridTemplateColumns = columns;
    return row;
  }));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const layer = clamp(at.layer + step[0], 0, mapped.length - 1);
    choose({ layer, head: clamp(at.head + step[1], 0, mapped[layer].heads - 1) });
    buttonOf(at.layer, at.head).focus();
  });
}

const buttonOf = (layer, head) => find("#heads").children[layer].querySelectorAll("button")[head];

async function drawSmall() {
  const wanted = at.passage;
  for (let layer = 0; layer < mapped.length; layer += 1) {
    const own = await codesOf(layer);
    if (wanted !== at.passage) return; // another passage was chosen
    for (let head = 0; head < mapped[layer].heads; head += 1) {
      const context = buttonOf(layer, head).firstChild.getContext("2d");
      context.clearRect(0, 0, 64, 64);
      context.drawImage(imageOf(own, head, 64).canvas, 0, 0, 64, 64);
    }
  }
}

// --- tables and bars

function rowHead(layer, head) {
  const button = make("button", { type: "button", title: mapped[layer].name, textContent: `${brief(mapped[layer])} \u00b7 ${head}`, onclick: () => choose({ layer, head }) });
  return make("th", { scope: "row" }, button);
}

function tableOf(heads, rows) {
  const top = make("tr", {}, ...heads.map((text) => make("th", { scope: "col", textContent: text })));
  return make("table", {}, make("thead", {}, top), make("tbody", {}, ...rows));
}

function rowOf(layer, head, ...cells) {
  const row = make("tr", {}, rowHead(layer, head), ...cells);
  row.dataset.of = `${layer} ${head}`;
  return row;
}

function drawSpans() {
  const masked = mapped.map((own, layer) => [own, layer]).filter(([own]) => own.mask);
  const rows = masked.flatMap(([own, layer]) => own.mask.at.map((mask, head) => {
    const strip = make("div", { className: "strip" });
    const stops = mask.map((share) => `color-mix(in srgb, var(--accent) ${Math.round(share / 2.55)}%, transparent)`);
    strip.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    const span = seen.metrics[`${own.name}.span`]?.[head];
    return rowOf(layer, head, make("td", {}, strip), make("td", { className: "number", textContent: span === undefined ? "" : span.toFixed(1) }));
  }));
  find("#masks").append(tableOf(["layer \u00b7 head", `0 to ${masked[0][0].mask.last} keys back (S = ${seen.span})`, "span z, keys"], rows));
}

function drawDistance() {
  const columns = Math.max(...mapped.map((own) => own.distance[0].length));
  const name = (bin) => (bin < 2 ? String(bin) : `${2 ** (bin - 1)}\u2013${2 ** bin - 1}`);
  const cell = (share) => {
    const made = make("td", { textContent: share === undefined ? "" : (100 * share).toFixed(share < 0.0995 && share >= 0.0005 ? 1 : 0) });
    made.style.setProperty("--share", `${Math.round(100 * Math.sqrt(share ?? 0))}%`);
    return made;
  };
  const vectors = mapped.some((own) => own.mass);
  const rows = mapped.flatMap((own, layer) => own.distance.map((shares, head) => {
    const cells = Array.from({ length: columns }, (_, bin) => cell(shares[bin]));
    return rowOf(layer, head, ...cells, ...(vectors ? [cell(own.mass?.[head])] : []));
  }));
  const heads = ["layer \u00b7 head", ...Array.from({ length: columns }, (_, bin) => name(bin)), ...(vectors ? ["vectors"] : [])];
  find("#distances").append(tableOf(heads, rows));
}

function bars(box, rows) {
  const most = Math.max(...rows.map(({ value }) => value), 1e-9);
  box.replaceChildren(make("table", {}, make("tbody", {}, ...rows.map(({ label, value, text, more }) => {
    const bar = make("div", { className: "bar" });
    bar.style.width = `${(100 * value) / most}%`;
    const cells = [make("td", {}, bar), make("td", { className: "number", textContent: text })];
    if (more) cells.push(make("td", { textContent: more }));
    return make("tr", {}, make("th", { scope: "row", textContent: label }), ...cells);
  }))));
}

function drawLoss() {
  bars(find("#positions"), seen.positions.map((point) => {
    const [first, last] = [point.from_bytes, point.to_bytes].map((value) => value.toLocaleString("en"));
    return { label: first === last ? first : `${first}\u2013${last}`, value: point.bits_per_byte, text: point.bits_per_byte.toFixed(3) };
  }));
  const all = seen.kinds.reduce((sum, own) => sum + own.bytes, 0);
  bars(find("#kinds"), seen.kinds.map((own) => (
    { label: own.kind, value: own.bits, text: own.bits.toFixed(3), more: `${percent(own.bytes / all)} of bytes, ${percent(own.share)} of bits` }
  )));
}

// --- learned vectors

const WORDS = { // of metrics; others go by their names
  usage_bytes: "bytes scored",
  usage_percent: "% of slots used",
  kl_count_nats: "nats from even use (KL), by reads",
  kl_weighted_nats: "nats from even use (KL), by weight",
};

function vectorControls() {
  const [table, head] = [find("#table"), find("#table-head")];
  const tables = seen.sublayers.filter((own) => own.entries);
  const all = passages.reduce((sum, own) => sum + own.content.length, 0);
  fill(table, tables.map(nameOf));
  const draw = () => {
    const own = tables[table.value];
    const mass = own.mass?.map((value, number) => ({ label: `head ${number}`, value, text: percent(value), more: "of its mass is on learned vectors" }));
    find("#vectors-mass").hidden = !mass;
    if (mass) bars(find("#vectors-mass"), mass);
    const facts = Object.entries(seen.metrics).filter(([key, value]) => key.startsWith(`${own.name}.`) && typeof value === "number");
    const worded = (key) => WORDS[key.slice(own.name.length + 1)] ?? key.slice(own.name.length + 1);
    find("#vectors-facts").textContent = facts.map(([key, value]) => `${value.toLocaleString("en", { maximumFractionDigits: 2 })} ${worded(key)}`).join("; ");
    find("#vectors-list").replaceChildren(...own.entries[head.value].map((entry) => {
      const contexts = entry.contexts.map(([from, place, share]) => {
        const text = make("span", { className: "text" }, ...textOf(passages[from], Math.max(0, place - 27), place + 1));
        text.querySelectorAll("i").forEach((byte) => { byte.textContent = byte.textContent.trim() || " "; });
        return make("li", {}, make("b", { textContent: share.toFixed(3) }), text);
      });
      const few = entry.takers < all ? `, called by ${entry.takers.toLocaleString("en")} of ${all.toLocaleString("en")} bytes` : "";
      const title = `Vector ${entry.number.toLocaleString("en")}: ${(100 * entry.share).toPrecision(2)} % of what bytes take${few}`;
      return make("div", { className: "vector" }, make("h4", { textContent: title }), make("ul", {}, ...contexts));
    }));
  };
  table.onchange = () => {
    fill(head, tables[table.value].entries.map((_, number) => String(number)));
    draw();
  };
  head.onchange = draw;
  table.onchange();
}

// --- what is chosen

function fill(select, texts) {
  select.replaceChildren(...texts.map((textContent, value) => make("option", { value, textContent })));
}

async function choose(change) {
  const fresh = change.passage !== undefined;
  Object.assign(at, change);
  if (fresh) {
    Object.assign(view, { x: 0, y: 0, cells: length() });
    const own = passage();
    find("#surprise-text").replaceChildren(...textOf(own));
    shade(find("#surprise-text"), [0, ...own.bits.map((bits) => bits / 10)], "--hot");
    find("#surprise-said").textContent = "";
    if (mapped.length) find("#row-text").replaceChildren(...textOf(own));
  }
  if (!mapped.length) return;
  const own = mapped[at.layer];
  if (find("#head").length !== own.heads) fill(find("#head"), Array.from({ length: own.heads }, (_, head) => String(head)));
  at.head = Math.min(at.head, own.heads - 1);
  Object.entries({ passage: at.passage, layer: at.layer, head: at.head }).forEach(([name, value]) => { find(`#${name}`).value = value; });
  const wanted = `${at.passage} ${at.layer} ${at.head}`;
  const found = await codesOf(at.layer);
  if (wanted !== `${at.passage} ${at.layer} ${at.head}`) return; // something else was chosen meanwhile
  codes = found;
  image = imageOf(codes, at.head, length());
  find("#heads").querySelectorAll("button").forEach((button) => {
    const chosen = button === buttonOf(at.layer, at.head);
    button.setAttribute("aria-pressed", chosen);
    button.tabIndex = chosen ? 0 : -1;
  });
  document.querySelectorAll("tr[data-of]").forEach((row) => row.classList.toggle("chosen", row.dataset.of === `${at.layer} ${at.head}`));
  keep(fresh ? Math.floor(length() * 0.6) : at.query);
  if (fresh) await drawSmall();
}

// The layer and head that look farthest in the mean: of many that see their neighbours, one to begin with.
function farthest() {
  const far = (shares) => shares.reduce((sum, share, bin) => sum + share * bin, 0);
  const all = mapped.flatMap((own, layer) => own.distance.map((shares, head) => ({ layer, head, far: far(shares) })));
  const { layer, head } = all.reduce((best, one) => (one.far > best.far ? one : best), { layer: 0, head: 0, far: -1 });
  return { layer, head };
}

function begin() {
  fill(find("#passage"), passages.map((own) => own.title));
  fill(find("#layer"), mapped.map(nameOf));
  ["layer", "head"].forEach((name) => { find(`#${name}`).parentElement.hidden = !mapped.length; });
  ["passage", "layer", "head"].forEach((name) => {
    find(`#${name}`).onchange = ({ target }) => choose({ [name]: Number(target.value) });
  });
  const surprise = find("#surprise-text");
  onByte(surprise, "pointerover", (place) => { find("#surprise-said").textContent = sayGuess(place); });
  onByte(surprise, "click", (place) => {
    find("#surprise-said").textContent = sayGuess(place);
    if (codes) keep(place);
  });
  drawLoss();
  if (find("#vectors-list")) vectorControls();
  if (mapped.length) {
    mapControls();
    headButtons();
    onByte(find("#row-text"), "pointerover", (place) => { if (codes) find("#map-said").textContent = find("#row-said").textContent = sayWeight(at.query, place); });
    onByte(find("#row-text"), "click", (place) => keep(place));
    if (find("#masks")) drawSpans();
    drawDistance();
    dark.addEventListener("change", () => {
      image = imageOf(codes, at.head, length());
      drawMap();
      drawSmall();
    });
  }
  return choose({ passage: 0, ...farthest() });
}

begin();
