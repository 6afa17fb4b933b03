"""The evidence: what its pages say is what its records say."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load_build(evidence: Path) -> ModuleType:
    """evidence/build.py of a folder."""
    found = importlib.util.spec_from_file_location("evidence_build", evidence / "build.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_table_is_what_the_records_say() -> None:
    for path, text in load_build(ROOT / "evidence").build().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is stale; run make evidence"


def test_claims_are_all_there_and_none_is_decided_by_fewer_sizes_than_the_protocol_asks_for() -> None:
    results = json.loads((ROOT / "evidence/results.json").read_text(encoding="utf-8"))
    letters = {"A": 9, "B": 8, "C": 3}
    assert [claim["id"] for claim in results["claims"]] == [f"{s}{n + 1}" for s, c in letters.items() for n in range(c)]
    for claim in results["claims"]:
        for figure in claim["figures"]:
            assert figure["word"] == "open" or len(figure["measured"]) >= 3, claim["id"]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The evidence on sharing and the page of claims, to be tampered with."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/evidence.md", tmp_path / "docs/evidence.md")
    shutil.copytree(ROOT / "evidence", tmp_path / "evidence")
    return tmp_path / "evidence"


def test_a_changed_record_changes_its_tables_and_a_lost_one_is_not_made_up(copied: Path) -> None:
    records = copied / "sharing-nano/records.jsonl"
    lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    own = [record for record in lines if record["place"] == "wikipedia/k=v/lr0.012-seed0"]
    own[0]["summary"]["evaluation"]["test"]["loss"] += 0.1
    others = [record for record in lines if not record["place"].startswith("wikipedia/q=k/")]
    records.write_text("".join(json.dumps(record) + "\n" for record in others), encoding="utf-8")
    files = load_build(copied).build()
    table, page = files[copied / "sharing-nano/README.md"], files[copied.parent / "docs/evidence.md"]
    before = (ROOT / "evidence/sharing-nano/README.md").read_text(encoding="utf-8")

    def row(text: str, arm: str) -> str:
        return next((line for line in text.splitlines() if line.startswith(f"| {arm} |")), "")

    assert row(table, "k=v") != row(before, "k=v")
    assert row(table, "standard") == row(before, "standard")
    assert (row(table, "q=k"), bool(row(before, "q=k"))) == ("", True)
    assert ("q=k nano" in page, "q=k=v nano" in page) == (False, True)
