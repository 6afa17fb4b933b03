"""benchmarks/bounds.py: the table of bounds and what was measured."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_kept_results_are_told_with_their_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bounds import main

    monkeypatch.setattr(sys, "argv", ["bounds.py", "--kept"])
    main()
    told = capsys.readouterr().out
    assert "decode, (Q,K=V) / fastest (Q,K,V)" in told
    assert "decode-h200.json: NVIDIA H200" in told


def test_a_bound_is_held_or_missed_or_not_measured(tmp_path: Path) -> None:
    from bounds import lines

    origin = {"device": "none", "commit": "0", "date": "today", "torch": "2"}
    arms = {
        "euler×1, fused": {"ratio": 1.02, "peak_ratio": 1.0},
        "leapfrog×1, fused": {"ratio": 1.031, "peak_ratio": 1.0},
    }
    kept = {"provenance": origin, "arms": arms}
    (tmp_path / "coupling-step-51m-h200.json").write_text(json.dumps(kept), encoding="utf-8")
    alone = {"forward_s": 1.9, "floors_s": [1.5, 1.0]}
    kept = {"provenance": origin, "arms": {"leapfrog×1, heads of 64": alone}}
    (tmp_path / "coupling-op-h200.json").write_text(json.dumps(kept), encoding="utf-8")
    verdicts = {line[:56].strip(): line.split()[-1] for line in lines(tmp_path)}
    assert verdicts["training step, 51M, euler×1 / standard"] == "held"
    assert verdicts["training step, 51M, leapfrog×1 / standard"] == "missed"
    assert verdicts["training step, 51M, leapfrog×7 / standard"] == "measured"  # not measured
    assert verdicts["coupling alone, leapfrog×1, forward, of copy bandwidth"] == "held"
