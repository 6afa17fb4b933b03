"""The evidence: what its pages say is what its records say."""

import json
import math
import random
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from evidence_scripts import RECORDS, ROOT, load_build, read_records, write_records
from qklab.study.plan import PlannedRun
from qklab.study.spec import read_study


def test_every_table_is_what_the_records_say() -> None:
    for path, text in load_build(ROOT / "evidence").build().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is stale; run make evidence"
        # a comment that begins a line of Markdown ends the paragraph before it
        broken = re.findall(r"^ *<!-- (?!table|costs)[a-z0-9]+: .*", text, re.MULTILINE)
        assert not broken, f"{path.relative_to(ROOT)}: let this line begin with a word"


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


def keep_only(evidence: Path, *names: str) -> None:
    """Without the records of all other studies, and the page without the sentences that speak of them."""
    for records in evidence.glob(f"*/{RECORDS}"):
        if records.parent.name not in names:
            records.unlink()
    page = evidence.parent / "docs/evidence.md"
    page.write_text(re.sub(r"<!-- (?!table: )[a-z0-9]+: ", "<!-- ", page.read_text(encoding="utf-8")))


def test_a_changed_record_changes_its_tables_and_a_lost_one_is_not_made_up(copied: Path) -> None:
    keep_only(copied, "sharing-pico", "headline-pico")
    folder = copied / "sharing-pico"
    lines = read_records(folder)
    own = [record for record in lines if record["place"] == "wikipedia/q=k=v/lr0.009-seed0"]
    own[0]["summary"]["evaluation"]["test"]["loss"] += 0.1
    others = [record for record in lines if not record["place"].startswith("wikipedia/q=k/")]
    write_records(folder, others)
    own_page = folder / "README.md"  # with a sentence that would miss it
    own_page.write_text(own_page.read_text(encoding="utf-8").replace("perplexity: sharing-pico q=k standard", ""))
    files = load_build(copied).build()
    table, page = files[copied / "sharing-pico/README.md"], files[copied.parent / "docs/evidence.md"]
    before = (ROOT / "evidence/sharing-pico/README.md").read_text(encoding="utf-8")

    def row(text: str, arm: str) -> str:
        return next((line for line in text.splitlines() if line.startswith(f"| {arm} |")), "")

    assert row(table, "q=k=v") != row(before, "q=k=v")
    assert row(table, "standard") == row(before, "standard")
    assert (row(table, "q=k"), bool(row(before, "q=k"))) == ("", True)
    assert ("**q=k**<br>[pico]" in page, "**q=k=v**<br>[pico](../evidence/sharing-pico/" in page) == (False, True)


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
        lines.append({"place": str(PlannedRun(corpus, arm, lr, seed).path), "summary": summary})
    write_records(folder, lines)


def write_spaces(page: str) -> str:
    """With spaces where lines may break, too."""
    return page.replace("\N{NO-BREAK SPACE}", " ")


def test_a_published_difference_in_points_stands_beside_the_mean_over_tasks(copied: Path) -> None:
    keep_only(copied)
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
    assert "[2×64](../evidence/b8-2x64/README.md): −7.0 points (" in write_spaces(
        files[copied.parent / "docs/evidence.md"]
    )
    assert "| the mean of 5 corpora: % of the answers right (chance 10.0) |" in files[copied / "b8-2x64/README.md"]
    edge = read_records(copied / "b8-2x32")
    write_records(copied / "b8-2x32", [line for line in edge if "-seed4" not in line["place"]])  # four seeds
    assert {figure["word"] for figure in judge(copied)["B8"]} == {"open"}
    # now k=v's best rate is the last that was tried
    for line in edge:
        for rate, loss in (("0.001", 3.0), ("0.0003", 0.5)):
            if f"/k=v/lr{rate}-" in line["place"]:
                line["summary"]["evaluation"]["valid"]["loss"] = loss
    write_records(copied / "b8-2x32", edge)
    assert {figure["arm"]: figure["word"] for figure in judge(copied)["B8"]}["k=v"] == "open"


def test_a_published_value_of_a_probe_stands_beside_what_runs_recorded(copied: Path) -> None:
    studies = "headline-pico", "headline-nano", "headline-micro"
    keep_only(copied, *studies)
    for study in studies:
        lines = read_records(copied / study)
        for line in (line for line in lines if line["probes"]):
            seed, arm = int(line["place"].rpartition("-seed")[2]), line["place"].split("/")[1]
            layers = line["probes"][-1]["layers"]
            layers["key_value_cosine"] = [0.7 + 0.01 * seed, 0.72 + 0.01 * seed]
            layers["entropy"] = [9.0, 2.0 + 0.5 * (arm == "leapfrog") + 0.01 * seed * (arm == "leapfrog"), 9.0]
        write_records(copied / study, lines)
    claims = judge(copied)
    nano = {
        figure["probe"]: own for figure in claims["B7"] for own in figure["measured"][::-1] if own["size"] == "nano"
    }
    assert nano["key_value_cosine"]["effect"][0] == pytest.approx(0.73)
    low, high = nano["key_value_cosine"]["effect"][1:]
    assert (0.73 - low, high - 0.73) == (pytest.approx(2.776445 * 0.0158114 / 5**0.5, abs=1e-4),) * 2
    entropy = claims["A8"][0]
    assert (entropy["arm"], entropy["measured"][0]["effect"][0]) == ("leapfrog", pytest.approx(0.52))
    assert entropy["so_far"].startswith("seen")


def write_loss_records(folder: Path, read: Callable[[PlannedRun], float]) -> None:
    """Runs of a study with these losses, at twice as many bits per byte; those of an infinite loss diverged."""
    spec = read_study(folder / "study.toml")
    best, lines = sorted(spec.lrs)[1], []
    for corpus, arm, lr, seed in product(spec.corpora, spec.arms, spec.lrs, range(spec.seeds)):
        run = PlannedRun(corpus, arm, lr, seed)
        settings = run.resolve_spec(spec)
        model = settings.model
        loss = read(run) + random.Random(f"{folder.name} {arm} {seed}").uniform(0.0, 1e-3) + (lr != best) * 0.1
        score = {"loss": loss, "bits_per_byte": 2 * loss, "unigram_loss": 9.0}
        flops = 6.0 * model.parameters() * spec.base["budget"]["tokens"]
        summary = {"parameters": model.parameters(), "training_flops": flops, "tokens_per_second": 1.0, "seconds": 1.0}
        summary |= {"tokens": 1, "peak_memory_bytes": 1, "cache_bytes_per_token": 1, "status": "finished"}
        summary |= {"evaluation": {"valid": score, "test": score}} if loss < math.inf else {"status": "diverged"}
        about = {"spec": settings.to_dict()}
        lines.append({"place": str(run.path), "run": about, "summary": summary, "probes": []})
    write_records(folder, lines)


LADDER = ("pico", "nano", "micro")


@pytest.fixture
def planned(copied: Path) -> Path:
    """The plans, without a record."""
    for records in copied.glob(f"*/{RECORDS}"):
        records.unlink()
    return copied


def judge(evidence: Path) -> dict[str, list[dict[str, Any]]]:
    """Claim → its figures."""
    build = load_build(evidence)
    claims = tomllib.loads((evidence / "claims.toml").read_text(encoding="utf-8"))
    order = build.read_order(evidence)
    studies = {
        path.parent.name: build.Evidence(path.parent, getattr(order.get(path.parent.name), "begins_with", ()))
        for path in evidence.glob(f"*/{RECORDS}")
    }
    judged = sys.modules["claims"].judge_claims(claims, studies)
    return {claim["id"]: claim["figures"] for claim in judged}


def test_what_a_longer_context_changes_is_a_difference_of_differences(planned: Path) -> None:
    def lose(cost: float) -> Callable[[PlannedRun], float]:
        return lambda run: 4.0 + (run.arm == "k=v") * cost

    for short, long in (("headline-pico", "contexts-pico"), ("headline-nano", "contexts-nano")):
        write_loss_records(planned / short, lose(0.06))
        write_loss_records(planned / long, lose(0.03))
    assert [(own["size"], own["effect"][0]) for own in judge(planned)["B5"][0]["measured"]] == [
        ("pico", pytest.approx(100 * math.expm1(-0.03), abs=0.1)),
        ("nano", pytest.approx(100 * math.expm1(-0.03), abs=0.1)),
    ]
    assert judge(planned)["B5"][0]["word"] == "open"  # of two sizes
    write_loss_records(planned / "headline-micro", lose(0.03))
    write_loss_records(planned / "contexts-micro", lose(0.06))
    assert judge(planned)["B5"][0]["word"] == "seen from pico on"
    write_loss_records(planned / "contexts-micro", lose(0.03))
    assert judge(planned)["B5"][0]["word"] == "depends on size"


def test_where_the_baseline_diverges_a_learning_rate_is_still_compared(planned: Path) -> None:
    for size in LADDER:
        write_loss_records(
            planned / f"control-{size}", lambda run: math.inf if (run.arm, run.lr) == ("none", 3e-2) else 4.0
        )
    stable, same = judge(planned)["C1"]
    assert [own["effect"][0] for own in stable["measured"]] == [pytest.approx(100 * math.expm1(4.1 - 9.0), abs=0.1)] * 3
    assert (stable["word"], same["word"]) == ("seen from pico on", "not seen up to micro")


def test_a_claim_without_a_figure_has_a_sign(planned: Path) -> None:
    for size in LADDER:
        write_loss_records(planned / f"composed-{size}", lambda run: 4.0 - 0.012 * (run.arm == "differential+affine"))
    assert judge(planned)["A9"][0]["word"] == "seen from pico on"
    for size in LADDER:
        write_loss_records(planned / f"composed-{size}", lambda run: 4.0)
    assert judge(planned)["A9"][0]["word"] == "not seen up to micro"


def test_how_many_more_tokens_the_baseline_needs_is_read_off_its_own_curve(planned: Path) -> None:
    def fall(flops: float) -> float:
        return 1.0 + 80.0 * flops**-0.12

    def write(speed_up: float) -> None:
        for size in LADDER:
            spec = read_study(planned / f"headline-{size}/study.toml")
            model = spec.run("standard", "wikipedia", spec.lrs[0], 0).model
            flops = 6.0 * model.parameters() * spec.base["budget"]["tokens"]
            write_loss_records(
                planned / f"headline-{size}",
                lambda run, flops=flops: fall(flops * (speed_up if run.arm == "leapfrog" else 1.0)),
            )

    write(2.4)
    figure = judge(planned)["A4"][0]
    assert [own["effect"][0] for own in figure["measured"]] == [pytest.approx(2.4, rel=0.05)] * 3
    assert figure["word"] == "seen from pico on"
    write(1.0)
    assert judge(planned)["A4"][0]["word"] == "not seen up to micro"


def test_a_study_takes_the_place_of_an_earlier_one_where_it_has_measured_the_same(planned: Path) -> None:
    write_loss_records(planned / "coupling-nano", lambda run: 4.0 - 0.5 * (run.arm == "leapfrog"))
    write_loss_records(planned / "headline-nano", lambda run: 4.0 - 0.1 * (run.arm == "leapfrog"))
    leapfrog, euler = judge(planned)["A1"]
    assert [own["effect"][0] for own in leapfrog["measured"]] == [pytest.approx(100 * math.expm1(-0.1), abs=0.1)]
    assert [own["size"] for own in euler["measured"]] == ["nano"]  # the earlier one's: headline-nano has no such arm


def test_runs_that_two_studies_share_are_evidence_once(planned: Path) -> None:
    def lose(run: PlannedRun) -> float:
        return 4.0 + 0.03 * (run.arm == "k=v")

    for size in LADDER:
        write_loss_records(planned / f"headline-{size}", lose)
    alone = judge(planned)["B6"][0]
    for study in ("sharing-pico", "sharing-nano-48m", "sharing-micro"):
        write_loss_records(planned / study, lose)
        others = [line for line in read_records(planned / study) if line["place"].split("/")[1] == "mqa"]
        write_records(planned / study, others)
    shared = judge(planned)["B6"]
    assert [own["seeds"] for own in shared[1]["measured"]] == [5] * 3  # against the standard that is taken over
    assert shared[0] == alone


def test_a_size_that_does_not_count_decides_nothing(planned: Path) -> None:
    for size in (*LADDER, "mini"):
        write_loss_records(
            planned / f"headline-{size}",
            lambda run, size=size: 4.0 + (0.2 if size == "mini" else 0.03) * (run.arm == "k=v"),
        )
    assert judge(planned)["B1"][0]["counted"] == [*LADDER, "mini"]
    begun = [line for line in read_records(planned / "headline-mini") if line["place"][-1] in "01"]
    for line in begun:
        if "/k=v/" in line["place"]:
            line["summary"]["evaluation"]["test"]["loss"] -= 0.4  # two lucky seeds
    write_records(planned / "headline-mini", begun)
    (figure,) = judge(planned)["B1"]
    assert (figure["counted"], figure["measured"][-1]["size"]) == ([*LADDER], "mini")
    assert (figure["word"], figure["so_far"]) == ("seen from pico on", "depends on size")
    more = [line for line in read_records(planned / "headline-micro") if "/k=v/lr0.018-" in line["place"]]
    for line in more:
        line["place"] = line["place"].replace("0.018", "0.054")  # a rate that the baseline has not tried
    write_records(planned / "headline-micro", [*read_records(planned / "headline-micro"), *more])
    assert judge(planned)["B1"][0]["counted"] == ["pico", "nano"]


def test_a_figure_of_one_corpus_is_of_that_corpus(planned: Path) -> None:
    for size in LADDER:
        write_loss_records(
            planned / f"corpora-{size}",
            lambda run: 4.0 + (run.arm == "leapfrog") * {"pubmed": -0.05, "webmix": 0.1}.get(run.corpus, 9.0),
        )
    pubmed, webmix = judge(planned)["A7"]
    assert [own["effect"][0] for own in pubmed["measured"]] == [pytest.approx(100 * math.expm1(-0.05), abs=0.1)] * 3
    assert [own["effect"][0] for own in webmix["measured"]] == [pytest.approx(100 * math.expm1(0.1), abs=0.1)] * 3
    assert (pubmed["word"], webmix["word"]) == ("seen from pico on",) * 2


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
