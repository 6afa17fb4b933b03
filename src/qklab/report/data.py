"""Everything the report shows, gathered from run directories into one plain dictionary.

The page computes nothing that is a finding: differences, intervals, verdicts and chosen learning rates are made here,
by the study's own code, and the page draws them.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import qklab
from qklab.report.folders import RecordedRun, RunGroup, describe_across, read_groups
from qklab.report.learning import compare_learning
from qklab.report.maps import MapCache
from qklab.runs.directory import RunDirectory
from qklab.runs.metrics import finite_or_none
from qklab.study.findings import Findings
from qklab.study.metrics import Metric, list_metrics
from qklab.study.stats.paired import alpha_of_each

TRAIN_POINTS, PROBES = 200, 12
PER_RUN = {"seed", "optimiser.lr"}
STUDY_FACTS = (
    *("name", "baseline", "seeds", "tuning_seeds", "match"),
    *("metric", "alpha", "analyses", "margin", "fingerprint"),
)
MEAN, LARGEST, RMS = "mean", "largest", "rms"
QUANTITIES = {"entropy": MEAN, "sink_mass": MEAN, "largest_logit": LARGEST, "logit_change": RMS}


def gather_data(paths: Sequence[Path], maps: MapCache | None = None) -> dict[str, Any]:
    """The dictionary behind the page, from study folders and run directories, finished or not."""
    groups = read_groups(paths)
    metrics = [metric for metric in list_metrics() if metric.benchmark is None or is_scored(metric, groups)]
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": qklab.__version__,
        "metrics": [metric.describe() for metric in metrics],
        "groups": [describe_group(group, metrics, maps) for group in groups],
        "across": describe_across(paths, groups),
    }


def is_scored(metric: Metric, groups: Sequence[RunGroup]) -> bool:
    """Whether a study is about it, or a run has been scored on it."""
    ended = (result.summary.get("evaluation", {}).get("test") for group in groups for result in group.results)
    asked = any(group.study is not None and group.study.metric == metric.name for group in groups)
    return asked or any(read_metric(metric, test) is not None for test in ended if test)


def describe_group(group: RunGroup, metrics: Sequence[Metric], maps: MapCache | None) -> dict[str, Any]:
    findings, study = group.findings, group.study
    shown = [run for run in group.runs if has_chosen_rate(run, group, findings)]
    machines: list[str] = []
    common = find_common_settings(group.runs)
    runs = [describe_run(run, group, metrics, run in shown, machines) for run in group.runs]
    return {
        "title": group.title,
        "corpus": group.corpus,
        "folder": group.folder.name,
        "study": None if study is None else {name: getattr(study, name) for name in STUDY_FACTS},
        "metric": findings.metric,
        "lrs": findings.grid,
        "planned": findings.planned or len(group.runs),
        "ended": len(group.results),
        "headline": findings.headline,
        "settling": findings.settling,
        "command": findings.command,
        "notes": [*findings.notes, *group.notes],
        "arms": [
            {
                "name": arm,
                "lr": findings.lrs.get(arm),
                "tuning": asdict(findings.tuning[arm]) if arm in findings.tuning else None,
                "verdict": describe_verdict(findings, study.baseline, arm) if study else None,
                "ledger": findings.ledgers.get(arm),
                "learning": describe_learning(group, runs, arm),
                "settings": find_own_settings(group.runs, arm, common),
            }
            for arm in group.arms
        ],
        "settings": common,
        "runs": runs,
        "machines": machines,
        "attention": {} if maps is None else maps.read_arms({arm: find_first_run(shown, arm) for arm in group.arms}),
    }


def describe_verdict(findings: Findings, baseline: str, arm: str) -> dict[str, Any] | None:
    """An arm's verdict with the difference at every seed; None where one of the two diverged."""
    if arm not in findings.verdicts:
        return None
    own, other = findings.values[arm], findings.values[baseline]
    differences = {str(seed): finite_or_none(own[seed] - other[seed]) for seed in own}
    return findings.verdicts[arm].to_dict() | {"differences": differences}


def describe_learning(group: RunGroup, runs: Sequence[dict[str, Any]], arm: str) -> dict[str, Any] | None:
    """An arm's curves compared with the baseline's, where there is one."""
    if group.study is None or arm == group.study.baseline:
        return None
    own, baseline = (
        [run for run in runs if run["shown"] and group.arms[run["arm"]] == name] for name in (arm, group.study.baseline)
    )
    return compare_learning(own, baseline, 1 - alpha_of_each(group.study.alpha, group.study.analyses))


def has_chosen_rate(run: RecordedRun, group: RunGroup, findings: Findings) -> bool:
    """Whether the run is at the learning rate chosen for its arm, or at the lowest one where none could be chosen."""
    if group.study is None:
        return True
    lr = findings.lrs.get(run.planned.arm)
    return run.planned.lr == (min(group.study.lrs) if lr is None else lr)


def find_first_run(runs: Sequence[RecordedRun], arm: str) -> Path | None:
    own = [run for run in runs if run.planned.arm == arm]
    return min(own, key=lambda run: run.planned.seed).folder if own else None


def find_common_settings(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """What all runs have in common."""
    if not runs:
        return {}
    shared = set.intersection(*({(name, repr(value)) for name, value in run.settings.items()} for run in runs))
    return {k: v for k, v in runs[0].settings.items() if (k, repr(v)) in shared and k not in PER_RUN}


def find_own_settings(runs: Sequence[RecordedRun], arm: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """What the runs of an arm have in common and not with all others."""
    own = find_common_settings([run for run in runs if run.planned.arm == arm])
    return {name: value for name, value in own.items() if name not in common}


def describe_run(
    run: RecordedRun, group: RunGroup, metrics: Sequence[Metric], shown: bool, machines: list[str]
) -> dict[str, Any]:
    directory = RunDirectory(run.folder)
    records = directory.metrics()
    trained = [record for record in records if record.get("kind") == "train"]
    at = {record["step"]: (record.get("tokens"), record.get("time", {}).get("seconds")) for record in trained}
    evaluated = [r for r in records if r.get("kind") == "evaluation" and r.get("split") == "valid"]
    machine = describe_machine(run.record["environment"])
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
        "done": 1.0 if run.summary else measure_share_done(run, trained),
        "steps": trained[-1]["step"] if trained else 0,
        "step_seconds": step_seconds(run),
        "seconds": round_number(summary.get("seconds")),
        "skipped": summary.get("skipped_steps"),
        "parameters": summary.get("parameters"),
        "cache": summary.get("cache_bytes_per_token"),
        "valid": read_scores(metrics, evaluation.get("valid")),
        "test": read_scores(metrics, evaluation.get("test")),
        "curve": {
            "tokens": [at.get(r["step"], (None, None))[0] for r in evaluated],
            "seconds": [round_number(at.get(r["step"], (None, None))[1]) for r in evaluated],
            **{m.name: [round_number(read_metric(m, record)) for record in evaluated] for m in metrics},
        },
        "train": downsample_losses(trained) if shown else None,
        "probes": read_probes(directory.probes_path, at) if shown else None,
        "id": run.record["id"],
        "fingerprint": run.record.get("fingerprint"),
        "commit": run.record.get("commit"),
        "data": run.record["data"].get("hash"),
        "machine": machines.index(machine),
    }


def describe_machine(environment: dict[str, Any]) -> str:
    device, packages = environment.get("device", {}), environment.get("packages", {})
    if device.get("kind") == "cpu":
        threads = device.get("threads")
        name = f"{environment.get('processor')}, {threads} thread{'' if threads == 1 else 's'}"
    else:
        name = f"{device.get('name')} × {device.get('ranks', 1)}"
    python, torch = environment.get("python"), packages.get("torch", "unknown")
    return f"{name}, {environment.get('system')}, Python {python}, torch {torch}"


def measure_share_done(run: RecordedRun, trained: Sequence[dict[str, Any]]) -> float:
    """The part of a run that is done, from the last step it recorded; 0 where its budget does not say."""
    if not trained:
        return 0.0
    last, budget = trained[-1], run.record["spec"].get("budget", {})
    if budget.get("tokens"):
        return min(1.0, last.get("tokens", 0) / budget["tokens"])
    if budget.get("seconds"):
        return min(1.0, last.get("time", {}).get("seconds", 0.0) / budget["seconds"])
    return 0.0


def step_seconds(run: RecordedRun) -> float | None:
    speed = (run.summary or {}).get("tokens_per_second")
    context, sequences = run.settings.get("model.context"), run.settings.get("batch.sequences")
    return round_number(context * sequences / speed) if speed and context and sequences else None


def read_scores(metrics: Sequence[Metric], evaluation: dict[str, Any] | None) -> dict[str, float | None] | None:
    """Metric → its value, None where this evaluation has none."""
    if not evaluation:
        return None
    return {metric.name: round_number(read_metric(metric, evaluation), 8) for metric in metrics}


def read_metric(metric: Metric, evaluation: dict[str, Any]) -> float | None:
    try:
        return metric.read(evaluation)
    except KeyError:
        return None


def downsample_losses(trained: Sequence[dict[str, Any]], points: int = TRAIN_POINTS) -> dict[str, list[Any]]:
    """At most `points` points, each the mean loss of a stretch of steps, at the end of that stretch."""
    edges = sorted({round(len(trained) * i / points) for i in range(points + 1)}) if len(trained) > points else None
    stretches = [trained[a:b] for a, b in pairwise(edges)] if edges else [[r] for r in trained]
    return {
        "tokens": [part[-1].get("tokens") for part in stretches],
        "seconds": [round_number(part[-1].get("time", {}).get("seconds")) for part in stretches],
        "loss": [combine_values([r.get("loss") for r in part], MEAN) for part in stretches],
    }


def read_probes(folder: Path, at: dict[int, tuple[Any, Any]]) -> dict[str, list[Any]] | None:
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
            rows = layers.get(name)
            result[name].append(None if rows is None else [combine_values(row, how) for row in rows])
    return result if result["step"] else None


def combine_values(values: Sequence[Any], how: str) -> float | None:
    """Their mean, the largest, or the root mean square, over those that are finite; None where none is."""
    numbers = [x for value in values if (x := finite_or_none(value)) is not None]
    if not numbers:
        return None
    if how == LARGEST:
        return round_number(max(numbers), 5)
    if how == RMS:
        return round_number(math.sqrt(sum(x * x for x in numbers) / len(numbers)), 5)
    return round_number(sum(numbers) / len(numbers), 5)


def round_number(value: Any, digits: int = 6) -> float | None:
    number = finite_or_none(value)
    return None if number is None else float(f"{number:.{digits}g}")
