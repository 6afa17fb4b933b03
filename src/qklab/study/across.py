"""How far effects carry: over the sizes of a study, between its corpora, and beside published figures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from qklab.data.tasks import parse_task
from qklab.study.claims import ClaimVerdict, MeasuredEffect, judge_claim, write_count
from qklab.study.difficulty import TaskOverDifficulty, compare_difficulty
from qklab.study.metrics import Metric, find_metric
from qklab.study.parts import PairedValues, StudyPart, measure_bytes_per_token
from qklab.study.plan import write_rounded
from qklab.study.spec import StudySpec
from qklab.study.stats.groups import Contrast, average_groups, interaction_p_value
from qklab.study.stats.paired import adjust_holm, alpha_of_each
from qklab.study.stats.scaling import (
    LEAST_SIZES,
    SizeMeasurement,
    SizeTrend,
    SpeedUp,
    estimate_speed_ups,
    fit_compute_curve,
    fit_trend,
    hold_out_largest,
)
from qklab.study.verdict import VerdictSentences, write_p_value

FURTHER = 4.0  # how many times as many parameters the size has of which something is foretold
CLAIM_MARGIN = 0.01  # nats per token, where the study's own margin is in another unit: about 1 % of perplexity


@dataclass(frozen=True)
class SizeEffect:
    """The effect of an arm at one size or on one corpus."""

    place: str
    parameters: float
    seeds: int
    effect: Contrast


@dataclass(frozen=True)
class ArmOverSizes:
    """An arm on a corpus against size; no trend where there are too few sizes."""

    corpus: str
    arm: str
    effects: list[SizeEffect]
    trend: SizeTrend | None
    speed_ups: list[SpeedUp]
    sentences: list[str]


@dataclass(frozen=True)
class ComputePoint:
    arm: str
    size: str
    flops: float
    loss: float


@dataclass(frozen=True)
class LossOverCompute:
    """Mean loss and FLOPs of every arm and size on a corpus; the baseline's curve at some FLOPs, and what the curve
    through all but its largest run says of that one."""

    corpus: str
    points: list[ComputePoint]
    curve: list[tuple[float, float]]
    sentence: str


@dataclass(frozen=True)
class ArmOverCorpora:
    """An arm at one size on every corpus, and whether the effect is the same on all of them."""

    size: str
    arm: str
    effects: list[SizeEffect]
    p: float
    p_holm: float
    sentence: str


@dataclass(frozen=True)
class ClaimResult:
    id: str
    arm: str
    source: str
    published: float
    verdict: ClaimVerdict


@dataclass
class AcrossFindings:
    """What a study says beyond one size and one corpus; `order` has all its arms, `size_metric` and `corpus_metric` are
    what effects are in."""

    baseline: str
    order: list[str]
    level: float
    size_metric: str = ""
    corpus_metric: str = ""
    sizes: list[ArmOverSizes] = field(default_factory=list)
    compute: list[LossOverCompute] = field(default_factory=list)
    corpora: list[ArmOverCorpora] = field(default_factory=list)
    difficulty: list[TaskOverDifficulty] = field(default_factory=list)
    claims: list[ClaimResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def arms(self) -> list[str]:
        return [arm for arm in self.order if arm != self.baseline]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @property
    def is_empty(self) -> bool:
        return not (self.sizes or self.corpora or self.difficulty or self.claims or self.notes)


def compare_across(study: StudySpec, parts: Sequence[StudyPart]) -> AcrossFindings:
    """Over the sizes, the corpora and the claims of a study; nothing where it has one of each and no claim."""
    found = AcrossFindings(study.baseline, [*study.arms], 1 - alpha_of_each(study.alpha, study.analyses))
    if len(study.sizes) > 1 and parts:
        compare_sizes(study, parts, found)
    if len(study.corpora) > 1 and parts:
        compare_corpora(study, parts, found)
        found.difficulty = [task for part in parts for task in compare_difficulty(part, found.level)]
    for claim in study.claims:
        effects = list_effects(study, parts, claim.arm, claim.corpus)
        if effects:
            verdict = judge_claim(
                effects,
                claim.published,
                claim.parameters,
                CLAIM_MARGIN if find_metric(study.metric).exponential is None else study.margin,
                arm=claim.arm,
                baseline=study.baseline,
                alpha=(1 - found.level) / len(study.claims),
            )
            found.claims.append(ClaimResult(claim.id, claim.arm, claim.source, claim.published, verdict))
    return found


def list_effects(
    study: StudySpec, parts: Sequence[StudyPart], arm: str, corpus: str | None = None
) -> list[MeasuredEffect]:
    """What `judge_claim` needs: differences in nats per token at every size and corpus, and at every learning rate
    that both arms have tried."""
    loss, effects, corpora = find_metric("loss"), list[MeasuredEffect](), study.corpora if corpus is None else [corpus]
    differ = len({part.find_tokenizer(name) for part in parts for name in corpora}) > 1
    for part in parts:
        for name in corpora:
            length = measure_bytes_per_token(part.results, name) if differ else None
            for lr in (None, *part.study.widest_grid):
                pairs = part.pair(name, arm, loss, lr)
                if pairs is not None:
                    own = (pairs.differences.tolist(), name, lr, pairs.diverged, length)
                    effects.append(MeasuredEffect(part.size, part.parameters, *own))
    return effects


def find_shared_metric(study: StudySpec, tokenizers: Sequence[tuple[Any, ...]]) -> str:
    """The study's metric, or bits per byte where that needs one tokenizer and texts have several."""
    differ = len(set(tokenizers)) > 1 and not any(parse_task(corpus) for corpus in study.corpora)
    return "bits_per_byte" if find_metric(study.metric).needs_one_tokenizer and differ else study.metric


# Sizes


def compare_sizes(study: StudySpec, parts: Sequence[StudyPart], found: AcrossFindings) -> None:
    found.size_metric = find_shared_metric(study, [part.find_tokenizer(study.corpora[0]) for part in parts])
    metric = find_metric(found.size_metric)
    if len(parts) < LEAST_SIZES:
        found.notes.append(
            f"A trend, a curve of loss against compute and speed-ups need {LEAST_SIZES} sizes, and {len(parts)} of "
            f"{len(study.sizes)} have begun: nothing is fitted."
        )
    for corpus in study.corpora:
        if metric.lower_is_better:
            found.compute.append(measure_compute(study, parts, corpus, metric))
        for arm in found.arms:
            pairs = {part.size: part.pair(corpus, arm, metric) for part in parts}
            sound = [(part, own) for part in parts if (own := pairs[part.size]) is not None and own.is_sound]
            effects = [
                SizeEffect(part.size, part.parameters, len(own.arm), average_groups([own.differences], found.level))
                for part, own in sound
            ]
            left_out = [size for size, own in pairs.items() if own is not None and not own.is_sound]
            if effects:
                found.sizes.append(describe_over_sizes(study, parts, metric, corpus, arm, effects, sound, found.level))
            if left_out:
                found.notes.append(
                    f"{arm} on {corpus} at {', '.join(left_out)} is left out: it diverged there, or has one seed."
                )


def describe_over_sizes(
    study: StudySpec,
    parts: Sequence[StudyPart],
    metric: Metric,
    corpus: str,
    arm: str,
    effects: list[SizeEffect],
    sound: Sequence[tuple[StudyPart, PairedValues]],
    level: float,
) -> ArmOverSizes:
    """The effects, their trend, and the speed-ups that the baseline's curve gives."""
    words, sentences = VerdictSentences(study.baseline, metric, study.margin, 1), list[str]()
    trend, speed_ups = None, list[SpeedUp]()
    if len(effects) >= LEAST_SIZES:
        sizes = [each.parameters for each in effects]
        trend = fit_trend(sizes, [own.differences for _, own in sound], FURTHER * max(sizes), level)
        sentences.append(describe_size_trend(arm, corpus, trend, words, effects[-1].place))
    if metric.lower_is_better and len(parts) >= LEAST_SIZES:
        try:
            speed_ups = estimate_speed_ups(measure_sizes(study, parts, corpus, arm, metric), level)
            sentences += [describe_speed_ups(arm, corpus, study.baseline, speed_ups)] if speed_ups else []
        except ValueError as error:
            sentences.append(f"{arm} on {corpus} has no speed-up: {error}")
    return ArmOverSizes(corpus, arm, effects, trend, speed_ups, sentences)


def measure_sizes(
    study: StudySpec, parts: Sequence[StudyPart], corpus: str, arm: str, metric: Metric
) -> list[SizeMeasurement]:
    """Every size that shapes the baseline's curve, with the arm where it has an interval."""
    found: list[SizeMeasurement] = []
    for part in parts:
        alone, pairs = part.pair(corpus, study.baseline, metric), part.pair(corpus, arm, metric)
        if alone is None or len(alone.baseline) < 2:
            continue
        flops = average_runs(alone.baseline_runs, "training_flops")
        if pairs is None or not pairs.is_sound:
            found.append(SizeMeasurement(part.size, flops, alone.baseline))
            continue
        speeds = [
            np.array([run["tokens_per_second"] for run in runs]) for runs in (pairs.arm_runs, pairs.baseline_runs)
        ]
        own = average_runs(pairs.arm_runs, "training_flops")
        found.append(SizeMeasurement(part.size, flops, pairs.baseline, own, pairs.arm, speeds[0] / speeds[1]))
    return found


def measure_compute(study: StudySpec, parts: Sequence[StudyPart], corpus: str, metric: Metric) -> LossOverCompute:
    points: list[ComputePoint] = []
    for part in parts:
        for arm in part.study.arms:
            pairs = part.pair(corpus, arm, metric)
            if pairs is not None and len(pairs.arm):
                flops = average_runs(pairs.arm_runs, "training_flops")
                points.append(ComputePoint(arm, part.size, flops, float(pairs.arm.mean())))
    own = [point for point in points if point.arm == study.baseline]
    if len(own) < LEAST_SIZES:
        return LossOverCompute(corpus, points, [], "")
    flops, losses = np.array([point.flops for point in own]), np.array([point.loss for point in own])
    curve = fit_compute_curve(flops, losses)
    along = np.geomspace(flops.min(), FURTHER**2 * flops.max(), 60)
    foretold, seen = hold_out_largest(flops, losses), float(losses[flops.argmax()])
    sentence = (
        f"The curve of {study.baseline} on {corpus} is {float(curve.floor):.3g} + FLOPs^−{float(curve.exponent):.2g} "
        f"times a constant. Without its largest run it foretells {foretold:.4g} {metric.unit} there, and {seen:.4g} "
        f"was seen: an error of {write_rounded(100 * abs(foretold / seen - 1))} %."
    )
    return LossOverCompute(
        corpus, points, list(zip(along.tolist(), curve.predict(along).tolist(), strict=True)), sentence
    )


def average_runs(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(run[name] for run in runs) / len(runs)


def describe_size_trend(arm: str, corpus: str, trend: SizeTrend, words: VerdictSentences, largest: str) -> str:
    slope, foretold, further = trend.slope, trend.held_out, trend.further

    def write(value: float, effect: Any) -> str:
        return words.write_amount(value, (effect.high - effect.low) / 2)

    def write_around(effect: Any) -> str:
        return f"{write(effect.low, effect)} to {write(effect.high, effect)}"

    return (
        f"{arm} on {corpus}: with ten times the parameters the difference changes by {write(slope.estimate, slope)} "
        f"{words.unit} ({100 * slope.level:.3g} % interval {write_around(slope)}, {write_p_value(slope.p)}). The "
        f"smaller sizes foretold {write(foretold.predicted, foretold)} at {largest} ({write_around(foretold)}), and "
        f"{write(foretold.seen, foretold)} was seen{'' if foretold.holds else ', outside of it'}. At "
        f"{write_count(trend.parameters)} parameters {write(further.estimate, further)} would be expected "
        f"({write_around(further)}): an extrapolation, of a straight line, beyond every size that was run."
    )


def describe_speed_ups(arm: str, corpus: str, baseline: str, found: Sequence[SpeedUp]) -> str:
    def write(ratio: tuple[float, float, float | None]) -> str:
        high = "no upper limit" if ratio[2] is None else f"{ratio[2]:.3g}"
        return f"{ratio[0]:.3g} × ({ratio[1]:.3g} to {high})"

    told = [f"at {each.size} {write(each.flops)} in FLOPs, {write(each.seconds)} in time" for each in found]
    beyond = [each.size for each in found if each.beyond]
    extrapolated = f" More compute than any of its runs had, so extrapolated: {', '.join(beyond)}." if beyond else ""
    return (
        f"What {baseline} needs to reach the loss of {arm} on {corpus}, as a multiple of what {arm} took "
        f"({100 * found[0].level:.3g} % intervals): {'; '.join(told)}.{extrapolated}"
    )


# Corpora


def compare_corpora(study: StudySpec, parts: Sequence[StudyPart], found: AcrossFindings) -> None:
    """Welch's test of arm × corpus at every size, Holm-adjusted over the arms."""
    tokenizers = [part.find_tokenizer(corpus) for part in parts for corpus in study.corpora]
    found.corpus_metric = find_shared_metric(study, tokenizers)
    metric = find_metric(found.corpus_metric)
    words = VerdictSentences(study.baseline, metric, study.margin, 1)
    for part in parts:
        measured: dict[str, list[SizeEffect]] = {}
        for arm in found.arms:
            pairs = {corpus: part.pair(corpus, arm, metric) for corpus in study.corpora}
            sound = {corpus: own for corpus, own in pairs.items() if own is not None and own.is_sound}
            if len(sound) > 1:
                measured[arm] = [
                    SizeEffect(corpus, part.parameters, len(own.arm), average_groups([own.differences], found.level))
                    for corpus, own in sound.items()
                ]
        p_values = {arm: interaction_p_value([each.effect for each in own]) for arm, own in measured.items()}
        adjusted = adjust_holm(p_values) if p_values else {}
        for arm, own in measured.items():
            differs = adjusted[arm] < 1 - found.level
            holm = f" after Holm's correction for {len(adjusted)} arms" * (len(adjusted) > 1)
            told = "; ".join(
                f"{each.place} {words.write_amount(each.effect.estimate, each.effect.high - each.effect.estimate)}"
                for each in own
            )
            sentence = (
                f"{arm} at {part.size}: that its effect differs between corpora is {'' if differs else 'not '}shown "
                f"({write_p_value(adjusted[arm])}{holm}); {told} {words.unit}."
            )
            found.corpora.append(ArmOverCorpora(part.size, arm, own, p_values[arm], adjusted[arm], sentence))
