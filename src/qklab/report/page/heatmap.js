// Attention maps: weights packed as lower triangles of 16-bit numbers, drawn as shades.

import { count, fixed, h, s } from "./core.js";
import { themeName } from "./colours.js";

const FULL = 65534, LOST = 65535;
const STOPS = {
  light: [[255, 255, 255], [207, 224, 250], [36, 89, 169], [16, 34, 66]],
  dark: [[27, 32, 38], [38, 66, 112], [110, 163, 245], [235, 243, 255]],
};
const LOST_SHADE = [190, 80, 70];

const unpacked = new Map();
function unpack(text) {
  if (!unpacked.has(text)) {
    const raw = atob(text), number = (k) => raw.charCodeAt(2 * k) + 256 * raw.charCodeAt(2 * k + 1);
    unpacked.set(text, count(raw.length / 2).map((k) => (number(k) === LOST ? null : number(k) / FULL)));
  }
  return unpacked.get(text);
}
// the square root of the weight, so that small ones show
function shade(weight) {
  if (weight === null) return LOST_SHADE;
  const stops = STOPS[themeName()], at = 3 * Math.sqrt(Math.min(1, weight)), k = Math.min(2, Math.floor(at));
  return stops[k].map((x, i) => Math.round(x + (stops[k + 1][i] - x) * (at - k)));
}
function drawImage(weights, size) {
  const canvas = h("canvas", { width: size, height: size }), context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  for (let i = 0, k = 0; i < size; i++) {
    for (let j = 0; j <= i; j++, k++) image.data.set([...shade(weights[k]), 255], 4 * (i * size + j));
  }
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}
// white space and controls made visible; long tokens cut
const MARKS = { " ": "·", "\n": "⏎", "\t": "⇥", "<|endoftext|>": "⟨eot⟩" };
const code = (c) => `\\x${c.codePointAt(0).toString(16).padStart(2, "0")}`;
export const visibleText = (text) => text.replace(/[^\P{C}\n\t]/gu, code);
export function tokenLabel(token) {
  const shown = [...(MARKS[token] || visibleText(token).replace(/[ \n\t]/g, (c) => MARKS[c]))];
  const most = /[\u1100-\u{10ffff}]/u.test(token) ? 7 : 12; // wide letters
  return shown.length > most ? shown.slice(0, most - 1).join("") + "…" : shown.join("");
}

// A map with its top left corner at x, y; what it says of a cell is found by mouse, and by keyboard the key that each
// query looks at most.
export function drawMap(plot, packed, { x, y, size, tokens, title, arm = null }) {
  const weights = unpack(packed), edge = tokens.length, at = (i, j) => weights[(i * (i + 1)) / 2 + j];
  const image = { x, y, width: size, height: size, href: drawImage(weights, edge), preserveAspectRatio: "none" };
  plot.layer.append(s("image", { class: "mark", "data-arm": arm, style: "image-rendering:pixelated", ...image }));
  plot.rect(x, y, size, size, { fill: "none", stroke: plot.colours.grid });
  const cell = (i, j) => ({
    x: x + ((j + 0.5) * size) / edge,
    y: y + ((i + 0.5) * size) / edge,
    title,
    lines: () => {
      const name = (k) => `${k + 1} “${visibleText(tokens[k])}”`, weight = at(i, j);
      return [`query ${name(i)}`, `key ${name(j)}`, weight === null ? "not finite" : `weight ${fixed(weight, 3)}`];
    },
  });
  for (const i of count(edge)) {
    plot.hits.push(cell(i, count(i + 1).reduce((best, j) => (at(i, j) > at(i, best) ? j : best), 0)));
  }
  const elsewhere = plot.hitAt;
  plot.hitAt = (px, py) => {
    const j = Math.floor(((px - x) / size) * edge), i = Math.floor(((py - y) / size) * edge);
    return i >= 0 && j >= 0 && i < edge && j <= i ? cell(i, j) : elsewhere?.(px, py);
  };
}
export function drawShades(plot, x, y, width, steps = 32) {
  for (const k of count(steps)) {
    const fill = `rgb(${shade((k / (steps - 1)) ** 2)})`;
    plot.rect((x + (k * width) / steps).toFixed(1), y, (width / steps + 0.5).toFixed(2), 9, { fill });
  }
  const style = { "font-size": 11.5, fill: plot.colours.soft };
  for (const weight of [0, 0.25, 1]) plot.text(x + width * Math.sqrt(weight), y + 24, String(weight), style);
  plot.text(x + width + 14, y + 9, "weight", { ...style, "text-anchor": "start" });
}
