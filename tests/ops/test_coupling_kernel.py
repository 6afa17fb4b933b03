"""The coupling kernels against the reference: every map, both ways (see `kernels.py` for where they run)."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from kernels import DEVICE, GPU, INTERPRETED, on_gpu, on_kernel, refuse_strays
from torch import Tensor

from qklab import AttentionSpec, CouplingSpec
from qklab.attention.layer import Attention
from qklab.ops.coupling import Network, Norm, api, couple
from qklab.ops.dispatch import Impl
from qklab.testing.numerics import check_all_is_written, within_budget


class Case(NamedTuple):
    """A call: B rows of T tokens for each member, G key heads with R query heads each."""

    kind: str
    steps: int = 1
    R: int = 1
    D: int = 12
    h: int = 10
    T: int = 9
    G: int = 2
    per_head: bool = False
    gradient: bool = False
    norm: bool = False
    turned: int = 0  # pairs that RoPE turns
    turn_key: bool = True
    tables: int = 1  # 2: angles of their own for each row
    views: bool = False  # q and k are views of one projection of more tokens
    B: int = 2
    members: int | None = None


# With R = 1 (and one step of euler) the first evaluation is read from q and dk. Blocks have 16 tokens here: where T is
# a multiple, no block reaches over the end of a row, and a forced map of a head of 16 masks nothing.
CASES = [
    Case("euler", G=1),
    Case("euler", steps=3, R=2, norm=True, turned=6, B=1),
    Case("euler", per_head=True, gradient=True, turned=4, turn_key=False),
    Case("euler", steps=3, D=16, T=48, G=1, turned=8, views=True),
    Case("symplectic-euler", gradient=True, D=16, h=16, T=32, turned=8, G=1),
    Case("symplectic-euler", steps=3, R=3, per_head=True, norm=True, turned=6, tables=2),
    Case("linear", turned=6, G=1),
    Case("linear", steps=3, R=2, per_head=True, norm=True, turned=2, turn_key=False),
    Case("leapfrog", turned=6, h=20, D=18, views=True, B=1),
    Case("leapfrog", steps=3, turned=12, D=24, tables=2, G=1),
    Case("leapfrog", gradient=True, norm=True, h=20, D=13, T=1, G=1),
    Case("leapfrog", steps=3, R=2, per_head=True, norm=True, D=16, T=32, turned=8, h=8, tables=2, views=True),
    Case("affine", turned=6, h=20, B=1),
    Case("affine", steps=3, R=2, norm=True, turned=6, tables=2, G=1),
    Case("affine", R=2, per_head=True, D=16, T=16, turned=8, turn_key=False, views=True),
    Case("uncoupled", turned=6, norm=True, B=1),
    Case("uncoupled", steps=3, R=2, per_head=True, gradient=True, D=16, T=16, turned=4, turn_key=False),
]
WIDE_CASES = [  # what models have; too slow for the interpreter
    Case("euler", D=64, h=64, T=300, turned=32),
    Case("euler", steps=4, D=64, h=64, T=300, R=2, norm=True, turned=32),
    Case("leapfrog", D=64, h=64, T=300, turned=32),
    Case("leapfrog", steps=7, D=64, h=64, T=300, turned=32),
    Case("leapfrog", D=128, h=128, T=130, turned=64),
    Case("leapfrog", D=96, h=96, T=130, R=4, norm=True, turned=24),
    Case("leapfrog", D=48, h=8, T=130, per_head=True, turned=24),
    Case("leapfrog", D=80, h=160, T=130, gradient=True, turned=40),
    Case("symplectic-euler", steps=2, D=32, h=32, T=130, turned=16),
    Case("linear", D=128, h=128, T=130, turned=64),
    Case("affine", D=64, h=128, T=130, turned=32),
    Case("affine", steps=2, D=64, h=128, T=130, R=2, norm=True, turned=32),
    Case("uncoupled", steps=2, D=64, h=32, T=130, turned=32),
    Case("leapfrog", D=64, h=64, T=256, norm=True, turned=32, views=True),
    Case("leapfrog", steps=7, D=64, h=64, T=128, turned=32, views=True),
    Case("euler", D=128, h=128, T=128, G=8, turned=64, views=True),
]


# A member's last block ends before its 16 tokens do, where the next member's rows begin.
MEMBERS = [
    Case("euler", R=2, norm=True, turn_key=False, T=7, B=3, G=1, members=3),
    Case("euler", steps=2, per_head=True, turned=6, T=7, B=1, members=3),
    Case("symplectic-euler", steps=2, gradient=True, norm=True, turned=6, tables=2, T=7, B=3, G=1, members=3),
    Case("symplectic-euler", R=2, per_head=True, gradient=True, T=7, B=1, members=3),
    Case("linear", steps=2, R=2, norm=True, T=7, B=3, G=1, members=3),
    Case("linear", per_head=True, turned=6, T=7, B=1, members=3),
    Case("leapfrog", h=20, turned=6, tables=2, T=7, B=3, G=1, members=3, views=True),
    Case("leapfrog", steps=2, R=3, per_head=True, norm=True, T=7, B=1, members=3),
    Case("leapfrog", D=16, T=16, turned=8, norm=True, members=2),
    Case("affine", h=20, T=7, B=3, G=1, members=3),
    Case("affine", steps=2, R=2, per_head=True, norm=True, turn_key=False, turned=6, T=7, B=1, members=3),
    Case("uncoupled", norm=True, turned=6, T=7, B=3, G=1, members=3),
    Case("uncoupled", steps=2, R=2, per_head=True, turn_key=False, turned=4, T=7, B=1, members=3),
    Case("leapfrog", steps=2, per_head=True, norm=True, T=5, members=1),
]

LOW = [  # also in lower precision in the interpreter, which cuts to bf16 what a GPU rounds
    (Case("euler", steps=3, R=2, norm=True, turned=6, T=5, G=1), torch.float16),
    (Case("linear", steps=3, T=5, G=1), torch.bfloat16),
    (Case("leapfrog", D=16, turned=8, T=5, G=1), torch.float16),
    (Case("leapfrog", steps=2, norm=True, turned=4, T=5, G=1), torch.float32),
    (Case("affine", steps=2, R=2, norm=True, turned=6, T=5, G=1), torch.float16),
    (Case("uncoupled", steps=2, per_head=True, gradient=True, turned=4, turn_key=False, T=5, G=1), torch.float16),
    (Case("leapfrog", norm=True, turned=6, T=5, B=1, G=1, members=3), torch.float16),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for a program, slices of the hidden layer, and parts of a backward, already at these sizes."""
    if INTERPRETED:
        from qklab.ops.coupling import launch

        def choose(direction: str, *_: Any) -> Any:
            later = direction == "gradients"
            return launch.Launch(block=16, programs=3 if later else 1, hold=direction == "forward", slice=16)

        monkeypatch.setattr(launch, "choose_launch", choose)
        monkeypatch.setattr(launch, "WORKSPACE", 2**14)
        refuse_strays(monkeypatch, launch)
    # oneDNN's low-precision products need instructions not every machine grants
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def example(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """The arguments of `couple`, all of them drawn in float64 and rounded to `dtype`."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = scale * torch.randn(shape, generator=source, dtype=torch.float64)
        return values.to(DEVICE, dtype).requires_grad_()

    D, h, G = case.D, case.h, case.G
    S = () if case.members is None else (case.members,)
    rows, lead, ones = math.prod(S) * case.B, (*S, G) if case.per_head else S, (1,) * case.per_head
    outputs = 2 * D if case.kind == "affine" else D

    def network() -> Network:
        if case.kind == "linear":
            return Network(draw(*lead, D, D, scale=D**-0.5))
        inner, bias = draw(*lead, h, D, scale=D**-0.5), draw(*S, h)
        if case.gradient:
            return Network(inner, bias, amplitude=draw(*lead, *ones, h))
        outer = draw(*lead, outputs, h, scale=0.5 * h**-0.5)
        return Network(inner, bias, outer, None if case.R == 3 else draw(*S, outputs, scale=0.5))

    q, k = draw(rows, case.T, G * case.R, D), draw(rows, case.T, G, D)
    if case.views:
        both = draw(rows, case.T + 3, G * (case.R + 2), D).detach()
        q, k, _ = (x.requires_grad_() for x in both[:, 1:-2].split((G * case.R, G, G), 2))
    given: dict[str, Any] = {
        "q": q,
        "k": k,
        "networks": tuple(network() for _ in range(2 if case.kind in ("affine", "uncoupled") else 1)),
        "kind": case.kind,
        "steps": case.steps,
        "members": case.members,
    }
    if case.kind != "affine":
        given["step"] = draw(*lead, *ones, *ones, scale=0.5)
    if case.norm:
        given["norm"] = Norm(1e-6, draw(*S, D), None if case.turn_key else draw(*S, D))
    if case.turned:
        tables = 1 if case.tables == 1 else rows
        angle = torch.randn(tables, case.T, 1, case.turned, generator=source, dtype=torch.float64)
        wide = torch.promote_types(dtype, torch.float32)
        given["angles"] = angle.cos().to(DEVICE, wide), angle.sin().to(DEVICE, wide)
        given["turn_key"] = case.turn_key
    return given


def operator_arguments(case: Case) -> tuple[Any, ...]:
    """What `couple` hands to the operator."""
    given = example(case, torch.float32)
    norm = given.get("norm")
    weights = api.name_weights(given["networks"], given.get("step"), norm)
    return (
        given["q"], given["k"], list(given.get("angles", ())), list(weights.values()), ",".join(weights), case.kind,
        case.steps, 2.0, None if norm is None else norm.eps, case.turned > 0, torch.float32, case.members,
    )  # fmt: skip


def leaves(given: dict[str, Any]) -> list[Tensor]:
    """What has a gradient: q, k, the step, every weight, the gains."""
    weights = [tensor for network in given["networks"] for tensor in network]
    weights += list(given.get("norm", ())[1:])
    tensors = (given["q"], given["k"], given.get("step"), *weights)
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def widened(given: Any) -> Any:
    """The same arguments in float64."""
    if isinstance(given, Tensor):
        return given.detach().double().requires_grad_(given.requires_grad)
    if isinstance(given, dict):
        return {name: widened(value) for name, value in given.items()}
    if isinstance(given, tuple):
        made = [widened(value) for value in given]
        return type(given)(*made) if hasattr(given, "_fields") else tuple(made)
    return given


def with_gradients(given: dict[str, Any], impl: Impl) -> list[Tensor]:
    """q⁺, k⁺ and the gradients of a fixed weighing of both, whose strides are those of attention's gradients."""
    q, k = couple(**given, impl=impl)
    source = torch.Generator().manual_seed(5)
    weigh = []
    for y in (q, k):
        B, T, heads, D = y.shape
        w = torch.randn((B, heads, T + 1, D), generator=source).to(torch.bfloat16)
        weigh.append(w.to(DEVICE, y.dtype)[:, :, 1:].transpose(1, 2))
    return [q.detach(), k.detach(), *torch.autograd.grad((q, k), leaves(given), weigh)]


def stacked(runs: list[list[Tensor]]) -> list[Tensor]:
    """Every result of every run, run beside run."""
    return [torch.stack(results) for results in zip(*runs, strict=True)]


@on_kernel
@pytest.mark.parametrize("case", [] if GPU else CASES + MEMBERS)  # on a GPU the kernel does not compute in float64
def test_in_float64_it_is_the_reference(case: Case) -> None:
    given = example(case, torch.float64)
    for actual, expected in zip(with_gradients(given, "triton"), with_gradients(given, "reference"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@on_kernel
@pytest.mark.parametrize(
    ("case", "dtype"), [*LOW, *((case, torch.bfloat16) for case in CASES + WIDE_CASES + MEMBERS if GPU)]
)
def test_errors_stay_within_the_budget(case: Case, dtype: torch.dtype) -> None:
    """Over several draws, since one error of a single number, as the step's gradient is, says little."""
    draws = [example(case, dtype, seed) for seed in range(8 if GPU else 4)]
    exact = stacked([with_gradients(widened(given), "reference") for given in draws])
    low = stacked([with_gradients(given, "reference") for given in draws])
    for actual, other, true in zip(
        stacked([with_gradients(given, "triton") for given in draws]), low, exact, strict=True
    ):
        assert actual.dtype == other.dtype
        within_budget(actual, other, true)


@on_kernel
@pytest.mark.parametrize("kind", ["leapfrog", "euler"])
def test_wide_states_with_narrow_products(kind: str) -> None:
    """Under autocast q and dk do not hold what the products took."""
    given = example(Case(kind, turned=6, T=5), torch.float32)
    exact = with_gradients(widened(given), "reference")
    with torch.autocast(DEVICE, torch.float16):
        actual = with_gradients(given, "triton")
    for ours, true in zip(actual, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), true, rtol=0, atol=2e-3 * float(true.abs().max()))


@on_kernel
def test_any_strides_are_taken_as_they_are() -> None:
    given = example(Case("leapfrog", R=2, turned=6, T=5), torch.float32)
    plain = with_gradients(given, "triton")
    swapped = {name: given[name].detach().transpose(1, 2).contiguous().transpose(1, 2) for name in "qk"}
    cos, sin = given["angles"]
    given |= {name: x.requires_grad_() for name, x in swapped.items()}
    given["angles"] = cos, torch.cat([sin, cos], -1)[..., : cos.shape[-1]]
    assert all(map(torch.equal, with_gradients(given, "triton"), plain))


@on_kernel
@pytest.mark.parametrize(
    "case",
    [
        Case("leapfrog", steps=3, R=2, per_head=True, norm=True, turned=4, h=8, T=5),
        Case("affine", steps=2, R=2, norm=True, turned=6, tables=2, T=5),
        Case("uncoupled", steps=2, norm=True, T=5),
        Case("leapfrog", h=20, norm=True, T=7, B=3, G=1, members=3),
        Case("affine", steps=2, per_head=True, T=5, B=1, members=2),
    ],
)
def test_every_output_is_written_and_repeats_are_bit_equal(case: Case) -> None:
    given = example(case, torch.float32)
    check_all_is_written(lambda: with_gradients(given, "triton"))


@on_kernel
def test_nothing_comes_of_nothing() -> None:
    given = example(Case("leapfrog", T=0, norm=True, turned=6), torch.float32)
    q, k, *gradients = with_gradients(given, "triton")
    assert q.shape == (2, 0, 2, 12)
    assert k.shape == (2, 0, 2, 12)
    assert not any(gradient.any() for gradient in gradients)


@on_kernel
@pytest.mark.parametrize(
    "case",
    [
        Case("affine", per_head=True, T=3, G=1),
        Case("leapfrog", norm=True, turned=6, T=3, G=1, B=1, members=2),
    ],
)
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(api._couple, operator_arguments(case))


@on_kernel
def test_members_share_the_workspace() -> None:
    from qklab.ops.coupling import launch

    call = launch.Call(*operator_arguments(Case("leapfrog", T=48, G=1, members=3)))
    how = launch.choose_launch("backward", "leapfrog", call.DP, call.HP, call.plain)
    assert launch.Workspace(call, how, call.plan_workspace()).tiles.nbytes <= launch.WORKSPACE


@on_kernel
def test_only_inputs_and_weights_are_kept_for_the_backward() -> None:
    given = example(Case("leapfrog", steps=3, turned=6), torch.float32)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*leaves(given), *given["angles"])}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        couple(**given, impl="triton")
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} <= known


@on_kernel
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_layer_that_recomputes_keeps_what_the_kernel_gave(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It projects again and gives the same gradients, but the map itself is not run twice."""
    from qklab.ops.coupling import launch as launches

    plain, runs = launches.forward, []
    monkeypatch.setattr(launches, "forward", lambda *given: runs.append(1) or plain(*given))
    torch.manual_seed(0)
    layer = Attention(AttentionSpec(width=24, heads=2, coupling=CouplingSpec(kind="leapfrog"))).to(DEVICE)
    assert layer.couple is not None
    layer.couple.impl = "triton"
    x = torch.randn(2, 9, 24, device=DEVICE)
    found, projected = [], []
    if backend is None:
        layer.project.register_forward_hook(lambda *_: projected.append(layer.recomputes))
    for layer.recomputes in (False, True):
        torch._dynamo.reset()
        call = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
        found.append(torch.autograd.grad(call(x).square().sum(), list(layer.parameters())))
    assert projected == ([False, True, True] if backend is None else [])
    assert all(map(torch.equal, *found))
    assert len(runs) == 2


@on_gpu
def test_compiles_as_one_graph() -> None:
    given = example(Case("leapfrog", D=64, h=64, T=130, turned=32, norm=True), torch.float32)
    torch._dynamo.reset()

    def stage(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        changed: dict[str, Any] = given | {"q": torch.tanh(q), "k": torch.tanh(k)}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return couple(**changed)

    compiled = torch.compile(stage, fullgraph=True)
    results = []
    for call in (stage, compiled):
        q, k = call(given["q"], given["k"])
        loss = (q.square() + k.square()).sum()
        results.append([q.detach(), k.detach(), *torch.autograd.grad(loss, leaves(given))])
    for eager, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, eager, rtol=2e-2, atol=2e-2 * float(eager.abs().max()))
