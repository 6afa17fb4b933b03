// Across sizes and corpora: effects against size, loss against compute, speed-up, arms × corpora, scores against the
// difficulty of a task; published figures.

import { data, digits, h, isNumber, short, signed } from "./core.js";
import { armStyle } from "./colours.js";
import { extent, isWide, nameRoom, Plot } from "./plot.js";
import { Figure, makeControl } from "./figure.js";
import { group, isHidden, metricOf } from "./arms.js";

const isShown = (name) => !isHidden(group().arms.findIndex((arm) => arm.name === name));
const styleOf = (own, name) => armStyle(own.order.indexOf(name));
const level = (own) => `${digits(100 * own.level, 3)} %`;
const WIDE = 400, NARROW = 320;

// what a figure can be about, as [study's number and key, text]; keys are corpora or sizes
const listChoices = (keysOf) =>
  data.across.flatMap((own, k) =>
    [...new Set(keysOf(own))].map((key) => [`${k} ${key}`, data.across.length > 1 ? `${own.title} · ${key}` : key])
  );
function readChoice(figure) {
  const value = figure.get("of"), at = value.indexOf(" ");
  return [data.across[Number(value.slice(0, at))], value.slice(at + 1)];
}
function makeFigure(id, title, keysOf, { controls = [], ...own }) {
  const options = () => listChoices(keysOf);
  if (!options().length) return null;
  return new Figure(id, {
    title,
    heading: title,
    controls: [makeControl("of", "Of", options, { isList: options().length > 4 }), ...controls],
    ...own,
  });
}
// a mark with its interval from low to high; without an upper end it leaves the plot
function drawInterval(plot, px, { middle, low, high }, style, { isPale = false, arm }) {
  const top = isNumber(high) ? plot.y(high) : plot.top, bottom = plot.y(low), opacity = isPale ? 0.55 : null;
  const ends = `M${px - 4},${bottom.toFixed(1)}h8${isNumber(high) ? `M${px - 4},${top.toFixed(1)}h8` : ""}`;
  const line = { stroke: style.colour, "stroke-width": 2, opacity, "stroke-dasharray": isPale ? "3 3" : null };
  plot.drawn(arm, `M${px},${bottom.toFixed(1)}V${top.toFixed(1)}${ends}`, line);
  plot.mark(px, plot.y(middle), style, { r: isPale ? 4 : 5.5, opacity, arm });
}
const tellInterval = (own, { middle, low, high }, write) => [
  `${write(middle)}`,
  `${level(own)} interval ${write(low)} to ${isNumber(high) ? write(high) : "no upper limit"}`,
];
// rows of { arm, points: [{ at, place, middle, low, high, isPale, lines }] }, joined by lines; a line at `reference`,
// or through its points [at, value]
function drawRows(own, rows, width, { title, x, y, reference, write }) {
  const points = rows.flatMap((row) => row.points), isBig = isWide(width), isLevel = isNumber(reference);
  if (!points.length) return "All arms are hidden.";
  const values = points.flatMap(({ middle, low, high }) => [middle, low, high]);
  const beside = isLevel ? [reference] : reference.map(([, value]) => value);
  const domain = extent([...values, ...beside], { pad: 0.08, log: y.log });
  const room = { left: 70, right: isBig ? nameRoom(rows.map((row) => row.arm)) : 16 };
  const plot = new Plot(width, isBig ? WIDE : NARROW, { ...room, x, y: { ...y, domain }, title });
  const line = { stroke: plot.colours.soft, "stroke-width": 1.5 };
  const through = ([at, value]) => `${plot.x(at).toFixed(1)},${plot.y(value).toFixed(1)}`;
  if (isLevel) plot.path(`M${plot.left},${plot.y(reference).toFixed(1)}H${plot.end}`, line);
  else if (reference.length) plot.path(`M${reference.map(through).join("L")}`, { ...line, "stroke-dasharray": "2 4" });
  const labels = rows.map(({ arm, points: all }, k) => {
    const style = styleOf(own, arm), i = own.order.indexOf(arm), shift = (k - (rows.length - 1) / 2) * 9;
    const at = (point) => plot.x(point.at) + shift;
    const path = (some) => `M${some.map((p) => `${at(p).toFixed(1)},${plot.y(p.middle).toFixed(1)}`).join("L")}`;
    const seen = all.filter((point) => !point.isPale), dash = { stroke: style.colour, "stroke-width": 1.6 };
    plot.drawn(i, path(seen), { ...dash, "stroke-dasharray": style.dash || null });
    if (seen.length < all.length) {
      plot.drawn(i, path(all.slice(-2)), { ...dash, opacity: 0.5, "stroke-dasharray": "3 3" });
    }
    for (const point of all) {
      drawInterval(plot, at(point), point, style, { isPale: point.isPale, arm: i });
      const told = () => [...tellInterval(own, point, write), ...(point.lines || [])];
      plot.hit(at(point), plot.y(point.middle), `${arm}, ${point.place}`, told);
    }
    return { y: plot.y(all.at(-1).middle), text: arm, colour: style.colour };
  });
  if (isBig) plot.endLabels(labels);
  plot.isNamed = isBig;
  return plot;
}
function sizeAxis(effects, width, more = []) {
  const sizes = [...new Map(effects.map(({ place, parameters }) => [parameters, place]))].sort(([a], [b]) => a - b);
  const ticks = sizes.map(([parameters]) => parameters);
  const names = isWide(width) ? `: ${sizes.map(([, place]) => place).join(", ")}` : ""; // else the marks tell them
  const label = `parameters${names}`;
  return { domain: extent([...ticks, ...more], { pad: 0.1, log: true }), log: true, ticks: [...ticks, ...more], label };
}

// the effect against size

const effectPoint = ({ place, parameters, seeds, effect }) => ({
  at: parameters,
  place,
  middle: effect.estimate,
  low: effect.low,
  high: effect.high,
  lines: [`${seeds} seeds, ${short(parameters)} parameters`],
});
function drawSizes(figure, width) {
  const [own, corpus] = readChoice(figure), { difference_unit: unit } = metricOf(own.size_metric);
  const rows = own.sizes.filter((row) => row.corpus === corpus && isShown(row.arm)).map(({ arm, effects, trend }) => {
    const points = effects.map(effectPoint), { further, parameters } = trend ?? {};
    const { estimate: middle, low, high } = further ?? {};
    const pale = { at: parameters, place: "a further size", middle, low, high, isPale: true, lines: ["extrapolated"] };
    return { arm, points: further ? [...points, pale] : points };
  });
  const effects = own.sizes.flatMap((row) => row.effects);
  const x = sizeAxis(effects, width, [...new Set(own.sizes.flatMap(({ trend }) => (trend ? [trend.parameters] : [])))]);
  const y = { label: `difference to ${own.baseline}, ${unit}` };
  return drawRows(own, rows, width, {
    title: "Effect against size",
    x,
    y,
    reference: 0,
    write: (v) => `${signed(v, 4)} ${unit}`,
  });
}
export const sizes = makeFigure("sizes", "Effect against size", (own) => own.sizes.map((row) => row.corpus), {
  caption: (figure) => {
    const [own] = readChoice(figure), isFitted = own.sizes.some((row) => row.trend);
    const better = metricOf(own.size_metric).lower_is_better ? "Below" : "Above";
    return `Each arm minus ${own.baseline} at the same seed, means with ${
      level(own)
    } t intervals. ${better} 0 is better.` +
      (isFitted
        ? " Pale and dashed: what a size four times as large as the largest would show, by the straight line through " +
          "the sizes, as a prediction interval. That is an extrapolation."
        : " Too few sizes for a line through them.");
  },
  draw: drawSizes,
});

// loss against compute

function drawCompute(figure, width) {
  const [own, corpus] = readChoice(figure), { points, curve } = own.compute.find((each) => each.corpus === corpus);
  const shown = points.filter((point) => isShown(point.arm)),
    { unit } = metricOf(own.size_metric),
    isBig = isWide(width);
  if (!shown.length) return "All arms are hidden.";
  const most = 4 * Math.max(...points.map((point) => point.flops));
  const line = curve.filter(([flops]) => flops <= most);
  const x = { domain: extent(points.map((p) => p.flops), { pad: 0.12, log: true, include: line.map(([f]) => f) }) };
  const y = {
    domain: extent([...shown.map((p) => p.loss), ...line.map(([, loss]) => loss)], { pad: 0.08 }),
    label: unit,
  };
  const names = [...new Set(shown.map((point) => point.arm))];
  const room = { left: 64, right: isBig ? nameRoom(names) : 16 };
  const axes = { x: { ...x, log: true, label: "training FLOPs" }, y };
  const plot = new Plot(width, isBig ? WIDE : NARROW, { ...room, ...axes, title: "Loss against compute" });
  const base = own.order.indexOf(own.baseline);
  plot.line(line, { colour: armStyle(base).colour, width: 1.6, dash: "6 3", arm: base });
  const labels = names.map((arm) => {
    const i = own.order.indexOf(arm), style = armStyle(i), all = shown.filter((point) => point.arm === arm);
    for (const { size, flops, loss } of all) {
      plot.mark(plot.x(flops), plot.y(loss), style, { r: 5.5, arm: i });
      const told = () => [`${digits(loss, 5)} ${unit}`, `${short(flops)} FLOPs`];
      plot.hit(plot.x(flops), plot.y(loss), `${arm}, ${size}`, told);
    }
    return { y: plot.y(all.at(-1).loss), text: arm, colour: style.colour };
  });
  if (isBig) plot.endLabels(labels);
  plot.isNamed = isBig;
  return plot;
}
export const compute = makeFigure("compute", "Loss against compute", (own) => own.compute.map((each) => each.corpus), {
  caption: (figure) => {
    const [own, corpus] = readChoice(figure), { curve, sentence } = own.compute.find((each) => each.corpus === corpus);
    const fitted = curve.length ? ` Dashed: the curve of ${own.baseline}, beyond its largest run extrapolated.` : "";
    return `Means over seeds on test text, one mark an arm and size.${fitted} ${sentence}`;
  },
  draw: drawCompute,
});

// speed-up

const fasters = (own) => own.sizes.filter((row) => row.speed_ups.length);
function drawSpeedUps(figure, width) {
  const [own, corpus] = readChoice(figure), kind = figure.get("in");
  const effects = own.sizes.flatMap((row) => row.effects);
  const rows = fasters(own).filter((row) => row.corpus === corpus && isShown(row.arm)).map((row) => ({
    arm: row.arm,
    points: row.speed_ups.map((each) => {
      const [middle, low, high] = each[kind], { parameters } = effects.find(({ place }) => place === each.size);
      const lines = each.beyond ? ["beyond the baseline's largest run: extrapolated"] : [];
      return { at: parameters, place: each.size, middle, low, high, lines };
    }),
  }));
  return drawRows(own, rows, width, {
    title: "Effective speed-up",
    x: sizeAxis(effects, width),
    y: { log: true, label: `${kind === "flops" ? "FLOPs" : "time"} of ${own.baseline} / those of the arm` },
    reference: 1,
    write: (v) => `${digits(v, 3)} ×`,
  });
}
export const speedUps = makeFigure("speed-up", "Effective speed-up", (own) => fasters(own).map((row) => row.corpus), {
  controls: [makeControl("in", "In", () => [["flops", "FLOPs"], ["seconds", "time"]])],
  caption: (figure) => {
    const [own] = readChoice(figure);
    return `How many times the arm's compute or time ${own.baseline} would need to reach the arm's loss, on its own ` +
      `curve of loss against compute; above 1 the arm is faster. ${
        level(own)
      } intervals: seeds drawn again, in pairs. Time is ` +
      "that of the machine and its load.";
  },
  draw: drawSpeedUps,
});

// arms × corpora

const shorten = (name) => {
  const last = name.split("/").at(-1).replace(/^task:/, "");
  return last.length > 16 ? `${last.slice(0, 15)}…` : last;
};
const MEAN = "their mean";
function drawCorpora(figure, width) {
  const [own, size] = readChoice(figure), { difference_unit: unit } = metricOf(own.corpus_metric);
  const here = own.corpora.filter((row) => row.size === size);
  const places = [...new Set(here.flatMap((row) => row.effects.map(({ place }) => place)))];
  const { verdicts = {} } = own.averages.find((average) => average.size === size) ?? {};
  if (Object.keys(verdicts).length) places.push(MEAN);
  const rows = here.filter((row) => isShown(row.arm)).map(({ arm, effects }) => {
    const points = effects.map((each) => ({ ...effectPoint(each), at: places.indexOf(each.place) }));
    const { mean: middle, low, high, n } = verdicts[arm]?.paired ?? {};
    const average = { at: places.indexOf(MEAN), place: MEAN, middle, low, high, lines: [`${n} seeds`] };
    return { arm, points: isNumber(low) ? [...points, average] : points };
  });
  const ticks = places.map((_, k) => k), domain = [-0.4, places.length - 0.6];
  const x = { domain, ticks, format: (k) => shorten(places[k]), label: "corpus" };
  return drawRows(own, rows, width, {
    title: "Arms on every corpus",
    x,
    y: { label: `difference to ${own.baseline}, ${unit}` },
    reference: 0,
    write: (v) => `${signed(v, 4)} ${unit}`,
  });
}
export const corpora = makeFigure("corpora", "Arms on every corpus", (own) => own.corpora.map((row) => row.size), {
  caption: (figure) => {
    const [own, size] = readChoice(figure);
    const told = own.corpora.filter((row) => row.size === size).map(({ arm, p_holm: p }) => `${arm} ${digits(p, 2)}`);
    return `Each arm minus ${own.baseline} at the same seed, means with ${
      level(own)
    } t intervals. Lines that are not level ` +
      `and do not run alike differ between corpora; p of that (Welch's test, Holm over the arms): ${told.join(", ")}.`;
  },
  draw: drawCorpora,
});

// scores against the difficulty of a task

const nameTask = ({ task, size }) => `${task} at ${size}`;
const taskOf = (own, name) => own.difficulty.find((each) => nameTask(each) === name);
function drawDifficulty(figure, width) {
  const [own, name] = readChoice(figure), { argument, metric, scores, chance } = taskOf(own, name);
  const { label, unit } = metricOf(metric), ticks = [...new Set(scores.map(({ at }) => at))].sort((a, b) => a - b);
  const rows = own.order.filter(isShown).map((arm) => ({
    arm,
    points: scores.filter((each) => each.arm === arm).map(({ at, seeds, score: { estimate: middle, low, high } }) => {
      const guess = chance.filter(([where]) => where === at).map(([, value]) => `chance ${digits(value, 3)}`);
      return { at, place: `${argument} ${at}`, middle, low, high, lines: [`${seeds} seeds`, ...guess] };
    }),
  })).filter((row) => row.points.length);
  const plot = drawRows(own, rows, width, {
    title: "Accuracy against difficulty",
    x: { domain: extent(ticks, { pad: 0.1, log: true }), log: true, ticks, label: argument },
    y: { label: `${label}, ${unit}` },
    reference: chance,
    write: (v) => `${digits(v, 4)} ${unit}`,
  });
  if (typeof plot === "string" || !chance.length) return plot;
  const [at, value] = chance.at(-1), look = { fill: plot.colours.soft, "font-size": 12, "text-anchor": "end" };
  plot.text(plot.x(at), plot.y(value) - 6, "chance", look);
  return plot;
}
export const difficulty = makeFigure(
  "difficulty",
  "Accuracy against difficulty",
  (own) => own.difficulty.map(nameTask),
  {
    caption: (figure) => {
      const [own, name] = readChoice(figure), { argument, chance } = taskOf(own, name);
      const dotted = chance.length
        ? " Dotted: chance, what saying the most frequent answer of each place gets right."
        : "";
      return `Every arm on the task with each value of ${argument}, means over seeds with ${
        level(own)
      } t intervals, each ` +
        `of one arm alone; differences between arms are paired by seed, above.${dotted}`;
    },
    draw: drawDifficulty,
  },
);

// what is said

const CHIPS = {
  reproduced: "better",
  seen: "better",
  refuted: "worse",
  "not seen": "worse",
  "depends on": "equivalent",
};
const tellClaim = ({ id, arm, source, verdict }) =>
  h(
    "li",
    {},
    h(
      "div",
      { class: "who" },
      h("span", { class: "name" }, `${id} · ${arm}`),
      h("span", { class: `chip ${CHIPS[verdict.word] ?? "open"}` }, verdict.phrase),
    ),
    h("div", {}, h("p", {}, verdict.sentence), h("p", { class: "took" }, source)),
  );
export const tellClaims = () => data.across.flatMap(({ claims }) => claims).map(tellClaim);
export const tellAcross = () =>
  data.across.flatMap(({ sizes: rows, notes }) => [...rows.flatMap((row) => row.sentences), ...notes]).map((sentence) =>
    h("li", {}, sentence)
  );
