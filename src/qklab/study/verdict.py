"""Verdicts: what is known of each arm against the baseline, by rules fixed before anything ran, and in a sentence."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from qklab.study.metrics import Metric, find_metric
from qklab.study.stats.equivalence import EquivalenceTest, assess_equivalence
from qklab.study.stats.paired import (
    FinitePairs,
    PairedDifference,
    Statistic,
    Values,
    adjust_holm,
    alpha_of_each,
    compare_paired,
    name_seeds,
    require_positive,
    separate_diverged,
)
from qklab.study.stats.power import SeedPlan, plan_more_seeds

VerdictWord = Literal["better", "worse", "equivalent", "open", "diverged", "one seed"]


@dataclass(frozen=True)
class Verdict(Statistic):
    """What is known of one arm against the baseline. `negligible`: different, and shown to be within ±margin."""

    arm: str
    baseline: str
    verdict: VerdictWord
    sentence: str
    seeds: int
    arm_diverged: int
    baseline_diverged: int
    paired: PairedDifference | None
    p_holm: float | None
    equivalence: EquivalenceTest | None
    negligible: bool
    plan: SeedPlan | None


def judge_arms(
    arms: Mapping[str, Values],
    baseline: Values,
    margin: float,
    *,
    name: str = "the baseline",
    alpha: float = 0.05,
    metric: Metric | None = None,
    analyses: int = 1,
    cap: int = 100,
    family: int = 1,
) -> dict[str, Verdict]:
    """One verdict per arm, by rules fixed before anything ran, the first that applies:

    1. diverged: any run of the arm diverged, or no pair is left. The finite pairs are shown but decide nothing: they
       are the survivors. Seeds at which only the baseline diverged are left out of the comparison, and the sentence
       says so.
    2. one seed: one finite pair.
    3. better, worse: p of the paired t-test, Holm-adjusted over all arms (those without a p count as p = 1), below α;
       the sign of the mean says which. The chance of any false "better" or "worse" in the study is at most α. There are
       `family` arms if some are still to come: the first to end is judged no more lightly than the last.
    4. equivalent: TOST within ±margin has p < α (each arm on its own, not adjusted).
    5. open: neither; `plan` says how many more seeds would settle it (`plan_more_seeds` with Holm's strictest step over
       the arms that have shown no difference; cap = 0 skips it).

    `analyses`: how often the study will be judged at most, this time included, if seeds are added after an interim
    analysis; α becomes α / analyses throughout. Judging once and again after adding seeds at full α makes 8 % false
    alarms of 5 %.
    """
    require_positive("margin", margin)
    if not arms:
        raise ValueError("There is nothing to judge: no arm besides the baseline.")
    level = alpha_of_each(alpha, analyses)
    metric = find_metric("loss") if metric is None else metric
    pairs = {arm: separate_diverged(values, baseline) for arm, values in arms.items()}
    found = {arm: compare_paired(p.arm, p.baseline, 1 - level) if p.arm else None for arm, p in pairs.items()}
    judged = {arm: f for arm, f in found.items() if f is not None and f.n > 1 and not pairs[arm].arm_diverged}
    coming = {f"{number} to come": 1.0 for number in range(family - len(arms))}
    adjusted = adjust_holm(coming | {arm: cast(float, judged[arm].p) if arm in judged else 1.0 for arm in arms})
    judge = Judge(
        words=VerdictSentences(name, metric, margin, max(family, len(arms))),
        alpha=level,
        cap=cap,
        remaining=sum(p >= level for p in adjusted.values()),
    )
    return {
        arm: judge.judge(arm, split, found[arm], adjusted[arm] if arm in judged else None)
        for arm, split in pairs.items()
    }


@dataclass(frozen=True)
class Judge:
    """The rules of `judge_arms` for one arm at a time. `remaining`: arms that have shown no difference."""

    words: "VerdictSentences"
    alpha: float
    cap: int
    remaining: int

    def judge(self, arm: str, split: FinitePairs, difference: PairedDifference | None, p_holm: float | None) -> Verdict:
        words, margin = self.words, self.words.margin
        test, plan, negligible = None, None, False
        if difference is None or split.arm_diverged:
            word, sentence = "diverged", words.describe_diverged(arm, split, difference)
        elif p_holm is None:
            word, sentence = "one seed", words.describe_one_seed(arm, difference)
        else:
            test = assess_equivalence(split.arm, split.baseline, margin, self.alpha)
            if p_holm < self.alpha:
                word = "better" if (difference.mean < 0) == words.metric.lower_is_better else "worse"
                negligible = test.equivalent
                sentence = words.describe_differs(arm, word, difference, p_holm, negligible)
            elif test.equivalent:
                word, sentence = "equivalent", words.describe_equivalent(arm, test)
            else:
                plan = self.plan_seeds(split) if self.cap else None
                word, sentence = "open", words.describe_open(arm, difference, p_holm, plan)
        if split.baseline_diverged and word != "diverged":
            sentence += f" Left out: {name_seeds(len(split.baseline_diverged))} at which {words.name} diverged."
        return Verdict(
            arm=arm,
            baseline=words.name,
            verdict=word,
            sentence=sentence,
            seeds=split.seeds,
            arm_diverged=len(split.arm_diverged),
            baseline_diverged=len(split.baseline_diverged),
            paired=difference,
            p_holm=p_holm,
            equivalence=test,
            negligible=negligible,
            plan=plan,
        )

    def plan_seeds(self, split: FinitePairs) -> SeedPlan:
        return plan_more_seeds(
            split.arm,
            split.baseline,
            self.words.margin,
            alpha=self.alpha,
            comparisons=self.remaining,
            cap=self.cap,
        )


def write_p_value(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.1 else f"p = {p:.2f}"


def write_per_cent(value: float) -> str:
    return (f"{value:+.2g} %" if abs(value) < 99.5 else f"{value:+.0f} %").replace("-", "−")


@dataclass(frozen=True)
class VerdictSentences:
    """The sentences of a verdict."""

    name: str
    metric: Metric
    margin: float
    arms: int

    @property
    def unit(self) -> str:
        return self.metric.difference_unit

    def write_amount(self, value: float, half: float, sign: str = "+") -> str:
        """A number to the second digit of its uncertainty."""
        scale = half if half > 0 else abs(value)
        digits = min(9, max(0, 1 - math.floor(math.log10(scale)))) if scale > 0 else 0
        return f"{value:{sign}.{digits}f}".replace("-", "−")

    def write_interval(self, low: float, high: float, level: float, sign: str = "+") -> str:
        half = (high - low) / 2
        ends = f"{self.write_amount(low, half, sign)} to {self.write_amount(high, half, sign)}"
        return f"{100 * level:.3g} % interval {ends} {self.unit}"

    def write_estimate(self, difference: PairedDifference) -> str:
        """The difference with its sign and interval, where there is one."""
        if difference.low is None or difference.high is None:
            return f"{self.write_amount(difference.mean, abs(difference.mean) / 10)} {self.unit}"
        middle = self.write_amount(difference.mean, (difference.high - difference.low) / 2)
        return f"{middle} {self.unit} ({self.write_interval(difference.low, difference.high, difference.level)})"

    def write_relative(self, difference: PairedDifference) -> str:
        percent = difference.percent
        changes = [] if percent is None else [f"{write_per_cent(percent)} of the baseline's value"]
        if self.metric.exponential is not None and difference.mean < 700:
            changes.append(f"{self.metric.exponential} {write_per_cent(100 * math.expm1(difference.mean))}")
        return "".join(f", {each}" for each in changes)

    def name_p_value(self, p: float) -> str:
        return write_p_value(p) + f" after Holm's correction for {self.arms} arms" * (self.arms > 1)

    def describe_differs(self, arm: str, word: str, difference: PairedDifference, p: float, negligible: bool) -> str:
        assert difference.low is not None
        assert difference.high is not None
        ends = sorted((difference.low, difference.high)) if difference.mean > 0 else (-difference.high, -difference.low)
        by = self.write_amount(abs(difference.mean), (ends[1] - ends[0]) / 2, "")
        interval = self.write_interval(ends[0], ends[1], difference.level, "")
        sentence = (
            f"{arm} is {word} than {self.name} by {by} {self.unit} ({interval}{self.write_relative(difference)}); "
            f"{name_seeds(difference.n)}, {self.name_p_value(p)}."
        )
        small = f" The difference is real but lies within ±{self.margin:g} {self.unit}, which was called negligible."
        return sentence + small * negligible + self.add_note(difference)

    def describe_equivalent(self, arm: str, test: EquivalenceTest) -> str:
        assert test.low is not None
        assert test.high is not None
        assert test.p is not None
        middle = self.write_amount(test.mean, (test.high - test.low) / 2)
        interval = self.write_interval(test.low, test.high, 1 - 2 * test.alpha)
        note = f" Note: {test.note}." if test.note else ""
        return (
            f"{arm} and {self.name} differ by no more than ±{self.margin:g} {self.unit}: {middle} {self.unit} "
            f"({interval}); {name_seeds(test.n)}, equivalence test {write_p_value(test.p)}.{note}"
        )

    def describe_open(self, arm: str, difference: PairedDifference, p: float, plan: SeedPlan | None) -> str:
        assert difference.p is not None
        sentence = (
            f"{arm} against {self.name} is open: {self.write_estimate(difference)}; {name_seeds(difference.n)}, "
            f"{self.name_p_value(p)}; neither a difference nor its absence within ±{self.margin:g} {self.unit} "
            "is shown."
        )
        if difference.p < 1 - difference.level and difference.note is None:
            sentence += f" On its own the interval excludes zero; among {self.arms} arms that is not enough."
        return sentence + (f" {plan.sentence}" if plan else "") + self.add_note(difference)

    def describe_one_seed(self, arm: str, difference: PairedDifference) -> str:
        return (
            f"One seed is an anecdote: {arm} − {self.name} is {self.write_estimate(difference)} at the only seed both "
            "finished, and nothing says whether another seed would agree. Run at least 2 more."
        )

    def describe_diverged(self, arm: str, split: FinitePairs, difference: PairedDifference | None) -> str:
        runs = f"{arm} diverged in {len(split.arm_diverged)} of {name_seeds(split.seeds)}"
        if split.baseline_diverged or not split.arm_diverged:
            runs += f", {self.name} in {len(split.baseline_diverged)}"
        if difference is None:
            return f"{runs}; no pair is left to compare."
        return (
            f"{runs}. Over the {name_seeds(difference.n)} both finished the difference is "
            f"{self.write_estimate(difference)}, which leaves the failures out and decides nothing."
        )

    def add_note(self, difference: PairedDifference) -> str:
        return f" Note: {difference.note}." if difference.note else ""
