"""Sizes: how an effect changes with the size of the model, and how much more compute the baseline would need to do as
well as an arm.

Everything is over log10(parameters) or log(FLOPs), with seeds as the unit of evidence; three sizes at least.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qklab.study.stats.groups import Contrast, Groups, estimate_contrast, sample_groups
from qklab.study.stats.paired import Array, Statistic, t_above, t_quantile

LEAST_SIZES = 3
RESAMPLED = 250
FLOORS = np.linspace(0.0, 0.98, 16)  # of the lowest loss: what no compute removes
MOST = 1000.0  # a speed-up above it is no number: the curve hardly falls there


def slope_weights(parameters: Sequence[float] | Array, shares: Sequence[float] | Array | None = None) -> Array:
    """What each group's mean counts for in the least-squares slope over log10(parameters); `shares`: how many groups
    there are of its size, so that every size counts once."""
    x, w = np.log10(parameters), 1 / np.asarray(np.ones(len(parameters)) if shares is None else shares, float)
    x = x - (w * x).sum() / w.sum()
    return w * x / (w * x * x).sum()


# The effect against size


@dataclass(frozen=True)
class HeldOutSize(Statistic):
    """The largest size, foretold from the others: low, high is the prediction interval for what was then seen."""

    predicted: float
    low: float
    high: float
    seen: float

    @property
    def holds(self) -> bool:
        return self.low <= self.seen <= self.high


@dataclass(frozen=True)
class SizeTrend(Statistic):
    """The line through the effects: its slope per tenfold parameters, what it foretells of the largest size from the
    others, and of a size `parameters` that was not run."""

    slope: Contrast
    held_out: HeldOutSize
    parameters: float
    further: Contrast


def fit_trend(parameters: Sequence[float] | Array, groups: Groups, further: float, level: float = 0.95) -> SizeTrend:
    """The straight line of the effect over log10(parameters), every size counting the same.

    The slope's interval is that of a contrast: it holds for the line that is closest to the true effects, whether or
    not they lie on it. Measured coverage of 95 %: see `estimate_contrast`.
    """
    if len(groups) < LEAST_SIZES:
        raise ValueError(f"A trend needs {LEAST_SIZES} sizes at least, but {len(groups)} came.")
    order = np.argsort(parameters)
    sizes, samples = np.asarray(parameters, float)[order], [np.asarray(groups[i], float) for i in order]
    foretold = predict_effect(sizes[:-1], samples[:-1], float(sizes[-1]), len(samples[-1]), level)
    held_out = HeldOutSize(foretold.estimate, foretold.low, foretold.high, float(samples[-1].mean()))
    seeds = min(len(sample) for sample in samples)
    return SizeTrend(
        estimate_contrast(samples, slope_weights(sizes), level),
        held_out,
        further,
        predict_effect(sizes, samples, further, seeds, level),
    )


def predict_effect(
    parameters: Sequence[float] | Array, groups: Groups, at: float, seeds: int, level: float = 0.95
) -> Contrast:
    """What the mean of so many seeds is expected to be at a size that was not measured, with a prediction interval.

    Its spread is that of the line and of the new seeds, widened by Birge's ratio where the sizes scatter about the line
    more than their seeds explain. That is all the doubt the data can raise: a trend that bends beyond them is not seen.
    Coverage of 95 % over 2,000 studies, the largest of three or four sizes held out: 95–99 % where the truth is a line,
    93–98 % where the effect halves with every tenfold size; where it falls to a tenth, 69–94 %: no line does that.
    """
    samples, x = sample_groups(groups), np.log10(parameters)
    middle, slopes = x.mean(), slope_weights(parameters)
    weights = 1 / len(x) + (math.log10(at) - middle) * slopes
    means = np.array([sample.mean for sample in samples])
    spreads, df = np.array([sample.sd**2 for sample in samples]), np.array([sample.n - 1 for sample in samples])
    scatter = (means - means.mean() - (x - middle) * (slopes @ means)) ** 2 / np.maximum(spreads / (df + 1), 1e-24)
    birge = max(1.0, scatter.sum() / (len(x) - 2)) if len(x) > 2 else 1.0
    parts = spreads * (
        weights**2 / (df + 1) + 1 / len(x) / seeds
    )  # of the line, and of seeds like those that were seen
    estimate, se = float(weights @ means), math.sqrt(birge * parts.sum())
    freedom = float(parts.sum() ** 2 / (parts**2 / df).sum()) if se else float(df.sum())
    half = t_quantile(freedom, (1 + level) / 2) * se
    p = min(1.0, 2 * t_above(freedom, abs(estimate) / se)) if se else 1.0
    return Contrast(estimate, se, freedom, level, estimate - half, estimate + half, p)


# Loss against compute


@dataclass(frozen=True)
class SizeMeasurement:
    """What one size has to say of an arm: FLOPs of a run, and by seed the loss of both arms and how many times the
    baseline's throughput the arm has; of a size that has only the baseline no more than that."""

    size: str
    baseline_flops: float
    baseline: Array
    arm_flops: float | None = None
    arm: Array | None = None
    speed: Array | None = None


@dataclass(frozen=True)
class ComputeCurve:
    """loss = floor + scale · FLOPs^(−exponent); arrays where several are fitted at once."""

    floor: Array
    scale: Array
    exponent: Array

    def predict(self, flops: Array | float) -> Array:
        return self.floor + self.scale * np.asarray(flops) ** -self.exponent


def fit_compute_curve(flops: Array, losses: Array) -> ComputeCurve:
    """Least squares of floor + scale · FLOPs^(−exponent); losses [..., sizes]. Two sizes get a floor of 0.

    For each floor the rest is a straight line of log(loss − floor), weighted so that errors count in the loss; the
    floor is found on a grid that is made finer twice.
    """
    x, lowest = np.log(flops), losses.min(-1, keepdims=True)

    def fit(floors: Array) -> tuple[Array, Array, Array]:  # [..., floors] → the best of them, its slope and its height
        left = losses[..., None, :] - floors[..., None]  # [..., floors, sizes]
        y, w = np.log(left), left * left
        total = w.sum(-1, keepdims=True)
        dx, dy = x - (w * x).sum(-1, keepdims=True) / total, y - (w * y).sum(-1, keepdims=True) / total
        slope = (w * dx * dy).sum(-1, keepdims=True) / (w * dx * dx).sum(-1, keepdims=True)
        errors = (w * (dy - slope * dx) ** 2).sum(-1) + 1e-15 * floors**2  # of floors that fit alike the lowest
        best, height = errors.argmin(-1)[..., None], (w * (y - slope * x)).sum(-1) / total[..., 0]
        floor, slope, height = (np.take_along_axis(each, best, -1) for each in (floors, slope[..., 0], height))
        return floor, slope, height

    floors, step = FLOORS * lowest, FLOORS[1] * lowest
    for _ in range(2):
        around = fit(floors)[0] + step * np.linspace(-1, 1, len(FLOORS))
        floors, step = np.clip(around, 0.0, FLOORS[-1] * lowest), step * 2 / (len(FLOORS) - 1)
    floor, slope, height = (each[..., 0] for each in fit(floors))
    return ComputeCurve(floor, np.exp(height), -slope)


@dataclass(frozen=True)
class SpeedUp(Statistic):
    """How many times the arm's compute, and its time, the baseline needs to reach the arm's loss; above 1: the arm is
    faster. high None: no upper limit, since the loss may lie below all that the curve reaches. `beyond`: more compute
    than the largest run of the baseline had."""

    size: str
    level: float
    flops: tuple[float, float, float | None]
    seconds: tuple[float, float, float | None]
    beyond: bool


def estimate_speed_ups(measured: Sequence[SizeMeasurement], level: float = 0.95) -> list[SpeedUp]:
    """The effective speed-up of an arm at every size, from the baseline's own curve of loss against compute.

    At a size the arm's loss is the baseline's plus the paired difference, so that the baseline itself has a speed-up of
    1 there, on the curve or not. Time is compute times the throughput measured at that size. Intervals: seeds are drawn
    again within each size, the same for both arms; the spread of the log speed-up over 250 such studies is corrected
    by √(n/(n−1)) and counted with t(n−1). Coverage of 95 % over 2,000 studies each, planted speed-ups of 0.8, 1.3 and
    2, at every one of three or four sizes, in FLOPs and in time: 95–99 % with 3 seeds, 95–98 % with 5, 95–97 % with 10.
    """
    if len(measured) < LEAST_SIZES:
        raise ValueError(f"A curve of loss against compute needs {LEAST_SIZES} sizes, but {len(measured)} came.")
    flops = np.array([size.baseline_flops for size in measured])
    means = np.array([size.baseline.mean() for size in measured])
    chance = np.random.default_rng(0)
    weights = [
        np.vstack([np.full(n, 1 / n), chance.multinomial(n, np.full(n, 1 / n), RESAMPLED) / n])
        for n in (len(size.baseline) for size in measured)
    ]  # the first is what was seen
    losses = np.stack([w @ size.baseline for w, size in zip(weights, measured, strict=True)], -1)
    curve = fit_compute_curve(flops, losses)
    if not curve.exponent[0] > 0 or means[flops.argmax()] >= means[flops.argmin()]:
        raise ValueError("The baseline's loss does not fall with compute, so no compute makes up for a difference.")
    found = [find_speed_up(size, w, curve, flops.max(), level) for size, w in zip(measured, weights, strict=True)]
    return [each for each in found if each is not None]


def hold_out_largest(flops: Array, losses: Array) -> float:
    """The loss of the run with the most compute, as the curve through the others has it."""
    order = np.argsort(flops)
    return float(fit_compute_curve(flops[order][:-1], losses[order][:-1]).predict(flops[order][-1]))


def find_speed_up(
    size: SizeMeasurement, weights: Array, curve: ComputeCurve, most: float, level: float
) -> SpeedUp | None:
    if size.arm is None or size.arm_flops is None or size.speed is None:
        return None
    difference = weights @ (size.arm - size.baseline)
    falling = curve.scale * size.baseline_flops**-curve.exponent  # what is left above the floor
    with np.errstate(invalid="ignore", divide="ignore"):
        gained = -np.log1p(np.maximum(difference / falling, -1.0)) / curve.exponent
    gained = np.clip(np.where(curve.exponent > 0, gained, np.inf), -math.log(MOST), math.log(MOST))
    seconds = weights @ np.log(size.speed)
    in_flops = gained + math.log(size.baseline_flops / size.arm_flops)
    return SpeedUp(
        size.size,
        level,
        find_ratio_interval(in_flops, gained, len(size.arm), level),
        find_ratio_interval(gained + seconds, gained, len(size.arm), level),
        bool(size.baseline_flops * math.exp(gained[0]) > most * (1 + 1e-9)),
    )


def find_ratio_interval(logs: Array, gained: Array, seeds: int, level: float) -> tuple[float, float, float | None]:
    """exp of the first and of its interval, by the spread of the others; without an upper end where too many of them
    are at the limit."""
    half = t_quantile(seeds - 1, (1 + level) / 2) * float(logs[1:].std()) * math.sqrt(seeds / (seeds - 1))
    unlimited = bool((gained[1:] >= math.log(MOST)).mean() > (1 - level) / 2)
    middle = float(logs[0])
    return math.exp(middle), math.exp(middle - half), None if unlimited else math.exp(middle + half)
