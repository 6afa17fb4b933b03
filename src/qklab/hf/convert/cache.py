"""Cache layers for keys and values that are one tensor: they own that tensor and the positions of its tokens.

Under RoPE the key of token j is R_j s_j and its value s_j, so the cache holds the unturned s_j [B, G, T, D] and the
position of each token [B, 1, T, 1] (four bytes; with left padding a token's place in the row is not its position).
Transformers' cache layers grow, crop, reorder, window and preallocate a pair (keys, values); here the pair is
(shared tensor, positions), so all of that is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

POSITION = torch.int32


class Shared:
    """Marks a cache layer whose `keys` are the shared tensor and whose `values` are positions."""


class SharedDynamicLayer(Shared, DynamicLayer):
    """Grows with every token."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.values = torch.tensor([], dtype=POSITION, device=key_states.device)


class SharedSlidingLayer(Shared, DynamicSlidingWindowLayer):
    """Grows until it holds a window."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.values = torch.tensor([], dtype=POSITION, device=key_states.device)


class SharedStaticLayer(Shared, StaticLayer):
    """Has room for a fixed number of tokens from the start."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states[..., :1])
        self.values = static_positions(self.keys)


class SharedStaticSlidingLayer(Shared, StaticSlidingWindowLayer):
    """Has room for a window from the start."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states[..., :1])
        self.values = static_positions(self.keys)


def static_positions(shared: Tensor | None) -> Tensor:
    assert shared is not None
    positions = torch.zeros(shared.shape[0], 1, shared.shape[2], 1, dtype=POSITION, device=shared.device)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(positions)
    return positions


def dynamic(layer: Any) -> Shared:
    return SharedDynamicLayer()


def sliding(layer: Any) -> Shared:
    made = SharedSlidingLayer(sliding_window=layer.sliding_window)
    made.record_past = layer.record_past
    return made


def static(layer: Any) -> Shared:
    return SharedStaticLayer(max_cache_len=layer.max_cache_len)


def static_sliding(layer: Any) -> Shared:
    return SharedStaticSlidingLayer(max_cache_len=layer.max_cache_len, sliding_window=layer.max_cache_len)


SHARED: dict[type, Callable[[Any], Any]] = {
    DynamicLayer: dynamic,
    DynamicSlidingWindowLayer: sliding,
    StaticLayer: static,
    StaticSlidingWindowLayer: static_sliding,
}


def share_layer(cache: Any, index: int) -> None:
    """Put a layer of ours in the place of the cache's still empty layer `index`."""
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise ValueError(f"a Transformers cache made of layers was expected, but a {type(cache).__name__} came.")
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index]
    if isinstance(layer, Shared):
        return
    if type(layer) not in SHARED:
        known = ", ".join(kind.__name__ for kind in SHARED)
        raise ValueError(
            f"a model whose keys and values are one tensor cannot use a cache of {type(layer).__name__}; "
            f"use a cache of {known}."
        )
    if layer.is_initialized and not torch.compiler.is_compiling() and int(layer.get_seq_length()):
        raise ValueError("this cache was filled by a model with separate keys and values; begin with an empty one.")
    cache.layers[index] = SHARED[type(layer)](layer)


def cache_bytes(cache: Cache) -> tuple[int, int]:
    """(bytes of the keys and values a cache owns, bytes of its bookkeeping)."""
    states, bookkeeping = 0, 0
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        states += 0 if keys is None else keys.untyped_storage().nbytes()
        extra = 0 if values is None else values.untyped_storage().nbytes()
        if isinstance(layer, Shared):
            bookkeeping += extra
        else:
            states += extra
    return states, bookkeeping
