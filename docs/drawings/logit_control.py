"""What a sweep of logit control found, from the files under studies/results: three figures for each of them."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .sketch import FAINT, INK, LINE, Point, Sketch

RESULTS = Path(__file__).parents[2] / "studies" / "results"
PREFIX = "logit-control-"
Record = dict[str, Any]


class Look(NamedTuple):
    """How an arm is told from the others: by its name, its colour (Okabe and Ito's) and its mark."""

    name: str
    colour: str
    mark: str


ARMS = {
    "none": Look("no control", INK, "circle"),
    "fixed-0.1": Look("fixed, τ = 0.1", "#a66f00", "square"),
    "quack-1": Look("QuacK, τ = 1", "#0072b2", "triangle"),
    "quack-0.1": Look("QuacK, τ = 0.1", "#3ca0dc", "diamond"),
    "qk-clip": Look("QK-clip, t = 100", "#d55e00", "plus"),
    "norm": Look("QK-norm; MLA: norm on latents", "#009e73", "star"),
}
FAMILIES = {"mha": "MHA", "mla": "MLA"}
OPTIMISERS = {"adamw": "AdamW", "muon": "Muon"}

LEFT, RIGHT, GAP, HEADER, PANEL, BETWEEN = 58.0, 18.0, 44.0, 100.0, 168.0, 68.0


def arm_of(run: Record) -> str:
    return "norm" if run["arm"].endswith("-norm") else run["arm"]


def mark(s: Sketch, x: float, y: float, look: Look, hollow: bool = False, r: float = 4.2) -> None:
    """One point of an arm; hollow where the run was unstable."""
    fill = "#ffffff" if hollow else look.colour
    turns = {"square": (4, 0.125), "triangle": (3, 0.25), "diamond": (4, 0.25)}
    if look.mark == "circle":
        s.parts.append(f'<circle cx="{x:.5g}" cy="{y:.5g}" r="{r:g}" fill="{fill}" stroke="{look.colour}"/>')
        return
    if look.mark in turns:
        corners, first = turns[look.mark]
        angles = [2 * math.pi * (first + i / corners) for i in range(corners)]
        points = " ".join(f"{x + 1.25 * r * math.cos(a):.5g},{y - 1.25 * r * math.sin(a):.5g}" for a in angles)
    else:  # a plus or a star: spikes around the centre
        spikes, inner = (4, 0.45) if look.mark == "plus" else (5, 0.5)
        angles = [2 * math.pi * (0.25 + i / (2 * spikes)) for i in range(2 * spikes)]
        lengths = [1.5 * r * (inner if i % 2 else 1) for i in range(2 * spikes)]
        ends = [(x + n * math.cos(a), y - n * math.sin(a)) for a, n in zip(angles, lengths, strict=True)]
        points = " ".join(f"{a:.5g},{b:.5g}" for a, b in ends)
    s.parts.append(f'<polygon points="{points}" fill="{fill}" stroke="{look.colour}"/>')


def cross(s: Sketch, x: float, y: float, colour: str, r: float = 4.5) -> None:
    """Where a run diverged."""
    s.line((x - r, y - r), (x + r, y + r), colour=colour)
    s.line((x - r, y + r), (x + r, y - r), colour=colour)


class Axes:
    """One small chart: where numbers lie in it."""

    def __init__(self, s: Sketch, box: tuple[float, float, float, float], xs: Point, ys: Point, log: tuple[bool, bool]):
        self.s, self.box, self.xs, self.ys, self.log = s, box, xs, ys, log

    def place(self, value: float, ends: Point, log: bool) -> float:
        low, high, at = (math.log(v) if log else v for v in (*ends, min(max(value, ends[0]), ends[1])))
        return (at - low) / (high - low) if high > low else 0.5

    def x(self, value: float) -> float:
        left, _, wide, _ = self.box
        return left + 10 + (wide - 20) * self.place(value, self.xs, self.log[0])

    def y(self, value: float) -> float:
        _, top, _, high = self.box
        return top + high - (high - 8) * self.place(value, self.ys, self.log[1])

    def frame(self, title: str, x_ticks: Sequence[float], y_ticks: Sequence[float], x_name: str) -> None:
        left, top, wide, high = self.box
        self.s.text(left, top - 16, title, 14, "start", bold=True)
        for value in y_ticks:
            self.s.line((left, self.y(value)), (left + wide, self.y(value)), colour="#e4e1d9")
            self.s.text(left - 6, self.y(value), short(value), 11, "end", LINE)
        self.s.line((left, top), (left, top + high), (left + wide, top + high), colour=FAINT)
        for value in x_ticks:
            self.s.line((self.x(value), top + high), (self.x(value), top + high + 4), colour=FAINT)
            self.s.text(self.x(value), top + high + 13, short(value), 11, colour=LINE)
        self.s.text(left + wide, top + high + 29, x_name, 12, "end", LINE)


def short(value: float) -> str:
    """0.003, 0.5, 20, 10⁶."""
    if value and (value < 1e-3 or value > 9999):
        return "10" + f"{round(math.log10(value))}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:g}"


def even_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between the two."""
    raw = (high - low) / wanted
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten between the two, at most six of them."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = -(-(last - first + 1) // 6)
    return [10.0**power for power in range(first, last + 1, every)]


def read(path: Path) -> tuple[Record, list[Record]]:
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept["settings"], kept["runs"]


def panels(runs: Sequence[Record]) -> list[tuple[str, str, list[Record]]]:
    """(optimiser, family, runs): optimisers below each other, MHA and MLA side by side."""
    found = []
    for optimiser in (name for name in OPTIMISERS if any(run["optimiser"] == name for run in runs)):
        for family in FAMILIES:
            own = [r for r in runs if r["optimiser"] == optimiser and r["architecture"].split("-")[0] == family]
            found.append((optimiser, family, own))
    return found


def sheet(title: str, lines: Sequence[str], runs: Sequence[Record], notes: Sequence[tuple[str, str]]) -> Sketch:
    """An empty drawing with its caption and legend, high enough for the panels."""
    rows = len(panels(runs)) // 2
    s = Sketch(int(HEADER + 24 + rows * (PANEL + BETWEEN)), title)
    for i, line in enumerate(lines):
        s.text(22, 22 + 18 * i, line, 14 if i == 0 else 12, "start", INK if i == 0 else LINE)
    looks = [look for arm, look in ARMS.items() if any(arm_of(run) == arm for run in runs)]
    for i, look in enumerate(looks):
        x, y = 28 + 150 * (i % 3), 62 + 19 * (i // 3)
        s.line((x - 8, y), (x + 8, y), colour=look.colour)
        mark(s, x, y, look)
        s.text(x + 14, y, look.name, 12, "start")
    for i, (kind, note) in enumerate(notes):
        x, y = 540, 62 + 19 * i
        if kind == "cross":
            cross(s, x, y, INK)
        else:
            mark(s, x, y, ARMS["none"], hollow=True)
        s.text(x + 12, y, note, 12, "start")
    return s


def box_of(number: int) -> tuple[float, float, float, float]:
    wide = (Sketch.width - LEFT - RIGHT - GAP) / 2
    return LEFT + (number % 2) * (wide + GAP), HEADER + 28 + (number // 2) * (PANEL + BETWEEN), wide, PANEL


def described(settings: Record) -> str:
    tokens = f"{settings['sequences']} × {settings['context']:,} tokens"
    return f"{settings['size']}, {settings['steps']} steps of {tokens}"


def final_loss(path: Path) -> Sketch:
    """Validation loss against learning rate: a line for the first seed, small marks for others, since those may not
    have run everywhere; what diverged, of any seed, on the top edge."""
    settings, runs = read(path)
    fine = [run["validation_loss"] for run in runs if not run["diverged"]]
    lrs, first = sorted({run["lr"] for run in runs}), min(run["seed"] for run in runs)
    others = "; lines: first seed, small marks: others" if any(run["seed"] != first for run in runs) else ""
    low, high = min(fine), min(max(fine), max(settings["unigram_entropy"], min(fine) + 0.5) + 0.5)
    low -= 0.05 * (high - low)
    s = sheet(
        f"Validation loss against learning rate, {settings['size']}",
        ["validation loss, nats per token, against learning rate", described(settings) + others],
        runs,
        [("cross", "diverged"), ("hollow", "unstable")],
    )
    for number, (optimiser, family, own) in enumerate(panels(runs)):
        axes = Axes(s, box_of(number), (lrs[0], lrs[-1]), (low, high), (True, False))
        title = f"{FAMILIES[family]}, {OPTIMISERS[optimiser]}"
        axes.frame(title, lrs, even_ticks(low, high), "learning rate")
        for place, (arm, look) in enumerate(ARMS.items()):
            sideways, points = 8 * (place - (len(ARMS) - 1) / 2), []
            for run in sorted((r for r in own if arm_of(r) == arm), key=lambda r: (r["seed"] != first, r["lr"])):
                x = axes.x(run["lr"])
                if run["diverged"]:
                    cross(s, x + sideways, axes.box[1] - 2, look.colour)
                elif run["seed"] == first:
                    points.append((x, axes.y(run["validation_loss"]), run["unstable"]))
                else:
                    mark(s, x, axes.y(run["validation_loss"]), look, run["unstable"], 2.4)
            if len(points) > 1:
                s.line(*((x, y) for x, y, _ in points), colour=look.colour)
            for x, y, hollow in points:
                mark(s, x, y, look, hollow)
    return s


def against_steps(path: Path, quantity: str, title: str, told: str) -> Sketch:
    """A probed quantity, the largest over layers, against the step, at the highest learning rate and first seed."""
    settings, runs = read(path)
    top, seed = max(run["lr"] for run in runs), min(run["seed"] for run in runs)
    runs = [run for run in runs if run["lr"] == top and run["seed"] == seed]
    curves = {id(run): curve(run, quantity) for run in runs}
    values = [value for points in curves.values() for _, value in points]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)) + 1e-9)
    s = sheet(
        f"{title}, {settings['size']}", [told, f"{described(settings)}; lr {top:g}"], runs, [("cross", "diverged")]
    )
    for number, (optimiser, family, own) in enumerate(panels(runs)):
        axes = Axes(s, box_of(number), (1, settings["steps"]), (low, high), (False, True))
        title = f"{FAMILIES[family]}, {OPTIMISERS[optimiser]}"
        axes.frame(title, [1, *even_ticks(2, settings["steps"])], decades(low, high), "step")
        for arm, look in ARMS.items():
            for run in (run for run in own if arm_of(run) == arm):
                points = [(axes.x(step), axes.y(value)) for step, value in curves[id(run)]]
                if len(points) > 1:
                    s.line(*points, colour=look.colour)
                for x, y in points:
                    mark(s, x, y, look, r=2.8)
                if run["diverged"] and points:
                    cross(s, *points[-1], colour=look.colour, r=6)
    return s


def curve(run: Record, quantity: str) -> list[Point]:
    """(step, largest over layers) at the probes where it is finite and not 0."""
    found = [(probe["step"], [v for v in probe[quantity] if v is not None]) for probe in run["probes"]]
    return [(step, max(values)) for step, values in found if values and max(values) > 0]


FIGURES: dict[str, Callable[[Path], Sketch]] = {
    "loss": final_loss,
    "largest-logit": partial(
        against_steps,
        quantity="largest_logit",
        title="Largest attention logit against step",
        told="largest |logit| of all layers and heads, at the highest learning rate",
    ),
    "logit-change": partial(
        against_steps,
        quantity="largest_logit_change",
        title="Largest change of a logit in one step",
        told="largest change of a logit in one step, all layers and heads, at the highest learning rate",
    ),
}


def drawings() -> dict[str, Callable[[], Sketch]]:
    """File below docs/ → what draws it, for every merged result that is kept."""
    return {
        f"{path.stem}-{name}.svg": partial(draw, path)
        for path in sorted(RESULTS.glob(f"{PREFIX}*.json"))
        for name, draw in FIGURES.items()
    }
