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
