"""The one RoPE in torch: angles from positions, and the rotation R_p in the forms that are needed.

R_p turns the pairs (x_i, x_{i+r/2}) of the first r entries of x [..., D] by p · base^(−2i/r); its inverse turns back. A
kernel may have a copy of its own, which is tested against this one.
"""

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]  # cos, sin: [..., r/2], of axes that broadcast with x's


@torch.library.custom_op("qklab::rope_angles", mutates_args=())
def rope_angles(positions: Tensor, rotated: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of p · base^(−2i/rotated): positions [B, T] → two [B, T, 1, rotated/2].

    An operator of its own, which compilers do not look into: they would fuse these few numbers into every kernel that
    uses them and compute powers, sines and cosines anew for every element of every layer.
    """
    exponent = torch.arange(0, rotated, 2, device=positions.device, dtype=dtype) / rotated
    angles = positions.to(dtype)[:, :, None, None] * (1.0 / base**exponent)
    return angles.cos(), angles.sin()


@rope_angles.register_fake
def _(positions: Tensor, rotated: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, 1, rotated // 2)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


def apply_rope(x: Tensor, angles: Angles, inverse: bool = False) -> Tensor:
    """R_p x [..., D], or R_p⁻¹ x: computed in the wider of x's and the angles' precision, rounded to x's."""
    cos, sin = angles[0], -angles[1] if inverse else angles[1]
    rotated = 2 * cos.shape[-1]
    a, b = x[..., :rotated].unflatten(-1, (2, -1)).unbind(-2)
    y = torch.stack([a * cos - b * sin, b * cos + a * sin], -2).flatten(-2).to(x.dtype)
    return y if rotated == x.shape[-1] else torch.cat([y, x[..., rotated:]], -1)


def rope_tables(angles: Angles) -> Angles:
    """(cos, cos) and (−sin, sin): [..., r], as `apply_rope_tables` takes them."""
    cos, sin = angles
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def apply_rope_tables(x: Tensor, tables: Angles, inverse: bool = False) -> Tensor:
    """`apply_rope` where all D entries turn, as x ⊙ (cos, cos) + swapped(x) ⊙ (−sin, sin).

    Three operations instead of eight: step by step through a cache, the host's time for each of them counts.
    """
    cos, sin = tables
    y = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, value=-1.0 if inverse else 1.0)
    return y.to(x.dtype)


def apply_rope_without_gradient(x: Tensor, angles: Angles) -> Tensor:
    """`apply_rope` for angles of x's dtype, with one tensor of x's size written instead of five.

    A step of decoding that turns the whole cache is bound by memory.
    """
    cos, sin = angles
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half : 2 * half]
    y = torch.empty_like(x)
    y[..., 2 * half :] = x[..., 2 * half :]
    torch.mul(low, cos, out=y[..., :half]).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=y[..., half : 2 * half]).addcmul_(low, sin)
    return y
