"""The coupling kernels: on a GPU, or on the CPU in Triton's interpreter, in a process of its own.

Triton decides on import whether it compiles or interprets, so the interpreter cannot be switched on halfway.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qklab.ops.coupling import Network, Norm, api, couple
from qklab.ops.dispatch import Impl
from qklab.testing.contracts import within_budget

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
installed = importlib.util.find_spec("triton") is not None
on_kernel = pytest.mark.skipif(not (installed and (GPU or INTERPRETED)), reason="needs a GPU or Triton's interpreter")


class Case(NamedTuple):
    """A call: B = 2 rows of T tokens, G key heads with R query heads each."""

    kind: str
    steps: int = 1
    R: int = 1
    D: int = 12
    h: int = 10
    T: int = 21
    G: int = 2
    per_head: bool = False
    gradient: bool = False
    norm: bool = False
    turned: int = 0  # pairs that RoPE turns
    turn_key: bool = True
    tables: int = 1  # 2: angles of their own for each row


CASES = [
    Case("euler"),
    Case("euler", steps=3, R=2, norm=True, turned=6),
    Case("euler", per_head=True, gradient=True, turned=4, turn_key=False),
    Case("symplectic-euler", turned=6),
    Case("symplectic-euler", steps=3, R=3, per_head=True, norm=True, turned=6, tables=2),
    Case("symplectic-euler", steps=2, gradient=True, D=16, h=16),
    Case("linear", turned=6),
    Case("linear", steps=3, R=2, per_head=True, norm=True, turned=2, turn_key=False),
    Case("leapfrog", turned=6, h=40, D=34, T=9),
    Case("leapfrog", norm=True, R=2, turned=6),
    Case("leapfrog", steps=3, turned=6, tables=2),
    Case("leapfrog", steps=3, R=2, per_head=True, norm=True, turned=4, h=8),
    Case("leapfrog", gradient=True, norm=True, h=20),
    Case("leapfrog", D=13, T=1),
    Case("affine", turned=6, h=20),
    Case("affine", steps=3, R=2, norm=True, turned=6, tables=2),
    Case("affine", R=2, per_head=True, turned=4, turn_key=False),
    Case("uncoupled", turned=6, norm=True),
    Case("uncoupled", steps=3, R=2, per_head=True, gradient=True, turned=4, turn_key=False),
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
]


@pytest.mark.skipif(GPU or INTERPRETED or not installed, reason="the kernel runs in this process, or not at all")
def test_the_kernel_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    ran = len(CASES) + 3 * len(LOW) + 7  # what needs a real GPU, and this test, are skipped
    assert f"{ran} passed" in answer.stdout


LOW = [CASES[i] for i in (1, 11, 15, 18)]  # also in lower precision in the interpreter


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for a program, slices of the hidden layer, and parts of a backward, already at these sizes."""
    if INTERPRETED:
        from qklab.ops.coupling import triton

        monkeypatch.setattr(triton, "launch", lambda *_: triton.Launch(block=16, programs=3, slice=16))
        monkeypatch.setattr(triton, "WORKSPACE", 2**17)
    # oneDNN's low-precision products need instructions not every machine grants
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def example(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """The arguments of `couple`, all of them drawn in float64 and rounded to `dtype`."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = scale * torch.randn(shape, generator=source, dtype=torch.float64)
        return values.to(DEVICE, dtype).requires_grad_()

    D, h, G = case.D, case.h, case.G
    lead = (G,) if case.per_head else ()
    outputs = 2 * D if case.kind == "affine" else D

    def network() -> Network:
        if case.kind == "linear":
            return Network(draw(*lead, D, D, scale=D**-0.5))
        inner, bias = draw(*lead, h, D, scale=D**-0.5), None if case.per_head else draw(h)
        if case.gradient:
            return Network(inner, bias, amplitude=draw(*lead, *(1,) * len(lead), h))
        outer = draw(*lead, outputs, h, scale=0.5 * h**-0.5)
        return Network(inner, bias, outer, None if case.per_head else draw(outputs, scale=0.5))

    given: dict[str, Any] = {
        "q": draw(2, case.T, G * case.R, D),
        "k": draw(2, case.T, G, D),
        "networks": tuple(network() for _ in range(2 if case.kind in ("affine", "uncoupled") else 1)),
        "kind": case.kind,
        "steps": case.steps,
    }
    if case.kind != "affine":
        given["step"] = draw(G, 1, 1, scale=0.5) if case.per_head else draw(scale=0.5)
    if case.norm:
        given["norm"] = Norm(1e-6, draw(D), None if case.turn_key else draw(D))
    if case.turned:
        angle = torch.randn(case.tables, case.T, 1, case.turned, generator=source, dtype=torch.float64)
        wide = torch.promote_types(dtype, torch.float32)
        given["angles"] = angle.cos().to(DEVICE, wide), angle.sin().to(DEVICE, wide)
        given["turn_key"] = case.turn_key
    return given


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
    """q⁺, k⁺ and the gradients of a fixed weighing of both."""
    q, k = couple(**given, impl=impl)
    source = torch.Generator().manual_seed(5)
    weigh = [torch.randn(y.shape, generator=source).to(DEVICE, torch.bfloat16) for y in (q, k)]
    loss = sum((y * w.to(y.dtype)).sum() for y, w in zip((q, k), weigh, strict=True))
    assert isinstance(loss, Tensor)
    return [q.detach(), k.detach(), *torch.autograd.grad(loss, leaves(given))]


def stacked(runs: list[list[Tensor]]) -> list[Tensor]:
    """Every result of every run, run beside run."""
    return [torch.stack(results) for results in zip(*runs, strict=True)]


@on_kernel
@pytest.mark.skipif(GPU, reason="the kernel computes in float64 only in the interpreter")
@pytest.mark.parametrize("case", CASES)
def test_in_float64_it_is_the_reference(case: Case) -> None:
    given = example(case, torch.float64)
    for actual, expected in zip(with_gradients(given, "triton"), with_gradients(given, "reference"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@on_kernel
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*itertools.product(LOW, [torch.float32, torch.bfloat16, torch.float16])]
    + [(case, torch.bfloat16) for case in CASES + WIDE_CASES if GPU and case not in LOW],
)
def test_errors_stay_within_the_budget(case: Case, dtype: torch.dtype) -> None:
    """Over several draws, since one error of a single number, as the step's gradient is, says little."""
    draws = [example(case, dtype, seed) for seed in range(8 if GPU else 2)]
    exact = stacked([with_gradients(widened(given), "reference") for given in draws])
    low = stacked([with_gradients(given, "reference") for given in draws])
    for actual, other, true in zip(
        stacked([with_gradients(given, "triton") for given in draws]), low, exact, strict=True
    ):
        assert actual.dtype == other.dtype
        within_budget(actual, other, true)


@on_kernel
def test_views_of_one_projection_are_taken_as_they_are() -> None:
    case = Case("leapfrog", R=2, turned=6)
    given = example(case, torch.float32)
    plain = with_gradients(given, "triton")
    H, G = 4, 2
    fused = torch.cat([given["q"].detach(), given["k"].detach(), given["k"].detach()], 2).flatten(2)
    fused = fused.unflatten(-1, (H + 2 * G, case.D))
    spread = given | {"q": fused[:, :, :H].requires_grad_(), "k": fused[:, :, H : H + G].requires_grad_()}
    assert not spread["q"].is_contiguous()
    assert all(map(torch.equal, with_gradients(spread, "triton"), plain))
    turned_round = given | {
        name: given[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for name in "qk"
    }
    assert all(map(torch.equal, with_gradients(turned_round, "triton"), plain))


@on_kernel
@pytest.mark.parametrize("case", [CASES[11], CASES[15]])
def test_every_output_is_written_and_repeats_are_bit_equal(case: Case) -> None:
    given = example(case, torch.float32)
    before = with_gradients(given, "triton")
    torch.use_deterministic_algorithms(True, warn_only=GPU)  # which also fills what torch.empty returns
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        after = with_gradients(given, "triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, before, after))


@on_kernel
def test_nothing_comes_of_nothing() -> None:
    given = example(Case("leapfrog", T=0, norm=True, turned=6), torch.float32)
    q, k, *gradients = with_gradients(given, "triton")
    assert q.shape == (2, 0, 2, 12)
    assert k.shape == (2, 0, 2, 12)
    assert not any(gradient.any() for gradient in gradients)


@on_kernel
@pytest.mark.parametrize("case", [Case("leapfrog", norm=True, turned=6, T=5), Case("affine", per_head=True, T=5)])
def test_opcheck(case: Case) -> None:
    given = example(case, torch.float32)
    named = {"step": given.get("step")}
    for i, network in enumerate(given["networks"]):
        named |= {f"{field}{i}": tensor for field, tensor in zip(Network._fields, network, strict=True)}
    norm = given.get("norm")
    if norm is not None:
        named |= {"query_gain": norm.query_gain, "key_gain": norm.key_gain}
    present = {name: tensor for name, tensor in named.items() if tensor is not None}
    arguments = (
        given["q"], given["k"], list(given.get("angles", ())), list(present.values()), ",".join(present), case.kind,
        case.steps, 2.0, None if norm is None else norm.eps, case.turned > 0, torch.float32,
    )  # fmt: skip
    torch.library.opcheck(api._couple, arguments)


@on_kernel
def test_only_inputs_and_weights_are_kept_for_the_backward() -> None:
    given = example(Case("leapfrog", steps=3, turned=6), torch.float32)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*leaves(given), *given["angles"])}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        couple(**given, impl="triton")
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} <= known


@on_kernel
@pytest.mark.skipif(not GPU, reason="inductor compiles for the GPU here")
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
