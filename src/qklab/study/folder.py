"""A study's folder: study.json says what is compared and on which text, runs/ holds the runs."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qklab.data.prepare import prepare_corpus
from qklab.data.spec import DataSpec
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.progress import Display
from qklab.study.records import StudyRecord, find_other_plan, holds_study, read_study_record
from qklab.study.remote import RemoteStudy
from qklab.study.spec import StudyError, StudySpec

FIXED = "what is compared is fixed once a run has begun, so choose another folder with --out for another study."


class StudyFolder:
    """The folder of one study, or a copy of what `remote` has at a URL; nothing is fixed before a run has begun."""

    def __init__(self, path: Path, spec: StudySpec, asked: dict[str, Any], remote: RemoteStudy | None):
        self.path, self.spec, self.asked, self.remote = path, spec, asked, remote

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder, and see that it holds this study or none."""
        self.spec.refuse_illegal()  # before anything is written
        fresh = not self.path.exists()
        try:
            lock = RunDirectory(self.path).lock()
        except RunError as error:
            raise StudyError(str(error).replace("run directory", "study's folder")) from None
        with lock:
            if self.remote is not None:
                self.remote.fetch_study()
                self.remote.fetch_records()
            if self.holds_runs() or any((self.path / name).exists() for name in ("run.json", "metrics.jsonl")):
                if not holds_study(self.path):
                    raise StudyError(f"{self.path} holds runs but no study.json; choose another folder with --out.")
                self.refuse_other(read_study_record(self.path).spec)
            try:
                yield
            finally:
                if fresh and not any(path.name != "lock" for path in self.path.iterdir()):
                    shutil.rmtree(self.path, ignore_errors=True)  # nothing came of it

    def holds_runs(self) -> bool:
        return any(any(self.path.glob(pattern)) for pattern in ("runs/*/*/*/run.json", "*/run.json"))

    def read_data(self) -> list[dict[str, Any]]:
        """What study.json knows of the corpora; before a run has begun nothing is fixed."""
        return read_study_record(self.path).data if self.holds_runs() else []

    def write_record(self, data: list[dict[str, Any]]) -> None:
        judged = read_study_record(self.path).judged if self.holds_runs() else []
        StudyRecord(self.spec, data, self.asked, judged).write(self.path)
        if self.remote is not None:
            self.remote.send_study()

    def refuse_other(self, old: StudySpec) -> None:
        found = find_other_plan(old, self.spec)
        if found is not None:
            raise StudyError(f"{self.path} holds a study that began {found}; {FIXED}")
        begun = [int(path.parent.name.rpartition("-seed")[2]) for path in self.path.glob("runs/*/*/*-seed*/run.json")]
        if begun and max(begun) >= self.spec.seeds:
            raise StudyError(
                f"{self.path} holds a study whose runs have begun for {max(begun) + 1} seeds, but "
                f"seeds={self.spec.seeds} came; what has begun stays in it, so ask for {max(begun) + 1} or more."
            )

    def prepare_corpora(self, specs: Iterable[DataSpec], data: Path | None, display: Display) -> None:
        """Prepare every corpus once, before many processes would; refuse one that changed since the study began."""
        record = StudyRecord(self.spec, self.read_data())
        for spec in specs:
            found, old = prepare_splits(spec, data, display), record.find_hash(spec.to_dict())
            if old is None:
                record.data.append({"spec": spec.to_dict(), "hash": found})
            elif old != found:
                raise StudyError(
                    f"the corpus {spec.source} changed since the study in {self.path} began: it was {old[:12]}… and "
                    f"is now {found[:12]}…, so runs would not compare; restore it or choose another folder with --out."
                )
        self.write_record(record.data)  # only now: nothing is written that is refused

    def discard_damaged_summaries(self, display: Display) -> None:
        """Let runs whose summary cannot be read end once more."""
        for path in sorted(self.path.glob("runs/*/*/*/summary.json")):
            wrong = RunDirectory(path.parent).discard_damaged_summary()
            if wrong is not None:
                display.say(f"{wrong}; that run's end is evaluated again.")


def prepare_splits(spec: DataSpec, data: Path | None, display: Display) -> str:
    """The hash of the prepared corpus, which must have text to choose learning rates on and text to report on."""

    def report(what: str, done: int, total: int) -> None:
        display.report_bytes(f"preparing {spec.source}: {what}" if total else what, done, total)

    corpus = prepare_corpus(spec, data=data, progress=report)
    for split, use in (("valid", "to choose learning rates on"), ("test", "to report on")):
        if split not in corpus.splits or not corpus.splits[split].tokens:
            raise StudyError(
                f"the corpus {spec.source} has no {split} text, which a study needs {use}; give it more documents, "
                f"files named {split}…, or a larger corpus.{split}."
            )
    return corpus.hash
