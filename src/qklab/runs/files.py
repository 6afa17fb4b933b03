"""Small files that are either the old or the new version, never half of one."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str) -> None:
    """Write aside, flush to the disk, rename over `path`, flush the folder."""
    aside = path.with_name(f".{path.name}.tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def reason(error: OSError) -> str:
    """What the system said, for use in a sentence: "no space left on device"."""
    said = (error.strerror or str(error)).strip()
    return said[:1].lower() + said[1:]
