"""Do what the evidence lacks, as much of it as ends in so many minutes:

    python evidence/run.py --data CORPORA --minutes 9 --out records.tar.gz
    python evidence/run.py --list

Studies are done in the order of order.toml, several at a time, each by `qklab study`. Every run that ends is kept at
once in evidence/NAME/records.jsonl.xz, and what is new there is packed into `--out`, so a machine may be taken away at
any moment. Unpacked in evidence/ of another checkout, all goes on from there.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import keep
from order import PlannedStudy, count_missing_minutes, read_order
from records import RECORDS, read_records

from qklab.study.records import read_study_record
from qklab.study.schedule import RunSchedule
from qklab.train.launch import EXIT_CODES

EVIDENCE = Path(__file__).parent
WATCH = 5.0  # seconds between looks at what has ended
STOPPING = 15.0  # seconds before the end at which nothing is begun and runs save their state


class Queue:
    """The studies, and what this machine has done of them in `work`."""

    def __init__(self, evidence: Path, work: Path, data: Path | None, out: Path | None):
        self.evidence, self.work, self.data, self.out = evidence, work, data, out
        self.order = read_order(evidence)
        self.lock = threading.Lock()
        self.taken: set[str] = set()
        self.ended: dict[str, int] = {}
        self.changed: set[str] = set()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def restore(self, study: PlannedStudy) -> None:
        """What is kept of the study, and of arms that it takes over, into its folder."""
        with contextlib.redirect_stdout(None):
            for name in [*study.begins_with, study.name]:
                if (folder := self.evidence / name).joinpath(RECORDS).exists():
                    keep.restore(folder, self.work / study.name, study.file)
        self.ended[study.name] = self.count_ended(study.name)

    def count_ended(self, name: str) -> int:
        return len(list((self.work / name).glob("runs/*/*/*/summary.json")))

    def list_missing_arms(self, study: PlannedStudy) -> list[str]:
        """The arms that have runs to be done here; while arms that are taken over have none, those that are not."""
        own = [arm for arm in study.spec.arms if study.find_origin(arm, self.order) == study.name]
        folder = self.work / study.name
        begun = (folder / "study.json").exists()
        schedule = RunSchedule(
            read_study_record(folder).spec if begun else study.spec, folder, self.data, study.spec.arms
        )
        missing = {run.arm for run in schedule.list_missing_runs()}
        done = {result.arm for result in schedule.results}
        return [
            arm for arm in study.spec.arms if arm in missing and (arm in own or {*study.spec.arms} - {*own} <= done)
        ]

    def take(self, until: float) -> tuple[PlannedStudy, list[str]] | None:
        """The next study of which a population would end in time."""
        with self.lock:
            for study in self.order.values():
                if study.name in self.taken or study.minutes * 60 > until - time.monotonic():
                    continue
                self.restore(study)
                if arms := self.list_missing_arms(study):
                    self.taken.add(study.name)
                    return study, arms
        return None

    def work_off(self, until: float) -> None:
        """One study after another, until the time is over."""
        while (found := self.take(until)) is not None:
            study, arms = found
            left = (until - time.monotonic()) / 60
            print(f"{study.name}: {', '.join(arms)}, {left:.1f} min left", flush=True)
            command = [sys.executable, "-u", "-m", "qklab.cli", "study", study.file, "--out", self.work / study.name]
            command += ["--minutes", f"{left:.3f}", "--at-once", "1", "--keep", "0", "--only", *arms]
            command += [] if self.data is None else ["--data", self.data]
            command += [] if study.population is None else ["--population", str(study.population)]
            with (self.work / f"{study.name}.log").open("ab") as log:
                process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                self.running[study.name] = process
                code = process.wait()
            if code not in (0, EXIT_CODES["interrupted"]):
                print(f"{study.name} ended with code {code}; see {self.work / study.name}.log", flush=True)
            self.note_ends()
            with self.lock:
                del self.running[study.name]

    def note_ends(self) -> None:
        """Keep what has ended since the last look, and pack all that is new."""
        with self.lock:
            fresh = [name for name in self.running if self.count_ended(name) != self.ended[name]]
            for name in fresh:
                self.ended[name] = self.count_ended(name)
                keep.main(self.work / name, self.evidence / name)
                self.changed.add(name)
            if fresh and self.out is not None:
                aside = self.out.with_name(f".{self.out.name}")
                with tarfile.open(aside, "w:gz") as archive:
                    for name in sorted(self.changed):
                        for file in (RECORDS, "study.json"):
                            archive.add(self.evidence / name / file, f"{name}/{file}")
                aside.replace(self.out)

    def stop(self) -> None:
        for process in list(self.running.values()):
            process.terminate()


def list_missing(order: dict[str, PlannedStudy]) -> None:
    total = 0.0
    for study in order.values():
        minutes = count_missing_minutes([study.name], {*study.spec.arms}, order).get(study.name, 0.0)
        total += minutes
        print(f"{study.name:20} {len(read_records(study.folder)):4} runs kept, about {minutes:.0f} minutes missing")
    print(f"{total:.0f} minutes of one H200 in all, without what grids that are extended add")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where corpora are looked for by name")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin only what can end in so many (9)")
    parser.add_argument("--out", type=Path, help="an archive of the records that are new")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="where runs live (runs/evidence)")
    parser.add_argument("--lanes", type=int, default=2, help="how many studies at a time (2)")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="the folder of plans and records (this one)")
    parser.add_argument("--list", action="store_true", help="say what is missing, and do nothing")
    asked = parser.parse_args()
    if asked.list:
        list_missing(read_order(asked.evidence))
        return
    asked.work.mkdir(parents=True, exist_ok=True)
    queue = Queue(asked.evidence, asked.work, asked.data, asked.out)
    until = time.monotonic() + 60 * asked.minutes - STOPPING
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: queue.stop())
    lanes = [threading.Thread(target=queue.work_off, args=(until,)) for _ in range(asked.lanes)]
    for lane in lanes:
        lane.start()
    while any(lane.is_alive() for lane in lanes):
        time.sleep(min(WATCH, 60 * asked.minutes / 10))
        queue.note_ends()
    kept = sum(len(read_records(asked.evidence / name)) for name in queue.changed)
    print(f"{kept} runs are kept of {', '.join(sorted(queue.changed)) or 'nothing new'}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
