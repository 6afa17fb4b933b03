"""Published figures beside what was measured at every size, and the word for what became of each.

A figure in claims.toml has one of
  percent   change of perplexity, arm against baseline (standard where none is named)
  points    percentage points of accuracy, on the mean over a study's tasks; one within the study's margin is a claim
            that there is no difference
  sign      -1 where the arm is said to be better (a lower loss), without a figure
  speed_up  how many times the arm's tokens the baseline is said to need to do as well, from the baseline's own curve of
            bits per byte against compute (`estimate_speed_ups`), what the arm's tokens cost more left aside
  value     of a `probe` (docs/probes.md) at the end of training, in `layer` or on average over layers: of the arm, or
            its difference from `baseline` where one is named
and may be about one `corpus` only; about one learning rate `lr` of both arms instead of each one's best, where a
run that diverged counts as a model that knows no context; or, with `longer`, pairs of studies [short, long], about how
much the effect changes from one to the other.
A claim stays open while it was tried at fewer sizes than the protocol asks for, each with five seeds and, where arms
are compared, the best learning rates of both inside the grid.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from order import PlannedStudy, count_missing_minutes
from studies import Evidence, round_number

from qklab.study.claims import MeasuredEffect, judge_claim
from qklab.study.stats.groups import average_groups
from qklab.study.stats.scaling import SizeMeasurement, SpeedUp, estimate_speed_ups

SIZES, SEEDS = 3, 5  # that a verdict on a claim needs
VALUE_MARGIN = 0.05  # within which a probe's value is none
LEAST = 0.01  # nats: an effect without a published figure that is smaller is none
SPEED_MARGIN = math.log(1.1)  # a speed-up that is smaller is none
MINUS = str.maketrans("-", "−")


@dataclass(frozen=True)
class FigureKind:
    """`to_effect`: from a published figure to what `judge_claim` compares; `show`: the way back; `unit` and `digits` of
    what is written."""

    to_effect: Callable[[float], float]
    show: Callable[[float], float]
    unit: str
    digits: int


KINDS = {
    "percent": FigureKind(lambda value: math.log1p(value / 100), lambda effect: 100 * math.expm1(effect), " %", 1),
    "points": FigureKind(lambda value: value / 100, lambda effect: 100 * effect, " points", 1),
    "sign": FigureKind(lambda sign: 2 * sign * LEAST, lambda effect: 100 * math.expm1(effect), " %", 1),
    "speed_up": FigureKind(math.log, math.exp, " times", 2),
    "value": FigureKind(lambda value: value, lambda effect: effect, "", 2),
}


def judge_claims(claims: Mapping[str, Any], studies: Mapping[str, Evidence]) -> list[dict[str, Any]]:
    """Every claim's figures, each with what was measured at every size and the word for it."""
    judged = []
    for claim in claims["claims"]:
        own = [studies[name] for name in claim["studies"] if name in studies]
        found = [judge_figure(figure, choose_studies(figure, own, claims["supersedes"])) for figure in claim["figures"]]
        judged.append({"id": claim["id"], "figures": [figure for figure in found if figure["measured"]]})
    return judged


def choose_studies(
    figure: Mapping[str, Any], studies: Sequence[Evidence], supersedes: Mapping[str, Sequence[str]]
) -> list[Evidence]:
    """The studies without those in whose place another has measured the figure, and of several that share runs of the
    arm the one that has most, since a run is evidence once."""
    gone = {name for study in studies if measure_figure(figure, study) for name in supersedes.get(study.name, ())}
    seen, chosen = set[tuple[str, str]](), set[str]()
    for study in sorted(studies, key=lambda study: -len(study.list_runs(figure["arm"]))):
        own = study.list_runs(figure["arm"])
        if study.name not in gone and own.isdisjoint(seen):
            chosen.add(study.name)
            seen |= own
    return [study for study in studies if study.name in chosen]


def judge_figure(figure: Mapping[str, Any], studies: Sequence[Evidence]) -> dict[str, Any]:
    """What was measured of a figure, the word for it by the protocol, which only studies that count decide, and the
    word that all give so far."""
    name = next(kind for kind in KINDS if kind in figure)
    about = {"arm": figure["arm"], "baseline": find_baseline(figure), "kind": name, "published": figure[name]}
    about |= {key: figure[key] for key in ("probe", "corpus", "lr", "longer") if key in figure}
    judge = judge_speed_up if name == "speed_up" else judge_effects
    measured, so_far = judge(figure, studies)
    for own in measured:
        own["studies"] = [study.name for study in studies if study.size == own["size"] and has_measured(figure, study)]
    fine = list_counting(figure, studies)
    sizes = {study.size for study in fine}
    listed = [own["size"] for own in measured if own["size"] in sizes]
    word = judge(figure, fine)[1] if len(listed) >= SIZES else "open"
    return about | {"measured": measured, "word": word, "so_far": so_far, "counted": listed}


def has_measured(figure: Mapping[str, Any], study: Evidence) -> bool:
    if "speed_up" in figure:
        return study.measure_compute(figure["arm"]) is not None
    return bool(measure_figure(figure, study))


def list_counting(figure: Mapping[str, Any], studies: Sequence[Evidence]) -> list[Evidence]:
    """The studies that are sizes of a verdict; where it is about what changes from one to another, both must be."""
    fine = {study.name: study for study in studies if counts(figure, study)}
    if "longer" in figure:
        fine = {name: fine[name] for pair in figure["longer"] if {*pair} <= fine.keys() for name in pair}
    return [*fine.values()]


def judge_effects(figure: Mapping[str, Any], studies: Sequence[Evidence]) -> tuple[list[dict[str, Any]], str]:
    """Paired differences at every size and the word that they give, however few the sizes."""
    name = next(kind for kind in KINDS if kind in figure)
    kind, margin = KINDS[name], VALUE_MARGIN if name == "value" else studies[0].spec.margin if studies else 0.0
    published = kind.to_effect(figure[name])
    if name == "points":
        margin = kind.to_effect(margin)
        published = published if abs(published) >= margin else 0.0
    effects = measure_change(figure, studies) if "longer" in figure else measure_all(figure, studies)
    chosen = sorted((effect for effect in effects if effect.lr is None), key=lambda effect: effect.parameters)
    sizes = {effect.size: [other for other in chosen if other.size == effect.size] for effect in chosen}
    several = [effect for effect in effects if len(effect.differences) > 1 or effect.diverged]
    measured, so_far = [describe_size(size, own, kind) for size, own in sizes.items()], "open"
    if any(effect.lr is None for effect in several):
        percent = 100 * math.expm1(published)
        so_far = judge_claim(several, percent, figure["parameters"], margin, plan=False).phrase
    return measured, "reproduced" if name == "sign" and so_far == "smaller than published" else so_far


def measure_all(figure: Mapping[str, Any], studies: Sequence[Evidence]) -> list[MeasuredEffect]:
    return [effect for study in studies for effect in measure_figure(figure, study)]


def measure_change(figure: Mapping[str, Any], studies: Sequence[Evidence]) -> list[MeasuredEffect]:
    """By how much the effect of the second of each two studies exceeds that of the first, seed by seed."""
    known, changes = {study.name: study for study in studies}, list[MeasuredEffect]()
    for short, long in figure["longer"]:
        if short not in known or long not in known:
            continue
        before, after = ([e for e in measure_figure(figure, known[name]) if e.lr is None] for name in (short, long))
        for one, other in zip(before, after, strict=False):
            if len(one.differences) == len(other.differences):
                pairs = zip(one.differences, other.differences, strict=True)
                diverged = one.diverged + other.diverged
                size = min(one.size, other.size, key=lambda name: "×" in name)  # the ladder's name, of one of them
                changes.append(replace(other, differences=[b - a for a, b in pairs], diverged=diverged, size=size))
    return changes


def judge_speed_up(figure: Mapping[str, Any], studies: Sequence[Evidence]) -> tuple[list[dict[str, Any]], str]:
    """How many times the arm's tokens the baseline needs at every size, and the word: as for an effect, where 1 is none
    and what lies within SPEED_MARGIN of it is none either."""
    found = filter(None, (study.measure_compute(figure["arm"]) for study in studies))
    alike = [replace(size, arm_flops=size.arm_flops and size.baseline_flops) for size in found]
    own = sorted(alike, key=find_flops)
    try:
        found = estimate_speed_ups(own)
    except ValueError:  # too few sizes, or a loss that does not fall with compute
        return [], "open"
    if not found:
        return [], "open"
    seeds = {size.size: 0 if size.arm is None else len(size.arm) for size in own}
    measured = [
        {"size": each.size, "seeds": seeds[each.size], "diverged": 0, "effect": [*map(round_number, each.flops)]}
        for each in found
    ]
    outcomes = [classify_speed_up(each, figure["speed_up"]) for each in found]
    if outcomes[-1] == "open":
        return measured, "open"
    if outcomes[-1] == "none":
        return measured, f"not seen up to {found[-1].size}"
    first = len(outcomes) - next((k for k, one in enumerate(outcomes[::-1]) if one != "seen"), len(outcomes))
    return measured, f"seen from {found[first].size} on"


def find_flops(size: SizeMeasurement) -> float:
    return size.baseline_flops


def classify_speed_up(found: SpeedUp, published: float) -> str:
    """None where the interval lies below the margin, else seen where it excludes 1 on the published side."""
    low, high = math.log(found.flops[1]), math.inf if found.flops[2] is None else math.log(found.flops[2])
    if published < 1:
        low, high = -high, -low
    return "none" if high < SPEED_MARGIN else "seen" if low > 0 else "open"


def find_baseline(figure: Mapping[str, Any]) -> str | None:
    return figure.get("baseline", None if "value" in figure else "standard")


def measure_figure(figure: Mapping[str, Any], study: Evidence) -> list[MeasuredEffect]:
    if "points" in figure:
        return study.measure_mean(figure["arm"])
    if "lr" in figure:
        return study.measure_at(figure["lr"], figure["arm"], figure["baseline"])
    read = study.read_probe(figure["probe"], figure.get("layer")) if "probe" in figure else None
    effects = study.measure(figure["arm"], find_baseline(figure), read)
    return [effect for effect in effects if effect.corpus == figure.get("corpus", effect.corpus)]


def counts(figure: Mapping[str, Any], study: Evidence) -> bool:
    """Whether a study is one of the sizes that a verdict needs."""
    effects = [effect for effect in measure_figure(figure, study) if effect.lr is None]
    seeds = min((len(effect.differences) + effect.diverged for effect in effects), default=0)
    baseline = find_baseline(figure)
    tuned = baseline is None or "lr" in figure or study.are_tuned_alike(figure["arm"], baseline)
    return seeds >= SEEDS and tuned


def describe_size(size: str, effects: Sequence[MeasuredEffect], kind: FigureKind) -> dict[str, Any]:
    """The effect at one size on average over corpora: [estimate, low, high], without an interval where one seed ran."""
    seeds, diverged = min(len(effect.differences) for effect in effects), sum(effect.diverged for effect in effects)
    about: dict[str, Any] = {"size": size, "seeds": seeds, "diverged": diverged, "effect": None}
    if diverged or not seeds:
        return about
    if seeds == 1:
        alone = fmean(effect.differences[0] for effect in effects)
        return about | {"effect": [round_number(kind.show(alone)), None, None]}
    found = average_groups([effect.differences for effect in effects])
    return about | {"effect": [round_number(kind.show(x)) for x in (found.estimate, found.low, found.high)]}


def write_claims_table(
    claims: Mapping[str, Any],
    judged: Sequence[Mapping[str, Any]],
    order: Mapping[str, PlannedStudy],
) -> str:
    lines = [
        "| | claim | published | measured: change of perplexity, points of accuracy, or value | verdict |",
        "|---|---|---|---|---|",
    ]
    for claim, found in zip(claims["claims"], judged, strict=True):
        measured = "<br>".join(write_measured(figure) for figure in found["figures"])
        words = list_words(found["figures"])
        verdict = "; ".join(words)
        if words == ["open"]:
            verdict += f" ({describe_missing(claim, found['figures'], order)})"
        elif "limits" in claim:
            verdict = f"{claim['limits']}: {verdict}"
        lines.append(f"| {claim['id']} | {claim['claim']} | {claim['published']} | {measured} | {verdict} |")
    return "\n".join([*lines, ""])


def describe_missing(
    claim: Mapping[str, Any], figures: Sequence[Mapping[str, Any]], order: Mapping[str, PlannedStudy]
) -> str:
    """Which sizes count so far, for the figure that was tried at most, of those that a verdict needs, and how long the
    runs that the claim's studies lack would take."""
    most = max((figure["counted"] for figure in figures), key=len, default=[])
    counted = f"of {SIZES} sizes {', '.join(most) or 'none'} {'counts' if len(most) < 2 else 'count'} so far"
    arms = {name for figure in claim["figures"] for name in (figure["arm"], find_baseline(figure)) if name}
    minutes = count_missing_minutes(claim["studies"], arms, order)
    if not minutes:
        return counted
    return f"{counted}; about {math.ceil(sum(minutes.values()))} minutes more: {', '.join(minutes)}"


def list_words(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The word that all figures share, or each one's own."""
    words = {figure["word"] for figure in figures} or {"open"}
    if len(words) == 1:
        return [*words]
    return [f"{name_figure(figure)}: {figure['word']}" for figure in figures]


def name_figure(figure: Mapping[str, Any]) -> str:
    return figure["probe"].replace("_", " ") if figure.get("probe") and not figure["baseline"] else figure["arm"]


def write_measured(figure: Mapping[str, Any]) -> str:
    kind = KINDS[figure["kind"]]
    what = f" {figure['probe']}" if "probe" in figure and figure["baseline"] else ""
    against = "" if figure["baseline"] in (None, "standard") else f" against {figure['baseline']}"
    sign = "" if figure["baseline"] is None or figure["kind"] == "speed_up" else "+"
    told = [f"**{name_figure(figure)}{what}{against}**"]
    for own in figure["measured"]:
        size = ", ".join(f"[{own['size']}](../evidence/{name}/README.md)" for name in own["studies"])
        if own["diverged"]:
            told.append(f"{size}: {own['diverged']} seeds diverged")
        elif own["effect"] is not None:
            effect, *ends = (
                None if x is None else f"{x:{sign}.{kind.digits}f}".translate(MINUS) for x in own["effect"]
            )
            interval = "" if None in ends else f" ({ends[0]} to {ends[1]})"
            few = "" if own["seeds"] == SEEDS else f", n = {own['seeds']}"
            told.append(f"{size}: {effect}{kind.unit}{interval}{few}".replace(" ", "\N{NO-BREAK SPACE}"))
    return "<br>".join(told)
