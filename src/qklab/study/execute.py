"""Carry out a study: runs in processes of their own, as many at a time as the machine has room for.

What is done is read from the run directories alone, so a study that was killed anywhere goes on where it was: finished
runs are skipped, broken ones resumed from their checkpoints, none is done twice.
"""

import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch

from qklab.data.prepare import prepare_corpus
from qklab.data.sources import find_source_path
from qklab.data.spec import DataSpec
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.environment import count_cores
from qklab.runs.files import describe_os_error, write_json
from qklab.schema import format_value
from qklab.study.metrics import find_metric
from qklab.study.mirror import Mirror
from qklab.study.plan import Planned, confirming, tuning
from qklab.study.results import Result, chosen_lrs, result_of
from qklab.study.spec import StudyError, StudySpec, canonical
from qklab.study.worker import FAILED, SAVING, Nursery, Starter
from qklab.train.launch import EXIT_CODES
from qklab.train.progress import Display, format_duration
from qklab.train.resume import refuse_other_spec
from qklab.train.signals import StopRequest
from qklab.train.spec import RunSpec

FORMAT = 1
ATTEMPTS = 3  # a run whose process dies so often without having saved anything new in between has failed
POLL = 0.1
STEPS_OF_TIME = 0.8  # of a run's time, as long as none has ended
NAMED = 4  # runs of those under way that are named
SHOW = 0.5  # seconds between looks at how far the runs are
FETCH = 15.0  # seconds between looks at the URL, where the study has one
FIXED = "what is compared is fixed once a run has begun, so choose another folder with --out for another study."


class StudyInterrupted(StudyError):  # noqa: N818
    """A study that was asked to stop and has saved its runs; `code` is the exit code that says so."""

    code: ClassVar[int] = EXIT_CODES["interrupted"]


@dataclass(frozen=True)
class Slots:
    """How many runs at a time, and what each gets: threads on a CPU, or one GPU."""

    count: int
    threads: int
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1 or self.threads < 1:
            raise StudyError(
                f"at least 1 run at a time and 1 thread are needed, but {self.count} and {self.threads} came."
            )

    @classmethod
    def of_machine(cls, device: str = "auto", at_once: int | None = None) -> "Slots":
        """One run per GPU; on a CPU one per core, each with one thread, which two small runs use better than one run
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

    def visible(self, slot: int) -> dict[str, str]:
        """The environment in which a run of this slot sees its own GPU only."""
        if not self.gpus:
            return {}
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # what this process calls 0 may be another's 3
        gpu = self.gpus[slot % len(self.gpus)]
        return {"CUDA_VISIBLE_DEVICES": seen[gpu].strip() if gpu < len(seen) and seen[gpu].strip() else str(gpu)}


@dataclass
class Active:
    """A run under way: since its log was `said` bytes long and its newest checkpoint was `saved`."""

    planned: Planned
    slot: int
    log: Path
    said: int
    saved: str


class Study:
    """A study in its folder: study.json says what it is, runs/ holds its runs, logs/ what their processes said.

    With a `mirror`, whose local folder must be this one, all of it lives at a URL.
    """

    def __init__(
        self,
        spec: StudySpec,
        folder: Path,
        *,
        data: Path | None = None,
        execution: Mapping[str, Any] | None = None,
        mirror: Mirror | None = None,
    ):
        self.mirror, self.fetched = mirror, -FETCH
        self.spec, self.folder, self.data, self.execution = spec, folder, data, {"keep": 1} | dict(execution or {})
        self.attempts: dict[Planned, int] = {}
        self.known: dict[Planned, Result] = {}
        self.specs: dict[Planned, RunSpec] = {}
        self.starter: Starter | None = None
        self.began: float | None = None
        self.given = 0.0  # runs, and parts of runs, that were done before this process began

    @contextmanager
    def opened(self) -> Iterator["Study"]:
        """Hold the folder, and fix the study's spec in it or see that it is the same."""
        self.spec.refuse_illegal()  # before anything is written
        try:
            with refused_files():
                lock = RunDirectory(self.folder).lock()
        except RunError as error:
            raise StudyError(str(error).replace("run directory", "study's folder")) from None
        with lock:
            path = self.folder / "study.json"
            if self.mirror is not None:
                self.mirror.fetch_study()
                self.mirror.fetch("looks.json")
                self.mirror.fetch_results()
            if path.exists():
                self.refuse_other(path)
            elif self.holds_runs() or any((self.folder / name).exists() for name in ("run.json", "metrics.jsonl")):
                raise StudyError(f"{self.folder} holds runs but no study.json; choose another folder with --out.")
            self.write(read_data(path) if self.holds_runs() else [])  # before a run has begun nothing is fixed
            try:
                yield self
            finally:
                self.close()

    def close(self) -> None:
        if self.starter is not None:
            self.starter.close()
            self.starter = None

    @property
    def processes_log(self) -> Path:
        return self.folder / "logs" / "processes.log"

    def holds_runs(self) -> bool:
        return (
            next(self.folder.glob("runs/*/*/*/run.json"), None) is not None
            or next(self.folder.glob("*/run.json"), None) is not None
        )

    def write(self, data: list[dict[str, Any]]) -> None:
        """study.json: the spec, and of which content its corpora were when it began."""
        record = {"format": FORMAT, "fingerprint": self.spec.fingerprint, "spec": self.spec.to_dict(), "data": data}
        with refused_files():
            write_json(self.folder / "study.json", record)
        if self.mirror is not None:
            self.mirror.put("study.json")

    def refuse_other(self, path: Path) -> None:
        if not self.holds_runs():
            return
        old = read_spec(path)
        found = difference(canonical(old.fixed()), canonical(self.spec.fixed()))
        if found is not None:
            raise StudyError(f"{self.folder} holds a study that began {found}; {FIXED}")
        if old.seeds > self.spec.seeds:
            raise StudyError(
                f"{self.folder} holds a study of {old.seeds} seeds, but seeds={self.spec.seeds} came; a study can be "
                "given more seeds and not fewer."
            )

    def carry_out(self, slots: Slots, display: Display) -> list[Result]:
        """Do what is not done yet; every run's result."""
        first = list(tuning(self.spec))
        total = len(first) + len(self.spec.corpora) * len(self.spec.arms) * (self.spec.seeds - self.spec.tuning_seeds)
        try:
            if self.left(first) or self.left(self.foreseen()):
                with left_at_once("while its corpora were prepared"):
                    self.prepare(display)
            with StopRequest() as stop:
                results = self.perform(first, slots, display, stop, total)
                chosen = chosen_lrs(self.spec, results)
                results += self.perform(list(confirming(self.spec, chosen)), slots, display, stop, total)
        finally:
            display.close()
        return results

    def prepare(self, display: Display) -> None:
        """Prepare every corpus once, before many processes would; refuse one that changed since the study began."""
        before = read_data(self.folder / "study.json")
        hashes = {json.dumps(entry["spec"], sort_keys=True): entry["hash"] for entry in before}
        for spec in dict.fromkeys(self.run_spec(run).corpus for run in tuning(self.spec)):
            found = self.prepared(spec, display)
            old = hashes.get(json.dumps(spec.to_dict(), sort_keys=True))
            if old is None:
                before.append({"spec": spec.to_dict(), "hash": found})
            elif old != found:
                raise StudyError(
                    f"the corpus {spec.source} changed since the study in {self.folder} began: it was {old[:12]}… and "
                    f"is now {found[:12]}…, so runs would not compare; restore it or choose another folder with --out."
                )
        self.write(before)

    def prepared(self, spec: DataSpec, display: Display) -> str:
        """The hash of the prepared corpus, which must have text to choose learning rates on and text to report on."""

        def progress(what: str, done: int, of: int) -> None:
            display.show(0.0, f"preparing {spec.source}: {what}, {done / max(1, of):.0%}")

        corpus = prepare_corpus(spec, data=self.data, progress=progress)
        for split, use in (("valid", "to choose learning rates on"), ("test", "to report on")):
            if split not in corpus.splits or not corpus.splits[split].tokens:
                raise StudyError(
                    f"the corpus {spec.source} has no {split} text, which a study needs {use}; give it more documents, "
                    f"files named {split}…, or a larger corpus.{split}."
                )
        return corpus.hash

    def result(self, planned: Planned) -> Result | None:
        """The result of a run, read once; None while it has not ended. The run must be the one that is meant."""
        if planned not in self.known:
            found = result_of(self.folder, planned)
            if found is None:
                return None
            directory = RunDirectory(planned.folder(self.folder))
            old, spec = directory.read()["spec"], self.run_spec(planned)
            if spec.precision == "auto":
                spec = spec.replace(precision=old["precision"])
            try:
                refuse_other_spec(directory, old, spec)
            except RunError as error:
                find_source_path(planned.corpus, self.data)  # a prepared corpus that is gone cannot say what it was
                raise StudyError(f"another run is in the place of {planned.name}; move it away: {error}") from None
            self.known[planned] = found
        return self.known[planned]

    def run_spec(self, planned: Planned) -> RunSpec:
        if planned not in self.specs:
            self.specs[planned] = planned.spec(self.spec)
        return self.specs[planned]

    def left(self, planned: Iterable[Planned]) -> list[Planned]:
        return [run for run in planned if self.result(run) is None]

    def foreseen(self) -> list[Planned]:
        """Confirming runs that are certain already: of arms that are done with tuning."""
        return list(confirming(self.spec, {key: lr for key, lr in self.chosen().items() if lr is not None}))

    def chosen(self) -> dict[tuple[str, str], float | None]:
        """chosen_lrs of the arms that are done with tuning."""
        undone = {(run.corpus, run.arm) for run in tuning(self.spec) if run not in self.known}
        found = chosen_lrs(self.spec, list(self.known.values()))
        return {key: lr for key, lr in found.items() if key not in undone}

    def perform(
        self, planned: Sequence[Planned], slots: Slots, display: Display, stop: StopRequest, total: int
    ) -> list[Result]:
        """Run all of `planned`, several at a time. When none waits, runs that will follow are begun already."""
        waiting, active = deque(self.left(planned)), dict[int, Active]()
        self.left(self.foreseen())
        if self.began is None:
            self.began, self.given = time.monotonic(), len(self.known)
        shown_at = -SHOW
        try:
            while waiting or active:
                if stop.came is not None:
                    raise StudyInterrupted(f"stopped by {stop.came}; the same command continues.")
                while len(active) < slots.count and (waiting or self.follow(waiting, active)):
                    self.start(waiting.popleft(), slots, active, display)
                assert self.starter is not None
                for number, code in self.starter.ended(POLL):
                    run = active.pop(number)
                    self.fetch([run])
                    if not self.ended(run, code, display):
                        waiting.appendleft(run.planned)
                if active and time.monotonic() - shown_at >= SHOW:
                    shown_at = time.monotonic()
                    self.look(active.values(), display)
                    self.tell(active.values(), total, display)
        finally:
            if active:
                self.stop(len(active), display)
        return [result for run in planned if (result := self.result(run)) is not None]

    def stop(self, count: int, display: Display) -> None:
        """Let all runs save their state and end."""
        assert self.starter is not None
        display.say(f"{count} runs save their state and stop." if count > 1 else "a run saves its state and stops.")
        self.attempts.clear()  # that they end now is no failure of theirs
        hanging = self.starter.stop()
        if hanging:
            display.say(
                f"{hanging} of them did not within {format_duration(SAVING)} and {'were' if hanging > 1 else 'was'} "
                "ended; what was saved before is still there."
            )

    def fetch(self, runs: Iterable[Active]) -> None:
        """Bring what is known of runs at the study's URL, if it has one."""
        if self.mirror is not None:
            self.mirror.fetch_results([run.planned.place for run in runs])

    def look(self, runs: Iterable[Active], display: Display) -> None:
        """See now and then at the URL how far the runs are."""
        if self.mirror is not None and time.monotonic() - self.fetched >= FETCH:
            try:
                self.fetch(runs)
            except StudyError as error:
                display.say(f"how far the runs are is not known for now: {error}")
            self.fetched = time.monotonic()

    def follow(self, waiting: deque[Planned], active: dict[int, Active]) -> bool:
        """Let runs of the second phase wait for the room that the first leaves."""
        under_way = {run.planned for run in active.values()}
        waiting.extend(run for run in self.left(self.foreseen()) if run not in under_way)
        return bool(waiting)

    def start(self, planned: Planned, slots: Slots, active: dict[int, Active], display: Display) -> None:
        slot = min(set(range(len(active) + 1)) - {run.slot for run in active.values()})
        log = self.folder / "logs" / planned.place.with_name(f"{planned.place.name}.log")
        task: dict[str, Any] = {
            "spec": self.run_spec(planned).to_dict(),
            "folder": str(planned.folder(self.folder)),
            "execution": self.execution | {"device": "cuda" if slots.gpus else "cpu", "threads": slots.threads},
            "data": None if self.data is None else str(self.data),
            "url": None if self.mirror is None else self.mirror.url,
        }
        self.attempts[planned] = self.attempts.get(planned, 0) + 1
        with refused_files():
            log.parent.mkdir(parents=True, exist_ok=True)
            if self.starter is not None and self.starter.lost:
                self.close()
            if self.starter is None:
                self.starter = Nursery(self.processes_log, {"OMP_NUM_THREADS": str(slots.threads)})
            run = Active(planned, slot, log, log.stat().st_size if log.exists() else 0, self.saved(planned))
        if self.attempts[planned] == 1:
            self.given += self.progress(run)
        active[self.starter.start(task, log, slots.visible(slot))] = run

    def ended(self, run: Active, code: int | None, display: Display) -> bool:
        """Whether the run is over; False if it is to be resumed."""
        result = self.result(run.planned)
        if result is not None:
            mark = "" if result.status == "finished" else f", {result.status}"
            value = result.told(find_metric(self.spec.metric))
            display.say(f"{run.planned.name}: {value}{mark}, {format_duration(result.seconds)}")
            return True
        if self.saved(run.planned) > run.saved:
            self.attempts[run.planned] = 1
        why = self.why(run, code)
        if self.attempts[run.planned] >= ATTEMPTS or code == FAILED:
            raise StudyError(
                f"the run {run.planned.name} failed: {why.rstrip('.')} (all that it said is in {run.log})."
            )
        display.say(f"{run.planned.name}: its process died ({why.rstrip('.')}); it is resumed.")
        return False

    def why(self, run: Active, code: int | None) -> str:
        """What ended a run's process: a signal, or its last words."""
        if code is None:
            return f"the process that started it is gone; its log is {self.processes_log}"
        if code < 0:
            return f"{signal.Signals(-code).name}{', perhaps for want of memory' if -code == signal.SIGKILL else ''}"
        try:
            with open(run.log, "rb") as file:
                file.seek(run.said)
                said = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            said = []
        return said[-1] if said else f"it ended with code {code} and could say nothing; is the disk full?"

    def saved(self, planned: Planned) -> str:
        """The name of a run's newest checkpoint, which grows with its step."""
        if self.mirror is not None:
            return self.mirror.newest(planned.place)
        return max((path.name for path in planned.folder(self.folder).glob("checkpoints/step-*")), default="")

    def tell(self, active: Iterable[Active], total: int, display: Display) -> None:
        """How far the whole study is, both phases together, and how long it will still take at this rate. Of a run's
        time its steps are the share that they were of those that ended, and the rest is its evaluation."""
        assert self.began is not None
        hopeless = [key for key, lr in self.chosen().items() if lr is None]  # nothing is left to do for these arms
        under_way = [run for run in active if run.planned not in self.known]
        total -= len(hopeless) * (self.spec.seeds - self.spec.tuning_seeds)
        shares = [steps_of_time(result) for result in self.known.values()]
        share = sum(shares) / len(shares) if shares else STEPS_OF_TIME
        parts = {run.planned.name: self.progress(run) for run in under_way}
        done = len(self.known) + share * sum(parts.values())
        fresh = done - self.given
        left = (time.monotonic() - self.began) * (total - done) / fresh if fresh > 0 else None
        still = f" · {format_duration(left)} left" if left is not None else ""
        names = [f"{name} (final evaluation)" if part >= 1 else name for name, part in parts.items()]
        if len(names) > NAMED:
            names[NAMED - 1 :] = [f"{len(names) - NAMED + 1} others"]
        display.show(done / total, f"{len(self.known)}/{total} runs{still} · now {', '.join(names)}")

    def progress(self, run: Active) -> float:
        """The part of a run that is done, from the last line it recorded."""
        spec, path = self.run_spec(run.planned), run.planned.folder(self.folder) / "metrics.jsonl"
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - 4096))
                lines = file.read().splitlines()
        except OSError:
            return 0.0
        for line in reversed(lines):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("kind") == "train":
                if spec.steps is not None:
                    return min(1.0, record["step"] / spec.steps)
                return min(1.0, record["time"]["seconds"] / spec.budget.seconds)
        return 0.0


def steps_of_time(result: Result) -> float:
    """Which part of a run's time its training steps took."""
    whole = result.summary.get("seconds_of_last_process", {}).get("all", 0.0)
    return min(1.0, result.seconds / whole) if whole > 0 else STEPS_OF_TIME


@contextmanager
def left_at_once(when: str) -> Iterator[None]:
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


@contextmanager
def refused_files() -> Iterator[None]:
    """A disk that refuses, told in one sentence."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise StudyError(
            f"the study stopped because of a file{where}: {describe_os_error(error)}; what was saved before is "
            "still there, mend this and run the same command again."
        ) from error


def difference(before: Any, now: Any, name: str = "") -> str | None:
    """The first setting that differs, and how: "with arms.x.z_loss=0, but 1 came"; None if there is none."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return None if before == now else f"with {name}={format_value(before)}, but {format_value(now)} came"
    for key in sorted(before.keys() | now.keys()):
        path = f"{name}.{key}" if name else key
        if key not in now:
            return f"with {path}={format_value(before[key])}, which is now left out"
        if key not in before:
            return f"without {path}, but {format_value(now[key])} came"
        if (found := difference(before[key], now[key], path)) is not None:
            return found
    return None


def read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record["format"] != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        return record
    except (OSError, ValueError, KeyError) as error:
        raise StudyError(f"{path} cannot be read as a study: {error}; restore it from a copy.") from None


def read_spec(path: Path) -> StudySpec:
    """The spec that a study began with."""
    record = read_record(path)
    try:
        return StudySpec.from_dict(record["spec"])
    except (ValueError, KeyError) as error:
        raise StudyError(f"{path} cannot be read as a study: {error}; restore it from a copy.") from None


def read_data(path: Path) -> list[dict[str, Any]]:
    """Which corpora, with which content, a study began with: its `spec` and `hash` each; none where nothing ran."""
    return list(read_record(path).get("data", ())) if path.exists() else []
