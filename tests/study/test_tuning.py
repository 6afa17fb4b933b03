"""Learning rates: the grid goes on where an arm's best is at its end, for all arms alike, and adds no false alarms."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from small_study import InProcess, RecordingDisplay, fabricate, small_spec

from qklab.schema import SpecError
from qklab.study.answer import write_answer
from qklab.study.execute import Study, StudyInterrupted
from qklab.study.executors import RunTask, Unit, WorkerSlots
from qklab.study.findings import derive_findings
from qklab.study.plan import PlannedRun, plan_tuning_runs
from qklab.study.records import RunResult, read_results, read_study_record
from qklab.study.schedule import SLACK
from qklab.study.spec import StudySpec
from qklab.study.stats.tuning import find_best_rates, measure_sensitivity
from qklab.study.tuning import choose_learning_rates, choose_rate, find_grid, find_grids

stats: Any = scipy_stats  # whose own types pyright cannot infer


def study(**changes: Any) -> StudySpec:
    values: dict[str, Any] = {
        "baseline": "standard",
        "arms": {"standard": {}, "k=v": {"attention": {"share": "k=v"}}},
        "base": {"budget": {"tokens": 1000}},
        "lrs": [3e-3, 6e-3, 1.2e-2],
        "extend": 2,
    }
    return StudySpec.from_dict(values | changes)


def losses_around(best: dict[str, float], lrs: list[float], seeds: int = 1) -> dict[tuple[str, float], Any]:
    """Parabolas in the logarithm of the learning rate, each arm's lowest at its best; diverged where best is nan."""
    return {
        (arm, lr): {s: math.inf if math.isnan(own) else math.log(lr / own) ** 2 + s for s in range(seeds)}
        for arm, own in best.items()
        for lr in lrs
    }


# The grid


@pytest.mark.parametrize(
    ("standard", "other", "grid"),
    [
        (6e-3, 6e-3, [3e-3, 6e-3, 1.2e-2]),
        (6e-3, 1.2e-2, [3e-3, 6e-3, 1.2e-2, 2.4e-2]),  # one arm's end is enough, and once inside it stops
        (2.4e-2, 6e-3, [3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2]),
        (1.0, 6e-3, [3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2]),  # at most two more
        (6e-3, 1e-6, [7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2]),
        (3e-3, 1.2e-2, [1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2]),  # both ends
        (math.nan, 6e-3, [7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2]),  # who diverges everywhere gets lower ones
    ],
)
def test_the_grid_goes_on_where_a_best_is_at_its_end(standard: float, other: float, grid: list[float]) -> None:
    spec = study()
    losses = losses_around({"standard": standard, "k=v": other}, spec.widest_grid)
    found = find_grid(spec, losses)
    assert (found.lrs, found.final) == (grid, True)
    assert find_grid(study(extend=0), losses).lrs == spec.lrs


def test_the_widest_grid_is_fixed_beforehand_by_the_ratio_of_the_grid() -> None:
    assert study().widest_grid == [7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2]
    assert study(lrs=[1e-3, 3e-3, 1e-2], extend=1).widest_grid == [3.16e-4, 1e-3, 3e-3, 1e-2, 3.16e-2]
    with pytest.raises(SpecError, match=r"lrs=\[0.003\] has no ratio to go on by; .* nearest legal: extend=0"):
        study(lrs=[3e-3])


def test_neither_order_nor_slices_decide_and_what_is_begun_early_is_needed() -> None:
    """In any order of results: what is asked for is in the final grid, and that is the same."""
    chance = random.Random(0)
    for trial in range(60):
        spec = study(arms={"standard": {}, "b": {"z_loss": 0.1}, "c": {"z_loss": 0.2}}, tuning_seeds=2, seeds=2)
        noise = {key: chance.gauss(0, 0.6) for key in itertools.product(spec.arms, spec.widest_grid)}
        everything = {
            key: {seed: own[seed] + noise[key] for seed in own}
            for key, own in losses_around(
                {arm: 6e-3 * 2 ** chance.gauss(0, 1.5) for arm in spec.arms}, spec.widest_grid, 2
            ).items()
        }
        final, known = find_grid(spec, everything), dict[tuple[str, float], dict[int, float]]()
        while not (now := find_grid(spec, known)).final or any(
            len(known.get(key, ())) < 2 for key in itertools.product(spec.arms, now.lrs)
        ):
            assert set(now.lrs) <= set(final.lrs), trial
            todo = [
                (key, seed)
                for key in itertools.product(spec.arms, now.lrs)
                for seed in range(2)
                if seed not in known.get(key, ())
            ]
            key, seed = chance.choice(todo)
            known.setdefault(key, {})[seed] = everything[key][seed]
        assert now.lrs == final.lrs


def test_no_seed_confirms_a_rate_that_another_arm_may_still_change(corpus: str, tmp_path: Path) -> None:
    spec = small_spec(corpus, lrs=[1e-3, 2e-3, 4e-3], extend=1, seeds=3)
    for lr in (5e-4, *spec.lrs):  # fabricated losses grow with the rate
        fabricate(spec, tmp_path, PlannedRun(corpus, "standard", lr, 0))
    missing = Study(spec, tmp_path).runs.list_missing_runs()
    assert {(run.arm, run.seed) for run in missing} == {("k=v", 0)}


def test_a_round_waits_for_every_arm() -> None:
    ahead = {("standard", lr): {0: -lr} for lr in (3e-3, 6e-3, 1.2e-2, 2.4e-2)}  # whose best is at the new end again
    found = find_grid(study(), ahead)
    assert (found.lrs, found.final) == ([3e-3, 6e-3, 1.2e-2, 2.4e-2], False)
    inside = {("standard", lr): {0: abs(lr - 6e-3)} for lr in (3e-3, 6e-3, 1.2e-2)}
    assert not find_grid(study(), inside).final  # the other arm may still extend it
    assert find_grid(study(extend=0), inside).final


def train_as(best: dict[str, float]) -> Any:
    """In the place of training: a run that ends with the loss of its arm and learning rate."""

    def act(unit: Unit, task: RunTask) -> None:
        arm, run = task.folder.parent.name, task.spec
        loss = 2.0 + math.log(run["optimiser"]["lr"] / best[arm]) ** 2 / 10 + 0.1 * run["seed"]
        planned = PlannedRun(run["corpus"]["source"], arm, run["optimiser"]["lr"], run["seed"])
        fabricate(small_spec(planned.corpus, lrs=[1e-3, 2e-3, 4e-3], extend=2, seeds=3), unit.study, planned)
        path = task.folder / "summary.json"
        summary = json.loads(path.read_text())
        for split in summary["evaluation"].values():
            split["loss"] = loss + 0.001 * (arm == "k=v")
        took = {"parameters": 10, "training_flops": 1e6, "tokens": 10, "tokens_per_second": 5.0}
        took |= {"peak_memory_bytes": 10, "cache_bytes_per_token": 1}
        path.write_text(json.dumps(summary | took))

    return act


BEST = {"standard": 2e-3, "k=v": 4e-3}  # k=v's is at the upper end, and inside once that is moved by one


@pytest.mark.parametrize("tuning_seeds", [1, 3])
def test_a_study_goes_on_beyond_its_grid_and_says_so(corpus: str, tmp_path: Path, tuning_seeds: int) -> None:
    spec = small_spec(corpus, lrs=[1e-3, 2e-3, 4e-3], extend=2, seeds=3, tuning_seeds=tuning_seeds)
    display = RecordingDisplay()
    with Study(spec, tmp_path).open() as whole:
        results = whole.carry_out(InProcess(train_as(BEST), 2), display)
    each = 4 * tuning_seeds + 3 - tuning_seeds
    assert len(results) == len(read_results(tmp_path, spec)) == 2 * each
    assert {r.planned.lr for r in results if r.planned.seed < tuning_seeds} == {1e-3, 2e-3, 4e-3, 8e-3}
    assert display.count("at an end of the learning rates, so all arms try 0.008 too.") == 1
    assert all(
        f"/{2 * each} runs" in line or f"/{2 * each - 2 * tuning_seeds} runs" in line for _, line in display.shown
    )
    assert choose_learning_rates(spec, results) == {(corpus, "standard"): 2e-3, (corpus, "k=v"): 4e-3}
    found = derive_findings(spec, results, corpus)
    assert found.grid == [1e-3, 2e-3, 4e-3, 8e-3]
    assert found.ledgers["standard"]["learning_rates"] == found.grid
    assert (found.planned, found.ledgers["k=v"]["runs"]) == (2 * each, each)
    assert "Learning rates are still being tried" not in " ".join(found.notes)
    assert found.tuning["k=v"].best == (None if tuning_seeds == 1 else [4e-3])
    assert "sensitivity" in write_answer(spec, results)


@pytest.mark.parametrize(("minutes", "tried"), [(-1.0, [1e-3, 2e-3, 4e-3]), (1.0, [1e-3, 2e-3, 4e-3, 8e-3])])
def test_learning_rates_that_would_not_end_in_time_are_left_out_for_good(
    corpus: str, tmp_path: Path, minutes: float, tried: list[float]
) -> None:
    spec = small_spec(corpus, lrs=[1e-3, 2e-3, 4e-3], extend=2, seeds=3, tuning_seeds=3)
    display = RecordingDisplay()

    def act(unit: Unit, task: RunTask) -> None:
        train_as({"standard": 2e-3, "k=v": 1.6e-2})(unit, task)
        if task.spec["optimiser"]["lr"] == 8e-3:  # the time is over when the first round is
            timed.extend_until = 0.0

    with Study(spec, tmp_path, extend_minutes=minutes).open() as timed:
        results = timed.carry_out(InProcess(act, 2), display)
        assert timed.runs.estimate_wall_clock([r.planned for r in results[:4]], 2) == pytest.approx(2 * SLACK)
    assert sorted({result.planned.lr for result in results}) == tried
    assert display.count(f"but {2 * tried[-1]:g} would take longer than the minutes asked for") == 1
    kept = read_study_record(tmp_path).spec
    assert kept.extend == len(tried) - 3
    found = derive_findings(kept, results, corpus)
    assert found.grid == tried
    assert "k=v did best at an end of the learning rates tried" in " ".join(found.notes)
    with Study(kept, tmp_path).open() as again:  # with more time: what was left out stays so
        assert again.carry_out(InProcess(act), display) == results


def test_a_process_of_many_runs_starts_once_for_each_arm(corpus: str, tmp_path: Path) -> None:
    spec = small_spec(corpus, tuning_seeds=2)
    runs = list(plan_tuning_runs(spec))
    summary = {"seconds": 3.0, "population": 4, "seconds_of_last_process": {"all": 40.0}}
    timed = Study(spec, tmp_path)
    timed.runs.results = {run: RunResult(run, "finished", summary) for run in runs}
    assert timed.runs.estimate_wall_clock(runs, 2) == pytest.approx(SLACK * (2 * 28 + 8 * 3) / 2)


def test_slices_of_a_growing_study_make_the_same_runs(corpus: str, tmp_path: Path) -> None:
    spec = small_spec(corpus, lrs=[1e-3, 2e-3, 4e-3], extend=2, seeds=3, tuning_seeds=3)
    done: list[str] = []
    results: list[RunResult] = []

    def count_and_stop(unit: Unit, task: RunTask) -> None:
        train_as(BEST)(unit, task)
        done.append(task.name)
        raise StudyInterrupted("the slice is over")

    for number in range(100):
        try:
            with Study(spec, tmp_path).open() as again:
                results = again.carry_out(InProcess(count_and_stop), RecordingDisplay())
            break
        except StudyInterrupted:
            assert len(done) == number + 1
    assert len(done) == len(set(done)) == len(results) == 2 * 4 * 3
    with Study(spec, tmp_path).open() as again:
        nothing = InProcess()
        assert again.carry_out(nothing, RecordingDisplay()) == results
        assert nothing.units == []


def test_a_population_takes_in_what_an_earlier_arm_added(corpus: str, tmp_path: Path) -> None:
    spec = small_spec(corpus, lrs=[1e-3, 2e-3, 4e-3], extend=2, seeds=3, tuning_seeds=3)

    class Stacking(InProcess):
        def wait(self, seconds: float) -> list[RunTask]:
            units, self.waiting = self.waiting, []
            for task in (task for unit in units for task in unit.tasks):
                train_as({"standard": 4e-3, "k=v": 4e-3})(units[0], task)
            return [task for unit in units for task in unit.tasks]

    executor = Stacking()
    assert executor.slots == WorkerSlots(1, 1)
    with Study(spec, tmp_path, execution={"population": 100}).open() as stacked:
        stacked.carry_out(executor, RecordingDisplay())
    assert [len(unit.tasks) for unit in executor.units] == [9, 12, 3]  # standard, all of k=v, the rest of standard


# What the grid says of an arm


def test_sensitivity_is_the_mean_loss_above_the_best_up_to_that_of_an_untrained_model() -> None:
    found = measure_sensitivity([[3.0, 2.0, math.inf], [3.4, 2.2, 9.0]], 1, untrained=5.0)
    assert found.mean == pytest.approx(((1 + 0 + 3) / 3 + (1.2 + 0 + 2.8) / 3) / 2)
    assert found.half == pytest.approx(0.0, abs=1e-9)
    assert measure_sensitivity([[3.0, 2.0]], 1, 5.0).half is None
    chance = np.random.default_rng(0)
    truth, covered, studies = 0.2, 0, 2000
    for values in 2 + np.array([0.3, 0.0, 0.3]) + 0.1 * chance.standard_normal((studies, 5, 3)):
        own = measure_sensitivity(values.tolist(), 1, 9.0)
        assert own.half is not None
        covered += abs(own.mean - truth) < own.half
    assert abs(covered / studies - 0.95) < 0.02


def test_the_best_rate_is_among_those_named_as_often_as_is_said() -> None:
    chance, studies = np.random.default_rng(1), 2000
    equal = 0.1 * chance.standard_normal((studies, 5, 8))  # the first of eight, at an end: no other brings it in
    found = [find_best_rates(values.tolist(), int(values.mean(0).argmin())) for values in equal]
    assert sum(0 in each for each in found) / studies > 0.95 - 3.3 * math.sqrt(0.05 * 0.95 / studies)
    for depth in (0.03, 0.5):
        named, widths = 0, 0
        for values in depth * np.array([1.0, 0.0, 1.0, 4.0]) + 0.1 * chance.standard_normal((studies, 5, 4)):
            found = find_best_rates(values.tolist(), int(values.mean(0).argmin()))
            named, widths = named + (1 in found), widths + len(found)
        assert named / studies > 0.95 - 3.3 * math.sqrt(0.05 * 0.95 / studies)
    assert widths / studies < 1.2  # and only those, where the others are clearly worse
    assert find_best_rates([[1.0, 2.0, math.inf], [1.0, 2.0, 1.5]], 0) == [0]
    assert find_best_rates([[1.0, 1.0], [1.0, 1.0]], 0) == [0, 1]


def simulate_verdicts(
    curvature: float, extend: int, tuning_seeds: int, centre: float = 1.5, effect: float = 0.0
) -> Any:
    """p and mean of the paired difference in 2,000 studies of five seeds of two arms whose best rate lies so many steps
    above the middle of the grid: each chooses by its mean validation loss, and is compared on test."""
    chance, studies, n = np.random.default_rng(2), 2000, 5
    spec = study(extend=extend, seeds=n, tuning_seeds=tuning_seeds)
    lrs = spec.widest_grid
    curve = curvature * (np.arange(len(lrs)) - extend - 1 - centre) ** 2
    shared, runs = chance.standard_normal((studies, 1, n, 1)), chance.standard_normal((studies, 2, n, len(lrs)))
    valid = curve + shared + 0.2 * runs
    test = valid + 0.02 * chance.standard_normal(valid.shape)
    differences = np.empty((studies, n))
    for k in range(studies):
        losses = {
            (arm, lr): dict(enumerate(valid[k, a, :tuning_seeds, i]))
            for a, arm in enumerate(spec.arms)
            for i, lr in enumerate(lrs)
        }
        grid = find_grid(spec, losses).lrs
        chosen = [lrs.index(choose_rate(losses, arm, grid) or 0) for arm in spec.arms]
        differences[k] = test[k, 1, :, chosen[1]] + effect - test[k, 0, :, chosen[0]]
    return stats.ttest_1samp(differences, 0, axis=1).pvalue, differences.mean(1)


@pytest.mark.parametrize("curvature", [0.0, 0.03, 0.1, 0.3])
def test_extending_the_grid_adds_no_false_alarms_where_all_seeds_tune(curvature: float) -> None:
    fixed, extended = (np.mean(simulate_verdicts(curvature, extend, 5)[0] < 0.05) for extend in (0, 2))
    chance_alone = 3.3 * math.sqrt(0.05 * 0.95 / 2000)
    assert fixed < 0.05 + chance_alone
    assert extended < 0.05 + chance_alone


def test_one_seed_that_tunes_for_all_makes_false_alarms_and_planted_effects_are_found() -> None:
    assert np.mean(simulate_verdicts(0.3, 2, 1, centre=0.0)[0] < 0.05) > 0.1  # why compare lets all seeds try all rates
    p, mean = simulate_verdicts(0.3, 2, 5, effect=-0.6)
    assert np.mean((p < 0.05) & (mean < 0)) > 0.9
    assert np.mean(p < 0.05) - np.mean((p < 0.05) & (mean < 0)) == 0


def test_a_folder_knows_runs_beyond_the_grid(corpus: str, tmp_path: Path) -> None:
    spec = small_spec(corpus, extend=1)
    fabricate(spec, tmp_path, PlannedRun(corpus, "k=v", 1e-1, 0))
    assert [r.planned.lr for r in read_results(tmp_path, spec)] == [1e-1]
    assert isinstance(read_results(tmp_path, spec)[0], RunResult)
    assert find_grids(spec, [])[corpus].lrs == [1e-3, 1e-2]


def test_a_best_at_the_end_of_a_grid_that_may_not_grow_is_told(corpus: str, tmp_path: Path) -> None:
    spec = small_spec(corpus, lrs=[1e-3, 2e-3, 4e-3], seeds=1)
    with Study(spec, tmp_path).open() as whole:
        results = whole.carry_out(InProcess(train_as(BEST)), RecordingDisplay())
    assert derive_findings(spec, results, corpus).notes[-1] == (
        "k=v did best at an end of the learning rates tried (0.001, 0.002, 0.004): another might do better still."
    )
