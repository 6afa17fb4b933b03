"""How far a study is, both phases together, and how long it will still take."""

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from qklab.runs.progress import format_duration
from qklab.study.plan import PlannedRun
from qklab.study.records import RunResult
from qklab.train.spec import RunSpec

STEPS_OF_TIME = 0.8  # of a run's time, as long as none has ended
NAMED = 4  # runs of those under way that are named


class StudyProgress:
    """The share that is done and the time left at this rate. Of a run's time its steps are the share that they were of
    those that ended, and the rest is its evaluation."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.given = 0.0  # runs, and parts of runs, that were done before this process began
        self.moving = False  # whether a run has got further: before that processes start and compile

    def begin(self, ended: int) -> None:
        """Now, with so many runs done; only the first call counts."""
        if self.began is None:
            self.began, self.given = time.monotonic(), float(ended)

    def describe(
        self, ended: Mapping[PlannedRun, RunResult], under_way: Mapping[PlannedRun, float], total: int
    ) -> tuple[float, str]:
        """The part that is done and a line about it, with the part that is done of each run under way."""
        assert self.began is not None
        shares = [measure_share_of_steps(result) for result in ended.values()]
        share = sum(shares) / len(shares) if shares else STEPS_OF_TIME
        done = len(ended) + share * sum(under_way.values())
        if not self.moving and done > self.given:
            self.moving, self.began, self.given = True, time.monotonic(), done
        fresh = done - self.given
        left = (time.monotonic() - self.began) * (total - done) / fresh if fresh > 0 else None
        still = f" · {format_duration(left)} left" if left is not None else ""
        names = [f"{run.name} (final evaluation)" if part >= 1 else run.name for run, part in under_way.items()]
        if len(names) > NAMED:
            names[NAMED - 1 :] = [f"{len(names) - NAMED + 1} others"]
        now = f"now {', '.join(names)}" if names else "waiting for a process or node to begin"
        return done / total, f"{len(ended)}/{total} runs{still} · {now}"


def measure_share_of_steps(result: RunResult) -> float:
    """Which part of a run's time its training steps took."""
    summary = result.summary
    whole = summary.get("seconds_of_last_process", {}).get("all", 0.0) / summary.get("population", 1)
    return min(1.0, result.seconds / whole) if whole > 0 else STEPS_OF_TIME


def measure_run_progress(folder: Path, spec: RunSpec) -> float:
    """The part of a run that is done, from the last line it recorded."""
    for record in read_last_records(folder / "metrics.jsonl"):
        if record.get("kind") == "train":
            if spec.steps is not None:
                return min(1.0, record["step"] / spec.steps)
            return min(1.0, record["time"]["seconds"] / spec.budget.seconds)
    return 0.0


def read_last_records(path: Path) -> Iterable[dict]:
    """The last few records of a metrics file, newest first."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 4096))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
