// What everything else uses: the data, what is kept between visits, elements, numbers as text.

export const data = JSON.parse(document.getElementById("data").textContent);
export const root = document.documentElement;

const KEY = "qklab:" + location.pathname;
function readState() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) || {};
  } catch {
    return {}; // private browsing
  }
}
export const state = { group: 0, hidden: {}, controls: {}, theme: null, ...readState() };
export function keepState() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(state));
  } catch { /* private browsing */ }
}
// what downloads are named after, and the marks their legend explains; each page sets its own
export const page = { names: () => [], legend: () => [] };

function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
}
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}
export const NS = "http://www.w3.org/2000/svg";
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(NS, tag);
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}
export function section(id, title, ...children) {
  const heading = h("h2", { id: `h-${id}` }, title), body = h("div", { class: "body" }, children);
  document.querySelector("main").append(h("section", { id, "aria-labelledby": `h-${id}` }, heading, body));
  return body;
}

// numbers

export const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
export const count = (n) => [...Array(Math.max(0, n)).keys()];
export const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
export const plural = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
const minus = (text) => String(text).replace("-", "−");
export const grouped = (x) => minus(Math.round(x).toString().replace(/\B(?=(\d{3})+$)/g, ","));
export const fixed = (x, n) => (isNumber(x) ? minus(x.toFixed(n)) : "–");
export const signed = (x, n) => (isNumber(x) ? (x >= 0 ? "+" : "") + fixed(x, n) : "–");
export const hash = (text) => (text ? text.slice(0, 12) : "–");
export function digits(x, n = 4) {
  if (!isNumber(x)) return "–";
  const size = Math.abs(x);
  return size >= 1e5 || (size > 0 && size < 1e-4) ? short(x) : minus(Number(x.toPrecision(n)));
}
export function short(x) {
  const size = Math.abs(x), own = (value) => Number(value.toPrecision(3));
  for (const [power, letter] of [[18, "E"], [15, "P"], [12, "T"], [9, "G"], [6, "M"], [3, "k"]]) {
    if (size >= 10 ** power) return minus(own(x / 10 ** power)) + letter;
  }
  return size > 0 && size < 1e-3 ? own(x).toExponential().replaceAll("-", "−") : minus(own(x));
}
export const perCent = (x) => `${x >= 0 ? "+" : ""}${digits(x, Math.abs(x) >= 10 ? 3 : 2)} %`;
function inUnits(x, units) {
  if (!isNumber(x)) return "–";
  const [, factor, name] = units.find(([least]) => x >= least);
  return `${digits(x / factor, 3)} ${name}`;
}
export const bytes = (x) =>
  x < 16384 ? `${grouped(x)} B` : inUnits(x, [[2 ** 30, 2 ** 30, "GiB"], [2 ** 20, 2 ** 20, "MiB"], [0, 1024, "KiB"]]);
export const time = (x) => inUnits(x, [[7200, 3600, "h"], [120, 60, "min"], [1, 1, "s"], [0, 1e-3, "ms"]]);

// downloads

export function save(name, content, type) {
  const link = h("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
export const fileName = (what, ending) => `${[...page.names(), what].join("-").replace(/[^\w.=+-]+/g, "-")}.${ending}`;
