// A plot: axes, lines and marks in an SVG, and what its marks say when they are pointed at.

import { fixed, isNumber, NS, s, short } from "./core.js";
import { ink, markerPath } from "./colours.js";

function niceTicks(low, high, wanted) {
  const raw = (high - low || 1) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((x) => x >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}
function logTicks(low, high, wanted) {
  const decades = Math.log10(high / low), skip = Math.max(1, Math.round(decades / wanted)), ticks = [];
  if (decades <= 0.7) return niceTicks(low, high, wanted);
  const each = decades > wanted ? [1] : decades > wanted / 2 ? [1, 3] : [1, 2, 5];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += each.length === 1 ? skip : 1) {
    ticks.push(...each.map((m) => m * 10 ** e));
  }
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}
function makeScale({ domain, log }, from, to) {
  const [a, b] = log ? domain.map(Math.log) : domain;
  return (x) => from + (((log ? Math.log(x) : x) - a) / (b - a || 1)) * (to - from);
}
// the lowest and highest of the finite values, with some room; null where there is none
export function extent(values, { pad = 0.05, log = false, include = [] } = {}) {
  const own = [...values, ...include].filter((x) => isNumber(x) && (!log || x > 0));
  if (!own.length) return null;
  const low = own.reduce((a, b) => Math.min(a, b)), high = own.reduce((a, b) => Math.max(a, b));
  if (log) {
    const room = Math.max(Math.log(high / low) * pad, low === high ? 0.2 : 0);
    return [low * Math.exp(-room), high * Math.exp(room)];
  }
  const room = (high - low) * pad || (low === high ? Math.abs(high) * 0.05 || 1 : 0);
  return [low === 0 && include.includes(0) ? 0 : low - room, high + room];
}
export const isWide = (width) => width >= 560;
export const nameRoom = (names) => Math.min(190, 34 + 7.4 * Math.max(...names.map((name) => name.length)));

export class Plot {
  // an axis: { domain, log, label, ticks, format }
  constructor(width, height, { left = 58, right = 18, top = 34, bottom = 46, x = null, y = null, title }) {
    Object.assign(this, { width, height, left, right, top, bottom, colours: ink(), hits: [], isNamed: false });
    const family = "Helvetica, Arial, 'Liberation Sans', sans-serif", label = `${title}. Arrow keys read the marks.`;
    const size = { viewBox: `0 0 ${width} ${height}`, width, height };
    this.svg = s("svg", { xmlns: NS, ...size, role: "img", tabindex: 0, "font-family": family, "aria-label": label });
    this.layer = this.svg;
    this.rect(0, 0, width, height, { fill: this.colours.paper });
    if (x) this.drawX(x);
    if (y) this.drawY(y);
    this.layer = this.svg.appendChild(s("g"));
  }
  get end() {
    return this.width - this.right;
  }
  get floor() {
    return this.height - this.bottom;
  }
  drawX(axis) {
    const { left, top, end, floor, colours, height } = this, wanted = Math.max(2, Math.floor((end - left) / 90));
    this.x = makeScale(axis, left, end);
    this.logX = axis.log;
    for (const t of axis.ticks || (axis.log ? logTicks : niceTicks)(...axis.domain, wanted)) {
      this.path(`M${this.x(t).toFixed(1)},${top}V${floor}`, { stroke: colours.grid });
      this.text(this.x(t), floor + 16, (axis.format || short)(t), { fill: colours.soft, "font-size": 12 });
    }
    this.path(`M${left},${floor}H${end}`, { stroke: colours.faint });
    this.text((left + end) / 2, height - 8, axis.label, { fill: colours.soft, "font-size": 12.5 });
  }
  drawY(axis) {
    const { left, top, end, floor, colours } = this, wanted = Math.max(2, Math.floor((floor - top) / 48));
    this.y = makeScale(axis, floor, top);
    this.logY = axis.log;
    const ticks = axis.ticks || (axis.log ? logTicks : niceTicks)(...axis.domain, wanted);
    const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : 1;
    const places = step >= 1 ? 0 : Math.min(8, Math.ceil(-Math.log10(step) - 1e-9));
    const format = axis.format || ((t) => (axis.log || step >= 1000 ? short(t) : fixed(t, places)));
    for (const t of ticks) {
      this.path(`M${left},${this.y(t).toFixed(1)}H${end}`, { stroke: colours.grid });
      this.text(left - 8, this.y(t) + 4, format(t), { fill: colours.soft, "font-size": 12, "text-anchor": "end" });
    }
    this.text(8, top - 16, axis.label, { fill: colours.soft, "font-size": 12.5, "text-anchor": "start" });
  }
  path(d, attributes) {
    this.layer.append(s("path", { d, fill: "none", ...attributes }));
  }
  rect(x, y, width, height, attributes) {
    this.layer.append(s("rect", { x, y, width, height, ...attributes }));
  }
  text(x, y, content, attributes = {}) {
    const own = { fill: this.colours.ink, "font-size": 13, "text-anchor": "middle", ...attributes };
    this.layer.append(s("text", { x: x.toFixed(1), y: y.toFixed(1), ...own }, content));
  }
  // what belongs to an arm goes when the arm is hidden
  drawn(arm, d, attributes) {
    this.path(d, { class: "mark", "data-arm": arm, ...attributes });
  }
  line(points, { colour, width = 1.5, dash = "", opacity = null, arm = null }) {
    let d = "", pen = "M";
    for (const [x, y] of points) {
      const fits = isNumber(x) && isNumber(y) && (!this.logX || x > 0) && (!this.logY || y > 0);
      if (fits) d += `${pen}${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`;
      pen = fits ? "L" : "M";
    }
    const ends = {
      "stroke-dasharray": dash || null,
      "stroke-linejoin": "round",
      "stroke-linecap": dash ? null : "round",
    };
    if (d) this.drawn(arm, d, { stroke: colour, "stroke-width": width, opacity, ...ends });
  }
  // px, py: in the picture, not in numbers of the axes
  mark(px, py, { colour, marker }, { r = 4.5, opacity = null, arm = null } = {}) {
    const transform = `translate(${px.toFixed(1)},${py.toFixed(1)})`, edge = { stroke: this.colours.paper };
    this.drawn(arm, markerPath(marker, r), { transform, fill: colour, "stroke-width": 1, opacity, ...edge });
  }
  cross(px, py, r, colour, arm) {
    const transform = `translate(${px.toFixed(1)},${py.toFixed(1)})`;
    this.drawn(arm, `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`, { transform, stroke: colour, "stroke-width": 2.4 });
  }
  hit(px, py, title, lines) {
    this.hits.push({ x: px, y: py, title, lines });
  }
  // names at the ends of lines, { y, text, colour }, moved apart so that none covers another
  endLabels(labels) {
    labels.sort((a, b) => a.y - b.y);
    labels.forEach((label, i) => {
      label.at = Math.max(label.y, i ? labels[i - 1].at + 15 : this.top + 4);
    });
    labels.toReversed().forEach((label, i, all) => {
      label.at = Math.min(label.at, i ? all[i - 1].at - 15 : this.floor);
    });
    for (const { at, y, text, colour } of labels) {
      const leader = `M${this.end + 5},${y.toFixed(1)}L${this.end + 13},${at.toFixed(1)}`;
      if (Math.abs(at - y) > 5) this.path(leader, { stroke: colour, opacity: 0.6 });
      const style = { fill: colour, "font-size": 12.5, "text-anchor": "start", "font-weight": 600 };
      this.text(this.end + 16, at + 4, text, style);
    }
  }
}
