"""Charts of what was measured, from the result files that are kept under benchmarks/results and studies/results.

A chart carries a stamp of what it was made from: it is stale when that changed, not when another matplotlib would set a
label half a point further to the left.
"""

import hashlib
import inspect
import io
import json
import lzma
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .sketch import EDGE, FAINT, FILL, GROUND, INK, LINE, STROKE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
MEASURED, SWEEPS = "benchmarks/results/{}-h200.json", "studies/results/logit-control-{}.json"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "qklab",
    "figure.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": EDGE,
    "text.color": INK,
    "axes.labelcolor": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "legend.frameon": False,
}
Results = dict[str, Any]


class Chart(NamedTuple):
    """What draws it, and from which result files."""

    draw: "Callable[..., Figure]"
    files: tuple[str, ...]

    @property
    def stamp(self) -> str:
        drawn_by = self.draw.func if isinstance(self.draw, partial) else self.draw
        sources = [Path(inspect.getfile(drawn_by)), *(ROOT / file for file in self.files)]
        return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

    def svg(self) -> str:
        import matplotlib

        matplotlib.use("svg")
        with matplotlib.rc_context(STYLE), io.BytesIO() as written:
            figure = self.draw(*(read_results(ROOT / file) for file in self.files))
            figure.savefig(written, format="svg", metadata={"Date": None, "Description": self.stamp})
            return "\n".join(line.rstrip() for line in written.getvalue().decode().splitlines()) + "\n"


def read_results(path: Path) -> Any:
    """What a result file holds: an object, or the objects of its lines, compressed ones too."""
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    written = path.read_bytes()
    return [json.loads(line) for line in (lzma.decompress(written) if path.suffix == ".xz" else written).splitlines()]


def new_figure(height: float, title: str, note: str = "") -> "Figure":
    """A figure 640 wide with its title, and a note below that."""
    from matplotlib.figure import Figure

    figure = Figure((640 / 72, height / 72))
    figure.text(0.03, 1 - 22 / height, title, size=12)
    figure.text(0.03, 1 - 40 / height, note, size=10, color=LINE)
    return figure


def draw_bars(title: str, rows: Sequence[tuple[str, float, str, str]], left: float = 0.0) -> "Figure":
    """Horizontal bars from the top down: name, length, kind (its colour) and what is written at the end."""
    height = 58 + 24 * len(rows)
    figure = new_figure(height, title)
    axes = figure.add_axes((0.26, 12 / height, 0.42, 24 * len(rows) / height))
    axes.set_axis_off()
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left, max(length for _, length, _, _ in rows))
    for y, (name, length, kind, told) in enumerate(rows):
        axes.barh(y, length - left, 0.7, left, color=FILL[kind], edgecolor=STROKE[kind])
        axes.annotate(name, (left, y), (-8, 0), textcoords="offset points", ha="right", va="center")
        axes.annotate(told, (length, y), (8, 0), textcoords="offset points", va="center", size=9.5)
    return figure


def layer_costs(layer: Results) -> "Figure":
    """Training step time of every mechanism against the standard layer on the H200."""
    times, memory = layer["training"]["times"], layer["training"]["activation_bytes"]
    rows = [
        (
            name,
            row["ms"],
            "q" if name.startswith("(Q,K,V)") else "k",
            f"{row['ms']:.1f} ms · × {row['ratio']:.2f} · {memory[name] / 2**30:.1f} GiB",
        )
        for name, row in times.items()
    ]
    figure = draw_bars("training step, 51M, 64 × 1,024 tokens, bf16, compiled, one H200", rows)
    figure.axes[0].axvline(times["(Q,K,V)"]["ms"], color=LINE, linestyle="--", linewidth=1)
    return figure


def population_speed(measured: Results) -> "Figure":
    """What a minute of an H200 buys: runs, tokens each and parameters, before and with populations."""
    before = measured["before"]
    shown = [(f"{before['size']}, {before['processes']} processes", before["tokens_per_second"], "q", before["runs"])]
    shown += [
        (f"{case['size']}, {case['members']} runs together", case["tokens_per_second"], "k", case["members"])
        if case["members"] > 1
        else (f"{case['size']}, one run", case["tokens_per_second"], "q", 1)
        for case in measured["cases"]
        if case["arm"] == "standard" and case["packing"] == "contiguous"
    ]
    rows = [
        (name, speed / 1e6, kind, f"{speed / 1e6:.1f} M/s · {runs} × {60 * speed / runs / 1e6:.2g} M a minute")
        for name, speed, kind, runs in shown
    ]
    return draw_bars("tokens a second on one H200, and what a minute buys: runs × tokens", rows)


PUBLISHED = 2.4  # standard training with 2.4 times the tokens took the coupled run's wall clock


def coupling_costs(layer: Results, step: Results) -> "Figure":
    """Training step time with coupling against without: published, compiled by torch, and with our kernel."""
    rows = [("published", PUBLISHED, "", f"+ {100 * (PUBLISHED - 1):.0f} %")]
    times, memory = layer["training"]["times"], layer["training"]["activation_bytes"]
    for arm in ("euler×1", "leapfrog×1", "leapfrog×7"):
        fused = step["arms"][f"{arm}, fused"]
        for name, kind, ratio, peak in (
            ("compiled", "k", times[arm]["ratio"], memory[arm] / memory["(Q,K,V)"]),
            ("our kernel", "q", fused["ratio"], fused["peak_ratio"]),
        ):
            rows.append((f"{arm}, {name}", ratio, kind, f"+ {100 * (ratio - 1):.0f} % · memory × {peak:.2f}"))
    return draw_bars("training step against standard attention, 51M, one H200; compiled: by torch", rows, left=1.0)


KINDS = {
    "matrix products": FILL["q"],
    "attention": FILL["k"],
    "elementwise and norms": FILL["v"],
    "vocabulary loss": "#d9c8ef",
    "optimiser and clipping": FILL[""],
    "copies": STROKE["paper"],
    "gaps": FILL["paper"],
}


def training_step(*runs: Results) -> "Figure":
    """Where the time of a training step goes on the H200, by size of model."""
    figure = new_figure(230, "one training step, bf16, compiled, one H200: milliseconds by kind of work")
    axes = figure.add_axes((0.16, 0.3, 0.81, 0.56))
    axes.set_axis_off()
    axes.set_ylim(1.7, -0.6)
    for y, (name, run) in enumerate(zip(("51M, 64 × 1,024", "124M, 32 × 1,024"), runs, strict=True)):
        measured = run["packings"]["contiguous"]
        profile, x = measured["profile"], 0.0
        speed = measured["rows"]["qklab"]["tokens_per_second"] / 1e6
        for kind, colour in KINDS.items():
            wide = (profile["kinds_ms"] | {"gaps": profile["idle_ms"]}).get(kind, 0.0)
            axes.barh(y, wide, 0.5, x, color=colour, edgecolor=LINE, label=kind if y == 0 else None)
            if wide > 2:
                axes.text(x + wide / 2, y, f"{wide:.1f}", ha="center", va="center", size=9)
            x += wide
        axes.annotate(name, (0, y), (-8, 0), textcoords="offset points", ha="right", va="center", size=9.5)
        axes.text(0, y + 0.46, f"{profile['ms_per_step']:.1f} ms, {speed:.3f} M tokens/s", va="center", size=9.5)
    figure.legend(loc="lower center", ncols=4, fontsize=9, handlelength=1.2)
    return figure


# arm → name, colour (Okabe and Ito's) and mark
ARMS = {
    "none": ("no control", INK, "o"),
    "fixed-0.1": ("fixed, τ = 0.1", "#a66f00", "s"),
    "quack-1": ("QuacK, τ = 1", "#0072b2", "^"),
    "quack-0.1": ("QuacK, τ = 0.1", "#3ca0dc", "D"),
    "qk-clip": ("QK-clip, t = 100", "#d55e00", "P"),
    "norm": ("QK-norm; MLA: norm on latents", "#009e73", "*"),
}


def sweep_panels(sweep: Results, title: str, note: str, draw: "Callable[[Axes, list[Results], str], None]") -> "Figure":
    """A panel for every optimiser (below each other) and attention (side by side); draw(axes, runs of an arm, arm)."""
    from matplotlib.lines import Line2D

    settings, runs = sweep["settings"], sweep["runs"]
    optimisers = [name for name in ("AdamW", "Muon") if any(run["optimiser"] == name.lower() for run in runs)]
    height = 110 + 230 * len(optimisers)
    told = f"{settings['size']}, {settings['steps']} steps of {settings['sequences']} × {settings['context']:,} tokens"
    figure = new_figure(height, title, f"{told}; {note}")
    grid = figure.add_gridspec(len(optimisers), 2, top=1 - 124 / height, bottom=40 / height, left=0.09, right=0.97)
    grid.update(hspace=0.42, wspace=0.18)
    for row, optimiser in enumerate(optimisers):
        for column, family in enumerate(("MHA", "MLA")):
            shared = figure.axes[0] if figure.axes else None
            axes = figure.add_subplot(grid[row, column], title=f"{family}, {optimiser}", sharey=shared)
            axes.grid(axis="y")
            for arm in ARMS:
                draw(axes, [run for run in runs if panel_of(run) == (optimiser.lower(), family.lower(), arm)], arm)
    marks = [Line2D([], [], color=colour, marker=mark, label=name) for name, colour, mark in ARMS.values()]
    diverged = Line2D([], [], color=INK, marker="x", linestyle="", label="diverged")
    unstable = Line2D([], [], color=INK, marker="o", markerfacecolor=GROUND, linestyle="", label="unstable")
    where = {"loc": "upper left", "bbox_to_anchor": (0.02, 1 - 46 / height), "ncols": 4, "fontsize": 9}
    figure.legend(handles=[*marks, diverged, unstable], **where)
    return figure


def panel_of(run: Results) -> tuple[str, str, str]:
    arm = "norm" if run["arm"].endswith("-norm") else run["arm"]
    return run["optimiser"], run["architecture"].split("-")[0], arm


def final_loss(sweep: Results) -> "Figure":
    """Validation loss against learning rate: a line for the first seed, small marks for others, since those may not
    have run everywhere; what diverged, of any seed, on the top edge."""
    lrs = sorted({run["lr"] for run in sweep["runs"]})
    fine = [run["validation_loss"] for run in sweep["runs"] if not run["diverged"]]
    top = min(max(fine), max(sweep["settings"]["unigram_entropy"], min(fine) + 0.5) + 0.5)
    low = min(fine) - 0.05 * (top - min(fine))

    def draw(axes: "Axes", runs: list[Results], arm: str) -> None:
        _, colour, mark = ARMS[arm]
        axes.set(xscale="log", ylim=(low, top), xlabel="learning rate")
        axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
        axes.set_xticks([], minor=True)
        for run in runs:
            style = {"color": colour, "markersize": 6.5 if run["seed"] == 0 else 3.5, "clip_on": False}
            if run["diverged"]:
                shift = 1 + 0.06 * (list(ARMS).index(arm) - 2.5)
                axes.plot(run["lr"] * shift, top, "x", **style)
            else:
                face = GROUND if run["unstable"] else colour
                axes.plot(run["lr"], min(top, run["validation_loss"]), mark, markerfacecolor=face, **style)
        first = [run for run in runs if run["seed"] == 0 and not run["diverged"]]
        points = sorted((run["lr"], min(top, run["validation_loss"])) for run in first)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.3)

    title = "validation loss, nats per token, against learning rate"
    return sweep_panels(sweep, title, "lines: first seed, small marks: others", draw)


def against_steps(sweep: Results, quantity: str, title: str) -> "Figure":
    """A probed quantity, the largest over layers, against the step, at the highest learning rate and first seed."""
    highest = max(run["lr"] for run in sweep["runs"])

    def draw(axes: "Axes", runs: list[Results], arm: str) -> None:
        _, colour, mark = ARMS[arm]
        axes.set(yscale="log", xlabel="step")
        for run in (run for run in runs if run["lr"] == highest and run["seed"] == 0):
            found = [(probe["step"], [v for v in probe[quantity] if v]) for probe in run["probes"]]
            points = [(step, max(values)) for step, values in found if values]
            axes.plot(*zip(*points, strict=True), marker=mark, color=colour, markersize=4, linewidth=1.3)
            if run["diverged"]:
                axes.plot(*points[-1], "x", color=colour, markersize=11)

    return sweep_panels(sweep, f"{title}, all layers and heads", f"learning rate {highest:g}, the highest", draw)


largest_logit = partial(against_steps, quantity="largest_logit", title="largest |logit|")
logit_change = partial(against_steps, quantity="largest_logit_change", title="largest change of a logit in one step")


LAYER = MEASURED.format("layer-51m")
MEASUREMENTS = {
    "layer-costs.svg": Chart(layer_costs, (LAYER,)),
    "coupling-costs.svg": Chart(coupling_costs, (LAYER, MEASURED.format("coupling-step-51m"))),
    "population-speed.svg": Chart(population_speed, (MEASURED.format("population"),)),
    "training-step.svg": Chart(training_step, (MEASURED.format("train-51m"), MEASURED.format("train-124m"))),
    "logit-control-51m-h200-loss.svg": Chart(final_loss, (SWEEPS.format("51m-h200"),)),
    "logit-control-51m-h200-largest-logit.svg": Chart(largest_logit, (SWEEPS.format("51m-h200"),)),
    "logit-control-51m-h200-logit-change.svg": Chart(logit_change, (SWEEPS.format("51m-h200"),)),
    "logit-control-nano-cpu-loss.svg": Chart(final_loss, (SWEEPS.format("nano-cpu"),)),
}
