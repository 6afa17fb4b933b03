"""The five-stage attention layer: project → couple → normalise → rotate → mix, then output."""

from qklab.attention.cache import Cache, KeyValueCache, LatentCache, SharedCache
from qklab.attention.layer import Attention
from qklab.attention.spec import AttentionSpec, CouplingSpec, LatentSpec

__all__ = [
    "Attention",
    "AttentionSpec",
    "Cache",
    "CouplingSpec",
    "KeyValueCache",
    "LatentCache",
    "LatentSpec",
    "SharedCache",
]
