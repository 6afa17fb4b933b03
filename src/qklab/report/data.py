"""Everything the report shows, gathered from run directories into one plain dictionary.

The page computes nothing that is a finding: differences, intervals, verdicts and chosen learning rates are made here,
by the study's own code, and the page draws them.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import qklab
from qklab.report.findings import found_in_runs, verdict_told
from qklab.report.learning import compared
from qklab.report.maps import Maps
from qklab.runs.directory import RunDirectory, RunError
from qklab.study.execute import read_spec
from qklab.study.findings import Findings, findings_of
from qklab.study.looks import read_looks
from qklab.study.plan import Planned
from qklab.study.results import Result
from qklab.study.spec import StudySpec
from qklab.train.same import flat

TRAIN_POINTS, PROBES = 200, 12
PER_RUN = {"seed", "optimiser.lr"}
MEAN, LARGEST, RMS = "mean", "largest", "rms"
QUANTITIES = {"entropy": MEAN, "sink_mass": MEAN, "largest_logit": LARGEST, "logit_change": RMS}


@dataclass
class Run:
    """A run directory as read."""

    folder: Path
    record: dict[str, Any]
    summary: dict[str, Any] | None
    settings: dict[str, Any]
    planned: Planned

    @property
    def result(self) -> Result | None:
        return None if self.summary is None else Result(self.planned, self.summary["status"], self.summary)


@dataclass
class Group:
    """Runs on one corpus that are shown together."""

    title: str
    corpus: str
    folder: Path
    study: StudySpec | None
    arms: list[str]
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def gather(paths: Sequence[Path], maps: Maps | None = None) -> dict[str, Any]:
    """The dictionary behind the page, from study folders and run directories, finished or not."""
    groups: list[Group] = []
    alone: list[Path] = []
    for path in found(paths):
        if (path / "study.json").exists():
            groups += of_study(path)
        else:
            alone.append(path)
    groups += of_runs(alone)
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": qklab.__version__,
        "groups": [told(group, maps) for group in groups],
    }


def found(paths: Sequence[Path]) -> Iterator[Path]:
    """The study folders and run directories at or below the paths, each once; runs of a study are its own."""
    seen: set[Path] = set()
    for path in paths:
        if not path.is_dir():
            raise RunError(f"{path} is no folder; a report is made from study folders and run directories.")
        some = False
        for folder, below, files in os.walk(path):
            below.sort()
            if "study.json" in files or "run.json" in files:
                below.clear()
                some = True
                if (here := Path(folder)).resolve() not in seen:
                    seen.add(here.resolve())
                    yield here
        if not some:
            raise RunError(
                f"{path} holds neither a study (study.json) nor runs (run.json) yet; name a folder that does."
            )


def of_study(folder: Path) -> list[Group]:
    """A group per corpus of a study."""
    spec = read_spec(folder / "study.json")
    groups: list[Group] = []
    for corpus in spec.corpora:
        group = Group(spec.name, corpus, folder, spec, list(spec.arms))
        for arm in spec.arms:
            for lr in spec.lrs:
                for seed in range(spec.seeds):
                    planned = Planned(corpus, arm, lr, seed)
                    add(group, planned.folder(folder), planned)
        groups.append(group)
    return groups


def add(group: Group, folder: Path, planned: Planned) -> None:
    directory = RunDirectory(folder)
    if not directory.exists():
        return
    try:
        record = directory.read()
        group.runs.append(Run(folder, record, directory.summary(), flat(record["spec"]), planned))
    except RunError as error:
        group.notes.append(f"Left out: {error}")


def of_runs(folders: Sequence[Path]) -> list[Group]:
    """Runs without a study, a group per corpus. An arm is what has the same settings but for the seed."""
    read: list[tuple[Path, dict[str, Any], dict[str, Any]]] = []
    notes: list[str] = []
    for folder in folders:
        try:
            record = RunDirectory(folder).read()
            read.append((folder, record, flat(record["spec"])))
        except RunError as error:
            notes.append(f"Left out: {error}")
    names = arm_names([(record.get("name", folder.name), settings) for folder, record, settings in read])
    groups: dict[str, Group] = {}
    for (folder, record, settings), arm in zip(read, names, strict=True):
        corpus = str(settings.get("corpus.source"))
        group = groups.setdefault(corpus, Group("runs", corpus, Path(os.path.commonpath(folders)), None, [], [], notes))
        if arm not in group.arms:
            group.arms.append(arm)
        add(group, folder, Planned(corpus, arm, settings.get("optimiser.lr", math.nan), record["spec"].get("seed", 0)))
    if notes and not groups:
        raise RunError(notes[0])
    return list(groups.values())


def arm_names(runs: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """A name per run: the model's own, and where different runs share it, the settings that tell them apart."""
    keys = [tuple(sorted((k, str(v)) for k, v in s.items() if k not in ("seed", "corpus.source"))) for _, s in runs]
    result: list[str] = []
    for (name, settings), key in zip(runs, keys, strict=True):
        others = [s for (n, s), k in zip(runs, keys, strict=True) if n == name and k != key]
        apart = sorted(
            k for k in settings if k not in ("seed", "corpus.source") and any(s.get(k) != settings[k] for s in others)
        )
        shown = ", ".join(f"{k.rsplit('.', 1)[-1]} {settings[k]}" for k in apart[:3])
        result.append(f"{name} · {shown}" if shown else name)
    return result


def told(group: Group, maps: Maps | None) -> dict[str, Any]:
    """A group as the page gets it."""
    results = [result for run in group.runs if (result := run.result) is not None]
    if group.study is not None:
        findings = findings_of(group.study, results, group.corpus, read_looks(group.folder))
    else:
        findings = found_in_runs(results, group.corpus, group.arms)
    shown = [run for run in group.runs if is_shown(run, group, findings)]
    machines: list[str] = []
    common = common_settings(group.runs)
    runs = [run_told(run, group, run in shown, machines) for run in group.runs]
    return {
        "title": group.title,
        "corpus": group.corpus,
        "folder": group.folder.name,
        "study": None if group.study is None else study_told(group.study),
        "metric": findings.metric,
        "planned": findings.planned or len(group.runs),
        "ended": len(results),
        "headline": findings.headline,
        "settling": findings.settling,
        "command": findings.command,
        "notes": [*findings.notes, *group.notes],
        "arms": [
            {
                "name": arm,
                "lr": findings.chosen.get(arm),
                "verdict": verdict_told(findings, group.study.baseline, arm) if group.study else None,
                "ledger": findings.ledgers.get(arm),
                "learning": learning(group, runs, arm),
                "settings": own_settings(group.runs, arm, common),
            }
            for arm in group.arms
        ],
        "settings": common,
        "runs": runs,
        "machines": machines,
        "attention": {} if maps is None else maps.of({arm: first_of(shown, arm) for arm in group.arms}),
    }


def learning(group: Group, runs: Sequence[dict[str, Any]], arm: str) -> dict[str, Any] | None:
    """An arm's curves compared with the baseline's, where there is one."""
    if group.study is None or arm == group.study.baseline:
        return None
    own, baseline = (
        [run for run in runs if run["shown"] and group.arms[run["arm"]] == name] for name in (arm, group.study.baseline)
    )
    return compared(own, baseline, 1 - group.study.alpha / group.study.looks)


def study_told(study: StudySpec) -> dict[str, Any]:
    names = (
        "name",
        "baseline",
        "lrs",
        "seeds",
        "tuning_seeds",
        "match",
        "metric",
        "alpha",
        "looks",
        "margin",
        "fingerprint",
    )
    return {name: getattr(study, name) for name in names}


def is_shown(run: Run, group: Group, findings: Findings) -> bool:
    """Whether the run is one of those that speak for its arm: at the learning rate chosen for it, or at the lowest one
    where none could be chosen."""
    if group.study is None:
        return True
    lr = findings.chosen.get(run.planned.arm)
    return run.planned.lr == (min(group.study.lrs) if lr is None else lr)


def first_of(runs: Sequence[Run], arm: str) -> Path | None:
    own = [run for run in runs if run.planned.arm == arm]
    return min(own, key=lambda run: run.planned.seed).folder if own else None


def common_settings(runs: Sequence[Run]) -> dict[str, Any]:
    """What all runs have in common."""
    if not runs:
        return {}
    first = runs[0].settings
    same = {k for k in first if all(k in r.settings and r.settings[k] == first[k] for r in runs)} - PER_RUN
    return {name: first[name] for name in first if name in same}


def own_settings(runs: Sequence[Run], arm: str, common: dict[str, Any]) -> dict[str, Any]:
    """What the runs of an arm have in common and not with all others."""
    own = common_settings([run for run in runs if run.planned.arm == arm])
    return {name: value for name, value in own.items() if name not in common}


def run_told(run: Run, group: Group, shown: bool, machines: list[str]) -> dict[str, Any]:
    directory = RunDirectory(run.folder)
    records = directory.metrics()
    trained = [record for record in records if record.get("kind") == "train"]
    at = {record["step"]: (record.get("tokens"), record.get("time", {}).get("seconds")) for record in trained}
    evaluated = [r for r in records if r.get("kind") == "evaluation" and r.get("split") == "valid"]
    machine = machine_of(run.record["environment"])
    if machine not in machines:
        machines.append(machine)
    summary = run.summary or {}
    evaluation = summary.get("evaluation") or {}
    return {
        "arm": group.arms.index(run.planned.arm),
        "lr": run.planned.lr,
        "seed": run.planned.seed,
        "shown": shown,
        "folder": os.path.relpath(run.folder, group.folder),
        "status": summary.get("status", "not ended"),
        "done": 1.0 if run.summary else progress(run, trained),
        "steps": trained[-1]["step"] if trained else 0,
        "step_seconds": step_seconds(run),
        "seconds": rounded(summary.get("seconds")),
        "skipped": summary.get("skipped_steps"),
        "parameters": summary.get("parameters"),
        "cache": summary.get("cache_bytes_per_token"),
        "valid": scores(evaluation.get("valid")),
        "test": scores(evaluation.get("test")),
        "curve": {
            "tokens": [at.get(r["step"], (None, None))[0] for r in evaluated],
            "seconds": [rounded(at.get(r["step"], (None, None))[1]) for r in evaluated],
            "loss": [rounded(r.get("loss")) for r in evaluated],
            "bits": [rounded(r.get("bits_per_byte")) for r in evaluated],
        },
        "train": thinned(trained) if shown else None,
        "probes": probes(directory.probes_path, at) if shown else None,
        "id": run.record["id"],
        "fingerprint": run.record.get("fingerprint"),
        "commit": run.record.get("commit"),
        "data": run.record["data"].get("hash"),
        "machine": machines.index(machine),
    }


def machine_of(environment: dict[str, Any]) -> str:
    device = environment.get("device", {})
    packages = environment.get("packages", {})
    name = environment.get("processor") if device.get("kind") == "cpu" else device.get("name")
    count = device.get("threads")
    threads = (
        f", {count} thread{'' if count == 1 else 's'}"
        if device.get("kind") == "cpu"
        else f" × {device.get('ranks', 1)}"
    )
    return (
        f"{name}{threads}, {environment.get('system')}, Python {environment.get('python')}, "
        f"torch {packages.get('torch', 'unknown')}"
    )


def progress(run: Run, trained: Sequence[dict[str, Any]]) -> float:
    """The part of a run that is done, from the last step it recorded; 0 where its budget does not say."""
    if not trained:
        return 0.0
    last, budget = trained[-1], run.record["spec"].get("budget", {})
    if budget.get("tokens"):
        return min(1.0, last.get("tokens", 0) / budget["tokens"])
    if budget.get("seconds"):
        return min(1.0, last.get("time", {}).get("seconds", 0.0) / budget["seconds"])
    return 0.0


def step_seconds(run: Run) -> float | None:
    speed = (run.summary or {}).get("tokens_per_second")
    context, rows = run.settings.get("model.context"), run.settings.get("batch.sequences")
    return rounded(context * rows / speed) if speed and context and rows else None


def scores(evaluation: dict[str, Any] | None) -> dict[str, float | None] | None:
    if not evaluation:
        return None
    return {"loss": rounded(evaluation.get("loss"), 8), "bits": rounded(evaluation.get("bits_per_byte"), 8)}


def thinned(trained: Sequence[dict[str, Any]], points: int = TRAIN_POINTS) -> dict[str, list[Any]]:
    """At most `points` points, each the mean loss of a stretch of steps, at the end of that stretch."""
    edges = sorted({round(len(trained) * i / points) for i in range(points + 1)}) if len(trained) > points else None
    stretches = [trained[a:b] for a, b in pairwise(edges)] if edges else [[r] for r in trained]
    losses = [[x for r in part if (x := finite(r.get("loss"))) is not None] for part in stretches]
    return {
        "tokens": [part[-1].get("tokens") for part in stretches],
        "seconds": [rounded(part[-1].get("time", {}).get("seconds")) for part in stretches],
        "loss": [rounded(sum(own) / len(own), 5) if own else None for own in losses],
    }


def probes(folder: Path, at: dict[int, tuple[Any, Any]]) -> dict[str, list[Any]] | None:
    """Step → quantity → a number per layer, over its softmaxes: their mean, the largest, or the root mean square."""
    files = sorted(folder.glob("step-*.json")) if folder.is_dir() else []
    if len(files) > PROBES:
        files = [files[round(i * (len(files) - 1) / (PROBES - 1))] for i in range(PROBES)]
    result: dict[str, list[Any]] = {"step": [], "tokens": [], **{name: [] for name in QUANTITIES}}
    for file in files:
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            step, layers = record["step"], record["layers"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written just now, or damaged: one point less
        result["step"].append(step)
        result["tokens"].append(at.get(step, (None, None))[0])
        for name, how in QUANTITIES.items():
            result[name].append(None if layers.get(name) is None else [combined(row, how) for row in layers[name]])
    return result if result["step"] else None


def combined(values: Sequence[Any], how: str) -> float | None:
    numbers = [x for value in values if (x := finite(value)) is not None]
    if not numbers:
        return None
    if how == LARGEST:
        return rounded(max(numbers), 5)
    if how == RMS:
        return rounded(math.sqrt(sum(x * x for x in numbers) / len(numbers)), 5)
    return rounded(sum(numbers) / len(numbers), 5)


def finite(value: Any) -> float | None:
    """A finite number; None for what is none ("nan", as metrics.jsonl writes it)."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def rounded(value: Any, digits: int = 6) -> float | None:
    number = finite(value)
    return None if number is None else float(f"{number:.{digits}g}")
