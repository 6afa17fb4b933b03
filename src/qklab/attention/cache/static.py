"""A cache of fixed room, which one compiled graph reads and writes at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qklab.attention.cache.growing import Cache
from qklab.attention.cache.kinds import cache_class
from qklab.attention.cache.ring import CacheSlots, number_ring, put_behind

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


class StaticCache(Cache):
    """A cache of fixed room for torch.compile and CUDA graphs: no tensor is ever replaced, and its length is a tensor.

    The first chunk is attended to as it came; after that all `capacity` slots are read and those not yet filled are
    masked. What lies beyond the capacity is not noticed in a compiled graph: the caller makes the room large enough.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        batch: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        drafts: int = 1,
    ):
        super().__init__(spec, batch, tokens, dtype, device, grow=False, drafts=drafts)
        self.filled = torch.zeros((), dtype=torch.long, device=device)
        self.left_padding: Tensor | None = torch.zeros(batch, dtype=torch.long, device=device)
        self.fresh = True
        self._farthest: int | Tensor = torch.zeros_like(self.filled)

    @staticmethod
    def widths(spec: AttentionSpec) -> tuple[int, ...]:
        return cache_class(spec).widths(spec)

    @staticmethod
    def heads(spec: AttentionSpec) -> int:
        return cache_class(spec).heads(spec)

    @property
    def started(self) -> bool:
        return not self.fresh

    @property
    def length(self) -> int:
        return int(self.filled)

    @length.setter
    def length(self, length: int) -> None:
        self.filled.fill_(length)
        self.fresh = length == 0
        if self.fresh:
            torch.as_tensor(self._farthest).zero_()

    def append(self, *new: Tensor) -> list[Tensor]:
        """As `Cache.append`, but after the first chunk all slots are returned, filled or not."""
        self.check(*new)
        tokens = new[0].shape[1]
        if self.keep(tokens) > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} tokens, but {tokens} came; make it with tokens={tokens}."
            )
        seen = list(new) if self.fresh else self.tensors
        if not self.fresh and self.orders(tokens):
            past = self.filled - self.capacity + 1 + torch.arange(self.capacity - 1, device=self.filled.device)
            seen = put_behind(self.tensors, past % self.capacity, new)
        kept = min(tokens, self.capacity)
        own = (self.filled + torch.arange(tokens - kept, tokens, device=self.filled.device)) % self.capacity
        for tensor, value in zip(self.tensors, new, strict=True):
            tensor.index_copy_(1, own, value[:, tokens - kept :].detach().to(tensor.dtype))
        self.filled.add_(tokens)
        self.fresh = False
        return seen

    def orders(self, tokens: int) -> bool:
        """Whether so many new tokens are read behind those of a ring put in order, which a single one need not be."""
        return self.ring_size == self.capacity and tokens > 1

    def recall(self) -> list[Tensor]:
        return [ring.read(self.filled) for ring in self.rings]

    def remember(self, seen: Sequence[Tensor]) -> None:
        for ring, new in zip(self.rings, seen, strict=True):
            ring.write(new.detach(), self.filled)
        if self.rings or self.window is not None:
            torch.as_tensor(self._farthest).clamp_(min=self.filled)

    def slots(self, tokens: int) -> CacheSlots:
        new = torch.arange(tokens, device=self.filled.device)
        if self.fresh:
            return CacheSlots(new, new)
        new = new + self.filled
        if self.orders(tokens):
            first = self.filled - self.capacity + 1
            every = first + torch.arange(self.capacity - 1 + tokens, device=self.filled.device)
            return CacheSlots(new, every, first=first)
        total = self.filled + tokens
        if self.window is None:
            return CacheSlots(new, torch.arange(self.capacity, device=self.filled.device), total)
        return CacheSlots(new, number_ring(total, self.capacity), total)

    def take(self, rows: Tensor) -> None:
        """In place where the number of rows stays, so that compiled graphs still find the tensors."""
        if len(rows) != self.batch:
            super().take(rows)
            return
        assert self.left_padding is not None
        for tensor in (*self.owned_tensors, self.left_padding):
            tensor.copy_(tensor.index_select(0, rows))

    def clear(self) -> None:
        """Forget everything, and the padding too."""
        assert self.left_padding is not None
        self.length = 0
        self.left_padding.zero_()
