"""A study of the evidence as far as it has been run: from its records to numbers."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from records import read_records

from qklab.study.claims import MeasuredEffect
from qklab.study.findings import Findings, average_corpora, derive_findings
from qklab.study.metrics import find_metric
from qklab.study.parts import measure_bytes_per_token
from qklab.study.plan import PlannedRun, write_number
from qklab.study.records import RunResult
from qklab.study.sizes import SIZES, find_size
from qklab.study.spec import read_study
from qklab.study.stats.groups import average_groups
from qklab.study.stats.paired import compare_paired, separate_diverged
from qklab.study.stats.scaling import SizeMeasurement
from qklab.study.verdict import Verdict
from qklab.train.spec import RunSpec

Values = dict[tuple[str, float], dict[int, float]]  # (arm, learning rate) → seed → a number
Read = Callable[[RunResult], float]
ALIKE = ("key_value_cosine", "query_key_cosine", "query_value_cosine", "key_value_alignment")
SOLVED = 99.5  # per cent of the answers right: then every learning rate that gets there is as good


class Evidence:
    """A study as far as it has been run, with the runs that it takes over from others (order.toml)."""

    def __init__(self, folder: Path, begins_with: Sequence[str] = ()):
        self.name, self.folder, self.spec = folder.name, folder, read_study(folder / "study.toml")
        rung = find_size(self.spec) if "recipe" in self.spec.base["model"] else None
        model = self.spec.run(self.spec.baseline, self.spec.corpora[0], self.spec.lrs[0], 0).model
        self.size = rung if rung in SIZES else f"{model.layers}×{model.width}"
        self.records: dict[str, dict[str, Any]] = {}
        self.origins: dict[str, str] = {}  # place → the study whose run it is
        for name in [*begins_with, self.name]:
            own = [record for record in read_records(folder.parent / name) if name == self.name or self.plans(record)]
            self.records |= {record["place"]: record for record in own}
            self.origins |= {record["place"]: name for record in own}
        self.results = list(self.read_results())
        self.runs = len(self.results)
        self.found: dict[str, Findings] = {}
        counts = {result.planned.arm: int(result.summary["parameters"]) for result in self.results}
        self.parameters = {arm: counts[arm] for arm in self.spec.arms if arm in counts}

    @cached_property
    def planned(self) -> dict[str, PlannedRun]:
        return {
            str(run.path): run
            for corpus, arm, lr in product(self.spec.corpora, self.spec.arms, self.spec.widest_grid)
            for run in (PlannedRun(corpus, arm, lr, seed) for seed in range(self.spec.seeds))
        }

    def plans(self, record: Mapping[str, Any]) -> bool:
        """Whether another study's run is one of this."""
        run = self.planned.get(record["place"])
        if run is None:
            return False
        found = RunSpec.from_dict(record["run"]["spec"])
        return run.resolve_spec(self.spec).replace(precision=found.precision) == found

    def read_results(self) -> Iterator[RunResult]:
        for place, record in self.records.items():
            yield RunResult(self.planned[place], record["summary"]["status"], record["summary"])

    def list_runs(self, arm: str) -> set[tuple[str, str]]:
        """The runs of an arm, each by the study whose it is and its place there."""
        return {(self.origins[place], place) for place in self.records if self.planned[place].arm == arm}

    def find(self, corpus: str) -> Findings:
        if corpus not in self.found:
            self.found[corpus] = derive_findings(self.spec, self.results, corpus)
        return self.found[corpus]

    def collect(self, corpus: str, read: Read | None = None) -> Values:
        """The metric on test text, or what `read` takes from a run that has it."""
        metric, found = find_metric(self.spec.metric), Values()
        for result in self.results:
            run = result.planned
            value = result.value(metric) if read is None else read(result)
            if run.corpus == corpus and not math.isnan(value):
                found.setdefault((run.arm, run.lr), {})[run.seed] = value
        return found

    def read_probe(self, name: str, layer: int | None = None) -> Read:
        """What the last probe of a run says of a layer, or of all layers on average."""

        def read(result: RunResult) -> float:
            probes = self.records[str(result.planned.path)]["probes"]
            layers = probes[-1]["layers"].get(name, []) if probes else []
            numbers = [value for value in (layers if layer is None else layers[layer:][:1]) if value is not None]
            return fmean(numbers) if numbers else math.nan

        return read

    def select(self, place: str) -> dict[int, float]:
        """Seed → the metric of an arm, "leapfrog@3e-3" or, at its own best rate, "leapfrog"."""
        arm, _, rate = place.partition("@")
        corpus = self.spec.corpora[0]
        lr = float(rate) if rate else self.find(corpus).lrs.get(arm)
        found = self.collect(corpus).get((arm, lr or 0.0))
        if found is None:
            sys.exit(f"{self.name} has no run of {place}, which a page asks for; correct the mark or keep the record.")
        return found

    def measure(self, arm: str, baseline: str | None, read: Read | None = None) -> list[MeasuredEffect]:
        """Paired differences on every corpus, without a baseline the arm's own values: at the rates chosen for each
        arm, and at each rate that both finished."""
        effects = []
        for corpus in self.spec.corpora:
            values, findings = self.collect(corpus, read), self.find(corpus)
            if not {arm, baseline or arm} <= self.parameters.keys() or findings.lrs[baseline or arm] is None:
                continue
            pairs: dict[float | None, tuple[dict[int, float], dict[int, float]]] = {
                lr: (values.get((arm, lr), {}), values.get((baseline or arm, lr), {})) for lr in findings.grid
            }
            own = findings.lrs[arm]
            length = measure_bytes_per_token(self.results, corpus) if read is None else None
            pairs[None] = (
                dict.fromkeys(range(self.spec.seeds), math.inf) if own is None else values.get((arm, own), {}),
                values.get((baseline or arm, findings.lrs[baseline or arm] or 0.0), {}),
            )
            for lr, (ours, theirs) in pairs.items():
                seeds = sorted(ours.keys() & theirs.keys())
                differences = [ours[seed] - (0.0 if baseline is None else theirs[seed]) for seed in seeds]
                finite = [value for value in differences if math.isfinite(value)]
                if len(finite) == len(differences) > 1 or (lr is None and differences):
                    diverged = len(differences) - len(finite)
                    count = self.parameters[baseline or arm]
                    effects.append(MeasuredEffect(self.size, count, finite, corpus, lr, diverged, length))
        return effects

    def measure_at(self, lr: float, arm: str, baseline: str) -> list[MeasuredEffect]:
        """Paired differences with both arms at one learning rate, as if it were each one's own; a run that diverged has
        the loss of a unigram model."""
        corpus, effects = self.spec.corpora[0], list[MeasuredEffect]()
        known = (result.summary.get("evaluation", {}).get("test", {}).get("unigram_loss") for result in self.results)
        unigram = next((loss for loss in known if loss is not None), math.nan)
        values = self.collect(corpus)
        ours, theirs = (
            {seed: loss if math.isfinite(loss) else unigram for seed, loss in values.get((name, lr), {}).items()}
            for name in (arm, baseline)
        )
        if seeds := sorted(ours.keys() & theirs.keys()):
            differences = [ours[seed] - theirs[seed] for seed in seeds]
            length = measure_bytes_per_token(self.results, corpus)
            effects.append(
                MeasuredEffect(self.size, self.parameters[baseline], differences, corpus, bytes_per_token=length)
            )
        return effects

    def measure_compute(self, arm: str) -> SizeMeasurement | None:
        """FLOPs of a run and bits per byte of its seeds, of the baseline and of the arm where all of its finished, each
        at its own best rate; None where the baseline has no interval."""
        corpus, metric = self.spec.corpora[0], find_metric("bits_per_byte")
        lrs, own = self.find(corpus).lrs, dict[str, dict[int, RunResult]]()
        for name in (arm, self.spec.baseline):
            runs = [result for result in self.results if (result.planned.corpus, result.planned.arm) == (corpus, name)]
            own[name] = {run.planned.seed: run for run in runs if run.planned.lr == lrs.get(name)}
        ours, theirs = own[arm], own[self.spec.baseline]
        if len(theirs) < 2 or not all(math.isfinite(run.value(metric)) for run in theirs.values()):
            return None
        losses = [np.array([runs[seed].value(metric) for seed in sorted(runs)]) for runs in (ours, theirs)]
        flops, speeds = (
            [[run.summary[key] for _, run in sorted(runs.items())] for runs in (ours, theirs)]
            for key in ("training_flops", "tokens_per_second")
        )
        if ours.keys() != theirs.keys() or not np.isfinite(losses[0]).all():
            return SizeMeasurement(self.size, fmean(flops[1]), losses[1])
        speed = np.array(speeds[0]) / np.array(speeds[1])
        return SizeMeasurement(self.size, fmean(flops[1]), losses[1], fmean(flops[0]), losses[0], speed)

    def average(self) -> Findings | None:
        """What is found on the mean over its tasks."""
        return average_corpora(self.spec, [self.find(corpus) for corpus in self.spec.corpora])

    def measure_mean(self, arm: str) -> list[MeasuredEffect]:
        """Paired differences of the mean over tasks, as shares of 1."""
        average, baseline = self.average(), self.spec.baseline
        if average is None:
            return []
        pairs = separate_diverged(average.values[arm], average.values[baseline])
        differences = [(pairs.arm[seed] - pairs.baseline[seed]) / 100 for seed in pairs.arm]
        return [MeasuredEffect(self.size, self.parameters[baseline], differences, diverged=len(pairs.arm_diverged))]

    def are_tuned_alike(self, *arms: str) -> bool:
        """Whether arms tried the same learning rates, and each did best inside."""
        tried = [{(r.planned.corpus, r.planned.lr) for r in self.results if r.planned.arm == arm} for arm in arms]
        return all(map(self.is_tuned, arms)) and all(rates == tried[0] for rates in tried)

    def is_tuned(self, arm: str) -> bool:
        """Whether its best learning rate lies inside the grid on every corpus; which one is best of several that solve
        a task says nothing."""
        for corpus in self.spec.corpora:
            lr = self.find(corpus).lrs.get(arm)
            tried = {rate: own for (name, rate), own in self.collect(corpus).items() if name == arm}
            if lr is None or lr not in tried:
                return False
            solved = self.spec.metric == "accuracy" and fmean(tried[lr].values()) >= SOLVED
            if lr in (min(tried), max(tried)) and not solved:
                return False
        return True

    def describe(self) -> dict[str, Any]:
        """Everything a table or figure shows of it."""
        corpora = {}
        for corpus in self.spec.corpora:
            findings, values = self.find(corpus), self.collect(corpus)
            corpora[corpus] = {
                "grid": findings.grid,
                "notes": findings.notes,
                "arms": {arm: self.describe_arm(arm, findings, values) for arm in self.parameters},
            }
        metric = find_metric(self.spec.metric)
        about: dict[str, Any] = {} if metric.name == "loss" else {"unit": metric.unit}
        average = self.average()
        if average is not None:
            about["mean"] = {"of": average.corpus, "chance": round_number(average.chance), "arms": {}}
            for arm, values in average.values.items():
                own = describe_verdict(average.verdicts.get(arm))
                mean = fmean(values.values())
                about["mean"]["arms"][arm] = {"value": round(mean, 4) if math.isfinite(mean) else None, "lr": 0.0} | own
        if (self.folder / "initial.jsonl").exists():
            about["vectors"] = self.describe_vectors()
        return {"size": self.size, "baseline": self.spec.baseline, "runs": self.runs, "corpora": corpora} | about

    def describe_vectors(self) -> dict[str, Any]:
        """How alike the baseline's queries, keys and values are, untrained (initial.py) and at the end of training:
        [mean, low, high] over seeds."""
        corpus, arm = self.spec.corpora[0], self.spec.baseline
        lines = map(json.loads, (self.folder / "initial.jsonl").read_text(encoding="utf-8").splitlines())
        untrained = [line["layers"] for line in lines if (line["corpus"], line["arm"]) == (corpus, arm)]
        lr, found = self.find(corpus).lrs[arm] or 0.0, {}
        for name in ALIKE:
            trained = [*self.collect(corpus, self.read_probe(name))[arm, lr].values()]
            sides = {"untrained": [fmean(layers[name]) for layers in untrained], "trained": trained}
            found[name] = {}
            for side, values in sides.items():
                mean = average_groups([values])
                found[name][side] = [round_number(value) for value in (mean.estimate, mean.low, mean.high)]
        return found

    def describe_arm(self, arm: str, findings: Findings, values: Values) -> dict[str, Any]:
        rates = {write_number(lr): describe_losses(values.get((arm, lr), {}).values()) for lr in findings.grid}
        for lr in findings.grid if arm != self.spec.baseline else ():
            rates[write_number(lr)] |= describe_gain(
                values.get((arm, lr), {}), values.get((self.spec.baseline, lr), {})
            )
        about: dict[str, Any] = {"parameters": self.parameters[arm], "lr": findings.lrs[arm], "rates": rates}
        return about | describe_verdict(findings.verdicts.get(arm))


def describe_verdict(verdict: Verdict | None) -> dict[str, Any]:
    """The word and the difference, as far as there are any."""
    if verdict is None:
        return {}
    word = {"word": verdict.verdict, "seeds": verdict.seeds, "p": round_number(verdict.p_holm)}
    paired = verdict.paired
    if paired is None:
        return {"verdict": word}
    return {"verdict": word, "difference": [round_number(value) for value in (paired.mean, paired.low, paired.high)]}


def describe_losses(losses: Any) -> dict[str, Any]:
    """Of the runs of an arm at one learning rate."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    about = {"runs": len(losses), "diverged": len(losses) - len(finite), "losses": [round(x, 4) for x in finite]}
    return about | {"mean": round(fmean(finite), 4) if finite and not about["diverged"] else None}


def describe_gain(arm: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, Any]:
    """The paired difference at one learning rate of both; nothing where a run is missing or diverged."""
    if (
        arm.keys() != baseline.keys()
        or len(arm) < 2
        or not all(map(math.isfinite, (*arm.values(), *baseline.values())))
    ):
        return {}
    paired = compare_paired(arm, baseline)
    return {"difference": [round_number(value) for value in (paired.mean, paired.low, paired.high)]}


def round_number(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
