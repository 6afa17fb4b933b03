"""A study's parts: the study at each of its sizes, with the results it has and arms beside the baseline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qklab.study.claims import write_count
from qklab.study.metrics import Metric, find_metric
from qklab.study.plan import encode_file_name
from qklab.study.records import RunResult, holds_study, read_results, read_study_record, select_arm, select_rate
from qklab.study.sizes import SIZES, find_size, name_tokenizer, split_sizes
from qklab.study.spec import StudySpec
from qklab.study.stats.paired import Array, separate_diverged
from qklab.study.tuning import choose_learning_rates

FOLDER = "sizes"


def find_size_folder(study: Path, size: str) -> Path:
    """Where the runs of a size lie: a study's folder of its own."""
    return study / FOLDER / encode_file_name(size)


@dataclass(frozen=True)
class PairedValues:
    """Both arms at the seeds that both finished, in one metric, with what the runs took; seeds at which the arm
    diverged are counted."""

    arm: Array
    baseline: Array
    arm_runs: list[dict[str, Any]]
    baseline_runs: list[dict[str, Any]]
    diverged: int

    @property
    def differences(self) -> Array:
        return self.arm - self.baseline

    @property
    def is_sound(self) -> bool:
        """Whether an interval can be had: nothing diverged, and there are two seeds at least."""
        return not self.diverged and len(self.arm) > 1


class StudyPart:
    """The study at one size, with the results it has."""

    def __init__(self, study: StudySpec, results: Sequence[RunResult], size: str | None = None):
        self.study, self.results = study, results
        self.lrs = choose_learning_rates(study, results)
        self.run = study.first_run
        self.parameters = self.run.model.parameters()
        named = find_size(study) if size is None else size
        self.size = named if size is not None or named in SIZES else write_count(self.parameters)

    def find_tokenizer(self, corpus: str) -> tuple[Any, ...]:
        return name_tokenizer(self.run.corpus.replace(source=corpus))

    def pair(self, corpus: str, arm: str, metric: Metric, lr: float | None = None) -> PairedValues | None:
        """The arm beside the baseline, each at the learning rate chosen for it, or both at `lr`; None where no seed has
        ended in both."""
        if arm not in self.study.arms:
            return None
        if lr is None and self.lrs[corpus, arm] is None:  # at every rate some run diverged, or none has ended
            own = select_arm(self.results, corpus, arm)
            none = np.array([])
            return PairedValues(none, none, [], [], len(own)) if own else None
        runs = [self.find_runs(corpus, name, lr) for name in (arm, self.study.baseline)]
        seeds = sorted(runs[0].keys() & runs[1].keys())
        if not seeds:
            return None
        values = [{seed: own[seed].value(metric) for seed in seeds} for own in runs]
        split = separate_diverged(*values)
        kept = [[own[seed].summary for seed in split.arm] for own in runs]
        arrays = [np.array([*own.values()]) for own in (split.arm, split.baseline)]
        return PairedValues(arrays[0], arrays[1], kept[0], kept[1], len(split.arm_diverged))

    def find_runs(self, corpus: str, arm: str, lr: float | None) -> dict[int, RunResult]:
        rate = self.lrs[corpus, arm] if lr is None else lr
        return {result.planned.seed: result for result in select_rate(self.results, corpus, arm, rate)}


def measure_bytes_per_token(results: Sequence[RunResult], corpus: str) -> float | None:
    """How much test text a token stands for; None where no run has ended."""
    loss, bits = find_metric("loss"), find_metric("bits_per_byte")
    for result in results:
        if result.planned.corpus == corpus and math.isfinite(result.value(loss)):
            return result.value(loss) / (math.log(2) * result.value(bits))
    return None


def read_parts(folder: Path) -> tuple[StudySpec, list[StudyPart]]:
    """The study in a folder and its parts: one per size that has begun, or the study itself."""
    study = read_study_record(folder).spec
    if not study.sizes:
        return study, [StudyPart(study, read_results(folder, study))]
    parts: list[StudyPart] = []
    for size in split_sizes(study):
        own = find_size_folder(folder, size)
        if holds_study(own):
            spec = read_study_record(own).spec
            parts.append(StudyPart(spec, read_results(own, spec), size))
    return study, parts
