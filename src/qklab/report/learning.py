"""How an arm's learning curves lie to the baseline's: the difference all along, and the tokens to the same loss."""

from collections.abc import Sequence
from typing import Any

from qklab.study.stats.curves import Curve, compare_along, compare_sample_efficiency, find_common_loss

POINTS = 40
METRIC = "loss"  # of the validation curves that are compared


def compare_learning(
    arm: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]], level: float
) -> dict[str, Any] | None:
    """Validation curves of runs as the page gets them, paired by seed: the difference against tokens and against time
    with pointwise intervals, and a sentence on sample efficiency. None where there is nothing to compare."""
    found: dict[str, Any] = {"metric": METRIC}
    for axis in ("tokens", "seconds"):
        own, other = collect_curves(arm, axis), collect_curves(baseline, axis)
        seeds = sorted(own.keys() & other.keys())
        if not seeds:
            continue
        ours, theirs = {seed: own[seed] for seed in seeds}, {seed: other[seed] for seed in seeds}
        along = compare_along(ours, theirs, POINTS, level)
        if len(along.x) and along.x[0] < along.x[-1]:
            found[axis] = {
                "n": along.n,
                "level": level,
                **{name: round_values(getattr(along, name)) for name in ("x", "mean", "low", "high")},
            }
        if axis == "tokens":
            target = find_common_loss(ours, theirs)
            found["efficiency"] = compare_sample_efficiency(ours, theirs, target, level).sentence
    return found if len(found) > 1 else None


def collect_curves(runs: Sequence[dict[str, Any]], axis: str) -> dict[int, Curve]:
    """Seed → its validation curve; runs that have none yet, or diverged, are left out."""
    found: dict[int, Curve] = {}
    for run in runs:
        x, loss = run["curve"][axis], run["curve"][METRIC]
        if run["status"] == "diverged" or len(x) < 2:
            continue
        try:
            found[run["seed"]] = Curve.of(x, loss)
        except ValueError:  # a clock that stood still: no curve against time
            continue
    return found


def round_values(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else [float(f"{value:.6g}") for value in values]
