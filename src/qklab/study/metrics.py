"""What arms are compared by: name, unit, direction and how each is read, in one place.

A new metric is a class here or in another package; plans, verdicts, answers and reports take all they say from it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from qklab import register
from qklab.data.glue import GLUE
from qklab.data.questions import TASKS


class Metric:
    """A number that an evaluation gives.

    label: what it is called, "loss"; unit: of a value, "nats per token"; difference_unit: of a difference, "nats";
    exponential: what exp of it is called where that has a name, "perplexity"; needs_one_tokenizer: whether values
    compare only between models with one tokenizer; averages: whether a mean over corpora says something; benchmark:
    which of a run's benchmarks it is of, in words where it is of several.
    """

    name: str = ""
    label: str
    unit: str
    difference_unit: str
    lower_is_better: bool = True
    exponential: str | None = None
    needs_one_tokenizer: bool = False
    averages: bool = False
    benchmark: str | None = None

    def read(self, evaluation: Mapping[str, Any]) -> float:
        """The value from the evaluation of one split, as a run's summary and its metrics.jsonl hold it; KeyError where
        it is not there."""
        raise NotImplementedError

    def read_chance(self, evaluation: Mapping[str, Any]) -> float | None:
        """The value that says nothing has been learned, where there is one."""
        return None

    def find_lacking(self, benchmarks: Sequence[str]) -> str | None:
        """What a run would have to be scored on beside these, if anything."""
        return None

    @property
    def worst(self) -> float:
        """The value of a run that diverged."""
        return math.inf if self.lower_is_better else -math.inf

    def describe(self) -> dict[str, Any]:
        """What a page or a table needs to know of the metric, ready for JSON."""
        names = ("name", "label", "unit", "difference_unit", "lower_is_better", "exponential")
        return {name: getattr(self, name) for name in names}


@register.metric("loss")
class Loss(Metric):
    label, unit, difference_unit = "loss", "nats per token", "nats"
    exponential = "perplexity"
    needs_one_tokenizer = True

    def read(self, evaluation: Mapping[str, Any]) -> float:
        return float(evaluation["loss"])


@register.metric("bits_per_byte")
class BitsPerByte(Metric):
    label, unit, difference_unit = "bits per byte", "bits per byte", "bits per byte"

    def read(self, evaluation: Mapping[str, Any]) -> float:
        return float(evaluation["bits_per_byte"])


@register.metric("accuracy")
class Accuracy(Metric):
    """The share of a task's answers that are right, or of masked tokens."""

    label, unit, difference_unit = "accuracy", "% of the answers right", "percentage points"
    lower_is_better, averages = False, True
    keys = ("accuracy", "chance")  # of an evaluation: the share, and what it is without reading

    def read(self, evaluation: Mapping[str, Any]) -> float:
        return 100 * float(evaluation[self.keys[0]])

    def read_chance(self, evaluation: Mapping[str, Any]) -> float | None:
        return 100 * float(evaluation[self.keys[1]]) if self.keys[1] in evaluation else None


@register.metric("sequence_accuracy")
class SequenceAccuracy(Accuracy):
    """The share of a task's sequences in which every answer is right."""

    label, unit = "sequence accuracy", "% of the sequences right"
    keys = ("sequence_accuracy", "sequence_chance")


class BenchmarkScore(Metric):
    """What a model scores at the end of its run on one of its benchmarks, or on average."""

    lower_is_better, averages = False, True
    unit, difference_unit = "points of 100", "points"

    @property
    def label(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.name

    def select(self, names: Iterable[str]) -> list[str]:
        """Those of a run's benchmarks that it is of."""
        return [name for name in names if name == self.benchmark]

    def find_lacking(self, benchmarks: Sequence[str]) -> str | None:
        return None if self.select(benchmarks) else self.benchmark

    def average(self, evaluation: Mapping[str, Any], key: str) -> float:
        found = evaluation["benchmarks"]
        if not (names := self.select(found)):
            raise KeyError(self.name)
        return 100 * fmean(found[name][key] for name in names)

    def read(self, evaluation: Mapping[str, Any]) -> float:
        return self.average(evaluation, "score")

    def read_chance(self, evaluation: Mapping[str, Any]) -> float | None:
        try:
            return self.average(evaluation, "chance")
        except KeyError:  # one that has none
            return None


for set_name in (*TASKS, *GLUE):
    register.metric(set_name)(type(set_name, (BenchmarkScore,), {"benchmark": set_name}))


@register.metric("glue")
class GlueScore(BenchmarkScore):
    """The mean over the tasks of GLUE on which a model is fine-tuned: of Matthews, accuracy, F1 or correlations."""

    benchmark = "a task of GLUE, such as rte"

    def select(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in GLUE]


@register.metric("benchmarks")
class MeanScore(BenchmarkScore):
    """The mean over all benchmarks of a run."""

    benchmark = "a name, such as blimp"

    def select(self, names: Iterable[str]) -> list[str]:
        return list(names)


def find_metric(name: str) -> Metric:
    """The registered metric of that name."""
    metric: Metric = register.metric[name]()
    metric.name = name
    return metric


def list_metrics() -> list[Metric]:
    """All registered metrics."""
    return [find_metric(name) for name in register.metric]
