"""The run directory.

run.json        what was asked for and where: spec, fingerprint, commit, data hash, environment
metrics.jsonl   what was measured, step by step
probes/         one JSON file per probe
checkpoints/    what training continues from
evaluating.json how far the final evaluation is, once it was stopped
scoring/        what of its benchmarks is done, until all are
summary.json    how it ended
lock            held while a process works in the directory
"""

import json
import os
from pathlib import Path
from typing import Any, Self

from qklab.runs.files import describe_os_error, lock_file, remove_temporaries, write_json
from qklab.runs.metrics import read_metrics

FORMAT = 1
EVALUATING = "evaluating.json"
SCORING = "scoring"
NEEDED = {"run.json": ("id", "spec", "data", "environment"), "summary.json": ("status", "evaluation")}


class RunError(ValueError):
    """A run directory that cannot be used as asked."""


class RunDirectory:
    """A run's files. Reading needs nothing; writing needs `lock()`, which leaving the `with` block frees."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._lock: int | None = None

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def probes_path(self) -> Path:
        return self.path / "probes"

    def exists(self) -> bool:
        return (self.path / "run.json").exists()

    def read(self) -> dict[str, Any]:
        """run.json."""
        return self._read("run.json")

    def summary(self) -> dict[str, Any] | None:
        """summary.json, or None while the run has not ended."""
        return self._read("summary.json") if (self.path / "summary.json").exists() else None

    def discard_damaged_summary(self) -> str | None:
        """Delete a summary.json that cannot be read, since a run that is resumed at its end makes it again; what was
        wrong with it."""
        try:
            self.summary()
        except RunError as error:
            (self.path / "summary.json").unlink()
            return str(error).partition(";")[0]
        return None

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        return read_metrics(self.metrics_path, kind)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{self.path} is not a run directory: it has no {name}.") from None
        except (ValueError, OSError) as error:
            raise RunError(f"{path} cannot be read: {error}; restore it from a copy or start a new run.") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise RunError(f"{path} is not of format {FORMAT}; it was written by another version of qklab.")
        missing = [key for key in NEEDED.get(name, ()) if key not in value]
        if missing:
            raise RunError(f"{path} lacks {', '.join(missing)}; restore it from a copy or start a new run.")
        return {key: inner for key, inner in value.items() if key != "format"}

    def write(self, name: str, value: dict[str, Any]) -> None:
        write_json(self.path / name, {"format": FORMAT} | value)

    def lock(self) -> Self:
        """Create the directory if need be and hold its lock, which the system frees however this process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.path / "lock")
        except OSError as error:
            why = describe_os_error(error)
            raise RunError(f"the run directory {self.path} cannot be written: {why}; choose another --out.") from None
        if self._lock is None:
            holder = (self.path / "lock").read_text(errors="replace").strip() or "unknown"
            raise RunError(
                f"{self.path} is in use by another process (pid {holder}); wait for it or choose another --out."
            )
        remove_temporaries(self.path)
        return self

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
