"""What a run writes down while it trains: metrics.jsonl, probes/, summary.json, and copies for other tools."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qklab.runs.directory import EVALUATING, SCORING, RunDirectory
from qklab.runs.files import remove_temporaries, write_json
from qklab.runs.metrics import MetricsFile
from qklab.runs.sinks import Sinks
from qklab.train.ranks import call_on_first_rank, count_ranks


class RunRecorder:
    """The records of a run, kept by rank 0; on other ranks its methods do nothing but meet rank 0.

    What the disk refuses rank 0 is raised on all ranks where they meet next (`flush`), so that none waits for it.
    """

    def __init__(self, directory: RunDirectory, sinks: Sinks):
        self.directory, self.sinks = directory, sinks
        self.metrics: MetricsFile | None = None
        self.failure: OSError | None = None
        call_on_first_rank(self._open)

    def _open(self) -> None:
        self.metrics = MetricsFile(self.directory.metrics_path)
        remove_temporaries(self.directory.probes_path)  # of a process that was killed while it wrote

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            if count_ranks() == 1:
                raise

    def append(self, kind: str, step: int, **values: Any) -> None:
        """Add a line to metrics.jsonl."""
        if self.metrics is not None:
            with self._writing():
                self.metrics.append({"kind": kind, "step": step} | values)

    def log(self, step: int, **values: float) -> None:
        """Tell other tools."""
        if self.metrics is not None:
            self.sinks.log(values, step)

    def write_probe(self, step: int, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            with self._writing():
                self.directory.probes_path.mkdir(exist_ok=True)
                write_json(self.directory.probes_path / f"step-{step:010d}.json", {"step": step} | record)

    def flush(self) -> None:
        """Return when all that was recorded is on the disk; called on all ranks."""

        def flush() -> None:
            assert self.metrics is not None
            if self.failure is not None:
                raise self.failure
            self.metrics.flush()

        call_on_first_rank(flush)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, once all else is on the disk; called on all ranks."""
        self.flush()
        call_on_first_rank(lambda: self.directory.write("summary.json", summary))
        call_on_first_rank(self.delete_unfinished)

    def delete_unfinished(self) -> None:
        """Delete what is only there to go on from before the summary."""
        (self.directory.path / EVALUATING).unlink(missing_ok=True)
        shutil.rmtree(self.directory.path / SCORING, ignore_errors=True)

    def close(self) -> None:
        self.sinks.close()
        if self.metrics is not None:
            self.metrics.close()
