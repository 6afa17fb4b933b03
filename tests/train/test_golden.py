"""Curves kept from an earlier version come out again."""

import json
from pathlib import Path

import pytest

from golden import ARMS, FOLDER, curve

# Rounding differs between processors and versions of torch and grows with the steps; a changed formula shows far above.
TOLERANCE = 5e-3


@pytest.mark.parametrize("arm", ARMS)
def test_the_loss_curve_is_the_kept_one(arm: str, corpus_folder: Path, tmp_path: Path) -> None:
    kept = json.loads((FOLDER / f"nano-{arm}.json").read_text())
    now = curve(corpus_folder, arm, tmp_path / "run")
    assert now["loss"][0] == pytest.approx(kept["loss"][0], abs=1e-5)
    assert now["loss"] == pytest.approx(kept["loss"], abs=TOLERANCE)
    assert now["valid"] == pytest.approx(kept["valid"], abs=TOLERANCE)


def test_the_curves_differ_by_more_than_the_tolerance() -> None:
    kept = {arm: json.loads((FOLDER / f"nano-{arm}.json").read_text())["loss"] for arm in ARMS}
    for one in kept:
        for other in kept:
            if one != other:
                apart = max(abs(a - b) for a, b in zip(kept[one], kept[other], strict=True))
                assert apart > 4 * TOLERANCE, (one, other)
