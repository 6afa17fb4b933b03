"""The layer against `transcription.py`, which computes the same mathematics one number at a time.

That packed texts are separate ones, that a cache changes nothing and that gradients are derivatives is for the contract
suite; here it is the formulas themselves. What looks back also sees packed texts here.
"""

import itertools
from typing import Any

import pytest
import torch
from transcription import transcribe

from qklab import Attention, AttentionSpec, CouplingSpec, LatentSpec, register
from qklab.testing import grid, randomise

LAYER = 2
SHARED = ("none", "k=v", "q=k", "q=k=v")


def build_spec(**choices: Any) -> AttentionSpec:
    return AttentionSpec(**{"width": 12, "heads": 4, "head_width": 6, **choices})


STEPPING = [kind for kind, mechanism in register.coupling.items() if mechanism.repeats]

# numbers that the grid leaves at their defaults, at a width that no other number is equal to
MORE = [
    *(build_spec(share=share, rope_fraction=fraction, rope_base=50.0) for share in SHARED for fraction in (1 / 3, 1.0)),
    *(build_spec(share=share, norm="qk", norm_eps=0.1, bias=True) for share in SHARED),
    *(
        build_spec(kv_heads=heads, coupling=CouplingSpec(kind=kind, steps=3, force_sharing="per-head"), bias=True)
        for heads, kind in itertools.product((2, 1), STEPPING)
    ),
    *(
        build_spec(share=share, kv_rotation="on-read", coupling=CouplingSpec(kind=kind, steps=2), norm="qk")
        for share, kind in itertools.product(("k=v", "q=k=v"), STEPPING)
    ),
    build_spec(share="q=k", asymmetry_2d=True, causal=False, coupling=CouplingSpec(), norm="qk"),
    build_spec(latent=LatentSpec(query_rank=5, kv_rank=7, rope_width=4), norm_eps=0.1, rope_base=50.0),
    *(
        build_spec(share=share, coupling=CouplingSpec(kind="cca"), norm_eps=0.1, kv_heads=heads, short_conv=4)
        for share, heads in (("none", 1), ("none", 2), ("k=v", 2), ("q=k", 4))
    ),
    *(build_spec(share=share, key_shift=True, rope_fraction=1 / 3, norm="qk") for share in SHARED),
    build_spec(share="k=v", norm="qk", value_norm=True, coupling=CouplingSpec(kind="leapfrog")),
]


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, id=f"{spec.name} · D={spec.head_width}") for spec in grid() + MORE]
)
@torch.no_grad()
def test_a_layer_is_its_formulas(spec: AttentionSpec) -> None:
    torch.manual_seed(0)
    layer = randomise(Attention(spec, layer=LAYER))
    x = torch.randn(2, 5, spec.width, dtype=torch.float64)
    for segments in (None, torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 2, 0]])) if spec.token_rings else (None,):
        expected = transcribe(spec, layer.state_dict(), x, LAYER, segments)
        actual = layer(x, segments=segments)
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-10 * float(expected.abs().max()))
