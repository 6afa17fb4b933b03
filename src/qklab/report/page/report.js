// The report: verdicts first, then what is to be shown of them, figures and tables.

import { data, h, keepState, plural, root, section, state } from "./core.js";
import { swatch } from "./colours.js";
import { redraw } from "./figure.js";
import { group, isHidden } from "./arms.js";
import { cost, forest, maps, rates } from "./figures.js";
import { curves, entropy, logits, sink } from "./curves.js";
import { allAnswers } from "./answer.js";
import { compute, corpora, difficulty, sizes, speedUps, tellAcross, tellClaims } from "./across.js";
import { ledgerTable, provenanceTables } from "./provenance.js";
import { startPage } from "./theme.js";

const distinct = (key) => [...new Set(data.groups.map((own) => own[key]))];
const verdict = section("verdict", "Verdict");
const claims = tellClaims();
if (claims.length) section("claims", "Published figures", h("ul", { class: "arms" }, claims));
const choice = h("nav", { id: "choose", "aria-label": "What the figures show" });
document.querySelector("main").append(choice);
section("forest", "Paired differences", forest.element);
if (sizes) {
  const figures = [sizes, compute, speedUps].filter(Boolean).map((figure) => figure.element);
  section("sizes", "Across sizes", figures, h("ul", { class: "said" }, tellAcross()));
}
if (corpora) section("corpora", "Across corpora", corpora.element);
if (difficulty) section("difficulty", "Against difficulty", difficulty.element);
section("curves", "Learning curves", curves.element);
section("rates", "Loss against learning rate", rates.element);
section("cost", "Cost and quality", cost.element);
section("layers", "Entropy and sink mass by layer", h("div", { class: "pair" }, entropy.element, sink.element));
section("maps", "Attention maps", maps.element);
section("logits", "Growth of the logits", logits.element);
const ledger = section("ledger", "Fairness ledger");
const provenance = section("provenance", "Provenance");

function groupTabs() {
  if (data.groups.length < 2) return [];
  const hasStudies = distinct("title").length > 1;
  const tab = (own, k) => {
    const chosen = { role: "tab", "data-group": k, "aria-selected": String(k === state.group) };
    const choose = () => {
      state.group = k;
      keepState();
      fillGroup();
    };
    const name = hasStudies ? `${own.title} · ${own.corpus}` : own.corpus;
    return h("button", { type: "button", ...chosen, onclick: choose }, name);
  };
  return [h("div", { class: "groups", role: "tablist", "aria-label": "Corpus" }, data.groups.map(tab))];
}
function armButton(arm, i) {
  const toggle = () => {
    state.hidden[state.group] = { ...state.hidden[state.group], [i]: !isHidden(i) };
    keepState();
    fillChoice();
    redraw();
  };
  const pressed = { "data-arm": i, "aria-pressed": String(!isHidden(i)), title: "Show or hide this arm" };
  return h("button", { type: "button", class: "legend", ...pressed, onclick: toggle }, swatch(i), arm.name);
}
function fillChoice() {
  const { arm, group: tab } = choice.contains(document.activeElement) ? document.activeElement.dataset : {};
  choice.replaceChildren(...groupTabs(), ...group().arms.map(armButton));
  if (arm !== undefined) choice.querySelector(`[data-arm="${arm}"]`)?.focus();
  if (tab !== undefined) choice.querySelector(`[data-group="${tab}"]`)?.focus();
}
function fillGroup() {
  fillChoice();
  ledger.replaceChildren(ledgerTable());
  provenance.replaceChildren(...provenanceTables());
  redraw();
}

function describeReport() {
  const runs = data.groups.flatMap((own) => own.runs), ended = data.groups.reduce((n, own) => n + own.ended, 0);
  const diverged = runs.filter((run) => run.status === "diverged").length;
  return [
    data.made,
    `${plural(ended, "run")} ended${runs.length > ended ? `, ${runs.length - ended} not` : ""}`,
    diverged ? `${diverged} diverged` : null,
    distinct("corpus").length > 1 ? `${data.groups.length} comparisons` : null,
  ].filter(Boolean).join(" · ");
}
// while runs are going on: ask whoever serves the page whether there is news
function watchServer(seconds) {
  let first = null;
  setInterval(async () => {
    try {
      const now = await (await fetch("version", { cache: "no-store" })).text();
      if (first !== null && now !== first) location.reload();
      first ??= now;
    } catch { /* the server has ended; the page stays as it is */ }
  }, 1000 * seconds);
}

fillGroup();
startPage({
  title: distinct("title").join(", "),
  meta: describeReport(),
  foot: `Made by qklab ${data.version} from the run directories; the file is complete in itself and asks nothing of ` +
    "any network.",
  recolour: () => {
    verdict.replaceChildren(...allAnswers());
    fillChoice();
  },
});
if (root.dataset.watch) watchServer(Number(root.dataset.watch));
