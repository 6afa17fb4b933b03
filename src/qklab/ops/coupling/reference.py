"""Reference of the coupling maps: torch only, differentiable any number of times, and what a compiler may look into.

Inside, heads are grouped as q [B, T, G, R, D] and k [B, T, G, 1, D] with R = H/G: a query head meets its group's key by
broadcasting, and the key meets the mean q̄ of its group's query heads. Of S members, whose weights differ, the first two
axes are [S, B·T], and weights have the axes that broadcast with them (`align_members`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qklab.ops.norm import rms_norm
from qklab.ops.rope import apply_rope

if TYPE_CHECKING:
    from qklab.ops.coupling.api import Network, Norm

Pair = tuple[Tensor, Tensor]


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b on the last axis: one W [o, i] for all heads, or one per key head [G, o, i]; with members, W is
    [S, G or 1, o, i] and b [S, 1, 1, 1, o]."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    if weight.dim() == 4 and weight.shape[1] == 1:
        rows = x.flatten(1, 3)
        y = rows @ weight[:, 0].mT if bias is None else torch.baddbmm(bias[:, 0, 0], rows, weight[:, 0].mT)
        return y.unflatten(1, x.shape[1:4])
    y = torch.einsum("btgri,goi->btgro" if weight.dim() == 3 else "sngri,sgoi->sngro", x, weight)
    return y if bias is None else y + bias


def apply_force(network: Network, u: Tensor) -> Tensor:
    """W2 silu(W1 u + b1) + b2; −W1ᵀ(a ⊙ σ(W1 u + b1)) where there are amplitudes a; A u where nothing else is."""
    z = apply_linear(u, network.inner, network.inner_bias)
    if network.amplitude is not None:
        return -apply_linear((network.amplitude * torch.sigmoid(z)).to(u.dtype), network.inner.mT, None)
    return z if network.outer is None else apply_linear(F.silu(z), network.outer, network.outer_bias)


def align_members(network: Network) -> Network:
    """The network of S members [S, …] with the axes that `apply_linear` knows members by."""
    matrices = {name: getattr(network, name) for name in ("inner", "outer")}
    vectors = {name: getattr(network, name) for name in ("inner_bias", "outer_bias", "amplitude")}
    aligned = {name: w[:, None] for name, w in matrices.items() if w is not None and w.dim() == 3}
    aligned |= {name: w.reshape(len(w), 1, -1, 1, w.shape[-1]) for name, w in vectors.items() if w is not None}
    return network._replace(**aligned)


def group_mean(q: Tensor) -> Tensor:
    """q̄, what the key sees: q [B, T, G, R, D] → [B, T, G, 1, D]."""
    return q if q.shape[3] == 1 else q.mean(3, keepdim=True)


class Motion(NamedTuple):
    """What moves queries and keys in one call."""

    step: Tensor
    steps: int
    forces: list[Callable[[Tensor], Tensor]]
    networks: tuple[Network, ...]
    limit: float
    precision: torch.dtype


class ReferenceMap(NamedTuple):
    move: Callable[[Tensor, Tensor, Motion], Pair]
    networks: int
    stepped: bool


MAPS: dict[str, ReferenceMap] = {}


def define_map(kind: str, networks: int = 1, stepped: bool = True) -> Callable:
    """Make a function of q, k and a Motion the map of this name, with so many networks and, if `stepped`, a step."""

    def add(move: Callable[[Tensor, Tensor, Motion], Pair]) -> Callable[[Tensor, Tensor, Motion], Pair]:
        MAPS[kind] = ReferenceMap(move, networks, stepped)
        return move

    return add


@define_map("euler")
def euler(q: Tensor, k: Tensor, m: Motion) -> Pair:
    """q⁺ = q + δ k ; k⁺ = k + δ f(q̄), the old q in both."""
    for _ in range(m.steps):
        q, k = q + m.step * k, k + m.step * m.forces[0](group_mean(q))
    return q, k


@define_map("symplectic-euler")
@define_map("linear")
def symplectic_euler(q: Tensor, k: Tensor, m: Motion) -> Pair:
    """k⁺ = k + δ f(q̄) ; q⁺ = q + δ k⁺."""
    for _ in range(m.steps):
        k = k + m.step * m.forces[0](group_mean(q))
        q = q + m.step * k
    return q, k


@define_map("leapfrog")
def leapfrog(q: Tensor, k: Tensor, m: Motion) -> Pair:
    """k½ = k + δ/2 f(q̄) ; q⁺ = q + δ k½ ; k⁺ = k½ + δ/2 f(q̄⁺). Neighbouring half kicks share one evaluation of f."""
    k = k + m.step / 2 * m.forces[0](group_mean(q))
    for i in range(m.steps):
        q = q + m.step * k
        k = k + (m.step if i < m.steps - 1 else m.step / 2) * m.forces[0](group_mean(q))
    return q, k


def scale_and_shift(network: Network, u: Tensor, limit: float, precision: torch.dtype) -> Pair:
    """s = limit · tanh(raw) and t, both from one network."""
    assert network.outer is not None
    z = F.silu(apply_linear(u.to(precision), network.inner, network.inner_bias))
    raw, shift = apply_linear(z, network.outer, network.outer_bias).to(u.dtype).chunk(2, -1)
    return limit * torch.tanh(raw), shift


@define_map("affine", networks=2, stepped=False)
def affine(q: Tensor, k: Tensor, m: Motion) -> Pair:
    """q⁺ = q ⊙ exp(s1(k)) + t1(k) ; k⁺ = k ⊙ exp(s2(q̄⁺)) + t2(q̄⁺)."""
    for _ in range(m.steps):
        scale, shift = scale_and_shift(m.networks[0], k, m.limit, m.precision)
        q = q * scale.exp() + shift
        scale, shift = scale_and_shift(m.networks[1], group_mean(q), m.limit, m.precision)
        k = k * scale.exp() + shift
    return q, k


@define_map("uncoupled", networks=2)
def uncoupled(q: Tensor, k: Tensor, m: Motion) -> Pair:
    """q⁺ = q + δ g(q) ; k⁺ = k + δ f(k)."""
    for _ in range(m.steps):
        q, k = q + m.step * m.forces[0](q), k + m.step * m.forces[1](k)
    return q, k


def normalise_and_rotate(q: Tensor, k: Tensor, norm: Norm | None, angles: Pair | None, turn_key: bool) -> Pair:
    """rotate(normalise(q, k)) for q [B, T, H, D], k [B, T, G, D], as `couple` ends."""
    if norm is not None:
        q, k = rms_norm(q, norm.query_gain, norm.eps), rms_norm(k, norm.key_gain, norm.eps)
    if angles is not None:
        q, k = apply_rope(q, angles), apply_rope(k, angles) if turn_key else k
    return q, k


def couple(
    q: Tensor,
    k: Tensor,
    kind: str,
    networks: tuple[Network, ...],
    step: Tensor | None,
    steps: int,
    scale_limit: float,
    norm: Norm | None,
    angles: Pair | None,
    turn_key: bool,
    precision: torch.dtype,
    members: int | None = None,
) -> Pair:
    """The operation `api.couple` describes: states in float32 (float64), networks in `precision`, one rounding at the
    end."""
    dtype, wide, shapes = q.dtype, torch.promote_types(q.dtype, torch.float32), (q.shape, k.shape)
    q, k = q.to(wide).unflatten(2, (k.shape[2], -1)), k.to(wide).unsqueeze(3)
    if members is not None:
        tokens = q.shape[0] // members * q.shape[1]
        q, k = (x.reshape(members, tokens, *x.shape[2:]) for x in (q, k))
        networks = tuple(map(align_members, networks))
        step = None if step is None else step.reshape(members, 1, -1, 1, 1)
    forces = [lambda u, n=network: apply_force(n, u.to(precision)).to(wide) for network in networks]
    step = q.new_ones(()) if step is None else step.to(wide)
    q, k = MAPS[kind].move(q, k, Motion(step, steps, forces, networks, scale_limit, precision))
    q, k = normalise_and_rotate(q.reshape(shapes[0]), k.reshape(shapes[1]), norm, angles, turn_key)
    return q.to(dtype), k.to(dtype)
