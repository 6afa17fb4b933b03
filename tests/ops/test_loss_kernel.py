"""The Triton kernel of the vocabulary loss: on a GPU, or on the CPU in Triton's interpreter, in a process of its own.

Triton decides on import whether it compiles or interprets, so the interpreter cannot be switched on halfway.
"""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qklab.ops.loss import IGNORED, api, linear_cross_entropy, token_losses
from qklab.testing.numerics import poison_memory, within_budget

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
installed = importlib.util.find_spec("triton") is not None
on_kernel = pytest.mark.skipif(not (installed and (GPU or INTERPRETED)), reason="needs a GPU or Triton's interpreter")


@pytest.mark.long
@pytest.mark.skipif(GPU or INTERPRETED or not installed, reason="the kernel runs in this process, or not at all")
def test_the_kernel_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "18 passed, 4 skipped" in answer.stdout  # skipped: this test and what needs a real GPU


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and several blocks a row already at these sizes."""
    monkeypatch.setattr(api, "CHUNK_STEP", 4)
    monkeypatch.setattr(api, "CHUNK_BYTES", {"cpu": 2**13, "cuda": 2**13})
    if installed and (GPU or INTERPRETED):
        from qklab.ops.loss import triton

        monkeypatch.setattr(triton, "BLOCK", 64)
    # oneDNN's low-precision products need instructions not every machine grants
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def example(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, width, generator=source, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=source, dtype=torch.float64)
    targets = torch.randint(vocabulary, (tokens,), generator=source)
    targets[1::3] = IGNORED
    x, weight = (tensor.to(DEVICE, dtype).requires_grad_() for tensor in (x, weight))
    return x, weight, targets.to(DEVICE)


def torch_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    z = F.linear(x, weight)
    z = z if z.dtype == torch.float64 else z.float()
    return F.cross_entropy(z, targets) + 0.1 * torch.logsumexp(z, 1)[targets != IGNORED].square().mean()


def ours(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, targets, z_loss=0.1, impl="triton")[0]


def with_gradients(loss: Any, x: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    value = loss(x, weight, targets)
    return [value.detach(), *torch.autograd.grad(value, (x, weight))]


@on_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8, 7), (9, 16, 64), (33, 16, 257), (130, 32, 100)])
def test_errors_stay_within_the_budget(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, targets = example(*shape, dtype)
    exact = with_gradients(torch_loss, x.double(), weight.double(), targets)
    low = with_gradients(torch_loss, x, weight, targets)
    for actual, other, true in zip(with_gradients(ours, x, weight, targets), low, exact, strict=True):
        assert actual.dtype == other.dtype
        within_budget(actual, other, true)


@on_kernel
def test_float64_is_torchs() -> None:
    x, weight, targets = example(33, 16, 257, torch.float64)
    for actual, expected in zip(
        with_gradients(ours, x, weight, targets), with_gradients(torch_loss, x, weight, targets), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
    losses = F.cross_entropy(F.linear(x, weight), targets, reduction="none").detach()
    torch.testing.assert_close(token_losses(x, weight, targets, "triton"), losses, rtol=1e-9, atol=1e-10)


@on_kernel
def test_any_strides_are_welcome() -> None:
    x, weight, targets = (tensor.detach() for tensor in example(12, 8, 65, torch.float64))
    spread = (x.mT.contiguous().mT, weight.repeat(1, 2)[:, 8:], targets.repeat_interleave(2)[::2])
    strided = with_gradients(ours, spread[0].requires_grad_(), spread[1].requires_grad_(), spread[2])
    plain = with_gradients(ours, x.requires_grad_(), weight.requires_grad_(), targets)
    for actual, expected in zip(strided, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@on_kernel
def test_large_logits_do_not_overflow() -> None:
    x, weight, targets = example(9, 16, 257, torch.float32)
    x = (1e4 * x).detach().requires_grad_()
    for actual, other, true in zip(
        with_gradients(ours, x, weight, targets),
        with_gradients(torch_loss, x, weight, targets),
        with_gradients(torch_loss, x.double(), weight.double(), targets),
        strict=True,
    ):
        within_budget(actual, other, true)


@on_kernel
def test_no_counted_target_gives_zero() -> None:
    x, weight, targets = example(9, 16, 100, torch.float32)
    for tokens in (9, 0):
        some = x[:tokens].detach().requires_grad_()
        nothing = with_gradients(ours, some, weight, torch.full_like(targets[:tokens], IGNORED))
        assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in nothing)


@on_kernel
def test_every_output_is_written_and_repeats_are_bit_equal() -> None:
    x, weight, targets = example(33, 16, 257, torch.float32)
    before = with_gradients(ours, x, weight, targets)
    with poison_memory():
        after = with_gradients(ours, x, weight, targets)
    assert all(map(torch.equal, before, after))


@on_kernel
def test_rows_are_padded_but_never_read_beyond_the_vocabulary() -> None:
    from qklab.ops.loss.triton import losses_and_gradients

    x, weight, targets = (tensor.detach() for tensor in example(12, 8, 65, torch.float32))
    extended = torch.cat([weight, torch.full((63, 8), float("nan"), device=DEVICE)])[:65]
    for actual, expected in zip(
        losses_and_gradients(x, extended, targets, IGNORED, 0.1, 4, True, True),
        losses_and_gradients(x, weight, targets, IGNORED, 0.1, 12, True, True),
        strict=True,
    ):
        assert actual is not None
        assert expected is not None
        torch.testing.assert_close(actual, expected)


@pytest.mark.skipif(not GPU, reason="on the CPU such a target raises")
def test_a_target_outside_the_vocabulary_gives_nan() -> None:
    x, weight, targets = example(9, 16, 100, torch.float32)
    targets[4] = 100
    assert ours(x, weight, targets).isnan()


@pytest.mark.skipif(not GPU, reason="measures the GPU's memory")
def test_memory_stays_below_the_chunks_and_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, weight, targets = example(4096, 64, 50_304, torch.bfloat16)
    monkeypatch.setitem(api.CHUNK_BYTES, "cuda", 2**26)
    ours(x, weight, targets).backward()
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours(x, weight, targets).backward()
    gradients = x.numel() * (2 + 4) + weight.numel() * (4 + 4 + 2)
    assert torch.cuda.max_memory_allocated() - before < 1.05 * (2**26 + gradients)


@on_kernel
@pytest.mark.skipif(not GPU, reason="inductor compiles for the GPU here")
def test_compiles_as_one_graph() -> None:
    x, weight, targets = example(33, 16, 257, torch.float32)
    torch._dynamo.reset()

    def scaled(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return 2 * ours(torch.tanh(x), weight, targets)

    compiled = with_gradients(torch.compile(scaled, fullgraph=True), x, weight, targets)
    for actual, expected in zip(compiled, with_gradients(scaled, x, weight, targets), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-4)
