"""What the tests of checkpoints share: tensors whose every bit matters, and checkpoints made of them."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qklab.train.checkpoint import Checkpoint, Checkpoints, Snapshot


def bits(tensor: Tensor) -> tuple[str, list[int], bytes]:
    """dtype, shape and content; NaNs count by their bits."""
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), list(tensor.shape), content


def all_bits(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


def make_tensors(step: int, change: int = 0) -> dict[str, Tensor]:
    """Small tensors of a step; with another `change` of the same names and shapes."""
    numbers = torch.Generator().manual_seed(1000 * change + step)
    model = {f"model.blocks.{i}.weight": torch.randn(6, 8, generator=numbers) for i in range(2)}
    return model | {
        "model.norm": torch.ones(300).bfloat16(),  # the same in all checkpoints
        "optimiser.exp_avg.blocks.0.weight": torch.zeros(6, 8),
        "optimiser.step": torch.tensor(step),
    }


def save_steps(folder: Path, *steps: int, best: int = -1, **settings: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder, **settings)
    for step in steps:
        checkpoints.save(Snapshot(step, make_tensors(step), {"validation_loss": 1 / (1 + step)}), best=step == best)
    checkpoints.wait()
    return checkpoints


def newest(checkpoints: Checkpoints) -> Checkpoint:
    found = checkpoints.find_newest()
    assert found is not None
    return found


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def folder_of(run: Path, step: int) -> Path:
    return run / f"step-{step:010d}"
