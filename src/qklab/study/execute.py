"""Carry out a study: its runs as units of work on an executor, as many at a time as that has room for.

What is done is read from the run directories alone, so a study that was killed anywhere goes on where it was: finished
runs are skipped, broken ones resumed from their checkpoints, none is done twice.
"""

import math
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from qklab.data.prepare import prepare_corpus
from qklab.data.sources import find_source_path
from qklab.data.spec import DataSpec
from qklab.runs.directory import RunDirectory, RunError
from qklab.schema import suggest_name
from qklab.study.executors import Executor, RunTask, Unit, WorkerSlots
from qklab.study.learned import describe_pace
from qklab.study.metrics import find_metric
from qklab.study.plan import PlannedRun, RateGrid, count_runs, plan_confirming_runs, plan_tuning_runs, write_number
from qklab.study.progress import StudyProgress, measure_run_progress
from qklab.study.records import (
    STUDY,
    RunResult,
    StudyRecord,
    explain_file_errors,
    find_difference,
    read_result,
    read_study_record,
)
from qklab.study.remote import RemoteStudy
from qklab.study.spec import StudyError, StudySpec, canonicalise
from qklab.study.tuning import choose_learning_rates, find_grids
from qklab.train.launch import EXIT_CODES
from qklab.train.population import choose_population_size, describe_shape, explain_solo
from qklab.train.progress import Display, format_duration
from qklab.train.resume import refuse_other_spec
from qklab.train.signals import StopRequest
from qklab.train.spec import ExecutionSpec, RunSpec

SLACK = 1.1  # by how much longer than others a run may take
POLL = 0.1  # seconds that the executor is waited for at a time
SHOW = 0.5  # seconds between looks at how far the runs are
FETCH = 15.0  # seconds between looks at the URL, where the study has one
VISIBLE = 90.0  # seconds until a file written on one node must be visible on another
FIXED = "what is compared is fixed once a run has begun, so choose another folder with --out for another study."


class StudyInterrupted(StudyError):  # noqa: N818
    """A study that was asked to stop and has saved its runs; `code` is the exit code that says so."""

    code: ClassVar[int] = EXIT_CODES["interrupted"]


class Study:
    """A study in its folder: study.json says what it is, runs/ holds its runs.

    With `remote`, whose local folder must be this one, all of it lives at a URL. With `minutes` only what can end in
    that time is begun, so that a study can grow over many short jobs; with `only` runs of these arms alone, so that
    other machines can do the others (`merge_studies` unites them).
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
        only: Sequence[str] = (),
    ):
        for arm in only:
            if arm not in spec.arms:
                raise StudyError(
                    f"there is no arm {arm!r}{suggest_name(arm, spec.arms)} in the study; its arms are "
                    f"{', '.join(spec.arms)}."
                )
        self.only = frozenset(only or spec.arms)
        if minutes is not None and not 0 < minutes < 1e6:
            raise StudyError(f"minutes must be a number above 0, but {minutes:g} came.")
        self.until = None if minutes is None else time.monotonic() + 60 * minutes
        self.spec, self.folder, self.remote, self.asked = spec, folder.absolute(), remote, dict(asked or {})
        self.data = None if data is None else data.absolute()
        self.execution = {"keep": 1} | {name: value for name, value in (execution or {}).items() if value is not None}
        ExecutionSpec.from_dict(self.execution)  # says what is wrong before anything is begun
        self.results: dict[PlannedRun, RunResult] = {}
        self.specs: dict[PlannedRun, RunSpec] = {}
        self.grids: dict[str, RateGrid] = {}
        self.progress, self.fetched, self.told_pace = StudyProgress(), 0.0, False
        self.told_alone: set[str] = set()

    # The folder

    @contextmanager
    def open(self) -> Iterator["Study"]:
        """Hold the folder, and see that it holds this study or none; `carry_out` fixes the spec in it."""
        self.spec.refuse_illegal()  # before anything is written
        fresh = not self.folder.exists()
        try:
            lock = RunDirectory(self.folder).lock()
        except RunError as error:
            raise StudyError(str(error).replace("run directory", "study's folder")) from None
        with lock:
            if self.remote is not None:
                self.remote.fetch_study()
                self.remote.fetch_records()
            has_record = (self.folder / STUDY).exists()
            if self.holds_runs() or any((self.folder / name).exists() for name in ("run.json", "metrics.jsonl")):
                if not has_record:
                    raise StudyError(f"{self.folder} holds runs but no study.json; choose another folder with --out.")
                self.refuse_other(read_study_record(self.folder).spec)
            try:
                yield self
            finally:
                if fresh and not any(path.name != "lock" for path in self.folder.iterdir()):
                    shutil.rmtree(self.folder, ignore_errors=True)  # nothing came of it

    def holds_runs(self) -> bool:
        return any(any(self.folder.glob(pattern)) for pattern in ("runs/*/*/*/run.json", "*/run.json"))

    def write_record(self, data: list[dict[str, Any]]) -> None:
        judged = read_study_record(self.folder).judged if self.holds_runs() else []
        StudyRecord(self.spec, data, self.asked, judged).write(self.folder)
        if self.remote is not None:
            self.remote.send_study()

    def refuse_other(self, old: StudySpec) -> None:
        found = find_difference(canonicalise(old.fixed_settings()), canonicalise(self.spec.fixed_settings()))
        if found is not None:
            raise StudyError(f"{self.folder} holds a study that began {found}; {FIXED}")
        begun = [int(path.parent.name.rpartition("-seed")[2]) for path in self.folder.glob("runs/*/*/*-seed*/run.json")]
        if begun and max(begun) >= self.spec.seeds:
            raise StudyError(
                f"{self.folder} holds a study whose runs have begun for {max(begun) + 1} seeds, but "
                f"seeds={self.spec.seeds} came; what has begun stays in it, so ask for {max(begun) + 1} or more."
            )

    # Corpora

    def prepare_corpora(self, display: Display) -> None:
        """Prepare every corpus once, before many processes would; refuse one that changed since the study began."""
        record = StudyRecord(self.spec, self.read_data())
        for spec in dict.fromkeys(self.resolve(run).corpus for run in plan_tuning_runs(self.spec)):
            found, old = self.prepare_corpus(spec, display), record.find_hash(spec.to_dict())
            if old is None:
                record.data.append({"spec": spec.to_dict(), "hash": found})
            elif old != found:
                raise StudyError(
                    f"the corpus {spec.source} changed since the study in {self.folder} began: it was {old[:12]}… and "
                    f"is now {found[:12]}…, so runs would not compare; restore it or choose another folder with --out."
                )
        self.write_record(record.data)  # only now: nothing is written that is refused

    def read_data(self) -> list[dict[str, Any]]:
        """What study.json knows of the corpora; before a run has begun nothing is fixed."""
        return read_study_record(self.folder).data if self.holds_runs() else []

    def prepare_corpus(self, spec: DataSpec, display: Display) -> str:
        """The hash of the prepared corpus, which must have text to choose learning rates on and text to report on."""

        def show(what: str, done: int, of: int) -> None:
            if not done and not of:
                display.say(what)
                return
            display.show(0.0, f"preparing {spec.source}: {what}, {done / max(1, of):.0%}")

        corpus = prepare_corpus(spec, data=self.data, progress=show)
        for split, use in (("valid", "to choose learning rates on"), ("test", "to report on")):
            if split not in corpus.splits or not corpus.splits[split].tokens:
                raise StudyError(
                    f"the corpus {spec.source} has no {split} text, which a study needs {use}; give it more documents, "
                    f"files named {split}…, or a larger corpus.{split}."
                )
        return corpus.hash

    # Runs

    def resolve(self, planned: PlannedRun) -> RunSpec:
        if planned not in self.specs:
            self.specs[planned] = planned.resolve_spec(self.spec)
        return self.specs[planned]

    def find_result(self, planned: PlannedRun) -> RunResult | None:
        """The result of a run, read once; None while it has not ended. The run must be the one that is meant."""
        if planned not in self.results:
            found = read_result(self.folder, planned)
            if found is None:
                return None
            self.refuse_other_run(planned)
            self.results[planned] = found
        return self.results[planned]

    def refuse_other_run(self, planned: PlannedRun) -> None:
        directory = RunDirectory(planned.folder_in(self.folder))
        old, spec = directory.read()["spec"], self.resolve(planned)
        if spec.precision == "auto":
            spec = spec.replace(precision=old["precision"])
        try:
            refuse_other_spec(directory, old, spec)
        except RunError as error:
            if planned.corpus != "stdlib" and not planned.corpus.startswith("hf:"):
                find_source_path(planned.corpus, self.data)  # a prepared corpus that is gone cannot say what it was
            raise StudyError(f"another run is in the place of {planned.name}; move it away: {error}") from None

    def list_unfinished(self, planned: Iterable[PlannedRun]) -> list[PlannedRun]:
        return [run for run in planned if self.find_result(run) is None]

    def choose_known_rates(self) -> dict[tuple[str, str], float | None]:
        """The learning rates of the arms that are done with tuning."""
        grids, results = self.find_grids(), list(self.results.values())
        undone = {(run.corpus, run.arm) for run in self.plan_tuning() if run not in self.results}
        found = choose_learning_rates(self.spec, results)
        return {key: lr for key, lr in found.items() if key not in undone and grids[key[0]].final}

    def find_grids(self) -> dict[str, RateGrid]:
        return find_grids(self.spec, list(self.results.values()))

    def plan_tuning(self) -> list[PlannedRun]:
        """The runs that tune, as far as results have extended the grids."""
        return list(plan_tuning_runs(self.spec, self.find_grids()))

    def plan_certain_runs(self) -> list[PlannedRun]:
        """The runs that are certain already: those that tune, then the others of arms that are done with tuning."""
        return [*self.plan_tuning(), *plan_confirming_runs(self.spec, self.choose_known_rates())]

    def list_missing_runs(self) -> list[PlannedRun]:
        """The runs that are certain and have not ended; every result that is read may make others certain."""
        known = -1
        missing: list[PlannedRun] = []
        while len(self.results) > known:
            known = len(self.results)
            missing = self.list_unfinished(self.plan_certain_runs())
        return [run for run in missing if run.arm in self.only]

    # Carrying out

    def carry_out(self, executor: Executor, display: Display) -> list[RunResult]:
        """Do what is not done yet; every run's result."""
        self.discard_damaged_summaries(display)
        try:
            if self.list_missing_runs():
                with leave_at_once("while its corpora were prepared"):
                    self.prepare_corpora(display)
            else:
                self.write_record(self.read_data())
            with StopRequest() as stop:
                self.perform(executor, display, stop)
        finally:
            display.close()
        if self.list_unfinished(self.plan_certain_runs()):
            raise StudyInterrupted(
                f"{len(self.results)} of {self.count_runs()} runs are done, and all of {', '.join(sorted(self.only))} "
                "that are certain; the others are other machines' to do, and qklab study --merge unites them."
            )
        return [self.results[run] for run in self.plan_certain_runs()]

    def discard_damaged_summaries(self, display: Display) -> None:
        """Let runs whose summary cannot be read end once more."""
        for path in sorted(self.folder.glob("runs/*/*/*/summary.json")):
            wrong = RunDirectory(path.parent).discard_damaged_summary()
            if wrong is not None:
                display.say(f"{wrong}; that run's end is evaluated again.")

    def perform(self, executor: Executor, display: Display, stop: StopRequest) -> None:
        """Do all runs, several at a time; those that a result makes certain wait behind the others."""
        waiting, active = deque(self.list_missing_runs()), dict[str, PlannedRun]()
        self.grids = self.find_grids()
        self.progress.begin(len(self.results))
        shown_at = -SHOW
        try:
            while waiting or active:
                if stop.came is not None:
                    raise StudyInterrupted(f"stopped by {stop.came}; the same command continues.")
                self.refuse_overtime(self.seconds_left() <= 0)
                while executor.free and waiting:
                    runs, together = self.take_group(waiting, executor.slots)
                    while len(runs) > 1 and not together and self.estimate_seconds(runs) > self.seconds_left():
                        waiting.appendleft(runs.pop())
                    if self.estimate_seconds(runs) > self.seconds_left():
                        waiting.extendleft(reversed(runs))
                        self.refuse_overtime(not active)
                        break
                    self.say_why_alone(runs[0], executor.slots, display)
                    active |= {run.name: run for run in runs}
                    with explain_file_errors():
                        executor.submit(self.make_unit(runs, executor, together))
                for task in executor.wait(POLL):
                    self.note_end(active.pop(task.name), display)
                    self.say_extension(display)
                    waiting.extend(
                        run for run in self.list_missing_runs() if run not in waiting and run.name not in active
                    )
                if active and time.monotonic() - shown_at >= SHOW:
                    shown_at = time.monotonic()
                    self.show_progress(active.values(), display)
        finally:
            if active:
                self.stop(executor, len(active), display)

    def seconds_left(self) -> float:
        return math.inf if self.until is None else self.until - time.monotonic()

    def estimate_seconds(self, runs: Sequence[PlannedRun]) -> float:
        """How long these runs take in one process, by what runs of their arm took, or all; 0 where none has ended."""
        alike = [result for run, result in self.results.items() if run.arm == runs[0].arm] or self.results.values()
        taken = [result.process_seconds for result in alike]
        return SLACK * len(runs) * sum(taken) / len(taken) if taken else 0.0

    def refuse_overtime(self, over: bool) -> None:
        """End where the time is over, or where nothing is under way and what comes next would not end in time."""
        if over:
            raise StudyInterrupted(
                f"{len(self.results)} of {self.count_runs()} runs are done and the minutes are over; the same "
                "command continues."
            )

    def say_extension(self, display: Display) -> None:
        """Say which learning rates results have added."""
        before, self.grids = self.grids, self.find_grids()
        for corpus, grid in self.grids.items():
            new = " and ".join(write_number(lr) for lr in grid.lrs if lr not in before[corpus].lrs)
            if new:
                display.say(f"on {corpus} an arm does best at an end of the learning rates, so all arms try {new} too.")

    def take_group(self, waiting: deque[PlannedRun], slots: WorkerSlots) -> tuple[list[PlannedRun], bool]:
        """The next run and those that go into one process with it, and whether they go together.

        Runs that differ in seed and learning rate alone share what is compiled for them; small ones are trained as one
        model. On a CPU every run has a process of its own, unless it is said otherwise.
        """
        first, population = waiting[0], self.execution.get("population", "auto")
        if population == "off" or (population == "auto" and not slots.gpus):
            return [waiting.popleft()], False
        shape = describe_shape(self.resolve(first))
        alike = [run for run in waiting if describe_shape(self.resolve(run)) == shape]
        together = choose_population_size(self.resolve(first), slots.device, population, len(alike))
        count = together
        if together == 1 and slots.gpus and population == "auto":
            count = -(-len(alike) // slots.count)
        group = alike[:count]
        for run in group:
            waiting.remove(run)
        return group, together > 1

    def say_why_alone(self, run: PlannedRun, slots: WorkerSlots, display: Display) -> None:
        """Say once of an arm that its runs cannot be trained as one model, where others are."""
        if self.execution.get("population", "auto") == "off" or not slots.gpus or run.arm in self.told_alone:
            return
        self.told_alone.add(run.arm)
        if reason := explain_solo(self.resolve(run)):
            display.say(f"{run.arm} is trained run by run: {reason}.")

    def make_unit(self, runs: Sequence[PlannedRun], executor: Executor, together: bool = False) -> Unit:
        """The unit of work of these runs, which go in one process."""
        device = {"device": executor.slots.device, "threads": executor.slots.threads}
        tasks = [RunTask(run.name, self.resolve(run).to_dict(), run.folder_in(self.folder)) for run in runs]
        return Unit(
            tasks=tuple(tasks),
            study=self.folder,
            fingerprint=self.spec.fingerprint,
            execution=self.execution | device,
            data=self.data,
            url=None if self.remote is None else self.remote.url,
            together=together and len(runs) > 1,
        )

    def note_end(self, run: PlannedRun, display: Display) -> None:
        """Read the result of a run that ended, which may take a moment to be seen from here."""
        until = time.monotonic() + VISIBLE
        self.fetch([run])
        while (result := self.find_result(run)) is None:
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
        pace = describe_pace(list(self.results.values()), self.asked.get("run_seconds"))
        if pace is not None and not self.told_pace and len(self.results) > 1:
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
            run: measure_run_progress(run.folder_in(self.folder), self.resolve(run))
            for run in active
            if run not in self.results and run.folder_in(self.folder).exists()
        }
        display.show(*self.progress.describe(self.results, parts, self.count_runs()))

    def count_runs(self) -> int:
        """How many runs there are as far as is known: an arm that diverged at every learning rate has none beside."""
        hopeless = [key for key, lr in self.choose_known_rates().items() if lr is None]
        planned = count_runs(self.spec, self.find_grids())
        return planned - len(hopeless) * (self.spec.seeds - self.spec.tuning_seeds)

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
    before: dict[signal.Signals, Any] = {}

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)  # which nobody takes for an error of their own

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, leave) for number in StopRequest.SIGNALS}
    try:
        yield
    except KeyboardInterrupt as stop:
        raise StudyInterrupted(f"stopped by {stop} {when}; the same command continues.") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
