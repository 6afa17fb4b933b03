"""The convolution kernels against the reference, both ways (see `kernels.py` for where they run)."""

from copy import deepcopy
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from kernels import DEVICE, GPU, INTERPRETED, on_kernel, refuse_strays
from torch import Tensor

from qklab import Attention, AttentionSpec, CouplingSpec
from qklab.ops.convolution import api, convolve_heads
from qklab.ops.dispatch import Impl
from qklab.testing.numerics import check_all_is_written, within_budget


class Case(NamedTuple):
    """A call: B rows of T tokens for each member, G key heads with R query heads each."""

    texts: tuple[tuple[int, ...], ...] = ()  # lengths of the texts of a row, the rows taking turns; or one for all
    R: int = 1
    D: int = 12
    T: int = 21
    G: int = 1
    B: int = 2
    padding: bool = False  # each row's first tokens stand at place 0, one more of every row
    views: bool = False  # q and k are views of one projection of more tokens
    members: int | None = None


# Blocks have 16 tokens here: texts of one and two tokens begin and end at their borders, and go on beyond them. Heads
# of more than 16 entries are two slices to the last kernel.
CASES = [
    Case(texts=((14, 2, 1, 4), (1, 1, 2, 11, 6))),
    Case(R=3, D=18, T=35, B=1),
    Case(R=2, D=16, T=32, G=2, padding=True, views=True),
    Case(T=1),
    Case(texts=((3, 2, 2), (5, 1, 1), (7,)), T=7, B=3, members=2),
]
WIDE_CASES = [  # what models have; too slow for the interpreter
    Case(D=64, T=300, G=8, B=4, views=True),
    Case(texts=((64, 1, 2, 61, 172), (299, 1)), D=64, T=300, G=2, R=4),
    Case(D=128, T=300, G=2, R=2),
    Case(D=32, T=256, G=4),
    Case(D=80, T=130, G=2, R=3, padding=True),
    Case(texts=((100, 1, 29),), D=64, T=130, R=2, B=3, members=3),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for a program, several programs for a head, and slices of it, already at these sizes."""
    if INTERPRETED:
        from qklab.ops.convolution import triton
        from qklab.ops.coupling.launch import Launch

        monkeypatch.setattr(triton, "plan_launch", lambda *_: Launch(block=16, programs=1, slice=16))
        refuse_strays(monkeypatch, triton)
    # oneDNN's low-precision products need instructions not every machine grants
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def find_places(case: Case) -> Tensor:
    """The tokens' places in their own texts: [rows or 1, T]."""
    rows = torch.arange(case.T).repeat(case.B * (case.members or 1), 1)
    if case.padding:
        return (rows - torch.arange(len(rows))[:, None]).clamp(min=0)
    if not case.texts:
        return rows[:1]
    for i, row in enumerate(rows):
        for start in list(accumulate(case.texts[i % len(case.texts)]))[:-1]:
            row[start:] = torch.arange(case.T - start)
    return rows


def example(case: Case, dtype: torch.dtype, seed: int = 0, weights: torch.dtype | None = None) -> dict[str, Any]:
    """The arguments of `convolve_heads`, drawn in float64 and rounded to `dtype`, parameters to that of `weights`."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, to: torch.dtype | None = weights) -> Tensor:
        values = scale * torch.randn(shape, generator=source, dtype=torch.float64)
        return values.to(DEVICE, to or dtype).requires_grad_()

    D, G, H = case.D, case.G, case.G * case.R
    lead, rows = () if case.members is None else (case.members,), case.B * (case.members or 1)
    q, k = draw(rows, case.T, H, D, to=dtype), draw(rows, case.T, G, D, to=dtype)
    if case.views:
        both = draw(rows, case.T + 3, H + 2 * G, D, to=dtype).detach()
        q, k, _ = (x.requires_grad_() for x in both[:, 1:-2].split((H, G, G), 2))
    return {
        "q": q,
        "k": k,
        "weight": draw(*lead, H + G, 3 * D, D, scale=D**-0.5),
        "bias": draw(*lead, H + G, D, scale=0.5),
        "temperature": draw(*lead, G),
        "positions": find_places(case).to(DEVICE),
        "eps": 2**-7,  # which float32 has exactly, as the kernel takes it
        "members": case.members,
    }


def with_gradients(given: dict[str, Any], impl: Impl) -> list[Tensor]:
    """q⁺, k⁺ and the gradients of a fixed weighing of both, whose strides are those of attention's gradients."""
    q, k = convolve_heads(**given, impl=impl)
    source = torch.Generator().manual_seed(5)
    weigh = []
    for y in (q, k):
        B, T, heads, D = y.shape
        w = torch.randn((B, heads, T + 1, D), generator=source).to(torch.bfloat16)
        weigh.append(w.to(DEVICE, y.dtype)[:, :, 1:].transpose(1, 2))
    leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
    return [q.detach(), k.detach(), *torch.autograd.grad((q, k), leaves, weigh)]


def widened(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in float64."""
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items() if torch.is_tensor(x)}
    return given | wide | {"positions": given["positions"]}


def stacked(runs: list[list[Tensor]]) -> list[Tensor]:
    """Every result of every run, run beside run."""
    return [torch.stack(results) for results in zip(*runs, strict=True)]


@on_kernel
@pytest.mark.parametrize("case", [] if GPU else CASES)  # on a GPU the kernel does not compute in float64
def test_in_float64_it_is_the_reference(case: Case) -> None:
    given = example(case, torch.float64)
    for actual, expected in zip(with_gradients(given, "triton"), with_gradients(given, "reference"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


LOW = Case(texts=((4, 1, 2, 11),), R=2, T=18, B=1)


@on_kernel
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (LOW, torch.float16),  # the interpreter cuts to bf16 what a GPU rounds
        (LOW, torch.float32),
        *((case, torch.bfloat16) for case in CASES + WIDE_CASES if GPU),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_errors_stay_within_the_budget(case: Case, dtype: torch.dtype, autocast: bool) -> None:
    """With parameters of the same dtype, and as in training: wide, with narrow products. Over several draws, since the
    error of a single number, as a temperature's gradient is, says little."""
    draws = [example(case, dtype, seed, torch.float32 if autocast else None) for seed in range(4)]
    exact = stacked([with_gradients(widened(given), "reference") for given in draws])
    with torch.autocast(DEVICE, torch.float16 if dtype == torch.float32 else dtype, enabled=autocast):
        low = stacked([with_gradients(given, "reference") for given in draws])
        found = stacked([with_gradients(given, "triton") for given in draws])
    for actual, other, true in zip(found, low, exact, strict=True):
        assert actual.dtype == other.dtype
        within_budget(actual, other, true)


@on_kernel
def test_nothing_of_a_packed_neighbour_is_seen() -> None:
    """Not even by a product with zero, to which what is no number would be none."""
    given = example(LOW, torch.float32)
    plain = with_gradients(given, "triton")
    with torch.no_grad():
        for name in "qk":
            given[name][:, 4:5] = torch.nan
    for y, expected in zip(with_gradients(given, "triton")[:4], plain[:4], strict=True):  # q⁺, k⁺, dq, dk
        assert torch.equal(y[:, :4], expected[:, :4])
        assert y[:, 4].isnan().all()
        assert torch.equal(y[:, 5:], expected[:, 5:])


@on_kernel
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # numpy, which interprets
def test_tokens_of_a_block_that_are_not_there_count_for_nothing() -> None:
    """Their states are 0, which without eps has no length."""
    given = example(Case(T=3, B=1), torch.float32)
    given["bias"].data.zero_()
    assert all(x.isfinite().all() for x in with_gradients(given | {"eps": 0.0}, "triton"))


@on_kernel
@pytest.mark.parametrize("case", [LOW, Case(texts=((3, 2),), T=5, members=2)])
def test_every_output_is_written_and_repeats_are_bit_equal(case: Case) -> None:
    given = example(case, torch.float32)
    check_all_is_written(lambda: with_gradients(given, "triton"))


@on_kernel
def test_nothing_comes_of_nothing() -> None:
    q, k, *gradients = with_gradients(example(Case(T=0), torch.float32), "triton")
    assert q.shape == k.shape == (2, 0, 1, 12)
    assert not any(gradient.any() for gradient in gradients)


@on_kernel
def test_opcheck() -> None:
    given = example(Case(T=3), torch.float32)
    tensors = [given[name] for name in ("q", "k", "weight", "bias", "temperature", "positions")]
    torch.library.opcheck(api._convolve_heads, (*tensors, 2**-7, torch.float32, 1))


@on_kernel
def test_a_layer_compiled_as_one_graph_is_its_reference() -> None:
    """Packed, and with one tensor for query, key and value."""
    spec = AttentionSpec(width=24, heads=2, share="q=k=v", coupling=CouplingSpec(kind="cca"))
    layer = Attention(spec).to(DEVICE)
    x = torch.randn(2, 9, 24, device=DEVICE)
    segments = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 3, 3], [0] * 9], device=DEVICE)

    def run(layer: Attention, impl: Impl, call: Any = None) -> list[Tensor]:
        assert layer.couple is not None
        layer.couple.impl = impl
        y = (layer if call is None else call)(x.to(layer.output.weight.dtype), segments=segments)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]

    fused = run(layer, "triton")
    compiled = run(layer, "triton", torch.compile(layer, backend="aot_eager", fullgraph=True))
    assert all(map(torch.equal, fused, compiled))
    low, exact = run(layer, "reference"), run(deepcopy(layer).double(), "reference")
    for actual, other, true in zip(fused, low, exact, strict=True):
        within_budget(actual, other, true)
