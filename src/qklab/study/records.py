"""What a study's folder says: what was fixed before anything ran, what came of each run, and when it was judged.

study.json      the spec, and the hash of every corpus
analyses.json   the analyses taken, and how to add seeds
runs/           the run directories; their summary.json is all that is needed of a run that ended
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from qklab.data.spec import DataSpec
from qklab.runs.directory import RunDirectory
from qklab.runs.files import describe_file_failure, write_json
from qklab.schema import format_value
from qklab.study.metrics import Metric, find_metric
from qklab.study.plan import PlannedRun
from qklab.study.spec import StudyError, StudySpec, canonicalise

FORMAT = 2
STUDY, ANALYSES = "study.json", "analyses.json"
LOST = "at a time that is lost with analyses.json"


# Runs


@dataclass(frozen=True)
class RunResult:
    """A run that ended: how well it did on validation and test text, and what it took."""

    planned: PlannedRun
    status: str  # finished or diverged
    summary: dict[str, Any]

    def value(self, metric: Metric, split: str = "test") -> float:
        """The metric on a split; its worst for a run that diverged, also if only its evaluation shows it."""
        if self.status != "finished":
            return metric.worst
        try:
            value = metric.read(self.summary["evaluation"][split])
        except KeyError:
            raise StudyError(f"the run {self.planned.name} has no {metric.name} on {split} text.") from None
        return value if math.isfinite(value) else metric.worst

    @property
    def seconds(self) -> float:
        return self.summary["seconds"]

    @property
    def process_seconds(self) -> float:
        """Of its last process, with everything beside its steps; its share where several runs went together."""
        whole = self.summary.get("seconds_of_last_process", {}).get("all", 0.0)
        return max(self.seconds, whole / self.summary.get("population", 1))

    def describe(self, metric: Metric) -> str:
        if not math.isfinite(self.value(metric)):
            return "no result"
        return f"{self.value(metric):.4f} {metric.unit}"


def read_result(study: Path, planned: PlannedRun) -> RunResult | None:
    """The result of a run; None while it has not ended."""
    directory = RunDirectory(planned.folder_in(study))
    summary = directory.summary() if directory.exists() else None
    return None if summary is None else RunResult(planned, summary["status"], summary)


def find_newest_checkpoint(folder: Path) -> str:
    """The name of a run's newest checkpoint, which grows with its step; empty if there is none. No more than names is
    looked at: checkpoints give way to newer ones meanwhile."""
    with suppress(FileNotFoundError):
        return max((name for name in os.listdir(folder / "checkpoints") if name.startswith("step-")), default="")
    return ""


def is_in_use(folder: Path) -> bool:
    """Whether a process works in a run directory."""
    try:
        with open(folder / "lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # on network file systems readers get no other
    except BlockingIOError:
        return True
    except OSError:  # there is none yet, or training will say what is wrong with it
        return False
    return False


def read_results(study: Path, spec: StudySpec) -> list[RunResult]:
    """The results of all runs that have ended."""
    planned = (
        PlannedRun(corpus, arm, lr, seed)
        for corpus, arm, lr in product(spec.corpora, spec.arms, spec.widest_grid)
        for seed in range(spec.seeds)
    )
    return [result for run in planned if (result := read_result(study, run)) is not None]


def select_arm(results: Sequence[RunResult], corpus: str, arm: str) -> list[RunResult]:
    """The results of an arm on a corpus, at every learning rate."""
    return [result for result in results if (result.planned.corpus, result.planned.arm) == (corpus, arm)]


def select_rate(results: Sequence[RunResult], corpus: str, arm: str, lr: float | None) -> list[RunResult]:
    """The results of an arm on a corpus at one learning rate; none where none could be chosen."""
    return [result for result in select_arm(results, corpus, arm) if result.planned.lr == lr]


def collect_values(
    study: StudySpec, results: Sequence[RunResult], lrs: Mapping[tuple[str, str], float | None], corpus: str, arm: str
) -> dict[int, float]:
    """Seed → the metric on test text at the learning rate that was chosen."""
    lr, metric = lrs[corpus, arm], find_metric(study.metric)
    return {result.planned.seed: result.value(metric) for result in select_rate(results, corpus, arm, lr)}


def sum_up_ledger(results: Sequence[RunResult], corpus: str, arm: str, lrs: Sequence[float]) -> dict[str, Any]:
    """What an arm got and took: the same for all where they are matched on it."""
    own = select_arm(results, corpus, arm)
    finished = [r.summary for r in own if r.status == "finished"] or [r.summary for r in own]
    names = (
        "parameters",
        "training_flops",
        "tokens",
        "seconds",
        "tokens_per_second",
        "peak_memory_bytes",
        "cache_bytes_per_token",
    )
    means = {name: sum(s[name] for s in finished) / len(finished) if finished else None for name in names}
    diverged = sum(r.status == "diverged" for r in own)
    return means | {"learning_rates": list(lrs), "runs": len(own), "diverged": diverged}


def sum_up_benchmarks(
    results: Sequence[RunResult], corpus: str, arm: str, lr: float | None
) -> dict[str, dict[str, float | None]]:
    """Benchmark → what an arm scores at its learning rate, in points of 100: the mean over seeds, its standard error
    where there are several, and chance where that is known."""
    runs = select_rate(results, corpus, arm, lr)
    own = [r.summary["evaluation"]["test"].get("benchmarks", {}) for r in runs if r.status == "finished"]
    found: dict[str, dict[str, float | None]] = {}
    for name in own[0] if own else ():
        scores = [100 * each[name]["score"] for each in own]
        chance = own[0][name].get("chance")
        found[name] = {
            "mean": fmean(scores),
            "error": stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None,
            "chance": None if chance is None else 100 * chance,
        }
    return found


# study.json


def holds_study(folder: Path) -> bool:
    return (folder / STUDY).exists()


@dataclass(frozen=True)
class StudyRecord:
    """What was fixed before anything ran; `data` has of every corpus its `spec` and the `hash` of its content, `asked`
    what the command asked for that planned the study, where one did; `judged` at how many seeds it was judged, so that
    these analyses count even where analyses.json is lost."""

    spec: StudySpec
    data: list[dict[str, Any]]
    asked: dict[str, Any] = field(default_factory=dict)
    judged: list[int] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        values = {"fingerprint": self.spec.fingerprint, "spec": self.spec.to_dict(), "data": self.data}
        values |= {name: value for name, value in (("asked", self.asked), ("judged", self.judged)) if value}
        with explain_file_errors():
            write_json(folder / STUDY, {"format": FORMAT} | values)

    def find_hash(self, corpus: Mapping[str, Any]) -> str | None:
        """The hash of the corpus with these settings when the study began."""
        specs = ((entry["hash"], DataSpec.from_dict(entry["spec"]).to_dict()) for entry in self.data)
        return next((found for found, spec in specs if spec == dict(corpus)), None)


def read_study_record(folder: Path) -> StudyRecord:
    path = folder / STUDY
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"it is of format {record['format']}, this version of qklab reads {FORMAT}")
        spec = StudySpec.from_dict(record["spec"])
        judged = [int(seeds) for seeds in record.get("judged", ())]
        return StudyRecord(spec, list(record.get("data", ())), dict(record.get("asked", {})), judged)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise StudyError(f"{path} cannot be read as a study: {why}; restore it from a copy.") from None


def find_difference(before: Any, now: Any, name: str = "") -> str | None:
    """The first setting that differs, and how: "with arms.x.z_loss=0, but 1 came"; None if there is none."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return None if before == now else f"with {name}={format_value(before)}, but {format_value(now)} came"
    for key in sorted(before.keys() | now.keys()):
        path = f"{name}.{key}" if name else key
        if key not in now:
            return f"with {path}={format_value(before[key])}, which is now left out"
        if key not in before:
            return f"without {path}, but {format_value(now[key])} came"
        if (found := find_difference(before[key], now[key], path)) is not None:
            return found
    return None


def find_other_plan(before: StudySpec, now: StudySpec) -> str | None:
    """What two specs of a study may not differ in; where there are more seeds in one, more of them may tune."""
    if (now.seeds - before.seeds) * (now.tuning_seeds - before.tuning_seeds) > 0:
        before = before.replace(seeds=now.seeds, tuning_seeds=now.tuning_seeds)
    return find_difference(canonicalise(before.fixed_settings()), canonicalise(now.fixed_settings()))


@contextmanager
def explain_file_errors() -> Iterator[None]:
    """A disk that refuses becomes one sentence."""
    try:
        yield
    except OSError as error:
        raise StudyError(describe_file_failure("study", error)) from error


# analyses.json


@dataclass(frozen=True)
class Analysis:
    """A time at which the study was judged, at so many seeds."""

    seeds: int
    at: str


@dataclass(frozen=True)
class Analyses:
    """The analyses taken; how many runs there were at a time; the command that adds seeds, with {total} in place of how
    many there are then; and how many seconds a run was planned to take, where that is known."""

    taken: tuple[Analysis, ...] = ()
    at_once: int = 1
    command: str = ""
    run_seconds: float | None = None

    @property
    def seeds(self) -> list[int]:
        return [analysis.seeds for analysis in self.taken]

    @property
    def continues(self) -> bool:
        """Whether the command adds seeds that tune, as `compare --continue` does."""
        return " --continue " in self.command

    def add(self, seeds: int, at_once: int, command: str, run_seconds: float | None = None) -> "Analyses":
        """With one at so many seeds; judging the same seeds again is no new analysis."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        new = () if seeds in self.seeds else (Analysis(seeds, now),)
        return Analyses((*self.taken, *new), at_once, command or self.command, run_seconds or self.run_seconds)

    def write_command(self, seeds: int) -> str:
        """The command that makes them so many seeds."""
        return self.command.replace("{total}", str(seeds))

    def write(self, folder: Path) -> None:
        write_json(folder / ANALYSES, asdict(self))
        if holds_study(folder):
            replace(read_study_record(folder), judged=self.seeds).write(folder)


def read_analyses(folder: Path) -> Analyses:
    """The analyses of the study in a folder; of a record that is lost what study.json knows, and none if there was
    none."""
    path = folder / ANALYSES
    if not path.exists():
        judged = read_study_record(folder).judged if holds_study(folder) else []
        return Analyses(tuple(Analysis(seeds, LOST) for seeds in judged))
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        taken = tuple(Analysis(**each) for each in record["taken"])
        return Analyses(taken, record["at_once"], record["command"], record.get("run_seconds"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path} cannot be read: {error}; restore it from a copy or delete it.") from None
