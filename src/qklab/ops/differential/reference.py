"""Reference of differential attention: torch only, with both maps written out."""

import torch
from torch import Tensor


def map_attention(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """softmax(scale · q kᵀ), masked: q [B, T, H, D], k [B, S, G, D] → [B, H, T, S]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)


def differential(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """(A₁ − λ A₂) [v₁;v₂]: q [B, T, H, D], k, v [B, S, G, D] → [B, T, H/2, 2D]."""
    pairs, groups = k.shape[2] // 2, q.shape[2] // k.shape[2]
    first, second = map_attention(q, k, scale, mask).unflatten(1, (pairs, 2, groups)).unbind(2)  # [B, G/2, H/G, T, S]
    value = v.unflatten(2, (pairs, 2)).flatten(3)  # [B, S, G/2, 2D]
    return torch.einsum("bgrts,bsge->btgre", first - weight * second, value).flatten(2, 3)


def differential_v2(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """(A_2h − λ_h A_2h+1) v: q [B, T, 2H, D], k, v [B, S, G, D], weight [B, T, H] → [B, T, H, D]."""
    even, odd = map_attention(q, k, scale, mask).unflatten(1, (-1, 2)).unbind(2)  # [B, H, T, S]
    value = v.repeat_interleave(even.shape[1] // v.shape[2], 2)
    return torch.einsum("bhts,bshd->bthd", even - weight.transpose(1, 2)[..., None] * odd, value)
