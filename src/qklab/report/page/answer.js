// The verdict on each group of runs: a headline, and for every arm what was found and what it costs.

import { bytes, data, digits, fixed, grouped, h, isNumber, mean, perCent, plural, short, signed } from "./core.js";
import { state, time } from "./core.js";
import { swatch } from "./colours.js";
import { baselineOf, finalScores, group, metricOf, runsOf, valueOf } from "./arms.js";

// an arm's entry in the ledger against the baseline's; null where there is nothing to compare
export function relativeCost(arm, name) {
  const base = baselineOf(group()), own = arm.ledger?.[name], other = base?.ledger?.[name];
  if (!isNumber(own) || !isNumber(other) || !other || arm.name === base.name) return null;
  const change = 100 * (own / other - 1);
  return Math.abs(change) < 0.05 ? "same" : perCent(change);
}
function tellCost(arm, runs) {
  const ledger = arm.ledger || {}, steps = runs.map((run) => run.step_seconds).filter(isNumber);
  const tell = (name, write) => {
    const change = relativeCost(arm, name), beside = change && change !== "same" ? ` (${change})` : "";
    return isNumber(ledger[name]) ? write(ledger[name]) + beside : null;
  };
  const costs = [
    tell("cache_bytes_per_token", (x) => `cache ${bytes(x)} per token`),
    steps.length ? `${time(mean(steps))} a step` : null,
    tell("parameters", (x) => `${grouped(x)} parameters`),
    tell("peak_memory_bytes", (x) => `${bytes(x)} memory`),
  ];
  return costs.filter(Boolean).join(" · ");
}
function tellQuality(runs) {
  const ended = runs.filter((run) => run.status === "finished").map(finalScores).filter(Boolean);
  const told = data.metrics.flatMap((metric) => {
    const values = ended.map((scores) => valueOf(scores, { metric })).filter(isNumber);
    if (!values.length) return [];
    const value = mean(values),
      other = metric.exponential ? [`${metric.exponential} ${digits(Math.exp(value), 4)}`] : [];
    return [`${fixed(value, 4)} ${metric.unit}`, ...other];
  });
  if (!told.length) return "No run has finished yet.";
  return `${told.join(", ")} on test text, mean of ${plural(ended.length, "seed")}.`;
}
// what other tests than the one that decides say of the same seeds
function tellOtherTests(paired) {
  if (!isNumber(paired?.sign_flip_p)) return null;
  const { bootstrap_low: low, bootstrap_high: high, sign_flip_p: p } = paired;
  const bootstrap = isNumber(low) ? `${signed(low, 4)} to ${signed(high, 4)}` : "none from fewer than 5 seeds";
  return `Beside it: bootstrap interval ${bootstrap}; sign-flip test p = ${digits(p, 2)}`;
}
function tellArm(i, name, verdict, word, said, took) {
  const chip = h("span", { class: verdict ? `chip ${word.split(" ")[0]}` : "chip" }, word);
  const who = h("div", { class: "who" }, h("span", { class: "name" }, swatch(i), name), chip);
  const beside = [tellOtherTests(verdict?.paired), ...took].filter(Boolean);
  return h("li", {}, who, h("div", {}, h("p", {}, said), beside.map((line) => h("p", { class: "took" }, line))));
}
function armAnswer(own, arm, i) {
  const { verdict, learning } = arm, runs = runsOf(i), none = own.study ? "no result yet" : "run";
  const word = verdict?.verdict ?? (arm === baselineOf(own) ? "baseline" : none);
  const said = verdict ? verdict.sentence : tellQuality(runs);
  return tellArm(i, arm.name, verdict, word, said, [learning?.efficiency, tellCost(arm, runs)]);
}
function tellMeasure(own) {
  const { study } = own,
    { unit, lower_is_better } = metricOf(own.metric),
    { parameters, tokens } = baselineOf(own)?.ledger || {};
  if (!study) return "Each arm is what has the same settings but for the seed.";
  const isOneOfSeveral = data.groups.some(({ title }) => title !== own.title); // such as the sizes of one study
  const isSized = isNumber(parameters) && isNumber(tokens);
  const size = isSized ? `${short(parameters)} parameters trained on ${short(tokens)} tokens; ` : "";
  const rates = own.lrs.length === 1 ? "the same learning rate" : `the same ${own.lrs.length} learning rates`;
  return `${isOneOfSeveral ? `${own.title}: ` : ""}${size}${unit} on test text, ${
    lower_is_better ? "lower" : "higher"
  } is better; ${plural(study.seeds, "seed")}, ` +
    `arms matched on ${study.match}, every arm tuned over ${rates}`;
}
function groupAnswer(own, k) {
  const before = state.group;
  state.group = k; // the functions above speak of the group that is shown
  const progress = h("progress", { max: own.planned, value: own.ended });
  const sofar = `${own.ended} of ${own.planned} runs have ended: everything here is provisional.`;
  const command = own.command ? [" Run: ", h("code", {}, own.command)] : null;
  const element = h(
    "div",
    { class: "answer" },
    h("p", { class: "headline" }, own.headline),
    h("p", { class: "measure" }, tellMeasure(own)),
    own.study && own.ended < own.planned ? h("p", { class: "note" }, progress, sofar) : null,
    own.notes.map((note) => h("p", { class: "note" }, note)),
    h("ul", { class: "arms" }, own.arms.map((arm, i) => armAnswer(own, arm, i))),
    own.settling ? h("p", { class: "settle" }, own.settling, command) : null,
  );
  state.group = before;
  return element;
}
const averageAnswer = (own, { headline, notes, verdicts }) =>
  h(
    "div",
    { class: "answer" },
    h("p", { class: "headline" }, headline),
    notes.map((note) => h("p", { class: "note" }, note)),
    h(
      "ul",
      { class: "arms" },
      Object.entries(verdicts).map(([arm, verdict]) =>
        tellArm(own.order.indexOf(arm), arm, verdict, verdict.verdict, verdict.sentence, [])
      ),
    ),
  );
const allAverages = () => data.across.flatMap((own) => own.averages.map((average) => averageAnswer(own, average)));
export const allAnswers = () => [...data.groups.map(groupAnswer), ...allAverages()];
