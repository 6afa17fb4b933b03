// What everything else uses: the data, what is being shown, elements, numbers as text, colours.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;

const kept = (() => {
  try { return JSON.parse(sessionStorage.getItem("qklab:" + location.pathname)) || {}; } catch { return {}; }
})();
const state = { group: 0, hidden: {}, controls: {}, theme: null, ...kept };
if (state.group >= data.groups.length) state.group = 0;
const keep = () => { try { sessionStorage.setItem("qklab:" + location.pathname, JSON.stringify(state)); } catch { /* private */ } };
const group = () => data.groups[state.group];
const isHidden = (arm) => Boolean((state.hidden[state.group] || {})[arm]);
const visibleArms = () => group().arms.map((arm, i) => ({ ...arm, i })).filter((arm) => !isHidden(arm.i));
const runsOf = (arm, shown = true) => group().runs.filter((run) => run.arm === arm && (!shown || run.shown));

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// numbers

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const minus = (text) => String(text).replace("-", "−");
const grouped = (x) => minus(Math.round(x).toString().replace(/\B(?=(\d{3})+$)/g, ","));
function digits(x, n = 4) {
  if (!isNumber(x)) return "–";
  const size = Math.abs(x);
  if (size >= 1e5 || (size > 0 && size < 1e-4)) return short(x);
  return minus(Number(x.toPrecision(n)).toString());
}
function short(x) {
  const size = Math.abs(x);
  for (const [unit, name] of [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return minus(Number((x / unit).toPrecision(3))) + name;
  }
  if (size > 0 && size < 1e-3) return minus(Number(x.toPrecision(3)).toExponential()).replace("e−", "e-").replace("e-", "e−");
  return minus(Number(x.toPrecision(3)));
}
const fixed = (x, n) => (isNumber(x) ? minus(x.toFixed(n)) : "–");
const signed = (x, n) => (isNumber(x) ? (x >= 0 ? "+" : "") + fixed(x, n) : "–");
const decimals = (width) => Math.min(9, Math.max(0, 1 - Math.floor(Math.log10(width > 0 ? width : 1))));
const perCent = (x) => (isNumber(x) ? `${x >= 0 ? "+" : ""}${digits(x, Math.abs(x) >= 10 ? 3 : 2)} %` : "–");
const bytes = (x) => (!isNumber(x) ? "–" : x >= 2 ** 30 ? `${digits(x / 2 ** 30, 3)} GiB` : x >= 2 ** 20 ? `${digits(x / 2 ** 20, 3)} MiB` : x >= 16384 ? `${digits(x / 1024, 3)} KiB` : `${grouped(x)} B`);
const time = (s) => (!isNumber(s) ? "–" : s < 1 ? `${digits(1000 * s, 3)} ms` : s < 120 ? `${digits(s, 3)} s` : s < 7200 ? `${digits(s / 60, 3)} min` : `${digits(s / 3600, 3)} h`);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const hash = (text) => (text ? text.slice(0, 12) : "–");

const UNITS = { loss: "nats per token", perplexity: "perplexity per token", bits: "bits per byte" };
const measureOf = (score, unit) => (!score ? null : unit === "perplexity" ? (isNumber(score.loss) ? Math.exp(score.loss) : null) : score[unit]);
const ownUnit = () => (group().metric === "bits_per_byte" ? "bits" : "loss");
const score = (run) => run.test || run.valid;

// colours: the hues of docs/drawings (query blue, key orange, value green, cache violet), chosen to stay apart for every kind
// of colour blindness, and told apart by marker and dash too

const PALETTE = {
  light: ["#2b3640", "#2459a9", "#dd6f25", "#18a77c", "#b47fb8", "#b43e4d", "#0b7f90", "#585003"],
  dark: ["#dde3e8", "#6ea3f5", "#e48232", "#aafdbc", "#a474aa", "#fc536d", "#1fd9fb", "#f7dd56"],
};
const DASHES = ["", "7 3", "2 3", "10 3 2 3", "5 2 1 2 1 2", "12 4", "4 4", "1 2"];
const MARKERS = ["circle", "square", "triangle", "diamond", "down", "plus", "cross", "star"];
const dark = () => (state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
let printing = false;
const themeName = () => (dark() && !printing ? "dark" : "light");
const ink = () => themeName() === "dark"
  ? { ink: "#e6e9ec", soft: "#a9b3bd", faint: "#6b7683", grid: "#29303a", paper: "#1b2026", band: "#26303d", bad: "#f3a49c" }
  : { ink: "#1f2933", soft: "#52606d", faint: "#9aa5b1", grid: "#ebe8e1", paper: "#ffffff", band: "#eef2f8", bad: "#a3271f" };
const armStyle = (i) => ({
  colour: PALETTE[themeName()][i % 8],
  dash: DASHES[(i + Math.floor(i / 8) * 3) % 8],
  marker: MARKERS[(i + Math.floor(i / 8)) % 8],
});

// what a marker looks like, as a path around 0, 0
function markerPath(kind, r) {
  const f = (x) => Number((x * r).toFixed(2));
  switch (kind) {
    case "square": return `M${f(-0.88)},${f(-0.88)}h${f(1.76)}v${f(1.76)}h${f(-1.76)}z`;
    case "triangle": return `M0,${f(-1.15)}L${f(1.1)},${f(0.85)}H${f(-1.1)}z`;
    case "down": return `M0,${f(1.15)}L${f(1.1)},${f(-0.85)}H${f(-1.1)}z`;
    case "diamond": return `M0,${f(-1.25)}L${f(1.15)},0L0,${f(1.25)}L${f(-1.15)},0z`;
    case "plus": return `M${f(-0.4)},${f(-1.1)}H${f(0.4)}V${f(-0.4)}H${f(1.1)}V${f(0.4)}H${f(0.4)}V${f(1.1)}H${f(-0.4)}V${f(0.4)}H${f(-1.1)}V${f(-0.4)}H${f(-0.4)}z`;
    case "cross": return `M0,${f(-0.55)}L${f(0.6)},${f(-1.1)}L${f(1.1)},${f(-0.6)}L${f(0.55)},0L${f(1.1)},${f(0.6)}L${f(0.6)},${f(1.1)}L0,${f(0.55)}L${f(-0.6)},${f(1.1)}L${f(-1.1)},${f(0.6)}L${f(-0.55)},0L${f(-1.1)},${f(-0.6)}L${f(-0.6)},${f(-1.1)}z`;
    case "star": {
      const points = [...Array(10)].map((_, i) => {
        const a = (Math.PI * i) / 5 - Math.PI / 2, s = i % 2 ? 0.5 : 1.25;
        return `${f(s * Math.cos(a))},${f(s * Math.sin(a))}`;
      });
      return `M${points.join("L")}z`;
    }
    default: return `M${f(-1)},0a${f(1)},${f(1)} 0 1 0 ${f(2)},0a${f(1)},${f(1)} 0 1 0 ${f(-2)},0z`;
  }
}
const NS = "http://www.w3.org/2000/svg";
function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== "") element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
function swatch(i) {
  const style = armStyle(i);
  return s("svg", { width: 30, height: 14, viewBox: "0 0 30 14", "aria-hidden": "true" },
    s("path", { d: "M1,7H29", stroke: style.colour, "stroke-width": 2, "stroke-dasharray": style.dash, fill: "none" }),
    s("path", { d: markerPath(style.marker, 4.5), transform: "translate(15,7)", fill: style.colour }));
}

// downloads

function save(name, content, type) {
  const link = h("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
const fileName = (what, ending) => `${[group().title, group().corpus, what].join("-").replace(/[^\w.=+-]+/g, "-")}.${ending}`;
