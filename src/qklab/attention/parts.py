"""The attention layer taken apart: what each stage gives, and the scores as a product of queries and keys."""

from typing import NamedTuple

import torch
from torch import Tensor

from qklab.attention.layer import Attention
from qklab.attention.places import Places


class Parts(NamedTuple):
    """Queries, keys and values of one layer after each stage: [B, T, heads, ·] each."""

    projected: tuple[Tensor, Tensor]
    coupled: tuple[Tensor, Tensor]
    normalised: tuple[Tensor, Tensor, Tensor]  # with the value, and written out per head where they come from a latent
    compared: tuple[Tensor, Tensor]  # scores = q kᵀ


def take_apart(attention: Attention, x: Tensor, places: Places) -> Parts:
    """`Attention.forward` up to the scores, keeping what each stage gave."""
    q, k, v = attention.project(x)
    projected = exact(q), exact(k)
    if attention.couple is not None:
        q, k = attention.couple(q, k)
    coupled = exact(q), exact(k)
    q, k = attention.normalise(q, k)
    key, value = attention.mix.keys_and_values(k, k if v is None else v)
    normalised = exact(q), exact(key), exact(value)
    q, k = attention.rotate(q, k, places)
    k, _ = attention.mix.keys_and_values(*attention.rotate.read(k, v, places))
    compared = factors(attention.mix.scale * exact(q), exact(k), attention.rotate.bias(places))
    return Parts(projected, coupled, normalised, compared)


def exact(tensor: Tensor) -> Tensor:
    """In float32 or better."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def factors(q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """q', k' with q'k'ᵀ = q kᵀ + bias. A bias b_j per column is one more entry: 1 · b_j."""
    if bias is None:
        return q, k
    assert bias.shape[1:3] == (1, 1), "only a bias per column keeps the scores a product of queries and keys"
    column = bias.to(k.dtype).permute(0, 3, 1, 2).expand(*k.shape[:3], 1)  # [B, S, G, 1]
    return torch.cat([q, torch.ones_like(q[..., :1])], -1), torch.cat([k, column], -1)


def at_queries(k: Tensor, q: Tensor) -> Tensor:
    """Key heads repeated for every query head that reads them: [B, T, G, ·] → [B, T, H, ·]."""
    return k.repeat_interleave(q.shape[2] // k.shape[2], 2)


def product(q: Tensor, k: Tensor) -> Tensor:
    """[B, T, H, E], [B, S, G, E] → [B, H, T, S]."""
    return q.transpose(1, 2) @ at_queries(k, q).permute(0, 2, 3, 1)
