"""qklab: what happens between queries and keys in attention.

from qklab import Attention, AttentionSpec
layer = Attention(AttentionSpec(width=512, heads=8, share="k=v"))
"""

import os

# Read when torch loads: OpenMP threads that wait for work sleep instead of spinning. On a machine with anything else to
# do, two spinning threads can make a training step ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
]
