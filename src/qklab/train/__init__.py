"""Training: specs of runs, the loop, checkpoints, evaluation, probes, and models back from run directories."""

from typing import TYPE_CHECKING, Any

from qklab.train.settings import resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec

if TYPE_CHECKING:
    from qklab.train.launch import Outcome, train
    from qklab.train.load import load_model, sample_text

__all__ = ["ExecutionSpec", "Outcome", "RunSpec", "load_model", "resolve_run", "sample_text", "train"]


def __getattr__(name: str) -> Any:
    """What needs torch.distributed is imported when first asked for: it would double the start of every command."""
    from importlib import import_module

    if name in ("Outcome", "train"):
        return getattr(import_module("qklab.train.launch"), name)
    if name in ("load_model", "sample_text"):
        return getattr(import_module("qklab.train.load"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
