"""The card: one picture and one paragraph that say what the study says."""

import struct
import sys
from pathlib import Path

import pytest
from fabricated import COMMIT, fabricate, spec

from qklab.cli import main
from qklab.report.card import read_card, write_card, write_command
from qklab.report.folders import read_groups
from qklab.runs.directory import RunError
from qklab.study.records import Analyses, StudyRecord, read_study_record


def test_a_card_has_verdict_interval_seeds_size_cost_command_and_commit(folder: Path, tmp_path: Path) -> None:
    picture, text = write_card([folder], tmp_path / "cards" / "card.png")
    content = picture.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert (content[:4], width) == (b"\x89PNG", 1500)
    assert 500 < height < 1200
    told = text.read_text(encoding="utf-8")
    (group,) = read_groups([folder])
    findings = group.findings
    assert told.startswith(f"![{findings.headline}](card.png)\n\n**{findings.headline}.** ")
    assert all(verdict.sentence in told for verdict in findings.verdicts.values())
    assert all(cost in told for cost in findings.costs.values())
    assert (
        "0.283 M parameters on 102,400 tokens; 3 paired seeds, every arm at learning rates 0.001, 0.003; 20 runs"
        in told
    )
    assert f"qklab at {COMMIT[:10]}, study {group.study.fingerprint[:12]}." in told  # pyright: ignore[reportOptionalMemberAccess]


def test_the_command_is_the_one_that_was_given(tmp_path: Path) -> None:
    study = spec(arms={"standard": {}, "k=v": {"attention": {"share": "k=v"}}}, seeds=5)
    asked = {"texts": ("my texts",), "arms": ("k=v",), "minutes": None, "size": "pico", "seeds": 5}
    command = write_command(StudyRecord(study, [], asked), tmp_path)
    assert command == "qklab compare 'my texts' --arms k=v --size pico --seeds 5"
    assert "--minutes 4.5 --seeds" in write_command(StudyRecord(study, [], {"minutes": 4.5}), tmp_path)
    StudyRecord(study, []).write(tmp_path)
    Analyses().add(3, 2, "qklab study f.toml --seeds {total}").write(tmp_path)
    assert write_command(read_study_record(tmp_path), tmp_path) == "qklab study f.toml --seeds 5"


def test_what_has_no_card_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = spec(arms={"standard": {}, "k=v": {"attention": {"share": "k=v"}}}, seeds=1, lrs=[1e-3])
    begun = fabricate(tmp_path / "begun", one, steps=20)
    (begun / "runs/stdlib/k=v/lr0.001-seed0/summary.json").unlink()
    assert read_card(read_groups([begun])[0]) is None
    with pytest.raises(RunError, match="a card needs a study that has a verdict"):
        write_card([begun], tmp_path / "card.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="2"):
        main(("report", str(folder), "--card", "--out", str(tmp_path / "card.png")))
    assert "drawn with matplotlib, which is not installed; pip install 'qklab[card]'" in capsys.readouterr().err
    assert not (tmp_path / "card.png").exists()
    assert not (tmp_path / "card.md").exists()
