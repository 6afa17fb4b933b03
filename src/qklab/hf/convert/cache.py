"""Cache layers for keys and values that are one tensor: they own that tensor and the positions of its tokens.

Under RoPE the key of token j is R_j s_j and its value s_j, so the cache holds the unturned s_j [B, G, T, D] and the
position of each token [B, 1, T, 1] (four bytes; with left padding a token's place in the row is not its position).
Transformers' cache layers grow, crop, reorder, window and preallocate a pair (keys, values); here the pair is
(shared tensor, positions), so all of that is theirs.
"""

from __future__ import annotations

from typing import Any, cast

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
    """A cache layer whose `keys` are the shared tensor and whose `values` are positions."""


class SharedGrowing(Shared):
    """Grows with every token, or until it holds a window."""

    def lazy_initialization(self: Any, key_states: Tensor, value_states: Tensor) -> None:
        cast(Any, super()).lazy_initialization(key_states, value_states)
        self.values = torch.tensor([], dtype=POSITION, device=key_states.device)


class SharedFixed(Shared):
    """Has room for a fixed number of tokens, or for a window, from the start."""

    def lazy_initialization(self: Any, key_states: Tensor, value_states: Tensor) -> None:
        cast(Any, super()).lazy_initialization(key_states, value_states[..., :1])
        batch, _, tokens, _ = self.keys.shape
        self.values = torch.zeros(batch, 1, tokens, 1, dtype=POSITION, device=self.keys.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.values)


class SharedDynamicLayer(SharedGrowing, DynamicLayer): ...


class SharedSlidingLayer(SharedGrowing, DynamicSlidingWindowLayer): ...


class SharedStaticLayer(SharedFixed, StaticLayer): ...


class SharedStaticSlidingLayer(SharedFixed, StaticSlidingWindowLayer): ...


# Transformers' layer → ours, and what it is made with: argument → the attribute that has it
SHARED: dict[type, tuple[type, dict[str, str]]] = {
    DynamicLayer: (SharedDynamicLayer, {}),
    DynamicSlidingWindowLayer: (SharedSlidingLayer, {"sliding_window": "sliding_window"}),
    StaticLayer: (SharedStaticLayer, {"max_cache_len": "max_cache_len"}),
    StaticSlidingWindowLayer: (
        SharedStaticSlidingLayer,
        {"max_cache_len": "max_cache_len", "sliding_window": "max_cache_len"},
    ),
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
    kind, arguments = SHARED[type(layer)]
    shared: Any = kind(**{name: getattr(layer, attribute) for name, attribute in arguments.items()})
    if hasattr(layer, "record_past"):
        shared.record_past = layer.record_past
    cache.layers[index] = shared


def count_converted_bytes(cache: Cache) -> tuple[int, int]:
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
