"""The scripts of the evidence, which are no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script(path: Path) -> ModuleType:
    """A script of the evidence; what it imports is the project's own."""
    sys.path.insert(0, str(ROOT / "evidence"))
    found = importlib.util.spec_from_file_location(f"evidence_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    sys.path.remove(str(ROOT / "evidence"))
    return module


def load_build(evidence: Path) -> ModuleType:
    return load_script(evidence / "build.py")


RECORDS_SCRIPT = load_script(ROOT / "evidence/records.py")
RECORDS, read_records, write_records = (
    getattr(RECORDS_SCRIPT, name) for name in ("RECORDS", "read_records", "write_records")
)
