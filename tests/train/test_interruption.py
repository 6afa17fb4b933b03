"""Interrupted equals uninterrupted: killed anywhere, resumed, the same to the last bit."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Settings, tiny

from qklab.runs import MetricsFile, RunDirectory
from qklab.train import launch
from qklab.train.launch import train
from qklab.train.loop import Loop
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.trainer import Trainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function: Callable[..., Any], call: int, before: bool) -> Callable[..., Any]:
    """`function` that kills its process at its `call`-th call, before or after doing its work."""
    made = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == call and before:
            die()
        result = function(*arguments, **options)
        if made == call:
            die()
        return result

    return wrapped


def half_a_line(self: MetricsFile, record: dict[str, Any]) -> None:
    os.write(self.descriptor, b'{"kind": "train", "st')
    die()


# what to break, at which call, before or after: from the first step to the very end of the run
POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "before the first step": (Trainer, "step", 1, True),
    "after the first step": (Trainer, "step", 1, False),
    "in the second step, before the update": ("optimiser", "step", 2, True),
    "in the second step, after the update": ("optimiser", "step", 2, False),
    "between update and record": (Loop, "record_step", 3, True),
    "after a record": (Loop, "record_step", 4, False),
    "in the middle of a line": (MetricsFile, "append", 6, True),
    "before the first evaluation": (Trainer, "evaluate", 1, True),
    "after the first evaluation": (Trainer, "evaluate", 1, False),
    "in the second evaluation": ("evaluate", "sum", 9, True),
    "before a probe": (Loop, "take_probe", 1, True),
    "after a probe": (Loop, "take_probe", 2, False),
    "before the first checkpoint": (Loop, "save", 1, True),
    "after the second checkpoint": (Loop, "save", 2, False),
    "while a checkpoint's file is flushed": (os, "fsync", 9, True),
    "between write and rename of the first checkpoint": (Path, "rename", 1, True),
    "after the rename of the first checkpoint": (Path, "rename", 1, False),
    "between write and rename of the third checkpoint": (Path, "rename", 3, True),
    "while an old checkpoint is deleted": (Path, "rename", 5, False),
    "at the last step": (Trainer, "step", 12, True),
    "after the last step": (Trainer, "step", 12, False),
    "at the last checkpoint": (Loop, "save", 5, True),
    "in the final evaluation": (Trainer, "evaluate", 4, True),
    "between the final evaluations": (Trainer, "evaluate", 5, True),
    "before the summary": (RunDirectory, "write", 2, True),
}


def victim(spec: RunSpec, execution: ExecutionSpec, folder: Path, point: str) -> None:
    target, name, call, before = POINTS[point]
    if point == "in the middle of a line":
        count = 0
        plain = MetricsFile.append

        def append(self: MetricsFile, record: dict[str, Any]) -> None:
            nonlocal count
            count += 1
            (half_a_line if count == call else plain)(self, record)

        MetricsFile.append = append
    elif target == "optimiser":
        from qklab.optim.optimiser import Optimiser

        Optimiser.step = dying(Optimiser.step, call, before)
    elif target == "evaluate":
        from qklab.train.objective import Objective

        Objective.forward = dying(Objective.forward, call, before)
    else:
        setattr(target, name, dying(getattr(target, name), call, before))
    train(spec, folder, execution)


def survivor(spec: RunSpec, execution: ExecutionSpec, folder: Path) -> None:
    train(spec, folder, execution)


def comparable(folder: Path) -> dict[str, Any]:
    """Everything a run leaves behind except its clock."""
    directory = RunDirectory(folder)
    metrics = [{k: v for k, v in record.items() if k != "time"} for record in directory.metrics()]
    last = sorted(directory.checkpoints_path.glob("step-*"))[-1]
    files = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    probes = {path.name: path.read_bytes() for path in directory.probes_path.iterdir()}
    summary = directory.summary()
    assert summary is not None
    return {"metrics": metrics, "evaluation": summary["evaluation"], "files": files, "probes": probes}


@pytest.fixture(scope="module")
def uninterrupted(
    spawn: Callable[..., Any], corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    spec, execution = tiny(corpus_folder)
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = spawn(survivor, spec, execution, folder)
    process.join()
    assert process.exitcode == 0
    return comparable(folder)


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed_is_bit_equal(
    point: str, spawn: Callable[..., Any], settings: Settings, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    spec, execution = settings()
    process = spawn(victim, spec, execution, tmp_path / "run", point)
    process.join()
    assert process.exitcode == -signal.SIGKILL, f"not killed {point}"
    process = spawn(survivor, spec, execution, tmp_path / "run")
    process.join()
    assert process.exitcode == 0
    again = comparable(tmp_path / "run")
    assert again["metrics"] == uninterrupted["metrics"]
    assert again == uninterrupted


def test_killed_again_and_again(
    spawn: Callable[..., Any], settings: Settings, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    spec, execution = settings()
    for point in ("after a record", "between write and rename of the first checkpoint", "after a probe"):
        process = spawn(victim, spec, execution, tmp_path / "run", point)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process = spawn(survivor, spec, execution, tmp_path / "run")
    process.join()
    assert comparable(tmp_path / "run") == uninterrupted


def stopping(spec: RunSpec, execution: ExecutionSpec, folder: Path) -> None:
    plain = Trainer.step

    def slow(self: Trainer, *arguments: Any) -> Any:
        time.sleep(0.1)
        return plain(self, *arguments)

    Trainer.step = slow  # pyright: ignore[reportAttributeAccessIssue]
    os._exit(launch.EXIT_CODES[train(spec, folder, execution).status])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_says_so_with_its_exit_code(
    number: signal.Signals,
    spawn: Callable[..., Any],
    settings: Settings,
    uninterrupted: dict[str, Any],
    tmp_path: Path,
) -> None:
    spec, execution = settings(execution={"checkpoint_steps": 1000})
    folder = tmp_path / "run"
    process = spawn(stopping, spec, execution, folder)
    while len(RunDirectory(folder).metrics("train")) < 3:
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 75
    steps = len(RunDirectory(folder).metrics("train"))
    assert 3 <= steps < 12
    assert (folder / "checkpoints" / f"step-{steps:010d}").exists()
    assert RunDirectory(folder).summary() is None
    process = spawn(survivor, spec, execution, folder)
    process.join()
    assert comparable(folder) == uninterrupted


def test_a_finished_run_is_left_alone(settings: Settings, tmp_path: Path) -> None:
    spec, execution = settings()
    first = train(spec, tmp_path / "run", execution)
    before = comparable(tmp_path / "run")
    again = train(spec, tmp_path / "run", execution)
    assert again.status == "finished"
    assert again.summary == first.summary
    assert comparable(tmp_path / "run") == before
