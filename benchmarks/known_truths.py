"""What is known of tasks, and must come out of the harness: python benchmarks/known_truths.py [results.json]

An encoder of two layers solves copy, sub and reverse well within the published budget (6.4M tokens of 64 digits); a
causal model needs two layers to find what followed the same symbol before, and one is not enough.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from qklab.runs.environment import describe_environment, find_commit
from qklab.train.launch import train
from qklab.train.settings import merge_settings, resolve_run

COMMON: dict[str, Any] = {
    "model": {"layers": 2, "width": 64, "mlp": "gelu", "norm": "layer", "bias": True, "tied": False},
    "attention": {"heads": 2, "position": "learned"},
    "batch": {"sequences": 32},
    "optimiser": {"lr": 3e-3, "weight_decay": 0.0},
    "evaluation": {"times": 4, "tokens": 8192, "final_tokens": 131_072, "probes": 0},
    "execution": {"keep": 0, "device": "cpu"},
}
ENCODER = {"attention": {"causal": False}, "model": {"dropout": 0.1}}
# among so many symbols: of few, one layer can learn by heart which places stand for which
INDUCTION = "task:induction?length=32&block=12&symbols=64"
# name → settings, and what share of the answers must be right, at least or at most
TRUTHS: dict[str, tuple[dict[str, Any], float, float]] = {
    "copy": ({"corpus": {"source": "task:copy"}, "budget": {"tokens": 400_000}, **ENCODER}, 0.999, 1.0),
    "sub": ({"corpus": {"source": "task:sub"}, "budget": {"tokens": 400_000}, **ENCODER}, 0.999, 1.0),
    "reverse": ({"corpus": {"source": "task:reverse"}, "budget": {"tokens": 1_600_000}, **ENCODER}, 0.99, 1.0),
    "induction, two layers": ({"corpus": {"source": INDUCTION}, "budget": {"tokens": 1_600_000}}, 0.99, 1.0),
    "induction, one layer": (
        {"corpus": {"source": INDUCTION}, "budget": {"tokens": 1_600_000}, "model": {"layers": 1}},
        0.0,
        0.5,
    ),
}


def check_truth(name: str) -> dict[str, Any]:
    """Train what a truth is about; what came of it."""
    changes, least, most = TRUTHS[name]
    spec, execution = resolve_run(merge_settings(COMMON, changes))
    with tempfile.TemporaryDirectory() as folder:
        summary = train(spec, Path(folder) / "run", execution).summary
    assert summary is not None
    test = summary["evaluation"]["test"]
    right = test["accuracy"]
    found = {"accuracy": right, "chance": test["chance"], "least": least, "most": most, "holds": least <= right <= most}
    return found | {"tokens": summary["tokens"], "seconds": round(summary["seconds"], 1)}


def main() -> int:
    found = {}
    for name in TRUTHS:
        found[name] = check_truth(name)
        print(name, json.dumps(found[name]), flush=True)
    if len(sys.argv) > 1:
        about = {"commit": find_commit(), "environment": describe_environment({"type": "cpu"}), "truths": found}
        Path(sys.argv[1]).write_text(json.dumps(about, indent=1) + "\n")
    return 0 if all(each["holds"] for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
