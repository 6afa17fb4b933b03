"""The five-stage attention layer: project → couple → normalise → rotate → mix, then output."""

from qklab.attention.cache import Cache, KeyValueCache, LatentCache, SharedCache
from qklab.attention.coupling_spec import CouplingSpec
from qklab.attention.layer import Attention
from qklab.attention.spec import AttentionSpec, LatentSpec

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
