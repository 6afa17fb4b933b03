"""Executors: where a study's units of work are carried out.

A unit is one or more runs that go in one process. An executor starts units, says when each run has ended, and begins a
unit again that was lost; what had been saved is not lost with it. Registered ones are found by name.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from qklab.runs.environment import count_cores
from qklab.study.records import find_newest_checkpoint
from qklab.study.spec import StudyError

ATTEMPTS = 3  # a unit that is lost so often without any of its runs having got further has failed
SAVING = 600.0  # seconds that a run gets for saving its state once it was asked to stop


@dataclass(frozen=True)
class WorkerSlots:
    """How many units at a time, and what each gets: threads on a CPU, or one GPU."""

    count: int
    threads: int
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1 or self.threads < 1:
            raise StudyError(
                f"at least 1 run at a time and 1 thread are needed, but {self.count} and {self.threads} came."
            )

    @classmethod
    def of_machine(cls, device: str = "auto", at_once: int | None = None) -> "WorkerSlots":
        """One unit per GPU; on a CPU one per core, each with one thread, which two small runs use better than one run
        uses two."""
        if device not in ("auto", "cpu", "cuda"):
            raise StudyError(f"device must be auto, cpu or cuda, but {device!r} came.")
        if at_once is not None and at_once < 1:
            raise StudyError(f"at least 1 run at a time is needed (--at-once), but {at_once} came.")
        cores = count_cores()
        cuda = device != "cpu" and torch.cuda.is_available()
        if device == "cuda" and not cuda:
            raise StudyError("device cuda came, but torch sees no CUDA device; leave it out or use cpu.")
        gpus = tuple(range(torch.cuda.device_count())) if cuda else ()
        count = at_once or len(gpus) or cores
        return cls(count, max(1, cores // count), gpus)

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    def visible_devices(self, slot: int) -> dict[str, str]:
        """The environment in which a unit of this slot sees its own GPU only."""
        if not self.gpus:
            return {}
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # what this process calls 0 may be another's 3
        gpu = self.gpus[slot % len(self.gpus)]
        return {"CUDA_VISIBLE_DEVICES": seen[gpu].strip() if gpu < len(seen) and seen[gpu].strip() else str(gpu)}


@dataclass(frozen=True)
class RunTask:
    """One run as an executor gets it: the settings of `RunSpec`, and the run directory."""

    name: str
    spec: dict[str, Any]
    folder: Path

    @property
    def log(self) -> Path:
        """What the run's process says."""
        return self.folder / "log.txt"

    @property
    def ended(self) -> bool:
        return (self.folder / "summary.json").exists()


@dataclass(frozen=True, eq=False)
class Unit:
    """Runs that go in one process and what they share: one after another, or, of each corpus, so many `together` as one
    model. With a `url` the runs are kept there."""

    tasks: tuple[RunTask, ...]
    study: Path
    fingerprint: str
    execution: dict[str, Any]
    data: Path | None = None
    url: str | None = None
    together: int = 1

    def split_groups(self) -> list[tuple[RunTask, ...]]:
        """The runs of each model that is trained, one model after another."""
        corpora: dict[str, list[RunTask]] = {}
        for task in self.tasks:
            corpora.setdefault(repr(task.spec.get("corpus")), []).append(task)
        return [
            tuple(own[first : first + self.together])
            for own in corpora.values()
            for first in range(0, len(own), self.together)
        ]

    def measure_progress(self) -> list[tuple[bool, str]]:
        """Of each run whether it has ended, and its newest checkpoint."""
        if self.url is not None:
            from qklab.study.remote import RemoteStudy

            remote = RemoteStudy(self.url, self.study)
            return [remote.measure_progress(task.folder) for task in self.tasks]
        return [(task.ended, find_newest_checkpoint(task.folder)) for task in self.tasks]


class Attempts:
    """Counts the attempts at a unit since one of its runs got further."""

    def __init__(self, unit: Unit):
        self.unit, self.count, self.before = unit, 0, unit.measure_progress()

    def begin(self) -> None:
        self.count += 1

    def may_retry(self) -> bool:
        now = self.unit.measure_progress()
        if now != self.before:
            self.before, self.count = now, 0
        return self.count < ATTEMPTS


class Executor(Protocol):
    """Carries out units of work. An entry of `register.executor` makes one: it is called with `device`, `at_once`,
    `address` and `say`, a function that is told what happens to units."""

    slots: WorkerSlots

    @property
    def free(self) -> int:
        """How many more units have room now."""
        ...

    def submit(self, unit: Unit) -> None:
        """Begin a unit. One that is lost is begun again, as long as it gets further, and `say` is told."""
        ...

    def wait(self, seconds: float) -> list[RunTask]:
        """The runs that ended since the last call; waits for one at most so many seconds. Raises StudyError for a run
        that failed and would fail again."""
        ...

    def stop(self) -> int:
        """Let all runs save their state and end, and return when they have; how many units did not in time."""
        ...

    def close(self) -> None: ...
