"""Many runs in one step: each what it would be alone, whatever happens to the others."""

import json
import math
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_interruption import dying
from tiny import Settings, comparable, losses, tiny

from qklab.runs import MetricsFile, RunDirectory, RunError
from qklab.testing.processes import finish_process, start_process
from qklab.train.launch import train, train_population
from qklab.train.load import load_model
from qklab.train.loop import Loop
from qklab.train.objective import Objective
from qklab.train.population import PopulationTrainer, choose_population_size, explain_solo
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.trainer import Trainer

RATES = (3e-3, 1e-3, 1e-2)
SEEDS = (0, 1, 0)


def members(settings: Settings, **changes: Any) -> tuple[list[RunSpec], ExecutionSpec]:
    """Three runs of two seeds and three learning rates."""
    spec, execution = settings(**changes)
    specs = [
        spec.replace(seed=seed, optimiser=spec.optimiser.replace(lr=lr)) for seed, lr in zip(SEEDS, RATES, strict=True)
    ]
    return specs, execution


def places(folder: Path, count: int = 3) -> list[Path]:
    return [folder / f"run{number}" for number in range(count)]


def note_groups(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many runs go on together from now on, and from which step."""
    groups, run = list[tuple[int, int]](), Loop.run

    def noted(self: Loop, *given: Any) -> Any:
        groups.append((len(self.members), self.state.step))
        return run(self, *given)

    patch.setattr(Loop, "run", noted)
    return groups


def train_together_until(step: int, specs: Sequence[RunSpec], folders: Sequence[Path], execution: ExecutionSpec) -> Any:
    """Train a population up to a step, where someone asks to stop; how its runs ended."""
    plain = Loop.should_stop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "should_stop", lambda self, stop: plain(self, stop) or self.state.step == step)
        return train_population(specs, folders, execution)


@pytest.fixture(scope="module")
def whole(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A population trained in one go; not to be changed."""
    folders = places(tmp_path_factory.mktemp("population"))
    specs, execution = members(lambda **changes: tiny(corpus_folder, **changes))
    assert [outcome.status for outcome in train_population(specs, folders, execution)] == ["finished"] * 3
    return folders


def test_each_member_is_the_run_it_would_be_alone(settings: Settings, whole: list[Path], tmp_path: Path) -> None:
    specs, execution = members(settings)
    for spec, folder in zip(specs, whole, strict=True):
        alone = train(spec, tmp_path / folder.name, execution)
        record, summary = RunDirectory(folder).read(), RunDirectory(folder).summary()
        assert summary is not None
        assert alone.summary is not None
        assert record["fingerprint"] == spec.replace(precision="fp32").fingerprint
        assert record["population"] == summary["population"] == 3
        assert losses(folder) == pytest.approx(losses(alone.folder), rel=1e-5)
        assert summary["evaluation"]["test"]["loss"] == pytest.approx(
            alone.summary["evaluation"]["test"]["loss"], rel=1e-5
        )
        assert summary.keys() - {"population"} == alone.summary.keys()
        own, solo = comparable(folder), comparable(alone.folder)
        assert [line.keys() for line in own["metrics"]] == [line.keys() for line in solo["metrics"]]
        assert own["probes"].keys() == solo["probes"].keys()
        for mine, theirs in zip(
            load_model(folder)[0].parameters(), load_model(alone.folder)[0].parameters(), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-5)


def test_a_population_that_was_stopped_goes_on_together_or_alone(
    settings: Settings, whole: list[Path], tmp_path: Path
) -> None:
    specs, execution = members(settings)
    outcomes = train_together_until(7, specs, places(tmp_path), execution)
    assert [outcome.status for outcome in outcomes] == ["interrupted"] * 3
    shutil.copytree(tmp_path, tmp_path.with_name("apart"))
    train_population(specs, places(tmp_path), execution)
    for folder, expected in zip(places(tmp_path), whole, strict=True):
        assert comparable(folder) == comparable(expected)
    for spec, folder, expected in zip(specs, places(tmp_path.with_name("apart")), whole, strict=True):
        assert train(spec, folder, execution).status == "finished"
        assert losses(folder) == pytest.approx(losses(expected), rel=1e-5)


def test_a_member_that_diverges_ends_and_changes_no_bit_of_the_others(
    settings: Settings, whole: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, execution = members(settings, max_skips=2)
    plain = Objective.forward

    def broken(self: Objective, *given: Any, per_token: bool = False, **options: Any) -> Any:
        loss, nll = plain(self, *given, per_token=per_token, **options)
        if per_token or trainer[0].states[0].step < 4:
            return loss, nll
        bad = torch.tensor([0.0, math.nan, 0.0])
        return loss * (1 + bad), nll + bad

    trainer: list[PopulationTrainer] = []
    build = PopulationTrainer.__init__
    monkeypatch.setattr(
        PopulationTrainer, "__init__", lambda self, *given: (trainer.append(self), build(self, *given))[1]
    )
    monkeypatch.setattr(Objective, "forward", broken)
    outcomes = train_population(specs, places(tmp_path), execution)
    assert [outcome.status for outcome in outcomes] == ["finished", "diverged", "finished"]
    lost = outcomes[1].summary
    assert lost is not None
    assert (lost["steps"], lost["skipped_steps"]) == (7, 3)
    records = RunDirectory(places(tmp_path)[1]).metrics("train")
    assert [record["step"] for record in records if record.get("skipped")] == [5, 6, 7]
    for number in (0, 2):
        assert comparable(places(tmp_path)[number]) == comparable(whole[number])


# what to break, at which call, before or after
POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "before the first step": (PopulationTrainer, "step", 1, True),
    "between two members' records": (MetricsFile, "append", 8, True),
    "in the first evaluation": (Objective, "forward", 5, True),
    "between two members' probes": (PopulationTrainer, "take_probe", 2, True),
    "between the first checkpoints of two members": (PopulationTrainer, "snapshot", 2, True),
    "between later checkpoints of two members": (PopulationTrainer, "snapshot", 8, False),
    "during one member's rename": (os, "rename", 2, True),
    "after one member's rename": (os, "rename", 5, False),
    "after the last step": (PopulationTrainer, "step", 12, False),
    "in the final evaluation": (PopulationTrainer, "evaluate", 4, True),
    "between two summaries": (RunDirectory, "write", 4, False),
}


def train_and_die(point: str, specs: Sequence[RunSpec], folders: Sequence[Path], execution: ExecutionSpec) -> None:
    target, name, call, before = POINTS[point]
    setattr(target, name, dying(getattr(target, name), call, before))
    train_population(specs, folders, execution)


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_and_resumed_it_is_the_undisturbed_population(
    point: str, settings: Settings, whole: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, execution = members(settings)
    process = start_process(train_and_die, point, specs, places(tmp_path), execution)
    assert finish_process(process) == -signal.SIGKILL
    began = note_groups(monkeypatch)
    assert [outcome.status for outcome in train_population(specs, places(tmp_path), execution)] == ["finished"] * 3
    assert len(began) == 1  # all of them went on together
    for folder, expected in zip(places(tmp_path), whole, strict=True):
        assert comparable(folder) == comparable(expected)


def test_a_damaged_checkpoint_costs_its_own_member_alone(
    settings: Settings, whole: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, execution = members(settings, execution={"checkpoint_steps": 3, "keep": 3})
    train_together_until(9, specs, places(tmp_path), execution)
    newest = max((places(tmp_path)[1] / "checkpoints").glob("step-*"))
    for file in newest.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8] + b"damaged!")
    began = note_groups(monkeypatch)
    train_population(specs, places(tmp_path), execution)
    assert began[0] == (2, 9)
    assert began[1][0] == 1
    assert began[1][1] < 9
    for folder, expected in zip(places(tmp_path), whole, strict=True):
        assert losses(folder) == pytest.approx(losses(expected), rel=1e-5)


def test_a_run_that_never_began_sets_nobody_back(
    settings: Settings, whole: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, execution = members(settings)
    train_together_until(3, specs[:2], places(tmp_path)[:2], execution)
    began = note_groups(monkeypatch)
    train_population(specs, places(tmp_path), execution)
    assert began == [(2, 3), (1, 0)]
    for folder, expected in zip(places(tmp_path), whole, strict=True):
        assert losses(folder) == pytest.approx(losses(expected), rel=1e-5)


def test_what_does_not_fit_goes_on_in_smaller_populations(
    settings: Settings, whole: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, execution = members(settings)
    step = PopulationTrainer.step

    def fit_two(self: PopulationTrainer, *given: Any) -> Any:
        if len(self.specs) > 2 and self.states[0].step > 5:  # after a save
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *given)

    monkeypatch.setattr(PopulationTrainer, "step", fit_two)
    groups = note_groups(monkeypatch)
    folders = places(tmp_path)
    assert [outcome.status for outcome in train_population(specs, folders, execution)] == ["finished"] * 3
    assert [count for count, _ in groups] == [3, 2, 1]
    assert groups[1][1] == groups[2][1] > 0
    for folder, other in zip(folders, whole, strict=True):
        assert losses(folder)[-1] == pytest.approx(losses(other)[-1], rel=1e-5)

    def refuse(self: Trainer, *given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "step", refuse)
    with pytest.raises(RunError, match="not enough memory"):
        train(specs[0], tmp_path / "alone", execution)


def test_without_kept_checkpoints_a_run_leaves_none_and_is_the_same(
    settings: Settings, whole: list[Path], tmp_path: Path
) -> None:
    specs, execution = members(settings, execution={"keep": 0})
    train_population(specs, places(tmp_path), execution)
    for folder, expected in zip(places(tmp_path), whole, strict=True):
        assert not (folder / "checkpoints").exists()
        assert losses(folder) == losses(expected)
        assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_runs_that_do_not_go_together_are_refused(settings: Settings, tmp_path: Path) -> None:
    specs, execution = members(settings)
    wider, _ = settings(batch={"sequences": 4})
    with pytest.raises(RunError, match="batch"):
        train_population([*specs, wider], places(tmp_path, 4), execution)
    with pytest.raises(RunError, match="at least one run"):
        train_population([], [], execution)
    hurried, _ = settings(budget={"tokens": None, "seconds": 5.0})
    with pytest.raises(RunError, match="seconds"):
        train_population([hurried, hurried.replace(seed=1)], places(tmp_path, 2), execution)
    heavy, _ = settings(batch={"sequences": 2**22})
    with pytest.raises(RunError, match=r"needs about .* GiB and the cpu has .*; train at most \d+ together"):
        train_population([heavy.replace(seed=seed) for seed in range(9)], places(tmp_path, 9), execution)
    assert not any(tmp_path.iterdir())
    assert "seconds" in (explain_solo(hurried) or "")


def test_how_many_go_together(settings: Settings) -> None:
    spec, _ = settings()
    assert choose_population_size(spec, "cpu", "auto", 15) == 1
    assert choose_population_size(spec, "cpu", 4, 15) == 4
    assert choose_population_size(spec, "cpu", 40, 15) == 15
    assert choose_population_size(spec, "cuda", "off", 15) == 1
    assert choose_population_size(settings(budget={"tokens": None, "seconds": 5.0})[0], "cpu", 4, 15) == 1
