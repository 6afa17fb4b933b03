"""qklab: what happens between queries and keys in attention.

from qklab import Attention, AttentionSpec
layer = Attention(AttentionSpec(width=512, heads=8, share="k=v"))
"""

from qklab import register
from qklab.attention import Attention, AttentionSpec, Cache, CouplingSpec, LatentSpec
from qklab.model import Decoder, DecoderCache, DecoderSpec, recipe
from qklab.schema import SpecError

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "AttentionSpec",
    "Cache",
    "CouplingSpec",
    "Decoder",
    "DecoderCache",
    "DecoderSpec",
    "LatentSpec",
    "SpecError",
    "recipe",
    "register",
]
