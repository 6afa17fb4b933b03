"""What carrying out a study costs beside its training: both slots busy, and little else.

    python benchmarks/study.py                             # 8 runs of nano, 15 s of training each, two at a time
    python benchmarks/study.py --seeds 2 --seconds 2       # a quick look

Every run trains for the same number of seconds, so the figures say nothing of the model's speed and all of what is
around it. A run's interval is what its own summary says its process took, from the first step to the end of the final
evaluation, up to the moment at which the study noticed its end. From these come

- both slots busy: the part of the study's wall-clock time in which as many runs as there are slots were in their
  interval;
- overhead: 1 − (the runs' seconds together) / (slots × wall-clock time), which has everything in it: the start of the
  process that runs are forked from, forks, opening the corpus, building models, and slots that have no run at the end;
- beside training: the processor time of the study's own process, writing all records once more, the answer and the
  report, relative to the seconds of training. This must stay below 2 %.

The corpus is prepared before anything is measured. Correctness comes first: a tiny study's run must have the weights
and the records that `train` alone gives, bit for bit, and afterwards every planned run must have finished, once and
without being resumed. Otherwise nothing is kept.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import RESULTS, keep, provenance
from qklab import report
from qklab.runs import MetricsFile, RunDirectory
from qklab.runs.progress import Display, Terminal
from qklab.study.answer import write_answer
from qklab.study.execute import Study
from qklab.study.executors import RunTask, Unit, WorkerSlots
from qklab.study.executors.local import LocalExecutor
from qklab.study.plan import plan_tuning_runs
from qklab.study.records import RunResult
from qklab.study.spec import StudySpec
from qklab.train.launch import train
from qklab.train.spec import ExecutionSpec

LIMIT = 0.02  # of the seconds of training, for all that is beside it
ARMS: dict[str, dict[str, Any]] = {"standard": {}, "k=v": {"attention": {"share": "k=v"}}}


class TimedExecutor(LocalExecutor):
    """Notes when the process of each run began and when its end was noticed."""

    def __init__(self, slots: int):
        super().__init__("cpu", slots)
        self.slots = WorkerSlots(slots, 1)
        self.moments: dict[str, list[float]] = {}

    def submit(self, unit: Unit) -> None:
        self.moments.setdefault(unit.tasks[0].name, []).append(time.perf_counter())
        super().submit(unit)

    def wait(self, seconds: float) -> list[RunTask]:
        ended = super().wait(seconds)
        for task in ended:
            self.moments[task.name].append(time.perf_counter())
        return ended


def study_of(options: argparse.Namespace) -> StudySpec:
    return StudySpec.from_dict(
        {
            "name": "benchmark",
            "baseline": "standard",
            "arms": ARMS,
            "base": {"model": {"recipe": options.size}, "budget": {"seconds": options.seconds}},
            "corpora": [options.corpus],
            "seeds": options.seeds,
            "match": "seconds",
        }
    )


def left_behind(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """A run's records but for clocks, and the files of its last checkpoint."""
    directory = RunDirectory(folder)
    records = [{k: v for k, v in record.items() if k != "time"} for record in directory.metrics()]
    last = max(directory.checkpoints_path.glob("step-*"))
    return records, {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def gate(options: argparse.Namespace, folder: Path) -> None:
    """Ends the benchmark unless a run of a study is the run that `train` makes."""
    model = {"layers": 1, "width": 16, "context": 16}
    few = {"tokens": 20 * 2 * 16}
    evaluation = {"times": 2, "tokens": 256, "probes": 1, "probe_tokens": 16}
    base = {"model": model, "attention": {"heads": 2}, "batch": {"sequences": 2}, "budget": few}
    tiny = study_of(options).replace(base=base | {"evaluation": evaluation}, seeds=1, match="tokens")
    with Study(tiny, folder / "study", data=options.data).open() as study:
        study.carry_out(TimedExecutor(options.slots), Display())
    one_thread = ExecutionSpec(device="cpu", threads=1)
    for run in plan_tuning_runs(tiny):
        train(run.resolve_spec(tiny), run.folder_in(folder / "alone"), one_thread, data=options.data)
        if left_behind(run.folder_in(folder / "study")) != left_behind(run.folder_in(folder / "alone")):
            sys.exit(f"the run {run.name} is another one in a study than by itself; nothing was measured.")


def gate_whole(study: Study, executor: TimedExecutor, results: Sequence[RunResult]) -> None:
    """Ends the benchmark unless every planned run has finished, once."""
    planned = len(study.spec.arms) * study.spec.seeds
    folders = {path.parent for path in study.folder.glob("runs/**/run.json")}
    if len(results) != planned or folders != {result.planned.folder_in(study.folder) for result in results}:
        sys.exit(f"{planned} runs were planned, {len(results)} ended and {len(folders)} exist; nothing is kept.")
    for result in results:
        if result.status != "finished" or len(executor.moments[result.planned.name]) != 2:
            sys.exit(f"the run {result.planned.name} was resumed or is {result.status}; nothing is kept.")


def busy(intervals: Sequence[tuple[float, float]], slots: int) -> float:
    """Seconds in which as many intervals as there are slots overlap."""
    edges = sorted([(begin, 1) for begin, _ in intervals] + [(end, -1) for _, end in intervals])
    total, count, before = 0.0, 0, edges[0][0]
    for moment, change in edges:
        total += (moment - before) * (count >= slots)
        count, before = count + change, moment
    return total


def seconds_of_records(results: Sequence[RunResult], study: Path, folder: Path) -> float:
    """Seconds for writing all records of all runs once more, flushed where a checkpoint was."""
    folder.mkdir()
    taken = 0.0
    for number, result in enumerate(results):
        records = RunDirectory(result.planned.folder_in(study)).metrics()
        began = time.perf_counter()
        file = MetricsFile(folder / f"{number}.jsonl")
        for record in records:
            file.append(record)
            if record["kind"] == "evaluation":
                file.flush()
        file.flush()
        file.close()
        taken += time.perf_counter() - began
    return taken


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    study = Study(study_of(options), folder / "study", data=options.data)
    executor = TimedExecutor(options.slots)
    with study.open():
        study.prepare_corpora(Terminal())
        wall, processor = time.perf_counter(), time.process_time()
        results = study.carry_out(executor, Terminal())
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    gate_whole(study, executor, results)
    began = time.perf_counter()
    write_answer(study.spec, results)
    answering = time.perf_counter() - began
    began = time.perf_counter()
    report.build_report([study.folder], study.folder / "report.html")
    reporting = time.perf_counter() - began
    records = seconds_of_records(results, study.folder, folder / "records")
    training = sum(result.seconds for result in results)
    whole = {result.planned.name: result.summary["seconds_of_last_process"]["all"] for result in results}
    ends = {run: moments[1] for run, moments in executor.moments.items()}
    beginning = [ends[run] - whole[run] - executor.moments[run][0] for run in whole]
    beside = {"study": processor, "records": records, "answer": answering, "report": reporting}
    return {
        "wall_s": wall,
        "training_s": training,
        "processes_s": sum(whole.values()),
        "both_slots_busy": busy([(ends[run] - whole[run], ends[run]) for run in whole], options.slots) / wall,
        "overhead": 1 - sum(whole.values()) / (options.slots * wall),
        "until_the_first_step_s": {"first run": beginning[0], "others": sorted(beginning[options.slots :])},
        "beside_training_s": beside,
        "beside_training": sum(beside.values()) / training,
    }


def show(options: argparse.Namespace, result: dict[str, Any]) -> None:
    runs, beside = len(ARMS) * options.seeds, result["beside_training_s"]
    others = result["until_the_first_step_s"]["others"]
    print(
        f"\n{runs} runs of {options.size}, {options.seconds:g} s of training each, {options.slots} at a time: "
        f"{result['wall_s']:.1f} s, {result['training_s']:.1f} s of training"
    )
    print(f"  all slots busy  {result['both_slots_busy']:7.2%} of the time")
    print(f"  overhead        {result['overhead']:7.2%} of slots × time")
    print(f"  beside training {result['beside_training']:7.2%} of training: ", end="")
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in beside.items()))
    print(f"  until its first step a run takes {result['until_the_first_step_s']['first run']:.2f} s at first", end="")
    print(f" and {others[len(others) // 2]:.2f} s later on" if others else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="nano", choices=["nano", "51m", "124m"])
    parser.add_argument("--seeds", type=int, default=4, help="runs of each of the two arms")
    parser.add_argument("--seconds", type=float, default=15.0, help="of training, each run")
    parser.add_argument("--slots", type=int, default=WorkerSlots.of_machine("cpu").count, help="runs at a time")
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--data", type=Path, help="where the corpus is looked for by name")
    parser.add_argument("--name", default="cpu", help="what the result file's name ends with")
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gate(options, Path(folder, "gate"))
        result = measure(options, Path(folder))
    show(options, result)
    set_up = {name: getattr(options, name) for name in ("size", "seeds", "seconds", "slots", "corpus")}
    keep(
        f"study-{options.size}-{options.name}",
        {"provenance": provenance("cpu", options.commit), "set_up": set_up} | result,
        options.out,
    )
    if result["beside_training"] >= LIMIT:
        sys.exit(f"{result['beside_training']:.2%} beside training is not below {LIMIT:.0%}.")


if __name__ == "__main__":
    main()
