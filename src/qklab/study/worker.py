"""Processes that do runs: each run one of its own, which lives no longer than the study it belongs to.

A study starts a `Nursery`: a process that has everything imported and then forks one for each run, so that a run begins
at once and not after seconds of imports. When a run is asked to stop, or the nursery is gone, it saves its state and
ends; one that cannot save within SAVING seconds is ended without.
"""

import fcntl
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from qklab.runs.directory import RunDirectory
from qklab.runs.files import open_append
from qklab.study.mirror import carried
from qklab.train.launch import EXIT_CODES, train
from qklab.train.spec import ExecutionSpec, RunSpec

CRASHED, FAILED = 1, 2  # exit codes: an error that may pass, and one that the same run would meet again
SAVING = 600.0  # seconds that a run gets for saving its state once it was asked to stop
LOOK = 0.2  # seconds between looks at whether the parent lives, and whether a folder is free
FRESH = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from qklab.study import worker; "
SERVE = f"{FRESH}worker.serve()"
BECOME = f"{FRESH}worker.become(json.loads(sys.argv[2]), int(sys.argv[3]))"
LATE = ("torch._dynamo",)  # imported by torch when the first optimiser is made, which takes a second
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Ended = list[tuple[int, int | None]]


class Starter(Protocol):
    """Starts runs, each in a process of its own, tells when they end, and stops them."""

    lost: bool  # it is gone, and its runs with it

    def start(self, task: Mapping[str, Any], log: Path, environment: Mapping[str, str]) -> int:
        """Begin a run that says what it has to say to `log`; the number it goes by."""
        ...

    def ended(self, patience: float) -> Ended:
        """Runs that ended, each with its exit code, negative for a signal, None for one that was lost; waits for one at
        most `patience` seconds."""
        ...

    def stop(self) -> int:
        """Ask all runs to save their state and end, and return when they have; how many did not."""
        ...

    def close(self) -> None: ...


class Nursery:
    """The starter of this machine's runs.

    `environment` is added to this process's own for all runs; settings of a torchrun that this process may be part of
    are left out, since each run is a job of its own.
    """

    def __init__(self, log: Path, environment: Mapping[str, str]):
        own = {name: value for name, value in os.environ.items() if name not in RANKS}
        errors = open_append(log)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVE, json.dumps(sys.path)],  # this process's qklab, no other
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=own | dict(environment),
                start_new_session=True,  # Ctrl-C reaches the study, which passes it on
            )
        finally:
            os.close(errors)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.to, self.back = self.process.stdin, self.process.stdout
        self.heard = b""
        self.count = 0
        self.running: set[int] = set()
        self.lost = False

    def start(self, task: Mapping[str, Any], log: Path, environment: Mapping[str, str]) -> int:
        self.count += 1
        self.running.add(self.count)
        self.send({"number": self.count, "task": task, "log": str(log), "environment": dict(environment)})
        return self.count

    def send(self, order: Mapping[str, Any]) -> None:
        with suppress(OSError):  # it died, which `ended` tells
            line = json.dumps(order).encode() + b"\n"
            while line:
                line = line[self.to.write(line) or 0 :]

    def ended(self, patience: float) -> Ended:
        if not select.select([self.back], [], [], patience)[0]:
            return []
        said = self.back.read(65536)
        if not said:
            self.lost = True
            lost: Ended = [(number, None) for number in sorted(self.running)]
            self.running.clear()
            return lost
        *lines, self.heard = (self.heard + said).split(b"\n")
        found = [(number, code) for number, code in map(json.loads, lines) if number in self.running]
        self.running -= {number for number, _ in found}
        return found

    def stop(self) -> int:
        self.signal(signal.SIGTERM, SAVING)
        hanging = len(self.running)
        if hanging:
            self.signal(signal.SIGKILL, 10.0)
        return hanging

    def signal(self, number: signal.Signals, patience: float) -> None:
        """Send all runs a signal and wait until they have ended."""
        self.send({"signal": number})
        until = time.monotonic() + patience
        while self.running and (left := until - time.monotonic()) > 0:
            self.ended(left)

    def close(self) -> None:
        self.to.close()  # at which it ends
        self.process.wait()
        self.back.close()


def serve() -> NoReturn:
    """The nursery's own process: fork a process for each order on stdin, report on stdout how it ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # sent to all processes at once; the study will say
    for name in LATE:
        importlib.import_module(name)
    reports = os.dup(1)
    os.dup2(2, 1)
    orders, wake = b"", os.pipe()
    os.set_blocking(wake[1], False)
    signal.set_wakeup_fd(wake[1])
    signal.signal(signal.SIGCHLD, lambda *_: None)
    own, running = os.getpid(), dict[int, int]()
    while True:
        ready, _, _ = select.select([0, wake[0]], [], [])
        if wake[0] in ready:
            os.read(wake[0], 4096)
        if 0 in ready:
            said = os.read(0, 65536)
            if not said:  # the study is gone: runs notice that this process is, too
                os._exit(0)
            *lines, orders = (orders + said).split(b"\n")
            for order in map(json.loads, lines):
                if "signal" in order:
                    for pid in running:
                        os.kill(pid, order["signal"])
                elif (pid := os.fork()) == 0:
                    os.close(reports)
                    separate(order, own)
                else:
                    running[pid] = order["number"]
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            report = [running.pop(pid), os.waitstatus_to_exitcode(status)]
            with suppress(BrokenPipeError):  # the study is gone
                os.write(reports, json.dumps(report).encode() + b"\n")


def separate(order: Mapping[str, Any], nursery: int) -> NoReturn:
    """In a process forked for a run: leave what is the nursery's and do the run. CUDA does not outlive a fork, and an
    import may have touched it, so a run on a GPU begins with a Python of its own."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(order["environment"])
        if order["task"]["execution"]["device"] == "cuda":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            arguments = [json.dumps(sys.path), json.dumps(order), str(nursery)]
            os.execv(sys.executable, [sys.executable, "-P", "-c", BECOME, *arguments])
        become(order, nursery)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(CRASHED)


def become(order: Mapping[str, Any], nursery: int) -> NoReturn:
    """Do a run in this process and end with it."""
    code = CRASHED
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # until here nothing would have been saved
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = open_append(Path(order["log"]))
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        wait_for_orphan(Path(order["task"]["folder"]), nursery)
        heed_stops(nursery)
        code = perform(order["task"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for_orphan(folder: Path, nursery: int) -> None:
    """Return once no run that outlived its study or its node is saved in the folder, or after longer than that takes,
    when training will say what is wrong."""
    until = time.monotonic() + 1.1 * SAVING
    while in_use(folder) and os.getppid() == nursery and time.monotonic() < until:
        time.sleep(LOOK)


def in_use(folder: Path) -> bool:
    """Whether a process works in a run directory."""
    try:
        with open(folder / "lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # on network file systems readers get no other
    except BlockingIOError:
        return True
    except OSError:  # there is none yet, or training will say what is wrong with it
        return False
    return False


def heed_stops(nursery: int) -> None:
    """Let SIGTERM be one request to save and end, however often and from however many sides it comes, and also where
    training does not listen yet. The nursery's end is the same request."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    def watch() -> None:
        while os.getppid() == nursery and not asked:
            time.sleep(LOOK)
        signal.alarm(max(1, round(SAVING)))  # which ends this process
        while signal.getsignal(signal.SIGTERM) is note:  # training does not listen yet, or has heard it already
            time.sleep(LOOK)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, note)
    threading.Thread(target=watch, daemon=True).start()


class Log:
    """What a run says goes to stdout, its log; how far it is can be read from its metrics."""

    def say(self, sentence: str) -> None:
        print(sentence, flush=True)

    def show(self, done: float, line: str) -> None: ...

    def close(self) -> None: ...


def perform(task: Mapping[str, Any]) -> int:
    """Do a run; its exit code."""
    try:
        folder, execution = Path(task["folder"]), ExecutionSpec.from_dict(task["execution"])
        data = None if task["data"] is None else Path(task["data"])
        with carried(task.get("url"), folder):
            if RunDirectory(folder).exists():
                execution = execution.replace(threads=None)  # as many as it began with: sums are rounded as before
            outcome = train(RunSpec.from_dict(task["spec"]), folder, execution, data=data, display=Log())
        return EXIT_CODES[outcome.status]
    except ValueError as error:
        with suppress(OSError):  # a full disk is perhaps what it would say
            print(error, file=sys.stderr, flush=True)
        return FAILED
    except BaseException:
        traceback.print_exc()
        return CRASHED
