// Light and dark, and how an arm looks. The hues of docs/drawings (query blue, key orange, value green, cache violet),
// chosen to stay apart for every kind of colour blindness, and told apart by marker and dash too.

import { count, root, s, state } from "./core.js";

const PALETTE = {
  light: ["#2b3640", "#2459a9", "#dd6f25", "#18a77c", "#b47fb8", "#b43e4d", "#0b7f90", "#585003"],
  dark: ["#dde3e8", "#6ea3f5", "#e48232", "#aafdbc", "#a474aa", "#fc536d", "#1fd9fb", "#f7dd56"],
};
const INK = {
  light: { ink: "#1f2933", soft: "#52606d", faint: "#9aa5b1", grid: "#ebe8e1", paper: "#ffffff", band: "#eef2f8" },
  dark: { ink: "#e6e9ec", soft: "#a9b3bd", faint: "#6b7683", grid: "#29303a", paper: "#1b2026", band: "#26303d" },
};
const BAD = { light: "#a3271f", dark: "#f3a49c" };
const DASHES = ["", "7 3", "2 3", "10 3 2 3", "5 2 1 2 1 2", "12 4", "4 4", "1 2"];
// corners, radius of the corners between them (null: none), turn of the first in circles, size
const MARKERS = [
  null, // a circle
  [4, null, 0.125, 1.25],
  [3, null, 0.25, 1.3],
  [4, null, 0.25, 1.3],
  [3, null, 0.75, 1.3],
  [4, 0.55, 0.25, 1.45],
  [4, 0.55, 0.125, 1.45],
  [5, 0.5, 0.25, 1.35],
];

const prefersDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
export const isDark = () => (state.theme ? state.theme === "dark" : prefersDark());
export const themeName = () => (isDark() && !root.dataset.printing ? "dark" : "light");
export const ink = () => ({ ...INK[themeName()], bad: BAD[themeName()] });
export const armStyle = (i) => ({
  colour: PALETTE[themeName()][i % 8],
  dash: DASHES[(i + Math.floor(i / 8) * 3) % 8],
  marker: (i + Math.floor(i / 8)) % 8,
});

// a marker as a path around 0, 0
export function markerPath(marker, r) {
  if (!MARKERS[marker]) return `M${-r},0a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0z`;
  const [corners, inner, turn, size] = MARKERS[marker], every = inner ? 2 : 1;
  const points = count(corners * every).map((k) => {
    const angle = 2 * Math.PI * (turn + k / (corners * every)), length = r * size * (k % every ? inner : 1);
    return `${(length * Math.cos(angle)).toFixed(2)},${(-length * Math.sin(angle)).toFixed(2)}`;
  });
  return `M${points.join("L")}z`;
}
export function swatch(i) {
  const { colour, dash, marker } = armStyle(i);
  return s(
    "svg",
    { width: 30, height: 14, viewBox: "0 0 30 14", "aria-hidden": "true" },
    s("path", { d: "M1,7H29", stroke: colour, "stroke-width": 2, "stroke-dasharray": dash || null, fill: "none" }),
    s("path", { d: markerPath(marker, 4.5), transform: "translate(15,7)", fill: colour }),
  );
}
