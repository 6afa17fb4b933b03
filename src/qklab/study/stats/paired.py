"""Differences between two arms over paired seeds: intervals, p-values, and corrections for several arms and analyses.

Everywhere a difference is arm − baseline at the same seed, and seeds are the unit of evidence. Levels hold for a number
of seeds that was fixed before anyone looked; `alpha_of_each` pays for looking more than once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from qklab.schema import format_value

Key = TypeVar("Key")
Array = NDArray[np.float64]
Values = Mapping[Any, Any] | Sequence[Any] | NDArray[Any]

RESAMPLES = 4000
EXACT_FLIPS = 12
LEAST_FOR_OUTLIER = 4
LEAST_FOR_BOOTSTRAP = 5
ANECDOTE = "one seed is an anecdote: no interval and no p-value"
IDENTICAL = "all differences are identical; unless a score is at its limit, check that the seeds differ"


@dataclass(frozen=True)
class Statistic:
    """Base of what is measured here."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings, numbers and None: ready for JSON."""
        return asdict(self)


def read_number(value: Any) -> float:
    """A float, also from "nan" as metrics.jsonl writes it; None, a run that has no value, is NaN."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"A value of a run must be a number, but {format_value(value)} came.") from None


def match_pairs(arm: Values, baseline: Values) -> tuple[list[Any], Array, Array]:
    """Seeds and the values of both at each. Mappings are paired by seed, arrays by position."""
    if isinstance(arm, Mapping) and isinstance(baseline, Mapping):
        single = {"arm": [s for s in arm if s not in baseline], "baseline": [s for s in baseline if s not in arm]}
        unpaired = [f"seeds {', '.join(map(str, seeds))} only in the {own}" for own, seeds in single.items() if seeds]
        if unpaired:
            raise ValueError(
                f"Pairs need every seed in both arms, but {' and '.join(unpaired)}: run or leave out those."
            )
        seeds = list(arm)
        arm, baseline = [arm[s] for s in seeds], [baseline[s] for s in seeds]
    elif isinstance(arm, Mapping) or isinstance(baseline, Mapping):
        raise ValueError("Pairs need two mappings of seed → value or two arrays, but one of each came.")
    elif len(arm) != len(baseline):
        raise ValueError(f"Pairs need as many values in both arms, but {len(arm)} and {len(baseline)} came.")
    else:
        seeds = list(range(len(arm)))
    if not seeds:
        raise ValueError("There is nothing to compare: no seed is finished in both arms.")
    return seeds, np.array([read_number(v) for v in arm]), np.array([read_number(v) for v in baseline])


@dataclass(frozen=True)
class FinitePairs(Statistic):
    """Finite pairs, and the seeds at which the arm or the baseline diverged (NaN, infinite or None)."""

    arm: dict[Any, float]
    baseline: dict[Any, float]
    arm_diverged: list[Any]
    baseline_diverged: list[Any]
    seeds: int


def separate_diverged(arm: Values, baseline: Values) -> FinitePairs:
    """Finite pairs apart from those in which a run diverged. A diverged run is a result: report the counts."""
    seeds, a, b = match_pairs(arm, baseline)
    rows = list(zip(seeds, a.tolist(), b.tolist(), strict=True))
    both = [row for row in rows if math.isfinite(row[1]) and math.isfinite(row[2])]
    return FinitePairs(
        arm={seed: x for seed, x, _ in both},
        baseline={seed: y for seed, _, y in both},
        arm_diverged=[seed for seed, x, _ in rows if not math.isfinite(x)],
        baseline_diverged=[seed for seed, _, y in rows if not math.isfinite(y)],
        seeds=len(seeds),
    )


def require_finite_pairs(arm: Values, baseline: Values) -> tuple[Array, Array]:
    """The values of both arms, refused if any run diverged."""
    seeds, a, b = match_pairs(arm, baseline)
    bad = [seed for seed, x, y in zip(seeds, a, b, strict=True) if not (math.isfinite(x) and math.isfinite(y))]
    if bad:
        which = ", ".join(map(str, bad))
        raise ValueError(
            f"The value at seed {which} is not finite: count that run as diverged instead of averaging it "
            "(separate_diverged separates and counts them)."
        )
    return a, b


def require_fraction(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, but {value:g} came.")
    return value


def require_positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, but {value:g} came.")
    return value


@dataclass(frozen=True)
class DifferenceSample:
    """Moments of the differences; sd is 0 where they differ by no more than rounding."""

    differences: Array
    n: int
    mean: float
    sd: float

    @classmethod
    def of(cls, a: Array, b: Array) -> "DifferenceSample":
        d = a - b
        sd = float(d.std(ddof=1)) if len(d) > 1 else 0.0
        rounding = 8 * np.finfo(np.float64).eps * float(np.abs([a, b]).max())
        return cls(d, len(d), float(d.mean()), sd if sd > rounding else 0.0)

    @property
    def se(self) -> float:
        return self.sd / math.sqrt(self.n)

    def half_width(self, level: float) -> float:
        """Of the two-sided t interval."""
        return t_quantile(self.n - 1, (1 + level) / 2) * self.se


def t_quantile(df: float, probability: float) -> float:
    return float(special.stdtrit(df, probability))


def t_above(df: float, t: float) -> float:
    """Probability that a t variable exceeds `t`."""
    return float(special.stdtr(df, -t))


@dataclass(frozen=True)
class PairedDifference(Statistic):
    """The difference arm − baseline over `n` seeds. None: cannot be had from so few seeds, see `note`."""

    n: int
    mean: float
    sd: float | None
    level: float
    low: float | None
    high: float | None
    p: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    sign_flip_p: float | None
    percent: float | None
    note: str | None


def compare_paired(arm: Values, baseline: Values, level: float = 0.95) -> PairedDifference:
    """Mean difference over seeds with intervals and p-values.

    low, high: mean ± t(n−1) · sd/√n. p: two-sided paired t-test. Both are exact for normal differences: coverage of the
    95 % interval 94–95 % at n = 3, 5 and 10. For strongly skewed ones (exponential) it is 87–90 %.

    bootstrap_low, bootstrap_high: studentised bootstrap, from 5 seeds on. Coverage of the 95 % interval measured over
    4000 studies: normal differences 94–95 % from n = 5 on; exponential 92 % at n = 5, 94 % at n = 10; t with 3 degrees
    of freedom 93–95 %. Its price at n = 5 is one and a half times the t interval's width, at 10 next to none. With
    3 seeds it is infinite, with 4 eleven times as wide, so none is given. (BCa: 68 % at n = 3, 85 % at 5, 90 % at 10.)

    sign_flip_p: share of the 2ⁿ ways to flip the differences' signs whose mean is as large: assumes nothing of their
    distribution but symmetry, and is never below 2/2ⁿ.

    percent: 100 · mean / |mean of the baseline|.

    Identical differences (sd 0 up to rounding) get p = 2/2ⁿ instead of the t-test's 0, and a note.
    """
    require_fraction("level", level)
    a, b = require_finite_pairs(arm, baseline)
    sample = DifferenceSample.of(a, b)
    n, mean = sample.n, sample.mean
    base = abs(float(b.mean()))
    percent = 100 * mean / base if base > 0 else None
    if n == 1:
        return PairedDifference(1, mean, None, level, None, None, None, None, None, None, percent, ANECDOTE)
    half = sample.half_width(level)
    bootstrap = bootstrap_interval(sample, level)
    return PairedDifference(
        n=n,
        mean=mean,
        sd=sample.sd,
        level=level,
        low=mean - half,
        high=mean + half,
        p=difference_p_value(sample),
        bootstrap_low=bootstrap[0] if bootstrap else None,
        bootstrap_high=bootstrap[1] if bootstrap else None,
        sign_flip_p=sign_flip_p_value(sample),
        percent=percent,
        note=IDENTICAL if sample.sd == 0 else None,
    )


def difference_p_value(sample: DifferenceSample) -> float:
    """Two-sided paired t-test; for identical differences the sign test, which is all they can say."""
    if sample.sd == 0:
        return 1.0 if sample.mean == 0 else 2.0 ** (1 - sample.n)
    return min(1.0, 2 * t_above(sample.n - 1, abs(sample.mean) / sample.se))


def sign_flip_p_value(sample: DifferenceSample) -> float:
    """Two-sided; all flips up to `EXACT_FLIPS` seeds, above that as many drawn ones."""
    n = sample.n
    if n <= EXACT_FLIPS:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = np.random.default_rng(n).choice([-1, 1], size=(2**EXACT_FLIPS, n))
        signs[0] = 1  # what was seen is one of them
    means = np.abs(signs @ sample.differences) / n
    return float((means >= abs(sample.mean) * (1 - 1e-12)).mean())


def find_outlier(values: Mapping[Key, float], alpha: float = 0.01) -> tuple[Key, float] | None:
    """The value that lies too far from all others to belong to them, and how many times as wide it makes an interval;
    None where there is none. Each value's externally studentised residual has a t distribution with n − 2 degrees of
    freedom; α is over all values together."""
    n, array = len(values), np.array([*values.values()], dtype=np.float64)
    if n < LEAST_FOR_OUTLIER:
        return None
    found: tuple[float, Key, float] | None = None
    for k, key in enumerate(values):
        others = np.delete(array, k)
        sd = float(others.std(ddof=1))
        if sd == 0:
            continue
        t = abs(float(array[k]) - float(others.mean())) / (sd * math.sqrt(1 + 1 / (n - 1)))
        if 2 * n * t_above(n - 2, t) < alpha and (found is None or t > found[0]):
            found = t, key, float(array.std(ddof=1)) / sd
    return None if found is None else found[1:]


@lru_cache(maxsize=4)
def resample_weights(n: int) -> Array:
    """[RESAMPLES, n]: how often each of n seeds is drawn, divided by n; the same in every process."""
    return np.random.default_rng(n).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n


def bootstrap_interval(sample: DifferenceSample, level: float) -> tuple[float, float] | None:
    """mean − se · quantiles of (resampled mean − mean) / resampled se; None where those are infinite."""
    if sample.n < LEAST_FOR_BOOTSTRAP or sample.sd == 0:
        return None
    weights, e = resample_weights(sample.n), sample.differences - sample.mean
    mean = weights @ e
    se = np.sqrt(np.maximum(weights @ (e * e) - mean * mean, 0) / (sample.n - 1))
    constant = se <= 1e-9 * sample.se
    t = np.where(constant, np.copysign(np.inf, mean), mean / np.where(constant, 1.0, se))
    tail = math.floor(RESAMPLES * (1 - level) / 2)
    low, high = (float(value) for value in np.partition(t, [tail, RESAMPLES - 1 - tail])[[tail, -1 - tail]])
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    return sample.mean - high * sample.se, sample.mean - low * sample.se


def adjust_holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Holm's adjusted p-values: the k-th smallest of m times (m − k + 1), never below the one before it, at most 1.
    Rejecting those below α keeps the chance of any false rejection at α, however they depend."""
    p = np.array([*p_values.values()], dtype=np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError("Holm's correction needs p-values between 0 and 1.")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return dict(zip(p_values, adjusted.tolist(), strict=True))


def alpha_of_each(alpha: float, analyses: int) -> float:
    """The level of each of so many analyses of one study that keeps the chance of any false alarm at `alpha`
    (Bonferroni): one that is judged again after seeds were added has more than one chance to be wrong."""
    require_fraction("alpha", alpha)
    if analyses < 1:
        raise ValueError(f"analyses counts the times the study is judged, at least 1, but {analyses} came.")
    return alpha / analyses


def false_alarm_bound(alpha: float, planned: int, taken: int) -> float:
    """What the chance of a false alarm is at most after `taken` analyses where `planned` were."""
    return alpha * max(1.0, taken / planned)


def name_seeds(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"
