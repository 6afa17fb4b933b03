// Figures: a frame with controls and downloads, and in it a plot that is drawn when it comes into view.

function niceTicks(low, high, wanted) {
  const span = high - low || 1, raw = span / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((x) => x >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return { ticks, step };
}
function logTicks(low, high, wanted) {
  const ticks = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const decades = Math.log10(high / low);
  const each = decades > wanted ? [1] : decades > wanted / 2 ? [1, 3] : decades > 0.7 ? [1, 2, 5] : null;
  if (!each) return niceTicks(low, high, wanted).ticks;
  const skip = Math.max(1, Math.round(decades / wanted));
  for (let e = from; e <= to; e += each.length === 1 ? skip : 1) for (const m of each) ticks.push(m * 10 ** e);
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}
function scale({ domain, range, log }) {
  let [a, b] = domain;
  if (log) { a = Math.log(a); b = Math.log(b); }
  const f = (x) => range[0] + (((log ? Math.log(x) : x) - a) / (b - a || 1)) * (range[1] - range[0]);
  f.log = log; f.domain = domain; f.range = range;
  return f;
}
function extent(values, { pad = 0.05, log = false, include = [] } = {}) {
  const own = [...values, ...include].filter((x) => isNumber(x) && (!log || x > 0));
  if (!own.length) return null;
  let low = Infinity, high = -Infinity;
  for (const x of own) { if (x < low) low = x; if (x > high) high = x; }
  if (log) {
    const room = Math.max(Math.log(high / low) * pad, low === high ? 0.2 : 0);
    return [low * Math.exp(-room), high * Math.exp(room)];
  }
  const room = (high - low) * pad || Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

class Plot {
  constructor(width, height, margin, x, y, label) {
    this.width = width; this.height = height; this.m = margin; this.c = ink(); this.hits = []; this.label = label;
    this.svg = s("svg", {
      xmlns: NS, viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: 0,
      "font-family": "Helvetica, Arial, 'Liberation Sans', sans-serif", "aria-label": `${label}. Arrow keys read the marks.`,
    });
    this.svg.append(s("rect", { x: 0, y: 0, width, height, fill: this.c.paper }));
    this.marks = 0;
    if (x) this.x = scale({ domain: x.domain, log: x.log, range: [margin.left, width - margin.right] });
    if (y) this.y = scale({ domain: y.domain, log: y.log, range: [height - margin.bottom, margin.top] });
    if (x) this.axisX(x);
    if (y) this.axisY(y);
    this.layer = s("g");
    this.svg.append(this.layer);
  }
  ticks(axis, f, size) {
    if (axis.ticks) return axis.ticks;
    return axis.log ? logTicks(...f.domain, size) : niceTicks(...f.domain, size).ticks;
  }
  axisX(axis) {
    const { m, c, height, width } = this, bottom = height - m.bottom;
    const ticks = this.ticks(axis, this.x, Math.max(2, Math.floor((width - m.left - m.right) / 90)));
    for (const t of ticks) {
      const at = this.x(t);
      this.svg.append(s("path", { d: `M${at.toFixed(1)},${m.top}V${bottom}`, stroke: c.grid }));
      this.text(at, bottom + 16, (axis.format || short)(t), { colour: c.soft, size: 12 });
    }
    this.svg.append(s("path", { d: `M${m.left},${bottom}H${width - m.right}`, stroke: c.faint }));
    this.text((m.left + width - m.right) / 2, height - 8, axis.label, { colour: c.soft, size: 12.5 });
  }
  axisY(axis) {
    const { m, c, height, width } = this;
    const ticks = this.ticks(axis, this.y, Math.max(2, Math.floor((height - m.top - m.bottom) / 48)));
    const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : 1;
    const format = axis.format || ((t) => (axis.log || step >= 1000 ? short(t) : fixed(t, step >= 1 ? 0 : Math.min(8, Math.ceil(-Math.log10(step) - 1e-9)))));
    for (const t of ticks) {
      const at = this.y(t);
      this.svg.append(s("path", { d: `M${m.left},${at.toFixed(1)}H${width - m.right}`, stroke: c.grid }));
      this.text(m.left - 8, at + 4, format(t), { colour: c.soft, size: 12, anchor: "end" });
    }
    if (axis.label) this.text(m.left - 8 > 60 ? m.left : 8, m.top - 12, axis.label, { colour: c.soft, size: 12.5, anchor: "start" });
  }
  text(x, y, content, { colour = this.c.ink, size = 13, anchor = "middle", weight = null, halo = false } = {}) {
    const around = halo ? { stroke: this.c.paper, "stroke-width": 4, "paint-order": "stroke", "stroke-linejoin": "round" } : {};
    (this.layer || this.svg).append(s("text", { ...around, x: x.toFixed(1), y: y.toFixed(1), fill: colour, "font-size": size, "text-anchor": anchor, "font-weight": weight }, content));
  }
  line(points, { colour, width = 1.5, dash = "", opacity = 1, name = "" }) {
    const d = [];
    let pen = false;
    for (const [x, y] of points) {
      const ok = isNumber(x) && isNumber(y) && (!this.x.log || x > 0) && (!this.y.log || y > 0);
      if (ok) d.push(`${pen ? "L" : "M"}${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`);
      pen = ok;
    }
    if (!d.length) return;
    this.layer.append(s("path", { class: "mark", "data-arm": name, d: d.join(""), fill: "none", stroke: colour, "stroke-width": width, "stroke-dasharray": dash, opacity: opacity === 1 ? null : opacity, "stroke-linejoin": "round", "stroke-linecap": dash ? "butt" : "round" }));
    this.marks++;
  }
  mark(px, py, style, { r = 4.5, opacity = 1, hollow = false, name = "" } = {}) {
    this.layer.append(s("path", {
      class: "mark", "data-arm": name, d: markerPath(style.marker, r), transform: `translate(${px.toFixed(1)},${py.toFixed(1)})`,
      fill: hollow ? this.c.paper : style.colour, stroke: hollow ? style.colour : this.c.paper, "stroke-width": hollow ? 1.6 : 1, opacity: opacity === 1 ? null : opacity,
    }));
    this.marks++;
  }
  hit(px, py, title, lines) { this.hits.push({ x: px, y: py, title, lines }); }
  // names at the ends of lines, moved apart so that none covers another
  endLabels(labels) {
    labels.sort((a, b) => a.y - b.y);
    const gap = 15, low = this.m.top + 4, high = this.height - this.m.bottom;
    for (let i = 0; i < labels.length; i++) labels[i].at = Math.max(labels[i].y, i ? labels[i - 1].at + gap : low);
    for (let i = labels.length - 1; i >= 0; i--) labels[i].at = Math.min(labels[i].at, i === labels.length - 1 ? high : labels[i + 1].at - gap);
    for (const { x, at, y, text, colour } of labels) {
      if (Math.abs(at - y) > 5) this.layer.append(s("path", { d: `M${x + 5},${y.toFixed(1)}L${x + 13},${at.toFixed(1)}`, stroke: colour, opacity: 0.6 }));
      this.text(x + 16, at + 4, text, { colour, size: 12.5, anchor: "start", weight: 600 });
    }
  }
}

const tip = document.getElementById("tip");
function showTip(title, lines, x, y) {
  tip.replaceChildren(h("b", {}, title), lines.length ? "\n" + lines.join("\n") : "");
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(innerWidth - box.width - 6, x + 14))}px`;
  tip.style.top = `${y + box.height + 22 > innerHeight ? Math.max(6, y - box.height - 12) : y + 16}px`;
}
const hideTip = () => { tip.hidden = true; };

const figures = [];
class Figure {
  constructor(id, { title, caption, controls = [], draw, heading = null }) {
    Object.assign(this, { id, title, caption, controls, draw });
    this.plotBox = h("div", { class: "plot" });
    this.captionBox = h("figcaption");
    this.bar = h("div", { class: "bar" }, heading ? h("h3", {}, heading) : null, controls.map((control) => this.control(control)),
      h("div", { class: "save" },
        h("button", { type: "button", class: "quiet", "data-save": "svg", "aria-label": `Download ${title} as SVG`, onclick: () => this.saveSvg() }, "SVG"),
        h("button", { type: "button", class: "quiet", "data-save": "png", "aria-label": `Download ${title} as PNG`, onclick: () => this.savePng() }, "PNG")));
    this.element = h("figure", { id: `fig-${id}` }, this.bar, this.plotBox, this.captionBox);
    this.near = false; this.fresh = false;
    figures.push(this);
  }
  get(name) {
    const control = this.controls.find((c) => c.name === name), options = control.options();
    const value = (state.controls[this.id] || {})[name] ?? (typeof control.start === "function" ? control.start() : control.start);
    return options.some(([v]) => String(v) === String(value)) ? value : options[0][0];
  }
  set(name, value) {
    state.controls[this.id] = { ...(state.controls[this.id] || {}), [name]: value };
    keep();
    this.update();
  }
  control(control) {
    if (control.kind === "pick") {
      const select = h("select", { "data-control": control.name, onchange: () => this.set(control.name, select.value) });
      control.refresh = () => {
        select.replaceChildren(...control.options().map(([value, text]) => h("option", { value, selected: String(value) === String(this.get(control.name)) }, text)));
      };
      return h("label", { class: "pick" }, control.label, select);
    }
    const box = h("div", { class: "seg", role: "group", "aria-label": control.label });
    control.refresh = () => {
      const now = this.get(control.name), had = box.contains(document.activeElement) ? document.activeElement.dataset.value : null;
      box.replaceChildren(h("span", {}, control.label), ...control.options().map(([value, text]) =>
        h("button", { type: "button", "data-control": control.name, "data-value": value, "aria-pressed": String(String(value) === String(now)), onclick: () => this.set(control.name, value) }, text)));
      if (had !== null) box.querySelector(`[data-value="${CSS.escape(had)}"]`)?.focus();
      box.hidden = control.options().length < 2;
    };
    return box;
  }
  update() { this.fresh = false; if (this.near) this.render(); }
  render() {
    if (this.fresh) return;
    this.fresh = true;
    for (const control of this.controls) control.refresh();
    const width = Math.max(280, Math.floor(this.plotBox.clientWidth || 600));
    this.width = width;
    const plot = this.draw(this, width);
    this.captionBox.textContent = typeof this.caption === "function" ? this.caption(this) : this.caption;
    if (typeof plot === "string") {
      this.plot = null;
      this.plotBox.replaceChildren(h("p", { class: "note" }, plot));
    } else {
      this.plot = plot;
      plot.svg.prepend(s("title", {}, `${this.title}: ${group().title}, ${group().corpus}`));
      this.plotBox.replaceChildren(plot.svg);
      this.listen(plot);
    }
    this.element.dataset.marks = plot.marks || 0;
  }
  listen(plot) {
    const ring = s("circle", { r: 8, fill: "none", stroke: plot.c.ink, "stroke-width": 1.5, visibility: "hidden" });
    plot.svg.append(ring);
    let now = -1;
    const show = (hit, x, y) => {
      ring.setAttribute("cx", hit.x); ring.setAttribute("cy", hit.y); ring.setAttribute("visibility", "visible");
      const box = plot.svg.getBoundingClientRect(), k = box.width / plot.width;
      showTip(hit.title, hit.lines(), x ?? box.left + hit.x * k, y ?? box.top + hit.y * k);
    };
    const hide = () => { ring.setAttribute("visibility", "hidden"); hideTip(); };
    plot.svg.addEventListener("pointermove", (event) => {
      const box = plot.svg.getBoundingClientRect(), k = plot.width / box.width;
      const x = (event.clientX - box.left) * k, y = (event.clientY - box.top) * k;
      if (plot.hitAt) { const hit = plot.hitAt(x, y); return hit ? show(hit, event.clientX, event.clientY) : hide(); }
      let best = null, least = 28 * 28;
      plot.hits.forEach((hit, i) => {
        const far = (hit.x - x) ** 2 + (hit.y - y) ** 2;
        if (far < least) { least = far; best = hit; now = i; }
      });
      return best ? show(best, event.clientX, event.clientY) : hide();
    });
    plot.svg.addEventListener("pointerleave", hide);
    plot.svg.addEventListener("blur", hide);
    plot.svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") return hide();
      if (!step || !plot.hits.length) return undefined;
      event.preventDefault();
      now = (now + step + plot.hits.length) % plot.hits.length;
      return show(plot.hits[now]);
    });
  }
  svgText() {
    this.near = true;
    this.render();
    if (!this.plot) return null;
    const copy = this.plot.svg.cloneNode(true);
    copy.removeAttribute("tabindex");
    copy.querySelectorAll("[visibility=hidden]").forEach((element) => element.remove());
    copy.querySelectorAll("[class]").forEach((element) => element.removeAttribute("class"));
    copy.querySelectorAll("[data-arm]").forEach((element) => element.removeAttribute("data-arm"));
    if (!this.plot.named) withLegend(copy, this.plot);
    return new XMLSerializer().serializeToString(copy);
  }
  saveSvg() {
    const text = this.svgText();
    if (text) save(fileName(this.id, "svg"), text, "image/svg+xml");
  }
  async png() {
    const text = this.svgText();
    if (!text) return null;
    const image = new Image();
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
    await image.decode();
    const canvas = h("canvas", { width: 2 * image.naturalWidth, height: 2 * image.naturalHeight });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }
  async savePng() {
    const blob = await this.png();
    if (blob) save(fileName(this.id, "png"), blob, "image/png");
  }
}
// a figure that leaves the page takes the names of its arms along
function withLegend(svg, plot) {
  let x = 14, y = plot.height + 14;
  const box = s("g");
  for (const arm of visibleArms()) {
    const wide = 46 + 7.2 * arm.name.length;
    if (x > 14 && x + wide > plot.width) { x = 14; y += 22; }
    const key = swatch(arm.i);
    key.setAttribute("x", x); key.setAttribute("y", y - 7);
    box.append(key, s("text", { x: x + 36, y: y + 4, "font-size": 12.5, fill: plot.c.ink }, arm.name));
    x += wide + 12;
  }
  const height = y + 18;
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${plot.width} ${height}`);
  svg.querySelector("rect").setAttribute("height", height);
  svg.append(box);
}
const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const figure = figures.find((f) => f.element === entry.target);
    figure.near = entry.isIntersecting;
    if (figure.near) figure.render();
  }
}, { rootMargin: "400px" });
const redraw = () => { hideTip(); figures.forEach((figure) => figure.update()); };
