"""Published figures beside what was measured at every size, and the word for what became of each.

A figure in claims.toml has one of
  percent   change of perplexity, arm against baseline (standard where none is named)
  points    percentage points of accuracy, on the mean over a study's tasks; one within the study's margin is a claim
            that there is no difference
  value     of a `probe` (docs/probes.md) at the end of training, in `layer` or on average over layers: of the arm, or
            its difference from `baseline` where one is named
A claim stays open while it was tried at fewer sizes than the protocol asks for, each with five seeds and, where arms
are compared, the best learning rates of both inside the grid.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from studies import Evidence, round_number

from qklab.study.claims import MeasuredEffect, judge_claim
from qklab.study.stats.groups import average_groups

SIZES, SEEDS = 3, 5  # that a verdict on a claim needs
VALUE_MARGIN = 0.05  # within which a probe's value is none
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
    "value": FigureKind(lambda value: value, lambda effect: effect, "", 2),
}


def judge_claims(claims: Sequence[Mapping[str, Any]], studies: Mapping[str, Evidence]) -> list[dict[str, Any]]:
    """Every claim's figures, each with what was measured at every size and the word for it."""
    judged = []
    for claim in claims:
        own = [studies[name] for name in claim.get("studies", []) if name in studies]
        found = [judge_figure(figure, own) for figure in claim.get("figures", [])]
        judged.append({"id": claim["id"], "figures": [figure for figure in found if figure["measured"]]})
    return judged


def judge_figure(figure: Mapping[str, Any], studies: Sequence[Evidence]) -> dict[str, Any]:
    """What was measured of a figure, the word for it by the protocol, and the word so far where sizes are missing."""
    name = next(kind for kind in KINDS if kind in figure)
    kind, margin = KINDS[name], VALUE_MARGIN if name == "value" else studies[0].spec.margin if studies else 0.0
    published = kind.to_effect(figure[name])
    if name == "points":
        margin = kind.to_effect(margin)
        published = published if abs(published) >= margin else 0.0
    effects = [effect for study in studies for effect in measure_figure(figure, study)]
    chosen = sorted((effect for effect in effects if effect.lr is None), key=lambda effect: effect.parameters)
    sizes = {effect.size: [other for other in chosen if other.size == effect.size] for effect in chosen}
    several = [effect for effect in effects if len(effect.differences) > 1 or effect.diverged]
    about = {"arm": figure["arm"], "baseline": find_baseline(figure), "kind": name, "published": figure[name]}
    about |= {key: figure[key] for key in ("probe",) if key in figure}
    about["measured"] = [describe_size(size, own, kind) for size, own in sizes.items()]
    so_far = "open"
    if any(effect.lr is None for effect in several):
        percent = 100 * math.expm1(published)
        so_far = judge_claim(several, percent, figure["parameters"], margin, plan=False).phrase
    counted = {study.size for study in studies if counts(figure, study)} & sizes.keys()
    word = so_far if len(counted) >= SIZES else "open"
    return about | {"word": word, "so_far": so_far, "counted": [size for size in sizes if size in counted]}


def find_baseline(figure: Mapping[str, Any]) -> str | None:
    return figure.get("baseline", None if "value" in figure else "standard")


def measure_figure(figure: Mapping[str, Any], study: Evidence) -> list[MeasuredEffect]:
    if "points" in figure:
        return study.measure_mean(figure["arm"])
    read = study.read_probe(figure["probe"], figure.get("layer")) if "probe" in figure else None
    return study.measure(figure["arm"], find_baseline(figure), read)


def counts(figure: Mapping[str, Any], study: Evidence) -> bool:
    """Whether a study is one of the sizes that a verdict needs."""
    seeds = min((len(e.differences) + e.diverged for e in measure_figure(figure, study) if e.lr is None), default=0)
    baseline = find_baseline(figure)
    return seeds >= SEEDS and (baseline is None or (study.is_tuned(figure["arm"]) and study.is_tuned(baseline)))


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


def write_claims_table(claims: Mapping[str, Any], judged: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| | claim | published | measured: change of perplexity, points of accuracy, or the value | verdict |",
        "|---|---|---|---|---|",
    ]
    for claim, found in zip(claims["claims"], judged, strict=True):
        measured = "<br>".join(write_measured(figure) for figure in found["figures"])
        words = list_words(found["figures"])
        links = ", ".join(f"[{name}](../evidence/{name}/README.md)" for name in claim.get("studies", []))
        missing = claim.get("missing", "") or f"{links}; {describe_missing(found['figures'])}"
        verdict = "; ".join(words) + (f" ({missing})" if words == ["open"] else f" ({links})")
        lines.append(f"| {claim['id']} | {claim['claim']} | {claim['published']} | {measured} | {verdict} |")
    return "\n".join([*lines, ""])


def describe_missing(figures: Sequence[Mapping[str, Any]]) -> str:
    """Which sizes count so far, for the figure that was tried at most, of those that a verdict needs."""
    most = max((figure["counted"] for figure in figures), key=len, default=[])
    count = "counts" if len(most) < 2 else "count"
    return f"of {SIZES} sizes {', '.join(most) or 'none'} {count} so far"


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
    sign = "" if figure["baseline"] is None else "+"
    told = []
    for own in figure["measured"]:
        if own["diverged"]:
            told.append(f"{own['size']}: {own['diverged']} seeds diverged")
        elif own["effect"] is not None:
            effect, *ends = (None if x is None else f"{x:{sign}.{kind.digits}f}" for x in own["effect"])
            interval = "" if None in ends else f" ({ends[0]} to {ends[1]})"
            told.append(f"{own['size']}: {effect}{kind.unit}{interval}, n = {own['seeds']}")
    return f"{name_figure(figure)}{what}{against} {'; '.join(told)}".translate(MINUS)
