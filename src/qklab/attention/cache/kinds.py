"""What the cache of each attention keeps of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qklab.attention.cache.growing import Cache

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


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


def cache_class(spec: AttentionSpec) -> type[Cache]:
    if spec.latent is not None:
        return LatentCache
    return SharedCache if spec.key_is_value else KeyValueCache
