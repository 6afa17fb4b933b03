"""The Transformers versions that are said to be supported, and which of them the tests run with."""

import re
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_oldest_version_everywhere() -> None:
    oldest = re.findall(r"^OLDEST := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    least = re.findall(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    said = re.findall(r"Transformers supported, (\S+) and", (ROOT / "docs/transformers.md").read_text(encoding="utf-8"))
    assert oldest == said == [f"{least[0]}.0"]


def test_these_tests_run_with_a_supported_version() -> None:
    running = tuple(int(part) for part in version("transformers").split(".")[:2])
    assert running >= (5, 17)
