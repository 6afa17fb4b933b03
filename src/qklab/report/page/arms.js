// The group of runs that is shown, its arms, its metrics, and what they are counted in.

import { data, fixed, isNumber, mean, page, state } from "./core.js";

if (state.group >= data.groups.length) state.group = 0;
export const group = () => data.groups[state.group];
export const isHidden = (arm) => Boolean(state.hidden[state.group]?.[arm]);
export const visibleArms = () => group().arms.map((arm, i) => ({ ...arm, i })).filter((arm) => !isHidden(arm.i));
export const runsOf = (arm) => group().runs.filter((run) => run.arm === arm && run.shown);
export const baselineOf = (own) => own.study && own.arms.find((arm) => arm.name === own.study.baseline);
page.names = () => [group().title, group().corpus];
page.legend = visibleArms;

export const runName = (run) => `${group().arms[run.arm].name}, seed ${run.seed}`;
export const statusLines = (run) =>
  run.status === "finished"
    ? []
    : [run.status === "diverged" ? "diverged" : `not ended, ${Math.round(100 * run.done)} % done`];
export function seedsNote() {
  const most = Math.max(0, ...group().arms.map((_, i) => new Set(runsOf(i).map((run) => run.seed)).size));
  return most === 1 ? " One seed is an anecdote: it has no interval." : "";
}
export const tellSensitivity = ({ mean: middle, half }) =>
  fixed(middle, 3) + (isNumber(half) ? ` ± ${fixed(half, 3)}` : "");

// A view is a metric as it is measured, or its exponential where that has a name. Means are taken of the metric, so
// that the mean perplexity is that of the mean loss.
export const metricOf = (name) => data.metrics.find((metric) => metric.name === name);
export const ownMetric = () => metricOf(group().metric);
const views = data.metrics.flatMap((metric) => [
  { key: metric.name, metric, name: metric.label, unit: metric.unit, of: (x) => x },
  ...(metric.exponential
    ? [{ key: metric.exponential, metric, name: metric.exponential, unit: metric.exponential, of: Math.exp }]
    : []),
]);
const isMeasured = (view) =>
  group().runs.some((run) => [...run.curve[view.metric.name], valueOf(run.valid, view)].some(isNumber));
export function viewNames(fits = () => true) {
  const own = views.filter((view) => isMeasured(view) && fits(view));
  return (own.length ? own : views).map((view) => [view.key, view.name]);
}
export const viewOf = (key) => views.find((view) => view.key === key);
export const valueOf = (scores, view) => scores?.[view.metric.name] ?? null;
export const meanOf = (values, view) => view.of(mean(values));
export const axisName = (view) => (view.name === view.unit ? view.name : `${view.name}, ${view.unit}`);
export const finalScores = (run) => run.test || run.valid;
