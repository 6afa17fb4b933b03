"""What a unit's own process does: its runs one after another or together, each with its log in its run directory.

When the process is asked to stop, or its study is gone, the run saves its state and ends; one that cannot save within
SAVING seconds is ended without.
"""

import gc
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from qklab.runs.directory import RunDirectory
from qklab.runs.files import open_append
from qklab.runs.progress import Display
from qklab.study.executors import SAVING, RunTask, Unit
from qklab.study.records import is_in_use
from qklab.study.remote import RemoteStudy
from qklab.train.launch import EXIT_CODES, train_population
from qklab.train.spec import ExecutionSpec, RunSpec

CRASHED, FAILED = 1, 2  # exit codes: an error that may pass, and one that the same run would meet again
POLL = 0.2  # seconds between looks at whether the study lives, and whether a run directory is free
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def perform_unit(unit: Unit, environment: Mapping[str, str]) -> NoReturn:
    """In a process of its own: do the unit's runs that have not ended, and exit with 0 when all have."""
    os.setsid()  # Ctrl-C in a terminal reaches the study, which passes it on
    for name in RANKS:
        os.environ.pop(name, None)  # of a torchrun around the study; each run is a job of its own
    os.environ.update(environment)
    stop = StopListener()
    for tasks in unit.split_groups():
        gc.collect()  # the model before this one, whose memory a GPU needs
        for other in tasks[:0:-1]:
            redirect_output(other.log)
            print(f"trained together with {tasks[0].name}, whose log says more.", flush=True)
        redirect_output(tasks[0].log)
        for task in tasks:
            stop.wait_until_free(task.folder)
        code = EXIT_CODES["interrupted"] if stop.asked else perform_runs(unit, tasks)
        if code != EXIT_CODES["finished"]:
            sys.exit(code)
    sys.exit(0)


def redirect_output(log: Path) -> None:
    """Let what this process says go to the log, also what C libraries say."""
    log.parent.mkdir(parents=True, exist_ok=True)
    target = open_append(log)
    for number in (1, 2):
        os.dup2(target, number)
    os.close(target)
    print(f"on {platform.node()}, process {os.getpid()}:", flush=True)


class StopListener:
    """Lets SIGTERM be one request to save and end, however often and from however many sides it comes, and also where
    training does not listen yet. The end of the study, or of the process that forks, is the same request."""

    def __init__(self) -> None:
        self.asked = False
        self.forked_by, self.study = os.getppid(), multiprocessing.parent_process()
        signal.signal(signal.SIGTERM, self.note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked where nothing would have been saved
        threading.Thread(target=self.watch, daemon=True).start()

    def note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def is_orphan(self) -> bool:
        return os.getppid() != self.forked_by or (self.study is not None and not self.study.is_alive())

    def watch(self) -> None:
        while not self.asked and not self.is_orphan():
            time.sleep(POLL)
        self.asked = True
        signal.alarm(max(1, round(SAVING)))  # which ends this process
        while signal.getsignal(signal.SIGTERM) == self.note:  # training does not listen yet, or has heard it already
            time.sleep(POLL)
        os.kill(os.getpid(), signal.SIGTERM)

    def wait_until_free(self, folder: Path) -> None:
        """Return once no run that outlived its study or its node is saved in the folder, or after longer than that
        takes, when training will say what is wrong."""
        until = time.monotonic() + 1.1 * SAVING
        while is_in_use(folder) and not self.asked and time.monotonic() < until:
            time.sleep(POLL)


class LogDisplay(Display):
    """What a run says goes to stdout, its log; how far it is can be read from its metrics."""

    def say(self, sentence: str) -> None:
        print(sentence, flush=True)


def perform_runs(unit: Unit, tasks: Sequence[RunTask]) -> int:
    """Do a run, or several as a population; the exit code, 0 where all have ended."""
    try:
        remote = None if unit.url is None else RemoteStudy(unit.url, unit.study)
        with ExitStack() as kept:
            for task in tasks:
                kept.enter_context(nullcontext() if remote is None else remote.keep_run(task.folder))
            execution = ExecutionSpec.from_dict(unit.execution)
            if any(RunDirectory(task.folder).exists() for task in tasks):
                execution = execution.replace(threads=None)  # as many as it began with: sums are rounded as before
            specs = [RunSpec.from_dict(task.spec) for task in tasks]
            folders = [task.folder for task in tasks]
            outcomes = train_population(specs, folders, execution, data=unit.data, display=LogDisplay())
        interrupted = any(outcome.status == "interrupted" for outcome in outcomes)
        return EXIT_CODES["interrupted" if interrupted else "finished"]
    except ValueError as error:
        with suppress(OSError):  # a full disk is perhaps what it would say
            print(error, file=sys.stderr, flush=True)
        return FAILED
    except BaseException:
        traceback.print_exc()
        return CRASHED
