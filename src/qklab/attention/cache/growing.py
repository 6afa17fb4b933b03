"""A cache that grows: past tokens of one layer, all of them or those that a window shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qklab.attention.cache.ring import CacheSlots, TokenRing, number_ring, put_behind

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


class Cache:
    """Past tokens of one layer: one tensor [batch, capacity, heads, width] per thing remembered."""

    def __init__(
        self,
        spec: AttentionSpec,
        batch: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        grow: bool = True,
        left_padding: Tensor | None = None,
        drafts: int = 1,
    ):
        if batch < 1 or tokens < 0:
            raise ValueError(f"a cache needs batch ≥ 1 and tokens ≥ 0, but batch={batch} and tokens={tokens} came.")
        if not spec.causal:
            raise ValueError("only causal attention can be cached, but the spec says causal=False.")
        if not dtype.is_floating_point:
            raise ValueError(f"a cache holds floating-point numbers, but dtype={dtype} came.")
        if drafts < 1:
            raise ValueError(f"drafts must be at least 1, but drafts={drafts} came.")
        heads = self.heads(spec)
        self.window, self.drafts = spec.window, drafts
        self.ring_size = None if spec.window is None else spec.window - 1 + drafts  # slots, once they are filled
        tokens = self.keep(tokens)
        self.tensors = [
            torch.zeros(batch, tokens, heads, width // heads, dtype=dtype, device=device) for width in self.widths(spec)
        ]
        self.rings = [TokenRing(batch, back, drafts, entries, dtype, device) for back, entries in spec.token_rings]
        self._length = 0
        self._farthest: int | Tensor = 0  # the most tokens there were, which is where the rings begin to forget
        self.grow = grow
        self.left_padding = None if left_padding is None else check_padding(left_padding, batch).to(device)

    @staticmethod
    def widths(spec: AttentionSpec) -> tuple[int, ...]:
        """Elements per token of each tensor."""
        raise NotImplementedError

    @staticmethod
    def heads(spec: AttentionSpec) -> int:
        return spec.kv_heads

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = length
        self._farthest = self._farthest if length else 0

    @property
    def batch(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.tensors[0].shape[1]

    @property
    def owned_tensors(self) -> list[Tensor]:
        """All that is kept: of every token, and of those that are looked back on."""
        return [*self.tensors, *(ring.tensor for ring in self.rings)]

    @property
    def bytes(self) -> int:
        """Bytes this cache owns, filled or not."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.owned_tensors)

    @property
    def spare_bytes(self) -> int:
        """Bytes owned but not filled, or filled with what is only kept for drafts."""
        filled = sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)
        needed = self.length if self.window is None else min(self.length, self.window)
        drafts = sum(ring.tensor[:, 1 : self.drafts].nbytes for ring in self.rings)
        return filled * (self.capacity - needed) // max(self.capacity, 1) + drafts

    def append(self, *new: Tensor) -> list[Tensor]:
        """Remember new tokens [B, T, heads, width] and return all that they may see [B, S, heads, width]: everything
        remembered, or with a window what `slots` says."""
        self.check(*new)
        tokens = new[0].shape[1]
        end = self.length + tokens
        if self.keep(end) > self.capacity:
            if not self.grow:
                raise ValueError(
                    f"the cache has room for {self.capacity} tokens and holds {self.length}, but {tokens} more came; "
                    f"make it with tokens={end} or grow=True."
                )
            self.reserve(max(end, self.capacity + self.capacity // 2))
        if self.wraps(tokens):
            return self.append_to_ring(*new)
        for tensor, value in zip(self.tensors, new, strict=True):
            tensor[:, self.length : end] = value
        self.length = end
        return self.read()

    def keep(self, tokens: int) -> int:
        """How many of so many tokens are kept."""
        return tokens if self.ring_size is None else min(tokens, self.ring_size)

    def wraps(self, tokens: int) -> bool:
        """Whether with so many more there are more than a ring keeps."""
        return self.ring_size is not None and self.length + tokens > self.ring_size

    def append_to_ring(self, *new: Tensor) -> list[Tensor]:
        tokens, length = new[0].shape[1], self.length
        end, kept = length + tokens, self.keep(tokens)
        past = torch.arange(length - self.count_past(), length, device=new[0].device) % self.capacity
        own = torch.arange(end - kept, end, device=new[0].device) % self.capacity
        alone = tokens == 1 and length > 0
        seen = self.tensors if alone else put_behind(self.tensors, past, new)
        for tensor, value in zip(self.tensors, new, strict=True):
            tensor[:, own] = value[:, tokens - kept :].to(tensor.dtype)
        self.length = end
        self._farthest = max(int(self._farthest), end)
        return seen

    def count_past(self) -> int:
        """How many of the tokens remembered the next one sees."""
        return self.length if self.window is None else min(self.length, self.window - 1)

    def check(self, *new: Tensor) -> None:
        """Raise where the new tokens are not of this cache's shape."""
        batch = new[0].shape[0]
        if batch != self.batch:
            raise ValueError(f"the cache holds {self.batch} sequences, but {batch} came; make one with batch={batch}.")
        held, came = ([list(tensor.shape[2:]) for tensor in tensors] for tensors in (self.tensors, new))
        if held != came:
            raise ValueError(f"this cache holds {held} per token, but {came} came; use this layer's own new_cache.")

    def read(self) -> list[Tensor]:
        return [tensor[:, : self.length] for tensor in self.tensors]

    def slots(self, tokens: int) -> CacheSlots:
        """Of `tokens` new tokens, before `append`."""
        device, end = self.tensors[0].device, self.length + tokens
        if not self.wraps(tokens):
            every = torch.arange(end, device=device)
            return CacheSlots(every[self.length :], every)
        if tokens == 1 and self.length:
            total = torch.tensor(end, device=device)
            return CacheSlots(total[None] - 1, number_ring(total, self.capacity), total)
        first = self.length - self.count_past()
        every = torch.arange(first, end, device=device)
        return CacheSlots(every[self.length - first :], every, first=first)

    @property
    def started(self) -> bool:
        """Whether anything is remembered."""
        return self.length > 0

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all, keeping what is there."""
        tokens = self.keep(tokens)
        if tokens <= self.capacity:
            return
        for i, tensor in enumerate(self.tensors):
            larger = tensor.new_zeros(tensor.shape[0], tokens, *tensor.shape[2:])
            larger[:, : self.length] = tensor[:, : self.length]
            self.tensors[i] = larger

    def recall(self) -> list[Tensor]:
        """What the next tokens look back on: [B, tokens, entries] each, as `remember` was given it."""
        return [ring.read(self._length) for ring in self.rings]

    def remember(self, seen: Sequence[Tensor]) -> None:
        """Keep the last of what the tokens that were just appended let later ones look back on."""
        for ring, new in zip(self.rings, seen, strict=True):
            ring.write(new, self._length)
        self._farthest = max(int(self._farthest), self._length)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens (speculative decoding rejects the rest)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be cropped to {length}.")
        farthest = int(self._farthest)
        rings = [ring.tensor.shape[1] for ring in self.rings]
        rings += [] if self.ring_size is None else [self.ring_size]
        least = farthest - self.drafts if farthest > min(rings, default=farthest) else 0
        if 0 < length < least:
            raise ValueError(
                f"this cache has overwritten what the next token would need after a crop to {length}; crop to 0 or to "
                f"{least} and more, or make it with drafts={farthest - length}."
            )
        self.length = length

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was (beam search); rows may repeat and their number may differ."""
        rows = rows.to(self.tensors[0].device)
        if rows.dim() != 1 or len(rows) == 0 or rows.is_floating_point():
            raise ValueError(
                f"rows must be a non-empty vector of row numbers, but {tuple(rows.shape)} {rows.dtype} came."
            )
        if int(rows.min()) < 0 or int(rows.max()) >= self.batch:
            raise ValueError(f"rows must lie between 0 and {self.batch - 1}, but {rows.tolist()} came.")
        self.take(rows)

    def take(self, rows: Tensor) -> None:
        """`reorder` without its checks, for which a GPU has to be waited for."""
        self.tensors = [tensor.index_select(0, rows) for tensor in self.tensors]
        for ring in self.rings:
            ring.tensor = ring.tensor.index_select(0, rows)
        if self.left_padding is not None:
            self.left_padding = self.left_padding.index_select(0, rows)


def check_padding(left_padding: Tensor, batch: int) -> Tensor:
    """Left padding: how many leading tokens of each row are not text, [batch]."""
    if left_padding.shape != (batch,) or left_padding.is_floating_point() or bool((left_padding < 0).any()):
        raise ValueError(
            f"left_padding must be {batch} whole numbers ≥ 0, one per row, but {left_padding.tolist()} came."
        )
    return left_padding
