"""Where the report's runs lie, and which of them are shown together: those of a study, or plain runs on one corpus."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qklab.runs.directory import RunDirectory, RunError
from qklab.study.across import compare_across
from qklab.study.findings import Findings, average_corpora, derive_findings
from qklab.study.parts import StudyPart, find_size_folder
from qklab.study.plan import PlannedRun
from qklab.study.records import STUDY, RunResult, holds_study, read_analyses, read_study_record, sum_up_ledger
from qklab.study.spec import StudySpec
from qklab.train.resume import flatten_settings

NOT_AN_ARM = {"seed", "corpus.source"}  # settings in which runs of one arm may differ


@dataclass
class RecordedRun:
    """A run directory as read."""

    folder: Path
    record: dict[str, Any]
    summary: dict[str, Any] | None
    settings: dict[str, Any]
    planned: PlannedRun

    @property
    def result(self) -> RunResult | None:
        return None if self.summary is None else RunResult(self.planned, self.summary["status"], self.summary)


@dataclass
class RunGroup:
    """Runs on one corpus that are shown together."""

    title: str
    corpus: str
    folder: Path
    study: StudySpec | None
    arms: list[str]
    runs: list[RecordedRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def results(self) -> list[RunResult]:
        return [result for run in self.runs if (result := run.result) is not None]

    def read_run(self, folder: Path, planned: PlannedRun) -> None:
        """Add the run that lies there, if one has begun; one that cannot be read is left out with a note."""
        directory = RunDirectory(folder)
        if not directory.exists():
            return
        try:
            record = directory.read()
            self.runs.append(
                RecordedRun(folder, record, directory.summary(), flatten_settings(record["spec"]), planned)
            )
        except RunError as error:
            self.notes.append(f"Left out: {error}")

    @cached_property
    def findings(self) -> Findings:
        """A study's own findings; plain runs are not judged, for no baseline was named before they ran."""
        if self.study is not None:
            return derive_findings(self.study, self.results, self.corpus, read_analyses(self.folder))
        lrs = {arm: sorted({r.planned.lr for r in self.results if r.planned.arm == arm}) for arm in self.arms}
        return Findings(
            self.corpus,
            lrs={arm: own[0] if own else None for arm, own in lrs.items()},
            ledgers={arm: sum_up_ledger(self.results, self.corpus, arm, lrs[arm]) for arm in self.arms},
            headline=f"Runs on {self.corpus}, without a comparison",
            notes=[
                "These runs belong to no study: no baseline and no measure were fixed before they ran, so there is no "
                "verdict. qklab compare and qklab study make one."
            ],
        )


def read_groups(paths: Sequence[Path]) -> list[RunGroup]:
    """Groups of what lies at or below the paths: studies first, then plain runs."""
    groups: list[RunGroup] = []
    plain: list[Path] = []
    for path in find_folders(paths):
        if holds_study(path):
            groups += [group for part in find_parts(path).values() for group in group_study(part)]
        else:
            plain.append(path)
    return groups + group_plain_runs(plain)


def find_parts(folder: Path) -> dict[str | None, Path]:
    """The folders that hold a study's runs: by name of those of its sizes that have begun, or its own."""
    sizes = [entry["name"] for entry in read_study_record(folder).spec.sizes]
    found = {size: find_size_folder(folder, size) for size in sizes}
    return {size: path for size, path in found.items() if holds_study(path)} if sizes else {None: folder}


def describe_across(paths: Sequence[Path], groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """What each study at or below the paths says across its sizes and corpora, and of published figures."""
    found: list[dict[str, Any]] = []
    for path in find_folders(paths):
        if holds_study(path):
            study, parts, averages = read_study_record(path).spec, list[StudyPart](), list[dict[str, Any]]()
            for size, folder in find_parts(path).items():
                own = [group for group in groups if group.folder == folder]
                results = [result for group in own for result in group.results]
                parts += [StudyPart(group.study, results, size) for group in own[:1] if group.study is not None]
                average = average_corpora(study, [group.findings for group in own])
                averages += [] if average is None else [describe_average(average, parts[-1].size)]
            across = compare_across(study, parts)
            if averages or not across.is_empty:
                found.append({"title": study.name, "averages": averages} | across.to_dict())
    return found


def describe_average(average: Findings, size: str) -> dict[str, Any]:
    """The mean over a study's corpora at one size."""
    verdicts = {arm: verdict.to_dict() for arm, verdict in average.verdicts.items()}
    return {"size": size, "headline": average.headline, "notes": average.notes, "verdicts": verdicts}


def find_folders(paths: Sequence[Path]) -> Iterator[Path]:
    """The study folders and run directories at or below the paths, each once; runs of a study are its own."""
    seen: set[Path] = set()
    for path in paths:
        if not path.is_dir():
            raise RunError(f"{path} is no folder; a report is made from study folders and run directories.")
        some = False
        for folder, below, files in os.walk(path):
            below.sort()
            if STUDY in files or "run.json" in files:
                below.clear()
                some = True
                if (here := Path(folder)).resolve() not in seen:
                    seen.add(here.resolve())
                    yield here
        if not some:
            raise RunError(
                f"{path} holds neither a study (study.json) nor runs (run.json) yet; name a folder that does."
            )


def group_study(folder: Path) -> list[RunGroup]:
    """A group per corpus of a study."""
    spec = read_study_record(folder).spec
    groups: list[RunGroup] = []
    for corpus in spec.corpora:
        group = RunGroup(spec.name, corpus, folder, spec, list(spec.arms))
        for arm in spec.arms:
            for lr in spec.widest_grid:
                for seed in range(spec.seeds):
                    planned = PlannedRun(corpus, arm, lr, seed)
                    group.read_run(planned.folder_in(folder), planned)
        groups.append(group)
    return groups


def group_plain_runs(folders: Sequence[Path]) -> list[RunGroup]:
    """Runs without a study, a group per corpus. An arm is what has the same settings but for the seed."""
    read: list[tuple[Path, dict[str, Any], dict[str, Any]]] = []
    notes: list[str] = []
    for folder in folders:
        try:
            record = RunDirectory(folder).read()
            read.append((folder, record, flatten_settings(record["spec"])))
        except RunError as error:
            notes.append(f"Left out: {error}")
    names = name_arms([(record.get("name", folder.name), settings) for folder, record, settings in read])
    groups: dict[str, RunGroup] = {}
    for (folder, record, settings), arm in zip(read, names, strict=True):
        corpus = str(settings.get("corpus.source"))
        above = Path(os.path.commonpath(folders))
        group = groups.setdefault(corpus, RunGroup("runs", corpus, above, None, [], notes=notes))
        if arm not in group.arms:
            group.arms.append(arm)
        lr, seed = settings.get("optimiser.lr", math.nan), record["spec"].get("seed", 0)
        group.read_run(folder, PlannedRun(corpus, arm, lr, seed))
    if notes and not groups:
        raise RunError(notes[0])
    return list(groups.values())


def name_arms(runs: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """A name per run: the model's own, and where different runs share it, the settings that tell them apart."""
    own = [{k: v for k, v in settings.items() if k not in NOT_AN_ARM} for _, settings in runs]
    names: list[str] = []
    for (name, _), settings in zip(runs, own, strict=True):
        others = [s for (n, _), s in zip(runs, own, strict=True) if n == name and s != settings]
        apart = sorted(k for k in settings if any(s.get(k) != settings[k] for s in others))
        shown = ", ".join(f"{k.rsplit('.', 1)[-1]} {settings[k]}" for k in apart[:3])
        names.append(f"{name} · {shown}" if shown else name)
    return names
