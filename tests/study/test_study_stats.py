"""The statistics against known truth: planted effects and noise, thousands of synthetic studies, and closed forms."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from qklab.study.metrics import Metric, find_metric
from qklab.study.stats.equivalence import assess_equivalence
from qklab.study.stats.paired import (
    ANECDOTE,
    IDENTICAL,
    DifferenceSample,
    adjust_holm,
    alpha_of_each,
    bootstrap_interval,
    compare_paired,
    false_alarm_bound,
    find_outlier,
    separate_diverged,
)
from qklab.study.stats.power import chance_of_settling, plan_more_seeds
from qklab.study.verdict import judge_arms

Array = NDArray[np.float64]
NAN = math.nan
stats: Any = scipy_stats  # whose own types pyright cannot infer


def slack(rate: float, studies: int) -> float:
    """What chance alone may add to a rate: a simulation fails by accident once in a thousand times at most."""
    return 3.3 * math.sqrt(rate * (1 - rate) / studies)


def pairs(seed: int, studies: int, n: int, effect: float = 0.0, sd: float = 1.0, shared: float = 5.0) -> Any:
    """[studies, n] of arm and baseline: a large part shared by seed, differences normal with this effect and sd."""
    chance = np.random.default_rng(seed)
    common = 3 + shared * chance.standard_normal((studies, n))
    own = sd / math.sqrt(2) * chance.standard_normal((2, studies, n))
    return zip(common + own[0] + effect, common + own[1], strict=True)


def seeded(values: Any) -> dict[int, float]:
    return dict(enumerate(values))


def sample(differences: list[float]) -> DifferenceSample:
    d = np.array(differences)
    return DifferenceSample.of(d, np.zeros_like(d))


# Known truth: nothing where there is nothing


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_no_effect_is_found_as_often_as_alpha_says(n: int) -> None:
    studies = 3000
    rate = np.mean([(compare_paired(a, b).p or 0) < 0.05 for a, b in pairs(n, studies, n)])
    assert abs(rate - 0.05) < slack(0.05, studies)


def four_arms(seed: int, studies: int, n: int, effect: float = 0.0) -> Any:
    """Four arms and the one baseline they share."""
    chance = np.random.default_rng(seed)
    for values in 3 + chance.standard_normal((studies, 1, n)) + 0.05 * chance.standard_normal((studies, 5, n)):
        yield {f"arm {i}": seeded(values[i] + effect) for i in range(4)}, seeded(values[4])


def test_four_arms_sharing_a_baseline_are_falsely_told_apart_at_most_at_alpha() -> None:
    studies = false = uncorrected = 0
    for arms, baseline in four_arms(1, 2000, 5):
        found = judge_arms(arms, baseline, 1e-6, cap=0).values()
        studies += 1
        false += any(v.verdict in ("better", "worse") for v in found)
        uncorrected += any(v.paired is not None and (v.paired.p or 0) < 0.05 for v in found)
    assert false / studies < 0.05 + slack(0.05, studies)
    assert uncorrected / studies > 0.1  # what Holm's correction is for


@pytest.mark.parametrize("sign", [-1, 1])
def test_equivalence_is_falsely_claimed_at_the_margin_at_most_at_alpha(sign: int) -> None:
    studies = 3000
    claims = [assess_equivalence(a, b, 2.0).equivalent for a, b in pairs(2, studies, 8, effect=2.0 * sign)]
    assert abs(np.mean(claims) - 0.05) < slack(0.05, studies)


def test_what_is_worse_is_called_better_at_most_at_half_alpha() -> None:
    studies = 3000
    words = [
        judge_arms({"arm": a}, b, 1e-9, cap=0)["arm"].verdict for a, b in pairs(3, studies, 5, effect=0.02, sd=1.0)
    ]
    assert words.count("better") / studies < 0.025 + slack(0.025, studies)
    clear = [judge_arms({"arm": a}, b, 1e-9, cap=0)["arm"].verdict for a, b in pairs(4, 2000, 5, effect=2.0)]
    assert clear.count("better") == 0
    assert clear.count("worse") > 1500


def test_judging_twice_costs_what_the_docstring_says_and_analyses_pay_for_it() -> None:
    studies, false = 2500, {1: 0, 2: 0}
    for a, b in pairs(6, studies, 10):
        for analyses in false:
            first = judge_arms({"arm": a[:5]}, b[:5], 1e-9, cap=0, analyses=analyses)["arm"].verdict
            last = (
                judge_arms({"arm": a}, b, 1e-9, cap=0, analyses=analyses)["arm"].verdict if first == "open" else first
            )
            false[analyses] += last != "open"
    assert abs(false[1] / studies - 0.08) < 0.02
    assert false[2] / studies < 0.05 + slack(0.05, studies)
    assert alpha_of_each(0.05, 2) == 0.025
    assert [false_alarm_bound(0.05, 2, taken) for taken in (1, 2, 3)] == pytest.approx([0.05, 0.05, 0.075])


# Known truth: what was planted is found


def covering(differences: Array, truth: float = 0.0) -> tuple[float, float | None]:
    """Coverage of the t and the bootstrap interval over rows of differences."""
    found = [compare_paired(d, np.zeros_like(d)) for d in differences]
    t = np.mean([f.low is not None and f.high is not None and f.low <= truth <= f.high for f in found])
    if found[0].bootstrap_low is None:
        assert all(f.bootstrap_low is None and f.bootstrap_high is None for f in found)
        return float(t), None
    ends = [(f.bootstrap_low, f.bootstrap_high) for f in found]
    return float(t), float(np.mean([lo is not None and hi is not None and lo <= truth <= hi for lo, hi in ends]))


@pytest.mark.parametrize("n", [3, 5, 10])
def test_intervals_cover_as_the_docstring_states(n: int) -> None:
    studies, chance = 3000, np.random.default_rng(n)
    t, bootstrap = covering(chance.standard_normal((studies, n)) + 7, 7)
    assert abs(t - 0.95) < slack(0.05, studies)
    if n < 5:
        assert bootstrap is None
    else:
        assert bootstrap is not None
        assert abs(bootstrap - 0.945) < 0.005 + slack(0.05, studies)


@pytest.mark.parametrize(("n", "stated"), [(5, 0.92), (10, 0.94)])
def test_the_bootstrap_interval_stands_skew_better_than_t(n: int, stated: float) -> None:
    studies, chance = 2000, np.random.default_rng(n)
    t, bootstrap = covering(chance.exponential(size=(studies, n)), 1)
    assert bootstrap is not None
    assert abs(bootstrap - stated) < 0.005 + slack(1 - stated, studies)
    assert 0.87 - slack(0.13, studies) < t < 0.90 + slack(0.1, studies)


def test_the_seeds_that_settle_a_case_do_so_at_least_as_often_as_promised() -> None:
    chance, kept, plans = np.random.default_rng(9), [], 0
    for _ in range(600):
        sd = math.exp(chance.uniform(math.log(0.05), math.log(20)))
        d = chance.uniform(-6, 6) * max(1, sd) + sd * chance.standard_normal(103)
        if judge_arms({"arm": d[:3]}, np.zeros(3), 1.0, cap=0)["arm"].verdict != "open":
            continue
        plan, plans = plan_more_seeds(d[:3], np.zeros(3), 1.0), plans + 1
        if plan.total is not None:
            kept.append(judge_arms({"arm": d[: plan.total]}, np.zeros(plan.total), 1.0, cap=0)["arm"].verdict != "open")
    assert plans > 100
    assert len(kept) > 0.75 * plans
    assert 0.8 - slack(0.8, len(kept)) < np.mean(kept) < 0.99


@pytest.mark.parametrize(("more", "margin", "comparisons"), [(1, 0.6, 1), (5, 0.3, 4), (12, 0.3, 1)])
def test_the_chance_to_settle_is_that_of_seeds_drawn_one_by_one(more: int, margin: float, comparisons: int) -> None:
    start, worlds, chance = np.array([0.3, -0.2, 0.5, 0.35]), 20_000, np.random.default_rng(10)
    sd = np.sqrt(3 * start.var(ddof=1) / chance.chisquare(3, worlds))
    mean = chance.normal(start.mean(), sd / 2)
    future = chance.normal(mean[:, None], sd[:, None], (worlds, more))
    d = np.hstack([np.tile(start, (worlds, 1)), future])
    differs = stats.ttest_1samp(d, 0, axis=1).pvalue < 0.05 / comparisons
    above = stats.ttest_1samp(d, -margin, axis=1, alternative="greater").pvalue < 0.05
    below = stats.ttest_1samp(d, margin, axis=1, alternative="less").pvalue < 0.05
    known = np.mean(differs | (above & below))
    assert 0.03 < known < 0.97
    assert chance_of_settling(sample(start.tolist()), more, margin, 0.05, comparisons) == pytest.approx(known, abs=0.03)


# Closed forms and hand values


def test_paired_by_hand() -> None:
    found = compare_paired({5: 4.0, 6: 6.0, 7: 8.0, 8: 10.0}, {8: 6.0, 7: 5.0, 6: 4.0, 5: 3.0})  # 1, 2, 3, 4
    assert (found.n, found.mean) == (4, 2.5)
    assert found.sd == pytest.approx(math.sqrt(5 / 3))
    half = 3.182446305 * math.sqrt(5 / 12)
    assert (found.low, found.high) == (pytest.approx(2.5 - half), pytest.approx(2.5 + half))
    assert found.p == pytest.approx(0.030466, rel=1e-4)
    assert found.percent == pytest.approx(100 * 2.5 / 4.5)
    assert found.note is None


@pytest.mark.parametrize("n", [2, 3, 7, 12])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_paired_agrees_with_scipy(n: int, level: float) -> None:
    a, b = next(pairs(n, 1, n, effect=0.5))
    found, known = compare_paired(a, b, level), stats.ttest_rel(a, b)
    interval = known.confidence_interval(level)
    assert found.p == pytest.approx(known.pvalue, rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_the_bootstrap_interval_is_that_of_all_resamples() -> None:
    d = np.array([0.3, -0.1, 0.8, 0.45, 0.2])
    rows = d[np.array(np.meshgrid(*[range(5)] * 5)).reshape(5, -1).T]  # all 5⁵
    sd = rows.std(1, ddof=1)
    constant = sd < 1e-12
    t = np.copysign(np.inf, rows.mean(1) - d.mean())
    t[~constant] = (rows.mean(1) - d.mean())[~constant] / (sd[~constant] / math.sqrt(5))
    low, high = np.quantile(t, [0.025, 0.975], method="inverted_cdf")
    se = d.std(ddof=1) / math.sqrt(5)
    found = bootstrap_interval(sample(d.tolist()), 0.95)
    assert found is not None
    assert found[0] == pytest.approx(d.mean() - high * se, abs=0.15 * se * high)
    assert found[1] == pytest.approx(d.mean() - low * se, abs=0.15 * se * -low)


def test_the_bootstrap_interval_agrees_with_scipy_for_many_seeds() -> None:
    d = np.random.default_rng(3).exponential(size=80)
    found = compare_paired(d, np.zeros(80))
    known = stats.bootstrap((d,), np.mean, method="BCa", rng=np.random.default_rng(0)).confidence_interval
    width = known.high - known.low
    assert found.bootstrap_low == pytest.approx(known.low, abs=0.08 * width)
    assert found.bootstrap_high == pytest.approx(known.high, abs=0.12 * width)
    assert compare_paired(d, np.zeros(80)) == found  # the same in every process


def test_there_is_no_bootstrap_interval_where_resamples_are_mostly_constant() -> None:
    found = compare_paired([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 6)
    assert (found.bootstrap_low, found.bootstrap_high) == (None, None)
    assert found.low is not None
    four = compare_paired([0.3, -0.1, 0.8, 0.45], [0.0] * 4)  # where it would be eleven times as wide as that of t
    assert (four.bootstrap_low, four.bootstrap_high) == (None, None)


def test_holm_by_hand() -> None:
    found = adjust_holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert adjust_holm({"a": 0.02, "b": 0.011}) == pytest.approx({"a": 0.022, "b": 0.022})
    assert adjust_holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert adjust_holm({"a": 0.3}) == {"a": 0.3}
    with pytest.raises(ValueError, match="between 0 and 1"):
        adjust_holm({"a": 0.1, "b": NAN})


def test_equivalence_is_two_one_sided_tests() -> None:
    a, b = next(pairs(11, 1, 9, effect=0.3))
    found = assess_equivalence(a, b, 1.1)
    lower = stats.ttest_1samp(a - b, -1.1, alternative="greater").pvalue
    upper = stats.ttest_1samp(a - b, 1.1, alternative="less").pvalue
    assert found.p == pytest.approx(max(lower, upper))
    interval = stats.ttest_rel(a, b).confidence_interval(0.9)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found.smallest_margin == pytest.approx(max(abs(interval.low), abs(interval.high)))
    assert assess_equivalence(a, b, (found.smallest_margin or 0) * 1.0001).equivalent
    assert not assess_equivalence(a, b, (found.smallest_margin or 0) * 0.9999).equivalent
    assert assess_equivalence(b, a, 1.1).p == pytest.approx(found.p)


# Few seeds, failures, and what is refused


def test_one_seed_is_an_anecdote() -> None:
    found = compare_paired({3: 2.0}, {3: 2.5})
    assert (found.n, found.mean, found.note) == (1, -0.5, ANECDOTE)
    assert [found.sd, found.low, found.high, found.p, found.bootstrap_low] == [None] * 5
    same = assess_equivalence([2.0], [2.0], 1.0)
    assert (same.equivalent, same.p, same.note) == (False, None, ANECDOTE)
    plan = plan_more_seeds([2.0], [2.5], 0.1)
    assert (plan.more, plan.chance) == (None, None)
    assert "at least 2 more" in plan.sentence


def test_identical_differences_count_as_signs_and_are_noted() -> None:
    found = compare_paired([3.1, 4.1, 5.1], [3.0, 4.0, 5.0])  # equal but for rounding
    assert (found.sd, found.p, found.note) == (0.0, 0.25, IDENTICAL)
    assert compare_paired([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert not assess_equivalence([1.0] * 4, [1.0] * 4, 0.1).equivalent
    assert assess_equivalence([1.0] * 4, [1.0] * 4, 0.1).smallest_margin is None
    assert assess_equivalence([1.0] * 5, [1.0] * 5, 0.1).equivalent
    assert assess_equivalence([1.0] * 5, [1.5] * 5, 0.1).p == 1.0
    assert plan_more_seeds([1.0] * 3, [1.0] * 3, 0.1).total == 5
    assert plan_more_seeds([1.0] * 3, [2.0] * 3, 0.1).total == 6


@pytest.mark.parametrize(
    ("arm", "baseline", "sentence"),
    [
        ({}, {}, "nothing to compare"),
        ([], [], "nothing to compare"),
        ({1: 1.0, 2: 2.0}, {2: 1.0, 3: 2.0}, "seeds 1 only in the arm and seeds 3 only in the baseline"),
        ([1.0, 2.0], [1.0], "2 and 1 came"),
        ({1: 1.0}, [1.0], "one of each"),
        ({1: 1.0, 2: NAN}, {1: 1.0, 2: 2.0}, "seed 2 is not finite: count that run as diverged"),
        ({1: 1.0, 2: 2.0}, {1: math.inf, 2: 2.0}, "seed 1 is not finite"),
        ({1: 1.0, 2: 2.0}, {1: 1.0, 2: "nan"}, "seed 2 is not finite"),
        ({1: "much"}, {1: 1.0}, "must be a number, but 'much' came"),
    ],
)
def test_what_cannot_be_paired_is_one_sentence(arm: Any, baseline: Any, sentence: str) -> None:
    callers: list[Callable[[], object]] = [
        lambda: compare_paired(arm, baseline),
        lambda: assess_equivalence(arm, baseline, 1.0),
        lambda: plan_more_seeds(arm, baseline, 1.0),
    ]
    for call in callers:
        with pytest.raises(ValueError, match=sentence) as refused:
            call()
        assert str(refused.value).endswith(".")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: compare_paired([1.0, 2.0], [1.0, 2.0], level=95), "level must lie between 0 and 1, but 95 came"),
        (lambda: assess_equivalence([1.0, 2.0], [1.0, 2.0], 0.0), "margin must be a finite number above 0"),
        (lambda: assess_equivalence([1.0, 2.0], [1.0, 2.0], 1.0, alpha=0.5), "alpha must lie between 0 and 0.5"),
        (lambda: plan_more_seeds([1.0, 2.0], [1.0, 2.0], NAN), "margin must be"),
        (lambda: judge_arms({}, [1.0], 0.1), "no arm besides the baseline"),
        (lambda: judge_arms({"a": [1.0]}, [1.0], 0.1, analyses=0), "analyses counts"),
    ],
)
def test_settings_out_of_range_are_one_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_diverged_runs_are_counted_apart() -> None:
    split = separate_diverged({1: 1.0, 2: NAN, 3: 3.0, 4: None}, {1: 2.0, 2: 2.0, 3: math.inf, 4: "-inf"})
    assert (split.arm, split.baseline) == ({1: 1.0}, {1: 2.0})
    assert (split.arm_diverged, split.baseline_diverged, split.seeds) == ([2, 4], [3, 4], 4)
    assert separate_diverged([1.0, NAN], [1.0, 1.0]).arm_diverged == [1]


# Verdicts


BASE = {0: 3.00, 1: 3.05, 2: 2.97, 3: 3.02, 4: 2.99}
NOISE = {0: 0.004, 1: -0.003, 2: 0.001, 3: -0.004, 4: 0.002}


def shifted(by: float, times: float = 1.0) -> dict[int, float]:
    return {seed: value + by + times * NOISE[seed] for seed, value in BASE.items()}


def test_each_verdict_by_its_rule() -> None:
    arms = {
        "lower": shifted(-0.05),
        "higher": shifted(0.05),
        "alike": shifted(0.001),
        "noisy": shifted(-0.01, 10),
        "failing": shifted(-0.05) | {3: NAN},
        "tiny": shifted(-0.006, 0.1),
    }
    found = judge_arms(arms, BASE, 0.01, name="standard")
    words = {arm: v.verdict for arm, v in found.items()}
    assert words == {
        "lower": "better",
        "higher": "worse",
        "alike": "equivalent",
        "noisy": "open",
        "failing": "diverged",
        "tiny": "better",
    }
    assert {arm for arm, v in found.items() if v.negligible} == {"tiny"}
    assert {arm for arm, v in found.items() if v.plan is not None} == {"noisy"}
    assert found["failing"].p_holm is None
    assert (
        json.loads(json.dumps({arm: v.to_dict() for arm, v in found.items()}, allow_nan=False))["lower"]["paired"]["n"]
        == 5
    )
    upside_down = judge_arms(arms, BASE, 0.01, metric=Accuracy())
    assert [upside_down[arm].verdict for arm in ("lower", "higher", "alike")] == ["worse", "better", "equivalent"]


class Accuracy(Metric):
    label, unit, difference_unit, lower_is_better = "accuracy", "accuracy", "points", False


def test_verdicts_are_sentences_with_numbers() -> None:
    arms = {"lower": shifted(-0.05), "higher": shifted(0.05), "alike": shifted(0.001), "noisy": shifted(-0.01, 10)}
    told = {arm: v.sentence for arm, v in judge_arms(arms, BASE, 0.01, name="standard").items()}
    assert told["lower"] == (
        "lower is better than standard by 0.0500 nats (95 % interval 0.0458 to 0.0542 nats, −1.7 % of the baseline's "
        "value, perplexity −4.9 %); 5 seeds, p < 0.001 after Holm's correction for 4 arms."
    )
    assert told["higher"].startswith(
        "higher is worse than standard by 0.0500 nats (95 % interval 0.0458 to 0.0542 nats, +1.7 %"
    )
    assert told["alike"] == (
        "alike and standard differ by no more than ±0.01 nats: +0.0010 nats (90 % interval −0.0022 to +0.0042 nats); "
        "5 seeds, equivalence test p = 0.002."
    )
    assert told["noisy"].startswith(
        "noisy against standard is open: −0.010 nats (95 % interval −0.052 to +0.032 nats); 5 seeds, p ="
    )
    assert "more seeds" in told["noisy"]
    assert "would settle it with a chance of" in told["noisy"]
    bits = judge_arms({"a": shifted(-0.05)}, BASE, 0.01, metric=find_metric("bits_per_byte"))["a"]
    assert "perplexity" not in bits.sentence


def test_the_family_is_every_arm_also_those_without_a_p() -> None:
    lone = judge_arms({"a": shifted(-0.004, 1.0)}, BASE, 1e-4, cap=0)["a"]
    assert (lone.verdict, lone.p_holm) == ("open", lone.paired and lone.paired.p)
    border = shifted(-0.0052)
    assert judge_arms({"a": border}, BASE, 1e-4)["a"].verdict == "better"
    among = judge_arms({"a": border, **{f"b{i}": dict.fromkeys(BASE, NAN) for i in range(3)}}, BASE, 1e-4)
    assert among["a"].verdict == "open"
    assert "On its own the interval excludes zero; among 4 arms that is not enough." in among["a"].sentence
    assert {v.verdict for arm, v in among.items() if arm != "a"} == {"diverged"}
    assert among["a"].paired is not None
    assert among["a"].p_holm == pytest.approx(4 * (among["a"].paired.p or 0))
    first = judge_arms({"a": border}, BASE, 1e-4, family=4)["a"]  # of four, the others still to come
    assert (first.verdict, first.p_holm) == ("open", among["a"].p_holm)
    assert "among 4 arms" in first.sentence


def test_where_the_baseline_diverges_the_pair_is_left_out_and_said() -> None:
    baseline: dict[int, Any] = BASE | {4: NAN}
    found = judge_arms({"lower": shifted(-0.05)}, baseline, 0.01, name="standard")["lower"]
    assert (found.verdict, found.seeds, found.baseline_diverged) == ("better", 5, 1)
    assert found.paired is not None
    assert found.paired.n == 4
    assert found.sentence.endswith("Left out: 1 seed at which standard diverged.")
    nothing = judge_arms({"lower": shifted(-0.05)}, dict.fromkeys(BASE, NAN), 0.01, name="standard")["lower"]
    assert nothing.verdict == "diverged"
    assert nothing.sentence == "lower diverged in 0 of 5 seeds, standard in 5; no pair is left to compare."
    survivors = judge_arms({"lower": shifted(-0.05) | {0: NAN}}, BASE, 0.01)["lower"]
    assert survivors.verdict == "diverged"
    assert "lower diverged in 1 of 5 seeds. Over the 4 seeds both finished" in survivors.sentence
    assert "decides nothing" in survivors.sentence


def test_one_seed_gets_no_verdict() -> None:
    found = judge_arms({"a": {0: 2.9}}, {0: 3.0}, 0.01, name="standard")["a"]
    assert found.verdict == "one seed"
    assert found.sentence.startswith("One seed is an anecdote: a − standard is −0.100 nats")
    assert (found.p_holm, found.equivalence) == (None, None)
    survivor = judge_arms({"a": {0: 2.9, 1: 2.8}}, {0: 3.0, 1: NAN}, 0.01)["a"]
    assert survivor.verdict == "one seed"


def test_more_noise_and_stricter_tests_ask_for_more_seeds() -> None:
    d = [0.02, -0.03, 0.05, 0.01]
    plans = [
        plan_more_seeds(d, [0.0] * 4, 0.05),
        plan_more_seeds(d, [0.0] * 4, 0.05, comparisons=6),
        plan_more_seeds(d, [0.0] * 4, 0.03),
    ]
    totals = [plan.total or 999 for plan in plans]
    assert totals[0] <= totals[1]
    assert totals[0] < totals[2]
    assert (plans[0].total or 0) > 4
    capped = plan_more_seeds([2 * x for x in d], [0.0] * 4, 0.01, cap=3)
    assert (capped.more, capped.total) == (None, None)
    assert capped.chance is not None
    assert capped.sentence.startswith("Even 3 more seeds would settle it with a chance of only")
    assert judge_arms({"a": [2 * x for x in d]}, [0.0] * 4, 0.01, cap=3)["a"].plan == capped


def test_the_sign_flip_test_counts_all_flips_and_assumes_nothing_else() -> None:
    assert compare_paired([1.0, 2.0, 3.0], [0.0] * 3).sign_flip_p == 2 / 8
    assert compare_paired([3.0, -1.0, 2.0, 4.0], [0.0] * 4).sign_flip_p == 4 / 16  # two of sixteen, and their mirrors
    chance = np.random.default_rng(0)
    shares = [compare_paired(chance.standard_cauchy(6), np.zeros(6)).sign_flip_p for _ in range(600)]
    assert np.mean([p is not None and p <= 0.1 for p in shares]) < 0.1 + 3 * math.sqrt(0.09 / 600)
    many = compare_paired(chance.normal(1, 1, 40), np.zeros(40))
    assert many.sign_flip_p is not None
    assert 0 < many.sign_flip_p < 0.001


def test_outliers_are_seldom_seen_where_there_are_none() -> None:
    chance = np.random.default_rng(1)
    found = [find_outlier(dict(enumerate(chance.normal(size=5)))) for _ in range(2000)]
    assert sum(each is not None for each in found) < 0.01 * 2000 + 3 * math.sqrt(0.01 * 2000)
    seen = find_outlier({0: 0.01, 1: 0.02, 7: 5.0, 3: 0.0, 4: 0.015})
    assert seen is not None
    assert seen[0] == 7
    assert seen[1] > 100
    assert find_outlier({0: 1.0, 1: 1.0, 2: 9.0}) is None
