"""Executors: what a unit's process does, how the local executor begins units again, and what survives a kill."""

import dataclasses
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from small_study import (
    RecordingDisplay,
    alive,
    carry_out,
    caught,
    check_saved,
    check_whole,
    let_go,
    let_go_when_asked,
    parent,
    resumes,
    small_spec,
    unfinished,
    until,
)

from qklab.runs import RunDirectory
from qklab.runs.signals import StopRequest
from qklab.study import execute
from qklab.study.execute import Study, StudyInterrupted
from qklab.study.executors import RunTask, Unit, WorkerSlots, local, worker
from qklab.study.executors.local import LOST, LocalExecutor
from qklab.study.executors.worker import CRASHED, FAILED, StopListener, perform_runs, perform_unit
from qklab.study.plan import plan_tuning_runs
from qklab.study.records import is_in_use
from qklab.study.spec import StudyError
from qklab.train.launch import Outcome
from qklab.train.spec import ExecutionSpec, RunSpec

# killed and stopped


@pytest.mark.long
def test_a_study_survives_whatever_happens_to_its_processes(
    corpus: str, driver: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "study"
    first = driver(carry_out, small_spec(corpus), folder)
    run, orphan = until(lambda: caught(folder), "run under way")
    first.kill()
    first.join()

    second = driver(carry_out, small_spec(corpus), folder)
    _, own = until(lambda: caught(folder, lambda pid: parent(parent(pid)) == second.pid), "run of the second driver")
    assert alive(orphan)
    assert is_in_use(run)  # which the second driver has to wait for
    let_go(orphan)
    until(lambda: not alive(orphan), "end of the orphan")
    forkserver = parent(own)
    os.kill(own, signal.SIGTERM)  # as a system that stops a service or a job does it: to every process
    os.kill(own, signal.SIGCONT)
    os.kill(forkserver, signal.SIGTERM)
    os.kill(second.pid, signal.SIGTERM)
    second.join()
    assert second.code.value == 75
    assert not alive(own)
    check_saved(folder)

    with pytest.MonkeyPatch.context() as patch, Study(small_spec(corpus), folder).open() as study:
        patch.setattr(execute, "SHOW", 0.0)
        patch.setattr(execute, "POLL", 0.01)
        interrupt(study, folder)
        kill(study, folder)
    check_whole(folder, request.getfixturevalue("undisturbed"))
    assert len(resumes(folder)) >= 5


def interrupt(study: Study, folder: Path) -> None:
    """Carry out a study that Ctrl-C stops in the midst of a run."""
    stopped = list[Path]()

    def act() -> None:
        if not stopped and (found := caught(folder)):
            stopped.append(found[0])
            os.kill(os.getpid(), signal.SIGINT)
            let_go_when_asked(found[1])

    with pytest.raises(StudyInterrupted, match=r"^stopped by SIGINT; the same command continues\.$"):
        study.carry_out(LocalExecutor("cpu", 2), RecordingDisplay(act))
    assert stopped[0] in unfinished(folder)
    assert not any(map(is_in_use, unfinished(folder)))
    check_saved(folder)


def kill(study: Study, folder: Path) -> None:
    """Carry out a study in which a run is killed and then, in the midst of another, the process that forks."""
    victims, held, said = list[int](), list[int](), list[str]()

    def count(words: str) -> int:
        return sum(words in sentence for sentence in said)

    def act() -> None:
        if count("its process died") < len(victims):
            return
        if held:
            let_go(held.pop())
        if len(victims) < 2 and (found := caught(folder)):
            victims.append(parent(found[1]) if victims else found[1])
            os.kill(victims[-1], signal.SIGKILL)
            held.extend(found[1:] if len(victims) == 2 else ())

    study.carry_out(LocalExecutor("cpu", 2, say=said.append), RecordingDisplay(act))
    assert len(victims) == 2
    assert not held
    assert count("its process died (SIGKILL, perhaps for want of memory); it is resumed") == 1
    assert 1 <= count("its process died (the process that had forked it is gone); it is resumed") <= 2


def hear_once() -> None:
    """In a process of its own: SIGTERM comes before anyone listens, again, and again while the state is saved."""
    listener = StopListener()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2 * worker.POLL)
    assert listener.asked
    with StopRequest() as stop:
        until(lambda: stop.came, "request")
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * worker.POLL)


def never_save(listens: bool) -> None:
    """In a process of its own: a run that outlived its study and hangs."""
    setattr(worker, "SAVING", 1.0)  # noqa: B010
    StopListener().forked_by = 0
    with StopRequest() if listens else closing(RecordingDisplay()):
        time.sleep(120)


def test_sigterm_is_one_request_however_often_it_comes(driver: Callable[..., Any]) -> None:
    process = driver(hear_once)
    process.join()
    assert (process.exitcode, process.code.value) == (0, 0)


@pytest.mark.parametrize("listens", [True, False])
def test_an_orphan_that_hangs_ends_by_itself(listens: bool, driver: Callable[..., Any]) -> None:
    process = driver(never_save, listens)
    process.join()
    assert process.exitcode == -signal.SIGALRM


# the local executor, with processes that are only played


class Process:
    """Ends at once with a code, or never if that is None; `act` is what it does."""

    def __init__(self, code: int | None, act: Callable[[Unit], object], unit: Unit):
        self.code, self.act, self.unit = code, act, unit
        self.exitcode, self.signals = None, list[str]()
        self.sentinel, self.end = os.pipe()

    def start(self) -> None:
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.act(self.unit)
        if self.code is not None:
            self.exitcode = self.code
            os.close(self.end)

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool:
        return self.exitcode is None

    def terminate(self) -> None:
        self.signals.append("SIGTERM")

    def kill(self) -> None:
        self.signals.append("SIGKILL")
        self.exitcode = -9


class Played:
    """In the place of multiprocessing's context."""

    def __init__(self, code: int | None, act: Callable[[Unit], object] = lambda unit: None):
        self.code, self.act, self.preloaded, self.processes = code, act, list[str](), list[Process]()
        self.environments: list[dict[str, str]] = []

    def set_forkserver_preload(self, names: list[str]) -> None:
        self.preloaded = names

    def Process(self, target: Any, args: tuple[Unit, Any], daemon: bool) -> Process:  # noqa: N802
        assert target is perform_unit
        self.environments.append(args[1])
        self.processes.append(Process(self.code, self.act, args[0]))
        return self.processes[-1]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    def start(*arguments: Any) -> Played:
        played = Played(*arguments)
        monkeypatch.setattr(multiprocessing, "get_context", lambda kind: played)
        return played

    return start


def unit_of(*folders: Path, **changes: Any) -> Unit:
    tasks = tuple(RunTask(folder.name, {}, folder) for folder in folders)
    values = {"study": folders[0].parent, "fingerprint": "", "execution": {"device": "cpu"}} | changes
    return Unit(tasks, **values)


def drain(executor: LocalExecutor) -> list[str]:
    ended: list[str] = []
    while executor.running:
        ended += [task.name for task in executor.wait(1.0)]
    return ended


def say_words(words: str) -> Callable[[Unit], None]:
    def act(unit: Unit) -> None:
        unit.tasks[0].folder.mkdir(exist_ok=True)
        with open(unit.tasks[0].log, "a") as file:
            file.write(f"on a node:\n{words}")

    return act


@pytest.mark.parametrize(
    ("code", "words", "begun", "sentence"),
    [
        (1, "Traceback\nRuntimeError: out of memory\n", 3, r"failed: RuntimeError: out of memory \(all that it said"),
        (-9, "resuming\n", 3, "failed: SIGKILL, perhaps for want of memory"),
        (75, "", 3, r"failed: it ended with code 75 and could say nothing; is the disk full\? \(all"),
        (LOST, "", 3, "failed: the process that had forked it is gone"),
        (0, "done\n", 3, "failed: done"),  # but without a summary
        (FAILED, "the disk is full.\n", 1, r"failed: the disk is full \(all"),
    ],
)
def test_a_run_that_fails_again_and_again_is_told(
    code: int, words: str, begun: int, sentence: str, tmp_path: Path, play: Callable[..., Played]
) -> None:
    played, said = play(code, say_words(words)), list[str]()
    executor = LocalExecutor("cpu", 1, say=said.append)
    executor.submit(unit_of(tmp_path / "run"))
    assert executor.free == 0
    with pytest.raises(StudyError, match=f"^the run run {sentence}"):
        drain(executor)
    assert (len(played.processes), len(said)) == (begun, begun - 1)
    assert executor.free == 1


def test_a_forkserver_that_is_dying_is_waited_for(
    tmp_path: Path, play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [ConnectionRefusedError, EOFError, ConnectionResetError]

    def refuse_twice(unit: Unit) -> None:
        if refusals:
            raise refusals.pop()
        end_run(unit)

    def end_run(unit: Unit) -> None:
        unit.tasks[0].folder.mkdir()
        (unit.tasks[0].folder / "summary.json").touch()

    play(0, refuse_twice)
    executor = LocalExecutor("cpu", 1)
    executor.submit(unit_of(tmp_path / "run"))
    assert drain(executor) == ["run"]

    monkeypatch.setattr(local, "DYING", 0.0)
    refusals += 10 * [ConnectionRefusedError]
    with pytest.raises(ConnectionRefusedError):
        executor.submit(unit_of(tmp_path / "other"))
    assert (executor.free, executor.stop()) == (1, 0)


def test_another_child_of_the_forkserver_can_be_terminated() -> None:
    code = """
import multiprocessing.forkserver, multiprocessing.resource_tracker, signal, sys, time
from qklab.study.executors.local import PRELOADED
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED[:1])
multiprocessing.resource_tracker.ensure_running()  # which would let SIGTERM through again
before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
multiprocessing.forkserver.ensure_running()
signal.pthread_sigmask(signal.SIG_SETMASK, before)
other = context.Process(target=time.sleep, args=(60,))
other.start()
other.terminate()
other.join(20)
sys.exit(other.exitcode != -signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_that_gets_further_each_time_is_resumed_as_often_as_it_takes(
    tmp_path: Path, play: Callable[..., Played]
) -> None:
    def get_further(unit: Unit) -> None:
        if (number := len(played.processes)) <= 5:
            (unit.tasks[0].folder / "checkpoints" / f"step-{number:010d}").mkdir(parents=True)

    played = play(-9, get_further)
    executor = LocalExecutor("cpu", 1, say=lambda sentence: None)
    executor.submit(unit_of(tmp_path / "run"))
    with pytest.raises(StudyError, match="failed: SIGKILL"):
        drain(executor)
    assert len(played.processes) == 5 + 3


def test_each_run_of_a_unit_is_reported_when_it_ends(tmp_path: Path, play: Callable[..., Played]) -> None:
    def finish_another(unit: Unit) -> None:
        left = next(task for task in unit.tasks if not task.ended)
        left.folder.mkdir()
        (left.folder / "summary.json").touch()

    played = play(-9, finish_another)
    executor, names = LocalExecutor("cpu", 1, say=lambda sentence: None), [str(number) for number in range(4)]
    executor.submit(unit_of(*(tmp_path / name for name in names)))
    ended = [[task.name for task in executor.wait(1.0)] for _ in range(3)]
    assert ended == [["0", "1"], ["2"], ["3"]]  # reported though the unit's process died after each
    played.processes[-1].exitcode = 0
    assert drain(executor) == []
    assert played.preloaded == local.PRELOADED


def test_a_run_is_reported_while_its_unit_goes_on_and_a_unit_has_not_ended_before_its_process_has(
    tmp_path: Path, play: Callable[..., Played]
) -> None:
    def finish(unit: Unit) -> None:
        for task in unit.tasks[:1]:
            fill_summary(task)

    def fill_summary(task: RunTask) -> None:
        task.folder.mkdir(exist_ok=True)
        (task.folder / "summary.json").touch()

    play(None, finish)
    executor = LocalExecutor("cpu", 1)
    executor.submit(unit_of(tmp_path / "a", tmp_path / "b"))
    assert [[task.name for task in executor.wait(0.0)] for _ in range(2)] == [["a"], []]
    play(-9, finish)  # which died while it sent what it had
    executor = LocalExecutor("cpu", 1, say=lambda sentence: None)
    executor.submit(unit_of(tmp_path / "a"))
    with pytest.raises(StudyError, match="the run a failed: SIGKILL"):
        drain(executor)


def test_a_run_that_hangs_is_ended(
    tmp_path: Path, play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SAVING", 0.0)
    played = play(None)
    executor = LocalExecutor("cpu", 2)
    executor.submit(unit_of(tmp_path / "a"))
    executor.submit(unit_of(tmp_path / "b"))
    assert [running.slot for running in executor.running] == [0, 1]
    assert executor.wait(0.0) == []
    played.processes[0].exitcode = 75
    assert executor.stop() == 1
    assert [process.signals for process in played.processes] == [[], ["SIGTERM", "SIGKILL"]]
    assert not executor.running


def test_the_local_executor_has_no_address() -> None:
    with pytest.raises(StudyError, match=r"no address, but 'host:1' came"):
        LocalExecutor(address="host:1")


# what a unit's process does


@pytest.fixture
def task(corpus: str, tmp_path: Path) -> RunTask:
    run = next(plan_tuning_runs(small_spec(corpus)))
    return RunTask(run.name, run.resolve_spec(small_spec(corpus)).to_dict(), tmp_path / "run")


def with_task(task: RunTask, **execution: Any) -> Unit:
    return Unit((task,), task.folder.parent, "", {"device": "cpu"} | execution)


def test_a_resumed_run_keeps_its_number_of_threads(task: RunTask, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int | None] = []

    def record(specs: list[RunSpec], folders: list[Path], execution: ExecutionSpec, **_: Any) -> list[Outcome]:
        used.append(execution.threads)
        return [Outcome("interrupted", folder, None) for folder in folders]

    monkeypatch.setattr(worker, "train_population", record)
    assert perform_runs(with_task(task, threads=3), [task]) == 75
    task.folder.mkdir()
    RunDirectory(task.folder).write("run.json", {"spec": task.spec})
    assert perform_runs(with_task(task, threads=3), [task]) == 75
    assert used == [3, None]  # None: what the run began with


def test_what_is_wrong_with_a_run_is_its_last_word(
    task: RunTask, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task.folder.mkdir()
    (task.folder / "metrics.jsonl").write_text("")
    assert perform_runs(with_task(task), [task]) == FAILED
    assert "holds what a run left but no run.json" in capfd.readouterr().err.splitlines()[-1]

    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker, "train_population", break_down)
    assert perform_runs(with_task(task), [task]) == CRASHED
    assert capfd.readouterr().err.splitlines()[-1] == "RuntimeError: out of memory"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_run_that_cannot_even_say_that_the_disk_is_full(task: RunTask, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no space left on device")

    monkeypatch.setattr(worker, "train_population", refuse)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert perform_runs(with_task(task), [task]) == FAILED


class Listener:
    """In the place of StopListener; asked to stop when the folder of the last task is waited for."""

    asked = False
    last = "never"

    def wait_until_free(self, folder: Path) -> None:
        self.asked = folder.name == self.last


@pytest.mark.parametrize(
    ("codes", "last", "done", "code"),
    [
        ([0, 0, 0], "never", 3, 0),
        ([0, 75, 0], "never", 2, 75),
        ([0, FAILED], "never", 2, FAILED),
        ([0, 0, 0], "c", 2, 75),
    ],
)
def test_a_unit_goes_on_to_its_next_run_until_one_does_not_end(
    codes: list[int], last: str, done: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "EXIT_CODES", {"finished": 0, "diverged": 3, "interrupted": 75})
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(Listener, "last", last)
    monkeypatch.setattr(worker, "StopListener", Listener)
    performed, logs = list[str](), list[Path]()
    monkeypatch.setattr(worker, "redirect_output", logs.append)
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a torchrun around the study
    monkeypatch.setenv("OWN", "no")

    def perform(unit: Unit, tasks: Sequence[RunTask]) -> int:
        performed.append(tasks[0].name)
        assert len(tasks) == 1
        assert "WORLD_SIZE" not in os.environ
        assert os.environ["OWN"] == "yes"
        return codes[len(performed) - 1]

    monkeypatch.setattr(worker, "perform_runs", perform)
    unit = unit_of(*(tmp_path / name for name in "abc"))
    with pytest.raises(SystemExit) as left:
        perform_unit(unit, {"OWN": "yes"})
    assert (left.value.code, performed) == (code, list("abc")[:done])
    assert logs[:done] == [task.log for task in unit.tasks][:done]


def test_runs_that_go_together_are_performed_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(worker, "StopListener", Listener)
    logs, performed = list[Path](), list[list[str]]()

    def perform(unit: Unit, tasks: Sequence[RunTask]) -> int:
        performed.append([task.folder.name for task in tasks])
        return 0

    monkeypatch.setattr(worker, "redirect_output", logs.append)
    monkeypatch.setattr(worker, "perform_runs", perform)
    tasks = unit_of(*(tmp_path / name for name in "abcde")).tasks
    corpora = ({"source": name} for name in ("reverse", "sort", "reverse", "reverse", "sort"))
    tasks = tuple(dataclasses.replace(task, spec={"corpus": own}) for task, own in zip(tasks, corpora, strict=True))
    unit = dataclasses.replace(unit_of(tmp_path), tasks=tasks, together=2)
    with pytest.raises(SystemExit) as left:
        perform_unit(unit, {})
    assert left.value.code == 0
    assert performed == [["a", "c"], ["d"], ["b", "e"]]  # of one corpus, two at most, one model after another
    assert [log.parent.name for log in logs] == ["c", "a", "d", "e", "b"]  # the first one's log says more


def test_an_orphan_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[float]()
    listener = object.__new__(StopListener)
    listener.asked = False
    with RunDirectory(tmp_path).lock() as held:
        assert is_in_use(tmp_path)

        def look(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 3:
                held.release()

        monkeypatch.setattr(time, "sleep", look)
        listener.wait_until_free(tmp_path)
        assert looks == [worker.POLL] * 3
    with RunDirectory(tmp_path).lock():  # and nothing is held by the one who waited
        monkeypatch.setattr(worker, "SAVING", 0.0)
        listener.wait_until_free(tmp_path)
        monkeypatch.setattr(worker, "SAVING", 600.0)
        listener.asked = True  # its study is gone in the meantime
        listener.wait_until_free(tmp_path)
    assert len(looks) == 3
    listener.wait_until_free(tmp_path / "nothing")


# room


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert WorkerSlots.of_machine("cpu") == WorkerSlots(8, 1)
    assert WorkerSlots.of_machine("cpu", 2) == WorkerSlots(2, 4)
    assert WorkerSlots.of_machine("cpu", 16) == WorkerSlots(16, 1)  # asked for
    assert WorkerSlots.of_machine("cpu").visible_devices(0) == {}
    assert WorkerSlots.of_machine("cpu").device == "cpu"
    for wrong in (0, -1):
        with pytest.raises(StudyError, match=f"--at-once.*{wrong} came"):
            WorkerSlots.of_machine("cpu", wrong)
    with pytest.raises(StudyError, match="'tpu' came"):
        WorkerSlots.of_machine("tpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(StudyError, match="no CUDA device"):
        WorkerSlots.of_machine("cuda")
    assert WorkerSlots.of_machine("auto") == WorkerSlots(8, 1)


def test_a_run_sees_the_gpu_of_its_slot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    slots = WorkerSlots.of_machine()
    assert (slots.count, slots.threads, slots.gpus, slots.device) == (2, 4, (0, 1), "cuda")
    assert [slots.visible_devices(n)["CUDA_VISIBLE_DEVICES"] for n in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert [slots.visible_devices(n)["CUDA_VISIBLE_DEVICES"] for n in range(3)] == ["5", "GPU-abc", "5"]


def test_a_run_on_a_gpu_begins_with_a_python_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not outlive a fork."""
    played, kinds = Played(FAILED), list[str]()
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: kinds.append(kind) or played)
    executor = LocalExecutor("cpu", 1)
    executor.slots = WorkerSlots(1, 1, (0,))
    executor.submit(unit_of(tmp_path / "run"))
    with pytest.raises(StudyError, match="could say nothing"):
        drain(executor)
    assert (kinds, played.preloaded) == (["spawn"], [])
    assert played.environments == [executor.slots.visible_devices(0)]
