"""Every mechanism built, counted and decoded from its cache."""

import torch
from torch import Tensor

from qklab import register
from qklab.attention.coupling_spec import CouplingSpec
from qklab.attention.finish import GATES
from qklab.attention.latent_couple import LATENT_COUPLINGS
from qklab.attention.layer import Attention
from qklab.attention.spec import AttentionSpec, LatentSpec
from qklab.model.decoder import Decoder
from qklab.model.recipes import recipe
from qklab.model.spec import DecoderSpec

WIDTH, HEADS, TOKENS = 512, 8, 48
TOLERANCE = 1e-4


def list_mechanisms() -> list[AttentionSpec]:
    """One spec per mechanism, at the width of the 60M model."""

    def spec(**choices: object) -> AttentionSpec:
        return AttentionSpec(width=WIDTH, heads=HEADS, **choices)  # pyright: ignore[reportArgumentType]

    moving = [kind for kind, mechanism in register.coupling.items() if mechanism in LATENT_COUPLINGS]
    latent = [None, *(CouplingSpec(kind=kind) for kind in moving)]
    return [
        spec(),
        spec(kv_heads=2),
        spec(kv_heads=1),
        spec(share="k=v"),
        spec(share="k=v", kv_rotation="on-read"),
        spec(share="k=v", kv_heads=2),
        spec(share="q=k"),
        spec(share="q=k=v"),
        *(spec(latent=LatentSpec(query_rank=256, kv_rank=128, rope_width=32), coupling=each) for each in latent),
        spec(short_conv=4),
        *(spec(coupling=CouplingSpec(kind=kind)) for kind in register.coupling),
        spec(coupling=CouplingSpec(force="gradient")),
        spec(key_shift=True, rope_fraction=0.5),
        *(spec(norm=norm) for norm in register.norm if norm != "none"),
        *(spec(mix=mix) for mix in register.mix if mix != "softmax"),
        *(spec(gate=gate) for gate in GATES if gate != "none"),
        spec(sinks=True),
        spec(exclusive=True),
        spec(window=16),
        spec(share="k=v", norm="qk", value_norm=True),
        spec(share="k=v", kv_heads=2, coupling=CouplingSpec(kind="affine"), norm="qk", mix="differential"),
    ]


@torch.no_grad()
def decoding_error(spec: AttentionSpec) -> float:
    """Largest difference between decoding through the cache and the full forward, relative to the largest output."""
    torch.manual_seed(0)
    attention, x = Attention(spec), torch.randn(1, TOKENS, spec.width)
    cache = attention.new_cache(batch=1, tokens=TOKENS)
    chunks: list[Tensor] = list(x.split([TOKENS // 2] + [1] * (TOKENS - TOKENS // 2), 1))
    full = attention(x)
    decoded = torch.cat([attention(chunk, cache=cache) for chunk in chunks], 1)
    return float((decoded - full).abs().max() / full.abs().max())


@torch.no_grad()
def generate_both_ways() -> tuple[DecoderSpec, bool]:
    """An untrained nano decoder continues a prompt by 24 tokens: are they the same through its cache and without?"""
    model = Decoder(recipe("nano", share="k=v", kv_heads=2, coupling=CouplingSpec(kind="leapfrog")), seed=0)
    prompt = torch.arange(8)[None]
    cached = model.generate(prompt, 24, temperature=0)
    full = prompt
    for _ in range(24):
        full = torch.cat([full, model(full)[:, -1:].argmax(-1)], 1)
    return model.spec, torch.equal(cached, full)
