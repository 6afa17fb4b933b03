"""Effects over sizes and corpora: slopes, predictions, interactions and speed-ups, with planted truths."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qklab.study.stats import scaling
from qklab.study.stats.groups import average_groups, average_over_tasks, estimate_contrast, interaction_p_value
from qklab.study.stats.paired import compare_paired
from qklab.study.stats.scaling import (
    SizeMeasurement,
    estimate_speed_ups,
    fit_compute_curve,
    fit_trend,
    predict_effect,
    slope_weights,
)

STUDIES = 2000
SLACK = 3 * (0.05 * 0.95 / STUDIES) ** 0.5  # three standard errors of a rate of 5 %
SIZES = np.array([1.6e6, 6.8e6, 17e6, 51e6])
SPREADS = np.array([0.02, 0.01, 0.005, 0.008])


def draw(chance: np.random.Generator, means: np.ndarray, n: int) -> list[np.ndarray]:
    return [mean + sd * chance.standard_normal(n) for mean, sd in zip(means, SPREADS, strict=False)]


@pytest.mark.parametrize("n", [3, 6])
def test_a_planted_slope_is_covered(n: int) -> None:
    chance, truth = np.random.default_rng(n), 0.02 * np.log10(SIZES / SIZES[0])
    found = [estimate_contrast(draw(chance, truth, n), slope_weights(SIZES)) for _ in range(STUDIES)]
    assert np.mean([each.low <= 0.02 <= each.high for each in found]) > 0.94 - SLACK
    assert np.mean([each.p < 0.05 for each in found]) > 0.35


@pytest.mark.parametrize(("n", "places"), [(3, 2), (5, 4)])
def test_interactions_are_found_and_seldom_where_there_are_none(n: int, places: int) -> None:
    chance = np.random.default_rng(n)
    same, other = np.full(places, -0.05), -0.05 + np.array([0.08, *[0.0] * (places - 1)])

    def find_rate(means: np.ndarray) -> float:
        p_values = [
            interaction_p_value([average_groups([group]) for group in draw(chance, means, n)]) for _ in range(STUDIES)
        ]
        return float(np.mean(np.array(p_values) < 0.05))

    assert find_rate(same) < 0.06 + SLACK
    assert find_rate(other) > 0.8


@pytest.mark.parametrize("spreads", [[1, 1, 1, 1, 1], [1, 2, 4, 8, 16]])
def test_a_mean_over_tasks_that_share_their_seeds_is_covered(spreads: list[float]) -> None:
    chance, covered, independent = np.random.default_rng(5), [], []
    for _ in range(STUDIES):
        shared, own, base = chance.standard_normal((1, 3)), chance.standard_normal((5, 3)), chance.random((5, 3))
        differences = np.array(spreads)[:, None] * (shared + own)  # correlated by 0.5
        tasks = [
            {"arm": dict(enumerate(b + d)), "base": dict(enumerate(b))} for b, d in zip(base, differences, strict=True)
        ]
        means = average_over_tasks(tasks)
        found, wrong = compare_paired(means["arm"], means["base"]), average_groups([*differences])
        assert found.mean == pytest.approx(differences.mean())
        assert found.low is not None
        assert found.high is not None
        covered.append(found.low <= 0 <= found.high)
        independent.append(wrong.low <= 0 <= wrong.high)
    assert abs(np.mean(covered) - 0.95) < SLACK
    assert np.mean(independent) < 0.93


def test_a_mean_over_tasks_is_of_seeds_that_every_task_has() -> None:
    one, other = {"a": {0: 1.0, 1: 2.0}, "b": {0: 3.0, 1: 4.0}}, {"a": {1: 4.0, 2: 0.0}, "b": {1: -math.inf, 2: 0.0}}
    assert average_over_tasks([one, other]) == {"a": {1: 3.0}, "b": {1: -math.inf}}
    for tasks, match in (
        ([], "one task"),
        ([one, {"a": {0: 1.0}}], "same arms"),
        ([one, {"a": {5: 1}, "b": {}}], "seed"),
    ):
        with pytest.raises(ValueError, match=match):
            average_over_tasks(tasks)


def test_two_places_are_welchs_t_test() -> None:
    from scipy.stats import ttest_ind

    a, b = [0.1, 0.3, 0.2, 0.5], [0.9, 0.4, 0.7]
    expected: Any = ttest_ind(a, b, equal_var=False)
    found = estimate_contrast([a, b], [1, -1])
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx([*expected.confidence_interval()])
    assert interaction_p_value([average_groups([a]), average_groups([b])]) == pytest.approx(expected.pvalue)


def test_three_places_are_welchs_analysis_of_variance() -> None:
    places = [[0.1, 0.3, 0.2, 0.5], [0.9, 0.4, 0.7], [0.2, 0.1, 0.4, 0.3, 0.2]]
    found = interaction_p_value([average_groups([place]) for place in places])
    assert found == pytest.approx(0.1372720880407137)  # scipy's f_oneway(…, equal_var=False)


def test_seeds_that_agree_to_the_last_digit_say_no_more_than_their_signs() -> None:
    found = estimate_contrast([[0.1, 0.1], [0.1, 0.1]], [0.5, 0.5])
    assert found.p == 0.5
    assert [found.exceeds(0.0), found.exceeds(0.2), found.falls_below(0.2), found.falls_below(0.0)] == [
        0.25,
        1,
        0.25,
        1,
    ]
    assert interaction_p_value([average_groups([[0.1, 0.1]]), average_groups([[0.2, 0.2]])]) == 1.0


@pytest.mark.parametrize("groups", [[[1.0], [2.0, 3.0]], [[math.nan, 1.0], [2.0, 3.0]]])
def test_groups_without_a_spread_are_refused(groups: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least two finite differences"):
        estimate_contrast(groups, [1.0, 1.0])


# Sizes that were held out


@pytest.mark.parametrize(("n", "slope"), [(3, 0.0), (6, 0.02)])
def test_a_held_out_size_lies_in_its_prediction_interval(n: int, slope: float) -> None:
    chance, truth = np.random.default_rng(n), slope * np.log10(SIZES / SIZES[0])
    spread = 0.01

    def hold_out() -> bool:
        groups = [mean + spread * chance.standard_normal(n) for mean in truth]
        return fit_trend(SIZES, groups, 2e8).held_out.holds

    assert 0.93 < np.mean([hold_out() for _ in range(STUDIES)]) < 0.985


def test_a_bend_that_the_sizes_show_widens_what_is_foretold() -> None:
    seeds = 0.001 * np.array([-1.0, 0.0, 1.0])
    straight, bent = ([mean + seeds for mean in means] for means in ([-0.03, -0.02, -0.01], [-0.03, -0.005, -0.01]))
    sizes = [1e6, 1e7, 1e8]
    narrow, wide = (predict_effect(sizes, groups, 1e9, 3) for groups in (straight, bent))
    assert narrow.estimate == pytest.approx(0.0)
    assert wide.high - wide.low > 5 * (narrow.high - narrow.low)
    certain = predict_effect(sizes, straight, 1e9, 10**9)  # of so many new seeds only the line's doubt is left
    assert narrow.se**2 - certain.se**2 == pytest.approx(0.001**2 / 3, rel=1e-3)


def test_a_trend_needs_three_sizes() -> None:
    with pytest.raises(ValueError, match="needs 3 sizes at least, but 2 came"):
        fit_trend([1e6, 1e7], [[0.0, 1.0], [0.0, 1.0]], 1e8)


# Speed-up

FLOPS = 60 * SIZES**2
FLOOR, EXPONENT = 1.0, 0.15


def true_loss(flops: np.ndarray | float) -> np.ndarray:
    return FLOOR + 3.0 * (np.asarray(flops) / FLOPS[0]) ** -EXPONENT


@pytest.mark.parametrize("count", [3, 4])
def test_a_curve_finds_floor_and_exponent(count: int) -> None:
    curve = fit_compute_curve(FLOPS[:count], true_loss(FLOPS[:count]))
    assert float(curve.floor) == pytest.approx(FLOOR, abs=0.01)
    assert float(curve.exponent) == pytest.approx(EXPONENT, rel=0.01)
    assert curve.predict(4 * FLOPS[-1]) == pytest.approx(true_loss(4 * FLOPS[-1]), rel=2e-3)


def measure(
    chance: np.random.Generator, n: int, speed_up: float, spread: float, loss: Callable[..., np.ndarray] = true_loss
) -> list[SizeMeasurement]:
    """Three sizes at which the arm does as well as the baseline with `speed_up` times the compute; a third faster."""
    found = []
    for size, flops in zip("abc", FLOPS[:3], strict=True):
        base = loss(flops) + 2 * spread * chance.standard_normal(n)
        arm = base + loss(speed_up * flops) - loss(flops) + spread * chance.standard_normal(n)
        found.append(SizeMeasurement(size, flops, base, 1.1 * flops, arm, np.full(n, 4 / 3)))
    return found


def test_a_planted_speed_up_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "RESAMPLED", 80)  # enough to see it, in a third of the time
    chance, n = np.random.default_rng(0), 4
    found = [estimate_speed_ups(measure(chance, n, 1.3, 0.02)) for _ in range(STUDIES)]
    for size in range(3):
        covered = [each[size].flops[1] <= 1.3 / 1.1 <= (each[size].flops[2] or math.inf) for each in found]
        assert 0.93 < np.mean(covered) < 0.985


def test_a_speed_up_is_in_compute_and_in_time() -> None:
    found = estimate_speed_ups(measure(np.random.default_rng(0), 3, 1.5, 1e-5))
    for each in found:
        assert each.flops[0] == pytest.approx(1.5 / 1.1, rel=0.02)
        assert each.seconds[0] == pytest.approx(1.5 * 4 / 3, rel=0.02)
        assert each.flops[1] < each.flops[0] < (each.flops[2] or 0)
    assert [each.beyond for each in found] == [False, False, True]


def test_a_loss_below_the_curve_has_no_upper_limit() -> None:
    sizes = measure(np.random.default_rng(0), 3, 1.0, 0.001)
    lower = [replace(size, arm=size.baseline - 2.5) for size in sizes]
    assert estimate_speed_ups(lower)[2].flops[2] is None


def test_no_speed_up_without_a_curve() -> None:
    sizes = measure(np.random.default_rng(0), 3, 1.0, 0.001)
    with pytest.raises(ValueError, match="needs 3 sizes, but 2 came"):
        estimate_speed_ups(sizes[:2])
    rising = measure(np.random.default_rng(0), 3, 1.0, 0.001, lambda flops: 10 - true_loss(flops))
    with pytest.raises(ValueError, match="does not fall with compute"):
        estimate_speed_ups(rising)
