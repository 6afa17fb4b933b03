"""Charts of the evidence, from evidence/results.json and the records of single studies."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .results import Chart, Results, new_figure
from .sketch import CACHED, GROUND, LINE, STROKE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = "evidence/results.json"
CHANGES = {"percent": "change of perplexity, per cent", "points": "points of accuracy, mean of five tasks"}
CURVES = (("standard", "0.012"), ("leapfrog", "0.012"), ("affine", "0.006"), ("uncoupled", "0.006"))


def claimed_changes(evidence: Results, source: str, title: str, kind: str = "percent") -> "Figure":
    """Change of perplexity, or in points of accuracy, of every arm that a source's claims are about: intervals by
    size, the published value as a diamond."""
    figures = [(claim["id"], figure) for claim in evidence["claims"] for figure in claim["figures"]]
    own = [(name, figure) for name, figure in figures if name[0] == source and figure["kind"] == kind]
    rows = [(name, figure, measured) for name, figure in own for measured in figure["measured"]]
    height = 96 + 24 * len(rows)
    note = "95 % intervals over paired seeds, each arm at its own best learning rate; diamonds: published"
    figure = new_figure(height, title, note)
    axes = figure.add_axes((0.33, 44 / height, 0.63, 1 - 100 / height))
    axes.axvline(0, color=LINE, linewidth=1)
    axes.grid(axis="x")
    names = []
    for y, (name, claim, own) in enumerate(rows):
        against = "" if claim["baseline"] == "standard" else f" against {claim['baseline']}"
        names.append(f"{name}  {claim['arm']}{against} · {own['size']}")
        axes.plot(claim["published"], y, "D", color=STROKE["q"], markersize=6, markerfacecolor=GROUND)
        if own["effect"] is None:
            told = f"{own['diverged']} seeds diverged at every rate"
            axes.annotate(told, (claim["published"], y), (9, 0), textcoords="offset points", va="center", color=LINE)
            continue
        middle, low, high = own["effect"]
        axes.plot([low, high], [y, y], color=STROKE["k"], linewidth=2.2, solid_capstyle="round")
        axes.plot(middle, y, "o", color=STROKE["k"], markersize=6)
    axes.set_yticks(range(len(rows)), names)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=CHANGES[kind])
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    return figure


def alike_vectors(evidence: Results) -> "Figure":
    """Cosines and alignment of queries, keys and values before and after training, a row for each study that has both;
    the published value as a diamond."""
    studies = {name: own for name, own in evidence["studies"].items() if "vectors" in own}
    published = {f.get("probe"): f["published"] for c in evidence["claims"] if c["id"] == "B7" for f in c["figures"]}
    rows = [(quantity, name) for quantity in next(iter(studies.values()))["vectors"] for name in studies]
    height = 96 + 26 * len(rows)
    note = "mean of layers and five seeds with 95 % intervals; hollow: before training; diamonds: published at 300M"
    figure = new_figure(height, "are queries, keys and values alike?", note)
    axes = figure.add_axes((0.3, 44 / height, 0.66, 1 - 100 / height))
    axes.axvline(0, color=LINE, linewidth=1)
    axes.grid(axis="x")
    for y, (quantity, name) in enumerate(rows):
        for side, face, shift in (("untrained", GROUND, -0.15), ("trained", STROKE["k"], 0.15)):
            middle, low, high = studies[name]["vectors"][quantity][side]
            axes.plot([low, high], [y + shift] * 2, color=STROKE["k"], linewidth=1.8, solid_capstyle="round")
            axes.plot(middle, y + shift, "o", color=STROKE["k"], markerfacecolor=face, markersize=6)
        if quantity in published:
            axes.plot(published[quantity], y, "D", color=STROKE["q"], markersize=6, markerfacecolor=GROUND)
    names = [f"{quantity.replace('_', ' ')} · {studies[name]['size']}" for quantity, name in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(-0.15, 1), xlabel="cosine, or linear CKA")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    return figure


def seed_curves(records: list[Results], arms: Sequence[tuple[str, str]]) -> "Figure":
    """Training loss of every seed, a panel for each arm and learning rate."""
    figure = new_figure(260, "training loss of five seeds, nats per token", "against the step, a line for each seed")
    for number, (arm, lr) in enumerate(arms):
        axes = figure.add_axes((0.07 + number * 0.235, 0.13, 0.2, 0.58))
        axes.set(ylim=(3.8, 5.0), xlim=(500, 3950), title=f"{arm}, {lr}")
        axes.set_xticks([1000, 2000, 3000])
        axes.grid(axis="y")
        if number:
            axes.set_yticklabels([])
        own = [record["curve"] for record in records if f"/{arm}/lr{lr}-" in record["place"]]
        for curve in own:
            axes.plot(curve["step"], curve["loss"], color=STROKE["k"], linewidth=1.1, alpha=0.8)
    return figure


def gains_by_rate(evidence: Results, studies: Sequence[str], arms: Sequence[str]) -> "Figure":
    """What arms gain on the baseline at one learning rate for both, a panel for each study that has been run, and what
    the baseline itself loses there against its own best rate."""
    own = [evidence["studies"][name] for name in studies if name in evidence["studies"]]
    title = "what an arm gains at equal learning rates, nats per token"
    note = "paired seeds with 95 % intervals; dashed: what the baseline loses there to its best rate; scales differ"
    figure = new_figure(300, title, note)
    colours = dict(zip(arms, (STROKE["k"], STROKE["q"], STROKE["v"], CACHED), strict=False))
    for number, study in enumerate(own):
        axes = figure.add_axes((0.08 + number * 0.93 / len(own), 0.2, 0.93 / len(own) - 0.05, 0.56))
        (found,) = study["corpora"].values()
        baseline = found["arms"][study["baseline"]]
        means = {float(lr): at["mean"] for lr, at in baseline["rates"].items() if at["mean"] is not None}
        losses = [means[lr] - min(means.values()) for lr in means]
        axes.axhline(0, color=LINE, linewidth=1)
        axes.plot([*means], losses, "--", color=LINE, linewidth=1.2)
        for place, arm in enumerate(arms):
            rates = found["arms"].get(arm, {"rates": {}})["rates"]
            points = [(float(lr), *at["difference"]) for lr, at in rates.items() if "difference" in at]
            if points:
                lrs, middle, low, high = map(np.array, zip(*points, strict=True))
                lrs = lrs * 1.05 ** (place - (len(arms) - 1) / 2)  # beside each other
                bars = (high - middle, middle - low)
                axes.errorbar(lrs, -middle, bars, fmt="o-", color=colours[arm], ms=4, lw=1.3, label=arm)
        axes.set(xscale="log", title=f"{study['size']}, {baseline['parameters'] / 1e6:.2g} M", xlabel="learning rate")
        axes.set_xticks([*means], [f"{lr:g}" for lr in means], rotation=30, size=8.5)
        axes.minorticks_off()
        axes.grid(axis="y")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_legend_handles_labels()[0]}
    shown = [arm for arm in arms if arm in lines]
    figure.legend([lines[arm] for arm in shown], shown, fontsize=9, loc="upper right", ncols=len(arms))
    return figure


CLAIMS = {
    "evidence-learning-rate.svg": Chart(
        partial(
            gains_by_rate,
            studies=("headline-pico", "headline-nano", "headline-micro"),
            arms=("leapfrog", "uncoupled", "affine"),
        ),
        (RESULTS,),
    ),
    "evidence-coupling.svg": Chart(
        partial(claimed_changes, source="A", title="coupled queries and keys: change of perplexity"), (RESULTS,)
    ),
    "evidence-sharing.svg": Chart(
        partial(claimed_changes, source="B", title="shared projections: change of perplexity"), (RESULTS,)
    ),
    "evidence-tasks.svg": Chart(
        partial(claimed_changes, source="B", title="shared projections on five tasks with digits", kind="points"),
        (RESULTS,),
    ),
    "evidence-similarity.svg": Chart(alike_vectors, (RESULTS,)),
    "evidence-coupling-nano-curves.svg": Chart(
        partial(seed_curves, arms=CURVES), ("evidence/coupling-nano/records.jsonl.xz",)
    ),
}
