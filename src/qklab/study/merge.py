"""Slices of one study that were carried out on different machines, united into one folder.

What is united must be one study: the same plan, the same text, and runs made by the same code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qklab.runs.directory import RunDirectory
from qklab.runs.files import copy_folder
from qklab.study.parts import find_size_folder
from qklab.study.plan import count_runs
from qklab.study.records import (
    STUDY,
    Analyses,
    StudyRecord,
    explain_file_errors,
    find_newest_checkpoint,
    find_other_plan,
    holds_study,
    read_analyses,
    read_results,
    read_study_record,
)
from qklab.study.spec import StudyError
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
    present = [out] if holds_study(out) else []
    if len(folders) + len(present) < 2:
        raise StudyError(f"a merge unites two or more folders, but {len(folders)} came; name all slices.")
    slices = list(dict.fromkeys(path.absolute() for path in [*present, *folders]))
    for folder in slices:
        if not holds_study(folder):
            raise StudyError(f"{folder} holds no study: it has no {STUDY}; name folders that qklab study made.")
    whole = Merge(slices, out.absolute())
    parts = [whole]
    for size in (entry["name"] for entry in whole.spec.sizes):
        begun = [own for folder in slices if holds_study(own := find_size_folder(folder, size))]
        parts += [Merge(begun, find_size_folder(whole.out, size))] if begun else []
    refuse_other_code([run for part in parts for run in part.runs.values()])
    with explain_file_errors(), RunDirectory(out).lock():
        taken = sum(part.write() for part in parts)
    counts = [part.count_runs() for part in parts if not part.spec.sizes]
    return MergedStudy(out, taken, sum(ended for ended, _ in counts), sum(planned for _, planned in counts))


class Merge:
    """What several folders hold of one study, or of its part at one size; raises where they do not belong together."""

    def __init__(self, slices: Sequence[Path], out: Path):
        self.slices, self.out = slices, out
        self.records = [read_study_record(folder) for folder in slices]
        refuse_other_plans(slices, self.records)
        self.data, self.runs = merge_data(slices, self.records), choose_runs(slices)
        self.spec = max((record.spec for record in self.records), key=lambda spec: spec.seeds)

    def write(self) -> int:
        """Write it; how many runs were not there yet."""
        taken = [place for place, source in self.runs.items() if source != self.out / place]
        for place in taken:
            copy_folder(self.runs[place], self.out / place, aside=self.out / ".merging")
        asked = next((record.asked for record in self.records if record.asked), {})
        self.out.mkdir(parents=True, exist_ok=True)
        StudyRecord(self.spec, self.data, asked).write(self.out)
        analyses = merge_analyses(self.slices)
        if analyses.taken:
            analyses.write(self.out)
        return len(taken)

    def count_runs(self) -> tuple[int, int]:
        """How many have ended, and how many there are to be."""
        results = read_results(self.out, self.spec)
        return len(results), count_runs(self.spec, find_grids(self.spec, results))


def refuse_other_plans(slices: Sequence[Path], records: Sequence[StudyRecord]) -> None:
    first = records[0].spec
    for folder, record in zip(slices[1:], records[1:], strict=True):
        found = find_other_plan(*sorted((first, record.spec), key=lambda spec: spec.seeds))
        if found is not None:
            raise StudyError(
                f"{slices[0]} holds a study {found} in {folder}: another plan, whose runs do not compare; merge slices "
                "of one study file."
            )


def merge_data(slices: Sequence[Path], records: Sequence[StudyRecord]) -> list[dict]:
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
    return ended, "" if ended else find_newest_checkpoint(run)


def refuse_other_code(runs: Sequence[Path]) -> None:
    """Raise where runs were made by different versions of what computes their results."""
    made: dict[str, Path] = {}
    for run in runs:
        record = RunDirectory(run).read()
        made.setdefault(str(record.get("code") or record.get("commit")), run)
    if len(made) > 1:
        (one, first), (other, second) = list(made.items())[:2]
        raise StudyError(
            f"{first} was made by other code ({one[:12]}…) than {second} ({other[:12]}…): what they say may differ for "
            "that reason alone; do one of them again with the other's version."
        )


def merge_analyses(slices: Sequence[Path]) -> Analyses:
    """Every analysis that was taken of a slice: each was a chance to be wrong."""
    found = [read_analyses(folder) for folder in slices]
    taken = {analysis.seeds: analysis for each in reversed(found) for analysis in each.taken}
    best = next((each for each in found if each.command), found[0])
    return replace(best, taken=tuple(taken[seeds] for seeds in sorted(taken)))
