"""Softmax attention with sinks and windows: torch's fused kernels against the definition."""

import logging
from typing import Any

import pytest
import torch
from kernels import on_gpu
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qklab import Attention, AttentionSpec
from qklab.ops import dispatch
from qklab.ops.softmax import attend_softmax
from qklab.ops.softmax.api import attend_densely
from qklab.ops.softmax.reference import attend_softmax as written_out
from qklab.testing.numerics import close, within_budget

B, T, SCALE = 2, 7, 0.4


def example(G: int, D: int, E: int, rows: bool, tokens: int = T, H: int = 4) -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    shapes = ((B, tokens, H, D), (B, tokens, G, D), (B, tokens, G, E), (B, H) if rows else (H,))
    return [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]


def seen(tokens: int, causal: bool, window: int | None) -> Tensor:
    apart = torch.arange(tokens)[:, None] - torch.arange(tokens)
    near = torch.ones_like(apart, dtype=torch.bool) if window is None else apart.abs() < window
    return near & (apart >= 0) if causal else near


def outputs_and_gradients(call: Any, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    o = call(*leaves)
    return [o.detach(), *torch.autograd.grad((o.double() ** 2).sum(), leaves)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("G", "D", "E", "rows"), [(4, 8, 8, False), (2, 5, 8, True), (1, 8, 3, False)])
def test_sinks_from_the_log_sum_exp_are_the_definition(G: int, D: int, E: int, rows: bool, causal: bool) -> None:
    """Outputs, and gradients of queries, keys, values and sinks."""
    tensors, mask = example(G, D, E, rows), seen(T, causal, None)
    fused = outputs_and_gradients(
        lambda q, k, v, s: attend_softmax(q, k, v, scale=SCALE, causal=causal, sinks=s), tensors
    )
    expected = outputs_and_gradients(lambda q, k, v, s: written_out(q, k, v, SCALE, mask, s), tensors)
    for actual, true in zip(fused, expected, strict=True):
        close(actual, true)


def test_what_no_kernel_takes_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v, _ = example(4, 8, 8, False)
    dispatch.log_once.cache_clear()
    with caplog.at_level(logging.INFO, "qklab"):
        for _ in range(2):
            assert attend_softmax(q, k, v, scale=SCALE, causal=True, window=3) is None
        with sdpa_kernel(SDPBackend.MATH):
            assert attend_softmax(q, k, v, scale=SCALE, causal=True) is None
    assert [record.message.partition(", since ")[2] for record in caplog.records] == [
        "the CPU's kernel knows no windows.",
        "flash attention is switched off.",
    ]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_long_text_is_attended_to_along_the_diagonal(causal: bool, sinks: bool, monkeypatch: Any) -> None:
    """No piece of the scores is larger than a band of the window, and together they are what one mask gives."""
    from qklab.attention import mix

    spec = AttentionSpec(width=8, heads=2, window=150, causal=causal, sinks=sinks)
    attention, x = Attention(spec).double(), torch.randn(1, 700, 8, dtype=torch.float64)
    pieces, plain = [], attend_densely

    def count(q: Tensor, k: Tensor, *given: Any) -> Tensor:
        pieces.append((q.shape[1], k.shape[1]))
        return plain(q, k, *given)

    monkeypatch.setattr(mix, "attend_densely", count)
    banded = attention(x)
    assert len(pieces) == 5
    assert max(rows * keys for rows, keys in pieces) <= 150 * (150 + 149 * (1 if causal else 2))
    q, k, v, _ = attention.prepare(x, attention.locate(x)[0])
    assert v is not None
    logits = attention.mix.find_sinks(q)
    o = written_out(q, k, v, attention.mix.scale, seen(700, causal, 150), logits)
    close(banded, attention.output(o.flatten(2)))


@on_gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("G", "D", "E", "sinks"), [(8, 64, 64, True), (2, 64, 64, False), (2, 40, 80, True)])
def test_kernels_of_a_gpu_stay_within_the_budget(
    G: int, D: int, E: int, sinks: bool, window: int | None, causal: bool
) -> None:
    tensors = [tensor.cuda() for tensor in example(G, D, E, False, tokens=333, H=8)]
    tensors[3] = tensors[3].float().double()
    mask = seen(333, causal, window).cuda()

    def call(run: Any) -> Any:
        return lambda q, k, v, s: run(q, k, v, s if sinks else None)

    def fused(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None) -> Tensor | None:
        return attend_softmax(q, k, v, scale=SCALE / 4, causal=causal, window=window, sinks=s)

    def dense(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None) -> Tensor:
        return written_out(q, k, v, SCALE / 4, mask, s)

    low = [tensor.bfloat16() for tensor in tensors[:3]]
    exact = [tensor.double() for tensor in low] + tensors[3:]
    low.append(tensors[3].float())
    kept = slice(None) if sinks else slice(3)

    def measure(run: Any, given: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        o = call(run)(*leaves)
        assert o is not None
        return [o.detach(), *torch.autograd.grad((o.double() ** 2).sum(), leaves[kept])]

    for actual, other, true in zip(measure(fused, low), measure(dense, low), measure(dense, exact), strict=True):
        # the sinks' gradient, too, comes of outputs that the kernel rounds to 16 bits before a sink takes its share
        within_budget(actual.bfloat16(), other, true)
