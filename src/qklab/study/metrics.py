"""What arms are compared by: name, unit, direction and how each is read, in one place.

A new metric is a class here or in another package; plans, verdicts, answers and reports take all they say from it.
"""

import math
from collections.abc import Mapping
from typing import Any

from qklab import register


class Metric:
    """A number that an evaluation gives.

    label: what it is called, "loss"; unit: of a value, "nats per token"; difference_unit: of a difference, "nats";
    exponential: what exp of it is called where that has a name, "perplexity"; needs_one_tokenizer: whether values
    compare only between models with one tokenizer; averages: whether a mean over corpora says something.
    """

    name: str = ""
    label: str
    unit: str
    difference_unit: str
    lower_is_better: bool = True
    exponential: str | None = None
    needs_one_tokenizer: bool = False
    averages: bool = False

    def read(self, evaluation: Mapping[str, Any]) -> float:
        """The value from the evaluation of one split, as a run's summary and its metrics.jsonl hold it; KeyError where
        it is not there."""
        raise NotImplementedError

    def read_chance(self, evaluation: Mapping[str, Any]) -> float | None:
        """The value that says nothing has been learned, where there is one."""
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

    def read(self, evaluation: Mapping[str, Any]) -> float:
        return 100 * float(evaluation["accuracy"])

    def read_chance(self, evaluation: Mapping[str, Any]) -> float | None:
        return 100 * float(evaluation["chance"]) if "chance" in evaluation else None


@register.metric("sequence_accuracy")
class SequenceAccuracy(Metric):
    """The share of a task's sequences in which every answer is right."""

    label, unit, difference_unit = "sequence accuracy", "% of the sequences right", "percentage points"
    lower_is_better, averages = False, True

    def read(self, evaluation: Mapping[str, Any]) -> float:
        return 100 * float(evaluation["sequence_accuracy"])

    def read_chance(self, evaluation: Mapping[str, Any]) -> float | None:
        return 100 * float(evaluation["sequence_chance"]) if "sequence_chance" in evaluation else None


@register.metric("glue")
class GlueScore(Metric):
    """What a model fine-tuned on a task of GLUE scores: Matthews, accuracy, F1 or correlations, as GLUE says."""

    label, unit, difference_unit = "GLUE score", "points of 100", "points"
    lower_is_better, averages = False, True

    def read(self, evaluation: Mapping[str, Any]) -> float:
        return 100 * float(evaluation["glue"])


def find_metric(name: str) -> Metric:
    """The registered metric of that name."""
    metric: Metric = register.metric[name]()
    metric.name = name
    return metric


def list_metrics() -> list[Metric]:
    """All registered metrics."""
    return [find_metric(name) for name in register.metric]
