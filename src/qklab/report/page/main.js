// The page: verdict, tables, what is shown, light and dark.

const body = (id) => document.querySelector(`#${id} .body`);

function table(id, columns, rows, { tall = false, lead = "" } = {}) {
  const csv = () => {
    const cell = (x) => { const text = x === null || x === undefined ? "" : String(x); return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
    return [columns.map((c) => c.csv || c.name), ...rows.map((row) => columns.map((c) => (c.raw || c.text)(row)))].map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
  };
  const element = h("div", { class: "table", id: `table-${id}` },
    h("div", { class: "bar" }, h("p", { class: "faint" }, lead), h("div", { class: "save" }, h("button", { type: "button", class: "quiet", "data-save": "csv", "aria-label": `Download the table ${id} as CSV`, onclick: () => save(fileName(id, "csv"), csv(), "text/csv") }, "CSV"))),
    h("div", { class: tall ? "scroll tall" : "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${id}` },
      h("table", {},
        h("thead", {}, h("tr", {}, columns.filter((c) => c.kind !== "only-csv").map((c) => h("th", { scope: "col", class: c.kind }, c.name)))),
        h("tbody", {}, rows.map((row) => h("tr", {}, columns.filter((c) => c.kind !== "only-csv").map((c, k) => {
          const text = c.text(row), small = c.small ? c.small(row) : null;
          return k === 0 && c.head ? h("th", { scope: "row" }, text) : h("td", { class: c.kind }, text, small ? h("small", {}, small) : null);
        })))))));
  element.csv = csv;
  return element;
}

function relative(arm, name) {
  const study = group().study, base = study && group().arms.find((a) => a.name === study.baseline);
  const own = arm.ledger && arm.ledger[name], other = base && base.ledger && base.ledger[name];
  if (!isNumber(own) || !isNumber(other) || !other || arm.name === base.name) return null;
  const change = 100 * (own / other - 1);
  return Math.abs(change) < 0.05 ? "same" : perCent(change);
}

// verdict

function howLarge(own) {
  const base = own.arms.find((arm) => arm.name === own.study.baseline), took = base && base.ledger;
  return took && isNumber(took.parameters) && isNumber(took.tokens) ? `${short(took.parameters)} parameters trained on ${short(took.tokens)} tokens; ` : "";
}

const WORDS = { better: "better", worse: "worse", equivalent: "equivalent", open: "open", diverged: "diverged", "one seed": "one seed" };
function verdictOf(own, k) {
  const before = state.group;
  state.group = k; // the helpers speak of the group that is shown
  const study = own.study, unit = own.metric === "loss" ? "nats per token" : "bits per byte";
  const cost = (arm) => {
    const took = arm.ledger || {}, told = [];
    const step = (name) => { const runs = runsOf(own.arms.indexOf(arm)).map((r) => r[name]).filter(isNumber); return runs.length ? mean(runs) : null; };
    const change = (name) => { const r = relative(arm, name); return r && r !== "same" ? ` (${r})` : ""; };
    if (isNumber(took.cache_bytes_per_token)) told.push(`cache ${bytes(took.cache_bytes_per_token)} per token${change("cache_bytes_per_token")}`);
    if (isNumber(step("step_seconds"))) told.push(`${time(step("step_seconds"))} a step`);
    if (isNumber(took.parameters)) told.push(`${grouped(took.parameters)} parameters${change("parameters")}`);
    if (isNumber(took.peak_memory_bytes)) told.push(`${bytes(took.peak_memory_bytes)} memory${change("peak_memory_bytes")}`);
    return told.join(" · ");
  };
  const quality = (arm) => {
    const runs = runsOf(own.arms.indexOf(arm)).filter((run) => run.status === "finished").map(score).filter(Boolean);
    if (!runs.length) return "No run has finished yet.";
    const loss = mean(runs.map((r) => r.loss));
    return `${fixed(loss, 4)} nats per token, perplexity ${digits(Math.exp(loss), 4)}, ${fixed(mean(runs.map((r) => r.bits)), 4)} bits per byte on test text, mean of ${runs.length === 1 ? "1 seed" : `${runs.length} seeds`}.`;
  };
  const rows = own.arms.map((arm, i) => {
    const v = arm.verdict, isBase = study && arm.name === study.baseline;
    const chip = v ? h("span", { class: `chip ${v.verdict.split(" ")[0]}` }, WORDS[v.verdict]) : h("span", { class: "chip" }, isBase ? "baseline" : study ? "no result yet" : "run");
    return h("li", {},
      h("div", { class: "who" }, h("span", { class: "name" }, swatch(i), arm.name), chip),
      h("div", {}, h("p", {}, v ? v.sentence : quality(arm)),
        arm.learning && arm.learning.efficiency ? h("p", { class: "took" }, arm.learning.efficiency) : null,
        h("p", { class: "took" }, cost(arm))));
  });
  const going = own.ended < own.planned;
  const element = h("div", { class: "answer" },
    h("p", { class: "headline" }, own.headline),
    h("p", { class: "measure" }, study ? `${howLarge(own)}${unit} on test text, lower is better; ${study.seeds} ${study.seeds === 1 ? "seed" : "seeds"}, arms matched on ${study.match}, every arm tuned over ${study.lrs.length === 1 ? "the same learning rate" : `the same ${study.lrs.length} learning rates`}` : "Each arm is what has the same settings but for the seed."),
    going && study ? h("p", { class: "note" }, h("progress", { max: own.planned, value: own.ended }), `${own.ended} of ${own.planned} runs have ended: everything here is provisional.`) : null,
    own.notes.map((note) => h("p", { class: "note" }, note)),
    h("ul", { class: "arms" }, rows),
    own.settling ? h("p", { class: "settle" }, own.settling, own.command ? [" Run: ", h("code", {}, own.command)] : null) : null);
  state.group = before;
  return element;
}

// what is shown

function choose() {
  const nav = document.getElementById("choose");
  const tabs = data.groups.length < 2 ? null : h("div", { class: "groups", role: "tablist", "aria-label": "Corpus" }, data.groups.map((own, k) =>
    h("button", { type: "button", role: "tab", "data-group": k, "aria-selected": String(k === state.group), onclick: () => { state.group = k; keep(); fill(); } }, new Set(data.groups.map((g) => g.title)).size > 1 ? `${own.title} · ${own.corpus}` : own.corpus)));
  const had = nav.contains(document.activeElement) ? { ...document.activeElement.dataset } : null;
  nav.replaceChildren(...[tabs, ...group().arms.map((arm, i) =>
    h("button", { type: "button", class: "legend", "data-arm": i, "aria-pressed": String(!isHidden(i)), title: "Show or hide this arm", onclick: () => {
      state.hidden[state.group] = { ...(state.hidden[state.group] || {}), [i]: !isHidden(i) };
      keep(); choose(); redraw();
    } }, swatch(i), arm.name))].filter(Boolean));
  if (had) nav.querySelector(had.arm !== undefined ? `[data-arm="${had.arm}"]` : `[data-group="${had.group}"]`)?.focus();
}

// tables

function fillLedger() {
  const took = (name) => (arm) => arm.ledger && arm.ledger[name];
  const column = (name, key, text) => ({ name, csv: key, text: (arm) => (isNumber(took(key)(arm)) ? text(took(key)(arm)) : "–"), raw: took(key), small: (arm) => relative(arm, key) });
  const columns = [
    { name: "arm", text: (arm) => arm.name, head: true },
    { name: "learning rate", csv: "learning_rate", text: (arm) => (isNumber(arm.lr) ? digits(arm.lr) : "none"), raw: (arm) => arm.lr, small: (arm) => (arm.ledger ? `of ${arm.ledger.learning_rates.length} tried` : null) },
    { name: "learning rates tried", csv: "learning_rates_tried", kind: "only-csv", text: () => "", raw: (arm) => arm.ledger && arm.ledger.learning_rates.join(" ") },
    { name: "runs", text: (arm) => (arm.ledger ? String(arm.ledger.runs) : "–"), raw: took("runs") },
    { name: "diverged", text: (arm) => (arm.ledger ? String(arm.ledger.diverged) : "–"), raw: took("diverged") },
    column("parameters", "parameters", grouped),
    column("training FLOPs", "training_flops", short),
    column("tokens", "tokens", short),
    column("training time", "seconds", time),
    column("tokens per second", "tokens_per_second", grouped),
    column("peak memory", "peak_memory_bytes", bytes),
    column("cache per token", "cache_bytes_per_token", bytes),
  ];
  const study = group().study;
  const lead = `What each arm got and took, mean over its runs.${study ? ` Small: against ${study.baseline}. Learning rates tried by every arm: ${study.lrs.map((x) => digits(x)).join(", ")}.` : ""} Times hold for the machine and its load.`;
  body("ledger").replaceChildren(table("ledger", columns, group().arms, { lead }));
}

function fillProvenance() {
  const own = group(), study = own.study;
  const differing = [...new Set(own.arms.flatMap((arm) => Object.keys(arm.settings)))];
  const shown = (x) => (x === undefined || x === null ? "–" : typeof x === "object" ? JSON.stringify(x) : String(x));
  const settings = [...differing.map((name) => ({ name, own: true })), ...Object.keys(own.settings).map((name) => ({ name }))];
  const runColumns = [
    { name: "arm", text: (run) => own.arms[run.arm].name, head: true },
    { name: "learning rate", csv: "learning_rate", text: (run) => digits(run.lr), raw: (run) => run.lr },
    { name: "seed", text: (run) => String(run.seed) },
    { name: "status", kind: "text", text: (run) => (run.status === "not ended" ? `not ended, ${Math.round(100 * run.done)} %` : run.status), raw: (run) => run.status },
    { name: "test, nats per token", csv: "test_loss", text: (run) => fixed(run.test && run.test.loss, 4), raw: (run) => run.test && run.test.loss },
    { name: "test, bits per byte", csv: "test_bits_per_byte", text: (run) => fixed(run.test && run.test.bits, 4), raw: (run) => run.test && run.test.bits },
    { name: "validation, nats per token", csv: "validation_loss", text: (run) => fixed(run.valid && run.valid.loss, 4), raw: (run) => run.valid && run.valid.loss },
    { name: "steps", text: (run) => grouped(run.steps), raw: (run) => run.steps },
    { name: "skipped", text: (run) => (isNumber(run.skipped) ? String(run.skipped) : "–"), raw: (run) => run.skipped },
    { name: "training time", csv: "seconds", text: (run) => time(run.seconds), raw: (run) => run.seconds },
    { name: "commit", kind: "code", text: (run) => (run.commit ? hash(run.commit) + (run.commit.endsWith("+changes") ? "+changes" : "") : "none"), raw: (run) => run.commit },
    { name: "data", kind: "code", text: (run) => hash(run.data), raw: (run) => run.data },
    { name: "settings", csv: "fingerprint", kind: "code", text: (run) => hash(run.fingerprint), raw: (run) => run.fingerprint },
    { name: "run", csv: "run_id", kind: "code", text: (run) => hash(run.id), raw: (run) => run.id },
    { name: "folder", kind: "code", text: (run) => run.folder },
    { name: "machine", kind: "text", text: (run) => String(run.machine + 1), raw: (run) => own.machines[run.machine] },
  ];
  const later = (title, open, make) => {
    const details = h("details", {}, h("summary", {}, title));
    const fillIn = () => { if (details.children.length === 1) details.append(...make()); };
    details.fillIn = fillIn;
    details.addEventListener("toggle", fillIn);
    if (open) { details.open = true; fillIn(); }
    return details;
  };
  const sets = (key) => [...new Set(own.runs.map((run) => run[key]).filter(Boolean))];
  const commits = sets("commit"), hashes = sets("data");
  const facts = [
    { what: "study", value: study ? study.name : "none: single runs" },
    ...(study ? [{ what: "fingerprint of the study", value: study.fingerprint }] : []),
    { what: "corpus", value: own.corpus },
    { what: hashes.length > 1 ? "hashes of the data (they differ: not the same text)" : "hash of the data", value: hashes.join(", ") || "–" },
    { what: commits.length > 1 ? "commits (they differ)" : "commit", value: commits.join(", ") || "not from a checkout" },
    ...own.machines.map((machine, k) => ({ what: `machine ${k + 1}`, value: machine })),
    ...(study ? [{ what: "compared on", value: `${study.metric === "loss" ? "loss, nats per token" : "bits per byte"}, on test text, learning rates chosen on validation; α = ${study.alpha} over all arms${study.looks > 1 ? ` and ${study.looks} looks` : ""}, margin ±${study.margin}` }] : []),
  ];
  body("provenance").replaceChildren(
    table("facts", [{ name: "", csv: "what", text: (row) => row.what, head: true }, { name: "", csv: "value", kind: "code wrap", text: (row) => row.value }], facts, { lead: "Where every number comes from." }),
    later(`All ${own.runs.length} runs`, own.runs.length <= 40, () => [table("runs", runColumns, own.runs, { tall: own.runs.length > 12, lead: "Hashes are shortened here and whole in the CSV." })]),
    later("All settings", false, () => [
      table("settings", [{ name: "setting", kind: "code", text: (row) => row.name },
        ...(differing.length ? own.arms.map((arm) => ({ name: arm.name, kind: "code", text: (row) => shown(row.own ? arm.settings[row.name] : own.settings[row.name]) })) : [{ name: "value", kind: "code", text: (row) => shown(own.settings[row.name]) }]),
      ], settings, { tall: true, lead: "Settings that differ between arms come first. Seed and learning rate are those of each run." }),
    ]));
}

// the whole

function fill() {
  choose();
  fillLedger();
  fillProvenance();
  redraw();
}

function setTheme() {
  if (state.theme) root.dataset.theme = state.theme; else delete root.dataset.theme;
  document.getElementById("theme").textContent = dark() ? "Light" : "Dark";
}
function recolour() {
  setTheme();
  body("verdict").replaceChildren(...data.groups.map(verdictOf));
  choose();
  redraw();
}

function begin() {
  const names = [...new Set(data.groups.map((own) => own.title))];
  document.getElementById("title").textContent = names.join(", ");
  const runs = data.groups.reduce((n, own) => n + own.runs.length, 0), ended = data.groups.reduce((n, own) => n + own.ended, 0);
  const diverged = data.groups.reduce((n, own) => n + own.runs.filter((run) => run.status === "diverged").length, 0);
  document.getElementById("meta").textContent = [`${data.made}`, `${ended} ${ended === 1 ? "run" : "runs"} ended${runs > ended ? `, ${runs - ended} not` : ""}`, diverged ? `${diverged} diverged` : null, new Set(data.groups.map((own) => own.corpus)).size > 1 ? `${data.groups.length} comparisons` : null].filter(Boolean).join(" · ");
  document.getElementById("foot").textContent = `Made by qklab ${data.version} from the run directories; the file is complete in itself and asks nothing of any network.`;
  setTheme();
  body("verdict").append(...data.groups.map(verdictOf));
  const place = { forest: [forest], curves: [curves], rates: [rates], cost: [cost], maps: [maps], logits: [logits] };
  for (const [id, own] of Object.entries(place)) body(id).append(...own.map((figure) => figure.element));
  body("layers").append(h("div", { class: "pair" }, entropy.element, sink.element));
  fill();
  figures.forEach((figure) => nearby.observe(figure.element));
  document.getElementById("theme").addEventListener("click", () => { state.theme = dark() ? "light" : "dark"; keep(); recolour(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  let wait = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(wait);
    wait = requestAnimationFrame(() => figures.forEach((figure) => { if (figure.width && Math.abs(figure.plotBox.clientWidth - figure.width) > 2) figure.update(); }));
  }).observe(document.querySelector("main"));
  addEventListener("beforeprint", () => {
    printing = true;
    root.dataset.theme = "light";
    document.querySelectorAll("details").forEach((details) => { details.fillIn?.(); });
    figures.forEach((figure) => { figure.fresh = false; figure.render(); });
  });
  addEventListener("afterprint", () => { printing = false; recolour(); });
  addEventListener("scroll", hideTip, { passive: true });
  if (root.dataset.watch) watch(Number(root.dataset.watch));
}

// while runs are going on: ask whoever serves the page whether there is news
function watch(seconds) {
  let first = null;
  setInterval(async () => {
    try {
      const now = await (await fetch("version", { cache: "no-store" })).text();
      if (first !== null && now !== first) location.reload();
      first ??= now;
    } catch { /* the server has ended; the page stays as it is */ }
  }, 1000 * seconds);
}

begin();
