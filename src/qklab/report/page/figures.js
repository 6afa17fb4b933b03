// Figures made of marks: paired differences, loss against learning rate, cost and quality; and attention maps.

import { bytes, count, digits, grouped, isNumber, mean, perCent, plural, short, signed, time } from "./core.js";
import { armStyle } from "./colours.js";
import { extent, isWide, nameRoom, Plot } from "./plot.js";
import { Figure, makeControl, scaleControl } from "./figure.js";
import { drawMap, drawShades } from "./heatmap.js";
import { axisName, finalScores, group, isHidden, meanOf, ownMetric, runName, runsOf } from "./arms.js";
import { seedsNote, tellSensitivity, valueOf, viewNames, viewOf, visibleArms } from "./arms.js";

const START = { "text-anchor": "start" }, END = { "text-anchor": "end" };

// paired differences

const ofExponential = { of: (x) => 100 * Math.expm1(x), suffix: " %" };
const differenceUnits = () => {
  const { exponential, unit } = ownMetric();
  return [["own", unit], exponential ? ["exponential", `${exponential}, %`] : ["percent", "% of baseline"]];
};
// how a difference is counted: the metric's own unit, its exponential, or per cent of the baseline's value
function differenceScale(unit, { paired }) {
  if (unit === "exponential") return ofExponential;
  if (unit === "percent") {
    return { of: (x) => (paired?.mean ? (x * paired.percent) / paired.mean : null), suffix: " %" };
  }
  return { of: (x) => x, suffix: "" };
}
function tellDifference(arm) {
  const { paired, p_holm, arm_diverged, seeds } = arm.verdict, { unit } = ownMetric();
  const told = [`${signed(paired.mean, 4)} ${unit}, mean of ${plural(paired.n, "seed")}`];
  if (isNumber(paired.low)) {
    const holm = isNumber(p_holm) ? `, after Holm ${digits(p_holm, 2)}` : "";
    told.push(`${digits(100 * paired.level, 3)} % interval ${signed(paired.low, 4)} to ${signed(paired.high, 4)}`);
    told.push(`p = ${digits(paired.p, 2)}${holm}`);
  } else told.push("one seed is an anecdote");
  if (isNumber(paired.bootstrap_low)) {
    told.push(`bootstrap ${signed(paired.bootstrap_low, 4)} to ${signed(paired.bootstrap_high, 4)}`);
  }
  if (arm_diverged) told.push(`diverged at ${arm_diverged} of ${plural(seeds, "seed")}`);
  return told;
}
function drawDifferenceRow(plot, arm, y, scale) {
  const { paired, differences } = arm.verdict, style = armStyle(arm.i), at = (x) => plot.x(scale.of(x));
  const { exponential, unit } = ownMetric(), interval = paired && isNumber(paired.low);
  let told = "diverged";
  if (paired) {
    const [middle, low, high] = [paired.mean, paired.low, paired.high].map((x) => (isNumber(x) ? scale.of(x) : null));
    const room = interval ? (high - low) / 2 : Math.abs(middle) / 5;
    const places = Math.min(9, Math.max(0, 1 - Math.floor(Math.log10(room > 0 ? room : 1))));
    const around = interval ? `[${signed(low, places)}, ${signed(high, places)}]` : "one seed";
    told = `${signed(middle, places)}${scale.suffix}  ${around}`;
  }
  const isBig = isWide(plot.width), where = isBig ? [plot.left - 12, y + 4] : [2, y - 18];
  plot.text(...where, arm.name, { ...(isBig ? END : START), "font-weight": 600, fill: style.colour });
  plot.text(plot.width - (isBig ? 8 : 2), where[1], told, { ...END, "font-size": 12.5 });
  if (interval) {
    const a = at(paired.low).toFixed(1), b = at(paired.high).toFixed(1);
    const bar = { class: "mark interval", stroke: style.colour, "stroke-width": 2.2 };
    plot.drawn(arm.i, `M${a},${y}H${b}M${a},${y - 5}v10M${b},${y - 5}v10`, bar);
  }
  for (const [seed, x] of Object.entries(differences)) {
    if (!isNumber(x)) continue;
    plot.mark(at(x), y + 11, style, { r: 2.6, opacity: 0.65, arm: arm.i });
    const relative = exponential ? [`${perCent(ofExponential.of(x))} ${exponential}`] : [];
    plot.hit(at(x), y + 11, `${arm.name}, seed ${seed}`, () => [`${signed(x, 4)} ${unit}`, ...relative]);
  }
  if (!paired) return;
  plot.mark(at(paired.mean), y, style, { r: 6.5, arm: arm.i });
  plot.hit(at(paired.mean), y, `${arm.name} − ${group().study.baseline}`, () => tellDifference(arm));
}
function drawForest(figure, width) {
  const { study, arms, notes } = group(), unit = figure.get("unit");
  if (!study) return "Without a study there is no baseline to take differences from.";
  const rows = visibleArms().filter((arm) => arm.name !== study.baseline && arm.verdict);
  if (!rows.length) {
    return arms.some((arm) => arm.verdict) ? "All arms are hidden." : `No difference to show yet. ${notes.join(" ")}`;
  }
  const values = rows.flatMap(({ verdict }) => {
    const { low, mean: middle, high } = verdict.paired || {};
    return [low, middle, high, ...Object.values(verdict.differences)].filter(isNumber).map(
      differenceScale(unit, verdict).of,
    );
  });
  const margin = unit === "percent" ? [] : [-study.margin, study.margin].map(differenceScale(unit, {}).of);
  const isNear = study.margin < 4 * Math.max(...values.map(Math.abs));
  const domain = extent([0, ...values], { pad: 0.08, include: isNear ? margin : [] });
  const isBig = isWide(width), line = isBig ? 46 : 62;
  const room = isBig ? { left: nameRoom(rows.map((arm) => arm.name)), right: 210 } : { left: 24, right: 24 };
  const counted = Object.fromEntries(differenceUnits())[unit];
  const format = (t) => (Math.abs(t) < 1e-12 ? "0" : (t > 0 ? "+" : "") + digits(t, 3));
  const x = { domain, label: `difference to ${study.baseline}, ${counted}`, format };
  const plot = new Plot(width, 80 + line * rows.length, { ...room, top: 26, x, title: "Paired differences" });
  plot.isNamed = true;
  const [from, to] = margin.map((at) => Math.max(plot.left, Math.min(plot.end, plot.x(at))));
  if (margin.length) plot.rect(from, 26, to - from, plot.floor - 26, { fill: plot.colours.band });
  const zero = plot.x(0), anchor = zero > width - 70 ? "end" : zero < 60 ? "start" : "middle";
  plot.path(`M${zero.toFixed(1)},20V${plot.floor}`, { stroke: plot.colours.soft, "stroke-width": 1.5 });
  plot.text(zero, 14, study.baseline, { fill: plot.colours.soft, "font-size": 12.5, "text-anchor": anchor });
  rows.forEach((arm, k) => {
    drawDifferenceRow(plot, arm, 26 + line * (k + 0.5) + (isBig ? 0 : 8), differenceScale(unit, arm.verdict));
  });
  return plot;
}
export const forest = new Figure("forest", {
  title: "Paired differences with intervals",
  controls: [makeControl("unit", "Unit", differenceUnits)],
  caption: () => {
    const { study, arms } = group(), { unit, lower_is_better } = ownMetric();
    if (!study) return "";
    const judged = arms.map((arm) => arm.verdict?.paired).find((paired) => paired);
    const intervals = judged ? `${digits(100 * judged.level, 3)} % t intervals` : "t intervals";
    return `Each arm minus ${study.baseline} at the same seed, on test text; ${
      lower_is_better ? "left" : "right"
    } of 0 is ` +
      `better. Large marks: means with ${intervals} over seeds, small ones: single seeds. Shaded: ` +
      `±${digits(study.margin)} ${unit}, the difference called negligible beforehand.${seedsNote()}`;
  },
  draw: drawForest,
});

// learning rates

const isTuning = (run) => !group().study || run.seed < group().study.tuning_seeds;
const isChosen = (arm, lr) => group().study && lr === arm.lr;
function tellEdges() {
  const { lrs, arms } = group();
  if (lrs.length < 2) return "";
  return [["highest", "higher", Math.max(...lrs)], ["lowest", "lower", Math.min(...lrs)]].map(
    ([edge, beyond, lr]) => {
      const own = arms.filter((arm) => arm.lr === lr).map((arm) => arm.name);
      return own.length
        ? ` ${own.join(", ")} chose the ${edge} rate tried: a ${beyond} one might do better still.`
        : "";
    },
  ).join("");
}
function tellSensitivities() {
  const known = visibleArms().filter((arm) => arm.tuning?.sensitivity);
  if (!known.length) return "";
  const told = known.map((arm) => `${arm.name} ${tellSensitivity(arm.tuning.sensitivity)}`).join(", ");
  const bars = known.some((arm) => arm.tuning.best)
    ? " Bars below: the rates among which the seeds show the best."
    : "";
  return `${bars} Learning-rate sensitivity, the mean over all rates of min(loss, that of an untrained model) less ` +
    `the loss at the best rate, in nats: ${told}.`;
}
function drawRates(figure, width) {
  const view = viewOf(figure.get("unit")), valid = (run) => valueOf(run.valid, view);
  const runs = group().runs.filter((run) => !isHidden(run.arm) && run.status !== "not ended" && isNumber(run.lr));
  if (!runs.length) return "No run has ended yet, or all arms are hidden.";
  const isStrip = runs.some((run) => run.status === "diverged"), top = isStrip ? 68 : 34;
  const measured = runs.filter((run) => run.status !== "diverged" && isNumber(valid(run)));
  const lrs = [...new Set(runs.map((run) => run.lr))].sort((a, b) => a - b);
  const format = (lr) => (lr < 1e-3 ? lr.toExponential().replace("-", "−") : digits(lr));
  const x = { domain: extent(lrs, { pad: 0.12, log: true }), log: true, label: "learning rate", format };
  if (lrs.length <= 7) x.ticks = lrs;
  const y = { domain: extent(measured.map((run) => view.of(valid(run))), { pad: 0.1 }) || [0, 1], label: "" };
  const barred = visibleArms().filter((arm) => arm.tuning?.best), room = 7 * barred.length;
  y.domain[0] -= ((y.domain[1] - y.domain[0]) * room) / 240; // so that bars lie below the marks
  const plot = new Plot(width, (isWide(width) ? 340 : 290) + room, { top, x, y, title: "Loss against learning rate" });
  const soft = { ...START, fill: plot.colours.soft, "font-size": 12.5 };
  plot.text(8, 18, `validation ${axisName(view)}`, soft);
  if (isStrip) {
    plot.rect(plot.left, 30, plot.end - plot.left, 26, { fill: plot.colours.band, rx: 4 });
    plot.text(2, 47, "diverged", { ...START, fill: plot.colours.bad, "font-size": 11 });
  }
  const arms = visibleArms();
  arms.forEach((arm, k) => {
    const shift = (k - (arms.length - 1) / 2) * Math.min(7, 40 / arms.length), at = (lr) => plot.x(lr) + shift;
    drawRatesOfArm(plot, arm, runs.filter((run) => run.arm === arm.i), lrs, { view, valid, at });
  });
  barred.forEach((arm, k) => drawBestRates(plot, arm, plot.floor - 6 - 7 * k));
  return plot;
}
function drawBestRates(plot, arm, y) {
  const { best } = arm.tuning, [from, to] = [plot.x(best[0]) - 6, plot.x(best.at(-1)) + 6], style = armStyle(arm.i);
  plot.drawn(arm.i, `M${from.toFixed(1)},${y}H${to.toFixed(1)}`, { stroke: style.colour, "stroke-width": 3 });
  plot.hit(plot.x(arm.lr), y, arm.name, () => [`best learning rate among ${best.map((lr) => digits(lr)).join(", ")}`]);
}
function drawRatesOfArm(plot, arm, runs, lrs, { view, valid, at }) {
  const style = armStyle(arm.i), means = [];
  const isFine = (run) => run.status !== "diverged" && isNumber(valid(run));
  for (const lr of lrs) {
    const here = runs.filter((run) => run.lr === lr), tuned = here.filter((run) => isTuning(run) && isFine(run));
    if (tuned.length) means.push([lr, plot.y(meanOf(tuned.map(valid), view))]);
    here.filter((run) => run.status === "diverged").forEach((run, j) => {
      plot.cross(at(lr), 43 - (j % 3) * 3, 5, style.colour, arm.i);
      plot.hit(at(lr), 43 - (j % 3) * 3, runName(run), () => [`learning rate ${digits(lr)}`, "diverged"]);
    });
  }
  const line = { stroke: style.colour, "stroke-width": 2, "stroke-dasharray": style.dash || null };
  const points = means.map(([lr, y]) => `${at(lr).toFixed(1)},${y.toFixed(1)}`);
  if (means.length > 1) plot.drawn(arm.i, `M${points.join("L")}`, line);
  for (const [lr, y] of means.filter(([own]) => isChosen(arm, own))) {
    plot.path(`M${at(lr) - 10},${y}a10,10 0 1 0 20,0a10,10 0 1 0 -20,0z`, {
      stroke: style.colour,
      "stroke-width": 1.6,
    });
  }
  for (const run of runs.filter(isFine)) {
    const value = view.of(valid(run)),
      rate = `learning rate ${digits(run.lr)}${isChosen(arm, run.lr) ? ", chosen" : ""}`;
    plot.mark(at(run.lr), plot.y(value), style, { r: 4.2, arm: arm.i, opacity: 0.9 });
    plot.hit(at(run.lr), plot.y(value), runName(run), () => [`${digits(value, 5)} ${view.unit}`, rate]);
  }
}
export const rates = new Figure("rates", {
  title: "Loss against learning rate",
  controls: [makeControl("unit", "In", () => viewNames(), { start: () => ownMetric().name })],
  caption: () => {
    const { study, runs } = group(), seeds = study?.tuning_seeds === 1 ? "seed" : `${study?.tuning_seeds} seeds`;
    const through = study
      ? `the ${seeds} that tried every learning rate, and a ring is around the one chosen for an arm`
      : "each learning rate";
    const strip = runs.some((run) => run.status === "diverged")
      ? " Runs that diverged are in the strip at the top."
      : "";
    return "Validation at the end of each run, one mark a run; the line goes through the means of " +
      `${through}.${strip}${tellEdges()}${tellSensitivities()}`;
  },
  draw: drawRates,
});

// cost and quality

const COSTS = {
  cache: { name: "cache", label: "cache, bytes per token (bf16)", of: (run) => run.cache, format: bytes },
  step: { name: "step time", label: "training step, seconds", of: (run) => run.step_seconds, format: time },
  parameters: { name: "parameters", label: "parameters", of: (run) => run.parameters, format: short },
};
function drawCost(figure, width) {
  const price = COSTS[figure.get("x")], view = viewOf(figure.get("unit")), log = figure.get("scale") === "log";
  const { label, format } = price, value = (run) => valueOf(finalScores(run), view), isBig = isWide(width);
  const fits = (run) => run.status === "finished" && isNumber(price.of(run)) && isNumber(value(run));
  const series = visibleArms().map((arm) => ({ arm, runs: runsOf(arm.i).filter(fits) })).filter(({ runs }) =>
    runs.length
  );
  if (!series.length) return "No run has finished yet, or all arms are hidden.";
  const all = series.flatMap(({ runs }) => runs), xs = extent(all.map(price.of), { pad: 0.16, log });
  if (!log && xs[0] > 0 && xs[0] < 0.45 * xs[1]) xs[0] = 0;
  const x = { domain: xs, log, label, format };
  const y = { domain: extent(all.map((run) => view.of(value(run))), { pad: 0.14 }), label: `test ${axisName(view)}` };
  const plot = new Plot(width, isBig ? 360 : 300, { right: isBig ? 60 : 24, x, y, title: `Quality against ${label}` });
  plot.isNamed = true;
  const labels = series.map(({ arm, runs }) => {
    const style = armStyle(arm.i);
    for (const run of runs) {
      const [px, py] = [plot.x(price.of(run)), plot.y(view.of(value(run)))];
      plot.mark(px, py, style, { r: 2.6, opacity: 0.6, arm: arm.i });
      plot.hit(px, py, runName(run), () => [
        `${digits(view.of(value(run)), 5)} ${view.unit}`,
        `cache ${bytes(run.cache)} per token`,
        `${time(run.step_seconds)} a step`,
        `${grouped(run.parameters)} parameters`,
      ]);
    }
    const cost = mean(runs.map(price.of)), quality = meanOf(runs.map(value), view);
    const [px, py] = [plot.x(cost), plot.y(quality)];
    plot.mark(px, py, style, { r: 7, arm: arm.i });
    const told = () => [`${digits(quality, 5)} ${view.unit}`, `${label}: ${format(cost)}`];
    plot.hit(px, py, `${arm.name}, mean of ${runs.length}`, told);
    return { px, py, arm, colour: style.colour };
  });
  drawNamesBeside(plot, labels);
  return plot;
}
function drawNamesBeside(plot, labels) {
  const taken = [];
  for (const { px, py, arm, colour } of labels.sort((a, b) => a.py - b.py)) {
    const size = 7.4 * arm.name.length, isLeft = px + 14 + size > plot.width - 4;
    let at = py + 4;
    while (taken.some((other) => Math.abs(other.at - at) < 14 && Math.abs(other.px - px) < size + 20)) at += 14;
    taken.push({ px, at });
    const style = { ...(isLeft ? END : START), fill: colour, "font-weight": 600, "font-size": 12.5 };
    plot.text(isLeft ? px - 12 : px + 12, at, arm.name, style);
  }
}
export const cost = new Figure("cost", {
  title: "Cost and quality",
  controls: [
    makeControl("x", "Against", () => Object.entries(COSTS).map(([key, { name }]) => [key, name])),
    makeControl("unit", "In", () => viewNames(), { start: () => ownMetric().exponential || ownMetric().name }),
    scaleControl(),
  ],
  caption: () =>
    `${
      ownMetric().lower_is_better ? "Down" : "Up"
    } and left is better. Large marks: means over seeds on test text; small ` +
    "ones: single seeds. Step times hold for the machine and its load at the time.",
  draw: drawCost,
});

// attention maps

const attentionOf = () => Object.entries(group().attention).map(([arm, own]) => ({ arm, ...own }));
function headOptions() {
  const heads = attentionOf().flatMap(({ layers }) => (layers || []).map((layer) => layer.maps.length - 1));
  return [["0", "mean over heads"], ...count(Math.max(0, ...heads)).map((k) => [String(k + 1), `head ${k + 1}`])];
}
function tellMissing() {
  const arms = Map.groupBy(attentionOf().filter(({ why }) => why), ({ why }) => why);
  return [...arms].map(([why, own]) => `${own.map(({ arm }) => arm).join(", ")}: ${why}`).join(" ");
}
function drawMaps(figure, width) {
  const head = Number(figure.get("head")), all = attentionOf();
  const rows = visibleArms().map((arm) => ({ arm, own: group().attention[arm.name] })).filter(({ own }) => own?.layers);
  if (!all.length) return "Attention maps were left out of this report.";
  if (!rows.length) {
    const reasons = [...new Set(all.map(({ why }) => why))].join(" ");
    return all.some(({ layers }) => layers)
      ? "All arms with attention maps are hidden."
      : `There are no attention maps: ${reasons}`;
  }
  const columns = Math.max(...rows.map(({ own }) => own.layers.length)), isBig = isWide(width), top = 26;
  const left = isBig ? nameRoom(rows.map(({ arm }) => arm.name)) : 0, gap = isBig ? 18 : 8;
  const size = Math.floor(Math.min(260, (width - left - gap * columns - 2) / columns)), line = size + (isBig ? 18 : 30);
  const plot = new Plot(width, top + line * rows.length + 40, { left: 0, right: 0, top, title: "Attention maps" });
  plot.isNamed = true;
  rows.forEach(({ arm, own }, r) => {
    const y = top + r * line + (isBig ? 0 : 16), where = isBig ? [left - 12, y + size / 2 + 4] : [2, y - 4];
    plot.text(...where, arm.name, { ...(isBig ? END : START), "font-weight": 600, fill: armStyle(arm.i).colour });
    own.layers.forEach((layer, k) => {
      const x = left + k * (size + gap), soft = { fill: plot.colours.soft, "font-size": 12.5 };
      if (r === 0) plot.text(x + size / 2, 14, `${layer.place} layer`, soft);
      if (head >= layer.maps.length) return plot.text(x + size / 2, y + size / 2, "no such head", soft);
      const title = `${arm.name}, layer ${layer.index + 1}`;
      return drawMap(plot, layer.maps[head], { x, y, size, tokens: own.tokens, title, arm: arm.i });
    });
  });
  drawShades(plot, left + 4, top + line * rows.length + 8, Math.min(160, width / 3));
  return plot;
}
export const maps = new Figure("maps", {
  title: "Attention maps",
  controls: [makeControl("head", "Show", headOptions, { isList: true })],
  caption: () => {
    const own = attentionOf().find(({ layers }) => layers);
    if (!own) return "";
    return "Rows are queries, columns keys, from the start of the text at the top left; the shade grows with the " +
      `square root of the weight. The first seed of each arm reads the same ${own.tokens.length} tokens. ` +
      `${own.notes.join(" ")} ${tellMissing()}`;
  },
  draw: drawMaps,
});
