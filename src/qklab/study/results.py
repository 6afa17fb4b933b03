"""What came out of the runs of a study."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qklab.runs.directory import RunDirectory
from qklab.study.metrics import Metric, find_metric
from qklab.study.plan import Planned
from qklab.study.spec import StudyError, StudySpec


@dataclass(frozen=True)
class Result:
    """A run that ended: how well it did on validation and test text, and what it took."""

    planned: Planned
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
        """Of its last process, with everything beside its steps."""
        return max(self.seconds, self.summary.get("seconds_of_last_process", {}).get("all", 0.0))

    def told(self, metric: Metric) -> str:
        if not math.isfinite(self.value(metric)):
            return "no result"
        return f"{self.value(metric):.4f} {metric.unit}"


def result_of(study: Path, planned: Planned) -> Result | None:
    """The result of a run; None while it has not ended."""
    directory = RunDirectory(planned.folder(study))
    summary = directory.summary() if directory.exists() else None
    return None if summary is None else Result(planned, summary["status"], summary)


def chosen_lrs(study: StudySpec, results: Sequence[Result]) -> dict[tuple[str, str], float | None]:
    """(corpus, arm) → the learning rate with the lowest mean validation loss over the seeds that tune; None if at every
    learning rate some run diverged."""
    loss, chosen = find_metric("loss"), dict[tuple[str, str], float | None]()
    for corpus in study.corpora:
        for arm in study.arms:
            means: dict[float, float] = {}
            for lr in study.lrs:
                own = [
                    result.value(loss, "valid")
                    for result in results
                    if (result.planned.corpus, result.planned.arm, result.planned.lr) == (corpus, arm, lr)
                    and result.planned.seed < study.tuning_seeds
                ]
                means[lr] = sum(own) / len(own) if own else math.inf
            best = min(means, key=lambda lr: means[lr])
            chosen[corpus, arm] = best if math.isfinite(means[best]) else None
    return chosen


def by_seed(
    study: StudySpec, results: Sequence[Result], chosen: Mapping[tuple[str, str], float | None], corpus: str, arm: str
) -> dict[int, float]:
    """Seed → the metric on test text at the chosen learning rate."""
    lr, metric = chosen[corpus, arm], find_metric(study.metric)
    return {
        result.planned.seed: result.value(metric)
        for result in results
        if (result.planned.corpus, result.planned.arm, result.planned.lr) == (corpus, arm, lr)
    }


def ledger(results: Sequence[Result], corpus: str, arm: str, lrs: Sequence[float]) -> dict[str, Any]:
    """What an arm got and took: the same for all where they are matched on it."""
    own = [r for r in results if (r.planned.corpus, r.planned.arm) == (corpus, arm)]
    finished = [r.summary for r in own if r.status == "finished"] or [r.summary for r in own]

    def mean(name: str) -> float | None:
        return sum(summary[name] for summary in finished) / len(finished) if finished else None

    return {
        "parameters": mean("parameters"),
        "training_flops": mean("training_flops"),
        "tokens": mean("tokens"),
        "seconds": mean("seconds"),
        "tokens_per_second": mean("tokens_per_second"),
        "peak_memory_bytes": mean("peak_memory_bytes"),
        "cache_bytes_per_token": mean("cache_bytes_per_token"),
        "learning_rates": list(lrs),
        "runs": len(own),
        "diverged": sum(r.status == "diverged" for r in own),
    }
