"""Stage 2 over MLA's latents: c_q [B, T, r_q] and c [B, T, r_kv] move each other before the heads are made of them.

What is cached is the coupled c, so the cache is as small as before and decoding stays absorbed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qklab.attention.couple import Affine, Coupling, Uncoupled, choose_force_width
from qklab.attention.draw import uniform_
from qklab.ops.members import spread_members

if TYPE_CHECKING:
    from qklab.attention.coupling_spec import CouplingSpec
    from qklab.attention.spec import AttentionSpec


class LatentNetwork(nn.Module):
    """f(u) = W2 silu(W1 u + b1) + b2, from the width of one latent to that of another."""

    members: int | None = None

    def __init__(self, inner: int, hidden: int, outer: int):
        super().__init__()
        self.inner, self.outer = nn.Linear(inner, hidden), nn.Linear(hidden, outer)

    def reset(self, generator: torch.Generator | None = None) -> None:
        for linear in (self.inner, self.outer):
            uniform_(linear.weight, linear.in_features, generator)
            uniform_(linear.bias, linear.in_features, generator)

    def forward(self, u: Tensor) -> Tensor:
        return self.outer(F.silu(self.inner(u)))

    @staticmethod
    def parameters_of(inner: int, hidden: int, outer: int) -> int:
        return hidden * (inner + 1) + outer * (hidden + 1)


class LatentAffine(Coupling):
    """c_q⁺ = c_q ⊙ exp(s1(c)) + t1(c) ; c⁺ = c ⊙ exp(s2(c_q⁺)) + t2(c_q⁺): the identity at the start."""

    stepped = False
    limited = True
    takes_members = True
    formula = "c_q⁺ = c_q ⊙ exp(s₁(c)) + t₁(c) ; c⁺ = c ⊙ exp(s₂(c_q⁺)) + t₂(c_q⁺), before W_uq, W_uk and W_uv"

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        (query, key), hidden = read_ranks(spec), choose_force_width(spec)
        self.query_network = LatentNetwork(key, hidden, 2 * query)
        self.key_network = LatentNetwork(query, hidden, 2 * key)
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        for network in (self.query_network, self.key_network):
            for parameter in network.outer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.steps):
            q = self.stretch(q, self.query_network(k))
            k = self.stretch(k, self.key_network(q))
        return q, k

    def stretch(self, u: Tensor, by: Tensor) -> Tensor:
        raw, shift = by.chunk(2, -1)
        return (u * (self.scale_limit * torch.tanh(raw)).exp() + shift).to(u.dtype)

    @classmethod
    def map_parameters(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        (query, key), hidden = read_ranks(spec), choose_force_width(spec)
        count = LatentNetwork.parameters_of
        return count(key, hidden, 2 * query) + count(query, hidden, 2 * key)

    @classmethod
    def map_products(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        return coupling.steps * 3 * choose_force_width(spec) * sum(read_ranks(spec))


class LatentUncoupled(Coupling):
    """c_q⁺ = c_q + δ g(c_q) ; c⁺ = c + δ f(c). The control: the same capacity, nothing crosses."""

    takes_members = True
    formula = "c_q⁺ = c_q + δ g(c_q) ; c⁺ = c + δ f(c), before W_uq, W_uk and W_uv"

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        (query, key), half = read_ranks(spec), choose_force_width(spec) // 2
        self.query_network = LatentNetwork(query, half, query)
        self.key_network = LatentNetwork(key, half, key)
        for network in (self.query_network, self.key_network):
            network.reset()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        step = spread_members(self.step, self.members, len(q), 2)
        for _ in range(self.steps):
            q, k = (q + step * self.query_network(q)).to(q.dtype), (k + step * self.key_network(k)).to(k.dtype)
        return q, k

    @classmethod
    def map_parameters(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        half = choose_force_width(spec) // 2
        return sum(LatentNetwork.parameters_of(rank, half, rank) for rank in read_ranks(spec))

    @classmethod
    def map_products(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        return coupling.steps * 2 * (choose_force_width(spec) // 2) * sum(read_ranks(spec))


# The couplings that are also defined over latents, which have widths of their own and no heads.
LATENT_COUPLINGS: dict[type[Coupling], type[Coupling]] = {Affine: LatentAffine, Uncoupled: LatentUncoupled}


def read_ranks(spec: AttentionSpec) -> tuple[int, int]:
    """The widths of c_q and c."""
    assert spec.latent is not None
    return spec.latent.query_rank, spec.latent.kv_rank
