"""Slices of one study that were carried out on different machines, united into one folder.

What is united must be one study: the same plan, the same text, and runs made by the same code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qklab.runs.directory import RunDirectory
from qklab.runs.files import copy_folder
from qklab.study.executors import newest_checkpoint
from qklab.study.plan import count_runs
from qklab.study.records import (
    STUDY,
    Analyses,
    StudyRecord,
    explain_file_errors,
    find_difference,
    read_analyses,
    read_results,
    read_study_record,
)
from qklab.study.spec import StudyError, canonicalise
from qklab.study.tuning import find_grids

RUNS = "runs/*/*/*/run.json"


@dataclass(frozen=True)
class MergedStudy:
    """A study united from slices: how many runs were taken over, and how many of the study's have ended."""

    folder: Path
    taken: int
    ended: int
    planned: int

    def describe(self) -> str:
        rest = "all of the study" if self.ended >= self.planned else f"{self.planned - self.ended} are still to be done"
        return f"{self.taken} runs were added to {self.folder}; {self.ended} have ended, {rest}."


def merge_studies(folders: Sequence[Path], out: Path) -> MergedStudy:
    """Unite what the folders hold in `out`, which may hold some of it already. Of a run that is in several the first
    that has ended counts, else the one that has come furthest. Nothing is written where anything does not belong."""
    if len(folders) < (1 if (out / STUDY).exists() else 2):
        raise StudyError(f"a merge unites two or more folders, but {len(folders)} came; name all slices.")
    present = [out] if (out / STUDY).exists() else []
    slices = list(dict.fromkeys(path.absolute() for path in [*present, *folders]))
    for folder in slices:
        if not (folder / STUDY).exists():
            raise StudyError(f"{folder} holds no study: it has no {STUDY}; name folders that qklab study made.")
    records = [read_study_record(folder) for folder in slices]
    refuse_other_plans(slices, records)
    data = unite_data(slices, records)
    chosen = choose_runs(slices)
    refuse_other_code(chosen)
    spec = max((record.spec for record in records), key=lambda spec: spec.seeds)
    asked = next((record.asked for record in records if record.asked), {})
    with explain_file_errors(), RunDirectory(out).lock():
        taken = [place for place, source in chosen.items() if source != out.absolute() / place]
        for place in taken:
            copy_folder(chosen[place], out / place, aside=out / ".merging")
        StudyRecord(spec, data, asked).write(out)
        analyses = unite_analyses(slices)
        if analyses.taken:
            analyses.write(out)
    results = read_results(out, spec)
    return MergedStudy(out, len(taken), len(results), count_runs(spec, find_grids(spec, results)))


def refuse_other_plans(slices: Sequence[Path], records: Sequence[StudyRecord]) -> None:
    first = canonicalise(records[0].spec.fixed_settings())
    for folder, record in zip(slices[1:], records[1:], strict=True):
        found = find_difference(first, canonicalise(record.spec.fixed_settings()))
        if found is not None:
            raise StudyError(
                f"{slices[0]} holds a study {found} in {folder}: another plan, whose runs do not compare; merge slices "
                "of one study file."
            )


def unite_data(slices: Sequence[Path], records: Sequence[StudyRecord]) -> list[dict]:
    """What is known of the corpora; raises where two slices were made from different text."""
    known = StudyRecord(records[0].spec, [])
    where: dict[str, Path] = {}
    for folder, record in zip(slices, records, strict=True):
        for entry in record.data:
            name, before = entry["spec"]["source"], known.find_hash(entry["spec"])
            if before is None:
                known.data.append(entry)
                where[name] = folder
            elif before != entry["hash"]:
                raise StudyError(
                    f"the corpus {name} was {before[:12]}… in {where[name]} and {entry['hash'][:12]}… in {folder}: "
                    "runs on different text do not compare; do one of them again on the other's."
                )
    return known.data


def choose_runs(slices: Sequence[Path]) -> dict[str, Path]:
    """A run's place in a study → the folder whose run counts."""
    found: dict[str, Path] = {}
    for folder in slices:
        for path in sorted(folder.glob(RUNS)):
            place, run = str(path.parent.relative_to(folder)), path.parent
            if place not in found or measure_stage(run) > measure_stage(found[place]):
                found[place] = run
    return found


def measure_stage(run: Path) -> tuple[bool, str]:
    """How far a run has come: whether it has ended, and its newest checkpoint."""
    ended = RunDirectory(run).summary() is not None
    return ended, "" if ended else newest_checkpoint(run)


def refuse_other_code(chosen: dict[str, Path]) -> None:
    """Raise where runs were made by different versions of what computes their results."""
    made: dict[str, Path] = {}
    for run in chosen.values():
        record = RunDirectory(run).read()
        made.setdefault(str(record.get("code") or record.get("commit")), run)
    if len(made) > 1:
        (one, first), (other, second) = list(made.items())[:2]
        raise StudyError(
            f"{first} was made by other code ({one[:12]}…) than {second} ({other[:12]}…): what they say may differ for "
            "that reason alone; do one of them again with the other's version."
        )


def unite_analyses(slices: Sequence[Path]) -> Analyses:
    """Every analysis that was taken of a slice: each was a chance to be wrong."""
    found = [read_analyses(folder) for folder in slices]
    taken = {analysis.seeds: analysis for each in reversed(found) for analysis in each.taken}
    best = next((each for each in found if each.command), found[0])
    return replace(best, taken=tuple(taken[seeds] for seeds in sorted(taken)))
