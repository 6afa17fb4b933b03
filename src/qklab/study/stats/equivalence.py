"""Equivalence: two one-sided tests that show a difference to be within a margin."""

from dataclasses import dataclass

from qklab.study.stats.paired import (
    ANECDOTE,
    IDENTICAL,
    DifferenceSample,
    Statistic,
    Values,
    require_finite_pairs,
    require_positive,
    t_above,
)


@dataclass(frozen=True)
class EquivalenceTest(Statistic):
    """Whether "no difference beyond ±margin" may be claimed; low, high: the interval at level 1 − 2α."""

    n: int
    mean: float
    margin: float
    alpha: float
    low: float | None
    high: float | None
    p: float | None
    equivalent: bool
    smallest_margin: float | None
    note: str | None


def assess_equivalence(arm: Values, baseline: Values, margin: float, alpha: float = 0.05) -> EquivalenceTest:
    """Two one-sided t-tests (TOST): p is the larger of those of "difference ≤ −margin" and "difference ≥ margin".

    Equivalent where p < α, that is where the 1 − 2α interval lies within ±margin; `smallest_margin`, the end of it
    further from 0, is the smallest one for which it does. Identical differences count as n agreeing signs: p = 2⁻ⁿ.
    """
    require_positive("margin", margin)
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must lie between 0 and 0.5, but {alpha:g} came.")
    sample = DifferenceSample.of(*require_finite_pairs(arm, baseline))
    n, mean = sample.n, sample.mean
    if n == 1:
        return EquivalenceTest(1, mean, margin, alpha, None, None, None, False, None, ANECDOTE)
    half = sample.half_width(1 - 2 * alpha)
    p = equivalence_p_value(sample, margin)
    smallest = None if sample.sd == 0 and 2.0**-n >= alpha else abs(mean) + half
    note = IDENTICAL if sample.sd == 0 else None
    return EquivalenceTest(n, mean, margin, alpha, mean - half, mean + half, p, p < alpha, smallest, note)


def equivalence_p_value(sample: DifferenceSample, margin: float) -> float:
    if sample.sd == 0:
        return 2.0**-sample.n if abs(sample.mean) < margin else 1.0
    return t_above(sample.n - 1, (margin - abs(sample.mean)) / sample.se)
