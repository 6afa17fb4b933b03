"""What decoding keeps of past tokens: exactly the tensors the spec needs, preallocated, and not a byte more.

A cache starts with room for `tokens` tokens. Filled beyond that it grows, over-allocating by at most half
(`spare_bytes` says by how much), or with `grow=False` refuses before anything is written. A `StaticCache` never moves:
its length is a tensor, so that one compiled graph serves every step.

Caches are for inference: decode under `torch.no_grad()`. With gradients on, the first chunk backpropagates as a full
forward does; once later tokens are written beside it torch refuses to, rather than give a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qklab.attention.past import ROLLBACK, TokenRing

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
    ):
        if batch < 1 or tokens < 0:
            raise ValueError(f"a cache needs batch ≥ 1 and tokens ≥ 0, but batch={batch} and tokens={tokens} came.")
        if not spec.causal:
            raise ValueError("only causal attention can be cached, but the spec says causal=False.")
        if not dtype.is_floating_point:
            raise ValueError(f"a cache holds floating-point numbers, but dtype={dtype} came.")
        heads = self.heads(spec)
        self.tensors = [
            torch.zeros(batch, tokens, heads, width // heads, dtype=dtype, device=device) for width in self.widths(spec)
        ]
        self.rings = [TokenRing(batch, tokens, entries, dtype, device) for tokens, entries in spec.remembered]
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
    def owned(self) -> list[Tensor]:
        """All that is kept: of every token, and of those that are looked back on."""
        return [*self.tensors, *(ring.tensor for ring in self.rings)]

    @property
    def bytes(self) -> int:
        """Bytes this cache owns, filled or not."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.owned)

    @property
    def spare_bytes(self) -> int:
        """Bytes owned but not filled."""
        filled = sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)
        return filled * (self.capacity - self.length) // max(self.capacity, 1)

    def append(self, *new: Tensor) -> list[Tensor]:
        """Remember new tokens [B, T, heads, width] and return everything remembered [B, length, heads, width]."""
        self.check(*new)
        tokens = new[0].shape[1]
        end = self.length + tokens
        if end > self.capacity:
            if not self.grow:
                raise ValueError(
                    f"the cache has room for {self.capacity} tokens and holds {self.length}, but {tokens} more came; "
                    f"make it with tokens={end} or grow=True."
                )
            self.reserve(max(end, self.capacity + self.capacity // 2))
        for tensor, value in zip(self.tensors, new, strict=True):
            tensor[:, self.length : end] = value
        self.length = end
        return self.read()

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

    def slots(self, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where `tokens` new tokens will stand [T], the slots `append` will return [S], and how many of these will be
        filled, where that is not all of them."""
        every = torch.arange(self.length + tokens, device=self.tensors[0].device)
        return every[self.length :], every, None

    @property
    def started(self) -> bool:
        """Whether anything is remembered."""
        return self.length > 0

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all, keeping what is there."""
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
        if self.rings and 0 < length < farthest - ROLLBACK:
            raise ValueError(
                f"this layer looks back, and its cache keeps what that needs for {ROLLBACK} tokens, so it cannot be "
                f"cropped to {length}; crop to 0 or to {farthest - ROLLBACK} and more."
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

    def __init__(self, spec: AttentionSpec, batch: int, tokens: int, dtype: torch.dtype, device: torch.device | str):
        super().__init__(spec, batch, tokens, dtype, device, grow=False)
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
        if tokens > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} tokens, but {tokens} came; make it with tokens={tokens}."
            )
        own, _, _ = self.slots(tokens)
        for tensor, value in zip(self.tensors, new, strict=True):
            tensor.index_copy_(1, own, value.detach().to(tensor.dtype))
        self.filled.add_(tokens)
        first, self.fresh = self.fresh, False
        return list(new) if first else self.tensors

    def recall(self) -> list[Tensor]:
        return [ring.read(self.filled) for ring in self.rings]

    def remember(self, seen: Sequence[Tensor]) -> None:
        for ring, new in zip(self.rings, seen, strict=True):
            ring.write(new.detach(), self.filled)
        if self.rings:
            torch.as_tensor(self._farthest).clamp_(min=self.filled)

    def slots(self, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
        new = torch.arange(tokens, device=self.filled.device)
        if self.fresh:
            return new, new, None
        every = torch.arange(self.capacity, device=self.filled.device)
        return new + self.filled, every, self.filled + tokens

    def take(self, rows: Tensor) -> None:
        """In place where the number of rows stays, so that compiled graphs still find the tensors."""
        if len(rows) != self.batch:
            super().take(rows)
            return
        assert self.left_padding is not None
        for tensor in (*self.owned, self.left_padding):
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
