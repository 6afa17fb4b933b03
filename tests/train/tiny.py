"""A run small enough to be repeated many times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qklab.train.settings import merge_settings, resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec

TINY: dict[str, Any] = {
    "corpus": {"tokenizer": "bytes"},
    "model": {"layers": 2, "width": 32, "context": 48, "mlp_ratio": 2.0},
    "attention": {"heads": 2},
    "batch": {"sequences": 8},
    "budget": {"tokens": 8 * 48 * 12},
    "evaluation": {"times": 3, "tokens": 480, "probes": 2, "probe_tokens": 24},
    "execution": {"device": "cpu", "threads": 1, "checkpoint_steps": 5},
}

Settings = Callable[..., tuple[RunSpec, ExecutionSpec]]


def tiny(folder: Path, /, **changes: Any) -> tuple[RunSpec, ExecutionSpec]:
    """The tiny run on a prepared corpus, with changes, e.g. optimiser={"lr": 1e-3}."""
    return resolve_run(merge_settings(merge_settings(TINY, {"corpus": {"source": str(folder)}}), changes))
