"""Keep what a study's runs recorded, without their weights: python evidence/keep.py STUDY_FOLDER evidence/NAME

With --restore, the other way round: the runs that are kept, as far as a study needs them to go on with the others, so
that it can grow over many short jobs on machines that forget:

    python evidence/keep.py --restore evidence/NAME STUDY_FOLDER [evidence/OTHER/study.toml]

With another study's file, that one begins with the runs of arms that the two have in common.

Each finished run becomes a line of records.jsonl.xz: its run.json and summary.json as they are, its learning curve
thinned to a hundred points, every evaluation, and every probe averaged over heads. Runs that are there already stay.
"""

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import unquote

from records import RECORDS, read_records, write_records

from qklab.study.records import StudyRecord, read_study_record
from qklab.study.spec import read_study

POINTS = 100


def read_record(run: Path) -> dict[str, Any]:
    """One run, ready to be kept."""
    about = json.loads((run / "run.json").read_text())
    about["data"].pop("folder", None)  # where the corpus lay on the machine that trained
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "place": "/".join(run.parts[-3:]),
        "run": about,
        "summary": json.loads((run / "summary.json").read_text()),
        "curve": thin_curve([line for line in lines if line["kind"] == "train"]),
        "evaluations": [line for line in lines if line["kind"] == "evaluation"],
        "probes": [average_heads(json.loads(path.read_text())) for path in sorted(run.glob("probes/*.json"))],
    }


def thin_curve(steps: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Means over at most POINTS equal stretches of the run; `step` is each one's last."""
    size = -(-len(steps) // POINTS)
    stretches = [steps[start : start + size] for start in range(0, len(steps), size)]
    return {
        "step": [stretch[-1]["step"] for stretch in stretches],
        "loss": [average_finite(line["loss"] for line in stretch) for stretch in stretches],
        "grad_norm": [average_finite(line["grad_norm"] for line in stretch) for stretch in stretches],
    }


def average_finite(values: Iterable[Any]) -> float | None:
    """The mean of those that are numbers; a skipped step's may be "nan"."""
    numbers = [value for value in values if isinstance(value, float | int)]
    return round(fmean(numbers), 4) if numbers else None


def average_heads(probe: dict[str, Any]) -> dict[str, Any]:
    """A probe with one number per layer instead of one per head."""

    def average(layer: Any) -> Any:
        numbers = [value for value in layer if value is not None] if isinstance(layer, list) else None
        return layer if numbers is None else round(fmean(numbers), 4) if numbers else None

    measured = {name: values for name, values in probe["layers"].items() if values is not None}
    layers = {name: [average(layer) for layer in values] for name, values in measured.items()}
    return {"step": probe["step"], "layers": layers}


def main(study: Path, folder: Path) -> None:
    kept = read_records(folder)
    known = {record["run"]["id"] for record in kept}
    ended = [summary.parent for summary in sorted(study.glob("runs/*/*/*/summary.json"))]
    found = [read_record(run) for run in ended if (run / "metrics.jsonl").exists()]  # those restored have none
    fresh = [record for record in found if record["run"]["id"] not in known]
    records = sorted(kept + fresh, key=lambda record: record["place"])
    write_records(folder, records)
    shutil.copy(study / "study.json", folder / "study.json")
    print(f"{len(fresh)} runs added, {len(records)} kept in {folder / RECORDS}")


def restore(folder: Path, study: Path, file: Path) -> None:
    """Write study.json, and run.json and summary.json of every run that is kept, of an arm of this plan, and not
    there."""
    plan, data = read_study(file), read_study_record(folder).data
    records = [record for record in read_records(folder) if unquote(record["place"].split("/")[1]) in plan.arms]
    for record in records:
        run = study / "runs" / record["place"]
        if not (run / "summary.json").exists():
            run.mkdir(parents=True, exist_ok=True)
            (run / "run.json").write_text(json.dumps(record["run"]))
            (run / "summary.json").write_text(json.dumps(record["summary"]))
    study.mkdir(parents=True, exist_ok=True)  # where no arm that is kept is of this plan
    StudyRecord(plan, data).write(study)  # as its file is now: a grid may have been extended since
    print(f"{len(records)} runs are in {study}")


if __name__ == "__main__":
    if sys.argv[1] == "--restore":
        kept, study, *file = map(Path, sys.argv[2:])
        restore(kept, study, file[0] if file else kept / "study.toml")
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
