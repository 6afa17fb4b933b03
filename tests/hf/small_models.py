"""Small models with every kind of cache."""

from collections.abc import Callable
from typing import Any

import torch

from qklab import AttentionSpec, CouplingSpec, Decoder, DecoderSpec, LatentSpec

END = 96  # end-of-text, and the padding
KINDS: dict[str, dict[str, Any]] = {
    "(Q,K,V)": {"kv_heads": 2},
    "(Q,K=V)": {"share": "k=v", "kv_heads": 2},
    "on-read": {"share": "k=v", "kv_rotation": "on-read"},
    "MLA": {"latent": LatentSpec(query_rank=12, kv_rank=8, rope_width=4)},
    "differential": {"mix": "differential", "coupling": CouplingSpec(), "norm": "qk"},
    "learned": {"position": "learned", "bias": True, "share": "q=k=v"},
}

Small = Callable[..., Any]  # pyright finds no `generate` in a GenerationMixin


def decoder(kind: str, seed: int = 0, **changes: Any) -> Decoder:
    """Two layers of width 32 with no weight at a special value such as 0 or 1."""
    attention = AttentionSpec(width=32, heads=4, **KINDS[kind])
    model = Decoder(DecoderSpec(vocab=97, width=32, layers=2, attention=attention, context=64, **changes), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0, 0.2, generator=generator))
    return model
