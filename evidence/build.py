"""Rebuild every table of the evidence from its records.

    python evidence/build.py            writes results.json, each study's table in its README.md, and docs/evidence.md's
    python evidence/build.py --check    changes nothing, names what is stale and exits 1

Numbers in sentences, there, in README.md, in docs/mechanisms and in the studies' own, are filled in between marks; an
arm without a rate is at its own best one:

    <!-- nats: coupling-nano standard@3e-3 uncoupled@3e-3 -->0.063 nats (0.040 to 0.087)<!-- end -->, first less second
    <!-- perplexity: coupling-nano leapfrog standard -->−4.9 % (−17.3 to +9.4)<!-- end -->, first against second
    <!-- gpt2: headline-nano leapfrog standard -->−6.7 % (−8.5 to −4.9)<!-- end -->, the same per token of GPT-2's size
    <!-- average: headline-pico,headline-nano leapfrog uncoupled -->+2.9 % (+1.0 to +4.8)<!-- end -->, over studies
    <!-- points: b8-2x32 q=k=v -->−2.6 points (−4.0 to −1.2)<!-- end -->, of accuracy, mean over tasks, against standard
    <!-- spread: coupling-nano standard -->0.22 nats<!-- end -->, between the best and the worst seed at one rate
    <!-- vectors: similarity-3x64 key_value_alignment trained -->0.31 (0.27 to 0.35)<!-- end -->, or untrained

A study is a folder here with study.toml, the plan as it was fixed beforehand, and records.jsonl.xz (see keep.py). What
its arms are found to do is what `qklab study` finds; what becomes of a published figure is the word of `judge_claim`
(claims.py).
"""

import json
import math
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from claims import MINUS, judge_claims, write_claims_table
from order import read_order
from records import RECORDS
from studies import Evidence

from qklab.study.parts import measure_bytes_per_token
from qklab.study.plan import write_number
from qklab.study.stats.groups import average_groups
from qklab.study.stats.paired import compare_paired

EVIDENCE = Path(__file__).parent
PAGE, README, RESULTS = EVIDENCE.parent / "docs/evidence.md", EVIDENCE.parent / "README.md", EVIDENCE / "results.json"
MECHANISMS = PAGE.parent / "mechanisms"
MARK = "<!-- table: begin -->"
GPT2_BYTES = 2_226_879 / 485_630  # that a token of GPT-2's has of the test text (headline-51m)


# Tables


def write_study_table(about: Mapping[str, Any]) -> str:
    """Mean of the metric of every arm at every learning rate, and the difference at each arm's own best."""
    lines = []
    for corpus, found in about["corpora"].items():
        rates = [write_number(lr) for lr in found["grid"]]
        heads = [
            f"{corpus}: {about.get('unit', 'nats per token on test text')}",
            *rates,
            f"against {about['baseline']}",
            "p (Holm)",
        ]
        lines += ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        for arm, own in found["arms"].items():
            cells = [write_losses(own["rates"][rate], float(rate) == own["lr"]) for rate in rates]
            lines.append("| " + " | ".join([arm, *cells, write_difference(own), write_p(own)]) + " |")
        lines.append("")
    if "vectors" in about:
        lines += [f"| {about['baseline']}, mean of layers and seeds | untrained | trained |", "|---|---:|---:|"]
        for name, own in about["vectors"].items():
            cells = ["{:.2f} ({:.2f} to {:.2f})".format(*own[side]) for side in ("untrained", "trained")]
            lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |".translate(MINUS))
        lines.append("")
    if "mean" in about:
        mean = about["mean"]
        chance = "" if mean["chance"] is None else f" (chance {mean['chance']:.1f})"
        heads = [f"{mean['of']}: {about['unit']}{chance}", "mean", f"against {about['baseline']}", "p (Holm)"]
        lines += ["| " + " | ".join(heads) + " |", "|---|---:|---:|---:|"]
        lines += [
            f"| {arm} | {write_score(own['value'])} | {write_difference(own)} | {write_p(own)} |"
            for arm, own in mean["arms"].items()
        ]
        lines.append("")
    return "\n".join(lines)


def write_score(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.2f}"


def write_losses(about: Mapping[str, Any], chosen: bool) -> str:
    """Mean ± standard deviation over seeds; bold at the rate that validation text chose."""
    if not about["runs"]:
        return "–"
    if about["diverged"]:
        return f"{about['diverged']} of {about['runs']} diverged"
    spread = f" ± {stdev(about['losses']):.3f}" if about["runs"] > 1 else ""
    return f"**{about['mean']:.3f}**{spread}" if chosen else f"{about['mean']:.3f}{spread}"


def write_difference(own: Mapping[str, Any]) -> str:
    if "difference" not in own or own["verdict"]["word"] == "diverged":
        return "diverged" if own["lr"] is None else ""
    mean, low, high = own["difference"]
    interval = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
    return f"{mean:+.3f}{interval}".translate(MINUS)


def write_p(own: Mapping[str, Any]) -> str:
    p = own.get("verdict", {}).get("p")
    return "" if p is None else f"{p:.2g}" if p else "< 0.0001"


def fill_block(text: str, table: str) -> str:
    """The text with what stands between its two marks replaced."""
    block = re.compile(rf"(?<={MARK}\n).*?(?=<!-- table: end -->)", re.DOTALL)
    return block.sub(lambda _: table, text)


# Numbers in sentences


def write_number_of(kind: str, studies: Sequence[Evidence], places: Sequence[str]) -> str:
    """A paired difference in nats, per cent of perplexity or points of accuracy with its 95 % interval, how far seeds
    lie apart, or how alike vectors are."""
    study = studies[0]
    if kind == "spread":
        rates = [[*own.values()] for (arm, _), own in study.collect(study.spec.corpora[0]).items() if arm == places[0]]
        return f"{max(max(own) - min(own) for own in rates if all(map(math.isfinite, own))):.2f} nats"
    if kind == "vectors":
        name, side = places
        return "{:.2f} ({:.2f} to {:.2f})".format(*study.describe_vectors()[name][side]).translate(MINUS)
    if kind == "points":
        (effect,) = study.measure_mean(" ".join(places))
        found = average_groups([effect.differences])
        mean, low, high = (100 * value for value in (found.estimate, found.low, found.high))
        return f"{mean:+.1f} points ({low:+.1f} to {high:+.1f})".translate(MINUS)
    if kind == "average":
        effects = [effect for one in studies for effect in one.measure(*places) if effect.lr is None]
        found = average_groups([effect.differences for effect in effects])
        return write_percent(found.estimate, found.low, found.high)
    own = compare_paired(*(study.select(place) for place in places))
    low, high = (math.nan if end is None else end for end in (own.low, own.high))
    if kind == "nats":
        return f"{own.mean:.3f} nats ({low:.3f} to {high:.3f})".translate(MINUS)
    scale = 1.0
    if kind == "gpt2":
        scale = GPT2_BYTES / measure_bytes_per_token(study.results, study.spec.corpora[0])
    return write_percent(*(scale * value for value in (own.mean, low, high)))


def write_percent(*nats: float) -> str:
    mean, low, high = (100 * math.expm1(value) for value in nats)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})".translate(MINUS)


def fill_numbers(text: str, studies: Mapping[str, Evidence]) -> str:
    """The text with every number between marks computed again."""

    def compute(found: re.Match[str]) -> str:
        kind, names, places = found["kind"], found["study"].split(","), found["places"].split()
        for name in names:
            if name not in studies:
                sys.exit(f"there is no study {name}, which a page asks for; there are {', '.join(studies)}.")
        return f"{found['mark']}{write_number_of(kind, [studies[name] for name in names], places)}{found['end']}"

    kinds = "nats|perplexity|gpt2|average|points|spread|vectors"
    mark = rf"(?P<mark><!-- (?P<kind>{kinds}): (?P<study>\S+) (?P<places>[^>]+?) -->)"
    return re.sub(mark + r".*?(?P<end><!-- end -->)", compute, text, flags=re.DOTALL)


def build() -> dict[Path, str]:
    """Every file that follows from the records, as it should be."""
    folders = sorted(path.parent for path in EVIDENCE.glob(f"*/{RECORDS}"))
    order = read_order(EVIDENCE)
    begins_with = {study.name: study.begins_with for study in order.values()}
    studies = {folder.name: Evidence(folder, begins_with.get(folder.name, ())) for folder in folders}
    claims = tomllib.loads((EVIDENCE / "claims.toml").read_text(encoding="utf-8"))
    judged = judge_claims(claims, studies)
    about = {name: study.describe() for name, study in studies.items()}
    results = json.dumps({"studies": about, "claims": judged}, indent=1, ensure_ascii=False) + "\n"
    page = fill_block(PAGE.read_text(encoding="utf-8"), write_claims_table(claims, judged, order))
    files = {RESULTS: results, PAGE: fill_numbers(page, studies)}
    for path in (README, *sorted(MECHANISMS.glob("*.md"))):
        files[path] = fill_numbers(path.read_text(encoding="utf-8"), studies)
    for name, study in studies.items():
        page = study.folder / "README.md"
        text = page.read_text(encoding="utf-8")
        if MARK in text:  # a study of one seed may have a table of its own
            files[page] = fill_numbers(fill_block(text, write_study_table(about[name])), studies)
    return files


def main() -> None:
    stale = {
        path: text for path, text in build().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if "--check" in sys.argv:
        sys.exit("".join(f"stale: {path.relative_to(EVIDENCE.parent)}\n" for path in stale) or 0)
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(EVIDENCE.parent)}")


if __name__ == "__main__":
    main()
