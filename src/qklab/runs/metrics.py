"""metrics.jsonl: one record a line, only ever appended to.

A run that was killed and resumed repeats the steps after its checkpoint. It first appends {"kind": "resume",
"step": s}, and readers drop what was recorded for later steps before that line. A line cut short by a crash is cut off.
"""

import json
import math
from pathlib import Path
from typing import Any

from qklab.runs.files import AppendedFile

Record = dict[str, Any]


class MetricsFile(AppendedFile):
    def is_whole(self, line: bytes) -> bool:
        return parse_record(line) is not None

    def append(self, record: Record) -> None:
        self.append_line(json.dumps(spell_nonfinite(record), ensure_ascii=False, allow_nan=False))


def spell_nonfinite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become the strings "nan", "inf", "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: spell_nonfinite(inner) for key, inner in value.items()}
    return [spell_nonfinite(inner) for inner in value] if isinstance(value, list | tuple) else value


def finite_or_none(value: Any) -> float | None:
    """A finite number, or None for what is none ("nan" as a record has it, "N/A", infinite)."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def parse_record(line: bytes) -> Record | None:
    """A line as a record; None where it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def read_metrics(path: Path, kind: str | None = None) -> list[Record]:
    """The records of a run as if it had never been interrupted, in order of steps; of one `kind` if given."""
    records: dict[tuple[Any, ...], Record] = {}  # a record for the same kind, step and split replaces the one before
    if not path.exists():
        return []
    for line in path.read_bytes().split(b"\n"):
        record = parse_record(line)
        if record is None:
            continue
        if record.get("kind") == "resume":
            records = {key: earlier for key, earlier in records.items() if earlier["step"] <= record["step"]}
        else:
            records[record.get("kind"), record["step"], record.get("split")] = record
    return [record for record in records.values() if kind in (None, record.get("kind"))]
