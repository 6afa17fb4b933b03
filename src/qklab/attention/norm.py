"""Stage 3, normalise: RMSNorm on queries and keys, after coupling and before rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qklab.ops.norm import rms_norm

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


class QKNorm(nn.Module):
    """u ↦ g ⊙ u / √(mean(u²) + eps) over D, for q [B, T, H, D] and k [B, T, G, D]; gains [D] shared by all heads.

    Where the key is also the value only the query has a gain: a gain does not commute with RoPE, so the key's could not
    be taken back out of the value.
    """

    formula = "q ← g_q ⊙ q/rms(q) ; k ← g_k ⊙ k/rms(k)"
    formula_shared = "q ← g_q ⊙ q/rms(q) ; k ← k/rms(k)"

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.eps = spec.norm_eps
        self.query_gain = nn.Parameter(torch.ones(spec.head_width))
        self.key_gain = None if spec.key_is_value else nn.Parameter(torch.ones(spec.head_width))

    def reset(self, generator: torch.Generator | None = None) -> None:
        for gain in self.parameters():
            nn.init.ones_(gain)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.normalised(q, self.query_gain), self.normalised(k, self.key_gain)

    def normalised(self, u: Tensor, gain: Tensor | None) -> Tensor:
        return rms_norm(u, gain, self.eps)

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return spec.head_width * (1 if spec.key_is_value else 2)

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        return 0


NORMS: dict[str, type[QKNorm] | None] = {"none": None, "qk": QKNorm}
