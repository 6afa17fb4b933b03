"""Differences measured in several places (sizes, corpora, learning rates): combined, and whether they are the same.

A group holds the paired differences of one place, one per seed. Groups are independent and each has its own spread, so
degrees of freedom are Welch's and Satterthwaite's. Where places share their seeds and only their mean counts, as with
the tasks of a benchmark, `average_over_tasks` takes it seed by seed, and nothing need be independent but the seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy import special

from qklab.study.stats.paired import Array, DifferenceSample, Statistic, require_fraction, t_above, t_quantile

Groups = Sequence[Sequence[float] | NDArray[np.float64]]


@dataclass(frozen=True)
class Contrast(Statistic):
    """A weighted sum of group means; low, high: its t interval; p: two-sided, of its being 0."""

    estimate: float
    se: float
    df: float
    level: float
    low: float
    high: float
    p: float

    @property
    def agreement(self) -> float:
        """The p-value of a bound that all seeds, which agree to rounding, lie on the other side of: a sign test's."""
        return self.p / 2 if self.estimate else 2.0 ** -(self.df + 1)

    def exceeds(self, bound: float) -> float:
        """The p-value of "the sum is at most `bound`"."""
        if self.se == 0:
            return self.agreement if self.estimate > bound else 1.0
        return t_above(self.df, (self.estimate - bound) / self.se)

    def falls_below(self, bound: float) -> float:
        """The p-value of "the sum is at least `bound`"."""
        if self.se == 0:
            return self.agreement if self.estimate < bound else 1.0
        return t_above(self.df, (bound - self.estimate) / self.se)


def sample_groups(groups: Groups) -> list[DifferenceSample]:
    """The moments of each group, which must hold two finite differences at least."""
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    if any(len(array) < 2 or not np.isfinite(array).all() for array in arrays):
        raise ValueError(
            "Every group needs at least two finite differences: one seed is an anecdote, a diverged run no number."
        )
    return [DifferenceSample.of(array, np.zeros_like(array)) for array in arrays]


def estimate_contrast(groups: Groups, weights: Sequence[float] | Array, level: float = 0.95) -> Contrast:
    """Σ weight · mean of each group, with the Welch–Satterthwaite interval.

    Coverage of the 95 % interval of a slope over three sizes, measured over 4,000 studies: 95–96 % where the spreads
    are alike, 94–95 % where they differ by a factor of four, with 3, 5 and 10 seeds each.
    """
    require_fraction("level", level)
    samples = sample_groups(groups)
    parts = [(w * sample.se) ** 2 for w, sample in zip(weights, samples, strict=True)]
    estimate, variance = float(sum(w * s.mean for w, s in zip(weights, samples, strict=True))), sum(parts)
    used = [sample for w, sample in zip(weights, samples, strict=True) if w]
    if variance == 0:  # all seeds of each group agree to rounding: the sign test is all they can say
        p = 1.0 if estimate == 0 else 2.0 ** (1 - min(sample.n for sample in used))
        return Contrast(estimate, 0.0, float(sum(s.n - 1 for s in used)), level, estimate, estimate, p)
    df = variance**2 / sum(part**2 / (sample.n - 1) for part, sample in zip(parts, samples, strict=True))
    se = math.sqrt(variance)
    half, p = t_quantile(df, (1 + level) / 2) * se, min(1.0, 2 * t_above(df, abs(estimate) / se))
    return Contrast(estimate, se, df, level, estimate - half, estimate + half, p)


def average_groups(groups: Groups, level: float = 0.95) -> Contrast:
    """The mean of the group means: every place counts the same, however many seeds it has."""
    return estimate_contrast(groups, np.full(len(groups), 1 / len(groups)), level)


def average_over_tasks(tasks: Sequence[Mapping[str, Mapping[int, float]]]) -> dict[str, dict[int, float]]:
    """Arm → seed → the mean over tasks of its values, for the seeds that every arm has on every task; infinite where a
    run diverged. Two arms of it are compared as on one task, by `compare_paired`.

    Coverage of that 95 % interval for five tasks, measured over 4,000 studies with 3, 5 and 10 seeds: 94–96 %, whether
    a seed's differences on the tasks are independent or correlated by 0.5, with spreads alike or up to a factor of
    sixteen apart. `average_groups`, which takes tasks for independent, covers 75–88 % where they are correlated so.
    """
    if not tasks or any(own.keys() != tasks[0].keys() for own in tasks):
        raise ValueError("A mean over tasks needs at least one task, and the same arms on each.")
    seeds = set.intersection(*(set(values) for own in tasks for values in own.values()))
    if not seeds:
        raise ValueError("A mean over tasks needs a seed that every arm has on every task, and there is none.")
    return {arm: {seed: fmean(own[arm][seed] for own in tasks) for seed in sorted(seeds)} for arm in tasks[0]}


def interaction_p_value(effects: Sequence[Contrast]) -> float:
    """Welch's test of "the effect is the same everywhere": the interaction of arm and place.

    False alarms at 5 %, measured over 4,000 studies of two to four places with spreads up to a factor of four apart:
    3–6 % with 3, 5 and 10 seeds in each.
    """
    if len(effects) < 2:
        raise ValueError("An interaction needs two places at least: one cannot differ from another.")
    k, df = len(effects), np.array([effect.df for effect in effects])
    means, variances = np.array([effect.estimate for effect in effects]), np.array([effect.se**2 for effect in effects])
    if not variances.any():  # then nothing says what noise there is
        return 1.0
    weights = 1 / np.maximum(variances, 1e-9 * variances.max())
    total = weights.sum()
    spread = ((1 - weights / total) ** 2 / df).sum() / (k**2 - 1)
    between = (weights * (means - (weights * means).sum() / total) ** 2).sum() / (k - 1)
    return float(special.fdtrc(k - 1, 1 / (3 * spread), between / (1 + 2 * (k - 2) * spread)))
