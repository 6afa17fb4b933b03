"""Rebuild every table of the evidence from its records.

    python evidence/build.py            writes results.json, each study's table in its README.md, and docs/evidence.md's
    python evidence/build.py --check    changes nothing, names what is stale and exits 1

Numbers in sentences, there and in README.md, are filled in between marks; an arm without a rate is at its own best one:

    <!-- nats: coupling-nano standard@3e-3 uncoupled@3e-3 -->0.063 nats (0.040 to 0.087)<!-- end -->, first less second
    <!-- perplexity: coupling-nano leapfrog standard -->−4.9 % (−17.3 to +9.4)<!-- end -->, first against second
    <!-- spread: coupling-nano standard -->0.22 nats<!-- end -->, between the best and the worst seed at one rate

A study is a folder here with study.toml, the plan as it was fixed beforehand, and records.jsonl (see keep.py). What its
arms are found to do is what `qklab study` finds; what becomes of a published figure is the word of `judge_claim`, but a
claim stays open while it was tried at fewer sizes than the protocol asks for. A figure in `points` is of the mean over
a study's tasks, judged by the same rules; one within the study's margin is a claim that there is no difference.
"""

import json
import math
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from qklab.study.claims import ClaimJudge, ClaimVerdict, MeasuredEffect, judge_claim
from qklab.study.findings import Findings, average_corpora, derive_findings
from qklab.study.metrics import find_metric
from qklab.study.parts import measure_bytes_per_token
from qklab.study.plan import PlannedRun, write_number
from qklab.study.records import RunResult
from qklab.study.spec import StudySpec, read_study
from qklab.study.stats.groups import average_groups
from qklab.study.stats.paired import compare_paired, separate_diverged
from qklab.study.verdict import Verdict

EVIDENCE = Path(__file__).parent
PAGE, README, RESULTS = EVIDENCE.parent / "docs/evidence.md", EVIDENCE.parent / "README.md", EVIDENCE / "results.json"
SIZES = 3  # that a verdict on a claim needs
MARK = "<!-- table: begin -->"
MINUS = str.maketrans("-", "−")
Values = dict[tuple[str, float], dict[int, float]]  # (arm, learning rate) → seed → the metric on test text


# From records to numbers


class Evidence:
    """A study as far as it has been run."""

    def __init__(self, folder: Path):
        self.name, self.folder, self.spec = folder.name, folder, read_study(folder / "study.toml")
        model = self.spec.base["model"]
        self.size = str(model.get("recipe") or f"{model['layers']}×{model['width']}")
        self.results = read_kept_results(folder, self.spec)
        self.runs = len(self.results)
        counts = {result.planned.arm: int(result.summary["parameters"]) for result in self.results}
        self.parameters = {arm: counts[arm] for arm in self.spec.arms if arm in counts}

    def find(self, corpus: str) -> Findings:
        return derive_findings(self.spec, self.results, corpus)

    def collect(self, corpus: str) -> Values:
        metric, found = find_metric(self.spec.metric), Values()
        for result in self.results:
            run = result.planned
            if run.corpus == corpus:
                found.setdefault((run.arm, run.lr), {})[run.seed] = result.value(metric)
        return found

    def select(self, place: str) -> dict[int, float]:
        """Seed → the metric of an arm, "leapfrog@3e-3" or, at its own best rate, "leapfrog"."""
        arm, _, rate = place.partition("@")
        corpus = self.spec.corpora[0]
        lr = float(rate) if rate else self.find(corpus).lrs.get(arm)
        found = self.collect(corpus).get((arm, lr or 0.0))
        if found is None:
            sys.exit(f"{self.name} has no run of {place}, which a page asks for; correct the mark or keep the record.")
        return found

    def measure(self, arm: str, baseline: str) -> list[MeasuredEffect]:
        """Paired differences on every corpus: at the rates chosen for each arm, and at each rate that both finished."""
        effects = []
        for corpus in self.spec.corpora:
            values, findings = self.collect(corpus), self.find(corpus)
            if not {arm, baseline} <= self.parameters.keys() or findings.lrs[baseline] is None:
                continue
            pairs: dict[float | None, tuple[dict[int, float], dict[int, float]]] = {
                lr: (values.get((arm, lr), {}), values.get((baseline, lr), {})) for lr in findings.grid
            }
            own, length = findings.lrs[arm], measure_bytes_per_token(self.results, corpus)
            pairs[None] = (
                dict.fromkeys(range(self.spec.seeds), math.inf) if own is None else values.get((arm, own), {}),
                values.get((baseline, findings.lrs[baseline] or 0.0), {}),
            )
            for lr, (ours, theirs) in pairs.items():
                differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
                finite = [value for value in differences if math.isfinite(value)]
                if len(finite) == len(differences) > 1 or (lr is None and differences):
                    diverged = len(differences) - len(finite)
                    count = self.parameters[baseline]
                    effects.append(MeasuredEffect(self.size, count, finite, corpus, lr, diverged, length))
        return effects

    def average(self) -> Findings | None:
        """What is found on the mean over its tasks."""
        return average_corpora(self.spec, [self.find(corpus) for corpus in self.spec.corpora])

    def describe(self) -> dict[str, Any]:
        """Everything a table or figure shows of it."""
        corpora = {}
        for corpus in self.spec.corpora:
            findings, values = self.find(corpus), self.collect(corpus)
            corpora[corpus] = {
                "grid": findings.grid,
                "notes": findings.notes,
                "arms": {arm: self.describe_arm(arm, findings, values) for arm in self.parameters},
            }
        metric = find_metric(self.spec.metric)
        about: dict[str, Any] = {} if metric.name == "loss" else {"unit": metric.unit}
        average = self.average()
        if average is not None:
            about["mean"] = {"of": average.corpus, "chance": round_number(average.chance), "arms": {}}
            for arm, values in average.values.items():
                own = describe_verdict(average.verdicts.get(arm))
                mean = fmean(values.values())
                about["mean"]["arms"][arm] = {"value": round(mean, 4) if math.isfinite(mean) else None, "lr": 0.0} | own
        return {"size": self.size, "baseline": self.spec.baseline, "runs": self.runs, "corpora": corpora} | about

    def describe_arm(self, arm: str, findings: Findings, values: Values) -> dict[str, Any]:
        rates = {write_number(lr): describe_losses(values.get((arm, lr), {}).values()) for lr in findings.grid}
        about: dict[str, Any] = {"parameters": self.parameters[arm], "lr": findings.lrs[arm], "rates": rates}
        return about | describe_verdict(findings.verdicts.get(arm))


def describe_verdict(verdict: Verdict | None) -> dict[str, Any]:
    """The word and the difference, as far as there are any."""
    if verdict is None:
        return {}
    word = {"word": verdict.verdict, "seeds": verdict.seeds, "p": round_number(verdict.p_holm)}
    paired = verdict.paired
    if paired is None:
        return {"verdict": word}
    return {"verdict": word, "difference": [round_number(value) for value in (paired.mean, paired.low, paired.high)]}


def read_kept_results(folder: Path, spec: StudySpec) -> list[RunResult]:
    planned = {
        str(run.path): run
        for corpus, arm, lr in product(spec.corpora, spec.arms, spec.widest_grid)
        for run in (PlannedRun(corpus, arm, lr, seed) for seed in range(spec.seeds))
    }
    lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
    kept = {record["place"]: record["summary"] for record in map(json.loads, lines)}
    return [RunResult(planned[place], own["status"], own) for place, own in kept.items()]


def describe_losses(losses: Any) -> dict[str, Any]:
    """Of the runs of an arm at one learning rate."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    about = {"runs": len(losses), "diverged": len(losses) - len(finite), "losses": [round(x, 4) for x in finite]}
    return about | {"mean": round(fmean(finite), 4) if finite and not about["diverged"] else None}


def round_number(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


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
    return "" if p is None else f"{p:.2g}"


def judge_claims(claims: Sequence[Mapping[str, Any]], studies: Mapping[str, Evidence]) -> list[dict[str, Any]]:
    """Every claim's figures, each with what was measured at every size and the word for it."""
    judged = []
    for claim in claims:
        figures = []
        own = [studies[name] for name in claim.get("studies", []) if name in studies]
        for figure in claim.get("figures", []):
            if "points" in figure:
                figures += [found for study in own if (found := judge_points(figure, study)) is not None]
                continue
            baseline, effects = figure.get("baseline", "standard"), list[MeasuredEffect]()
            for study in own:
                effects += study.measure(figure["arm"], baseline)
            if any(effect.lr is None for effect in effects):
                verdict = judge_claim(
                    effects,
                    figure["percent"],
                    figure["parameters"],
                    margin=own[0].spec.margin,
                    arm=figure["arm"],
                    baseline=baseline,
                    plan=False,
                )
                figures.append(describe_figure(figure, baseline, effects, verdict))
        judged.append({"id": claim["id"], "figures": figures})
    return judged


def judge_points(figure: Mapping[str, Any], study: Evidence) -> dict[str, Any] | None:
    """A published difference of the mean over tasks, in points of accuracy, beside the one that was measured."""
    average = study.average()
    if average is None:
        return None
    arm, margin = figure["arm"], study.spec.margin
    pairs = separate_diverged(average.values[arm], average.values[study.spec.baseline])
    about = {"arm": arm, "baseline": study.spec.baseline, "published": figure["points"], "word": "open"}
    own = {"size": study.size, "seeds": len(pairs.arm), "diverged": len(pairs.arm_diverged), "points": None}
    if own["diverged"] or own["seeds"] < 2:
        return about | {"measured": [own], "so_far": "open"}
    effect = average_groups([[pairs.arm[seed] - pairs.baseline[seed] for seed in pairs.arm]])
    published = figure["points"] if abs(figure["points"]) >= margin else 0.0
    own["points"] = [round_number(value) for value in (effect.estimate, effect.low, effect.high)]
    return about | {"measured": [own], "so_far": ClaimJudge(published, margin, 0.05).classify(effect)}


def describe_figure(
    figure: Mapping[str, Any], baseline: str, effects: Sequence[MeasuredEffect], verdict: ClaimVerdict
) -> dict[str, Any]:
    sizes = sorted({(effect.parameters, effect.size) for effect in effects if effect.lr is None})
    measured = []
    for _, size in sizes:
        own = [effect for effect in effects if effect.size == size and effect.lr is None]
        alone = judge_claim(own, figure["percent"], figure["parameters"], 0.01, plan=False)
        ends = [round_number(value) for value in (alone.percent, alone.low, alone.high)]
        measured.append({"size": size, "percent": ends, "seeds": alone.seeds, "diverged": sum(e.diverged for e in own)})
    return {
        "arm": figure["arm"],
        "baseline": baseline,
        "published": figure["percent"],
        "measured": measured,
        "word": verdict.phrase if len(sizes) >= SIZES else "open",
        "so_far": verdict.phrase,
    }


def write_claims_table(claims: Mapping[str, Any], judged: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| | claim | published | measured: change of perplexity, or points of accuracy | verdict |",
        "|---|---|---|---|---|",
    ]
    for claim, found in zip(claims["claims"], judged, strict=True):
        measured = "<br>".join(write_measured(figure) for figure in found["figures"])
        words = sorted({figure["word"] for figure in found["figures"]}) or ["open"]
        links = ", ".join(f"[{name}](../evidence/{name}/README.md)" for name in claim.get("studies", []))
        missing = claim.get("missing", "") or f"{links}; micro and mini are missing"
        verdict = "; ".join(words) + (f" ({missing})" if words == ["open"] else f" ({links})")
        lines.append(f"| {claim['id']} | {claim['claim']} | {claim['published']} | {measured} | {verdict} |")
    return "\n".join([*lines, ""])


def write_measured(figure: Mapping[str, Any]) -> str:
    against = "" if figure["baseline"] == "standard" else f" against {figure['baseline']}"
    told = []
    for own in figure["measured"]:
        unit = "points" if "points" in own else "%"
        change, low, high = own["points" if "points" in own else "percent"] or (None,) * 3
        if own["diverged"]:
            told.append(f"{own['size']}: {own['diverged']} seeds diverged")
        elif change is not None:
            told.append(f"{own['size']}: {change:+.1f} {unit} ({low:+.1f} to {high:+.1f}), n = {own['seeds']}")
    return f"{figure['arm']}{against} {'; '.join(told)}".translate(MINUS)


def fill_block(text: str, table: str) -> str:
    """The text with what stands between its two marks replaced."""
    block = re.compile(rf"(?<={MARK}\n).*?(?=<!-- table: end -->)", re.DOTALL)
    return block.sub(lambda _: table, text)


# Numbers in sentences


def write_number_of(kind: str, study: Evidence, places: Sequence[str]) -> str:
    """A paired difference in nats or per cent of perplexity with its 95 % interval, or how far seeds lie apart."""
    if kind == "spread":
        rates = [[*own.values()] for (arm, _), own in study.collect(study.spec.corpora[0]).items() if arm == places[0]]
        return f"{max(max(own) - min(own) for own in rates if all(map(math.isfinite, own))):.2f} nats"
    own = compare_paired(*(study.select(place) for place in places))
    low, high = (math.nan if end is None else end for end in (own.low, own.high))
    if kind == "nats":
        return f"{own.mean:.3f} nats ({low:.3f} to {high:.3f})".translate(MINUS)
    mean, low, high = (100 * math.expm1(value) for value in (own.mean, low, high))
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})".translate(MINUS)


def fill_numbers(text: str, studies: Mapping[str, Evidence]) -> str:
    """The text with every number between marks computed again."""

    def compute(found: re.Match[str]) -> str:
        kind, study, places = found["kind"], found["study"], found["places"].split()
        if study not in studies:
            sys.exit(f"there is no study {study}, which a page asks for; there are {', '.join(studies)}.")
        return f"{found['mark']}{write_number_of(kind, studies[study], places)}{found['end']}"

    mark = r"(?P<mark><!-- (?P<kind>nats|perplexity|spread): (?P<study>\S+) (?P<places>[^>]+?) -->)"
    return re.sub(mark + r".*?(?P<end><!-- end -->)", compute, text, flags=re.DOTALL)


def build() -> dict[Path, str]:
    """Every file that follows from the records, as it should be."""
    folders = sorted(path.parent for path in EVIDENCE.glob("*/records.jsonl"))
    studies = {folder.name: Evidence(folder) for folder in folders}
    claims = tomllib.loads((EVIDENCE / "claims.toml").read_text(encoding="utf-8"))
    judged = judge_claims(claims["claims"], studies)
    about = {name: study.describe() for name, study in studies.items()}
    results = json.dumps({"studies": about, "claims": judged}, indent=1, ensure_ascii=False) + "\n"
    page = fill_block(PAGE.read_text(encoding="utf-8"), write_claims_table(claims, judged))
    files = {RESULTS: results, PAGE: fill_numbers(page, studies)}
    files[README] = fill_numbers(README.read_text(encoding="utf-8"), studies)
    for name, study in studies.items():
        page = study.folder / "README.md"
        text = page.read_text(encoding="utf-8")
        if MARK in text:  # a study of one seed may have a table of its own
            files[page] = fill_block(text, write_study_table(about[name]))
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
