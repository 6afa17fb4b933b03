"""The vocabulary loss, reference and kernel, against torch's own: values, gradients, errors, memory, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import DEVICE, RUNS, on_gpu, on_kernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qklab.ops.loss import IGNORED, api, linear_cross_entropy, reference, token_losses
from qklab.testing.numerics import check_all_is_written, close, within_budget

every_impl = pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=on_kernel)])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one shorter, and several blocks a row, already at these sizes."""
    monkeypatch.setattr(api, "CHUNK_STEP", 4)
    monkeypatch.setattr(api, "CHUNK_BYTES", {"cpu": 2**13, "cuda": 2**13})
    if RUNS:
        from qklab.ops.loss import triton

        monkeypatch.setattr(triton, "BLOCK", 64)
    # oneDNN's low-precision products need instructions not every machine grants
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def example(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float64, impl: str = "reference"
) -> tuple[Tensor, ...]:
    """x, weight and targets, every third of which is ignored from the second on."""
    source, device = torch.Generator().manual_seed(7), DEVICE if impl == "triton" else "cpu"
    x = torch.randn(tokens, width, generator=source, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=source, dtype=torch.float64)
    targets = torch.randint(vocabulary, (tokens,), generator=source)
    targets[1::3] = IGNORED
    return x.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), targets.to(device)


def torch_loss(x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.1) -> Tensor:
    """The definition, written with all logits at once."""
    z = F.linear(x, weight).flatten(0, -2)
    z = z if z.dtype == torch.float64 else z.float()
    counted = targets.flatten() != IGNORED
    return F.cross_entropy(z, targets.flatten()) + z_loss * torch.logsumexp(z, 1)[counted].square().mean()


def ours(x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.1, impl: Any = "auto") -> Tensor:
    return linear_cross_entropy(x, weight, targets, z_loss=z_loss, impl=impl)[0]


def with_gradients(loss: Callable[..., Tensor], x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> list[Tensor]:
    value = loss(x, weight, *rest, **options)
    return [value.detach(), *torch.autograd.grad(value, (x, weight))]


@every_impl
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(1, 4, 7), (18, 16, 257)])  # tokens, width, vocabulary
def test_loss_and_gradients_are_torchs(impl: Any, shape: tuple[int, int, int], z_loss: float) -> None:
    x, weight, targets = example(*shape, impl=impl)
    actual = with_gradients(ours, x, weight, targets, z_loss, impl=impl)
    for mine, expected in zip(actual, with_gradients(torch_loss, x, weight, targets, z_loss), strict=True):
        close(mine, expected)
    _, nll = linear_cross_entropy(x, weight, targets, z_loss=z_loss, impl=impl)
    close(nll, torch_loss(x, weight, targets, 0.0).detach())
    assert not nll.requires_grad
    losses = token_losses(x, weight, targets, impl)
    close(losses, F.cross_entropy(F.linear(x, weight), targets, reduction="none").detach())
    assert not losses.requires_grad
    assert not losses[targets == IGNORED].any()


@every_impl
@pytest.mark.parametrize("S", [1, 3])
def test_members_are_calls_of_their_own(impl: Any, S: int) -> None:
    """Of the last member's targets none counts; every member's loss has another gradient."""
    x, weight, targets = example(S * 15, 5, S * 33, impl=impl)
    x, weight = (y.detach().unflatten(0, (S, -1)).requires_grad_() for y in (x, weight))
    targets = targets.remainder(33).where(targets != IGNORED, IGNORED).unflatten(0, (S, -1))
    targets[-1] = torch.full_like(targets[-1], IGNORED) if S > 1 else targets[-1]
    share = torch.arange(1.0, S + 1, dtype=x.dtype, device=x.device)
    loss, nll = linear_cross_entropy(x.view(S * 5, 3, -1), weight, targets.view(S * 5, 3), z_loss=0.1, impl=impl)
    assert not nll.requires_grad
    pairs = [linear_cross_entropy(*own, z_loss=0.1, impl=impl) for own in zip(x, weight, targets, strict=True)]
    alone, nlls = map(torch.stack, zip(*pairs, strict=True))
    for actual, expected in (
        (loss, alone), (nll, nlls),
        *zip(*(torch.autograd.grad(share @ y, (x, weight)) for y in (loss, alone)), strict=True),
        (token_losses(x.flatten(0, 1), weight, targets.flatten(), impl),
         torch.stack([token_losses(*own, impl) for own in zip(x, weight, targets, strict=True)])),
    ):  # fmt: skip
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def test_gradcheck() -> None:
    x, weight, targets = example(9, 3, 5)
    assert torch.autograd.gradcheck(lambda x, weight: 3 * ours(x, weight, targets, 0.2), (x, weight))


@every_impl
@pytest.mark.parametrize(
    ("dtype", "autocast", "scale"),
    [
        (torch.float32, False, 1.0),
        (torch.float32, False, 1e4),  # large logits do not overflow
        (torch.bfloat16, False, 1.0),
        (torch.bfloat16, False, 1e4),
        (torch.float16, False, 1.0),
        (torch.float32, True, 1.0),
    ],
)
def test_errors_stay_within_the_budget(impl: Any, dtype: torch.dtype, autocast: bool, scale: float) -> None:
    x, weight, targets = example(33, 32, 257, dtype, impl)
    x = (scale * x).detach().requires_grad_()
    exact = with_gradients(torch_loss, x.double(), weight.double(), targets)
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
        low = with_gradients(torch_loss, x, weight, targets)
        actual = with_gradients(ours, x, weight, targets, impl=impl)
    for mine, other, true in zip(actual, low, exact, strict=True):
        assert mine.dtype == other.dtype
        within_budget(mine, other, true)


def test_under_autocast_the_matrix_gradient_is_not_rounded() -> None:
    """dW goes back to the float32 matrix as it was summed; torch's own is rounded to bf16 on the way."""
    x, weight, targets = example(40, 8, 21, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, _, dweight = with_gradients(ours, x, weight, targets)
    assert dweight.dtype == torch.float32
    assert not torch.equal(dweight, dweight.bfloat16().float())


def test_gradients_are_found_only_where_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = example(20, 4, 9)
    asked = []
    inner = reference.losses_and_gradients

    def spy(*arguments: Any) -> Any:
        asked.append(arguments[-2:])
        return inner(*arguments)

    monkeypatch.setattr(reference, "losses_and_gradients", spy)
    full = with_gradients(ours, x, weight, targets)
    close(torch.autograd.grad(ours(x, weight.detach(), targets), x)[0], full[1])
    close(torch.autograd.grad(ours(x.detach(), weight, targets), weight)[0], full[2])
    assert not ours(x.detach(), weight.detach(), targets).requires_grad
    with torch.no_grad():
        close(ours(x, weight, targets), full[0])
    token_losses(x, weight, targets)
    assert asked == [(True, True), (True, False), (False, True), (False, False), (False, False), (False, False)]


@every_impl
@pytest.mark.parametrize("tokens", [12, 0])
def test_no_counted_target_gives_zero(impl: Any, tokens: int) -> None:
    x, weight, targets = example(tokens, 4, 9, impl=impl)
    nothing = with_gradients(ours, x, weight, torch.full_like(targets, IGNORED), impl=impl)
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in nothing)
    assert nothing[1].shape == x.shape


def test_leading_shapes_are_free() -> None:
    x, weight, targets = example(24, 4, 9)
    flat = with_gradients(ours, x, weight, targets)
    shaped, named = x.detach().unflatten(0, (2, 3, 4)).requires_grad_(), targets.unflatten(0, (2, 3, 4))
    loss, dx, dweight = with_gradients(ours, shaped, weight, named)
    for actual, expected in zip((loss, dx.flatten(0, 2), dweight), flat, strict=True):
        close(actual, expected)
    close(ours(x[0], weight, targets[0]), torch_loss(x[:1], weight, targets[:1]))
    close(token_losses(shaped, weight, named), token_losses(x, weight, targets))


@every_impl
def test_any_strides_are_welcome(impl: Any) -> None:
    x, weight, targets = example(24, 4, 65, impl=impl)
    spread = (x.detach().mT.contiguous().mT, weight.detach().repeat(1, 2)[:, 4:], targets.repeat_interleave(2)[::2])
    assert not any(tensor.is_contiguous() for tensor in spread)
    strided = with_gradients(ours, spread[0].requires_grad_(), spread[1].requires_grad_(), spread[2], impl=impl)
    for actual, expected in zip(strided, with_gradients(ours, x, weight, targets, impl=impl), strict=True):
        close(actual, expected)


@every_impl
@pytest.mark.parametrize("members", [(), (3,)])
def test_every_output_is_written_and_repeats_are_bit_equal(impl: Any, members: tuple[int, ...]) -> None:
    x, weight, targets = example(33, 16, 258, torch.float32, impl)
    weight = weight.detach().view(*members, -1, 16).requires_grad_()
    targets = targets.where(targets < 86, 0)

    def call() -> list[Tensor]:
        loss = ours(x, weight, targets, impl=impl)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), (x, weight))]

    check_all_is_written(call)


@on_kernel
def test_triton_pads_rows_but_never_reads_beyond_the_vocabulary() -> None:
    from qklab.ops.loss.triton import losses_and_gradients

    x, weight, targets = (tensor.detach() for tensor in example(12, 8, 65, torch.float32, "triton"))
    extended = torch.cat([weight, weight.new_full((63, 8), torch.nan)])[:65]
    for actual, expected in zip(
        losses_and_gradients(x, extended, targets, IGNORED, 0.1, 4, True, True),
        losses_and_gradients(x, weight, targets, IGNORED, 0.1, 12, True, True),
        strict=True,
    ):
        assert actual is not None
        assert expected is not None
        torch.testing.assert_close(actual, expected)


@on_kernel
@pytest.mark.parametrize("target", [100, -1])
@pytest.mark.parametrize("short", [0, 128])  # vocabularies up to which one block takes a row
def test_triton_gives_nan_for_a_target_outside_the_vocabulary(
    target: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a GPU cannot raise for without being waited for."""
    from qklab.ops.loss import triton

    monkeypatch.setattr(triton, "SHORT", short)
    x, weight, targets = (tensor.detach() for tensor in example(9, 16, 100, torch.float32, "triton"))
    targets[:] = 99
    targets[4] = target
    nll, *_ = triton.losses_and_gradients(x, weight, targets, IGNORED, 0.1, 9, True, True)
    assert nll.isnan().nonzero().flatten().tolist() == [4]


@on_gpu
def test_triton_takes_no_more_memory_than_chunks_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, weight, targets = example(4096, 64, 50_304, torch.bfloat16, "triton")
    monkeypatch.setitem(api.CHUNK_BYTES, "cuda", 2**26)
    ours(x, weight, targets, impl="triton").backward()
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours(x, weight, targets, impl="triton").backward()
    gradients = x.numel() * (2 + 4) + weight.numel() * (4 + 4 + 2)
    assert torch.cuda.max_memory_allocated() - before < 1.05 * (2**26 + gradients)


class Largest(TorchDispatchMode):
    """The most elements any tensor made under this mode had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_the_logits_of_all_tokens_never_exist() -> None:
    x, weight, targets = example(400, 4, 500)
    rows = api.chunk_rows(400, 500, x.dtype, x.device)
    with torch.no_grad(), Largest() as largest:
        reference.losses_and_gradients(x, weight, targets, IGNORED, 0.1, rows, True, True)
    assert largest.elements == max(rows * 500, weight.numel())
    assert largest.elements < 400 * 500 / 50
    with torch.no_grad(), Largest() as largest:
        members = x.view(2, 200, 4), weight.view(2, 250, 4), targets.clamp(max=249).view(2, 200)
        api.compute_losses(*members, 0.1, True, True, "reference")
    assert largest.elements == max(2 * rows * 250, weight.numel())


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "rows"), [(1, 50_304, 128), (65_536, 50_304, 9472), (65_536, 100, 65_536), (0, 10, 128)]
)
def test_chunks_keep_to_their_bytes(monkeypatch: pytest.MonkeyPatch, tokens: int, vocabulary: int, rows: int) -> None:
    monkeypatch.undo()
    assert api.chunk_rows(tokens, vocabulary, torch.bfloat16, torch.device("cuda")) == rows


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, False)])
def test_the_operators_keep_torchs_rules(needs: tuple[bool, bool]) -> None:
    x, weight, targets = example(20, 4, 9)
    x.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    torch.library.opcheck(api._linear_cross_entropy, (x, weight, targets, 0.1, *needs, "reference"))
    stacked = [x.detach()[None].requires_grad_(needs[0]), weight.detach()[None].requires_grad_(needs[1])]
    torch.library.opcheck(api._linear_cross_entropy, (*stacked, targets[None], 0.1, *needs, "reference"))
    torch.library.opcheck(api._token_losses, (x.detach(), weight.detach(), targets, "reference"))


def tied(weight: Tensor, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A model of one matrix: embedded, bent, and read out by the same matrix, under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.tanh(F.embedding(ids, weight))
        loss, nll = linear_cross_entropy(x, weight, targets, z_loss=0.1)
    return 2 * loss, nll


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiles_as_one_graph(backend: str) -> None:
    _, weight, targets = example(60, 8, 33, torch.float32)
    ids, targets = torch.arange(60).remainder(33).view(4, 15), targets.view(4, 15)
    torch._dynamo.reset()
    compiled = torch.compile(tied, fullgraph=True, backend=backend)
    results = []
    for call, matrix in ((tied, weight.detach().double().requires_grad_()), (tied, weight), (compiled, weight)):
        loss, nll = call(matrix, ids, targets)
        results.append([loss.detach(), nll, *torch.autograd.grad(loss, matrix)])
    for true, eager, actual in zip(*results, strict=True):
        within_budget(actual, eager, true)
    losses = torch.compile(token_losses, fullgraph=True, backend="aot_eager")
    x = weight.detach()[ids]
    torch.testing.assert_close(losses(x, weight.detach(), targets), token_losses(x, weight.detach(), targets))


@on_gpu
def test_triton_compiles_as_one_graph() -> None:
    x, weight, targets = example(33, 16, 257, torch.float32, "triton")
    torch._dynamo.reset()

    def bend(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return 2 * ours(torch.tanh(x), weight, targets, impl="triton")

    compiled = with_gradients(torch.compile(bend, fullgraph=True), x, weight, targets)
    for actual, expected in zip(compiled, with_gradients(bend, x, weight, targets), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-4)


REFUSED = {
    "[members, vocabulary, d], but x [6, 4] and weight [9, 3] came": {"weight": (9, 3)},
    "the 4 members of weight must divide the rows of x, but [6, 4] came": {"weight": (4, 9, 4)},
    "targets must be int64 of shape [6], one per token of x, but torch.int64 [5] came": {"targets": (5,)},
    "targets must be int64 of shape [6], one per token of x, but torch.int32 [6] came": {"targets": torch.int32},
    "must be floating-point tensors, of one dtype outside autocast, but torch.float32 and": {"x": torch.float32},
    "must be floating-point tensors, of one dtype outside autocast, but torch.int64 and": {"x": torch.int64},
    "x, weight and targets must be on one device, but cpu, meta and cpu came": {"weight": "meta"},
    "targets must be from 0 to 8, or -100 for none, but 9 came": {"target": 9},
    "targets must be from 0 to 8, or -100 for none, but -1 came": {"target": -1},
    "impl must be one of 'auto', 'reference', 'triton', but 'cuda' came": {"impl": "cuda"},
}


@pytest.mark.parametrize("sentence", REFUSED)
@pytest.mark.parametrize("operation", [linear_cross_entropy, token_losses])
def test_what_does_not_fit_is_refused(operation: Callable[..., Any], sentence: str) -> None:
    x, weight, targets = (tensor.detach() for tensor in example(6, 4, 9))
    tensors = {"x": x, "weight": weight, "targets": targets}
    impl: Any = "auto"
    for name, change in REFUSED[sentence].items():
        if name == "impl":
            impl = change
        elif name == "target":
            targets[2] = change
        elif isinstance(change, tuple):
            tensors[name] = tensors[name].new_zeros(change)
        else:
            tensors[name] = tensors[name].to(change)
    with pytest.raises(ValueError) as caught:
        operation(**tensors, impl=impl)
    assert sentence in str(caught.value)
