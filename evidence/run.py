"""Do what the evidence lacks, as much of it as ends in so many minutes:

    python evidence/run.py --data CORPORA --minutes 25 --out records.tar.gz
    python evidence/run.py --list

An arm of a study at a time is done by `qklab study`, two of them side by side, in the order of order.toml, and none is
begun that would not end in time. Every run that ends is kept at once in evidence/NAME/records.jsonl.xz, and what is new
there is packed into `--out`, so a machine may be taken away at any moment. Unpacked in evidence/ of another checkout,
all goes on from there.
"""

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from pathlib import Path

import keep
import torch
from order import LANES, START, PlannedStudy, SharedCard, count_missing_minutes, foresee_queue, read_order, read_queue
from records import RECORDS, read_records

from qklab.study.records import read_study_record
from qklab.study.schedule import RunSchedule
from qklab.train.launch import EXIT_CODES

EVIDENCE = Path(__file__).parent
WATCH = 5.0  # seconds between looks at what has ended
STOPPING = 15.0  # seconds before the end at which nothing is begun and runs save their state
SAID = 6  # lines of a log that are shown where a study failed
Arm = tuple[str, str]  # of which study, and which


class Queue:
    """The studies, and what this machine has done of them in `work`."""

    def __init__(self, evidence: Path, work: Path, data: Path | None, out: Path | None, minutes: float):
        self.evidence, self.work, self.data, self.out = evidence, work, data, out
        self.until = time.monotonic() + 60 * minutes - STOPPING
        self.order = read_order(evidence)
        self.queue = read_queue(evidence, self.order)
        self.lock = threading.Lock()
        self.card, self.looked = SharedCard(), time.monotonic()
        self.given_up: set[Arm] = set()
        self.complete: set[Arm] = set()
        self.ended: dict[str, int] = {}
        self.changed: set[str] = set()
        self.running: dict[str, subprocess.Popen[bytes] | None] = {}
        self.stopped = False

    @property
    def minutes_left(self) -> float:
        return (self.until - time.monotonic()) / 60

    def restore(self, study: PlannedStudy) -> None:
        """What is kept of the study, and of arms that it takes over, into its folder."""
        with contextlib.redirect_stdout(None):
            for name in [*study.begins_with, study.name]:
                if (folder := self.evidence / name).joinpath(RECORDS).exists():
                    keep.restore(folder, self.work / study.name, study.file)
        self.ended[study.name] = self.count_ended(study.name)

    def count_ended(self, name: str) -> int:
        return len(list((self.work / name).glob("runs/*/*/*/summary.json")))

    def list_missing_populations(self, study: PlannedStudy, arm: str) -> list[int]:
        """How many runs the populations have that are to be done here of an arm; none of one that is taken over, as
        long as that study has not done all of those."""
        folder = self.work / study.name
        begun = (folder / "study.json").exists()
        spec = read_study_record(folder).spec if begun else study.spec
        schedule = RunSchedule(spec, folder, self.data, study.spec.arms)
        missing = Counter(run.corpus for run in schedule.list_missing_runs() if run.arm == arm)
        taken_over = {name for name in study.spec.arms if study.find_origin(name, self.order) != study.name}
        if arm in taken_over and not taken_over <= {result.arm for result in schedule.results}:
            return []
        return [runs for count in missing.values() for runs in study.split_runs(count)]

    def take(self) -> tuple[PlannedStudy, str, int] | None:
        """The next arm of which a population would end in time, as would what is under way, and how many populations
        it lacks."""
        with self.lock:
            self.card.advance((time.monotonic() - self.looked) / 60)
            self.looked = time.monotonic()
            for name, arm in self.queue:
                study = self.order[name]
                if self.stopped or name in self.running or (name, arm) in self.given_up | self.complete:
                    continue
                self.restore(study)
                populations = self.list_missing_populations(study, arm)
                if not populations:
                    self.complete.add((name, arm))
                    continue
                work = study.measure_work(arm, populations[0])
                if self.card.foresee_end(START, work) <= self.minutes_left:
                    self.running[name] = None
                    more = sum(START + study.measure_work(arm, runs) for runs in populations[1:])
                    self.card.left[name] = [START, work + min(more, max(0.0, self.minutes_left - START - work))]
                    return study, arm, len(populations)
        return None

    def work_off(self) -> None:
        """One arm after another, until nothing ends in time."""
        while (found := self.take()) is not None:
            study, arm, populations = found
            before = self.ended[study.name]
            print(f"{study.name}: {arm}, {self.minutes_left:.1f} min left", flush=True)
            command = [sys.executable, "-u", "-m", "qklab.cli", "study", study.file, "--out", self.work / study.name]
            command += ["--at-once", "1", "--keep", "0", "--only", arm]
            command += ["--compile", "yes"] if torch.cuda.is_available() else []  # as the runs that are kept were
            # the study's own guess, by runs that may have shared a card with more, is asked only where it alone can say
            command += [] if populations == 1 else ["--minutes", f"{self.minutes_left:.3f}"]
            command += [] if self.data is None else ["--data", self.data]
            command += [] if study.population is None else ["--population", str(study.population)]
            log = self.work / f"{study.name}.log"
            with log.open("ab") as file:
                process = subprocess.Popen([*map(str, command)], stdout=file, stderr=file, stdin=subprocess.DEVNULL)
                self.running[study.name] = process
                code = process.wait()
            if code not in (0, EXIT_CODES["interrupted"]):
                said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SAID:]
                print(f"{study.name} ended with code {code} ({log}):", *said, sep="\n    ", flush=True)
            self.note_ends()
            with self.lock:
                if code not in (0, EXIT_CODES["interrupted"]) or self.ended[study.name] == before:
                    self.given_up.add((study.name, arm))  # it would be the same again
                del self.running[study.name], self.card.left[study.name]
                self.complete = {(name, arm) for name, arm in self.complete if name != study.name}

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
        """Let what is under way save its state, and begin nothing more."""
        self.stopped = True
        for process in list(self.running.values()):
            if process is not None:
                process.terminate()


def list_missing(evidence: Path) -> None:
    order, total = read_order(evidence), 0.0
    for study in order.values():
        minutes = count_missing_minutes([study.name], {*study.spec.arms}, order).get(study.name, 0.0)
        total += minutes
        print(f"{study.name:20} {len(read_records(study.folder)):4} runs kept, about {math.ceil(minutes)} min missing")
    print(f"{total:.0f} minutes of one H200 in all, without what grids that are extended add; one after another:")
    for minute, name, arm in foresee_queue(evidence):
        print(f"{minute:6.0f} min  {name}: {arm}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where corpora are looked for by name")
    parser.add_argument("--minutes", type=float, default=25.0, help="begin only what can end in so many (25)")
    parser.add_argument("--out", type=Path, help="an archive of the records that are new")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="where runs live (runs/evidence)")
    parser.add_argument("--lanes", type=int, default=LANES, help=f"how many populations at a time ({LANES})")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="the folder of plans and records (this one)")
    parser.add_argument("--list", action="store_true", help="say what is missing, and do nothing")
    asked = parser.parse_args()
    if asked.list:
        list_missing(asked.evidence)
        return
    asked.work.mkdir(parents=True, exist_ok=True)
    queue = Queue(asked.evidence, asked.work, asked.data, asked.out, asked.minutes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: queue.stop())
    lanes = [threading.Thread(target=queue.work_off) for _ in range(asked.lanes)]
    for lane in lanes:
        lane.start()
    while any(lane.is_alive() for lane in lanes):
        time.sleep(min(WATCH, 60 * asked.minutes / 10))
        queue.note_ends()
        if queue.minutes_left <= 0 and not queue.stopped:
            queue.stop()
    kept = sum(len(read_records(asked.evidence / name)) for name in queue.changed)
    print(f"{kept} runs are kept of {', '.join(sorted(queue.changed)) or 'nothing new'}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
