"""GELU, at the speed of memory where numbers have 16 bits.

gelu(x) = x Φ(x). torch computes Φ from an error function that costs more than reading and writing the numbers does. For
16-bit inputs Φ comes from one exponential, one reciprocal and a polynomial:

    Φ(−|x|) = ½ e^(−x²/2) P(t),  t = 1/(1 + 0.43 |x|/√2),  P(t) = Σ_k c_k t^k, k = 1 … 6

with the c_k fitted to e^(z²) erfc(z) on 0 ≤ z ≤ 9.5, relative error 5.2e-6, a thousandth of a bf16 rounding; the
derivative Φ(x) + x e^(−x²/2)/√(2π) uses the same exponential. Wider inputs take torch's own. In the 51M model's step on
an H200 this takes 3.4 ms where torch's takes 4.1.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLOPE = 0.43 / math.sqrt(2)
COEFFICIENTS = (0.24325826, 0.2325028, 0.2813951, -0.01084441, 0.40709789, -0.15340454)


def gelu(x: Tensor) -> Tensor:
    """x Φ(x), elementwise."""
    return Gelu16.apply(x) if x.dtype in (torch.bfloat16, torch.float16) else F.gelu(x)


def distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """Φ(x) and e^(−x²/2), in float32."""
    t = 1 / (1 + SLOPE * x.abs())
    bell = torch.exp(-0.5 * x * x)
    polynomial = COEFFICIENTS[-1] * t
    for coefficient in reversed(COEFFICIENTS[:-1]):
        polynomial = (polynomial + coefficient) * t
    tail = 0.5 * polynomial * bell
    return torch.where(x > 0, 1 - tail, tail), bell


class Gelu16(torch.autograd.Function):
    """Keeps the input alone for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * distribution(wide)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        phi, bell = distribution(wide)
        slope = phi + wide * bell * (1 / math.sqrt(2 * math.pi))
        return (gradients[0].float() * slope).to(x.dtype)
