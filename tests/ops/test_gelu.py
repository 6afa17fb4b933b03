"""GELU of 16-bit numbers is as close to the truth as torch's own."""

import pytest
import torch
import torch.nn.functional as F

from qklab.ops.gelu import distribution, gelu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_within_one_rounding_of_torchs_own(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    x = x[x.isfinite() & (x.abs() < 100)]
    exact = x.double() * (0.5 * torch.special.erfc(-x.double() / 2**0.5))
    ours, theirs = gelu(x).double(), F.gelu(x).double()
    rounding = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
    error, other = (ours - exact).abs(), (theirs - exact).abs()
    assert (error <= 2 * other + rounding).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_is_the_derivative(dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, 20_001).to(dtype).requires_grad_()
    gelu(x).backward(torch.ones_like(x))
    exact = x.detach().double().requires_grad_()
    F.gelu(exact).backward(torch.ones_like(exact))
    assert x.grad is not None
    assert exact.grad is not None
    assert (x.grad.double() - exact.grad).abs().max() <= torch.finfo(dtype).eps


def test_the_distribution_is_exact_to_its_stated_error() -> None:
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    phi, bell = distribution(x)
    exact = 0.5 * torch.special.erfc(-x / 2**0.5)
    assert ((phi - exact).abs() / exact).max() < 6e-6
    assert torch.equal(bell, torch.exp(-0.5 * x * x))


def test_wider_numbers_take_torchs_own() -> None:
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gelu(x), F.gelu(x))
    assert torch.autograd.gradcheck(gelu, x)


def test_it_compiles_whole() -> None:
    x = torch.randn(64).bfloat16().requires_grad_()
    compiled = torch.compile(gelu, fullgraph=True, backend="aot_eager")
    first = torch.autograd.grad(compiled(x).sum(), x)[0]
    assert torch.equal(first, torch.autograd.grad(gelu(x).sum(), x)[0])
