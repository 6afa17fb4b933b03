"""Power: how many more seeds would settle an open case, and how likely."""

import math
from dataclasses import dataclass

import numpy as np

from qklab.study.stats.paired import (
    DifferenceSample,
    Statistic,
    Values,
    require_finite_pairs,
    require_fraction,
    require_positive,
    t_quantile,
)

DRAWS = 4000
EVEN, LIKELY = 0.5, 0.95  # chances between which the number of seeds is told


@dataclass(frozen=True)
class SeedPlan(Statistic):
    """`more` seeds, `total` in all, settle the case with `chance`; None: not even `cap` more, whose chance it then is,
    or nothing can be said (chance None too). `few` may do (with a chance of a half), `many` may be needed (19 of 20);
    None: more than `cap`."""

    n: int
    more: int | None
    total: int | None
    chance: float | None
    cap: int
    sentence: str
    few: int | None = None
    many: int | None = None


def plan_more_seeds(
    arm: Values,
    baseline: Values,
    margin: float,
    *,
    power: float = 0.8,
    alpha: float = 0.05,
    comparisons: int = 1,
    cap: int = 100,
) -> SeedPlan:
    """How many more seeds would settle an open case: show a difference (p < α / comparisons) or equivalence (TOST
    p < α) with probability `power`.

    Neither the sd nor the mean is taken at face value. Under the flat prior (1/σ) the seeds so far say how large the sd
    may be (sd · √(n−1)/χ) and, given that, where the mean may lie (normal around the observed one, sd/√n); 4000 such
    worlds are drawn, future seeds in each are added to those at hand, and the share in which the verdict is no longer
    open is the chance. With few seeds that asks for more than the observed sd alone would, as it should. In simulated
    studies a promise of 80 % was kept in 93 % of open cases with 2 seeds at hand, 90 % with 3, 84 % with 6.
    """
    require_positive("margin", margin)
    require_fraction("power", power)
    require_fraction("alpha", alpha)
    sample = DifferenceSample.of(*require_finite_pairs(arm, baseline))
    if sample.n == 1:
        sentence = "One seed says nothing about the noise: run at least 2 more, then ask again."
        return SeedPlan(1, None, None, None, cap, sentence)
    n, tried, chance = sample.n, 0, 0.0
    needed: dict[float, int] = {}  # chance → the fewest seeds that give it
    reached: dict[int, float] = {}
    while tried < cap and LIKELY not in needed:
        tried = min(cap, tried + 1 + tried // 20)  # one by one up to 20, then in steps of 5 %
        reached[tried] = chance = chance_of_settling(sample, tried, margin, alpha, comparisons)
        needed |= {each: tried for each in (EVEN, power, LIKELY) if chance >= each and each not in needed}
    few, more, many = (needed.get(each) for each in (EVEN, power, LIKELY))
    if more is None:
        sentence = f"Even {cap} more seeds would settle it with a chance of only {chance:.0%}.".replace("%", " %")
        return SeedPlan(n, None, None, chance, cap, sentence, few, many)
    seeds = "1 more seed" if more == 1 else f"{more} more seeds"
    rough = f"{few} may do, {many if many is not None else f'more than {cap}'} may be needed"
    sentence = f"{seeds} ({n + more} in all) would settle it with a chance of {reached[more]:.0%}; {rough}."
    return SeedPlan(n, more, n + more, reached[more], cap, sentence.replace("%", " %"), few, many)


def chance_of_settling(sample: DifferenceSample, more: int, margin: float, alpha: float, comparisons: int) -> float:
    """Share of the worlds compatible with the sample in which `more` seeds leave the case not open."""
    n, total = sample.n, sample.n + more
    if sample.sd == 0:  # then all seeds agree, and the sign test is what is left
        differs = sample.mean != 0 and 2.0 ** (1 - total) < alpha / comparisons
        return float(differs or (abs(sample.mean) < margin and 2.0**-total < alpha))
    chance = np.random.default_rng(0)
    sd = sample.sd * np.sqrt((n - 1) / chance.chisquare(n - 1, DRAWS))
    mean = sample.mean + sd * chance.standard_normal(DRAWS) / math.sqrt(n)
    new = mean + sd * chance.standard_normal(DRAWS) / math.sqrt(more)
    squares = sd * sd * chance.chisquare(more - 1, DRAWS) if more > 1 else np.zeros(DRAWS)
    squares += (n - 1) * sample.sd**2 + (new - sample.mean) ** 2 * n * more / total
    middle = np.abs(n * sample.mean + more * new) / total
    se = np.sqrt(squares / (total - 1) / total)
    differs = middle > t_quantile(total - 1, 1 - alpha / comparisons / 2) * se
    same = margin - middle > t_quantile(total - 1, 1 - alpha) * se
    return float((differs | same).mean())
