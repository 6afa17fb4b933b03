"""What is done to the heads' outputs between stage 5 and the output projection: exclusion and gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


def exclude_own_value(o: Tensor, v: Tensor) -> Tensor:
    """XSA: o_i − (o_i·v_i/‖v_i‖²) v_i, the output without its part along the token's own value.

    o [B, T, H, D] or [B, T, H/2, 2D], and the values of the same tokens [B, T, G, ·], which H/G heads share. A value of
    no length has no direction, and takes nothing.
    """
    wide = torch.promote_types(o.dtype, torch.float32)
    own = F.normalize(v.to(wide), dim=-1).unsqueeze(3)  # [B, T, G, 1, ·]
    heads = o.to(wide).unflatten(2, (v.shape[2], -1))
    return (heads - (heads * own).sum(-1, keepdim=True) * own).flatten(2, 3).to(o.dtype)


class Gate(nn.Module):
    """o ← σ(W_g x) ⊙ o with W_g: width → H·D, or one number for each head (arXiv 2505.06708)."""

    formulas: ClassVar[dict[str, str]] = {
        "element": "y = W_o (σ(W_g x) ⊙ o)",
        "head": "y = W_o (σ(w_h·x) o_h)_h",
    }

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.weigh = nn.Linear(spec.width, self.rows(spec), bias=spec.bias)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """o [B, T, H, D], x [B, T, width] → [B, T, H, D]."""
        return o * torch.sigmoid(self.weigh(x)).unflatten(-1, (o.shape[2], -1))

    @staticmethod
    def rows(spec: AttentionSpec) -> int:
        return {"none": 0, "element": spec.heads * spec.head_width, "head": spec.heads}[spec.gate]

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return (spec.width + spec.bias) * cls.rows(spec)

    @classmethod
    def flops(cls, spec: AttentionSpec) -> int:
        return 2 * spec.width * cls.rows(spec)


GATES = ("none", *Gate.formulas)
