"""Stage 3, normalise: RMSNorm on queries and keys, after coupling and before rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from qklab import register
from qklab.ops.coupling import Norm
from qklab.ops.norm import rms_norm

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


class Normalisation(nn.Module):
    """What is done to queries and keys one by one; as it is, nothing."""

    label: ClassVar[str | None] = None  # in the names of specs; None: the name it is registered under
    fuses: ClassVar[bool] = False  # whether `operand` says all that `forward` does

    def __init__(self, spec: AttentionSpec):
        super().__init__()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, T, H, D], k [B, T, G, D] → the same shapes."""
        return q, k

    def normalise_key(self, k: Tensor) -> Tensor:
        """k [B, S, G, D] alone, where keys are stored before this and made on reading."""
        return self(k, k)[1]

    def operand(self) -> Norm | None:
        """This norm for the operation that couples, normalises and rotates in one pass."""
        return None

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        return ""

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return 0

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        return 0


@register.norm("none")
class Unnormalised(Normalisation):
    """Queries and keys as they are."""

    label = ""
    fuses = True


@register.norm("qk")
class QKNorm(Normalisation):
    """u ↦ g ⊙ u / √(mean(u²) + eps) over D, for q [B, T, H, D] and k [B, T, G, D]; gains [D] shared by all heads.

    Where the key is also the value only the query has a gain: a gain does not commute with RoPE, so the key's could not
    be taken back out of the value. With a norm of its own the value is the key before both, and the key has its gain.
    """

    label = "qk-norm"
    fuses = True
    members: int | None = None  # of a stacked model, whose gains have one more axis in front

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self.eps = spec.norm_eps
        self.query_gain = nn.Parameter(torch.ones(spec.head_width))
        self.key_gain = nn.Parameter(torch.ones(spec.head_width)) if self.gains_key(spec) else None

    @staticmethod
    def gains_key(spec: AttentionSpec) -> bool:
        return spec.value_norm or not spec.key_is_value

    def reset(self, generator: torch.Generator | None = None) -> None:
        for gain in self.parameters():
            nn.init.ones_(gain)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(q, self.query_gain, self.eps), rms_norm(k, self.key_gain, self.eps)

    def operand(self) -> Norm:
        return Norm(self.eps, self.query_gain, self.key_gain)

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        return f"q ← g_q ⊙ q/rms(q) ; k ← {'g_k ⊙ ' if cls.gains_key(spec) else ''}k/rms(k)"

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return spec.head_width * (1 + cls.gains_key(spec))
