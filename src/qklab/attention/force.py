"""Forces of the coupling maps: what a query does to the key of its token, one for the layer or one per key head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def uniform_(tensor: Tensor, fan_in: int, generator: torch.Generator | None) -> None:
    """torch's default for linear layers: U(−1/√fan_in, 1/√fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    with torch.no_grad():
        drawn = torch.empty(tensor.shape, device="cpu", dtype=torch.float32)
        tensor.copy_(drawn.uniform_(-bound, bound, generator=generator))


class HeadLinear(nn.Module):
    """y = W x + b on the last axis: one W for all heads, or without bias one per key head.

    x [B, T, G, R, inner] → [B, T, G, R, outer].
    """

    def __init__(self, inner: int, outer: int, heads: int | None):
        super().__init__()
        shape = (outer, inner) if heads is None else (heads, outer, inner)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(outer)) if heads is None else None
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        uniform_(self.weight, self.weight.shape[-1], generator)
        if self.bias is not None:
            uniform_(self.bias, self.weight.shape[-1], generator)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        return torch.einsum("btgri,goi->btgro", x, self.weight)

    @staticmethod
    def parameters_of(inner: int, outer: int, heads: int | None) -> int:
        return inner * outer + outer if heads is None else heads * inner * outer


class MLPForce(nn.Module):
    """f(u) = W2 silu(W1 u + b1) + b2, width h."""

    def __init__(self, head_width: int, force_width: int, heads: int | None):
        super().__init__()
        self.inner = HeadLinear(head_width, force_width, heads)
        self.outer = HeadLinear(force_width, head_width, heads)

    def forward(self, u: Tensor) -> Tensor:
        return self.outer(F.silu(self.inner(u)))

    @staticmethod
    def parameters_of(head_width: int, force_width: int, heads: int | None) -> int:
        count = HeadLinear.parameters_of
        return count(head_width, force_width, heads) + count(force_width, head_width, heads)


class GradientForce(nn.Module):
    """f(u) = −∇U(u) = −W1ᵀ(a ⊙ σ'(W1 u + b)) of the potential U(u) = Σ_i a_i σ(w_i·u + b_i), σ = softplus."""

    def __init__(self, head_width: int, force_width: int, heads: int | None):
        super().__init__()
        self.inner = HeadLinear(head_width, force_width, heads)
        shape = (force_width,) if heads is None else (heads, 1, force_width)
        self.amplitude = nn.Parameter(torch.empty(shape))
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        uniform_(self.amplitude, self.amplitude.shape[-1], generator)

    def forward(self, u: Tensor) -> Tensor:
        pull = (self.amplitude * torch.sigmoid(self.inner(u))).to(u.dtype)
        if self.inner.weight.dim() == 2:
            return -F.linear(pull, self.inner.weight.mT)
        return -torch.einsum("btgro,goi->btgri", pull, self.inner.weight)

    def potential(self, u: Tensor) -> Tensor:
        """U(u): [B, T, G, R, D] → [B, T, G, R]."""
        return (self.amplitude * F.softplus(self.inner(u))).sum(-1)

    @staticmethod
    def parameters_of(head_width: int, force_width: int, heads: int | None) -> int:
        return HeadLinear.parameters_of(head_width, force_width, heads) + force_width * (heads or 1)


FORCES = {"mlp": MLPForce, "gradient": GradientForce}
