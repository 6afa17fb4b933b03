"""Transformers' cache layers around `qklab.attention.cache`: what is owned is exactly what the spec needs.

Keys and values for (Q,K,V), one tensor for (Q,K=V), the latent for MLA. `generate` makes a `DynamicCache` or a
`StaticCache` of Transformers; `adopt_cache_layers` exchanges its layers, while they are empty, for those below.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from qklab.attention import cache as attention_cache
from qklab.attention.spec import AttentionSpec

SPARE_TOKENS = 256  # room beyond the prompt, so that a usual answer needs no copy of the cache
DRAFTS = 32  # tokens that a cache can take back; assisted generation proposes 20 unless it is asked for more


class QKLabCacheLayer(CacheLayerMixin):
    """One layer's past tokens in a growing `qklab.attention.Cache`, made when the first tokens come."""

    is_sliding = False
    is_croppable = True

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.spec = spec
        self.cache: attention_cache.Cache | None = None
        self.left_padding: Tensor | None = None  # [B]
        self.right_padded = False
        self.seen: Tensor | None = None  # [B, S], the mask that `left_padding` was last found to agree with

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name})"

    @property
    def started(self) -> bool:
        """Whether anything is remembered."""
        return self.cache is not None and self.cache.started

    @property
    def bytes(self) -> int:
        """Bytes owned, filled or not."""
        return 0 if self.cache is None else self.cache.bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes owned but not filled."""
        return 0 if self.cache is None else self.cache.spare_bytes

    def append(self, *new: Tensor) -> list[Tensor]:
        """Remember new tokens [B, T, heads, width] as `qklab.attention.Cache.append` does; the first come back as they
        are, so that attention to a prompt is what it is without a cache."""
        first = not self.started
        if self.cache is None:
            self.cache = self.new_cache(new[0].shape[0], new[0].shape[1], new[0].dtype, new[0].device)
            self.is_initialized = True
        everything = self.cache.append(*new)
        return list(new) if first else everything

    def recall(self) -> list[Tensor]:
        """As `qklab.attention.Cache.recall`: what the next tokens look back on."""
        return self.cache.recall() if self.cache is not None and self.started else []

    def remember(self, seen: Sequence[Tensor]) -> None:
        """As `qklab.attention.Cache.remember`."""
        assert self.cache is not None
        self.cache.remember(seen)

    def new_cache(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> attention_cache.Cache:
        kind = attention_cache.cache_class(self.spec)
        made = kind(self.spec, batch, tokens + SPARE_TOKENS, dtype, device, drafts=DRAFTS)
        made.left_padding = None if self.left_padding is None else self.left_padding.to(device)
        return made

    def pad(self, left_padding: Tensor | None) -> None:
        """How many leading tokens of each row are no text, [B]."""
        self.left_padding = left_padding
        if self.cache is not None:
            self.cache.left_padding = None if left_padding is None else left_padding.to(self.cache.tensors[0].device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for rows of the batch, dtype and device of `key_states` [B, …]; the spec knows all else."""
        del value_states
        self.cache = self.new_cache(key_states.shape[0], 0, key_states.dtype, key_states.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`append` in Transformers' layout: [B, heads, T, width] → [B, heads, S, width] twice.

        Where one tensor is remembered it is `key_states`, and both results are that tensor.
        """
        del args, kwargs
        two = len(attention_cache.cache_class(self.spec).widths(self.spec)) == 2
        new = (key_states, value_states) if two else (key_states,)
        held = [tensor.transpose(1, 2) for tensor in self.append(*(tensor.transpose(1, 2) for tensor in new))]
        return held[0], held[-1]

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else self.cache.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def batch_size(self) -> int:
        if self.cache is None:
            raise AttributeError("an empty cache has no batch size yet.")
        return self.cache.batch

    def reset(self) -> None:
        self.cache, self.left_padding, self.right_padded, self.is_initialized = None, None, False, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last −`tokens_to_remove` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to forget, but {tokens_to_remove} came.")
        if self.cache is not None and tokens_to_remove < 0:
            self.cache.crop(max(0, self.cache.length + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.seen = None
        if self.cache is not None:
            self.cache.take(beam_idx.to(self.cache.tensors[0].device))
            self.left_padding = self.cache.left_padding

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self.reorder_cache(torch.arange(self.cache.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            self.reorder_cache(torch.arange(self.cache.batch, device=indices.device)[indices])

    def offload(self) -> None:
        raise ValueError(OFFLOADED)

    def prefetch(self) -> None:
        raise ValueError(OFFLOADED)


class QKLabStaticLayer(QKLabCacheLayer):
    """One layer's past tokens in a `qklab.attention.cache.StaticCache` of `max_cache_len` tokens, for torch.compile."""

    is_compileable = True
    is_croppable = False

    def __init__(self, spec: AttentionSpec, max_cache_len: int):
        super().__init__(spec)
        self.max_cache_len = max_cache_len

    def new_cache(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> attention_cache.Cache:
        if tokens > self.max_cache_len:
            raise ValueError(
                f"this static cache has room for {self.max_cache_len} tokens, but {tokens} came; "
                f"make it with max_cache_len={tokens} or more."
            )
        made = attention_cache.StaticCache(self.spec, batch, self.max_cache_len, dtype, device)
        if self.left_padding is not None and made.left_padding is not None:
            made.left_padding.copy_(self.left_padding)
        if not torch.compiler.is_compiling():
            for tensor in (*made.owned_tensors, made.filled, made.left_padding):
                torch._dynamo.mark_static_address(tensor)
        return made

    def pad(self, left_padding: Tensor | None) -> None:
        self.left_padding = left_padding
        if self.cache is not None and self.cache.left_padding is not None:
            rows = self.cache.left_padding
            rows.copy_(torch.zeros_like(rows) if left_padding is None else left_padding)

    def get_seq_length(self) -> int:
        """A tensor once there is one, as for Transformers' own static layers: a number would have to wait for it."""
        if isinstance(self.cache, attention_cache.StaticCache) and self.cache.started:
            filled: Any = self.cache.filled
            return filled
        return 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def reset(self) -> None:
        self.left_padding, self.right_padded = None, False
        if isinstance(self.cache, attention_cache.StaticCache):
            self.cache.clear()

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a static cache is not cropped; use the dynamic one where tokens are taken back.")


OFFLOADED = (
    "a qklab cache stays on its device, but an offloaded one was asked for; leave cache_implementation out, or use "
    "'static'."
)


class QKLabCache(Cache):
    """The cache of a model: growing, or with `max_cache_len` of fixed room.

    cache = QKLabCache(model.config)
    model(ids, past_key_values=cache)
    """

    def __init__(self, config: Any, max_cache_len: int | None = None):
        spec = config.decoder_spec
        super().__init__(layers=make_cache_layers(spec.attentions, max_cache_len))


def make_cache_layers(specs: Sequence[AttentionSpec], max_cache_len: int | None) -> list[Any]:
    if max_cache_len is None:
        return [QKLabCacheLayer(spec) for spec in specs]
    return [QKLabStaticLayer(spec, max_cache_len) for spec in specs]


def adopt_cache_layers(past: Any, specs: Sequence[AttentionSpec]) -> list[QKLabCacheLayer]:
    """The layers of a cache, after those of an empty `DynamicCache` or `StaticCache` have been exchanged for ours."""
    if not isinstance(past, Cache) or isinstance(past, EncoderDecoderCache):
        raise ValueError(
            f"past_key_values must be a cache such as qklab.hf.QKLabCache(model.config), but {type(past).__name__} "
            "came; leave it out and one is made."
        )
    if past.offloading:
        raise ValueError(OFFLOADED)
    if not all(isinstance(layer, QKLabCacheLayer) for layer in past.layers) or not past.layers:
        past.layers = make_cache_layers(specs, find_cache_room(past))
        past.layer_class_to_replicate = None
    found = [layer for layer in past.layers if isinstance(layer, QKLabCacheLayer)]
    if [layer.spec for layer in found] != list(specs):
        raise ValueError(
            f"this cache was made for {len(found)} layers of {found[0].spec.name}, but the model has {len(specs)} of "
            f"{specs[0].name}; use qklab.hf.QKLabCache(model.config)."
        )
    return found


def find_cache_room(past: Cache) -> int | None:
    """The capacity of an empty cache of Transformers, None for one that grows; others are refused."""
    kinds = {type(layer) for layer in past.layers}
    plain = type(past) in (DynamicCache, StaticCache) and kinds <= {DynamicLayer, StaticLayer}
    if not plain or (past.layers and int(past.get_seq_length()) > 0):
        held = " that holds tokens of another model" if plain else ""
        raise ValueError(
            f"a {type(past).__name__}{held} came as past_key_values; this model keeps its own tensors in "
            "qklab.hf.QKLabCache(model.config), or leave past_key_values out and one is made."
        )
    return int(past.get_max_length()) if kinds == {StaticLayer} else None


def count_cache_bytes(past: Cache) -> int:
    """Bytes that the cache of a qklab model owns, filled or not."""
    return sum(layer.bytes for layer in past.layers if isinstance(layer, QKLabCacheLayer))


def count_filled_bytes(past: Cache) -> int:
    """Bytes of the tokens a cache holds: `DecoderSpec.cache_bytes(tokens, dtype)` for every row."""
    return sum(layer.bytes - layer.spare_bytes for layer in past.layers if isinstance(layer, QKLabCacheLayer))
