"""A comparison that is there: whether it is the one asked for, and how many seeds more it gets."""

from collections.abc import Sequence
from pathlib import Path

from qklab.study.arms import select_arms
from qklab.study.executors import WorkerSlots
from qklab.study.plan import count_runs
from qklab.study.records import StudyRecord, read_analyses, read_results
from qklab.study.request import ComparisonRequest
from qklab.study.sizes import find_size
from qklab.study.spec import StudyError, StudySpec
from qklab.study.tuning import add_seeds, find_grids

MINUTES = 5.0  # that --continue adds


def refuse_other_request(record: StudyRecord, folder: Path, request: ComparisonRequest) -> None:
    """Raise if the comparison in the folder is not the one that is asked for; what is left open is as it was."""
    refuse_other_comparison(record.spec, folder, request)
    asked, spec = record.asked, record.spec
    for name, there in (("minutes", [asked.get("minutes")]), ("seeds", [asked.get("seeds"), spec.seeds])):
        wanted = getattr(request, name)
        if wanted is not None and wanted not in there:
            fixed = "tokens that its size fixed" if name == "minutes" else f"{spec.seeds} seeds"
            told = fixed if there[0] is None else f"{name}={there[0]:g}"
            raise StudyError(
                f"{folder} holds a comparison of {told}, but {name}={wanted:g} came; to go on with that one leave "
                f"--{name} out, to give it more add --continue, and to begin another choose another folder with --out."
            )


def extend_comparison(record: StudyRecord, folder: Path, request: ComparisonRequest, slots: WorkerSlots) -> StudyRecord:
    """The comparison with so many seeds in all, or with as many more as fit into the minutes by what its runs took.

    What is already planned and not done yet comes first, and the same call again asks for nothing more until it is."""
    spec = record.spec
    refuse_other_comparison(spec, folder, request)
    if request.seeds is not None:
        return StudyRecord(add_seeds(spec, request.seeds), record.data, record.asked)
    minutes = request.minutes or MINUTES
    done = spec.seeds in read_analyses(folder).seeds
    if not done and (request.minutes is None or record.asked.get("continued") == minutes):
        return record
    ended = read_results(folder, spec)
    taken = [result.process_seconds for result in ended]
    if not taken:
        raise StudyError(
            f"{folder} has no finished run to reckon with; say how many seeds in all with --continue --seeds, or leave "
            "--continue out to go on as planned."
        )
    affordable = len(ended) + 60 * minutes / (sum(taken) / len(taken) / slots.count)
    grids, seeds = find_grids(spec, ended), spec.seeds + int(done)
    while count_runs(add_seeds(spec, seeds + 1), grids) <= affordable:
        seeds += 1
    return StudyRecord(add_seeds(spec, seeds), record.data, record.asked | {"continued": minutes})


def refuse_other_comparison(study: StudySpec, folder: Path, request: ComparisonRequest) -> None:
    """Raise if what was asked for is not what the comparison in the folder compares."""
    asked = (
        ("texts", list(request.texts) if request.texts else None, study.corpora),
        ("arms", None if request.arms is None else sorted(select_arms(request.arms)), sorted(study.arms)),
        ("a size", request.size, find_size(study)),
        ("final_tokens", request.final_tokens, study.base["evaluation"].get("final_tokens", 0)),
    )
    kept = study.base["corpus"]
    asked += tuple((name, value, kept.get(name, "left open")) for name, value in request.reading.items())
    for what, wanted, there in asked:
        if wanted is not None and wanted != there:
            raise StudyError(
                f"{folder} holds a comparison with {what} {join_words(there)}, but {join_words(wanted)} came; what is "
                "compared is fixed once it began, so choose another folder with --out."
            )


def join_words(names: str | int | Sequence[str]) -> str:
    return str(names) if isinstance(names, str | int) else ", ".join(names)
