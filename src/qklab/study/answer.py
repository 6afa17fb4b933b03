"""What a study says, as text for a terminal."""

import math
from collections.abc import Sequence

from qklab.study.across import AcrossFindings, compare_across
from qklab.study.findings import Findings, average_corpora, derive_findings
from qklab.study.metrics import find_metric
from qklab.study.parts import StudyPart
from qklab.study.plan import write_number
from qklab.study.records import Analyses, RunResult
from qklab.study.spec import StudySpec
from qklab.study.stats.tuning import RateSensitivity


def write_answer(study: StudySpec, results: Sequence[RunResult], analyses: Analyses | None = None) -> str:
    """For each corpus the headline, a verdict and the cost of every arm, a table, and what would settle open cases;
    then what holds across corpora, and of published figures."""
    across = write_across(compare_across(study, [StudyPart(study, results)]))
    return "\n\n".join(part for part in (write_corpora(study, results, analyses), across) if part)


def write_corpora(study: StudySpec, results: Sequence[RunResult], analyses: Analyses | None = None) -> str:
    """What is found on each corpus, and for their mean, where it says something."""
    each = [derive_findings(study, results, corpus, analyses) for corpus in study.corpora]
    average = average_corpora(study, each)
    return "\n\n".join(write_findings(study, own) for own in [*each, *([] if average is None else [average])])


def write_across(found: AcrossFindings) -> str:
    """What holds across sizes and corpora, and the words for published figures."""
    blocks = [
        ("Across sizes", [*(s for arm in found.sizes for s in arm.sentences), *(c.sentence for c in found.compute)]),
        ("Across corpora", [each.sentence for each in found.corpora]),
        ("Against difficulty", [each.sentence for each in found.difficulty]),
        ("Published", [f"{each.id} ({each.source}): {each.verdict.sentence}" for each in found.claims]),
        ("Left open", found.notes),
    ]
    told = [(name, [line for line in lines if line]) for name, lines in blocks]
    return "\n\n".join("\n".join([f"{name}:", *(f"- {line}" for line in lines)]) for name, lines in told if lines)


def write_findings(study: StudySpec, findings: Findings) -> str:
    lines = [f"{findings.headline}.", ""]
    for arm, verdict in findings.verdicts.items():
        lines.append(f"- {verdict.sentence}" + (f" {findings.costs[arm]}" if arm in findings.costs else ""))
    tables = [write_table(study, findings), write_benchmark_table(findings)]
    blocks = ["\n".join(lines).rstrip(), *tables, *findings.notes, findings.settling]
    if findings.command:
        blocks.append(f"Run: {findings.command}")
    return "\n\n".join(block for block in blocks if block)


def write_table(study: StudySpec, findings: Findings) -> str:
    """An arm a row: the mean of the metric on test text, and what the arm took."""
    chance = "" if findings.chance is None else f" (chance {findings.chance:.1f})"
    rows = [
        [
            find_metric(study.metric).unit + chance,
            "test",
            "lr",
            "sensitivity",
            "parameters",
            "cache/token",
            "tokens/s",
            "peak memory",
            "diverged",
        ],
    ]
    for arm, took in findings.ledgers.items():
        if not took["runs"]:
            continue
        values = [value for value in findings.values.get(arm, {}).values() if math.isfinite(value)]
        lr, tuning = findings.lrs[arm], findings.tuning.get(arm)
        rows.append(
            [
                arm,
                f"{sum(values) / len(values):.4f}" if values else "–",
                write_number(lr) if lr is not None else "none",
                write_sensitivity(None if tuning is None else tuning.sensitivity),
                f"{took['parameters']:,.0f}",
                f"{took['cache_bytes_per_token']:,.0f} B",
                f"{took['tokens_per_second']:,.0f}",
                f"{took['peak_memory_bytes'] / 2**20:,.0f} MiB",
                f"{took['diverged']} of {took['runs']}",
            ]
        )
    return "" if len(rows) == 1 else align_rows(rows)


def write_benchmark_table(findings: Findings) -> str:
    """An arm a row: what it scores on each benchmark of its runs, ± the standard error over seeds."""
    scored = {arm: own for arm, took in findings.ledgers.items() if (own := took.get("benchmarks"))}
    if not scored:
        return ""
    first = next(iter(scored.values()))
    chances = [f" (chance {own['chance']:.1f})" if own["chance"] is not None else "" for own in first.values()]
    rows = [["points of 100", *(name + chance for name, chance in zip(first, chances, strict=True))]]
    for arm, own in scored.items():
        errors = ["" if each["error"] is None else f" ± {each['error']:.2f}" for each in own.values()]
        rows.append([arm, *(f"{each['mean']:.2f}{error}" for each, error in zip(own.values(), errors, strict=True))])
    return align_rows(rows)


def align_rows(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(f"  {line}" for line in lines)


def write_sensitivity(found: RateSensitivity | None) -> str:
    """How much an arm loses where its learning rate is not the best, with half its interval."""
    if found is None:
        return "–"
    return f"{found.mean:.3f}" + (f" ± {found.half:.3f}" if found.half is not None else "")
