"""Processes killed while they save, and disks that refuse: what was whole before is whole afterwards."""

import errno
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from checkpoint_tools import all_bits, make_tensors, names, newest, save_steps
from safetensors.torch import save_file
from torch import Tensor

from qklab.runs import files
from qklab.testing.processes import start_process
from qklab.train.checkpoint import CheckpointError, Checkpoints, Snapshot

SCRIPT = [(1, True), (2, False), (2, True), (3, False), (4, False)]  # steps and whether they are the best


def die_at(point: int, passed: list[int]) -> None:
    """Kill this process before the `point`-th thing it does to the disk."""

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            pass_point()
            return call(*given, **named)

        return counting

    def pass_point() -> None:
        if passed[0] == point:
            os.kill(os.getpid(), signal.SIGKILL)
        passed[0] += 1

    def save_in_halves(tensors: dict[str, Tensor], path: Path, *given: Any) -> None:
        save_file(tensors, path, *given)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        pass_point()
        path.write_bytes(content)

    setattr(os, "fsync", counted(lambda handle: None))  # noqa: B010 (a kill loses nothing unflushed, and this is faster)
    for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    safetensors.torch.save_file = save_in_halves


def save_all(folder: str, point: int, report: Connection) -> None:
    passed = [0]
    die_at(point, passed)
    checkpoints = Checkpoints(Path(folder), keep=2, run="mine")
    for number, (step, best) in enumerate(SCRIPT):
        checkpoints.save(Snapshot(step, make_tensors(step, number), {"number": number}), best=best)
        checkpoints.wait()
        report.send(number)
    report.send(("points", passed[0]))


def start(work: Callable[..., None], *given: Any) -> tuple[BaseProcess, Connection]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = start_process(work, *given, theirs)
    theirs.close()
    return process, ours


def messages(report: Connection) -> Iterator[Any]:
    while True:
        try:
            yield report.recv()
        except EOFError:
            return


def check_all_is_well(folder: Path, last: int) -> None:
    """After a death during or after save number `last` + 1."""
    said: list[str] = []
    checkpoints = Checkpoints(folder, keep=2, run="mine", say=said.append)
    found = checkpoints.find_newest()
    if found is None:
        assert last == -1
        return
    assert said == []
    number = found.state["number"]
    assert number in (last, last + 1)
    assert found.step == SCRIPT[number][0]
    assert all_bits(found.read_tensors()) == all_bits(make_tensors(found.step, number))
    best = checkpoints.find_best()
    bests = [n for n, (_, is_best) in enumerate(SCRIPT[: number + 1]) if is_best]
    assert (best.state["number"] if best else None) == (bests[-1] if bests else None)
    checkpoints.save(Snapshot(6, make_tensors(6), {}))
    checkpoints.wait()
    assert newest(checkpoints).step == 6
    assert said == []
    assert [path.name for path in folder.iterdir() if path.name.startswith(".tmp")] == []


def test_killed_at_every_point_of_every_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    process, report = start(save_all, str(tmp_path / "whole"), -1)
    *numbers, (_, points) = messages(report)
    process.join()
    assert numbers == list(range(len(SCRIPT)))
    assert points > 80
    check_all_is_well(tmp_path / "whole", numbers[-1])
    for point in range(points):
        folder = tmp_path / str(point)
        process, report = start(save_all, str(folder), point)
        done = list(messages(report))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        check_all_is_well(folder, done[-1] if done else -1)
        shutil.rmtree(folder, ignore_errors=True)


REFUSALS = [
    (os, "mkdir", errno.EACCES, "make the folder writable"),
    (os, "fsync", errno.EIO, "look after the disk"),
    (os, "fsync", errno.ENOSPC, "free some space"),
    (os, "fsync", errno.EFBIG, "raise the limit on the size of files"),
    (os, "rename", errno.EROFS, "make the folder writable"),
    (files, "flush_to_disk", errno.EDQUOT, "free some space"),
]


@pytest.mark.parametrize(("module", "name", "number", "advice"), REFUSALS)
def test_every_refusal_of_the_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int, advice: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    checkpoints = save_steps(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        checkpoints.save(Snapshot(2, make_tensors(2), {}))
        message = f"of step 2 could not be written to .*: {os.strerror(number)}; {advice} and resume"
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(Snapshot(3, make_tensors(3), {}))
    assert names(tmp_path) == ["step-0000000001"]
    assert all_bits(newest(checkpoints).read_tensors()) == all_bits(make_tensors(1))


def test_an_old_checkpoint_that_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=1, say=said.append)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    for step in (1, 2):
        checkpoints.save(Snapshot(step, make_tensors(step), {}))
    checkpoints.wait()
    assert said == [f"the old checkpoint {tmp_path / 'step-0000000001'} could not be deleted: Device or resource busy."]
