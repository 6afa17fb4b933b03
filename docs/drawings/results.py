"""What was measured, from the result files that are kept under benchmarks/results."""

import json
from pathlib import Path
from typing import Any

from .sketch import LINE, Sketch

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def layer_costs() -> Sketch:
    """Training step time of every mechanism against the standard layer on the H200."""
    kept: dict[str, Any] = json.loads((RESULTS / "layer-51m-h200.json").read_text(encoding="utf-8"))
    times, memory = kept["training"]["times"], kept["training"]["activation_bytes"]
    s = Sketch(74 + 27 * len(times), "Training step time and memory of each mechanism, 51M model, one H200")
    s.text(22, 26, "training step, 51M, 64 × 1,024 tokens, bf16, compiled, one H200", 14, "start")
    longest = max(row["ms"] for row in times.values())
    for i, (name, row) in enumerate(times.items()):
        y, wide = 56 + 27 * i, 270 * row["ms"] / longest
        s.text(22, y, name, 13, "start")
        s.bar(160, y - 9, wide, 18, "q" if name.startswith("(Q,K,V)") else "k")
        told = f"{row['ms']:.1f} ms   × {row['ratio']:.2f}   {memory[name] / 2**30:.1f} GiB"
        s.text(168 + wide, y, told, 12, "start")
    standard = 160 + 270 * times["(Q,K,V)"]["ms"] / longest
    s.line((standard, 42), (standard, 46 + 27 * len(times)), colour=LINE, dashed=True)
    return s


PUBLISHED = 2.4  # standard training with 2.4 times the tokens took the coupled run's wall clock


def coupling_costs() -> Sketch:
    """Training step time with coupling against without: published, compiled by torch, and with our kernel."""
    compiled: dict[str, Any] = json.loads((RESULTS / "layer-51m-h200.json").read_text(encoding="utf-8"))["training"]
    fused: dict[str, Any] = json.loads((RESULTS / "coupling-step-51m-h200.json").read_text(encoding="utf-8"))["arms"]
    rows = [("published", PUBLISHED, "")]
    for arm in ("euler×1", "leapfrog×1", "leapfrog×7"):
        plain, own = compiled["activation_bytes"], fused[f"{arm}, fused"]
        memory = plain[arm] / plain["(Q,K,V)"]
        rows.append((f"{arm}, compiled", compiled["times"][arm]["ratio"], f"memory × {memory:.2f}"))
        rows.append((f"{arm}, our kernel", own["ratio"], f"memory × {own['peak_ratio']:.2f}"))
    s = Sketch(74 + 27 * len(rows), "Cost of coupling in training: published, compiled by torch, with our kernel")
    s.text(22, 26, "training step against standard attention, 51M, one H200; compiled: by torch", 14, "start")
    for i, (name, ratio, memory) in enumerate(rows):
        y, wide = 56 + 27 * i, 230 * (ratio - 1) / (PUBLISHED - 1)
        s.text(22, y, name, 13, "start")
        s.bar(190, y - 9, wide, 18, "q" if "our" in name else "k" if memory else "")
        s.text(198 + wide, y, f"+ {100 * (ratio - 1):.0f} %   {memory}", 12, "start")
    s.line((190, 42), (190, 46 + 27 * len(rows)), colour=LINE)
    return s


KINDS = {
    "matrix products": "q",
    "attention": "k",
    "elementwise and norms": "v",
    "vocabulary loss": "qk",
    "optimiser and clipping": "",
    "copies": "",
    "gaps": "paper",
}


def training_step() -> Sketch:
    """Where the time of a training step goes on the H200, by size of model."""
    s = Sketch(226, "Where the time of a training step goes, 51M and 124M models, one H200")
    s.text(22, 26, "one training step, bf16, compiled, one H200: milliseconds by kind of work", 14, "start")
    for i, (name, tokens) in enumerate({"51m": "64 × 1,024", "124m": "32 × 1,024"}.items()):
        kept: dict[str, Any] = json.loads((RESULTS / f"train-{name}-h200.json").read_text(encoding="utf-8"))
        run = kept["packings"]["contiguous"]
        parts = run["profile"]["kinds_ms"] | {"gaps": run["profile"]["idle_ms"]}
        x, y = 92.0, 62 + 58 * i
        s.text(22, y + 1, name.upper(), 14, "start", bold=True)
        speed = run["rows"]["qklab"]["tokens_per_second"] / 1e6
        s.text(22, y + 20, tokens, 11, "start")
        for kind, colour in KINDS.items():
            wide = 8.4 * parts.get(kind, 0.0)
            s.bar(x, y - 14, wide, 28, colour)
            if wide > 20:
                s.text(x + wide / 2, y, f"{parts[kind]:.1f}", 12)
            x += wide
        s.text(92, y + 24, f"{run['profile']['ms_per_step']:.1f} ms, {speed:.3f} M tokens/s", 12, "start")
    legend = [*list(KINDS.items())[:4], ("optimiser, copies", ""), ("gaps", "paper")]
    for i, (kind, colour) in enumerate(legend):
        x, y = 22 + 205 * (i % 3), 182 + 24 * (i // 3)
        s.bar(x, y - 7, 16, 14, colour)
        s.text(x + 24, y, kind, 13, "start")
    return s
