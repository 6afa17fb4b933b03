"""Learning curves compared at equal tokens, equal time and equal loss, on curves whose truth is known."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qklab.study.stats.curves import (
    Curve,
    FirstReached,
    compare_along,
    compare_sample_efficiency,
    find_common_loss,
    find_common_range,
    find_first_reached,
)
from qklab.study.stats.paired import compare_paired

X = np.linspace(0.05e6, 2e6, 40)


def slack(rate: float, studies: int) -> float:
    return 3.3 * math.sqrt(rate * (1 - rate) / studies)


def loss(x: Any, speed: Any = 1.0) -> Any:
    """A power law; an arm of `speed` 1.3 needs 1.3 times fewer tokens to any loss."""
    return 2 + 2 * (np.asarray(speed) * x / 1e5) ** -0.5


def line(*points: tuple[float, float]) -> Curve:
    return Curve.of([x for x, _ in points], [y for _, y in points])


# Known truth


def study(chance: np.random.Generator, n: int, speed: float, noise: float, spread: float) -> tuple[Any, Any]:
    """PairedDifference curves: the level of a seed is shared by both arms, its speed varies by `spread` in the arm."""
    level = 0.03 * chance.standard_normal(n)
    speeds = speed * np.exp(spread * chance.standard_normal(n))
    errors = noise * chance.standard_normal((2, n, len(X)))
    arm = {s: Curve(X, level[s] + loss(X, speeds[s]) + errors[0, s]) for s in range(n)}
    return arm, {s: Curve(X, level[s] + loss(X) + errors[1, s]) for s in range(n)}


def test_a_planted_efficiency_is_recovered_and_its_interval_covers() -> None:
    studies, chance, found = 2000, np.random.default_rng(1), []
    for _ in range(studies):
        arm, baseline = study(chance, 5, 1.3, 0.004, 0.1)
        found.append(compare_sample_efficiency(arm, baseline, float(loss(1e6))))
    assert all(f.censored == 0 for f in found)
    assert np.exp(np.mean([math.log(f.ratio or 0) for f in found])) == pytest.approx(1.3, rel=0.01)
    covered = np.mean([(f.low or 0) <= 1.3 <= (f.high or 0) for f in found])
    assert abs(covered - 0.95) < slack(0.05, studies)
    assert np.mean([(f.p or 1) < 0.05 and (f.ratio or 0) > 1 for f in found]) > 0.95


def test_no_difference_in_efficiency_is_found_at_most_at_alpha() -> None:
    studies, chance = 2000, np.random.default_rng(2)
    target = float(loss(1e6))
    alarms = [
        (compare_sample_efficiency(*study(chance, 4, 1.0, 0.01, 0.1), target).p or 1) < 0.05 for _ in range(studies)
    ]
    assert np.mean(alarms) < 0.05 + slack(0.05, studies)


def test_a_bound_from_censored_runs_is_wrong_at_most_at_alpha() -> None:
    """The baseline ends where about half of its runs reach the loss: the lower limit must still lie below 1.3."""
    studies, chance, limits = 2000, np.random.default_rng(3), []
    for _ in range(studies):
        arm, baseline = study(chance, 5, 1.3, 0.004, 0.1)
        short = {s: Curve(c.x[:20], c.loss[:20]) for s, c in baseline.items()}
        found = compare_sample_efficiency(arm, short, float(loss(1e6)))
        if found.censored:
            assert found.ratio is None
            assert found.at_most is None
            limits.append(found.at_least)
    assert len(limits) > 1500
    assert np.mean([limit is None or limit > 1.3 for limit in limits]) < 0.05 + slack(0.05, studies)
    assert np.median([limit or 0 for limit in limits]) > 1.0


def test_the_difference_along_the_curve_covers_at_every_point() -> None:
    studies, chance, n = 2000, np.random.default_rng(4), 4
    truth, inside = loss(X, 1.3) - loss(X), np.zeros(len(X))
    level = 0.05 * chance.standard_normal((studies, n, 1))
    own = 0.03 * chance.standard_normal((2, studies, n, len(X)))
    for i in range(studies):
        arm = {s: Curve(X, level[i, s] + loss(X, 1.3) + own[0, i, s]) for s in range(n)}
        baseline = {s: Curve(X, level[i, s] + loss(X) + own[1, i, s]) for s in range(n)}
        found = compare_along(arm, baseline, points=len(X))
        inside += (np.array(found.low) <= truth) & (truth <= np.array(found.high))
    assert np.abs(inside / studies - 0.95).max() < slack(0.05, studies) + 0.005  # the worst of 40 points
    assert abs(inside.mean() / studies - 0.95) < 0.005


# Equal tokens, equal time


def test_along_is_the_paired_difference_at_each_point_within_the_range_that_all_curves_span() -> None:
    arm, baseline = study(np.random.default_rng(5), 3, 1.2, 0.01, 0.1)
    baseline[1] = Curve(X[3:30], baseline[1].loss[3:30])
    assert find_common_range(arm, baseline) == (X[3], X[29])
    found = compare_along(arm, baseline, points=11, level=0.9)
    assert (found.x[0], found.x[-1]) == (X[3], X[29])
    for i in (0, 4, 10):
        own, other = ({s: np.interp(found.x[i], c.x, c.loss) for s, c in of.items()} for of in (arm, baseline))
        there = compare_paired(own, other, 0.9)
        assert found.low is not None
        assert found.high is not None
        assert [found.mean[i], found.low[i], found.high[i]] == pytest.approx([there.mean, there.low, there.high])
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["n"] == 3


def test_along_one_seed_has_no_interval_and_apart_nothing() -> None:
    one = compare_along({0: line((0, 2.0), (4, 1.0))}, {0: line((2, 2.0), (6, 1.0))}, points=3)
    assert (one.x, one.mean, one.low, one.high) == ([2, 3, 4], [-0.5, -0.5, -0.5], None, None)
    assert "anecdote" in (one.reason or "")
    apart = compare_along({0: line((0, 2.0), (4, 1.0))}, {0: line((5, 2.0), (6, 1.0))})
    assert (apart.x, apart.mean, apart.low) == ([], [], None)
    assert apart.reason == "the curves have no stretch in common"


# Equal loss


def test_a_loss_is_reached_where_the_running_minimum_first_crosses_it() -> None:
    curve = line((10, 4.0), (20, 3.0), (30, 3.6), (40, 2.0), (50, 5.0))
    assert find_first_reached(curve, 3.5) == FirstReached(15, 15, 15)
    assert find_first_reached(curve, 3.0) == FirstReached(20, 20, 20)
    assert find_first_reached(curve, 2.5).x == 35  # between 3.0, the best until then, and 2.0
    assert find_first_reached(curve, 2.0).x == 40
    assert find_first_reached(curve, 4.0) == FirstReached(10, 10, 10)
    assert find_first_reached(curve, 1.9) == FirstReached(None, 50, None)
    assert find_first_reached(curve, 4.5) == FirstReached(None, 0, 10)
    longer = line((10, 4.0), (20, 3.0), (30, 3.6), (40, 2.0), (50, 5.0), (60, 9.0))
    assert all(
        find_first_reached(longer, t) == find_first_reached(curve, t) for t in (2.0, 2.2, 3.3, 4.4)
    )  # what comes later changes nothing


def test_a_curve_that_diverged_reached_what_it_reached_before() -> None:
    curve = line((10, 4.0), (20, 3.0), (30, math.inf), (40, 1.0))
    assert (curve.diverged, len(curve.x)) == (True, 2)
    assert find_first_reached(curve, 3.5).x == 15
    assert find_first_reached(curve, 2.0) == FirstReached(None, 20, None)
    assert not line((10, 4.0)).diverged


def test_efficiency_by_hand() -> None:
    arm = {0: line((0, 4.0), (10, 2.0)), 1: line((0, 4.0), (8, 2.0))}
    baseline = {0: line((0, 4.0), (20, 2.0)), 1: line((0, 4.0), (64, 2.0))}
    found = compare_sample_efficiency(arm, baseline, 3.0)
    assert [s.ratio for s in found.seeds] == [2.0, 8.0]
    assert found.ratio == pytest.approx(4.0)
    half = 12.706205 * math.log(4) / math.sqrt(2) / math.sqrt(2)
    assert (found.low, found.high) == (pytest.approx(4 * math.exp(-half)), pytest.approx(4 * math.exp(half)))
    assert (found.censored, found.at_least, found.at_most) == (0, None, None)
    assert found.sentence.startswith("To reach a loss of 3 the baseline takes 4 × the arm's tokens (95 % interval")
    assert find_common_loss(arm, baseline) == 2.0
    one = compare_sample_efficiency({0: arm[0]}, {0: baseline[0]}, 3.0, axis="seconds")
    assert (one.ratio, one.low, one.p) == (pytest.approx(2.0), None, None)
    assert one.sentence.endswith("2 × the arm's seconds (one seed is an anecdote; 1 seed).")


def test_efficiency_turns_around_with_its_arms() -> None:
    arm, baseline = study(np.random.default_rng(6), 5, 1.5, 0.004, 0.1)
    there, back = (compare_sample_efficiency(*pair, float(loss(8e5))) for pair in ((arm, baseline), (baseline, arm)))
    assert (back.ratio, back.low) == (pytest.approx(1 / (there.ratio or 0)), pytest.approx(1 / (there.high or 0)))
    assert there.p == pytest.approx(back.p)


def test_a_baseline_that_never_reaches_it_gives_a_lower_bound() -> None:
    arm = {s: line((0, 4.0), (10 + s, 2.0)) for s in range(3)}
    baseline = {s: line((0, 4.0), (20, 3.0)) if s else line((0, 4.0), (30, 2.0)) for s in range(3)}
    found = compare_sample_efficiency(arm, baseline, 2.0)
    assert [(s.ratio, s.low, s.high) for s in found.seeds] == [
        (3.0, 3.0, 3.0),
        (None, 20 / 11, None),
        (None, 20 / 12, None),
    ]
    assert (found.ratio, found.low, found.high, found.p, found.at_most, found.censored) == (
        None,
        None,
        None,
        None,
        None,
        2,
    )
    logs = np.log([3, 20 / 11, 20 / 12])
    assert found.at_least == pytest.approx(math.exp(logs.mean() - 2.919986 * logs.std(ddof=1) / math.sqrt(3)))
    assert "(the baseline never in 2 of 3 seeds): the baseline takes at least" in found.sentence
    assert "(95 % sure)" in found.sentence
    json.dumps(found.to_dict(), allow_nan=False)


def test_an_arm_that_never_reaches_it_gives_an_upper_bound_and_neither_none() -> None:
    good, bad = line((0, 4.0), (10, 2.0)), line((0, 4.0), (20, 3.0))
    worse = compare_sample_efficiency({0: bad, 1: bad}, {0: good, 1: line((0, 4.0), (12, 2.0))}, 2.0)
    assert [s.high for s in worse.seeds] == [0.5, 0.6]
    assert worse.at_least is None
    assert worse.at_most is not None
    assert worse.at_most > math.sqrt(0.5 * 0.6)
    assert "the arm never in 2 of 2 seeds" in worse.sentence
    assert "at most" in worse.sentence
    neither = compare_sample_efficiency({0: bad, 1: good}, {0: bad, 1: good}, 2.0)
    assert (neither.at_least, neither.at_most, neither.censored) == (None, None, 1)
    assert (neither.seeds[0].low, neither.seeds[0].high) == (0.0, None)
    assert neither.sentence.endswith("no bound on the ratio follows.")
    early = compare_sample_efficiency({0: line((5, 1.5), (10, 1.0))}, {0: line((0, 4.0), (10, 2.0))}, 2.0)
    assert (early.seeds[0].low, early.seeds[0].high, early.ratio) == (2.0, None, None)
    assert "1 at or before the first measurement" in early.sentence


# What is refused


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Curve.of([1, 2], [1.0]), "as many losses as points, but 1 and 2"),
        (lambda: Curve.of([1, 1], [1.0, 2.0]), "strictly rising"),
        (lambda: Curve.of([2, 1], [1.0, 2.0]), "strictly rising"),
        (lambda: Curve.of([1, math.inf], [1.0, 2.0]), "must be finite"),
        (lambda: Curve.of([-1, 2], [1.0, 2.0]), "not negative"),
        (lambda: Curve.of([], []), "at least one finite loss"),
        (lambda: Curve.of([1], ["nan"]), "counted as diverged"),
        (lambda: compare_along({0: line((1, 1.0))}, {1: line((1, 1.0))}), "but 0, 1 came in one only"),
        (lambda: compare_along({}, {}), "nothing to compare"),
        (lambda: find_common_loss({0: line((1, 1.0))}, {}), "every seed in both arms"),
        (lambda: find_first_reached(line((1, 1.0)), math.nan), "finite number"),
        (lambda: compare_sample_efficiency({0: line((1, 1.0))}, {0: line((1, 1.0))}, 1.0, level=2), "level must lie"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        call()
    assert str(refused.value).endswith(".")
