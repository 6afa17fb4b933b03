"""False alarms of a comparison in which some of the seeds choose the learning rates that all are compared at:

    python benchmarks/tuning_seeds.py

Two arms that do not differ; a seed's loss at a rate is a parabola of the rate's logarithm, and noise. Each arm takes
the rate with the lowest mean over the seeds that tune, the grid of three grows by up to two at an end where an arm does
best there, and a paired t-test over all seeds is to be below 5 %. The largest share over curvatures and places of the
best.
"""

import numpy as np
from scipy import stats

RATES, MORE = 3, 2
CURVATURES, PLACES = (0.03, 0.1, 0.3, 1.0), (0.0, 0.25, 0.5)  # in standard deviations of a seed, and in grid steps
CASES = ((5, 5), (8, 6), (10, 8), (12, 9), (16, 12), (20, 15), (20, 20), (40, 30))


def count_false_alarms(seeds: int, tuning: int, curvature: float, place: float, studies: int = 20_000) -> float:
    """The share of studies that find a difference."""
    rates = RATES + 2 * MORE
    x = np.arange(rates) - (rates - 1) / 2
    noise = np.random.default_rng(0).standard_normal((studies, 2, rates, seeds))
    losses = curvature * (x - place)[:, None] ** 2 + noise
    means = losses[..., :tuning].mean(-1)
    first, last = np.full(studies, MORE), np.full(studies, MORE + RATES - 1)
    for _ in range(2 * MORE):
        best = choose_best(means, first, last)
        first = first - ((best == first[:, None]).any(1) & (first > 0))
        last = last + ((best == last[:, None]).any(1) & (last < rates - 1))
    best = choose_best(means, first, last)
    arm, baseline = np.take_along_axis(losses, best[..., None, None], 2)[:, :, 0].swapaxes(0, 1)
    return float((stats.ttest_rel(arm, baseline, axis=1).pvalue < 0.05).mean())


def choose_best(means: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Of each study and arm, the rate within the grid with the lowest mean."""
    rate = np.arange(means.shape[-1])
    inside = (rate >= first[:, None]) & (rate <= last[:, None])
    return np.where(inside[:, None], means, np.inf).argmin(-1)


if __name__ == "__main__":
    for seeds, tuning in CASES:
        worst = max(count_false_alarms(seeds, tuning, c, p) for c in CURVATURES for p in PLACES)
        print(f"{tuning:2} of {seeds:2} seeds tune: {100 * worst:.1f} % at most", flush=True)
