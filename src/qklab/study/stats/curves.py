"""Learning curves: the loss at equal tokens or equal time, and the tokens or seconds to reach an equal loss.

A curve is what one run measured, x (tokens or seconds) against loss. Arms are mappings of seed → curve, paired by seed.
Nothing is extrapolated: where a curve does not reach, the answer is a reason or a bound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qklab.study.stats.paired import (
    Array,
    Statistic,
    compare_paired,
    name_seeds,
    read_number,
    require_fraction,
    t_quantile,
)

Points = Sequence[Any] | NDArray[Any]


@dataclass(frozen=True)
class Curve:
    """x strictly rising, loss finite; where a run diverged, the part before, and `diverged` is True."""

    x: Array
    loss: Array
    diverged: bool = False

    @classmethod
    def of(cls, x: Points, loss: Points) -> "Curve":
        """Checks the points, and cuts a curve off at its first loss that is not finite."""
        xs, losses = np.array([read_number(v) for v in x]), np.array([read_number(v) for v in loss])
        if len(xs) != len(losses):
            raise ValueError(f"A curve needs as many losses as points, but {len(losses)} and {len(xs)} came.")
        if not np.isfinite(xs).all() or (np.diff(xs) <= 0).any() or (xs < 0).any():
            raise ValueError("The tokens or seconds of a curve must be finite, not negative and strictly rising.")
        bad = np.flatnonzero(~np.isfinite(losses))
        end = int(bad[0]) if len(bad) else len(losses)
        if end == 0:
            raise ValueError("A curve needs at least one finite loss: a run without one is counted as diverged.")
        return cls(xs[:end], losses[:end], len(bad) > 0)


Curves = Mapping[Any, Curve]


def match_seeds(arm: Curves, baseline: Curves) -> list[Any]:
    seeds = [seed for seed in arm if seed in baseline]
    if len(seeds) != len(arm) or len(seeds) != len(baseline):
        alone = [str(seed) for seed in [*arm, *baseline] if seed not in seeds]
        raise ValueError(f"Pairs need every seed in both arms, but {', '.join(alone)} came in one only.")
    if not seeds:
        raise ValueError("There is nothing to compare: no seed has a curve in both arms.")
    return seeds


def find_common_range(arm: Curves, baseline: Curves) -> tuple[float, float] | None:
    """From where to where every curve of both has measurements around it; None where they do not overlap."""
    match_seeds(arm, baseline)
    curves = [*arm.values(), *baseline.values()]
    low, high = max(float(c.x[0]) for c in curves), min(float(c.x[-1]) for c in curves)
    return (low, high) if low <= high else None


@dataclass(frozen=True)
class DifferenceAlong(Statistic):
    """The mean difference arm − baseline over the common range; low, high: pointwise, None with one seed."""

    n: int
    level: float
    x: list[float]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None
    reason: str | None


def compare_along(arm: Curves, baseline: Curves, points: int = 50, level: float = 0.95) -> DifferenceAlong:
    """The paired difference at `points` places evenly spaced over the common range, mean ± t(n−1) · sd/√n at each.

    Pointwise: at any one x the interval covers the truth at `level`; that all of them do at once is less sure.
    """
    require_fraction("level", level)
    seeds, span = match_seeds(arm, baseline), find_common_range(arm, baseline)
    if span is None:
        return DifferenceAlong(len(seeds), level, [], [], None, None, "the curves have no stretch in common")
    x = np.linspace(*span, points)
    rows = [np.interp(x, arm[s].x, arm[s].loss) - np.interp(x, baseline[s].x, baseline[s].loss) for s in seeds]
    differences, n = np.array(rows), len(seeds)
    mean = differences.mean(0)
    if n == 1:
        return DifferenceAlong(1, level, x.tolist(), mean.tolist(), None, None, "one seed is an anecdote: no interval")
    half = t_quantile(n - 1, (1 + level) / 2) * differences.std(0, ddof=1) / math.sqrt(n)
    return DifferenceAlong(n, level, x.tolist(), mean.tolist(), (mean - half).tolist(), (mean + half).tolist(), None)


# Equal loss


@dataclass(frozen=True)
class FirstReached(Statistic):
    """Where a loss is first reached: at `x`, or, where x is None, above `low` and, if not None, at most at `high`."""

    x: float | None
    low: float
    high: float | None


def find_first_reached(curve: Curve, target: float) -> FirstReached:
    """The first crossing of the running minimum with `target`, on the line between the measurements around it.

    The running minimum and not an isotonic fit: a loss once reached stays reached, whatever comes after, so the answer
    never changes while a run goes on; and a curve that rises again (overfitting) has reached what its best checkpoint
    reached, where a monotone fit would average the rise into it. Its price is that it takes the luckiest of many
    measurements. That falls on both arms alike and nearly cancels in their ratio: planted 1.3, found 1.296 where the
    noise between measurements is 0.01 nats and 1.287 where it is 0.03 (isotonic: 1.300 and 1.301), 60 measurements
    each; but 1.24 where one arm is measured three times as often as the other at noise 0.03. Measure arms alike.
    """
    if not math.isfinite(target):
        raise ValueError("The loss to reach must be a finite number.")
    best = np.minimum.accumulate(curve.loss)
    first = int(np.searchsorted(-best, -target))
    if first == len(best):
        return FirstReached(None, float(curve.x[-1]), None)
    if first == 0:
        x = float(curve.x[0])
        return FirstReached(x, x, x) if best[0] == target else FirstReached(None, 0.0, x)
    over, under = best[first - 1], best[first]
    share = (over - target) / (over - under)
    x = float(curve.x[first - 1] + share * (curve.x[first] - curve.x[first - 1]))
    return FirstReached(x, x, x)


def find_common_loss(arm: Curves, baseline: Curves) -> float:
    """The lowest loss that every curve reached: the worst of their minima. No bound is needed there."""
    match_seeds(arm, baseline)
    return max(float(c.loss.min()) for c in [*arm.values(), *baseline.values()])


@dataclass(frozen=True)
class SeedRatio(Statistic):
    """x of the baseline over x of the arm at one seed; None: censored, between `low` and `high` (None: no bound)."""

    seed: Any
    arm: FirstReached
    baseline: FirstReached
    ratio: float | None
    low: float
    high: float | None


@dataclass(frozen=True)
class SampleEfficiency(Statistic):
    """How many times fewer tokens (or seconds) the arm needs than the baseline to reach `target`; above 1: fewer.

    ratio, low, high, p: only where every seed has a ratio (low, high, p: and there are two at least). Where some are
    censored, at_least and at_most: one-sided limits at `level`, of which there may be one, both or neither.
    """

    target: float
    n: int
    level: float
    ratio: float | None
    low: float | None
    high: float | None
    p: float | None
    at_least: float | None
    at_most: float | None
    censored: int
    seeds: list[SeedRatio]
    sentence: str


def compute_seed_ratio(seed: Any, arm: FirstReached, baseline: FirstReached) -> SeedRatio:
    low = baseline.low / arm.high if arm.high else 0.0
    high = baseline.high / arm.low if baseline.high is not None and arm.low > 0 else None
    ratio = baseline.x / arm.x if arm.x and baseline.x else None
    return SeedRatio(seed, arm, baseline, ratio, low, high)


def compare_sample_efficiency(
    arm: Curves, baseline: Curves, target: float, level: float = 0.95, axis: str = "tokens"
) -> SampleEfficiency:
    """The ratio x of baseline / x of arm at which each reaches `target`, per seed; their geometric mean, with the t
    interval of the log ratios.

    A run that never reaches it is not dropped, for that would reward it: it needs more than it had, so the ratio of its
    seed has only a lower or an upper bound. The bounds of all seeds (the ratio itself where it is known) then give a
    one-sided t limit: their mean log cannot lie on the wrong side of the true one. Neither reached: no bound at all.
    """
    require_fraction("level", level)
    seeds = [
        compute_seed_ratio(s, find_first_reached(arm[s], target), find_first_reached(baseline[s], target))
        for s in match_seeds(arm, baseline)
    ]
    known = [s.ratio for s in seeds if s.ratio is not None]
    n, censored = len(seeds), len(seeds) - len(known)
    ratio = low = high = p = at_least = at_most = None
    if not censored:
        found = compare_paired(np.log(known), np.zeros(n), level)
        ratio, p = math.exp(found.mean), found.p
        if found.low is not None and found.high is not None:
            low, high = math.exp(found.low), math.exp(found.high)
    else:
        at_least = limit_from_bounds([s.low or None for s in seeds], level, -1)
        at_most = limit_from_bounds([s.high for s in seeds], level, 1)
    sentence = describe_efficiency(target, axis, level, seeds, (ratio, low, high), (at_least, at_most))
    return SampleEfficiency(target, n, level, ratio, low, high, p, at_least, at_most, censored, seeds, sentence)


def limit_from_bounds(bounds: Sequence[float | None], level: float, side: int) -> float | None:
    """exp(mean ± t(level, n−1) · sd/√n) of the log bounds; None where one is missing or there is one seed only."""
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds) or len(known) < 2:
        return None
    logs, n = np.log(known), len(known)
    return math.exp(float(logs.mean()) + side * t_quantile(n - 1, level) * float(logs.std(ddof=1)) / math.sqrt(n))


def describe_efficiency(
    target: float,
    axis: str,
    level: float,
    seeds: Sequence[SeedRatio],
    estimate: tuple[float | None, float | None, float | None],
    limits: tuple[float | None, float | None],
) -> str:
    n, sure = name_seeds(len(seeds)), f"{100 * level:.3g} %"
    ratio, low, high = estimate
    if ratio is not None:
        interval = f"{sure} interval {low:.3g} to {high:.3g}; " if low is not None else "one seed is an anecdote; "
        return f"To reach a loss of {target:.4g} the baseline takes {ratio:.3g} × the arm's {axis} ({interval}{n})."
    never = [sum(each.high is None for each in side) for side in ([s.arm for s in seeds], [s.baseline for s in seeds])]
    start = sum(r.x is None and r.high is not None for s in seeds for r in (s.arm, s.baseline))
    who = [f"the arm never in {never[0]}" * bool(never[0]), f"the baseline never in {never[1]}" * bool(never[1])]
    who.append(f"{start} at or before the first measurement" * bool(start))
    least, most = limits
    bounds = [f"at least {least:.3g} ×" if least else "", f"at most {most:.3g} ×" if most else ""]
    bound = " and ".join(filter(None, bounds))
    answer = f"the baseline takes {bound} the arm's {axis} ({sure} sure)" if bound else "no bound on the ratio follows"
    return f"A loss of {target:.4g} is not reached in every run ({', '.join(filter(None, who))} of {n}): {answer}."
