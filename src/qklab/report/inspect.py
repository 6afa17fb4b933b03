"""What the attention of a trained model does on a text: figures, JSON, and one page that shows them all."""

import json
import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qklab.data.batches import EvaluationWindows
from qklab.data.shards import Corpus
from qklab.data.spec import DataError
from qklab.data.tokenizer import Tokenizer
from qklab.model.decoder import Decoder
from qklab.model.diagnose import Diagnosis, diagnose, singular_values
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.environment import commit
from qklab.runs.files import describe_os_error, write_text
from qklab.train.checkpoint import Checkpoints
from qklab.train.probe import as_json
from qklab.train.spec import RunSpec
from qklab.train.trained import load

FORMAT = 1
SHOWN = 48  # tokens of an attention map
Which = Literal["newest", "best"]


@dataclass(frozen=True)
class Subject:
    """A trained model and the text it reads: ids and segments [1, T]; `notes` says what is not as was asked."""

    record: dict[str, Any]
    spec: RunSpec
    step: int
    model: Decoder
    tokenizer: Tokenizer
    ids: Tensor
    segments: Tensor | None
    notes: list[str]

    def diagnosis(
        self, tokens: int | None = None, layers: Sequence[int] | None = None, maps: bool = False
    ) -> Diagnosis:
        segments = None if self.segments is None else self.segments[:, :tokens]
        return diagnose(self.model, self.ids[:, :tokens], segments, layers=layers, maps=maps)

    @property
    def tokens(self) -> list[str]:
        return [token_text(self.tokenizer, int(token)) for token in self.ids[0]]


def attention_of(run: Path, text: str, *, which: Which = "newest", tokens: int = SHOWN) -> dict[str, Any]:
    """The attention of three layers on the first `tokens` tokens of a text, or of the validation split if it is empty.

    {"tokens": [T texts], "layers": {"first" | "middle" | "last": {"index": layer, "maps": [H][T][T]}}, "notes": […]}
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens must be a whole number above 0, but {tokens!r} came.")
    return attention(subject(run, text, which, tokens), tokens)


def attention(found: Subject, tokens: int) -> dict[str, Any]:
    last = found.spec.model.layers - 1
    chosen = {"first": 0, "middle": (last + 1) // 2, "last": last}
    diagnosis = found.diagnosis(tokens, sorted(set(chosen.values())), maps=True)
    assert diagnosis.maps is not None
    found_maps = zip(diagnosis.layers, diagnosis.heads, diagnosis.maps, strict=True)
    maps = {layer: rounded(weights[0, :heads]) for layer, heads, weights in found_maps}
    layers = {name: {"index": layer, "maps": maps[layer]} for name, layer in chosen.items()}
    return {"tokens": found.tokens[:tokens], "layers": layers, "notes": found.notes}


def inspect(
    run: Path,
    text: str,
    out: Path,
    *,
    which: Which = "newest",
    say: Callable[[str], None] = lambda sentence: None,
) -> list[Path]:
    """Measure the model of `run` on `text`; write inspect.html, inspect.json and the figures into `out`."""
    found = subject(run, text, which)
    for note in found.notes:
        say(note)
    content = measured(found, which)
    pictures = figures(content)
    files = {"inspect.html": page(content, pictures), "inspect.json": json.dumps(content, ensure_ascii=False) + "\n"}
    files |= pictures
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, written in files.items():
            write_text(out / name, written)
    except OSError as error:
        raise RunError(
            f"{out} cannot be written: {describe_os_error(error)}; choose another folder with --out."
        ) from None
    return [out / name for name in files]


def measured(found: Subject, which: Which) -> dict[str, Any]:
    """All of inspect.json."""
    diagnosis, shown = found.diagnosis(), attention(found, SHOWN)
    sigma = singular_values(diagnosis.logits.queries, diagnosis.logits.keys)[:, 0]  # [layers, H, rank]
    visible = diagnosis.visible.sum(-1).float()
    record, spec = found.record, found.spec
    return {
        "format": FORMAT,
        "model": spec.model.name,
        "parameters": spec.model.parameters(),
        "heads": "head" if all(spec.mix == "softmax" for spec in spec.model.pattern) else "softmax",
        "text": found.tokenizer.decode(found.ids[0].tolist()),
        "tokens": found.tokens,
        "notes": found.notes,
        "diagnostics": {name: as_json(values.tolist()) for name, values in diagnosis.items()},
        "largest_entropy": float(visible.log().mean()),
        "singular_values": as_json((sigma / sigma[..., :1]).tolist()),
        "layers": shown["layers"],
        "provenance": {
            "run": record["id"],
            "checkpoint": which,
            "step": found.step,
            "seed": spec.seed,
            "commit": record.get("commit"),
            "fingerprint": record.get("fingerprint"),
            "corpus": spec.corpus.source,
            "data": record["data"].get("hash"),
            "inspected_at_commit": commit(),
        },
    }


# The subject


def subject(run: Path, text: str, which: Which = "newest", tokens: int | None = None) -> Subject:
    """The model and its text; what is inspected is the first `tokens` of it, at most a context."""
    run = Path(run)
    refuse_others(run)
    directory = RunDirectory(run)
    record = directory.read()
    spec = RunSpec.from_dict(record["spec"])
    checkpoints = Checkpoints(directory.checkpoints_path, run=record["id"], say=lambda sentence: None)
    while True:  # until none was saved while it was loaded
        step = step_of(checkpoints, run, which)
        model, tokenizer = load(run, which)
        if step_of(checkpoints, run, which) == step:
            break
    notes: list[str] = []
    if text.strip():
        ids, segments = encoded(tokenizer, text, spec.model.context, notes), None
    else:
        ids, segments = validation_window(record, spec, tokenizer)
        notes.append(f"No text came, so this is the first validation window of the corpus {spec.corpus.source}.")
    shown = min(SHOWN if tokens is None else tokens, len(ids))
    if shown < len(ids):
        notes.append(f"Attention maps show the first {shown} of {len(ids)} tokens.")
    return Subject(record, spec, step, model, tokenizer, ids[None], None if segments is None else segments[None], notes)


def refuse_others(run: Path) -> None:
    """What is not a run directory, told apart."""
    if not run.exists():
        raise RunError(f"there is no run directory {run}; give one that `qklab train` has written.")
    if not run.is_dir():
        raise RunError(f"{run} is a file, but a run directory was expected.")
    if (run / "study.json").exists():
        runs = sorted(path.parent for path in run.glob("runs/*/*/*/run.json"))
        advice = f"give one of them, e.g. {runs[0]}" if runs else "none of them has begun yet"
        raise RunError(f"{run} is a study of {len(runs)} runs so far and not a run; {advice}.")
    if run.parent.name == "checkpoints" and RunDirectory(run.parent.parent).exists():
        raise RunError(f"{run} is a checkpoint of the run {run.parent.parent}; give the run directory itself.")


def step_of(checkpoints: Checkpoints, run: Path, which: Which) -> int:
    if which not in ("newest", "best"):
        raise ValueError(f"which must be 'newest' or 'best', but {which!r} came.")
    found = checkpoints.newest() if which == "newest" else checkpoints.best()
    if found is None:
        best = "best " * (which == "best")
        raise RunError(f"{run} has no {best}checkpoint yet; train it until one is saved: qklab train --out {run}.")
    return found.step


def encoded(tokenizer: Tokenizer, text: str, context: int, notes: list[str]) -> Tensor:
    """The text's tokens after the end-of-text that begins every document, cut to the context."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not UTF-8: {text[error.start]!r} is at character {error.start + 1}.") from None
    ids = torch.from_numpy(np.concatenate([[tokenizer.eot], tokenizer.encode([text])[0].astype(np.int64)]))
    if len(ids) > context:
        notes.append(f"The text is {len(ids)} tokens long and was cut to the model's context of {context}.")
    return ids[:context]


def validation_window(record: dict[str, Any], spec: RunSpec, tokenizer: Tokenizer) -> tuple[Tensor, Tensor | None]:
    folder = record["data"]["folder"]
    try:
        split = Corpus.open(folder).splits["valid"]
    except (DataError, KeyError):
        raise RunError(
            f"no text came, and the run's corpus is no longer in {folder} to take one from; give a text."
        ) from None
    windows = EvaluationWindows(split, spec.model.context, tokenizer.eot, spec.batch.packing == "packed")
    ids, targets, segments = windows.batch(np.array([0]))
    real = int((targets[0] >= 0).sum())
    return ids[0, :real], None if segments is None else segments[0, :real]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    if token == tokenizer.eot:
        return "<|endoftext|>"
    return tokenizer.pieces[token].decode(errors="backslashreplace")


def rounded(maps: Tensor) -> list[Any]:
    """Nested lists with three digits after the point; None where a model has diverged."""
    return [[[round(v, 3) if v == v else None for v in row] for row in rows] for rows in maps.tolist()]


# The figures

LEVELS = 25  # shades of a map
STYLE = """
.qk{font-family:Helvetica,Arial,sans-serif} .qk text{fill:#1f2933} .qk .soft{fill:#52606d}
.qk .ground{fill:#fbfaf7;stroke:#d9d5cc} .qk .rule{stroke:#d9d5cc;fill:none} .qk .edge{stroke:#9aa5b1;fill:none}
.qk .heat{fill:#154a96} .qk .lost{fill:#b3261e} .qk .a{stroke:#2459a9;fill:none} .qk .dot{fill:#2459a9}
.qk .b{stroke:#b4570a;fill:none} .qk .bar{fill:#a9c5ee;stroke:#2459a9} .qk .c{stroke:#23763a;fill:none}
.qk .dot-b{fill:#b4570a} .qk .dot-c{fill:#23763a}
@media (prefers-color-scheme: dark){.qk text{fill:#e6e9ec} .qk .soft{fill:#a7b1bb}
.qk .ground{fill:#171b21;stroke:#343b44} .qk .rule{stroke:#343b44} .qk .edge{stroke:#66707c} .qk .heat{fill:#8fbcff}
.qk .lost{fill:#ff8a80} .qk .a{stroke:#7fb0ff} .qk .dot{fill:#7fb0ff} .qk .b{stroke:#f0a35e}
.qk .bar{fill:#28456f;stroke:#7fb0ff} .qk .c{stroke:#79cc8f} .qk .dot-b{fill:#f0a35e} .qk .dot-c{fill:#79cc8f}}
"""
Box = tuple[float, float, float, float]  # left, top, width, height
Table = Sequence[Sequence[float | None]]


class Drawing:
    """An SVG in the making; y grows downwards."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def add(self, element: str, **attributes: Any) -> None:
        given = "".join(f' {name.rstrip("_").replace("_", "-")}="{told(v)}"' for name, v in attributes.items())
        self.parts.append(f"<{element}{given}/>")

    def text(
        self, x: float, y: float, text: str, size: float = 12, anchor: str = "start", more: str = "", soft: bool = False
    ) -> None:
        kind = ' class="soft"' if soft else ""
        self.parts.append(
            f'<text x="{x:.5g}" y="{y:.5g}" font-size="{size:.3g}" text-anchor="{anchor}"{kind}{more} '
            f'xml:space="preserve">{escape(text)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str, **more: Any) -> None:
        self.add("polyline", points=" ".join(f"{x:.5g},{y:.5g}" for x, y in points), class_=kind, **more)

    def svg(self) -> str:
        w, h = self.width, self.height
        return (
            f'<svg class="qk" xmlns="http://www.w3.org/2000/svg" width="{w:g}" height="{h:g}" '
            f'viewBox="0 0 {w:g} {h:g}" role="img"><title>{escape(self.title)}</title><style>{STYLE}</style>'
            f'<rect class="ground" x="1" y="1" width="{w - 2:g}" height="{h - 2:g}" rx="10"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def told(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else escape(str(value))


def figures(content: dict[str, Any]) -> dict[str, str]:
    """File name → SVG."""
    tokens, layers = content["tokens"], {layer["index"]: layer["maps"] for layer in content["layers"].values()}
    drawn = {
        f"attention-layer-{i}.svg": attention_maps(i, tokens, maps, content["heads"]) for i, maps in layers.items()
    }
    drawn |= {"entropy-and-sinks.svg": entropy_and_sinks(content), "spectrum.svg": spectrum(content)}
    return {name: drawing.svg() for name, drawing in drawn.items()}


def attention_maps(layer: int, tokens: list[str], maps: list[Table], unit: str) -> Drawing:
    """The mean over heads large, with the tokens beside it, and every head small."""
    count, gutter, top, large = len(maps[0]), 86.0, 58.0, 470.0
    cell = min(30.0, large / count)
    side = cell * count
    columns = max(2, math.ceil(math.sqrt(len(maps))))
    right = gutter + side + 36
    width = max(680.0, 960.0 if side > 300 else right + 380)
    small = min(176.0, (width - right - 18) / columns - 10)
    rows = math.ceil(len(maps) / columns)
    size = min(12.0, 0.92 * cell)
    below = 14 + 0.62 * size * max(len(label(token)) for token in tokens[:count])
    height = max(top + side + below, top + rows * (small + 24) + 10, 160.0) + 34
    d = Drawing(
        width, height, f"Attention of layer {layer}: mean over its {len(maps)} {plural(unit)}, and each of them"
    )
    d.text(18, 26, f"Layer {layer}", 16, more=' font-weight="bold"')
    d.text(gutter, 48, f"mean of {len(maps)} {plural(unit)}", 12, soft=True)
    heat_map(d, gutter, top, cell, mean_map(maps))
    for i, token in enumerate(tokens[:count]):
        middle = (i + 0.5) * cell
        d.text(gutter - 5, top + middle + 0.35 * size, label(token), size, "end")
        x, y = gutter + middle + 0.35 * size, top + side + 6
        d.text(x, y, label(token), size, "end", f' transform="rotate(-90 {x:.5g} {y:.5g})"')
    d.text(right, 48, f"each {unit}", 12, soft=True)
    for h, table in enumerate(maps):
        x, y = right + (h % columns) * (small + 10), top + (h // columns) * (small + 24)
        heat_map(d, x, y, small / count, table)
        d.text(x, y + small + 14, str(h), 11, soft=True)
    legend(d, gutter, height - 22)
    return d


def heat_map(d: Drawing, x: float, y: float, cell: float, table: Table) -> None:
    """Weights as shades, their opacity the square root, so that small ones show; runs of one shade are one stroke."""
    shades: dict[int, list[str]] = {}
    for i, row in enumerate(table):
        for level, start, length in runs([shade(value) for value in row]):
            if level:
                w, h = length * cell, cell
                shades.setdefault(level, []).append(
                    f"M{x + start * cell:.5g} {y + i * cell:.5g}h{w:.4g}v{h:.4g}h-{w:.4g}z"
                )
    for level, strokes in sorted(shades.items()):
        kind, opacity = ("lost", 0.5) if level < 0 else ("heat", level / LEVELS)
        d.add("path", d="".join(strokes), class_=kind, fill_opacity=opacity)
    d.add("rect", x=x, y=y, width=cell * len(table), height=cell * len(table), class_="edge")


def shade(value: float | None) -> int:
    """0 is nothing, −1 what is not a number."""
    return -1 if value is None else round(math.sqrt(min(max(value, 0.0), 1.0)) * LEVELS)


def runs(levels: list[int]) -> Iterator[tuple[int, int, int]]:
    """(level, start, length) of neighbours that are alike."""
    start = 0
    for i in range(1, len(levels) + 1):
        if i == len(levels) or levels[i] != levels[start]:
            yield levels[start], start, i - start
            start = i


def legend(d: Drawing, x: float, y: float) -> None:
    d.text(x, y + 9, "query ↓  key →   weight", 11, soft=True)
    for i, value in enumerate((0.01, 0.04, 0.1, 0.25, 0.5, 1.0)):
        left = x + 150 + 56 * i
        d.add("rect", x=left, y=y, width=14, height=11, class_="heat", fill_opacity=math.sqrt(value))
        d.add("rect", x=left, y=y, width=14, height=11, class_="edge")
        d.text(left + 18, y + 9, f"{value:g}", 11, soft=True)


def mean_map(maps: Sequence[Table]) -> Table:
    stacked = np.array([[[math.nan if v is None else v for v in row] for row in table] for table in maps])
    return [[None if v != v else v for v in row] for row in stacked.mean(0).tolist()]


def label(token: str, cells: int = 12) -> str:
    """A token in little room: white space and controls made visible, long ones cut."""
    marks = {" ": "·", "\n": "⏎", "\t": "⇥"}
    shown = (
        "⟨eot⟩"
        if token == "<|endoftext|>"
        else "".join(marks.get(c) or (c if c.isprintable() else f"\\x{ord(c):02x}") for c in token)
    )
    used = 0
    for i, c in enumerate(shown):
        used += 2 if unicodedata.east_asian_width(c) in "WF" else 1
        if used > cells:
            return shown[: max(1, i - 1)] + "…"
    return shown


def entropy_and_sinks(content: dict[str, Any]) -> Drawing:
    d = Drawing(960, 330, "Entropy of attention and mass on the first token, per layer")
    table, most = content["diagnostics"], content["largest_entropy"]
    highest = max([most, *present(table["entropy"])])
    axes = Panel(d, (64, 62, 392, 210), "Entropy (nats)", (0.0, highest * 1.05 or 1.0), len(table["entropy"]))
    axes.reference(most, "uniform attention")
    axes.heads(table["entropy"])
    axes = Panel(
        d, (540, 62, 392, 210), "Sink mass: attention on a text's first token", (0.0, 1.0), len(table["entropy"])
    )
    axes.heads(table["sink_mass"])
    d.text(
        18,
        312,
        f"Layers from left to right; a dot for each {content['heads']}, the line through their means.",
        12,
        soft=True,
    )
    return d


def spectrum(content: dict[str, Any]) -> Drawing:
    d = Drawing(960, 330, "Effective rank of the scores and their singular values")
    ranks, sigma = content["diagnostics"]["effective_rank"], content["singular_values"]
    unit = plural(content["heads"])
    most = max([*present(ranks), 1.0])
    axes = Panel(d, (64, 62, 392, 210), "Effective rank of the scores", (0.0, most * 1.08), len(ranks))
    axes.bars(ranks)
    d.text(18, 312, f"Bars: mean over {unit}; dots: each of them.", 12, soft=True)
    lowest = -4
    size = len(sigma[0][0])
    axes = Panel(
        d, (540, 62, 392, 210), f"Singular values σᵢ/σ₁, mean over {unit}", (lowest, 0.0), size, log=True, first=1
    )
    names: dict[int, str] = {}
    for name, layer in content["layers"].items():
        names[layer["index"]] = f"{names[layer['index']]}, {name}" if layer["index"] in names else name
    for (layer, name), kind in zip(names.items(), "abc", strict=False):
        means = [mean([head[i] for head in sigma[layer]]) for i in range(size)]
        values = [None if m is None else max(lowest, math.log10(m)) if m > 0 else lowest for m in means]
        axes.curve(values, kind, f"layer {layer} ({name})")
    return d


class Panel:
    """A small chart with layers, or other counted things, from left to right."""

    def __init__(
        self,
        d: Drawing,
        box: Box,
        title: str,
        ends: tuple[float, float],
        count: int,
        log: bool = False,
        first: int = 0,
    ):
        self.d, self.box, self.ends, self.count, self.named = d, box, ends, count, 0
        left, top, wide, high = box
        d.text(left, top - 24, title, 14, more=' font-weight="bold"')
        for value in ticks(*ends):
            y = self.y(value)
            d.line([(left, y), (left + wide, y)], "rule")
            d.text(left - 7, y + 4, f"10{superscript(round(value))}" if log else f"{value:g}", 11, "end", soft=True)
        every = max(1, math.ceil(count / 12))
        for i in range(0, count, every):
            d.text(self.x(i), top + high + 17, str(i + first), 11, "middle", soft=True)

    def x(self, i: float) -> float:
        return self.box[0] + self.box[2] * (i + 0.5) / self.count

    def y(self, value: float) -> float:
        low, high = self.ends
        return self.box[1] + self.box[3] * (1 - (min(max(value, low), high) - low) / (high - low))

    def dots(self, table: Table) -> None:
        room = min(24.0, 0.5 * self.box[2] / self.count)
        for i, row in enumerate(table):
            for h, value in enumerate(row):
                if value is not None:
                    x = self.x(i) + room * ((h + 0.5) / len(row) - 0.5)
                    self.d.add("circle", cx=x, cy=self.y(value), r=2.6, class_="dot", fill_opacity=0.55)

    def heads(self, table: Table) -> None:
        means = [(self.x(i), self.y(m)) for i, row in enumerate(table) if (m := mean(row)) is not None]
        self.d.line(means, "a", stroke_width=2)
        self.dots(table)
        self.missing(table)

    def bars(self, table: Table) -> None:
        wide = min(40.0, 0.7 * self.box[2] / self.count)
        for i, row in enumerate(table):
            if (m := mean(row)) is not None:
                y, bottom = self.y(m), self.y(0.0)
                self.d.add("rect", x=self.x(i) - wide / 2, y=y, width=wide, height=bottom - y, class_="bar")
        self.dots(table)
        self.missing(table)

    def curve(self, values: Sequence[float | None], kind: str, name: str) -> None:
        points = [(self.x(i), self.y(v)) for i, v in enumerate(values) if v is not None]
        dashes = {"a": "none", "b": "7 3", "c": "2 3"}[kind]
        self.d.line(points, kind, stroke_width=2, stroke_dasharray=dashes)
        x, y = self.box[0] + self.box[2] - 150, self.box[1] + 12 + 18 * self.named
        self.d.line([(x, y), (x + 22, y)], kind, stroke_width=2, stroke_dasharray=dashes)
        self.d.text(x + 28, y + 4, name, 12)
        self.named += 1

    def reference(self, value: float, name: str) -> None:
        left, _, wide, _ = self.box
        self.d.line([(left, self.y(value)), (left + wide, self.y(value))], "b", stroke_dasharray="5 4")
        self.d.text(left + wide, self.y(value) - 5, name, 11, "end", soft=True)

    def missing(self, table: Table) -> None:
        if not present(table):
            left, top, wide, high = self.box
            self.d.text(left + wide / 2, top + high / 2, "not finite: the model has diverged", 12, "middle")


def present(table: Table) -> list[float]:
    return [value for row in table for value in row if value is not None]


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from `low` to `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def plural(unit: str) -> str:
    return {"head": "heads", "softmax": "softmaxes"}[unit]


# The page

PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:0 auto;max-width:60rem;padding:1.2rem;font:16px/1.5 Helvetica,Arial,sans-serif}
body{color:#1f2933;background:#fff}
h1{font-size:1.5rem;margin:.2em 0} h2{font-size:1.15rem;margin:2em 0 .6em} p{max-width:44rem} a{color:#2459a9}
.note{border-left:4px solid #b4570a;padding-left:.8em} .wide{overflow-x:auto;margin:.8em 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f3f1ec;padding:.8em;border-radius:8px;max-height:14rem}
pre{overflow:auto} .wide svg{display:block;min-width:40rem;width:100%;height:auto}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.25em .6em;text-align:right;border-bottom:1px solid #d9d5cc}
th:first-child,td:first-child{text-align:left} td.text{text-align:left;overflow-wrap:anywhere}
@media (prefers-color-scheme:dark){body{color:#e6e9ec;background:#0f1216} pre{background:#171b21} a{color:#7fb0ff}
.note{border-color:#f0a35e} th,td{border-color:#343b44}}
@media print{.wide{overflow:visible} .wide svg{min-width:0}}
"""


def page(content: dict[str, Any], pictures: dict[str, str]) -> str:
    """One HTML file with everything in it."""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in content["notes"])
    drawn = "".join(
        f'<div class="wide">{svg}</div><p><a href="{name}" download>{name}</a> beside this page</p>'
        for name, svg in pictures.items()
    )
    origin = content["provenance"]
    softmaxes = ", each softmax by itself, before the subtraction" * (content["heads"] == "softmax")
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="text">{escape("none" if value is None else str(value))}</td></tr>'
        for name, value in origin.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><title>{escape(content["model"])}</title>'
        f"<style>{PAGE_STYLE}</style></head><body><main><h1>{escape(content['model'])}</h1>"
        f"<p>{content['parameters']:,} parameters, after {origin['step']:,} steps on {escape(origin['corpus'])}; "
        f"measured on {len(content['tokens'])} tokens.</p>{notes}<h2>The text</h2>"
        f"<pre>{escape(visible(content['text']))}</pre><h2>Attention</h2>"
        f"<p>Which earlier token (key) each token (query) looks at{softmaxes}.</p>{drawn}"
        f"<h2>Every quantity, mean over {plural(content['heads'])}</h2>"
        f'<div class="wide">{diagnostics_table(content)}</div>'
        '<p>One number per layer and head is in <a href="inspect.json" download>inspect.json</a>.</p>'
        f'<h2>Where it comes from</h2><div class="wide"><table>{rows}</table></div></main></body></html>\n'
    )


def visible(text: str) -> str:
    """Text without the control characters that no page may hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def diagnostics_table(content: dict[str, Any]) -> str:
    table = content["diagnostics"]
    layers = range(len(next(iter(table.values()))))
    head = "".join(f"<th>layer {i}</th>" for i in layers)
    rows = [
        f"<tr><td>{name.replace('_', ' ')}</td>"
        + "".join(f"<td>{'–' if (m := mean(values)) is None else f'{m:.4g}'}</td>" for values in found)
        + "</tr>"
        for name, found in table.items()
        if present(found)
    ]
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
