"""What decoding keeps of past tokens: exactly the tensors the spec needs, preallocated, and not a byte more.

A cache starts with room for `tokens` tokens. Filled beyond that it grows, over-allocating by at most half
(`spare_bytes` says by how much), or with `grow=False` refuses before anything is written. A `StaticCache` never moves:
its length is a tensor, so that one compiled graph serves every step.

What only the last n tokens matter for is kept in a ring of n + `drafts` slots, token p in slot p modulo that many: n is
W − 1 for keys and values that are seen through a window of W tokens, and what `token_rings` says for what is looked
back on. A filled ring can so be cropped by `drafts` tokens, one unless more are asked for, and by no more. A single new
token reads a window's ring as it lies; several at once are read behind the last W − 1 before them, put in order.

Caches are for inference: decode under `torch.no_grad()`. With gradients on, the first chunk backpropagates as a full
forward does; once later tokens are written beside it torch refuses to, rather than give a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qklab.attention.past import TokenRing

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


class CacheSlots(NamedTuple):
    """Where new tokens will stand among those that `Cache.append` returns, by their numbers in the row."""

    new: Tensor  # [T]
    every: Tensor  # [S], of all slots; below 0 where nothing stands yet
    filled: Tensor | None = None  # how many tokens there will be, where slots are not the first, second, … of them
    first: int | Tensor = 0  # number of the first slot, where these are the last tokens in order


def number_ring(total: Tensor, slots: int) -> Tensor:
    """Which of `total` tokens each slot holds, where token p stands in slot p mod slots: [slots]."""
    return total - 1 - (total - 1 - torch.arange(slots, device=total.device)) % slots


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
        seen = self.tensors
        if not alone:
            seen = [
                torch.cat([tensor[:, past], value.to(tensor.dtype)], 1)
                for tensor, value in zip(self.tensors, new, strict=True)
            ]
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


class KeyValueCache(Cache):
    """Keys and values: 2GD elements per token."""

    @staticmethod
    def widths(spec: AttentionSpec) -> tuple[int, ...]:
        return (spec.kv_heads * spec.head_width,) * 2


class SharedCache(Cache):
    """Keys that are also the values: GD elements per token."""

    @staticmethod
    def widths(spec: AttentionSpec) -> tuple[int, ...]:
        return (spec.kv_heads * spec.head_width,)


class LatentCache(Cache):
    """MLA's latent and the rotary key all heads share: d_c + d_rope elements per token."""

    @staticmethod
    def widths(spec: AttentionSpec) -> tuple[int, ...]:
        assert spec.latent is not None
        return (spec.latent.kv_rank + spec.latent.rope_width,)

    @staticmethod
    def heads(spec: AttentionSpec) -> int:
        return 1


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
            seen = [
                torch.cat([tensor[:, past % self.capacity], value.to(tensor.dtype)], 1)
                for tensor, value in zip(self.tensors, new, strict=True)
            ]
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


def cache_class(spec: AttentionSpec) -> type[Cache]:
    if spec.latent is not None:
        return LatentCache
    return SharedCache if spec.key_is_value else KeyValueCache


def check_padding(left_padding: Tensor, batch: int) -> Tensor:
    """Left padding: how many leading tokens of each row are not text, [batch]."""
    if left_padding.shape != (batch,) or left_padding.is_floating_point() or bool((left_padding < 0).any()):
        raise ValueError(
            f"left_padding must be {batch} whole numbers ≥ 0, one per row, but {left_padding.tolist()} came."
        )
    return left_padding
