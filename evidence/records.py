"""The records of a study's runs: a line of JSON each, compressed, since lines of one study are much alike."""

import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qklab.runs.files import write_bytes

RECORDS = "records.jsonl.xz"  # `xz -dc` shows it


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Those of a study's folder, none where nothing has been run."""
    path = folder / RECORDS
    if not path.exists():
        return []
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]


def write_records(folder: Path, records: Iterable[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    write_bytes(folder / RECORDS, lzma.compress(lines.encode(), preset=9))  # the old ones or the new, whatever happens
