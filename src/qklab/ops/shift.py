"""What stood a few tokens earlier in the same text."""

from __future__ import annotations

import torch
from torch import Tensor


def shift_tokens(u: Tensor, positions: Tensor, tokens: int, kept: Tensor | None = None) -> list[Tensor]:
    """u [B, T, …] of one to `tokens` tokens earlier, in this order; 0 where a text has not begun.

    `positions` [B or 1, T] are the tokens' places in their own texts, from 0. Before the first stands `kept`
    [B, tokens, …], or nothing.
    """
    kept = u.new_zeros(u.shape[0], tokens, *u.shape[2:]) if kept is None else kept
    row = torch.cat([kept, u], 1)
    places = positions.view(*positions.shape, *(1,) * (u.dim() - 2))
    shifted = ((back, row[:, tokens - back : row.shape[1] - back]) for back in range(1, tokens + 1))
    return [torch.where(places >= back, x, 0) for back, x in shifted]
