"""Interrupted equals uninterrupted: killed anywhere, resumed, the same to the last bit."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Settings, comparable, train_until

from qklab.optim.optimiser import Optimiser
from qklab.runs import MetricsFile, RunDirectory
from qklab.testing.processes import finish_process, start_process
from qklab.train.launch import EXIT_CODES, train
from qklab.train.loop import Loop, Member
from qklab.train.objective import Objective
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.trainer import Trainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function: Callable[..., Any], call: int, before: bool) -> Callable[..., Any]:
    """`function` that kills its process at its `call`-th call, before or after doing its work."""
    calls = itertools.count(1)  # threads save: what each counts must be its own

    def wrapped(*arguments: Any, **options: Any) -> Any:
        mine = next(calls)
        if mine == call and before:
            die()
        result = function(*arguments, **options)
        if mine == call:
            die()
        return result

    return wrapped


def half_a_line(append: Callable[..., None], call: int) -> Callable[..., None]:
    lines = 0

    def wrapped(self: MetricsFile, record: dict[str, Any]) -> None:
        nonlocal lines
        lines += 1
        if lines == call:
            os.write(self.descriptor, b'{"kind": "train", "st')
            die()
        append(self, record)

    return wrapped


HALF = "in the middle of a line"
# what to break, at which call, before or after: from the first step to the very end of the run
POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "before the first step": (Trainer, "step", 1, True),
    "before the second update": (Optimiser, "step", 2, True),
    "after the second update": (Optimiser, "step", 2, False),
    "between update and record": (Member, "append_step", 3, True),
    HALF: (MetricsFile, "append", 6, True),
    "before the first evaluation": (Trainer, "evaluate", 1, True),
    "after the first evaluation": (Trainer, "evaluate", 1, False),
    "in the second evaluation": (Objective, "forward", 9, True),
    "before a probe": (Trainer, "take_probe", 1, True),
    "after a probe": (Trainer, "take_probe", 2, False),
    "before the first checkpoint": (Loop, "save", 1, True),
    "after the second checkpoint": (Loop, "save", 2, False),
    "while a checkpoint's file is flushed": (os, "fsync", 9, True),
    "between write and rename of the first checkpoint": (os, "rename", 1, True),
    "after the rename of the first checkpoint": (os, "rename", 1, False),
    "between write and rename of the third checkpoint": (os, "rename", 3, True),
    "while an old checkpoint is deleted": (os, "rename", 5, False),
    "after the last step": (Trainer, "step", 12, False),
    "at the last checkpoint": (Loop, "save", 5, True),
    "in the final evaluation": (Trainer, "evaluate", 4, True),
    "between the final evaluations": (Trainer, "evaluate", 5, True),
    "before the summary": (RunDirectory, "write", 2, True),
}


def train_and_die(spec: RunSpec, execution: ExecutionSpec, folder: Path, point: str) -> None:
    target, name, call, before = POINTS[point]
    plain = getattr(target, name)
    setattr(target, name, half_a_line(plain, call) if point == HALF else dying(plain, call, before))
    train(spec, folder, execution)


def kill_at(point: str, settings: Settings, folder: Path) -> None:
    code = finish_process(start_process(train_and_die, *settings(), folder, point))
    assert code == -signal.SIGKILL, f"not killed {point}"


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed_is_bit_equal(point: str, settings: Settings, tiny_run: Path, tmp_path: Path) -> None:
    kill_at(point, settings, tmp_path / "run")
    assert train_until(None, *settings(), tmp_path / "run") == "finished"
    assert comparable(tmp_path / "run") == comparable(tiny_run)


def test_killed_again_and_again(settings: Settings, tiny_run: Path, tmp_path: Path) -> None:
    for point in ("between update and record", "between write and rename of the first checkpoint", "after a probe"):
        kill_at(point, settings, tmp_path / "run")
    assert train_until(None, *settings(), tmp_path / "run") == "finished"
    assert comparable(tmp_path / "run") == comparable(tiny_run)


def train_until_asked(spec: RunSpec, execution: ExecutionSpec, folder: Path) -> None:
    """Train, and wait before the fourth step until someone asks to stop, whatever else the machine does."""
    plain = Trainer.step

    def slow(self: Trainer, *arguments: Any) -> Any:
        until, listening = time.monotonic() + 60, signal.getsignal(signal.SIGTERM)
        while self.states[0].step == 3 and signal.getsignal(signal.SIGTERM) == listening and time.monotonic() < until:
            time.sleep(0.01)
        return plain(self, *arguments)

    Trainer.step = slow  # pyright: ignore[reportAttributeAccessIssue]
    os._exit(EXIT_CODES[train(spec, folder, execution).status])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_says_so_with_its_exit_code(
    number: signal.Signals, settings: Settings, tiny_run: Path, tmp_path: Path
) -> None:
    spec, execution = settings(execution={"checkpoint_steps": 1000})
    folder = tmp_path / "run"
    process = start_process(train_until_asked, spec, execution, folder)
    while len(RunDirectory(folder).metrics("train")) < 3:
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert finish_process(process) == 75
    steps = len(RunDirectory(folder).metrics("train"))
    assert 3 <= steps < 12
    assert (folder / "checkpoints" / f"step-{steps:010d}").exists()
    assert RunDirectory(folder).summary() is None
    assert train_until(None, spec, execution, folder) == "finished"
    assert comparable(folder) == comparable(tiny_run)


def test_a_checkpoint_is_due_by_the_clock(settings: Settings, tmp_path: Path) -> None:
    settled = settings(execution={"checkpoint_steps": None, "checkpoint_minutes": 1e-6})
    assert train_until(None, *settled, tmp_path / "run") == "finished"
    assert (tmp_path / "run" / "checkpoints" / "step-0000000011").exists()


def test_a_finished_run_is_left_alone(settings: Settings, tiny_run: Path) -> None:
    before = comparable(tiny_run)
    again = train(settings()[0], tiny_run, settings()[1])
    assert (again.status, again.summary) == ("finished", RunDirectory(tiny_run).summary())
    assert comparable(tiny_run) == before
