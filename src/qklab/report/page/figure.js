// A figure: a frame with controls and downloads around a plot, which is drawn when it comes into view.

import { fileName, h, keepState, page, s, save, state } from "./core.js";
import { swatch } from "./colours.js";

const tip = document.getElementById("tip");
export const hideTip = () => {
  tip.hidden = true;
};
function showTip(title, lines, x, y) {
  tip.replaceChildren(h("b", {}, title), lines.length ? "\n" + lines.join("\n") : "");
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(innerWidth - box.width - 6, x + 14))}px`;
  tip.style.top = `${y + box.height + 22 > innerHeight ? Math.max(6, y - box.height - 12) : y + 16}px`;
}

// A row of buttons, or a list; options() are [value, text], and start() is chosen at first, or else the first of them.
export const makeControl = (name, label, options, { start = () => null, isList = false } = {}) => (
  { name, label, options, start, isList }
);
export const scaleControl = () => makeControl("scale", "Scale", () => [["linear", "linear"], ["log", "log"]]);

export const figures = [];
export class Figure {
  // draw(figure, width): a plot, or a sentence where there is nothing to draw
  constructor(id, { title, heading = null, controls = [], caption, draw }) {
    Object.assign(this, { id, title, controls, caption, draw, isNear: false, isFresh: false });
    const button = (kind, action) => {
      const named = { "data-save": kind, "aria-label": `Download ${title} as ${kind.toUpperCase()}` };
      return h("button", { type: "button", class: "quiet", ...named, onclick: action }, kind.toUpperCase());
    };
    const saving = [button("svg", () => this.saveSvg()), button("png", () => this.savePng())];
    const boxes = controls.map((control) => (control.isList ? this.makeList(control) : this.makeButtons(control)));
    const bar = h("div", { class: "bar" }, heading && h("h3", {}, heading), boxes, h("div", { class: "save" }, saving));
    this.plotBox = h("div", { class: "plot" });
    this.captionBox = h("figcaption");
    this.element = h("figure", { id: `fig-${id}` }, bar, this.plotBox, this.captionBox);
    figures.push(this);
    nearby.observe(this.element);
  }
  get(name) {
    const { options, start } = this.controls.find((control) => control.name === name), values = options();
    const value = state.controls[this.id]?.[name] ?? start();
    return values.some(([v]) => String(v) === String(value)) ? value : values[0][0];
  }
  set(name, value) {
    state.controls[this.id] = { ...state.controls[this.id], [name]: value };
    keepState();
    this.update();
  }
  makeList(control) {
    const list = h("select", { "data-control": control.name, onchange: () => this.set(control.name, list.value) });
    control.refresh = () => {
      const now = String(this.get(control.name));
      const make = ([value, text]) => h("option", { value, selected: String(value) === now }, text);
      list.replaceChildren(...control.options().map(make));
    };
    return h("label", { class: "pick" }, control.label, list);
  }
  makeButtons(control) {
    const box = h("div", { class: "seg", role: "group", "aria-label": control.label });
    control.refresh = () => {
      const now = this.get(control.name), options = control.options();
      const had = box.contains(document.activeElement) ? document.activeElement.dataset.value : null;
      const make = ([value, text]) => {
        const told = { "data-control": control.name, "data-value": value, "aria-pressed": String(value === now) };
        return h("button", { type: "button", ...told, onclick: () => this.set(control.name, value) }, text);
      };
      box.replaceChildren(h("span", {}, control.label), ...options.map(make));
      if (had !== null) box.querySelector(`[data-value="${CSS.escape(had)}"]`)?.focus();
      box.hidden = options.length < 2;
    };
    return box;
  }
  update() {
    this.isFresh = false;
    if (this.isNear) this.render();
  }
  render() {
    if (this.isFresh) return;
    this.isFresh = true;
    for (const control of this.controls) control.refresh();
    this.width = Math.max(280, Math.floor(this.plotBox.clientWidth || 600));
    const plot = this.draw(this, this.width);
    this.captionBox.textContent = this.caption(this);
    this.plot = typeof plot === "string" ? null : plot;
    if (!this.plot) return this.plotBox.replaceChildren(h("p", { class: "note" }, plot));
    plot.svg.prepend(s("title", {}, `${this.title}: ${page.names().join(", ")}`));
    this.plotBox.replaceChildren(plot.svg);
    return listen(plot);
  }
  svgText() {
    this.render();
    if (!this.plot) return null;
    const copy = this.plot.svg.cloneNode(true);
    copy.removeAttribute("tabindex");
    copy.querySelectorAll("[visibility=hidden]").forEach((element) => element.remove());
    for (const name of ["class", "data-arm"]) {
      copy.querySelectorAll(`[${name}]`).forEach((element) => element.removeAttribute(name));
    }
    if (!this.plot.isNamed) addLegend(copy, this.plot);
    return new XMLSerializer().serializeToString(copy);
  }
  saveSvg() {
    const text = this.svgText();
    if (text) save(fileName(this.id, "svg"), text, "image/svg+xml");
  }
  async savePng() {
    const text = this.svgText(), image = new Image();
    if (!text) return;
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
    await image.decode();
    const canvas = h("canvas", { width: 2 * image.naturalWidth, height: 2 * image.naturalHeight });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(fileName(this.id, "png"), blob, "image/png"), "image/png");
  }
}
const nearby = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const figure = figures.find((each) => each.element === target);
    figure.isNear = isIntersecting;
    if (isIntersecting) figure.render();
  }
}, { rootMargin: "400px" });
export function redraw() {
  hideTip();
  figures.forEach((figure) => figure.update());
}

// the mark under the mouse, or the one that the arrow keys have come to, says what it is
function listen(plot) {
  const ring = s("circle", { r: 8, fill: "none", stroke: plot.colours.ink, "stroke-width": 1.5, visibility: "hidden" });
  plot.svg.append(ring);
  let now = -1;
  const show = (hit, x, y) => {
    for (const [name, value] of [["cx", hit.x], ["cy", hit.y], ["visibility", "visible"]]) {
      ring.setAttribute(name, value);
    }
    const box = plot.svg.getBoundingClientRect(), k = box.width / plot.width;
    showTip(hit.title, hit.lines(), x ?? box.left + hit.x * k, y ?? box.top + hit.y * k);
  };
  const hide = () => {
    ring.setAttribute("visibility", "hidden");
    hideTip();
  };
  plot.svg.addEventListener("pointermove", ({ clientX, clientY }) => {
    const box = plot.svg.getBoundingClientRect(), k = plot.width / box.width;
    const x = (clientX - box.left) * k, y = (clientY - box.top) * k;
    const hit = plot.hitAt ? plot.hitAt(x, y) : nearestHit(plot.hits, x, y);
    now = plot.hits.indexOf(hit);
    return hit ? show(hit, clientX, clientY) : hide();
  });
  plot.svg.addEventListener("pointerleave", hide);
  plot.svg.addEventListener("blur", hide);
  plot.svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step || !plot.hits.length) return;
    event.preventDefault();
    now = (now + step + plot.hits.length) % plot.hits.length;
    show(plot.hits[now]);
  });
}
function nearestHit(hits, x, y) {
  const far = (hit) => (hit.x - x) ** 2 + (hit.y - y) ** 2;
  const nearest = hits.reduce((best, hit) => (best && far(best) <= far(hit) ? best : hit), null);
  return nearest && far(nearest) < 28 * 28 ? nearest : null;
}
// a figure that leaves the page takes the names of its arms along
function addLegend(svg, plot) {
  let x = 14, y = plot.height + 14;
  for (const { i, name } of page.legend()) {
    const room = 46 + 7.2 * name.length, key = swatch(i);
    if (x > 14 && x + room > plot.width) [x, y] = [14, y + 22];
    key.setAttribute("x", x);
    key.setAttribute("y", y - 7);
    svg.append(key, s("text", { x: x + 36, y: y + 4, "font-size": 12.5, fill: plot.colours.ink }, name));
    x += room + 12;
  }
  svg.setAttribute("height", y + 18);
  svg.setAttribute("viewBox", `0 0 ${plot.width} ${y + 18}`);
  svg.querySelector("rect").setAttribute("height", y + 18);
}
