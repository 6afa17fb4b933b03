"""Published claims: a figure that a study names beforehand, and the word for what became of it.

Effects are paired differences of log perplexity (nats per token), arm − baseline at the same seed. Within one size and
corpus the arms share a tokenizer, so that exp(difference) − 1 is the change of perplexity that papers print. Between
places with tokenizers of their own it does not compare, since a longer token has more to gain; bits per byte do.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from qklab.schema import Spec, number_field, text_field
from qklab.study.metrics import find_metric
from qklab.study.stats.groups import Contrast, average_groups, estimate_contrast, interaction_p_value
from qklab.study.stats.paired import ANECDOTE, Array, Statistic, name_seeds, require_positive
from qklab.study.stats.power import plan_more_seeds
from qklab.study.stats.scaling import LEAST_SIZES, slope_weights
from qklab.study.verdict import VerdictSentences, write_p_value, write_per_cent

EffectWord = Literal["reproduced", "smaller than published", "refuted", "open"]
ClaimWord = Literal["reproduced", "smaller than published", "refuted", "depends on", "seen", "not seen", "open"]
PRESENT = frozenset[EffectWord](("reproduced", "smaller than published"))
REACH = 2.0  # models at most so many times smaller than the published ones can refute what was said of those


@dataclass(frozen=True, kw_only=True)
class Claim(Spec):
    """A published figure that an arm of the study stands for.

    Args:
        id: What the claim is called, such as A1.
        arm: The arm that stands for it, against the study's baseline.
        published: The published change of perplexity in per cent, below 0 where the arm was better; 0 for a claim that
            there is no difference.
        parameters: How large the published model was.
        source: Where the figure stands.
        corpus: The one of the study's corpora that it is about; by default all of them together.
    """

    id: str = text_field()
    arm: str = text_field()
    published: float = number_field(above=-100.0)
    parameters: float = number_field(above=0.0)
    source: str = text_field()
    corpus: str | None = text_field(None)


@dataclass(frozen=True)
class MeasuredEffect:
    """Paired differences at one size and corpus, one per seed; at one learning rate for both arms, or, where `lr` is
    None, at the rate that validation text chose for each. `diverged`: seeds at which the arm diverged;
    `bytes_per_token`: of test text, to be given where places have tokenizers of their own."""

    size: str
    parameters: float
    differences: Sequence[float] | Array
    corpus: str = ""
    lr: float | None = None
    diverged: int = 0
    bytes_per_token: float | None = None


@dataclass(frozen=True)
class ClaimVerdict(Statistic):
    """What became of a claim. `phrase` is the word with its size or what it depends on; percent, low, high: the change
    of perplexity at the size that decided; p_interaction: by what it was tested to depend on → Welch's p."""

    word: ClaimWord
    phrase: str
    sentence: str
    size: str
    seeds: int
    percent: float | None
    low: float | None
    high: float | None
    p_interaction: dict[str, float]


def judge_claim(
    effects: Sequence[MeasuredEffect],
    published: float,
    parameters: float,
    margin: float,
    *,
    arm: str = "the arm",
    baseline: str = "the baseline",
    alpha: float = 0.05,
    plan: bool = True,
) -> ClaimVerdict:
    """The word for a claim that the arm changes perplexity by `published` per cent in models of so many `parameters`.

    Decided at the tested size nearest to the published one, over all corpora alike, by the first rule that applies
    (interval: of level 1 − α; margin: in nats; where the published effect is smaller than twice that, half of it, so
    that being near zero never agrees with the claim):

    1. depends on corpus, size or learning rate: present in some places and refuted in others, and Welch's test of the
       interaction (in bits per byte where tokenizers differ) has p < α / (how many of the three are tested). An effect
       that is present at the deciding size and every larger one does not depend on size, and one that is present at
       each arm's own learning rate not on that.
    2. refuted: equivalent to zero within the margin (two one-sided tests, α), or the opposite sign is shown.
    3. reproduced: the interval excludes zero, has the published sign, and the published value lies in it or it lies
       beyond; smaller than published: it lies between zero and the published value.
    4. open, with what would settle it.

    Models more than REACH times smaller than the published ones cannot refute: present is then "seen from SIZE on"
    (that size and every larger one), refuted "not seen up to SIZE". A claim of no difference (published = 0) is
    reproduced by equivalence within the margin and refuted by a difference shown to be beyond it.

    Over 2,000 simulated studies each (α = 5 %): without an effect at most 2.5 % are called present; with one as large
    as published at most 2.5 % "smaller than published" and at most 5 % refuted; with one that is the same everywhere
    at most 5 % "depends on".
    """
    require_positive("margin", margin)
    require_positive("parameters", parameters)
    chosen = [effect for effect in effects if effect.lr is None]
    if not chosen:
        raise ValueError("A claim needs differences at the learning rates chosen for each arm (lr=None).")
    judge = ClaimJudge(math.log1p(published / 100), margin, alpha)
    sizes = sorted({(effect.parameters, effect.size) for effect in chosen})
    count, size = min(sizes, key=lambda known: abs(math.log(known[0] / parameters)))
    here = [effect for effect in chosen if effect.size == size]
    words = ClaimSentences(arm, baseline, published, parameters, size, count, min(len(e.differences) for e in here))
    if diverged := sum(effect.diverged for effect in here):
        return words.conclude("open", None, {}, f"{arm} diverged there in {diverged} of its runs")
    if words.seeds < 2:
        return words.conclude("open", None, {}, f"{ANECDOTE}; two more would give one")
    found = judge.measure_each(chosen, lambda effect: effect.size)
    factors: dict[str, tuple[list[MeasuredEffect], Callable[[MeasuredEffect], str]]] = {
        "corpus": (here, lambda effect: effect.corpus),
        "size": (chosen, lambda effect: effect.size),
        "learning rate": ([e for e in effects if e.lr is not None and e.size == size], lambda e: f"lr {e.lr:g}"),
    }
    places = {factor: measured for factor, own in factors.items() if len(measured := judge.measure_each(*own)) > 1}
    p_values = {
        factor: interaction_p_value([*judge.measure_each(convert_to_bits(own), key).values()])
        for factor, (own, key) in factors.items()
        if factor in places
    }
    outcome, trend = judge.classify(found[size]), describe_trend([e for e in chosen if e.size in found], 1 - alpha)
    larger = [judge.classify(found[name]) for known, name in sizes if known >= count and name in found]
    holds = {"corpus": False, "size": {*larger} <= PRESENT, "learning rate": outcome in PRESENT}
    for factor, measured in places.items():
        if p_values[factor] < alpha / len(places) and not holds[factor] and judge.contradict(measured.values()):
            told = "; ".join(f"{place} {write_change(effect)}" for place, effect in measured.items())
            return words.conclude("depends on", found[size], p_values, f"by {factor}: {told}", factor)
    if outcome == "open":
        return words.conclude("open", found[size], p_values, plan_settling(here, judge.least, alpha) if plan else "")
    if sizes[-1][0] * REACH >= parameters:
        return words.conclude(outcome, found[size], p_values, trend)
    if outcome == "refuted":
        return words.conclude("not seen", found[size], p_values, trend, size)
    present = [name if name in found and judge.classify(found[name]) in PRESENT else "" for _, name in sizes]
    first = present[len(present) - present[::-1].index("")] if "" in present else present[0]
    return words.conclude("seen", found[size], p_values, trend, first)


def plan_settling(effects: Sequence[MeasuredEffect], margin: float, alpha: float) -> str:
    """What would settle an open case: seeds, planned for the corpus with the widest spread."""
    widest = max(effects, key=lambda effect: float(np.std(effect.differences, ddof=1)))
    return plan_more_seeds(widest.differences, [0.0] * len(widest.differences), margin, alpha=alpha).sentence


@dataclass(frozen=True)
class ClaimJudge:
    """The rules of `judge_claim` for the effect in one place; `published` is in nats here."""

    published: float
    margin: float
    alpha: float

    @property
    def least(self) -> float:
        """The margin within which an effect is none."""
        return min(self.margin, abs(self.published) / 2) if self.published else self.margin

    def measure_each(
        self, effects: Sequence[MeasuredEffect], key: Callable[[MeasuredEffect], str]
    ) -> dict[str, Contrast]:
        """Place → the effect there, for the places that have an interval."""
        places = {key(effect): [other for other in effects if key(other) == key(effect)] for effect in effects}
        return {
            place: average_groups([effect.differences for effect in own], 1 - self.alpha)
            for place, own in places.items()
            if all(len(effect.differences) > 1 and not effect.diverged for effect in own)
        }

    def classify(self, effect: Contrast) -> EffectWord:
        within = max(effect.exceeds(-self.least), effect.falls_below(self.least)) < self.alpha
        if self.published == 0:
            beyond = min(effect.exceeds(self.least), effect.falls_below(-self.least)) < self.alpha / 2
            return "reproduced" if within else "refuted" if beyond else "open"
        sign = math.copysign(1.0, self.published)
        low, high = sorted((sign * effect.low, sign * effect.high))
        shown = effect.p < self.alpha  # seeds that agree to rounding give an interval without width, and few signs
        if within or (shown and high < 0):
            return "refuted"
        if shown and low > 0:
            return "reproduced" if high >= abs(self.published) else "smaller than published"
        return "open"

    def contradict(self, effects: Iterable[Contrast]) -> bool:
        """Whether the claim holds in some of these places and is refuted in others."""
        outcomes = [self.classify(effect) for effect in effects]
        return "refuted" in outcomes and any(outcome in PRESENT for outcome in outcomes)


@dataclass(frozen=True)
class ClaimSentences:
    """The sentences of a verdict on a claim; `size` is the one that decides."""

    arm: str
    baseline: str
    published: float
    parameters: float
    size: str
    count: float
    seeds: int

    def conclude(
        self, word: ClaimWord, effect: Contrast | None, p_values: dict[str, float], why: str, where: str = ""
    ) -> ClaimVerdict:
        phrase = {"depends on": f"depends on {where}", "seen": f"seen from {where} on"}
        phrase |= {"not seen": f"not seen up to {where}"}
        said = phrase.get(word, word)
        percent, low, high = (
            (None, None, None) if effect is None else map(to_per_cent, (effect.estimate, effect.low, effect.high))
        )
        p = f" (interaction {write_p_value(p_values[where])})" if word == "depends on" else ""
        told = "no interval" if effect is None else f"perplexity {write_change(effect)}"
        sentence = (
            f"{said[0].upper()}{said[1:]}{p}: {told} for {self.arm} against {self.baseline} at {self.size} "
            f"({write_count(self.count)} parameters, {name_seeds(self.seeds)}); published "
            f"{write_per_cent(self.published)} at {write_count(self.parameters)}."
        )
        sentence += f" {why[0].upper()}{why[1:].rstrip('.')}." if why else ""
        return ClaimVerdict(word, said, sentence, self.size, self.seeds, percent, low, high, p_values)


def describe_trend(effects: Sequence[MeasuredEffect], level: float) -> str:
    """How the effect changes with size; nothing where there are too few sizes for a slope."""
    if len({effect.size for effect in effects}) < LEAST_SIZES:
        return ""
    shares = [sum(other.size == effect.size for other in effects) for effect in effects]
    weights = slope_weights([effect.parameters for effect in effects], shares)
    slope = estimate_contrast([effect.differences for effect in convert_to_bits(effects)], weights, level)
    told = write_change(slope) if share_one_tokenizer(effects) else write_bits(slope)
    return f"with ten times the parameters the effect changes by {told}"


def share_one_tokenizer(effects: Sequence[MeasuredEffect]) -> bool:
    return any(effect.bytes_per_token is None for effect in effects)


def convert_to_bits(effects: Sequence[MeasuredEffect]) -> list[MeasuredEffect]:
    """The effects as they compare between places: in bits per byte where those have tokenizers of their own."""
    if share_one_tokenizer(effects):
        return [*effects]
    return [
        replace(effect, differences=np.asarray(effect.differences) / (math.log(2) * (effect.bytes_per_token or 1.0)))
        for effect in effects
    ]


def to_per_cent(nats: float) -> float:
    return 100 * math.expm1(min(nats, 100.0))


def write_change(effect: Contrast) -> str:
    values = [to_per_cent(value) for value in (effect.estimate, effect.low, effect.high)]
    half = (values[2] - values[1]) / 2
    digits = 2 - math.floor(math.log10(half)) if half > 0 else 9  # what lies far below the uncertainty is nothing
    ends = [write_per_cent(round(value, digits) + 0.0) for value in values]
    return f"{ends[0]} ({100 * effect.level:.3g} % interval {ends[1].removesuffix(' %')} to {ends[2]})"


def write_bits(effect: Contrast) -> str:
    words = VerdictSentences("", find_metric("bits_per_byte"), 0.0, 1)
    middle = words.write_amount(effect.estimate, (effect.high - effect.low) / 2)
    return f"{middle} ({words.write_interval(effect.low, effect.high, effect.level)})"


def write_count(parameters: float) -> str:
    """Thousands, millions or billions of parameters: 98.5 k, 60 M, 1.2 B."""
    unit, letter = next((u, each) for u, each in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if parameters >= u or u == 1e3)
    return f"{parameters / unit:.3g} {letter}"
