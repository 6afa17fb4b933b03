"""What the tokens right before a token left behind, for choices that look back a few tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qklab.ops.shift import shift_tokens


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
        return shift_tokens(u, self.positions, tokens, self.recall(u, tokens))

    def recall(self, u: Tensor, tokens: int) -> Tensor | None:
        """Note that u [B, T, …] is looked back on, and give what a cache kept of the tokens before: [B, tokens, …]."""
        i = len(self.seen)
        self.seen.append(u)
        return self.kept[i].to(u.dtype).view(u.shape[0], tokens, *u.shape[2:]) if self.kept else None


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
