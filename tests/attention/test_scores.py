"""Symmetry of (Q=K,V) scores, what breaks it, and the routes of a shared value under RoPE."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qklab import Attention, AttentionSpec, CouplingSpec, LatentSpec, register
from qklab.attention.mix import KeyValue, LatentSoftmax
from qklab.testing import randomise


@torch.no_grad()
def scores(spec: AttentionSpec, seed: int = 0) -> Tensor:
    """The unmasked scores q_i·k_j after stage 4, [B, H, T, T]."""
    torch.manual_seed(seed)
    attention = randomise(Attention(spec), seed)
    x = torch.randn(2, 6, spec.width, dtype=torch.float64)
    recorded: dict[str, Any] = {}
    attention.recorder = lambda stage, *given: recorded.update({stage: given})
    attention(x)
    q, stored, bias, *_ = recorded["mix"]
    result = torch.einsum("bihd,bjhd->bhij", q, stored.separate()[0])
    return result if bias is None else result + bias


def asymmetry(spec: AttentionSpec) -> float:
    s = scores(spec)
    return float((s - s.mT).norm() / s.norm())


SIZE: dict[str, Any] = {"width": 16, "heads": 4}


@pytest.mark.parametrize("share", ["q=k", "q=k=v"])
@pytest.mark.parametrize("position", ["rope", "learned", "none"])
def test_query_key_sharing_makes_scores_symmetric(share: Any, position: Any) -> None:
    assert asymmetry(AttentionSpec(**SIZE, share=share, position=position)) < 1e-14


def test_separate_projections_are_not_symmetric() -> None:
    assert asymmetry(AttentionSpec(**SIZE)) > 0.1


@pytest.mark.parametrize("kind", register.coupling)
@pytest.mark.parametrize("position", ["rope", "none"])
def test_coupling_breaks_the_symmetry(kind: Any, position: Any) -> None:
    assert asymmetry(AttentionSpec(**SIZE, share="q=k", position=position, coupling=CouplingSpec(kind=kind))) > 1e-2


def test_a_gain_breaks_the_symmetry_only_under_rope() -> None:
    """Without RoPE both gains meet in one product; with it they do not commute past the rotation."""
    assert asymmetry(AttentionSpec(**SIZE, share="q=k", norm="qk", position="none")) < 1e-14
    assert asymmetry(AttentionSpec(**SIZE, share="q=k", norm="qk", position="rope")) > 1e-3


def test_the_2d_asymmetry_breaks_the_symmetry() -> None:
    spec = AttentionSpec(**SIZE, share="q=k", position="none", causal=False)
    assert asymmetry(spec) < 1e-14
    assert asymmetry(spec.replace(asymmetry_2d=True)) > 1e-3


@pytest.mark.parametrize("free", [True, False])
def test_the_2d_asymmetry_starts_at_the_plain_scale(free: bool) -> None:
    spec = AttentionSpec(**SIZE, share="q=k", causal=False, asymmetry_2d=True, asymmetry_free_scale=free)
    q = torch.randn(1, 3, 4, 4)
    layer: Any = Attention(spec)
    positions, _ = layer.locate(torch.randn(1, 3, 16))
    torch.testing.assert_close(layer.rotate.asymmetry(q, positions)[0], q)


def test_absorbed_and_expanded_latents_agree() -> None:
    latent = LatentSpec(query_rank=10, kv_rank=6, rope_width=4)
    attention = randomise(Attention(AttentionSpec(**SIZE, latent=latent)))
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    positions, visibility = attention.locate(x)
    q, k, *_ = attention.prepare(x, positions)
    mix = attention.mix
    assert isinstance(mix, LatentSoftmax)
    given = q, KeyValue(k), visibility
    torch.testing.assert_close(mix.attend_absorbed(*given), mix.attend_expanded(*given))


def test_the_form_of_a_latent_follows_the_work() -> None:
    """One new token over a long prefix absorbs; a long chunk over a short prefix expands."""
    latent = LatentSpec(query_rank=64, kv_rank=32, rope_width=8)
    mix = Attention(AttentionSpec(width=64, heads=4, latent=latent)).mix
    assert isinstance(mix, LatentSoftmax)
    assert mix.prefers_absorbed(queries=1, keys=1000)
    assert not mix.prefers_absorbed(queries=900, keys=1000)
    assert not mix.prefers_absorbed(queries=1000, keys=1000)
