"""The layer against `transcription.py`, which computes the same mathematics one number at a time."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transcription import affine, mean, step, transcribe

from qklab.attention import Attention, AttentionSpec, CouplingSpec, LatentSpec

B, T, LAYER = 2, 5, 2
SEGMENTS = torch.tensor([[7, 7, 7, 3, 3], [1, 2, 2, 1, 1]])  # ids may come back: a run is what counts
SHARES = [("none", 4), ("none", 2), ("none", 1), ("k=v", 4), ("k=v", 2), ("k=v", 1), ("q=k", 4), ("q=k=v", 4)]
FORCED = ("euler", "symplectic-euler", "leapfrog", "uncoupled")
KINDS = (*FORCED, "affine", "linear")


def built(**choices: Any) -> AttentionSpec:
    return AttentionSpec(**{"width": 12, "heads": 4, "head_width": 4, **choices})


def coupling(kind: str, steps: int, **choices: Any) -> CouplingSpec:
    """Steps small enough for several of them to leave the softmax far from a single winner."""
    small = {"scale_limit": 0.5} if kind == "affine" else {"step_size": 0.25}
    return CouplingSpec(**{"kind": kind, "steps": steps, **small, **choices})


def mixes(share: str, kv_heads: int) -> Iterator[str]:
    yield "softmax"
    if kv_heads % 2 == 0:
        yield "differential"
    if share in ("none", "k=v"):
        yield "differential-v2"


def plain() -> Iterator[AttentionSpec]:
    for (share, kv_heads), position, bias in product(SHARES, ("rope", "learned", "none"), (False, True)):
        yield built(share=share, kv_heads=kv_heads, position=position, bias=bias, head_width=6 if bias else 4)


def rotated() -> Iterator[AttentionSpec]:
    for (share, kv_heads), fraction in product(SHARES, (1 / 3, 2 / 3, 1.0)):
        choices: dict[str, Any] = {"share": share, "kv_heads": kv_heads, "head_width": 6, "rope_fraction": fraction}
        yield built(**choices, rope_base=50.0)
        if share in ("k=v", "q=k=v"):
            yield built(**choices, kv_rotation="on-read")


def mixed() -> Iterator[AttentionSpec]:
    for (share, kv_heads), norm, causal in product(SHARES, ("none", "qk"), (False, True)):
        for mix in mixes(share, kv_heads):
            choices: dict[str, Any] = {"share": share, "kv_heads": kv_heads, "norm": norm, "causal": causal, "mix": mix}
            yield built(**choices)
            if share in ("k=v", "q=k=v"):
                yield built(**choices, kv_rotation="on-read", norm_eps=0.1)
    yield from (built(mix="differential", differential_gain=False, kv_heads=kv_heads) for kv_heads in (4, 2))


def coupled() -> Iterator[AttentionSpec]:
    for kv_heads, kind, sharing, steps in product((4, 2, 1), KINDS, ("per-layer", "per-head"), (1, 3)):
        forces = ("mlp", "gradient") if kind in FORCED else ("mlp",)
        step_sharing = "per-layer" if kind == "affine" or steps == 1 else "per-head"
        for force in forces:
            chosen = coupling(kind, steps, force=force, force_sharing=sharing, step_sharing=step_sharing)
            yield built(kv_heads=kv_heads, coupling=chosen)
    yield from (built(coupling=coupling(kind, 2, force_width=6)) for kind in (*FORCED, "affine"))


def coupled_in_company() -> Iterator[AttentionSpec]:
    for kind, (share, kv_heads) in product(KINDS, SHARES):
        for mix in mixes(share, kv_heads):
            yield built(share=share, kv_heads=kv_heads, mix=mix, coupling=coupling(kind, 2), norm="qk", bias=True)
        if share in ("k=v", "q=k=v"):
            yield built(share=share, kv_heads=kv_heads, coupling=coupling(kind, 2), kv_rotation="on-read")


def asymmetric() -> Iterator[AttentionSpec]:
    choices = product(("q=k", "q=k=v"), ("rope", "learned"), (False, True), ("softmax", "differential"))
    for share, position, free, mix in choices:
        shared: dict[str, Any] = {"share": share, "position": position, "mix": mix, "causal": False}
        yield built(**shared, asymmetry_2d=True, asymmetry_free_scale=free)
    yield built(share="q=k", asymmetry_2d=True, causal=False, coupling=coupling("leapfrog", 1), norm="qk")
    yield built(share="q=k=v", asymmetry_2d=True, causal=False, kv_rotation="on-read")


def latent() -> Iterator[AttentionSpec]:
    for rope_width, norm, bias, causal in product((0, 2, 4), (False, True), (False, True), (False, True)):
        ranks = LatentSpec(query_rank=5, kv_rank=7, rope_width=rope_width, norm=norm)
        yield built(latent=ranks, bias=bias, causal=causal, position="rope" if rope_width else "none")


def named(specs: Iterator[AttentionSpec]) -> list[Any]:
    """One parameter per spec; the head width is not part of a spec's name."""
    return [pytest.param(spec, id=f"{spec.name} · D={spec.head_width}") for spec in dict.fromkeys(specs)]


def every() -> Iterator[AttentionSpec]:
    for family in (plain, rotated, mixed, coupled, coupled_in_company, asymmetric, latent):
        yield from family()


def differentiable() -> Iterator[AttentionSpec]:
    """A few of each family: this is the slow half, and the outputs already pin the formulas."""
    yield from (spec for spec in coupled() if spec.kv_heads == 2)
    yield from (spec for spec in mixed() if spec.kv_heads == 2 and spec.norm == "qk" and spec.causal)
    yield from asymmetric()
    yield from (spec for spec in latent() if spec.bias and spec.causal)


def packable() -> Iterator[AttentionSpec]:
    for family in (plain, mixed, asymmetric, latent):
        yield from family()


def decodable() -> Iterator[AttentionSpec]:
    for family in (rotated, mixed, coupled_in_company, latent):
        yield from (spec for spec in family() if spec.causal)


def noisy(spec: AttentionSpec) -> Attention:
    """A float64 layer none of whose parameters has a value as special as zero or one."""
    torch.manual_seed(0)
    layer = Attention(spec, layer=LAYER).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


def inputs() -> Tensor:
    return torch.randn(B, T, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> None:
    scale = max(1e-3, float(theirs.detach().abs().max()))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=tolerance * scale)


@pytest.mark.parametrize("spec", named(every()))
def test_output(spec: AttentionSpec) -> None:
    layer, x = noisy(spec), inputs()
    with torch.no_grad():
        assert_same(layer(x), transcribe(spec, layer.state_dict(), x, LAYER))


@pytest.mark.parametrize("spec", named(differentiable()))
def test_gradients(spec: AttentionSpec) -> None:
    layer, x = noisy(spec), inputs().requires_grad_()
    state = {name: parameter.detach().requires_grad_() for name, parameter in layer.named_parameters()}
    leaves, weights = [x, *state.values()], torch.randn_like(x)
    outputs = functional_call(layer, state, x), transcribe(spec, state, x, LAYER)
    ours, theirs = (torch.autograd.grad((weights * y).sum(), leaves, materialize_grads=True) for y in outputs)
    for actual, expected in zip(ours, theirs, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("spec", named(packable()))
def test_packed(spec: AttentionSpec) -> None:
    layer, x = noisy(spec), inputs()
    with torch.no_grad():
        assert_same(layer(x, segments=SEGMENTS), transcribe(spec, layer.state_dict(), x, LAYER, SEGMENTS))


@pytest.mark.parametrize("spec", named(decodable()))
def test_decoded_from_a_cache(spec: AttentionSpec) -> None:
    layer, x = noisy(spec), inputs()
    cache = layer.new_cache(B, T)
    with torch.no_grad():
        decoded = torch.cat([layer(chunk, cache=cache) for chunk in x.split((2, 1, 2), 1)], 1)
        assert_same(decoded, transcribe(spec, layer.state_dict(), x, LAYER))


@pytest.mark.parametrize("kind", KINDS)
def test_identity_initialisation_is_no_coupling(kind: str) -> None:
    spec = built(kv_heads=2, coupling=CouplingSpec(kind=kind, steps=3, init="identity"))  # type: ignore[arg-type]
    layer, x = Attention(spec).double(), inputs()
    with torch.no_grad():
        assert_same(layer(x), transcribe(spec.replace(coupling=None), layer.state_dict(), x))


@pytest.mark.parametrize(("share", "kv_heads"), SHARES)
def test_linear_coupling_folds_into_a_plain_layer(share: str, kv_heads: int) -> None:
    layer, x = noisy(built(share=share, kv_heads=kv_heads, bias=True, coupling=coupling("linear", 3))), inputs()
    plain = layer.fold()
    assert plain.spec.coupling is None
    with torch.no_grad():
        expected = transcribe(layer.spec, layer.state_dict(), x, LAYER)
        assert_same(transcribe(plain.spec, plain.state_dict(), x, LAYER), expected)


def group_jacobian(layer: Attention, per_key: int, steps: int) -> tuple[Tensor, Tensor]:
    """A random (q, k) of key head 0's group [per_key + 1, D], and the Jacobian of the transcribed map at it."""
    state = layer.state_dict()
    width = layer.spec.head_width

    def moved(flat: Tensor) -> Tensor:
        *q, k = flat.view(per_key + 1, width)
        for _ in range(steps):
            q, k = step(layer.spec, state, 0, q, k)
        return torch.cat([*q, k])

    start = torch.randn((per_key + 1) * width, dtype=torch.float64)
    jacobian = torch.func.jacrev(moved)(start)
    assert isinstance(jacobian, Tensor)
    return start.view(per_key + 1, width), jacobian


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("sharing", ["per-layer", "per-head"])
@pytest.mark.parametrize("kind", ["affine", "symplectic-euler", "leapfrog", "linear"])
def test_log_determinant_is_that_of_the_jacobian(kind: str, sharing: str, kv_heads: int) -> None:
    chosen = CouplingSpec(kind=kind, steps=2, force_sharing=sharing)  # type: ignore[arg-type]
    layer = noisy(built(kv_heads=kv_heads, coupling=chosen))
    start, jacobian = group_jacobian(layer, 4 // kv_heads, 2)
    q, k = start[:-1].repeat(kv_heads, 1)[None, None], start[-1:].repeat(kv_heads, 1)[None, None]
    expected = torch.linalg.slogdet(jacobian).logabsdet
    assert layer.couple is not None
    assert_same(layer.couple.log_det(q, k)[0, 0, 0], expected, 1e-9)


def test_affine_log_determinant_counts_every_query_head() -> None:
    layer = noisy(built(kv_heads=1, coupling=CouplingSpec(kind="affine")))
    start, jacobian = group_jacobian(layer, 4, 1)
    *q, k = start
    assert_same(affine(layer.spec, layer.state_dict(), 0, q, k)[2], torch.linalg.slogdet(jacobian).logabsdet)


@pytest.mark.parametrize("kind", ["symplectic-euler", "leapfrog"])
def test_gradient_force_is_symplectic_in_mean_query_and_key(kind: str) -> None:
    chosen = CouplingSpec(kind=kind, force="gradient", step_size=0.5)  # type: ignore[arg-type]
    layer = noisy(built(kv_heads=2, coupling=chosen))
    state, width = layer.state_dict(), layer.spec.head_width
    difference = torch.randn(width, dtype=torch.float64)  # of the two query heads: a constant of the motion

    def moved(flat: Tensor) -> Tensor:
        q, k = flat.split(width)
        for _ in range(3):
            pair, k = step(layer.spec, state, 0, [q + difference, q - difference], k)
            torch.testing.assert_close(pair[0] - pair[1], 2 * difference)
            q = mean(pair)
        return torch.cat([q, k])

    jacobian = torch.autograd.functional.jacobian(moved, torch.randn(2 * width, dtype=torch.float64))
    assert isinstance(jacobian, Tensor)
    eye, zero = torch.eye(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    omega = torch.cat([torch.cat([zero, eye], 1), torch.cat([-eye, zero], 1)])
    assert_same(jacobian.T @ omega @ jacobian, omega, 1e-9)
