"""Reference of the convolution: torch only, and the one that knows what a cache kept."""

from __future__ import annotations

import torch
from torch import Tensor

from qklab.ops.members import spread_members
from qklab.ops.norm import rms_norm
from qklab.ops.shift import shift_tokens


def convolve_heads(
    q: Tensor,
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    temperature: Tensor,
    positions: Tensor,
    eps: float,
    kept: tuple[Tensor, Tensor] | None,
    members: int | None,
) -> tuple[Tensor, Tensor]:
    """The operation `api.convolve_heads` describes.

    Every row has a copy of the weights, since a sum over all tokens at once would leave most of a GPU idle on the way
    back.
    """
    B, heads = len(q), q.shape[2]
    u, before = torch.cat([q, k], 2), None if kept is None else torch.cat(kept, 2)
    tokens = torch.cat([u, *shift_tokens(u, positions, 2, before)], -1).to(weight.dtype).transpose(1, 2)
    weight = spread_members(weight, members, B, 0).expand(B, -1, -1, -1)
    y = (tokens @ weight).transpose(1, 2) + spread_members(bias, members, B, 1)
    mixed = (q.unflatten(2, (k.shape[2], -1)) + k.unsqueeze(3)) / 2  # [B, T, G, R, D]
    new_q = rms_norm(y[:, :, :heads] + mixed.flatten(2, 3), None, eps)
    new_k = rms_norm(y[:, :, heads:] + mixed.mean(3), None, eps)
    return new_q.to(q.dtype), (new_k * spread_members(temperature, members, B, 1)[..., None]).to(k.dtype)
