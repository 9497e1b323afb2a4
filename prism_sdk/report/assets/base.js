// What all charts share: the content, numbers as text, colours and patterns, tables, the tip.
"use strict";
const content = JSON.parse(document.getElementById("content").textContent);
const $ = (id) => document.getElementById(id);

const ARRAYS = { i4: Int32Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array, f8: Float64Array };
function unpack(packed) {
  const text = atob(packed.data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new ARRAYS[packed.type](bytes.buffer);
}

function formatNs(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${ns.toFixed(0)} ns`;
  if (size < 1e6) return `${(ns / 1e3).toFixed(2)} us`;
  if (size < 1e9) return `${(ns / 1e6).toFixed(3)} ms`;
  return `${(ns / 1e9).toFixed(4)} s`;
}
// the same for axes: no zeros behind the last digit that says something
const tickNs = (ns) => formatNs(ns).replace(/\.?0+ /, " ").replace(/^ /, "0 ");
function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < units.length - 1) { bytes /= 1024; unit++; }
  return `${unit ? bytes.toFixed(1) : bytes.toFixed(0)} ${units[unit]}`;
}
const counted = (number, noun, plural = `${noun}s`) => `${number} ${number === 1 ? noun : plural}`;
const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)} %` : "-");

// Okabe and Ito's colours, which people with any usual colour vision tell apart, and one more.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1"];
// Dark colours carry light text, light ones dark text.
const TEXT_ON = ["#fff", "#000", "#fff", "#000", "#000", "#fff", "#000", "#fff"];
const PART_STYLES = { compute: ["#0072b2", ""], exposed_communication: ["#d55e00", ""], bubble: ["#f0e442", "stripes"],
  imbalance: ["#cc79a7", "stripes"], launch_gap: ["#56b4e9", "dots"], idle: ["#9aa3ab", ""] };
// cividis, nine stops: even in lightness, the same to the colour-blind
const HEAT = [[0, 34, 78], [18, 53, 112], [59, 73, 107], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116],
  [195, 179, 105], [254, 232, 56]];
function heatColour(share) {
  const at = Math.max(0, Math.min(1, share)) * (HEAT.length - 1);
  const low = Math.min(HEAT.length - 2, Math.floor(at));
  const mix = HEAT[low].map((value, i) => Math.round(value + (HEAT[low + 1][i] - value) * (at - low)));
  return `rgb(${mix.join(",")})`;
}
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const patterns = new Map();
function pattern(colour, kind) {
  if (!kind) return colour;
  const key = `${colour} ${kind} ${themed("--stripe")}`;
  if (patterns.has(key)) return patterns.get(key);
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const c = tile.getContext("2d");
  c.fillStyle = colour;
  c.fillRect(0, 0, 8, 8);
  c.fillStyle = c.strokeStyle = themed("--stripe");
  if (kind === "stripes") {
    c.lineWidth = 2.5;
    c.beginPath();
    for (const x of [-4, 0, 4, 8, 12]) { c.moveTo(x, 8); c.lineTo(x + 8, 0); }
    c.stroke();
  } else {
    c.fillRect(1, 1, 3, 3);
    c.fillRect(5, 5, 3, 3);
  }
  const made = c.createPattern(tile, "repeat");
  patterns.set(key, made);
  return made;
}

function legend(list, entries) {
  list.replaceChildren(...entries.map(([text, colour, kind]) => {
    const item = document.createElement("li"), box = document.createElement("canvas");
    box.width = 44; box.height = 26;
    box.setAttribute("aria-hidden", "true");
    const c = box.getContext("2d");
    c.fillStyle = pattern(colour, kind);
    c.fillRect(0, 0, 44, 26);
    item.append(box, text);
    return item;
  }));
}

function table(title, header, rows) {
  const made = document.createElement("table");
  made.createCaption().textContent = title;
  const head = made.createTHead().insertRow();
  for (const name of header) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    head.append(cell);
  }
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const value of row) line.insertCell().textContent = value;
  }
  const scroll = document.createElement("div");
  scroll.className = "scroll";
  scroll.append(made);
  return scroll;
}

const tip = $("tip");
function showTip(text, x, y) {
  if (!text) { tip.hidden = true; return; }
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(4, y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18)}px`;
}

// Everything that depends on theme or width is drawn by one of these.
const redraws = [];
function redrawAll() { for (const redraw of redraws) redraw(); }

function axis(extra) {
  return { stroke: themed("--soft"), grid: { stroke: themed("--line"), width: 1 }, ticks: { stroke: themed("--line"), width: 1 },
    font: "12px system-ui, sans-serif", ...extra };
}
function surface(root, height) {
  const canvas = document.createElement("canvas");
  const ratio = devicePixelRatio || 1, width = root.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  root.replaceChildren(canvas);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return [canvas, context, width];
}
