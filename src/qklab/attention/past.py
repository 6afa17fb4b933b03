"""What the tokens right before a token left behind, for choices that look back a few tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Past:
    """The tokens before each of T new ones. A text sees nothing of the one packed before it, nor of its padding.

    What is looked back on is noted in `seen`, in the order of the calls, so that a cache can keep the last of it;
    `kept` is what a cache kept so: [B, tokens, entries] each.
    """

    def __init__(self, positions: Tensor, kept: Sequence[Tensor] = ()):
        self.positions, self.kept = positions, list(kept)  # [B or 1, T]: the new tokens' places in their own texts
        self.seen: list[Tensor] = []

    def before(self, u: Tensor, tokens: int) -> list[Tensor]:
        """u [B, T, …] of one to `tokens` tokens earlier, in this order; 0 where a text has not begun."""
        shape = (u.shape[0], tokens, *u.shape[2:])
        kept = self.kept[len(self.seen)].to(u.dtype).view(shape) if self.kept else u.new_zeros(shape)
        self.seen.append(u)
        row = torch.cat([kept, u], 1)
        return [self.cut(row[:, tokens - back : row.shape[1] - back], back) for back in range(1, tokens + 1)]

    def cut(self, u: Tensor, back: int) -> Tensor:
        inside = (self.positions >= back).view(*self.positions.shape, *(1,) * (u.dim() - 2))
        return torch.where(inside, u, 0)


class TokenRing:
    """The last tokens of something that is looked back on, each at its slot modulo the length of `tensor`.

    It has room for `tokens` and for `drafts` more, so that a cache can be cropped by as many.
    """

    def __init__(
        self, batch: int, tokens: int, drafts: int, entries: int, dtype: torch.dtype, device: torch.device | str
    ):
        self.tokens = tokens
        self.tensor = torch.zeros(batch, tokens + drafts, entries, dtype=dtype, device=device)

    def read(self, length: int | Tensor) -> Tensor:
        """The last tokens [B, tokens, entries] of `length`; of no meaning where there are not as many."""
        room = self.tensor.shape[1]
        if isinstance(length, Tensor):
            slots = torch.arange(-self.tokens, 0, device=length.device) + length
            return self.tensor.index_select(1, slots % room)
        first = (length - self.tokens) % room
        if first + self.tokens <= room:
            return self.tensor[:, first : first + self.tokens]
        return torch.cat([self.tensor[:, first:], self.tensor[:, : first + self.tokens - room]], 1)

    def write(self, new: Tensor, length: int | Tensor) -> None:
        """Keep the last of the new tokens [B, T, …], which end at `length`."""
        room = self.tensor.shape[1]
        new = new.flatten(2)[:, -room:].to(self.tensor.dtype)
        slots = torch.arange(-new.shape[1], 0, device=new.device) + length
        self.tensor.index_copy_(1, slots % room, new)
