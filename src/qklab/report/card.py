"""A card to show others: the verdicts of a study as one picture and one paragraph, fit for a pull request."""

import io
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qklab.report.folders import RunGroup, read_groups
from qklab.runs.directory import RunError
from qklab.runs.files import describe_os_error, write_bytes, write_text
from qklab.runs.progress import format_duration
from qklab.study.findings import Findings
from qklab.study.metrics import find_metric
from qklab.study.plan import write_number, write_rounded
from qklab.study.records import StudyRecord, read_analyses, read_study_record
from qklab.study.spec import StudySpec

COLOURS = {"better": "#1a7f5a", "worse": "#b3403a", "equivalent": "#2f5fa8"}
INK, SOFT, PAPER, BAND = "#1f2933", "#6b7785", "#fbfaf6", "#e6eaf0"
WIDTH, ROW, LETTERS = 7.5, 0.42, 68  # inches, inches a row, letters a line


@dataclass(frozen=True)
class Card:
    """What the card says of one group of runs."""

    study: StudySpec
    findings: Findings
    facts: list[str]
    command: str
    commit: str


def write_card(paths: Sequence[Path], out: Path) -> list[Path]:
    """Write the picture, `out` with the ending .png, and beside it the paragraph, .md."""
    cards = [card for group in read_groups(paths) if (card := read_card(group)) is not None]
    if not cards:
        raise RunError("a card needs a study that has a verdict, and there is none here; finish one first.")
    picture, text = out.with_suffix(".png"), out.with_suffix(".md")
    drawn = draw_card(cards)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(picture, drawn)
        write_text(text, write_paragraph(cards, picture.name))
    except OSError as error:
        raise RunError(
            f"the card {picture} cannot be written: {describe_os_error(error)}; choose another place with --out."
        ) from None
    return [picture, text]


def read_card(group: RunGroup) -> Card | None:
    """None where nothing was judged."""
    findings, study = group.findings, group.study
    if study is None or not findings.verdicts:
        return None
    record, ledger = read_study_record(group.folder), findings.ledgers[study.baseline]
    seconds = sum(result.process_seconds for result in group.results)
    machines = {str(run.record["environment"].get("device", {}).get("name")) for run in group.runs}
    rates = ", ".join(map(write_number, findings.grid))
    facts = [
        f"{write_rounded(ledger['parameters'] / 1e6, 3)} M parameters on {ledger['tokens']:,.0f} tokens",
        f"{study.seeds} paired seeds, every arm at learning rates {rates}",
        f"{len(group.results)} runs, {format_duration(seconds)} of computing on {', '.join(sorted(machines))}",
    ]
    return Card(study, findings, facts, write_command(record, group.folder), name_version(group))


def name_version(group: RunGroup) -> str:
    """The commits that made the runs, or the hashes of the code where it was no checkout."""
    records = [run.record for run in group.runs]
    found = {
        str(one)[:10] if (one := record.get("commit")) else f"code {str(record.get('code'))[:10]}" for record in records
    }
    return ", ".join(sorted(found))


def write_command(record: StudyRecord, folder: Path) -> str:
    """The command that did the study; of a comparison as it was asked for."""
    asked, spec = record.asked, record.spec
    if not asked:
        return read_analyses(folder).write_command(spec.seeds)
    arms = [arm for arm in spec.arms if arm != spec.baseline]
    words = ["qklab", "compare", *asked.get("texts", ()), "--arms", *arms]
    for name in ("minutes", "size"):
        if asked.get(name) is not None:
            words += [f"--{name}", f"{asked[name]:g}" if name == "minutes" else asked[name]]
    return shlex.join([*words, "--seeds", str(spec.seeds)])


def write_paragraph(cards: Sequence[Card], picture: str) -> str:
    """Markdown: the picture, then of every group its headline, verdicts and facts."""
    parts = [f"![{cards[0].findings.headline}]({picture})"]
    for card in cards:
        verdicts = " ".join(
            verdict.sentence + (f" {card.findings.costs[arm]}" if arm in card.findings.costs else "")
            for arm, verdict in card.findings.verdicts.items()
        )
        run = f" `{card.command}`," if card.command else ""
        parts.append(
            f"**{card.findings.headline}.** {verdicts} {'; '.join(card.facts)}.{run} qklab at {card.commit}, study "
            f"{card.study.fingerprint[:12]}."
        )
    return "\n\n".join(parts) + "\n"


def draw_card(cards: Sequence[Card]) -> bytes:
    """The picture as PNG: of every group the headline, the paired differences with their intervals, and the facts."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("a card is drawn with matplotlib, which is not installed; pip install 'qklab[card]'.") from None
    texts = [(wrap(f"{card.findings.headline}."), wrap("; ".join(card.facts) + ".", 108)) for card in cards]
    heights = [
        (0.24 * len(head), ROW * len(card.findings.verdicts) + 0.6, 0.16 * len(foot) + 0.2)
        for card, (head, foot) in zip(cards, texts, strict=True)
    ]
    ends = wrap_command(cards)
    whole = sum(map(sum, heights)) + 0.16 * len(ends) + 0.35
    figure = Figure(figsize=(WIDTH, whole), facecolor=PAPER)
    top = whole - 0.2
    for card, (head, foot), (above, middle, below) in zip(cards, texts, heights, strict=True):
        figure.text(0.03, top / whole, "\n".join(head), va="top", size=12.5, weight="bold", color=INK)
        top -= above + middle
        draw_differences(figure.add_axes((0.16, (top + 0.45) / whole, 0.47, (middle - 0.5) / whole)), card)
        figure.text(0.03, top / whole, "\n".join(foot), va="top", size=8.5, color=SOFT)
        top -= below
    figure.text(0.03, top / whole, "\n".join(ends), va="top", size=8, color=SOFT, family="monospace")
    with io.BytesIO() as written:
        figure.savefig(written, format="png", dpi=200, facecolor=PAPER)
        return written.getvalue()


def wrap(text: str, letters: int = LETTERS) -> list[str]:
    return textwrap.wrap(text, letters) or [""]


def wrap_command(cards: Sequence[Card]) -> list[str]:
    lines = dict.fromkeys(line for card in cards for line in wrap(card.command, 100) if line)
    commits = dict.fromkeys(card.commit for card in cards)
    return [*lines, f"qklab {', '.join(commits)}"]


def draw_differences(axes: Any, card: Card) -> None:
    """A row an arm: the paired difference with its interval, and the word for it."""
    study, found = card.study, card.findings
    metric = find_metric(study.metric)
    axes.set_facecolor(PAPER)
    axes.axvspan(-study.margin, study.margin, color=BAND, lw=0)
    axes.axvline(0, color=SOFT, lw=1)
    for row, verdict in enumerate(found.verdicts.values()):
        colour, paired, told = COLOURS.get(verdict.verdict, INK), verdict.paired, verdict.verdict
        if paired is not None:
            told = f"{verdict.verdict}  {paired.mean:+.3f}"
            if paired.low is not None and paired.high is not None:
                axes.plot([paired.low, paired.high], [row, row], color=colour, lw=2.4, solid_capstyle="butt")
                told += f"  [{paired.low:+.3f}, {paired.high:+.3f}]"
            axes.plot([paired.mean], [row], "o", color=colour, ms=7)
        axes.text(
            1.03, row, told.replace("-", "−"), transform=axes.get_yaxis_transform(), va="center", size=9, color=colour
        )
    names = ["\n".join(wrap(arm, 15)[:2]) for arm in found.verdicts]
    axes.set_yticks(range(len(names)), names, size=10, color=INK)
    axes.set_ylim(len(found.verdicts) - 0.5, -0.5)
    level = next((verdict.paired.level for verdict in found.verdicts.values() if verdict.paired), None)
    intervals = "" if level is None else f", {100 * level:.3g} % intervals"
    axes.set_xlabel(
        f"difference to {study.baseline} on test text, {metric.difference_unit}{intervals}", size=8.5, color=SOFT
    )
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(axis="both", length=0, labelsize=9, labelcolor=INK)
    for side in axes.spines.values():
        side.set_visible(False)
