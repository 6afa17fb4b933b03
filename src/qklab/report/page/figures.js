// The figures, each a function from what is shown to a plot, or to a sentence where there is nothing to draw.

const wide = (width) => width >= 560;
const unitOptions = () => [["loss", "loss"], ["perplexity", "perplexity"], ["bits", "bits per byte"]];
const runName = (run) => `${group().arms[run.arm].name}, seed ${run.seed}`;
const statusLine = (run) => (run.status === "finished" ? [] : [run.status === "diverged" ? "diverged" : `not ended, ${Math.round(100 * run.done)} % done`]);
const seedsNote = () => {
  const most = Math.max(0, ...group().arms.map((_, i) => new Set(runsOf(i).map((run) => run.seed)).size));
  return most === 1 ? " One seed is an anecdote: it has no interval." : "";
};

// paired differences

const forest = new Figure("forest", {
  title: "Paired differences with intervals",
  controls: [{
    name: "unit", label: "Unit", start: "own",
    options: () => (group().metric === "loss" ? [["own", "nats per token"], ["perplexity", "perplexity, %"]] : [["own", "bits per byte"], ["percent", "% of baseline"]]),
  }],
  caption: (figure) => {
    const study = group().study;
    if (!study) return "";
    const judged = group().arms.map((a) => a.verdict).filter((v) => v && v.paired);
    const level = judged.length ? `${digits(100 * judged[0].paired.level, 3)} % t intervals` : "t intervals";
    return `Each arm minus ${study.baseline} at the same seed, on test text; left of 0 is better. Large marks: means with ${level} over seeds, ` +
      `small ones: single seeds. Shaded: ±${digits(study.margin)} ${UNITS[ownUnit()]}, the difference called negligible beforehand.${seedsNote()}`;
  },
  draw(figure, width) {
    const study = group().study;
    if (!study) return "Without a study there is no baseline to take differences from.";
    const unit = figure.get("unit");
    const rows = visibleArms().filter((arm) => arm.name !== study.baseline && arm.verdict);
    if (!rows.length) return group().arms.some((arm) => arm.verdict) ? "All arms are hidden." : `No difference to show yet. ${group().notes.join(" ")}`;
    const to = (arm) => (x) => (!isNumber(x) ? null : unit === "perplexity" ? 100 * Math.expm1(x) : unit === "percent" ? (arm.verdict.paired && arm.verdict.paired.mean ? (x * arm.verdict.paired.percent) / arm.verdict.paired.mean : null) : x);
    const values = [0];
    for (const arm of rows) {
      const f = to(arm), paired = arm.verdict.paired;
      if (paired) values.push(f(paired.mean), f(paired.low), f(paired.high));
      values.push(...Object.values(arm.verdict.differences).map(f));
    }
    const margin = unit === "percent" ? null : [-study.margin, study.margin].map(to(rows[0]));
    const reach = Math.max(...values.filter(isNumber).map(Math.abs));
    const domain = extent(values, { pad: 0.08, include: margin && study.margin < 4 * reach ? margin : [] });
    const big = wide(width), line = big ? 46 : 62, longest = Math.max(...rows.map((arm) => arm.name.length));
    const left = big ? Math.min(220, 30 + 7.6 * longest) : 24, right = big ? 210 : 24;
    const height = 34 + line * rows.length + 46;
    const label = { own: UNITS[ownUnit()], perplexity: "relative perplexity, %", percent: "% of the baseline's value" }[unit];
    const plot = new Plot(width, height, { left, right, top: 26, bottom: 46 }, { domain, label: `difference to ${study.baseline}, ${label}`, format: (t) => (Math.abs(t) < 1e-12 ? "0" : (t > 0 ? "+" : "") + digits(t, 3)) }, null, "Paired differences");
    plot.named = true;
    const { c, layer } = plot, bottom = height - 46;
    const clip = (x) => Math.max(left, Math.min(width - right, plot.x(x)));
    if (margin) layer.append(s("rect", { x: clip(margin[0]).toFixed(1), y: 26, width: (clip(margin[1]) - clip(margin[0])).toFixed(1), height: bottom - 26, fill: c.band }));
    layer.append(s("path", { d: `M${plot.x(0).toFixed(1)},20V${bottom}`, stroke: c.soft, "stroke-width": 1.5 }));
    plot.text(plot.x(0), 14, study.baseline, { colour: c.soft, size: 12.5, anchor: plot.x(0) > width - 70 ? "end" : plot.x(0) < 60 ? "start" : "middle" });
    rows.forEach((arm, k) => {
      const style = armStyle(arm.i), f = to(arm), v = arm.verdict, paired = v.paired, y = 26 + line * (k + 0.5) + (big ? 0 : 8);
      const interval = paired && isNumber(paired.low);
      const n = paired ? decimals(interval ? (f(paired.high) - f(paired.low)) / 2 : Math.abs(f(paired.mean)) / 5) : 2;
      const suffix = unit === "own" ? "" : " %";
      const told = !paired ? "diverged" : signed(f(paired.mean), n) + suffix + (interval ? `  [${signed(f(paired.low), n)}, ${signed(f(paired.high), n)}]` : "  one seed");
      const nameAt = big ? [left - 12, y + 4, "end"] : [2, y - 18, "start"];
      plot.text(...nameAt.slice(0, 2), arm.name, { anchor: nameAt[2], weight: 600, colour: style.colour });
      plot.text(width - (big ? 8 : 2), big ? y + 4 : y - 18, told, { anchor: "end", size: 12.5, halo: !big });
      if (interval) {
        const [a, b] = [plot.x(f(paired.low)), plot.x(f(paired.high))];
        layer.append(s("path", { class: "mark", "data-arm": arm.i, d: `M${a.toFixed(1)},${y}H${b.toFixed(1)}M${a.toFixed(1)},${y - 5}v10M${b.toFixed(1)},${y - 5}v10`, stroke: style.colour, "stroke-width": 2.2, fill: "none" }));
        plot.marks++;
      }
      for (const [seed, d] of Object.entries(v.differences)) {
        if (!isNumber(d)) continue;
        plot.mark(plot.x(f(d)), y + 11, style, { r: 2.6, opacity: 0.65, name: arm.i });
        plot.hit(plot.x(f(d)), y + 11, `${arm.name}, seed ${seed}`, () => [`${signed(d, 4)} ${UNITS[ownUnit()]}`, ...(group().metric === "loss" ? [`${perCent(100 * Math.expm1(d))} perplexity`] : [])]);
      }
      if (paired) {
        plot.mark(plot.x(f(paired.mean)), y, style, { r: 6.5, name: arm.i });
        plot.hit(plot.x(f(paired.mean)), y, `${arm.name} − ${study.baseline}`, () => [
          `${signed(paired.mean, 4)} ${UNITS[ownUnit()]}, mean of ${paired.n} ${paired.n === 1 ? "seed" : "seeds"}`,
          ...(interval ? [`${digits(100 * paired.level, 3)} % interval ${signed(paired.low, 4)} to ${signed(paired.high, 4)}`, `p = ${digits(paired.p, 2)}${isNumber(v.p_holm) ? `, after Holm ${digits(v.p_holm, 2)}` : ""}`] : ["one seed is an anecdote"]),
          ...(isNumber(paired.bootstrap_low) ? [`bootstrap ${signed(paired.bootstrap_low, 4)} to ${signed(paired.bootstrap_high, 4)}`] : []),
          ...(v.arm_diverged ? [`diverged at ${v.arm_diverged} of ${v.seeds} seeds`] : []),
        ]);
      }
    });
    return plot;
  },
});

// learning curves

function differenceAlong(figure, width) {
  const [by, log, range] = [figure.get("x"), figure.get("scale") === "log", figure.get("range")];
  const series = visibleArms().filter((arm) => arm.learning && arm.learning[by]).map((arm) => ({ arm, own: arm.learning[by] }));
  if (!series.length) return "No curves to compare yet, or all arms are hidden.";
  const last = Math.max(...series.map(({ own }) => own.x.at(-1))), from = range === "end" ? last / 2 : -Infinity;
  const points = series.map(({ arm, own }) => ({ arm, n: own.n, level: own.level, rows: own.x.map((x, k) => ({ x, y: own.mean[k], low: own.low && own.low[k], high: own.high && own.high[k] })).filter((p) => p.x >= from && (!log || p.x > 0)) })).filter((each) => each.rows.length > 1);
  if (!points.length) return "No curves to compare there.";
  const all = points.flatMap((each) => each.rows);
  const xs = extent(all.map((p) => p.x), { pad: 0, log }), ys = extent(all.flatMap((p) => [p.y, p.low, p.high]), { pad: 0.06, include: [0] });
  if (!log && range !== "end") xs[0] = 0;
  const big = wide(width), longest = Math.max(...points.map((each) => each.arm.name.length)), right = big ? Math.min(190, 34 + 7.4 * longest) : 14;
  const plot = new Plot(width, big ? 400 : 300, { left: 64, right, top: 34, bottom: 46 },
    { domain: xs, log, label: by === "tokens" ? "training tokens" : "training time", format: by === "tokens" ? short : time },
    { domain: ys, label: `difference of validation loss to ${group().study.baseline}, nats per token` }, "Difference of validation loss along training");
  plot.layer.append(s("path", { d: `M64,${plot.y(0).toFixed(1)}H${width - right}`, stroke: plot.c.soft, "stroke-width": 1.5 }));
  const labels = [];
  for (const { arm, n, level, rows } of points) {
    const style = armStyle(arm.i), at = (x, y) => `${plot.x(x).toFixed(1)},${plot.y(y).toFixed(1)}`;
    if (isNumber(rows[0].low)) plot.layer.append(s("path", { class: "mark", "data-arm": arm.i, d: `M${rows.map((p) => at(p.x, p.low)).join("L")}L${[...rows].reverse().map((p) => at(p.x, p.high)).join("L")}z`, fill: style.colour, opacity: 0.13 }));
    plot.line(rows.map((p) => [p.x, p.y]), { colour: style.colour, width: 2.4, dash: style.dash, name: arm.i });
    for (const p of rows) plot.hit(plot.x(p.x), plot.y(p.y), `${arm.name} − ${group().study.baseline}`, () => [`${signed(p.y, 4)} nats per token, ${n === 1 ? "one seed" : `mean of ${n} seeds`}`, ...(isNumber(p.low) ? [`${digits(100 * level, 3)} % interval ${signed(p.low, 4)} to ${signed(p.high, 4)}`] : []), by === "tokens" ? `at ${grouped(p.x)} tokens` : `after ${time(p.x)}`]);
    if (big) labels.push({ x: width - right, y: plot.y(rows.at(-1).y), text: arm.name, colour: style.colour });
  }
  plot.endLabels(labels);
  plot.named = big;
  return plot;
}
const curves = new Figure("curves", {
  title: "Learning curves",
  controls: [
    { name: "what", label: "Show", start: "curves", options: () => (group().arms.some((arm) => arm.learning) ? [["curves", "loss"], ["difference", `difference to ${group().study.baseline}`]] : [["curves", "loss"]]) },
    { name: "text", label: "Text", start: "valid", options: () => (curves.get("what") === "difference" ? [["valid", "validation"]] : [["valid", "validation"], ["train", "training"]]) },
    { name: "x", label: "Against", start: "tokens", options: () => [["tokens", "tokens"], ["seconds", "time"]] },
    { name: "scale", label: "Scale", start: "linear", options: () => [["linear", "linear"], ["log", "log"]] },
    { name: "unit", label: "In", start: () => ownUnit(), options: () => (curves.get("what") === "difference" ? [["loss", "loss"]] : curves.get("text") === "train" ? unitOptions().slice(0, 2) : unitOptions()) },
    { name: "range", label: "Range", start: "all", options: () => [["all", "all"], ["end", "second half"]] },
  ],
  caption: (figure) => figure.get("what") === "difference" ? `Validation loss of each arm minus ${group().study.baseline} at the same seed, mean over seeds with its t interval at every place on its own; below 0 is better.${figure.get("x") === "seconds" ? " Time is that of training steps only." : ""}${seedsNote()}` :
    `Thin: every seed at the learning rate chosen for its arm; bold: their mean. ` +
    (figure.get("x") === "seconds" ? "Time is that of training steps only, without evaluation. " : "") +
    (figure.get("text") === "train" ? "Training loss is averaged over stretches of steps. " : "During training, validation is on a part of the validation text; the verdict is on all of the test text. ") +
    `A × ends a run that diverged.${seedsNote()}`,
  draw(figure, width) {
    if (figure.get("what") === "difference") return differenceAlong(figure, width);
    const [text, by, log, unit, range] = ["text", "x", "scale", "unit", "range"].map((name) => figure.get(name));
    const value = (loss, bits) => (unit === "bits" ? bits : !isNumber(loss) ? null : unit === "perplexity" ? Math.exp(loss) : loss);
    const series = visibleArms().map((arm) => ({
      arm,
      runs: runsOf(arm.i).map((run) => {
        const own = text === "train" ? run.train : run.curve;
        const points = own ? own.tokens.map((_, k) => [own[by][k], value(own.loss[k], own.bits && own.bits[k])]) : [];
        return { run, points: points.filter(([x]) => isNumber(x) && (log !== "log" || x > 0)) };
      }).filter((each) => each.points.length),
    })).filter((each) => each.runs.length);
    if (!series.length) return group().runs.length ? "Nothing is recorded yet, or all arms are hidden." : "No run has begun yet.";
    for (const each of series) {
      // a run that ended early says nothing about later: the mean goes as far as all of them do
      const going = each.runs.filter(({ run }) => run.status !== "diverged");
      const length = going.length ? Math.min(...going.map((r) => r.points.length)) : 0;
      each.mean = [...Array(length)].map((_, k) => {
        const at = going.map((r) => r.points[k]).filter((p) => isNumber(p[1]));
        return at.length < going.length ? [null, null] : [mean(at.map((p) => p[0])), unit === "perplexity" ? Math.exp(mean(at.map((p) => Math.log(p[1])))) : mean(at.map((p) => p[1]))];
      });
    }
    const all = series.flatMap((each) => each.runs.flatMap((r) => r.points));
    const last = Math.max(...all.map((p) => p[0])), from = range === "end" ? last / 2 : -Infinity;
    const inside = all.filter((p) => p[0] >= from);
    const big = wide(width), height = big ? 400 : 300, longest = Math.max(...series.map((each) => each.arm.name.length));
    const xs = extent(inside.map((p) => p[0]), { pad: 0, log: log === "log" });
    if (log !== "log" && range !== "end") xs[0] = 0;
    const ys = extent(inside.map((p) => p[1]), { pad: 0.06 });
    if (!xs || !ys) return "Nothing finite is recorded yet.";
    if (xs[0] === xs[1]) xs[1] = xs[0] * 1.01 + 1e-9;
    const right = big ? Math.min(190, 34 + 7.4 * longest) : 14;
    const plot = new Plot(width, height, { left: 58, right, top: 34, bottom: 46 },
      { domain: xs, log: log === "log", label: by === "tokens" ? "training tokens" : "training time", format: by === "tokens" ? short : time },
      { domain: ys, label: `${text === "train" ? "training" : "validation"} ${unit === "loss" ? "loss, nats per token" : unit === "perplexity" ? "perplexity per token" : "bits per byte"}` }, `Learning curves against ${by === "tokens" ? "tokens" : "time"}`);
    const cut = (points) => points.filter((p) => !isNumber(p[0]) || p[0] >= from);
    const labels = [];
    for (const { arm, runs, mean: middle } of series) {
      const style = armStyle(arm.i);
      for (const { run, points } of runs) {
        const own = cut(points);
        plot.line(own, { colour: style.colour, width: 1, opacity: 0.4, name: arm.i });
        const end = own.filter((p) => isNumber(p[1])).at(-1);
        if (run.status === "diverged" && end) {
          plot.layer.append(s("path", { class: "mark", d: "M-6,-6L6,6M-6,6L6,-6", transform: `translate(${plot.x(end[0]).toFixed(1)},${plot.y(end[1]).toFixed(1)})`, stroke: plot.c.bad, "stroke-width": 2.4, fill: "none" }));
        }
        const every = Math.max(1, Math.floor(own.length / 40));
        own.forEach(([x, y], k) => {
          if (isNumber(y) && (k % every === 0 || k === own.length - 1)) plot.hit(plot.x(x), plot.y(y), runName(run), () => [`${digits(y, 5)} ${UNITS[unit]}`, by === "tokens" ? `at ${grouped(x)} tokens` : `after ${time(x)}`, `learning rate ${digits(run.lr)}`, ...statusLine(run)]);
        });
      }
      const own = cut(middle).filter((p) => isNumber(p[1]));
      plot.line(own, { colour: style.colour, width: 2.6, dash: style.dash, name: arm.i });
      if (own.length && own.length <= 24) for (const [x, y] of own) plot.mark(plot.x(x), plot.y(y), style, { r: 3.6, name: arm.i });
      if (own.length && big) labels.push({ x: width - right, y: plot.y(own.at(-1)[1]), text: arm.name, colour: style.colour });
    }
    plot.endLabels(labels);
    plot.named = big && labels.length === series.length;
    return plot;
  },
});

// learning rates

function atEdge() {
  const study = group().study;
  if (!study || study.lrs.length < 2) return "";
  const side = (lr, word) => { const own = group().arms.filter((arm) => arm.lr === lr).map((arm) => arm.name); return own.length ? ` ${own.join(", ")} chose the ${word} rate tried: a ${word === "highest" ? "higher" : "lower"} one might do better still.` : ""; };
  return side(Math.max(...study.lrs), "highest") + side(Math.min(...study.lrs), "lowest");
}
const seedsThatTune = () => (group().study.tuning_seeds === 1 ? "seed" : `${group().study.tuning_seeds} seeds`);
const tunes = (run) => !group().study || run.seed < group().study.tuning_seeds;
const rates = new Figure("rates", {
  title: "Loss against learning rate",
  controls: [{ name: "unit", label: "In", start: () => ownUnit(), options: unitOptions }],
  caption: () => `Validation at the end of each run, one mark a run; the line goes through the means of ${group().study ? `the ${seedsThatTune()} that tried every learning rate, and a ring is around the one chosen for an arm` : "each learning rate"}.${group().runs.some((r) => r.status === "diverged") ? " Runs that diverged are in the strip at the top." : ""}${atEdge()}`,
  draw(figure, width) {
    const unit = figure.get("unit"), runs = group().runs.filter((run) => !isHidden(run.arm) && run.status !== "not ended" && isNumber(run.lr));
    if (!runs.length) return "No run has ended yet, or all arms are hidden.";
    const diverged = runs.filter((run) => run.status === "diverged");
    const at = (run) => measureOf(run.valid, unit);
    const ys = extent(runs.filter((r) => r.status !== "diverged").map(at), { pad: 0.1 }) || [0, 1];
    const xs = extent(runs.map((run) => run.lr), { pad: 0.12, log: true });
    const strip = diverged.length ? 34 : 0, height = wide(width) ? 340 : 290;
    const lrs = [...new Set(runs.map((run) => run.lr))].sort((a, b) => a - b);
    const plot = new Plot(width, height, { left: 58, right: 18, top: 34 + strip, bottom: 46 },
      { domain: xs, log: true, label: "learning rate", ticks: lrs.length <= 7 ? lrs : null, format: (x) => (x < 1e-3 ? x.toExponential().replace("e-", "e−") : digits(x)) },
      { domain: ys, label: null }, "Loss against learning rate");
    plot.text(8, 18, `validation ${unit === "loss" ? "loss, nats per token" : UNITS[unit]}`, { colour: plot.c.soft, size: 12.5, anchor: "start" });
    if (strip) {
      plot.layer.append(s("rect", { x: 58, y: 30, width: width - 76, height: 26, fill: plot.c.band, rx: 4 }));
      plot.text(2, 47, "diverged", { colour: plot.c.bad, size: 11, anchor: "start" });
    }
    const arms = visibleArms();
    arms.forEach((arm, k) => {
      const style = armStyle(arm.i), shift = (k - (arms.length - 1) / 2) * Math.min(7, 40 / arms.length);
      const own = runs.filter((run) => run.arm === arm.i), means = [];
      for (const lr of lrs) {
        const here = own.filter((run) => run.lr === lr && run.status !== "diverged" && tunes(run)).map(at).filter(isNumber);
        const bad = own.filter((run) => run.lr === lr && run.status === "diverged");
        if (here.length) means.push([lr, unit === "perplexity" ? Math.exp(mean(here.map(Math.log))) : mean(here)]);
        bad.forEach((run, j) => {
          const px = plot.x(lr) + shift, py = 43 - (j % 3) * 3;
          plot.layer.append(s("path", { class: "mark", "data-arm": arm.i, d: "M-5,-5L5,5M-5,5L5,-5", transform: `translate(${px.toFixed(1)},${py})`, stroke: style.colour, "stroke-width": 2.4, fill: "none" }));
          plot.marks++;
          plot.hit(px, py, runName(run), () => [`learning rate ${digits(lr)}`, "diverged"]);
        });
      }
      const d = means.map(([x, y], j) => `${j ? "L" : "M"}${(plot.x(x) + shift).toFixed(1)},${plot.y(y).toFixed(1)}`).join("");
      if (means.length > 1) plot.layer.append(s("path", { class: "mark", "data-arm": arm.i, d, fill: "none", stroke: style.colour, "stroke-width": 2, "stroke-dasharray": style.dash }));
      for (const [lr, y] of means) if (lr === arm.lr && group().study) plot.layer.append(s("circle", { cx: (plot.x(lr) + shift).toFixed(1), cy: plot.y(y).toFixed(1), r: 10, fill: "none", stroke: style.colour, "stroke-width": 1.6 }));
      for (const run of own) {
        const y = at(run);
        if (run.status === "diverged" || !isNumber(y)) continue;
        plot.mark(plot.x(run.lr) + shift, plot.y(y), style, { r: 4.2, name: arm.i, opacity: 0.9 });
        plot.hit(plot.x(run.lr) + shift, plot.y(y), runName(run), () => [`${digits(y, 5)} ${UNITS[unit]}`, `learning rate ${digits(run.lr)}${run.lr === arm.lr && group().study ? ", chosen" : ""}`]);
      }
    });
    return plot;
  },
});

// cost and quality

const COSTS = {
  cache: ["cache, bytes per token (bf16)", (run) => run.cache, bytes],
  step: ["training step, seconds", (run) => run.step_seconds, time],
  parameters: ["parameters", (run) => run.parameters, short],
};
const cost = new Figure("cost", {
  title: "Cost and quality",
  controls: [
    { name: "x", label: "Against", start: "cache", options: () => [["cache", "cache"], ["step", "step time"], ["parameters", "parameters"]] },
    { name: "unit", label: "In", start: () => (ownUnit() === "bits" ? "bits" : "perplexity"), options: unitOptions },
    { name: "scale", label: "Scale", start: "linear", options: () => [["linear", "linear"], ["log", "log"]] },
  ],
  caption: () => "Down and left is better. Large marks: means over seeds on test text; small ones: single seeds. Step times hold for the machine and its load at the time.",
  draw(figure, width) {
    const [by, unit, log] = [figure.get("x"), figure.get("unit"), figure.get("scale") === "log"];
    const [label, costOf, format] = COSTS[by];
    const series = visibleArms().map((arm) => ({
      arm, points: runsOf(arm.i).filter((run) => run.status === "finished").map((run) => ({ run, x: costOf(run), y: measureOf(score(run), unit) })).filter((p) => isNumber(p.x) && isNumber(p.y)),
    })).filter((each) => each.points.length);
    if (!series.length) return "No run has finished yet, or all arms are hidden.";
    const all = series.flatMap((each) => each.points);
    const xs = extent(all.map((p) => p.x), { pad: 0.16, log, include: [] }), ys = extent(all.map((p) => p.y), { pad: 0.14 });
    if (!log && xs[0] > 0 && xs[0] < 0.45 * xs[1]) xs[0] = 0;
    const plot = new Plot(width, wide(width) ? 360 : 300, { left: 58, right: wide(width) ? 60 : 24, top: 34, bottom: 46 },
      { domain: xs, log, label, format }, { domain: ys, label: `test ${unit === "loss" ? "loss, nats per token" : UNITS[unit]}` }, `Quality against ${label}`);
    plot.named = true;
    const placed = [];
    for (const { arm, points } of series) {
      const style = armStyle(arm.i);
      for (const { run, x, y } of points) {
        plot.mark(plot.x(x), plot.y(y), style, { r: 2.6, opacity: 0.6, name: arm.i });
        plot.hit(plot.x(x), plot.y(y), runName(run), () => [`${digits(y, 5)} ${UNITS[unit]}`, `cache ${bytes(run.cache)} per token`, `${time(run.step_seconds)} a step`, `${grouped(run.parameters)} parameters`]);
      }
      const x = mean(points.map((p) => p.x)), y = unit === "perplexity" ? Math.exp(mean(points.map((p) => Math.log(p.y)))) : mean(points.map((p) => p.y));
      plot.mark(plot.x(x), plot.y(y), style, { r: 7, name: arm.i });
      plot.hit(plot.x(x), plot.y(y), `${arm.name}, mean of ${points.length}`, () => [`${digits(y, 5)} ${UNITS[unit]}`, `${label}: ${format(x)}`]);
      placed.push({ x: plot.x(x), y: plot.y(y), arm, style });
    }
    placed.sort((a, b) => a.y - b.y);
    const taken = [];
    for (const { x, y, arm, style } of placed) {
      const size = 7.4 * arm.name.length, left = x + 14 + size > width - 4;
      let at = y + 4;
      while (taken.some((t) => Math.abs(t.at - at) < 14 && Math.abs(t.x - x) < size + 20)) at += 14;
      taken.push({ x, at });
      plot.text(left ? x - 12 : x + 12, at, arm.name, { anchor: left ? "end" : "start", colour: style.colour, weight: 600, size: 12.5 });
    }
    return plot;
  },
});

// by layer

const probed = () => group().runs.filter((run) => run.shown && run.probes);
const probeOptions = () => {
  const steps = probed().reduce((longest, run) => (run.probes.step.length > longest.length ? run.probes.step : longest), []);
  return [["last", "last probe"], ...steps.slice(0, -1).map((step, k) => [k, `step ${grouped(step)}`]).reverse()];
};
function byLayer(id, quantity, heading, label, caption) {
  return new Figure(id, {
    title: heading, heading,
    controls: [{ kind: "pick", name: "at", label: "At", start: "last", options: probeOptions }],
    caption,
    draw(figure, width) {
      const at = figure.get("at");
      const rowOf = (run) => (at === "last" ? run.probes[quantity].findLast((row) => row) : run.probes[quantity][Number(at)]);
      const series = visibleArms().map((arm) => ({ arm, runs: runsOf(arm.i).filter((run) => run.probes).map((run) => ({ run, row: rowOf(run) })).filter((each) => each.row) })).filter((each) => each.runs.length);
      if (!series.length) return "No probe is recorded yet, or all arms are hidden.";
      const count = Math.max(...series.flatMap((each) => each.runs.map((r) => r.row.length)));
      const ys = extent(series.flatMap((each) => each.runs.flatMap((r) => r.row)), { pad: 0.08, include: [0] });
      if (!ys) return "Nothing finite is recorded.";
      ys[0] = 0;
      const every = Math.ceil(count / Math.max(2, Math.floor(width / 45)));
      const plot = new Plot(width, 280, { left: 52, right: 16, top: 34, bottom: 46 },
        { domain: [1 - 0.25, count + 0.25], label: "layer", ticks: [...Array(count)].map((_, k) => k + 1).filter((k) => (k - 1) % every === 0), format: String },
        { domain: ys, label }, heading);
      for (const { arm, runs } of series) {
        const style = armStyle(arm.i);
        for (const { run, row } of runs) {
          plot.line(row.map((y, k) => [k + 1, y]), { colour: style.colour, width: 1, opacity: 0.4, name: arm.i });
          row.forEach((y, k) => isNumber(y) && plot.hit(plot.x(k + 1), plot.y(y), runName(run), () => [`layer ${k + 1}: ${digits(y, 4)}${quantity === "entropy" ? " nats" : ""}`]));
        }
        const middle = [...Array(count)].map((_, k) => { const own = runs.map((r) => r.row[k]).filter(isNumber); return [k + 1, own.length ? mean(own) : null]; });
        plot.line(middle, { colour: style.colour, width: 2.4, dash: style.dash, name: arm.i });
        if (count <= 32) for (const [x, y] of middle) if (isNumber(y)) plot.mark(plot.x(x), plot.y(y), style, { r: 4, name: arm.i });
      }
      return plot;
    },
  });
}
const entropy = byLayer("entropy", "entropy", "Entropy", "nats, mean over heads", "How spread out attention is. 0: each query looks at one token; towards 0 it collapses.");
const sink = byLayer("sink", "sink_mass", "Sink mass", "share on the first token, mean over heads", "How much attention is parked on the first token of the text. Near 1 a head does nothing.");

// logits

const layerOptions = () => {
  const counts = probed().flatMap((run) => run.probes.largest_logit.filter((row) => row).map((row) => row.length));
  return [["all", "largest over layers"], ...[...Array(Math.max(0, ...counts))].map((_, k) => [k, `layer ${k + 1}`])];
};
const logits = new Figure("logits", {
  title: "Growth of the logits",
  controls: [
    { name: "what", label: "Show", start: "largest_logit", options: () => [["largest_logit", "largest logit"], ["logit_change", "change between probes"]] },
    { name: "scale", label: "Scale", start: "linear", options: () => [["linear", "linear"], ["log", "log"]] },
    { kind: "pick", name: "layer", label: "Layer", start: "all", options: layerOptions },
  ],
  caption: (figure) => (figure.get("what") === "largest_logit" ? "The largest attention logit |q·k|/√D over the probe's tokens and heads. Its growth is what QK-norm, qk-clip and logit control are against." : "Root mean square over visible pairs and heads of how far logits moved from one probe to the next.") + " Thin: seeds; bold: their mean.",
  draw(figure, width) {
    const [what, log, layer] = [figure.get("what"), figure.get("scale") === "log", figure.get("layer")];
    const at = (row) => { const own = (row || []).filter(isNumber); return !row ? null : layer !== "all" ? row[Number(layer)] : own.length ? Math.max(...own) : null; };
    const series = visibleArms().map((arm) => ({
      arm, runs: runsOf(arm.i).filter((run) => run.probes).map((run) => ({ run, points: run.probes[what].map((row, k) => [run.probes.tokens[k], at(row)]).filter((p) => isNumber(p[0]) && isNumber(p[1]) && (!log || p[1] > 0)) })).filter((r) => r.points.length),
    })).filter((each) => each.runs.length);
    if (!series.length) return what === "logit_change" ? "A change needs two probes; there are none yet, or all arms are hidden." : "No probe is recorded yet, or all arms are hidden.";
    const all = series.flatMap((each) => each.runs.flatMap((r) => r.points));
    const xs = extent(all.map((p) => p[0]), { pad: 0.03, include: [0] }), ys = extent(all.map((p) => p[1]), { pad: 0.08, log, include: log ? [] : [0] });
    xs[0] = 0;
    if (!log) ys[0] = 0;
    const big = wide(width), longest = Math.max(...series.map((each) => each.arm.name.length)), right = big ? Math.min(190, 34 + 7.4 * longest) : 14;
    const plot = new Plot(width, big ? 340 : 290, { left: 58, right, top: 34, bottom: 46 }, { domain: xs, label: "training tokens" },
      { domain: ys, log, label: what === "largest_logit" ? "largest logit" : "root mean square change of logits" }, "Growth of the logits");
    const labels = [];
    for (const { arm, runs } of series) {
      const style = armStyle(arm.i);
      for (const { run, points } of runs) {
        plot.line(points, { colour: style.colour, width: 1, opacity: 0.4, name: arm.i });
        for (const [x, y] of points) plot.hit(plot.x(x), plot.y(y), runName(run), () => [`${digits(y, 4)} at ${grouped(x)} tokens`, ...statusLine(run)]);
      }
      const length = Math.min(...runs.map((r) => r.points.length));
      const middle = [...Array(length)].map((_, k) => [mean(runs.map((r) => r.points[k][0])), mean(runs.map((r) => r.points[k][1]))]);
      plot.line(middle, { colour: style.colour, width: 2.4, dash: style.dash, name: arm.i });
      for (const [x, y] of middle) plot.mark(plot.x(x), plot.y(y), style, { r: 4, name: arm.i });
      if (big) labels.push({ x: width - right, y: plot.y(middle.at(-1)[1]), text: arm.name, colour: style.colour });
    }
    plot.endLabels(labels);
    plot.named = big;
    return plot;
  },
});

// attention maps

const unpacked = new Map();
function triangleOf(text) {
  if (!unpacked.has(text)) {
    const raw = atob(text), numbers = new Float32Array(raw.length / 2);
    for (let i = 0; i < numbers.length; i++) numbers[i] = (raw.charCodeAt(2 * i) + 256 * raw.charCodeAt(2 * i + 1)) / 65535;
    unpacked.set(text, numbers);
  }
  return unpacked.get(text);
}
const headOptions = () => {
  const heads = Object.values(group().attention).flatMap((own) => (own.layers || []).map((layer) => layer.maps.length - 1));
  return [["0", "mean over heads"], ...[...Array(Math.max(0, ...heads))].map((_, k) => [String(k + 1), `head ${k + 1}`])];
};
const ATTENTION = { light: [[255, 255, 255], [207, 224, 250], [36, 89, 169], [16, 34, 66]], dark: [[27, 32, 38], [38, 66, 112], [110, 163, 245], [235, 243, 255]] };
function shade(weight) {
  const stops = ATTENTION[themeName()], at = Math.sqrt(Math.min(1, weight)) * 3, k = Math.min(2, Math.floor(at)), part = at - k;
  return stops[k].map((x, i) => Math.round(x + (stops[k + 1][i] - x) * part));
}
function mapImage(numbers, size) {
  const canvas = h("canvas", { width: size, height: size }), context = canvas.getContext("2d"), image = context.createImageData(size, size);
  for (let i = 0, k = 0; i < size; i++) for (let j = 0; j <= i; j++, k++) image.data.set([...shade(numbers[k]), 255], 4 * (i * size + j));
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}
const visibleToken = (token) => `“${token}”`;
const maps = new Figure("maps", {
  title: "Attention maps",
  controls: [{ kind: "pick", name: "head", label: "Show", start: "0", options: headOptions }],
  caption: () => {
    const own = Object.values(group().attention).find((each) => each.layers);
    const reasons = new Map();
    for (const [arm, each] of Object.entries(group().attention)) if (each.why) reasons.set(each.why, [...(reasons.get(each.why) || []), arm]);
    const why = own ? [...reasons].map(([reason, arms]) => ` ${arms.join(", ")}: ${reason}`).join("") : "";
    return (own ? `Rows are queries, columns keys, from the start of the text at the top left; the shade grows with the square root of the weight. The first seed of each arm reads the same ${own.tokens.length} tokens. ${own.notes.join(" ")}` : "") + why;
  },
  draw(figure, width) {
    const head = Number(figure.get("head"));
    const rows = visibleArms().map((arm) => ({ arm, own: group().attention[arm.name] })).filter(({ own }) => own && own.layers);
    if (!rows.length) {
      const own = Object.values(group().attention), reasons = [...new Set(own.map((each) => each.why).filter(Boolean))];
      return !own.length ? "Attention maps were left out of this report." : own.some((each) => each.layers) ? "All arms with attention maps are hidden." : `There are no attention maps: ${reasons.join(" ")}`;
    }
    const columns = Math.max(...rows.map(({ own }) => own.layers.length)), big = wide(width);
    const left = big ? Math.min(170, 24 + 7.6 * Math.max(...rows.map(({ arm }) => arm.name.length))) : 0, gap = big ? 18 : 8;
    const size = Math.floor(Math.min(260, (width - left - gap * columns - 2) / columns)), line = size + (big ? 18 : 30), top = 26;
    const plot = new Plot(width, top + line * rows.length + 40, { left: 0, right: 0, top, bottom: 0 }, null, null, "Attention maps");
    plot.named = true;
    const boxes = [];
    rows.forEach(({ arm, own }, r) => {
      const y = top + r * line + (big ? 0 : 16), style = armStyle(arm.i);
      plot.text(big ? left - 12 : 2, big ? y + size / 2 + 4 : y - 4, arm.name, { anchor: big ? "end" : "start", weight: 600, colour: style.colour });
      own.layers.forEach((layer, k) => {
        const x = left + k * (size + gap), count = own.tokens.length;
        if (r === 0) plot.text(x + size / 2, 14, `${layer.place} layer`, { colour: plot.c.soft, size: 12.5 });
        if (head >= layer.maps.length) return plot.text(x + size / 2, y + size / 2, "no such head", { colour: plot.c.faint, size: 12 });
        const numbers = triangleOf(layer.maps[head]);
        plot.layer.append(s("image", { class: "mark", "data-arm": arm.i, x, y, width: size, height: size, href: mapImage(numbers, count), style: "image-rendering:pixelated", preserveAspectRatio: "none" }));
        plot.layer.append(s("rect", { x, y, width: size, height: size, fill: "none", stroke: plot.c.grid }));
        plot.marks++;
        const cell = (i, j) => {
          const weight = numbers[(i * (i + 1)) / 2 + j];
          return { x: x + ((j + 0.5) * size) / count, y: y + ((i + 0.5) * size) / count, title: `${arm.name}, layer ${layer.index + 1}`, lines: () => [`query ${i + 1} ${visibleToken(own.tokens[i])}`, `key ${j + 1} ${visibleToken(own.tokens[j])}`, `weight ${fixed(weight, 3)}`] };
        };
        boxes.push({ x, y, count, cell });
        for (let i = 0; i < count; i++) { // by keyboard: the key each query looks at most
          let best = 0;
          for (let j = 1; j <= i; j++) if (numbers[(i * (i + 1)) / 2 + j] > numbers[(i * (i + 1)) / 2 + best]) best = j;
          const hit = cell(i, best);
          plot.hit(hit.x, hit.y, hit.title, hit.lines);
        }
        return undefined;
      });
    });
    plot.hitAt = (x, y) => {
      for (const box of boxes) {
        const j = Math.floor(((x - box.x) / size) * box.count), i = Math.floor(((y - box.y) / size) * box.count);
        if (i >= 0 && j >= 0 && i < box.count && j <= i) return box.cell(i, j);
      }
      return null;
    };
    const y = top + line * rows.length + 8, span = Math.min(160, width / 3), steps = 32;
    for (let k = 0; k < steps; k++) plot.layer.append(s("rect", { x: (left + (k * span) / steps).toFixed(1), y, width: (span / steps + 0.5).toFixed(2), height: 9, fill: `rgb(${shade((k / (steps - 1)) ** 2)})` }));
    [[0, "0"], [0.5, "0.25"], [1, "1"]].forEach(([part, text]) => plot.text(left + span * part, y + 24, text, { size: 11.5, colour: plot.c.soft, anchor: part === 0 ? "start" : "middle" }));
    plot.text(left + span + 14, y + 9, "weight", { size: 12, colour: plot.c.soft, anchor: "start" });
    return plot;
  },
});
