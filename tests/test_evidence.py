"""The evidence: what its pages say is what its records say."""

import importlib.util
import json
import shutil
import sys
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType

import pytest

from qklab.study.plan import PlannedRun
from qklab.study.spec import read_study

ROOT = Path(__file__).parents[1]


def load_build(evidence: Path) -> ModuleType:
    """evidence/build.py of a folder; what it imports is the project's own."""
    sys.path.insert(0, str(ROOT / "evidence"))
    found = importlib.util.spec_from_file_location("evidence_build", evidence / "build.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    sys.path.remove(str(ROOT / "evidence"))
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
    """The evidence and its page, to be tampered with."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/evidence.md", tmp_path / "docs/evidence.md")
    (tmp_path / "README.md").write_text("")
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


def write_task_records(folder: Path, widths: int, lost: dict[str, float]) -> None:
    """Runs of a B8 study whose arms lose so many shares of the answers on every task, and do best at 1e-3."""
    spec = read_study(folder / "study.toml")
    costs = dict.fromkeys(("training_flops", "tokens", "seconds", "tokens_per_second"), 1.0)
    costs |= {"peak_memory_bytes": 1, "cache_bytes_per_token": 1, "parameters": 24 * widths**2}
    lines = []
    for k, (corpus, arm, lr, seed) in enumerate(product(spec.corpora, lost, spec.lrs, range(5))):
        right = 0.8 + 0.03 * spec.corpora.index(corpus) - lost[arm] + 1e-4 * (k * k % 7)
        score = {"loss": 1.0 + (lr != 1e-3), "accuracy": right, "chance": 0.1}
        summary = {"status": "finished", "evaluation": {"valid": score, "test": score}, **costs}
        lines.append(json.dumps({"place": str(PlannedRun(corpus, arm, lr, seed).path), "summary": summary}))
    (folder / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_a_published_difference_in_points_stands_beside_the_mean_over_tasks(copied: Path) -> None:
    build = load_build(copied)
    lost = {"standard": 0.0, "q=k": 0.001, "q=k 2-D": -0.02, "k=v": 0.03, "q=k=v": 0.07, "q=k=v 2-D": 0.0}
    words = ["reproduced", "reproduced", "refuted", "smaller than published", "refuted"]
    for widths in ([64], [32, 64, 256]):
        for width in widths:
            write_task_records(copied / f"b8-2x{width}", width, lost)
        files = build.build()
        claims = {claim["id"]: claim for claim in json.loads(files[copied / "results.json"])["claims"]}
        figures = claims["B8"]["figures"]
        assert [figure["so_far"] for figure in figures] == words
        # the word is that of one size only where there are three of them
        assert [figure["word"] for figure in figures] == (words if len(widths) == 3 else ["open"] * 5)
    assert "2×64: −7.0 points (" in files[copied.parent / "docs/evidence.md"]
    assert "| the mean of 5 corpora: % of the answers right (chance 10.0) |" in files[copied / "b8-2x64/README.md"]
    records = copied / "b8-2x32/records.jsonl"
    edge = records.read_text(encoding="utf-8").splitlines()
    records.write_text("\n".join(line for line in edge if "-seed4" not in line), encoding="utf-8")  # four seeds
    claims = {claim["id"]: claim for claim in json.loads(build.build()[copied / "results.json"])["claims"]}
    assert {figure["word"] for figure in claims["B8"]["figures"]} == {"open"}
    # now k=v's best rate is the last that was tried
    worse = [line.replace('"loss": 1.0', '"loss": 3.0') if "/k=v/lr0.001-" in line else line for line in edge]
    lower = [line.replace('"loss": 2.0', '"loss": 0.5') if "/k=v/lr0.0003-" in line else line for line in worse]
    records.write_text("\n".join(lower), encoding="utf-8")
    claims = {claim["id"]: claim for claim in json.loads(build.build()[copied / "results.json"])["claims"]}
    assert {figure["arm"]: figure["word"] for figure in claims["B8"]["figures"]}["k=v"] == "open"


def test_a_published_value_of_a_probe_stands_beside_what_runs_recorded(copied: Path) -> None:
    build = load_build(copied)
    for study in ("headline-pico", "coupling-nano", "headline-micro"):
        records = copied / study / "records.jsonl"
        lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
        for line in (line for line in lines if line["probes"]):
            seed, arm = int(line["place"].rpartition("-seed")[2]), line["place"].split("/")[1]
            layers = line["probes"][-1]["layers"]
            layers["key_value_cosine"] = [0.7 + 0.01 * seed, 0.72 + 0.01 * seed]
            layers["entropy"] = [9.0, 2.0 + 0.5 * (arm == "leapfrog") + 0.01 * seed * (arm == "leapfrog"), 9.0]
        records.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    claims = {claim["id"]: claim for claim in json.loads(build.build()[copied / "results.json"])["claims"]}
    nano = {
        figure["probe"]: own
        for figure in claims["B7"]["figures"]
        for own in figure["measured"][::-1]
        if own["size"] == "nano"
    }
    assert nano["key_value_cosine"]["effect"][0] == pytest.approx(0.73)
    low, high = nano["key_value_cosine"]["effect"][1:]
    assert (0.73 - low, high - 0.73) == (pytest.approx(2.776445 * 0.0158114 / 5**0.5, abs=1e-4),) * 2
    entropy = claims["A8"]["figures"][0]
    assert (entropy["arm"], entropy["measured"][0]["effect"][0]) == ("leapfrog", pytest.approx(0.52))
    assert entropy["so_far"].startswith("seen")


def test_a_number_in_a_sentence_is_the_records_whatever_stood_there() -> None:
    build = load_build(ROOT / "evidence")
    study = build.Evidence(ROOT / "evidence/coupling-nano")
    known = {"coupling-nano": study}
    own = {rate: study.select(f"standard@{rate}") for rate in ("3e-3", "6e-3", "1.2e-2", "2.4e-2")}
    differences = [own["3e-3"][seed] - own["1.2e-2"][seed] for seed in range(5)]
    mean, half = fmean(differences), 2.776445 * stdev(differences) / 5**0.5
    spread = max(abs(a - b) for seeds in own.values() for a, b in product(seeds.values(), repeat=2))
    for kind, arms, number in (
        ("nats", "standard@3e-3 standard@1.2e-2", f"{mean:.3f} nats ({mean - half:.3f} to {mean + half:.3f})"),
        ("spread", "standard", f"{spread:.2f} nats"),
    ):
        text = f"It is <!-- {kind}: coupling-nano {arms} -->%s<!-- end -->, and more."
        assert build.fill_numbers(text % "9 by hand", known) == text % number
    alike = build.Evidence(ROOT / "evidence/similarity-3x64")
    probes = [
        fmean(record["probes"][-1]["layers"]["key_value_alignment"])
        for place, record in alike.records.items()
        if place.startswith("wikipedia/standard/lr0.008-")
    ]
    text = "<!-- vectors: similarity-3x64 key_value_alignment trained -->%s<!-- end -->"
    mean, half = fmean(probes), 2.776445 * stdev(probes) / 5**0.5
    number = f"{mean:.2f} ({mean - half:.2f} to {mean + half:.2f})"
    assert build.fill_numbers(text % "9", {"similarity-3x64": alike}) == text % number
    for mark, told in (
        ("elsewhere a b", "no study elsewhere, which a page asks for; there are coupling-nano."),
        ("coupling-nano standard@9 standard", "coupling-nano has no run of standard@9, which a page asks for"),
    ):
        with pytest.raises(SystemExit, match=told):
            build.fill_numbers(f"<!-- nats: {mark} -->9<!-- end -->", known)
