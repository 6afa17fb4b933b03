"""Carry out a study: its runs as units of work on an executor, as many at a time as that has room for.

What is done is read from the run directories alone, so a study that was killed anywhere goes on where it was: finished
runs are skipped, broken ones resumed from their checkpoints, none is done twice.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from qklab.runs.progress import Display, format_duration
from qklab.runs.signals import StopRequest, replace_handlers
from qklab.schema import suggest_name
from qklab.study.executors import Executor, RunTask, Unit, WorkerSlots
from qklab.study.folder import StudyFolder
from qklab.study.learned import describe_pace
from qklab.study.metrics import find_metric
from qklab.study.plan import PlannedRun, RateGrid, write_number
from qklab.study.progress import StudyProgress, measure_run_progress
from qklab.study.records import RunResult, explain_file_errors
from qklab.study.remote import RemoteStudy
from qklab.study.schedule import RunSchedule
from qklab.study.spec import StudyError, StudySpec
from qklab.train.launch import EXIT_CODES
from qklab.train.population import choose_population_size, describe_shape, does_compiling_pay, explain_solo
from qklab.train.score import open_scorer
from qklab.train.spec import ExecutionSpec

POLL = 0.1  # seconds that the executor is waited for at a time
SHOW = 0.5  # seconds between looks at how far the runs are
FETCH = 15.0  # seconds between looks at the URL, where the study has one
VISIBLE = 90.0  # seconds until a file written on one node must be visible on another


class StudyInterrupted(StudyError):  # noqa: N818
    """A study that was asked to stop and has saved its runs; `code` is the exit code that says so."""

    code: ClassVar[int] = EXIT_CODES["interrupted"]


class Study:
    """A study, its folder, and the runs that are to be done in it.

    With `remote`, whose local folder must be this one, all of it lives at a URL. With `minutes` only what can end in
    that time is begun, so that a study can grow over many short jobs; with `extend_minutes` learning rates are added to
    the grid only as long as they end in that time; with `only` runs of these arms alone, so that other machines can do
    the others (`merge_studies` unites them).
    """

    def __init__(
        self,
        spec: StudySpec,
        folder: Path,
        *,
        data: Path | None = None,
        execution: Mapping[str, Any] | None = None,
        remote: RemoteStudy | None = None,
        asked: Mapping[str, Any] | None = None,
        minutes: float | None = None,
        extend_minutes: float | None = None,
        only: Sequence[str] = (),
    ):
        for arm in only:
            if arm not in spec.arms:
                raise StudyError(
                    f"there is no arm {arm!r}{suggest_name(arm, spec.arms)} in the study; its arms are "
                    f"{', '.join(spec.arms)}."
                )
        if minutes is not None and not 0 < minutes < 1e6:
            raise StudyError(f"minutes must be a number above 0, but {minutes:g} came.")
        self.until = None if minutes is None else time.monotonic() + 60 * minutes
        self.extend_until = math.inf if extend_minutes is None else time.monotonic() + 60 * extend_minutes
        self.spec, self.folder, self.remote, self.asked = spec, folder.absolute(), remote, dict(asked or {})
        self.data = None if data is None else data.absolute()
        self.files = StudyFolder(self.folder, spec, self.asked, remote)
        self.runs = RunSchedule(spec, self.folder, self.data, only or spec.arms)
        self.execution = {"keep": 1} | {name: value for name, value in (execution or {}).items() if value is not None}
        ExecutionSpec.from_dict(self.execution)  # says what is wrong before anything is begun
        self.grids: dict[str, RateGrid] = {}
        self.progress, self.fetched, self.told_pace = StudyProgress(), 0.0, False
        self.told_alone: set[str] = set()

    @contextmanager
    def open(self) -> Iterator["Study"]:
        """Hold the folder, which must be this study's or free; `carry_out` fixes the spec in it."""
        with self.files.lock():
            yield self

    def prepare_corpora(self, display: Display) -> None:
        open_scorer(self.spec.first_run, self.data)  # says what benchmarks miss
        self.files.prepare_corpora(self.runs.list_corpora(), self.data, display)

    def carry_out(self, executor: Executor, display: Display) -> list[RunResult]:
        """Do what is not done yet; every run's result."""
        self.files.discard_damaged_summaries(display)
        try:
            if self.runs.list_missing_runs():
                with leave_at_once("while its corpora were prepared"):
                    self.prepare_corpora(display)
            else:
                self.files.write_record(self.files.read_data())
            with StopRequest() as stop:
                self.perform(executor, display, stop)
        finally:
            display.close()
        certain = self.runs.plan_certain_runs()
        if self.runs.list_unfinished(certain):
            raise StudyInterrupted(
                f"{self.count_ended()} are done, and all of {', '.join(sorted(self.runs.arms))} that are certain; the "
                "others are other machines' to do, and qklab study --merge unites them."
            )
        return [self.runs.results[run] for run in certain]

    def perform(self, executor: Executor, display: Display, stop: StopRequest) -> None:
        """Do all runs, several at a time; those that a result makes certain wait behind the others."""
        waiting, active = deque(self.runs.list_missing_runs()), dict[str, PlannedRun]()
        self.grids = self.runs.find_grids()
        self.progress.begin(len(self.runs.results))
        shown_at = -SHOW
        try:
            while waiting or active:
                if stop.came is not None:
                    raise StudyInterrupted(f"stopped by {stop.came}; the same command continues.")
                self.refuse_overtime(self.seconds_left() <= 0)
                while executor.free and waiting:
                    runs, together = self.take_group(waiting, executor.slots)
                    while len(runs) > together and self.runs.estimate_seconds(runs) > self.seconds_left():
                        waiting.appendleft(runs.pop())
                    if self.runs.estimate_seconds(runs) > self.seconds_left():
                        waiting.extendleft(reversed(runs))
                        self.refuse_overtime(not active)
                        break
                    self.say_why_alone(runs[0], executor.slots, display)
                    active |= {run.name: run for run in runs}
                    with explain_file_errors():
                        executor.submit(self.make_unit(runs, executor, together))
                for task in executor.wait(POLL):
                    self.note_end(active.pop(task.name), display)
                    self.extend_grids(executor.slots, display)
                    waiting.extend(
                        run for run in self.runs.list_missing_runs() if run not in waiting and run.name not in active
                    )
                if active and time.monotonic() - shown_at >= SHOW:
                    shown_at = time.monotonic()
                    self.show_progress(active.values(), display)
        finally:
            if active:
                self.stop(executor, len(active), display)

    def seconds_left(self) -> float:
        return math.inf if self.until is None else self.until - time.monotonic()

    def refuse_overtime(self, over: bool) -> None:
        """End where the time is over, or where nothing is under way and what comes next would not end in time."""
        if over:
            raise StudyInterrupted(
                f"{self.count_ended()} are done and the minutes are over; the same command continues."
            )

    def count_ended(self) -> str:
        return f"{len(self.runs.results)} of {self.runs.count_runs()} runs"

    def extend_grids(self, slots: WorkerSlots, display: Display) -> None:
        """Say which learning rates results have added; those that would not end in time are left out for good."""
        before, self.grids = self.grids, self.runs.find_grids()
        added = {c: [lr for lr in grid.lrs if lr not in before[c].lrs] for c, grid in self.grids.items()}
        if not any(added.values()):
            return
        left = self.extend_until - time.monotonic()
        if left < self.runs.estimate_wall_clock(self.runs.list_unfinished(self.runs.plan_certain_runs()), slots.count):
            # What an end asks for it asked for in every round before, so the number of rounds says all of a grid
            first, last = self.spec.lrs[0], self.spec.lrs[-1]
            rounds = [max(g.lrs.index(first), len(g.lrs) - 1 - g.lrs.index(last)) for g in before.values()]
            self.spec = self.runs.spec = self.files.spec = self.spec.replace(extend=max(rounds))
            self.grids = self.runs.find_grids()
            self.files.write_record(self.files.read_data())
        for corpus, lrs in added.items():
            rates = " and ".join(map(write_number, lrs))
            if lrs and lrs[0] in self.grids[corpus].lrs:
                display.say(
                    f"on {corpus} an arm does best at an end of the learning rates, so all arms try {rates} too."
                )
            elif lrs:
                display.say(
                    f"on {corpus} an arm does best at an end of the learning rates, but {rates} would take longer than "
                    "the minutes asked for."
                )

    def take_group(self, waiting: deque[PlannedRun], slots: WorkerSlots) -> tuple[list[PlannedRun], int]:
        """The next run and those that go into one process with it, and how many of them go together.

        Runs that differ in corpus, seed and learning rate alone share what is compiled for them; small ones of one
        corpus are trained as one model, and one process does one corpus after another where other arms are enough for
        the other slots. On a CPU every run has a process of its own, unless it is said otherwise.
        """
        first, population = waiting[0], self.execution.get("population", "auto")
        if population == "off" or (population == "auto" and not slots.gpus):
            return [waiting.popleft()], 1
        shapes = {run: describe_shape(self.runs.resolve(run)) | {"corpus": None} for run in waiting}
        alike = [run for run in waiting if shapes[run] == shapes[first]]
        group = [run for run in alike if run.corpus == first.corpus]
        together = choose_population_size(self.runs.resolve(first), slots.device, population, len(group))
        if not slots.gpus or population != "auto" or 1 < together < len(group):
            group = group[:together]
        elif together == 1:
            group = alike[: -(-len(alike) // slots.count)]
        else:
            arms, corpora = {run.arm for run in waiting}, list(dict.fromkeys(run.corpus for run in alike))
            processes = -(-slots.count // len(arms))
            kept = corpora[: -(-len(corpora) // processes)]
            group = [run for run in alike if run.corpus in kept]
        for run in group:
            waiting.remove(run)
        return group, together

    def say_why_alone(self, run: PlannedRun, slots: WorkerSlots, display: Display) -> None:
        """Say once of an arm that its runs cannot be trained as one model, where others are."""
        if self.execution.get("population", "auto") == "off" or not slots.gpus or run.arm in self.told_alone:
            return
        self.told_alone.add(run.arm)
        if reason := explain_solo(self.runs.resolve(run)):
            display.say(f"{run.arm} is trained run by run: {reason}.")

    def make_unit(self, runs: Sequence[PlannedRun], executor: Executor, together: int = 1) -> Unit:
        """The unit of work of these runs, which go in one process."""
        device = {"device": executor.slots.device, "threads": executor.slots.threads}
        compiling = {"compile": "auto" if self.pays_to_compile(runs[0]) else "no"}
        tasks = [RunTask(run.name, self.runs.resolve(run).to_dict(), run.folder_in(self.folder)) for run in runs]
        return Unit(
            tasks=tuple(tasks),
            study=self.folder,
            fingerprint=self.spec.fingerprint,
            execution=compiling | self.execution | device,
            data=self.data,
            url=None if self.remote is None else self.remote.url,
            together=together,
        )

    def pays_to_compile(self, run: PlannedRun) -> bool:
        """Whether an arm's runs gain on a GPU what compiling takes. The plan alone decides, so that runs added later
        are carried out alike."""
        runs = len(self.spec.corpora) * self.spec.tuning_seeds * len(self.spec.lrs)
        return does_compiling_pay(self.runs.resolve(run), runs, self.execution.get("population", "auto"))

    def note_end(self, run: PlannedRun, display: Display) -> None:
        """Read the result of a run that ended, which may take a moment to be seen from here."""
        until = time.monotonic() + VISIBLE
        self.fetch([run])
        while (result := self.runs.find_result(run)) is None:
            if time.monotonic() > until:
                raise StudyError(
                    f"the run {run.name} ended, but its result is not in {self.folder}; the study's folder must be on "
                    "a file system that all nodes share."
                )
            time.sleep(POLL)
        mark = "" if result.status == "finished" else f", {result.status}"
        value = result.describe(find_metric(self.spec.metric))
        display.say(f"{run.name}: {value}{mark}, {format_duration(result.seconds)}")
        self.note_pace(display)

    def note_pace(self, display: Display) -> None:
        """Say once if runs take longer than planned, and what that makes of the time asked for."""
        pace = describe_pace(list(self.runs.results.values()), self.asked.get("run_seconds"))
        if pace is not None and not self.told_pace and len(self.runs.results) > 1:
            self.told_pace = True
            display.say(f"{pace} It will take as much longer; stopped, the same command goes on later.")

    def fetch(self, runs: Iterable[PlannedRun]) -> None:
        """Bring what is known of runs at the study's URL, if it has one."""
        if self.remote is not None:
            self.remote.fetch_records([run.folder_in(self.folder) for run in runs])

    def show_progress(self, active: Iterable[PlannedRun], display: Display) -> None:
        if self.remote is not None and time.monotonic() - self.fetched >= FETCH:
            try:
                self.fetch(active)
            except StudyError as error:
                display.say(f"how far the runs are is not known for now: {error}")
            self.fetched = time.monotonic()
        parts = {
            run: measure_run_progress(run.folder_in(self.folder), self.runs.resolve(run))
            for run in active
            if run not in self.runs.results and run.folder_in(self.folder).exists()
        }
        display.show(*self.progress.describe(self.runs.results, parts, self.runs.count_runs()))

    def stop(self, executor: Executor, count: int, display: Display) -> None:
        """Let all runs save their state and end."""
        display.say(f"{count} runs save their state and stop." if count > 1 else "a run saves its state and stops.")
        hanging = executor.stop()
        if hanging:
            display.say(
                f"{hanging} of them did not in time and {'were' if hanging > 1 else 'was'} ended; what was saved "
                "before is still there."
            )


@contextmanager
def leave_at_once(when: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM where nothing has to be saved: StudyInterrupted."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)  # which nobody takes for an error of their own

    restore = replace_handlers(leave)
    try:
        yield
    except KeyboardInterrupt as stop:
        raise StudyInterrupted(f"stopped by {stop} {when}; the same command continues.") from None
    finally:
        restore()
