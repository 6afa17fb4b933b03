"""What a grid of learning rates says: which of them may be the best, and how much an arm depends on the choice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qklab.study.stats.paired import Statistic, t_above, t_quantile


@dataclass(frozen=True)
class RateSensitivity(Statistic):
    """Learning-rate sensitivity: the mean over the grid of min(loss, loss of an untrained model) − loss at the best
    rate (Wortsman et al., "Small-scale proxies for large-scale Transformer training instabilities"); `half`: half the
    interval's width over seeds, None of one seed."""

    mean: float
    half: float | None
    seeds: int


def measure_sensitivity(
    losses: Sequence[Sequence[float]], best: int, untrained: float, alpha: float = 0.05
) -> RateSensitivity:
    """From losses [seeds, rates]; of every seed against its own loss at the rate that is best over all of them."""
    capped = np.minimum(np.nan_to_num(np.asarray(losses, dtype=float), nan=untrained), untrained)
    each = capped.mean(1) - capped[:, best]
    n = len(each)
    half = t_quantile(n - 1, 1 - alpha / 2) * float(each.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    return RateSensitivity(float(each.mean()), half, n)


def find_best_rates(losses: Sequence[Sequence[float]], best: int, alpha: float = 0.05) -> list[int]:
    """The rates, by index, from the lowest to the highest that is not shown to be worse than the one with the lowest
    mean: one-sided paired t-tests over seeds, `alpha` divided by their number, so that the truly best is among them
    with a chance of at least 1 − alpha. A rate at which a seed diverged is worse."""
    values = np.asarray(losses, dtype=float)
    n, rates = values.shape
    fine = [best]
    for k in range(rates):
        difference = values[:, k] - values[:, best]
        if k == best or not np.isfinite(difference).all():
            continue
        mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(n)
        if mean == 0 or (error > 0 and t_above(n - 1, mean / error) >= alpha / (rates - 1)):
            fine.append(k)
    return list(range(min(fine), max(fine) + 1))
