"""Rings of tokens, token p in slot p modulo their size, and where tokens stand in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CacheSlots(NamedTuple):
    """Where new tokens will stand among those that `Cache.append` returns, by their numbers in the row."""

    new: Tensor  # [T]
    every: Tensor  # [S], of all slots; below 0 where nothing stands yet
    filled: Tensor | None = None  # how many tokens there will be, where slots are not the first, second, … of them
    first: int | Tensor = 0  # number of the first slot, where these are the last tokens in order


def number_ring(total: Tensor, slots: int) -> Tensor:
    """Which of `total` tokens each slot holds, where token p stands in slot p mod slots: [slots]."""
    return total - 1 - (total - 1 - torch.arange(slots, device=total.device)) % slots


def put_behind(tensors: Sequence[Tensor], past: Tensor, new: Sequence[Tensor]) -> list[Tensor]:
    """What stands in the slots `past` of each tensor, and behind that the new tokens."""
    return [torch.cat([tensor[:, past], value.to(tensor.dtype)], 1) for tensor, value in zip(tensors, new, strict=True)]


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
