"""The executor of this machine: a process per unit, forked from one that has everything imported."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from qklab import register
from qklab.study.executors import SAVING, Attempts, RunTask, Unit, WorkerSlots
from qklab.study.executors.worker import FAILED, perform_unit
from qklab.study.spec import StudyError

# torch._dynamo is imported by torch when the first optimiser is made, which takes a second
PRELOADED = ["qklab.study.executors.child_signals", "qklab.study.executors.worker", "torch._dynamo"]
DYING = 30.0  # seconds after which a killed forkserver must be gone
LOST = 255  # what multiprocessing makes of a process whose end it was not told of


@dataclass
class RunningUnit:
    """A unit under way, in a slot, with where the log of each of its runs ended when its process began."""

    unit: Unit
    slot: int
    attempts: Attempts
    process: BaseProcess | None = None
    said: dict[str, int] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def take_ended(self) -> list[RunTask]:
        """Runs that ended and have not been reported."""
        new = [task for task in self.unit.tasks if task.name not in self.reported and task.ended]
        self.reported.update(task.name for task in new)
        return new


@register.executor("local")
class LocalExecutor:
    """Units as processes of this machine. Forks for a CPU; CUDA does not outlive a fork, so a process on a GPU begins
    with a Python of its own."""

    def __init__(
        self,
        device: str = "auto",
        at_once: int | None = None,
        address: str | None = None,
        say: Callable[[str], None] = print,
    ):
        if address is not None:
            raise StudyError(f"the local executor has no address, but {address!r} came; leave it out.")
        self.slots, self.say = WorkerSlots.of_machine(device, at_once), say
        self.running: list[RunningUnit] = []

    @property
    def free(self) -> int:
        return self.slots.count - len(self.running)

    def submit(self, unit: Unit) -> None:
        slot = min(set(range(len(self.running) + 1)) - {running.slot for running in self.running})
        running = RunningUnit(unit, slot, Attempts(unit))
        self.start(running)
        self.running.append(running)

    def start(self, running: RunningUnit) -> None:
        running.attempts.begin()
        tasks = running.unit.tasks
        running.said = {task.name: task.log.stat().st_size if task.log.exists() else 0 for task in tasks}
        context: Any = multiprocessing.get_context("spawn" if self.slots.gpus else "forkserver")
        if not self.slots.gpus:
            context.set_forkserver_preload(PRELOADED)
        environment = self.slots.visible_devices(running.slot)
        process = context.Process(target=perform_unit, args=(running.unit, environment), daemon=False)
        # a signal sent to all processes at once must not end the one that forks, nor a Python that has just begun
        resource_tracker.ensure_running()  # unblocks SIGTERM when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            start_from_forkserver(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        running.process = process

    def wait(self, seconds: float) -> list[RunTask]:
        sentinels: dict[Any, RunningUnit] = {r.process.sentinel: r for r in self.running if r.process is not None}
        if not sentinels:
            return []
        found: list[RunTask] = []
        ready = connection.wait(list(sentinels), timeout=seconds)
        for sentinel, running in sentinels.items():
            if sentinel in ready:
                found += self.finish(running)
            elif len(running.unit.tasks) > 1:
                found += running.take_ended()
        return found

    def finish(self, running: RunningUnit) -> list[RunTask]:
        """A unit's process has ended: so has the unit, or it is begun again, or it failed."""
        assert running.process is not None
        running.process.join()
        code, left = running.process.exitcode, [task for task in running.unit.tasks if not task.ended]
        if code == 0 and not left:
            self.running.remove(running)
            return running.take_ended()
        task = left[0] if left else running.unit.tasks[-1]
        why = explain_exit(code, task, running.said[task.name])
        if code == FAILED or not running.attempts.may_retry():
            self.running.remove(running)
            raise StudyError(f"the run {task.name} failed: {why} (all that it said is in {task.log}).")
        self.say(f"{task.name}: its process died ({why}); it is resumed.")
        self.start(running)
        return running.take_ended()

    def stop(self) -> int:
        for running in self.running:
            if running.process is not None and running.process.is_alive():
                running.process.terminate()
        until, hanging = time.monotonic() + SAVING, 0
        for running in self.running:
            assert running.process is not None
            running.process.join(max(0.0, until - time.monotonic()))
            if running.process.exitcode is None:
                hanging += 1
                running.process.kill()
                running.process.join()
        self.running.clear()
        return hanging

    def close(self) -> None:
        self.stop()


def start_from_forkserver(process: BaseProcess) -> None:
    """Start it. A forkserver that was killed a moment ago, as by a signal to all processes of a job, still counts as
    running and answers nobody, or ends in the middle of its answer; once it is seen to be gone, multiprocessing starts
    another."""
    until = time.monotonic() + DYING
    while True:
        try:
            return process.start()
        except (ConnectionError, EOFError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def explain_exit(code: int | None, task: RunTask, said: int) -> str:
    """What ended a run's process: a signal, or its last words since its log was `said` bytes long."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}{', perhaps for want of memory' if -code == signal.SIGKILL else ''}"
    if code == LOST:
        return "the process that had forked it is gone"
    try:
        with open(task.log, "rb") as file:
            file.seek(said)
            words = file.read().decode(errors="replace").strip().splitlines()[1:]  # the first says where it ran
    except OSError:
        words = []
    last = words[-1].rstrip(".") if words else ""
    return last or f"it ended with code {code} and could say nothing; is the disk full?"
