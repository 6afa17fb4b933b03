"""The metric registry: one place says what a metric is, and everything else asks it."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from qklab import register
from qklab.data.glue import GLUE
from qklab.data.questions import TASKS
from qklab.schema import SpecError
from qklab.study.metrics import Metric, find_metric, list_metrics
from qklab.study.plan import PlannedRun
from qklab.study.records import RunResult
from qklab.study.spec import StudySpec

ARMS: dict[str, dict[str, Any]] = {"standard": {}, "k=v": {"attention": {"share": "k=v"}}}
BASE = {"model": {"recipe": "nano"}, "budget": {"tokens": 4096}}


@pytest.fixture
def share() -> Iterator[type[Metric]]:
    @register.metric("share")
    class Share(Metric):
        label, unit, difference_unit, lower_is_better = "share", "of the answers right", "points", False

        def read(self, evaluation: Mapping[str, Any]) -> float:
            return evaluation["right"] / evaluation["answers"]

    yield Share
    del register.metric.entries["share"]


def study(**changes: Any) -> StudySpec:
    return StudySpec.from_dict({"baseline": "standard", "arms": ARMS, "base": BASE} | changes)


@pytest.mark.usefixtures("share")
def test_a_registered_metric_is_a_choice_of_a_study_and_is_read_from_its_runs() -> None:
    metric = find_metric(study(metric="share").metric)
    run = RunResult(PlannedRun("c", "k=v", 1e-3, 0), "finished", {"evaluation": {"test": {"right": 3, "answers": 4}}})
    assert run.value(metric) == 0.75
    assert run.describe(metric) == "0.7500 of the answers right"
    assert RunResult(run.planned, "diverged", {}).value(metric) == -math.inf
    plain = [each.name for each in list_metrics() if each.benchmark is None]
    assert plain == ["loss", "bits_per_byte", "accuracy", "sequence_accuracy", "share"]
    scored = {each.name: each.label for each in list_metrics() if each.benchmark is not None}
    assert scored == {name: name for name in (*TASKS, *GLUE, "glue", "benchmarks")}
    assert metric.describe() == {
        "name": "share",
        "label": "share",
        "unit": "of the answers right",
        "difference_unit": "points",
        "lower_is_better": False,
        "exponential": None,
    }


@pytest.mark.parametrize("name", ["loss", "bits_per_byte"])
def test_our_own_are_better_where_they_are_lower(name: str) -> None:
    metric, planned = find_metric(name), PlannedRun("c", "k=v", 1e-3, 0)
    assert (
        RunResult(planned, "finished", {"evaluation": {"test": {"loss": 1.5, "bits_per_byte": 1.5}}}).value(metric)
        == 1.5
    )
    assert RunResult(planned, "diverged", {}).value(metric) == math.inf


def test_accuracies_are_percentages_with_their_chance() -> None:
    found = {"accuracy": 0.75, "chance": 0.1, "sequence_accuracy": 0.5, "sequence_chance": 0.0}
    for name, value, chance in (("accuracy", 75.0, 10.0), ("sequence_accuracy", 50.0, 0.0)):
        metric = find_metric(name)
        assert (metric.read(found), metric.read_chance(found), metric.lower_is_better) == (value, chance, False)
        assert metric.read_chance({}) is None
        with pytest.raises(KeyError):
            metric.read({"loss": 1.0})


def test_a_name_that_nothing_is_registered_under_is_refused_with_a_suggestion() -> None:
    with pytest.raises(SpecError, match=r"metric.*must be one of 'loss', .*'benchmarks' \(did you mean 'loss'\?\)"):
        study(metric="los")
