"""Initial values, drawn on the CPU in float32: a generator gives a parameter the same on every device."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def uniform_(tensor: Tensor, fan_in: int, generator: torch.Generator | None) -> None:
    """torch's default for linear layers: U(−1/√fan_in, 1/√fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    fill_tensor(tensor, lambda drawn: drawn.uniform_(-bound, bound, generator=generator))


def normal_(tensor: Tensor, std: float, generator: torch.Generator | None) -> None:
    """N(0, std)."""
    fill_tensor(tensor, lambda drawn: drawn.normal_(0, std, generator=generator))


@torch.no_grad()
def fill_tensor(tensor: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
    if not tensor.is_meta:
        tensor.copy_(draw(torch.empty(tensor.shape, device="cpu", dtype=torch.float32)))
