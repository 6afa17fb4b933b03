// Figures made of lines: learning curves, their difference to the baseline, quantities by layer, growth of the logits.

import { count, digits, grouped, isNumber, mean, short, signed, time } from "./core.js";
import { armStyle } from "./colours.js";
import { extent, isWide, nameRoom, Plot } from "./plot.js";
import { Figure, makeControl, scaleControl } from "./figure.js";
import { layerAxis, QUANTITIES } from "./quantities.js";
import { axisName, group, metricOf, ownMetric, runName, runsOf } from "./arms.js";
import { seedsNote, statusLines, viewNames, viewOf, visibleArms } from "./arms.js";

const finitePoints = (points) => points.filter(([x, y]) => isNumber(x) && isNumber(y));

// arms with the lines of their runs, pointsOf(run) → [[x, y], …]; those without any are left out
function armLines(pointsOf) {
  const own = visibleArms().map((arm) => {
    const lines = runsOf(arm.i).map((run) => ({ run, points: pointsOf(run) })).filter((line) => line.points.length);
    return { arm, lines, middle: meanLine(lines) };
  });
  return own.filter((each) => each.lines.length);
}
// a run that ended early says nothing about later: the mean goes as far as all of them do
function meanLine(lines) {
  const going = lines.filter(({ run }) => run.status !== "diverged");
  const length = going.length ? Math.min(...going.map(({ points }) => points.length)) : 0;
  return count(length).map((k) => {
    const here = going.map(({ points }) => points[k]);
    return here.every(([, y]) => isNumber(y))
      ? [mean(here.map(([x]) => x)), mean(here.map(([, y]) => y))]
      : [null, null];
  });
}
// thin lines of runs, a bold one through their means with its band [[x, low, high], …], the arm's name at its end
function drawLines(width, series, { title, x, y, height = 400, of = (v) => v, from = -Infinity, markers = 24, tell }) {
  const shown = (points) => points.filter(([at]) => !isNumber(at) || (at >= from && (!x.log || at > 0)));
  const turned = (points) => shown(points).map(([a, b]) => [a, isNumber(b) ? of(b) : null]);
  for (const each of series) {
    each.lines = each.lines.map(({ run, points }) => ({ run, points: turned(points) }));
    each.middle = turned(each.middle);
    each.band = shown(each.band || []);
  }
  const all = finitePoints(series.flatMap((each) => [...each.lines.flatMap((line) => line.points), ...each.middle]));
  const bands = series.flatMap((each) => each.band.flatMap(([, low, high]) => [low, high]));
  const xs = x.domain || extent(all.map(([a]) => a), { pad: 0, log: x.log, include: x.include });
  const ys = extent([...all.map(([, b]) => b), ...bands], { pad: 0.06, log: y.log, include: y.log ? [] : y.include });
  if (!xs || !ys) return "Nothing finite is recorded there yet.";
  if (xs[0] === xs[1]) xs[1] = xs[0] * 1.01 + 1e-9;
  const isNamed = isWide(width) && height > 300, right = isNamed ? nameRoom(series.map(({ arm }) => arm.name)) : 16;
  const axes = { x: { ...x, domain: xs }, y: { ...y, domain: ys } };
  const plot = new Plot(width, isWide(width) ? height : Math.min(300, height), { left: 64, right, title, ...axes });
  if (y.zero) plot.path(`M64,${plot.y(0).toFixed(1)}H${plot.end}`, { stroke: plot.colours.soft, "stroke-width": 1.5 });
  for (const each of series) drawArm(plot, each, markers, tell);
  const ends = series.map(({ arm, middle }) => ({ arm, end: finitePoints(middle).at(-1) })).filter(({ end }) => end);
  const label = ({ arm, end }) => ({ y: plot.y(end[1]), text: arm.name, colour: armStyle(arm.i).colour });
  if (isNamed) plot.endLabels(ends.map(label));
  plot.isNamed = isNamed && ends.length === series.length;
  return plot;
}
function drawArm(plot, { arm, lines, middle, band }, markers, tell) {
  const style = armStyle(arm.i), { colour, dash } = style;
  const at = (a, b) => `${plot.x(a).toFixed(1)},${plot.y(b).toFixed(1)}`;
  if (band.length) {
    const low = band.map(([a, b]) => at(a, b)), high = band.map(([a, , b]) => at(a, b)).reverse();
    plot.drawn(arm.i, `M${[...low, ...high].join("L")}z`, { fill: colour, opacity: 0.13 });
  }
  for (const { run, points } of lines) {
    plot.line(points, { colour, width: 1, opacity: 0.4, arm: arm.i });
    const end = finitePoints(points).at(-1);
    if (run.status === "diverged" && end) plot.cross(plot.x(end[0]), plot.y(end[1]), 6, plot.colours.bad, arm.i);
    addHits(plot, points, (point) => [runName(run), () => [...tell(point), ...statusLines(run)]]);
  }
  const own = finitePoints(middle);
  plot.line(middle, { colour, width: 2.5, dash, arm: arm.i });
  if (!lines.length) addHits(plot, own, (point) => [`${arm.name} − ${group().study.baseline}`, () => tell(point, arm)]);
  if (lines.length && own.length <= markers) {
    for (const [a, b] of own) plot.mark(plot.x(a), plot.y(b), style, { r: 3.8, arm: arm.i });
  }
}
function addHits(plot, points, describe) {
  const every = Math.max(1, Math.floor(points.length / 40));
  points.forEach((point, k) => {
    if (!isNumber(point[1]) || (k % every && k < points.length - 1)) return;
    plot.hit(plot.x(point[0]), plot.y(point[1]), ...describe(point));
  });
}

// learning curves

const AGAINST = {
  tokens: { label: "training tokens", format: short, tell: (x) => `at ${grouped(x)} tokens` },
  seconds: { label: "training time", format: time, tell: (x) => `after ${time(x)}` },
};
function axisAgainst(figure) {
  const log = figure.get("scale") === "log", isEnd = figure.get("range") === "end";
  return { ...AGAINST[figure.get("x")], log, include: log || isEnd ? [] : [0] };
}
const lastOf = (series) =>
  Math.max(...series.flatMap(({ lines, middle }) => [...lines.flatMap((l) => l.points), ...middle]).map(([x]) => x));
const startOf = (figure, series) => (figure.get("range") === "end" ? lastOf(series) / 2 : -Infinity);

function drawDifference(figure, width) {
  const x = axisAgainst(figure), by = figure.get("x"), compared = visibleArms().filter((arm) => arm.learning?.[by]);
  if (!compared.length) return "No curves to compare yet, or all arms are hidden.";
  const { label, unit } = metricOf(compared[0].learning.metric);
  const series = compared.map((arm) => {
    const { x: xs, mean: means, low, high } = arm.learning[by];
    const band = low ? xs.map((at, k) => [at, low[k], high[k]]) : [];
    return { arm, lines: [], middle: xs.map((at, k) => [at, means[k]]), band };
  });
  const title = `difference of validation ${label} to ${group().study.baseline}`;
  const y = { label: `${title}, ${unit}`, include: [0], zero: true };
  const tell = ([at, value], arm) => {
    const { n, level, x: xs, low, high } = arm.learning[by], k = xs.indexOf(at);
    const interval = low ? [`${digits(100 * level, 3)} % interval ${signed(low[k], 4)} to ${signed(high[k], 4)}`] : [];
    const over = n === 1 ? "one seed" : `mean of ${n} seeds`;
    return [`${signed(value, 4)} ${unit}, ${over}`, ...interval, x.tell(at)];
  };
  return drawLines(width, series, { title, x, y, from: startOf(figure, series), tell });
}
function drawCurves(figure, width) {
  if (figure.get("what") === "difference") return drawDifference(figure, width);
  const text = figure.get("text"), by = figure.get("x"), view = viewOf(figure.get("unit")), x = axisAgainst(figure);
  const series = armLines((run) => {
    const own = (text === "train" ? run.train : run.curve) || { tokens: [] };
    return own.tokens.map((_, k) => [own[by][k], own[view.metric.name][k]]).filter(([at]) => isNumber(at));
  });
  if (!series.length) {
    return group().runs.length ? "Nothing is recorded yet, or all arms are hidden." : "No run has begun yet.";
  }
  const y = { label: `${text === "train" ? "training" : "validation"} ${axisName(view)}` };
  const tell = ([at, value]) => [`${digits(value, 5)} ${view.unit}`, x.tell(at)];
  const title = `Learning curves against ${by === "tokens" ? "tokens" : "time"}`;
  return drawLines(width, series, { title, x, y, of: view.of, from: startOf(figure, series), tell });
}
const isDifference = () => curves.get("what") === "difference";
const canCompare = () => group().arms.some((arm) => arm.learning);
const differenceOption = () => ["difference", `difference to ${group().study.baseline}`];
const CURVES = [["curves", "curves"]], TEXTS = [["valid", "validation"], ["train", "training"]];
function curveViews() {
  const trained = (view) => group().runs.some((run) => run.train?.[view.metric.name]);
  if (isDifference()) return [["", ""]];
  return viewNames(curves.get("text") === "train" ? trained : undefined);
}
export const curves = new Figure("curves", {
  title: "Learning curves",
  controls: [
    makeControl("what", "Show", () => (canCompare() ? [...CURVES, differenceOption()] : CURVES)),
    makeControl("text", "Text", () => (isDifference() ? TEXTS.slice(0, 1) : TEXTS)),
    makeControl("x", "Against", () => [["tokens", "tokens"], ["seconds", "time"]]),
    scaleControl(),
    makeControl("unit", "In", curveViews, { start: () => ownMetric().name }),
    makeControl("range", "Range", () => [["all", "all"], ["end", "second half"]]),
  ],
  caption: (figure) => {
    const clock = figure.get("x") === "seconds" ? "Time is that of training steps only, without evaluation. " : "";
    if (isDifference()) {
      return `Validation of each arm minus ${group().study.baseline} at the same seed, mean over seeds with its t ` +
        `interval at every place on its own; below 0 is better. ${clock}${seedsNote()}`;
    }
    const part = figure.get("text") === "train"
      ? "Training loss is averaged over stretches of steps. "
      : "During training, validation is on a part of the validation text; the verdict is on all of the test text. ";
    return "Thin: every seed at the learning rate chosen for its arm; bold: their mean. " +
      `${clock}${part}A × ends a run that diverged.${seedsNote()}`;
  },
  draw: drawCurves,
});

// probes

const probed = () => group().runs.filter((run) => run.shown && run.probes);
function probeOptions() {
  const steps = probed().map((run) => run.probes.step).reduce((a, b) => (b.length > a.length ? b : a), []);
  return [["last", "last probe"], ...steps.slice(0, -1).map((step, k) => [k, `step ${grouped(step)}`]).reverse()];
}
function layerFigure(id, quantity) {
  const { title, label, caption } = QUANTITIES[quantity];
  const draw = (figure, width) => {
    const at = figure.get("at");
    const series = armLines(({ probes }) => {
      const row = at === "last" ? probes?.[quantity].findLast((each) => each) : probes?.[quantity][Number(at)];
      return (row || []).map((value, k) => [k + 1, value]);
    });
    if (!series.length) return "No probe is recorded yet, or all arms are hidden.";
    const layers = Math.max(...series.flatMap(({ lines }) => lines.map(({ points }) => points.length)));
    const x = layerAxis(layers, width), y = { label: `${label}, mean over heads`, include: [0] };
    const tell = ([layer, value]) => [`layer ${layer}: ${digits(value, 4)}`, label];
    return drawLines(width, series, { title, x, y, height: 280, markers: 32, tell });
  };
  const controls = [makeControl("at", "At", probeOptions, { isList: true })];
  return new Figure(id, { title, heading: title, controls, caption: () => caption, draw });
}
export const entropy = layerFigure("entropy", "entropy"), sink = layerFigure("sink", "sink_mass");

// logits

const LOGITS = {
  largest_logit: {
    name: "largest logit",
    label: "largest logit",
    caption: "The largest attention logit |q·k|/√D over the probe's tokens and heads. Its growth is what QK-norm, " +
      "qk-clip and logit control are against.",
  },
  logit_change: {
    name: "change between probes",
    label: "root mean square change of logits",
    caption: "Root mean square over visible pairs and heads of how far logits moved from one probe to the next.",
  },
};
function layerOptions() {
  const layers = probed().flatMap(({ probes }) => probes.largest_logit.map((row) => row?.length || 0));
  return [["all", "largest over layers"], ...count(Math.max(0, ...layers)).map((k) => [k, `layer ${k + 1}`])];
}
function drawLogits(figure, width) {
  const what = figure.get("what"), log = figure.get("scale") === "log", layer = figure.get("layer");
  const choose = (row) => (layer === "all" ? Math.max(...row.filter(isNumber)) : row[Number(layer)]);
  const series = armLines(({ probes }) => {
    const rows = (probes?.[what] || []).map((row, k) => [probes.tokens[k], row ? choose(row) : null]);
    return finitePoints(rows).filter(([, value]) => !log || value > 0);
  });
  const none = what === "logit_change" ? "A change needs two probes; there are none yet" : "No probe is recorded yet";
  if (!series.length) return `${none}, or all arms are hidden.`;
  const x = { label: "training tokens", include: [0] }, y = { label: LOGITS[what].label, log, include: [0] };
  const tell = ([at, value]) => [`${digits(value, 4)} at ${grouped(at)} tokens`];
  return drawLines(width, series, { title: "Growth of the logits", x, y, height: 340, tell });
}
export const logits = new Figure("logits", {
  title: "Growth of the logits",
  controls: [
    makeControl("what", "Show", () => Object.entries(LOGITS).map(([key, { name }]) => [key, name])),
    scaleControl(),
    makeControl("layer", "Layer", layerOptions, { isList: true }),
  ],
  caption: (figure) => `${LOGITS[figure.get("what")].caption} Thin: seeds; bold: their mean.`,
  draw: drawLogits,
});
