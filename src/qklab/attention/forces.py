"""What moves queries and keys in a coupling: small networks and gradients of potentials, as parameters.

How they are applied is `qklab.ops.coupling`.
"""

import torch
from torch import nn

from qklab.attention.draw import uniform_
from qklab.ops.coupling import Network


class HeadLinear(nn.Module):
    """The parameters of y = W x + b on the last axis: one W for all heads, or without bias one per key head."""

    members: int | None = None

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

    @staticmethod
    def parameters_of(inner: int, outer: int, heads: int | None) -> int:
        return inner * outer + outer if heads is None else heads * inner * outer


class MLPForce(nn.Module):
    """f(u) = W2 silu(W1 u + b1) + b2, width h."""

    def __init__(self, head_width: int, force_width: int, heads: int | None):
        super().__init__()
        self.inner = HeadLinear(head_width, force_width, heads)
        self.outer = HeadLinear(force_width, head_width, heads)

    def network(self) -> Network:
        return Network(self.inner.weight, self.inner.bias, self.outer.weight, self.outer.bias)

    @staticmethod
    def parameters_of(head_width: int, force_width: int, heads: int | None) -> int:
        count = HeadLinear.parameters_of
        return count(head_width, force_width, heads) + count(force_width, head_width, heads)


class GradientForce(nn.Module):
    """f(u) = −∇U(u) = −W1ᵀ(a ⊙ σ'(W1 u + b)) of the potential U(u) = Σ_i a_i σ(w_i·u + b_i), σ = softplus."""

    members: int | None = None

    def __init__(self, head_width: int, force_width: int, heads: int | None):
        super().__init__()
        self.inner = HeadLinear(head_width, force_width, heads)
        shape = (force_width,) if heads is None else (heads, 1, force_width)
        self.amplitude = nn.Parameter(torch.empty(shape))
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        uniform_(self.amplitude, self.amplitude.shape[-1], generator)

    def network(self) -> Network:
        return Network(self.inner.weight, self.inner.bias, amplitude=self.amplitude)

    @staticmethod
    def parameters_of(head_width: int, force_width: int, heads: int | None) -> int:
        return HeadLinear.parameters_of(head_width, force_width, heads) + force_width * (heads or 1)


FORCES = {"mlp": MLPForce, "gradient": GradientForce}
