"""metrics.jsonl: one record a line, only ever appended to.

A run that was killed and resumed repeats the steps after its checkpoint. It first appends {"kind": "resume",
"step": s}, and readers drop what was recorded for later steps before that line. A line cut short by a crash is skipped.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from qklab.runs.files import reason

Record = dict[str, Any]


class MetricsFile:
    """Appends records; each is on its way to the disk in one write before `append` returns."""

    def __init__(self, path: Path):
        self.path = path
        torn = path.exists() and path.stat().st_size > 0 and not ends_with_newline(path)
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if torn:
            os.write(self.descriptor, b"\n")

    def append(self, record: Record) -> None:
        line = json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"
        data = line.encode()
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError as error:
            raise OSError(error.errno, f"{self.path} cannot be appended to: {reason(error)}") from None

    def flush(self) -> None:
        """Return once everything appended is on the disk."""
        os.fsync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


def ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become the strings "nan", "inf", "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_metrics(path: Path, kind: str | None = None) -> list[Record]:
    """The records of a run as if it had never been interrupted, in order of steps; of one `kind` if given."""
    records: dict[tuple[Any, ...], Record] = {}  # a record for the same kind, step and split replaces the one before
    if not path.exists():
        return []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            continue
        if record.get("kind") == "resume":
            records = {key: earlier for key, earlier in records.items() if earlier["step"] <= record["step"]}
        else:
            records[record.get("kind"), record["step"], record.get("split")] = record
    return [record for record in records.values() if kind in (None, record.get("kind"))]
