"""Spread: do two arms vary equally over seeds?"""

import math
from dataclasses import dataclass

import numpy as np

from qklab.study.stats.paired import Statistic, Values, require_finite_pairs, require_fraction, t_above, t_quantile


@dataclass(frozen=True)
class SpreadRatio(Statistic):
    """sd of the arm over that of the baseline. None: cannot be had from these seeds, see `note`."""

    n: int
    sd_arm: float | None
    sd_baseline: float | None
    ratio: float | None
    level: float
    low: float | None
    high: float | None
    p: float | None
    note: str | None


def compare_spread(arm: Values, baseline: Values, level: float = 0.95) -> SpreadRatio:
    """Pitman–Morgan: do two arms paired by seed vary equally over seeds?

    Equal variances ⇔ sum and difference of the pair are uncorrelated, so p is that of their correlation, a t with n − 2
    degrees of freedom. The interval holds every ratio that test would not reject: with V the ratio of variances, r the
    correlation of the arms and K = 1 + 2 (1 − r²) t² / (n − 2), V · (K ± √(K² − 1)), and the root of it. For normal
    values; heavy tails make it reject too often.
    """
    require_fraction("level", level)
    a, b = require_finite_pairs(arm, baseline)
    n = len(a)
    if n < 3:
        return SpreadRatio(n, None, None, None, level, None, None, None, "spread needs at least three seeds")
    sa, sb = float(a.std(ddof=1)), float(b.std(ddof=1))
    if sa == 0 or sb == 0:
        return SpreadRatio(
            n, sa, sb, None, level, None, None, None, "an arm that does not vary over seeds has no ratio"
        )
    r = min(1.0, max(-1.0, float(np.cov(a, b)[0, 1]) / (sa * sb)))
    v, df, unlike = (sa / sb) ** 2, n - 2, 1 - r * r
    if unlike < 1e-12:
        return SpreadRatio(n, sa, sb, sa / sb, level, None, None, None, "the arms move in step: nothing to test")
    t = (v - 1) / (2 * math.sqrt(v)) * math.sqrt(df / unlike)
    k = 1 + 2 * unlike * t_quantile(df, (1 + level) / 2) ** 2 / df
    wide = k + math.sqrt(k * k - 1)
    p = min(1.0, 2 * t_above(df, abs(t)))
    return SpreadRatio(n, sa, sb, sa / sb, level, math.sqrt(v / wide), math.sqrt(v * wide), p, None)
