// Tables of what every arm got and took, and of where every number comes from.

import { bytes, data, digits, fixed, grouped, h, hash, isNumber, short, time } from "./core.js";
import { makeTable } from "./table.js";
import { relativeCost } from "./answer.js";
import { group, metricOf, tellSensitivity, valueOf } from "./arms.js";

export function ledgerTable() {
  const { study, arms, lrs } = group(), took = (key) => (arm) => arm.ledger?.[key];
  const column = (name, key, write, small = (arm) => relativeCost(arm, key)) => ({
    name,
    csv: key,
    text: (arm) => (isNumber(took(key)(arm)) ? write(took(key)(arm)) : "–"),
    raw: took(key),
    small,
  });
  const scored = [...new Set(arms.flatMap((arm) => Object.keys(arm.ledger?.benchmarks ?? {})))];
  const benchmark = (name) => {
    const own = (arm) => arm.ledger?.benchmarks?.[name];
    const text = (arm) => (own(arm) ? fixed(own(arm).mean, 2) : "–");
    const small = (arm) =>
      own(arm)
        ? [
          isNumber(own(arm).error) ? `± ${fixed(own(arm).error, 2)}` : "one seed",
          isNumber(own(arm).chance) ? `chance ${fixed(own(arm).chance, 1)}` : "",
        ].filter(Boolean).join(", ")
        : null;
    return { name, csv: `benchmark_${name}`, text, raw: (arm) => own(arm)?.mean, small };
  };
  const rate = { name: "learning rate", csv: "learning_rate", raw: (arm) => arm.lr };
  const columns = [
    { name: "arm", text: (arm) => arm.name, isHead: true },
    {
      ...rate,
      text: (arm) => (isNumber(arm.lr) ? digits(arm.lr) : "none"),
      small: (arm) => (arm.ledger ? `of ${arm.ledger.learning_rates.length} tried` : null),
    },
    { csv: "learning_rates_tried", raw: (arm) => arm.ledger?.learning_rates.join(" ") },
    { csv: "learning_rates_among_which_the_best_is", raw: (arm) => arm.tuning?.best?.join(" ") },
    {
      name: "sensitivity to it",
      csv: "learning_rate_sensitivity",
      text: (arm) => (arm.tuning?.sensitivity ? tellSensitivity(arm.tuning.sensitivity) : "–"),
      raw: (arm) => arm.tuning?.sensitivity?.mean,
      small: () => "nats",
    },
    column("runs", "runs", String, null),
    column("diverged", "diverged", String, null),
    column("parameters", "parameters", grouped),
    column("training FLOPs", "training_flops", short),
    column("tokens", "tokens", short),
    column("training time", "seconds", time),
    column("tokens per second", "tokens_per_second", grouped),
    column("peak memory", "peak_memory_bytes", bytes),
    column("cache per token", "cache_bytes_per_token", bytes),
    ...scored.map(benchmark),
  ];
  const rates = lrs.map((lr) => digits(lr)).join(", ");
  const beside = study ? ` Small: against ${study.baseline}. Learning rates tried by every arm: ${rates}.` : "";
  const asked = scored.length
    ? ` ${scored.join(", ")}: points of 100 at the chosen learning rate, ± the standard error over seeds.`
    : "";
  const lead =
    `What each arm got and took, mean over its runs.${beside} Times hold for the machine and its load.${asked}`;
  return makeTable("ledger", columns, arms, { lead });
}

function factsTable() {
  const { study, corpus, runs, machines } = group();
  const distinct = (key) => [...new Set(runs.map((run) => run[key]).filter(Boolean))];
  const commits = distinct("commit"), hashes = distinct("data"), facts = [];
  const tell = (what, value) => facts.push({ what, value });
  tell("study", study ? study.name : "none: single runs");
  if (study) tell("fingerprint of the study", study.fingerprint);
  tell("corpus", corpus);
  const alike = hashes.length > 1 ? "hashes of the data (they differ: not the same text)" : "hash of the data";
  tell(alike, hashes.join(", ") || "–");
  tell(commits.length > 1 ? "commits (they differ)" : "commit", commits.join(", ") || "not from a checkout");
  machines.forEach((machine, k) => tell(`machine ${k + 1}`, machine));
  if (study) {
    const { label, unit } = metricOf(study.metric), times = study.analyses > 1 ? ` and ${study.analyses} analyses` : "";
    const measure = label === unit ? unit : `${label}, ${unit}`;
    const chances = `α = ${study.alpha} over all arms${times}, margin ±${study.margin}`;
    tell("compared on", `${measure}, on test text, learning rates chosen on validation; ${chances}`);
  }
  const columns = [
    { name: "", csv: "what", text: (row) => row.what, isHead: true },
    { name: "", csv: "value", kind: "code wrap", text: (row) => row.value },
  ];
  return makeTable("facts", columns, facts, { lead: "Where every number comes from." });
}

function runsTable() {
  const { arms, runs, machines } = group();
  const scores = ["test", "valid"].flatMap((split) =>
    data.metrics.filter((metric) => runs.some((run) => isNumber(valueOf(run[split], { metric })))).map((metric) => ({
      name: `${split === "test" ? "test" : "validation"}, ${metric.unit}`,
      csv: `${split === "test" ? "test" : "validation"}_${metric.name}`,
      text: (run) => fixed(valueOf(run[split], { metric }), 4),
      raw: (run) => valueOf(run[split], { metric }),
    }))
  );
  const short12 = (name, key, csv = key) => ({
    name,
    csv,
    kind: "code",
    text: (run) => hash(run[key]) + (run[key]?.endsWith("+changes") ? "+changes" : ""),
    raw: (run) => run[key],
  });
  const status = (run) => (run.status === "not ended" ? `not ended, ${Math.round(100 * run.done)} %` : run.status);
  const columns = [
    { name: "arm", text: (run) => arms[run.arm].name, isHead: true },
    { name: "learning rate", csv: "learning_rate", text: (run) => digits(run.lr), raw: (run) => run.lr },
    { name: "seed", text: (run) => String(run.seed) },
    { name: "status", kind: "text", text: status, raw: (run) => run.status },
    ...scores,
    { name: "steps", text: (run) => grouped(run.steps), raw: (run) => run.steps },
    { name: "skipped", text: (run) => String(run.skipped ?? "–"), raw: (run) => run.skipped },
    { name: "training time", csv: "seconds", text: (run) => time(run.seconds), raw: (run) => run.seconds },
    short12("commit", "commit"),
    short12("data", "data"),
    short12("settings", "fingerprint"),
    short12("run", "id", "run_id"),
    { name: "folder", kind: "code", text: (run) => run.folder },
    { name: "machine", kind: "text", text: (run) => String(run.machine + 1), raw: (run) => machines[run.machine] },
  ];
  return makeTable("runs", columns, runs, {
    isTall: runs.length > 12,
    lead: "Hashes are shortened here and whole in the CSV.",
  });
}

function settingsTable() {
  const { arms, settings } = group(), differing = [...new Set(arms.flatMap((arm) => Object.keys(arm.settings)))];
  const show = (x) => (x === undefined || x === null ? "–" : typeof x === "object" ? JSON.stringify(x) : String(x));
  const column = (name, own) => ({ name, kind: "code", text: (setting) => show(own[setting] ?? settings[setting]) });
  const values = differing.length ? arms.map((arm) => column(arm.name, arm.settings)) : [column("value", settings)];
  const columns = [{ name: "setting", kind: "code", text: (setting) => setting }, ...values];
  const lead = "Settings that differ between arms come first. Seed and learning rate are those of each run.";
  return makeTable("settings", columns, [...differing, ...Object.keys(settings)], { isTall: true, lead });
}

// made when it is opened first, or printed
function foldAway(title, isOpen, make) {
  const details = h("details", { open: isOpen }, h("summary", {}, title));
  details.fill = () => details.children.length === 1 && details.append(make());
  details.addEventListener("toggle", details.fill);
  if (isOpen) details.fill();
  return details;
}
export function provenanceTables() {
  const many = group().runs.length;
  return [
    factsTable(),
    foldAway(`All ${many} runs`, many <= 40, runsTable),
    foldAway("All settings", false, settingsTable),
  ];
}
