"""The mathematics of the coupling maps: inverses, determinants, symplecticity, energy, folding, identity."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qklab import Attention, AttentionSpec, CouplingSpec, Decoder, recipe, register
from qklab.attention.couple import Coupling, ForcedCoupling, list_invertible
from qklab.attention.forces import GradientForce
from qklab.ops.coupling import reference
from qklab.testing import randomise

D, HEADS = 4, 4
EPS = torch.finfo(torch.float64).eps


def coupling(kv_heads: int = HEADS, **choices: Any) -> Coupling:
    """A coupling map in float64 with noise on every parameter."""
    spec = AttentionSpec(width=16, heads=HEADS, kv_heads=kv_heads, coupling=CouplingSpec(**choices))
    torch.manual_seed(0)
    couple = randomise(Attention(spec)).couple
    assert couple is not None
    return couple


def state(kv_heads: int = HEADS, batch: int = 1, tokens: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    return torch.randn(batch, tokens, HEADS, D, **draw), torch.randn(batch, tokens, kv_heads, D, **draw)


def jacobian(couple: Coupling, q: Tensor, k: Tensor) -> Tensor:
    """∂(q⁺, k⁺)/∂(q, k) of one token, rows and columns ordered as (q, k)."""

    def flat(u: Tensor) -> Tensor:
        q_new, k_new = couple(u[: q.numel()].view_as(q), u[q.numel() :].view_as(k))
        return torch.cat([q_new.flatten(), k_new.flatten()])

    result = torch.autograd.functional.jacobian(flat, torch.cat([q.flatten(), k.flatten()]))
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("kind", list_invertible())
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("sharing", ["per-layer", "per-head"])
def test_inverse_undoes_forward(kind: str, kv_heads: int, steps: int, sharing: str) -> None:
    # a small step keeps the condition number meaningful; affine's own limit is what the condition must account for
    scale = {"scale_limit": 0.5} if kind == "affine" else {"step_size": 0.2}
    couple = coupling(kv_heads, kind=kind, steps=steps, force_sharing=sharing, **scale)
    q, k = state(kv_heads, tokens=1)
    J = jacobian(couple, q, k)
    condition = float(torch.linalg.cond(J))
    with torch.no_grad():
        back = couple.inverse(*couple(q, k))
    error = max(float((b - a).norm() / a.norm()) for a, b in zip((q, k), back, strict=True))
    assert error < 100 * condition * EPS
    assert not torch.allclose(couple(q, k)[1], k, rtol=1e-2)  # the map did something


@pytest.mark.parametrize("kind", [kind for kind in register.coupling if kind not in list_invertible()])
def test_maps_without_inverse_say_so(kind: str) -> None:
    couple = coupling(kind=kind)
    for method in (couple.inverse, couple.log_det):
        with pytest.raises(ValueError, match=r"leapfrog.*\.$"):
            method(*state())


@pytest.mark.parametrize(
    ("kind", "force", "kv_heads"),
    [
        *itertools.product(["leapfrog", "symplectic-euler"], ["mlp", "gradient"], [4, 2]),
        ("linear", "mlp", 2),
    ],
)
def test_shears_preserve_volume(kind: str, force: str, kv_heads: int) -> None:
    couple = coupling(kv_heads, kind=kind, force=force, steps=3)
    q, k = state(kv_heads, tokens=1)
    sign, log = torch.linalg.slogdet(jacobian(couple, q, k))
    assert float(sign) == 1
    assert abs(float(log)) < 1e-9
    assert couple.log_det(q, k).eq(0).all()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("steps", [1, 3])
def test_affine_log_det_is_autograds(kv_heads: int, steps: int) -> None:
    couple = coupling(kv_heads, kind="affine", steps=steps)
    q, k = state(kv_heads, tokens=1)
    expected = torch.linalg.slogdet(jacobian(couple, q, k)).logabsdet
    stated = couple.log_det(q, k)
    assert stated.shape == (1, 1, kv_heads)
    torch.testing.assert_close(stated.sum(), expected, rtol=1e-9, atol=1e-9)
    assert abs(float(expected)) > 1e-3


def omega(n: int) -> Tensor:
    """The symplectic form on (q, k) of n numbers each."""
    zero, one = torch.zeros(n, n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    return torch.cat([torch.cat([zero, one], 1), torch.cat([-one, zero], 1)])


@pytest.mark.parametrize("kind", ["leapfrog", "symplectic-euler"])
@pytest.mark.parametrize("sharing", ["per-layer", "per-head"])
@pytest.mark.parametrize("steps", [1, 3])
def test_gradient_forces_are_symplectic(kind: str, sharing: str, steps: int) -> None:
    couple = coupling(kind=kind, force="gradient", force_sharing=sharing, steps=steps)
    q, k = state(tokens=1)
    J, form = jacobian(couple, q, k), omega(HEADS * D)
    torch.testing.assert_close(J.mT @ form @ J, form, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["leapfrog", "symplectic-euler"])
def test_gradient_forces_are_symplectic_in_the_groups_mean(kind: str) -> None:
    """For G < H the map is symplectic in (mean q, k), and differences between a group's queries are constants."""
    couple = coupling(kv_heads=1, kind=kind, force="gradient", steps=2)
    q, k = state(kv_heads=1, tokens=1)
    spread = q - q.mean(2, keepdim=True)

    def reduced(u: Tensor) -> Tensor:
        q_new, k_new = couple(u[None, None, None, :D] + spread, u[None, None, None, D:])
        return torch.cat([q_new.mean(2).flatten(), k_new.flatten()])

    J = torch.autograd.functional.jacobian(reduced, torch.cat([q.mean(2).flatten(), k.flatten()]))
    assert isinstance(J, Tensor)
    torch.testing.assert_close(J.mT @ omega(D) @ J, omega(D), rtol=0, atol=1e-10)
    q_new, _ = couple(q, k)
    torch.testing.assert_close(q_new - q_new.mean(2, keepdim=True), spread)


def energies(kind: str, steps: int, step_size: float) -> Tensor:
    """|k|²/2 + U(q) after each of `steps` steps in a convex potential."""
    couple = coupling(kind=kind, force="gradient", step_size=step_size)
    assert isinstance(couple, ForcedCoupling)
    force = couple.force
    assert isinstance(force, GradientForce)
    with torch.no_grad():
        couple.step.fill_(step_size)
        force.amplitude.abs_()  # a convex U keeps the orbit bounded
        # columns that sum to zero with their mirror image make U even, so that it confines in every direction
        half = force.inner.weight.shape[0] // 2
        force.inner.weight[half:] = -force.inner.weight[:half]
        force.amplitude[half:] = force.amplitude[:half]
        q, k = state(tokens=1)
        values = []
        for _ in range(steps):
            q, k = couple(q, k)
            potential = force.amplitude * F.softplus(F.linear(q, force.inner.weight, force.inner.bias))
            values.append(k.square().sum() / 2 + potential.sum())
    return torch.stack(values)


def test_leapfrogs_energy_stays_bounded_where_eulers_grows() -> None:
    leapfrog, euler = energies("leapfrog", 1000, 0.2), energies("euler", 1000, 0.2)
    swing = (leapfrog.max() - leapfrog.min()) / leapfrog.mean()
    assert float(swing) < 0.02
    assert abs(float(leapfrog[-100:].mean() / leapfrog[:100].mean()) - 1) < 0.005  # no drift
    assert float(euler[-1]) > 1.5 * float(euler[0])


def test_leapfrog_shares_neighbouring_kicks(monkeypatch: pytest.MonkeyPatch) -> None:
    """n steps evaluate the force n + 1 times and equal n single steps."""
    many, one = coupling(kind="leapfrog", steps=5), coupling(kind="leapfrog", steps=1)
    one.load_state_dict(many.state_dict())
    calls, force = [], reference.apply_force
    monkeypatch.setattr(reference, "apply_force", lambda *given: calls.append(1) or force(*given))
    q, k = state()
    together = many(q, k)
    assert len(calls) == 6
    for _ in range(5):
        q, k = one(q, k)
    for a, b in zip(together, (q, k), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind, mechanism in register.coupling.items() if mechanism.has_identity])
@pytest.mark.parametrize("sharing", ["per-layer", "per-head"])
def test_identity_start_leaves_the_models_logits_bit_equal(kind: Any, sharing: Any) -> None:
    """One seed gives both models the same other weights, so their logits agree bit for bit."""
    plain = Decoder(recipe("nano", kv_heads=2, vocab=64, layers=2), seed=3)
    start: dict[str, Any] = {} if kind == "affine" else {"init": "identity"}  # affine starts there by itself
    spec = CouplingSpec(kind=kind, steps=2, force_sharing=sharing, step_sharing="per-layer", **start)
    coupled = Decoder(recipe("nano", kv_heads=2, vocab=64, layers=2, coupling=spec), seed=3)
    ids = torch.randint(64, (2, 32))
    logits = coupled(ids)
    assert torch.equal(logits, plain(ids))
    logits.square().mean().backward()
    moved = [
        name for name, p in coupled.named_parameters() if ".couple." in name and p.grad is not None and p.grad.any()
    ]
    assert moved  # it can leave the identity


FOLDABLE = [
    *itertools.product(["none", "k=v"], [4, 2], ["softmax", "differential", "differential-v2"]),
    *itertools.product(["q=k", "q=k=v"], [4], ["softmax", "differential"]),
]


@pytest.mark.parametrize(("share", "kv_heads", "mix"), FOLDABLE)
@pytest.mark.parametrize("sharing", ["per-layer", "per-head"])
def test_linear_coupling_folds_into_the_projections(share: Any, kv_heads: int, mix: Any, sharing: Any) -> None:
    spec = AttentionSpec(
        width=16, heads=4, kv_heads=kv_heads, share=share, mix=mix, bias=True, norm="qk",
        coupling=CouplingSpec(kind="linear", steps=3, force_sharing=sharing),
    )  # fmt: skip
    attention = randomise(Attention(spec, layer=1))
    folded = attention.fold()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(folded(x), attention(x), rtol=1e-10, atol=1e-11)
    assert folded.couple is None
    assert folded.spec.share == {"none": "none", "k=v": "k=v", "q=k": "none", "q=k=v": "k=v"}[share]


def test_only_linear_folds() -> None:
    for spec in (None, CouplingSpec(kind="leapfrog")):
        with pytest.raises(ValueError, match="only coupling kind='linear' folds"):
            Attention(AttentionSpec(width=16, heads=4, coupling=spec)).fold()


def test_a_2d_asymmetry_does_not_fold() -> None:
    spec = AttentionSpec(
        width=16, heads=4, share="q=k", causal=False, asymmetry_2d=True, coupling=CouplingSpec(kind="linear")
    )
    with pytest.raises(ValueError, match="the 2-D asymmetry exists only where they are one"):
        Attention(spec).fold()


def test_uncoupled_has_the_coupled_capacity() -> None:
    """The control's two forces of width h/2 match one of width h up to biases."""
    coupled, control = (
        AttentionSpec(width=512, heads=8, coupling=CouplingSpec(kind=kind)).parameters()
        for kind in ("euler", "uncoupled")
    )
    assert abs(control - coupled) <= 64


STEPPED = [
    (kind, sharing)
    for kind in register.coupling
    for sharing in ("per-layer", "per-head")
    if register.coupling[kind].stepped
]


@pytest.mark.parametrize(("kind", "step_sharing"), [*STEPPED, ("affine", "per-layer")])
def test_bfloat16_stays_bfloat16(kind: Any, step_sharing: Any) -> None:
    """A float32 step size must not promote the state, neither as a scalar nor per head."""
    spec = AttentionSpec(width=16, heads=4, kv_heads=2, coupling=CouplingSpec(kind=kind, step_sharing=step_sharing))
    couple = Attention(spec).couple
    assert couple is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = couple(*(u.bfloat16() for u in state(kv_heads=2)))
    assert [u.dtype for u in out] == [torch.bfloat16] * 2


def test_a_map_of_your_own_needs_only_its_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/adding-a-mechanism.md, in a layer with QK-norm and RoPE, grouped heads, and a cache."""
    page = (Path(__file__).parents[2] / "docs/adding-a-mechanism.md").read_text(encoding="utf-8")
    monkeypatch.setattr(register.coupling, "entries", dict(register.coupling.entries))
    example = re.findall(r"```\n(@register.*?class Turn.*?)```", page, re.DOTALL)[0]
    names: dict[str, Any] = {"Coupling": Coupling, "group_mean": reference.group_mean, "register": register}
    exec(example, names)
    spec = AttentionSpec(width=16, heads=4, kv_heads=2, norm="qk", coupling=CouplingSpec(kind="euler", steps=2))
    layer = randomise(Attention(spec)).double().eval()
    turn = names["Turn"](spec).double()
    torch.nn.init.constant_(turn.step, 0.3)
    layer.couple = turn
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    given, key, _ = layer.project(x)
    grouped, k = given.unflatten(2, (2, 2)), key
    for _ in range(2):
        cos, sin = math.cos(0.3), math.sin(0.3)
        grouped, k = grouped * cos + k[:, :, :, None] * sin, k * cos - grouped.mean(3) * sin
    positions, _ = layer.locate(x)
    expected = layer.rotate(*layer.normalise(grouped.flatten(2, 3), k), positions)
    for actual, wanted in zip(layer.prepare(x, positions)[:2], expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    cache = layer.new_cache(2, 7)
    with torch.no_grad():
        pieces = [layer(piece, cache=cache) for piece in x.split(3, 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x))
