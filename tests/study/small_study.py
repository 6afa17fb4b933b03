"""A study small enough to be disturbed many times, and what must be true of it afterwards."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qklab.runs import RunDirectory
from qklab.runs.progress import Display
from qklab.study.execute import Study, StudyInterrupted
from qklab.study.executors import Executor, RunTask, Unit, WorkerSlots
from qklab.study.executors.local import LocalExecutor
from qklab.study.executors.worker import POLL, perform_runs
from qklab.study.plan import PlannedRun
from qklab.study.records import RunResult
from qklab.study.spec import StudySpec

STEPS = 60
CLOCKS = ("seconds", "tokens_per_second", "peak_memory_bytes", "seconds_of_last_process")


def small_spec(corpus: str, /, steps: int = STEPS, **changes: Any) -> StudySpec:
    """Four runs that tune and two that confirm."""
    values = {
        "name": "small",
        "baseline": "standard",
        "arms": {"standard": {}, "k=v": {"attention": {"share": "k=v"}}},
        "base": {
            "model": {"layers": 1, "width": 16, "context": 16},
            "attention": {"heads": 2},
            "batch": {"sequences": 2},
            "budget": {"tokens": steps * 2 * 16},
            "evaluation": {"times": 4, "tokens": 64, "probes": 1, "probe_tokens": 16},
        },
        "corpora": [corpus],
        "lrs": [1e-3, 1e-2],
        "seeds": 2,
    }
    return StudySpec.from_dict(values | changes)


class RecordingDisplay(Display):
    """Keeps what a study says, and does `act` with its folder whenever it shows how far it is."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.sentences: list[str] = []
        self.shown: list[tuple[float, str]] = []
        self.act = act

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def show(self, done: float, line: str) -> None:
        self.shown.append((done, line))
        self.act()

    def count(self, words: str) -> int:
        return sum(words in sentence for sentence in self.sentences)


def carry_out(
    spec: StudySpec, folder: Path, display: Display | None = None, executor: Executor | None = None
) -> list[RunResult]:
    with Study(spec, folder).open() as study:
        return study.carry_out(executor or LocalExecutor("cpu", 2), display or RecordingDisplay())


class InProcess:
    """An executor that does its units here and now; `act` does a task in the place of training."""

    def __init__(self, act: Callable[[Unit, RunTask], object] | None = None, count: int = 1):
        self.slots, self.act = WorkerSlots(count, 1), act
        self.units: list[Unit] = []
        self.waiting: list[Unit] = []

    @property
    def free(self) -> int:
        return self.slots.count - len(self.waiting)

    def submit(self, unit: Unit) -> None:
        self.units.append(unit)
        self.waiting.append(unit)

    def wait(self, seconds: float) -> list[RunTask]:
        units, self.waiting = self.waiting, []
        for unit in units:
            for tasks in unit.split_groups():
                perform_runs(unit, tasks) if self.act is None else self.act(unit, tasks[0])
        return [task for unit in units for task in unit.tasks]

    def stop(self) -> int:
        return 0

    def close(self) -> None: ...


def fabricate(spec: StudySpec, folder: Path, planned: PlannedRun, status: str = "finished", **other: Any) -> None:
    """A run that has ended, without its training."""
    run = planned.resolve_spec(spec).replace(precision="fp32", **other)
    directory = RunDirectory(planned.folder_in(folder))
    directory.path.mkdir(parents=True)
    directory.write("run.json", {"id": "x", "spec": run.to_dict(), "data": {}, "environment": {}})
    value = {"loss": 2.0 + planned.lr + 0.1 * planned.seed, "bits_per_byte": 1.0}
    evaluation = {"valid": value, "test": value} if status == "finished" else {}
    directory.write("summary.json", {"status": status, "evaluation": evaluation, "seconds": 1.0})


def drive(act: Callable[..., object], arguments: tuple[Any, ...], code: Any) -> None:
    """Call `act` in a process of its own; `code` becomes what the command would exit with."""
    os.setsid()
    try:
        act(*arguments)
        code.value = 0
    except StudyInterrupted as error:
        code.value = error.code


def read_comparable(folder: Path) -> dict[str, Any]:
    """Everything that the runs of a study left behind but clocks and names."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("runs/*/*/*/run.json")):
        directory = RunDirectory(path.parent)
        summary = directory.summary()
        assert summary is not None
        last = sorted(directory.checkpoints_path.glob("step-*"))[-1]
        weights = {file.name: file.read_bytes() for file in last.glob("*.safetensors")}
        assert weights
        found[str(path.parent.relative_to(folder))] = {
            "metrics": [{k: v for k, v in record.items() if k != "time"} for record in directory.metrics()],
            "summary": {name: value for name, value in summary.items() if name not in CLOCKS},
            "last checkpoint": (last.name, weights),
            "probes": {file.name: file.read_bytes() for file in directory.probes_path.iterdir()},
        }
    return found


def check_whole(folder: Path, expected: dict[str, Any]) -> None:
    """Every run is there once, none lost, none doubled, all equal to those of the undisturbed study."""
    found = read_comparable(folder)
    assert list(found) == list(expected)
    for name, run in found.items():
        assert run == expected[name], name
        assert run["last checkpoint"][0] == f"step-{STEPS:010d}"
        steps = [record["step"] for record in run["metrics"] if record["kind"] == "train"]
        assert steps == list(range(1, STEPS + 1))
    ids = [RunDirectory(folder / name).read()["id"] for name in found]
    assert len(set(ids)) == len(ids)
    for name, own in zip(found, ids, strict=True):
        manifests = (folder / name).glob("checkpoints/step-*/manifest.json")
        assert {json.loads(path.read_text())["run"] for path in manifests} == {own}


def check_saved(folder: Path) -> None:
    """Nothing that a run has recorded is lost: it is saved up to there."""
    for path in unfinished(folder):
        steps = len(RunDirectory(path).metrics("train"))
        assert steps == 0 or (path / "checkpoints" / f"step-{steps:010d}").exists(), path


def unfinished(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob("runs/*/*/*/run.json") if not (path.parent / "summary.json").exists()]


def resumes(folder: Path) -> list[int]:
    """The steps at which runs were resumed."""
    lines = [line for path in folder.glob("runs/*/*/*/metrics.jsonl") for line in path.read_bytes().splitlines()]
    return [json.loads(line)["step"] for line in lines if b'"kind": "resume"' in line]


def until(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"no {what} within {seconds:g} s")


def state(pid: int) -> list[str]:
    """What the system says of a process from its state on; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    return state(pid)[:1] not in ([], ["Z"], ["X"])


def parent(pid: int) -> int:
    """0 where there is none."""
    return int(found[1]) if (found := state(pid)) else 0


def caught(folder: Path, fits: Callable[[int], bool] = lambda _: True) -> tuple[Path, int] | None:
    """A run in the midst of its steps, with as many still to do, and its process, which is now stopped."""
    for path in unfinished(folder):
        pid = int((path / "lock").read_text() or 0)
        if not pid or not alive(pid) or not steps_of(path) or not fits(pid):
            continue
        os.kill(pid, signal.SIGSTOP)
        until(lambda pid=pid: state(pid)[:1] in (["T"], ["Z"], []), "stop of the process")
        if 0 < steps_of(path) < STEPS / 2 and state(pid)[:1] == ["T"]:
            return path, pid
        os.kill(pid, signal.SIGCONT)
    return None


def let_go(*pids: int) -> None:
    """Continue runs that were caught, once they have slept long enough to notice at once whose children they are."""
    time.sleep(2 * POLL)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def let_go_when_asked(pid: int) -> None:
    """Continue a run that was caught, once SIGTERM waits for it."""

    def asked() -> bool:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return True
        return bool(int(status.split("ShdPnd:")[1].split()[0], 16) & 1 << signal.SIGTERM - 1)

    def wait() -> None:
        until(asked, "request to stop")
        os.kill(pid, signal.SIGCONT)

    threading.Thread(target=wait).start()


def steps_of(path: Path) -> int:
    """The step that a run is at; 0 if the process that has its lock has not recorded one yet."""
    record = path / "metrics.jsonl"
    if not record.exists() or record.stat().st_mtime_ns <= (path / "lock").stat().st_mtime_ns:
        return 0
    records = [json.loads(line) for line in record.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return records[-1]["step"] if records and records[-1]["kind"] == "train" else 0
