"""Stage 4, rotate: positions enter queries and keys.

`forward` turns the new q and k before the key is stored; `undo` takes a rotation that came along with a value which is
the key back out of the output. Whether the key is turned before it is stored is `turns_key`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from qklab.attention.positions import Positions, rotate_new
from qklab.ops.members import spread_members

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


class Unrotated(nn.Module):
    """No rotation: learned positions were added in the decoder, or there are none."""

    formula: ClassVar[str] = ""
    turns_key: ClassVar[bool] = True  # False: the stored key is turned whenever it is compared

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.asymmetry = Asymmetry2D(spec) if spec.asymmetry_2d else None

    def forward(self, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """q [B, T, H, D], k [B, T, G, D] → the same shapes."""
        return q, k

    def undo(self, o: Tensor, positions: Positions) -> Tensor:
        """o [B, T, H, D] → the same shape."""
        return o

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        return " ; ".join(filter(None, (cls.formula, Asymmetry2D.formula * spec.asymmetry_2d)))

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return (Asymmetry2D.channels + spec.asymmetry_free_scale) * spec.asymmetry_2d

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        return 0


class Rope(Unrotated):
    """q_i ← R_i q_i, k_j ← R_j k_j: scores depend on j − i."""

    formula = "q_i ← R_i q_i ; k_j ← R_j k_j"

    def forward(self, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        return rotate_new(q, positions), rotate_new(k, positions) if self.turns_key else k


class RopeOnce(Rope):
    """The rotated key is also the value: o_i = R_i⁻¹ Σ_j a_ij R_j k_j = Σ_j a_ij R_{j−i} k_j. One tensor, read once."""

    formula = "q_i ← R_i q_i ; k_j = v_j ← R_j k_j ; o_i ← R_i⁻¹ o_i"

    def undo(self, o: Tensor, positions: Positions) -> Tensor:
        return rotate_new(o, positions, inverse=True)


class RopeOnRead(Rope):
    """The unrotated key is stored and is the value; the key is rotated whenever it is read: o_i = Σ_j a_ij k_j."""

    formula = "q_i ← R_i q_i ; v_j = k_j ; k_j ← R_j k_j on reading"
    turns_key = False


class RopeLatent(Unrotated):
    """MLA: only the last d_rope entries of q [B, T, H, D + d_rope] and of the latent [B, T, 1, d_c + d_rope] turn."""

    formula = "q_rope,i ← R_i q_rope,i ; k_rope,j ← R_j k_rope,j"

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self.rotated_width = spec.rotated_width

    def forward(self, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        return self.rotate_tail(q, positions), self.rotate_tail(k, positions)

    def rotate_tail(self, x: Tensor, positions: Positions) -> Tensor:
        head, tail = x[..., : -self.rotated_width], x[..., -self.rotated_width :]
        return torch.cat([head, rotate_new(tail, positions)], -1)


class Asymmetry2D(nn.Module):
    """Breaks the symmetry of (Q=K,·) scores on non-causal tasks: a Linear(m→1) on (score_ij + P_ij) with P a fixed
    sinusoid over rows and columns of m channels. By linearity it is s·score_ij + w·P_ij with s = Σ w, or a free s.

    The first half of the channels depends on the row i alone. In w·P they add a constant to a row of scores, which the
    softmax cancels, so only the column half is ever computed; the row half still counts towards s.
    """

    channels: ClassVar[int] = 10
    members: int | None = None  # of a stacked model, whose weights have one more axis in front
    formula: ClassVar[str] = "scores ← s·scores + w·P_ij"

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(self.channels))
        self.scale = nn.Parameter(torch.empty(())) if spec.asymmetry_free_scale else None
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        nn.init.constant_(self.weight, 1 / self.channels)  # s = 1: scores start at their usual scale
        if self.scale is not None:
            nn.init.ones_(self.scale)

    def forward(self, q: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """s q, so that scores q·k are scaled by s, and w·P_ij up to a constant per row [B or 1, 1, 1, T]."""
        scale = self.weight.sum(-1) if self.scale is None else self.scale
        q = (q * spread_members(scale, self.members, len(q), 3)).to(q.dtype)
        column, dtype = self.channels // 2, self.weight.dtype
        index = torch.arange(self.channels - column, device=q.device)
        precision = torch.promote_types(dtype, torch.float32)
        frequency = torch.exp(-math.log(10_000.0) * (index - index % 2).to(precision) / len(index))
        angle = positions.new[:, :, None].to(precision) * frequency
        sinusoid = torch.where(index % 2 == 0, angle.sin(), angle.cos())
        weight = spread_members(self.weight[..., column:], self.members, len(q), 1)
        return q, (sinusoid * weight).sum(-1).to(dtype)[:, None, None, :]


class LearnedPositions(nn.Module):
    """x_p ← x_p + e_p with a learned e [context, width]; lives in the decoder, before the first layer."""

    members: int | None = None  # of a stacked model, whose embeddings have one more axis in front

    def __init__(self, context: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(context, width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """x [B, T, width] plus the embeddings of its tokens' positions, which restart with every packed segment."""
        index, weight = positions.new, self.weight
        if self.members is not None:  # member s reads from row s·context on
            first = torch.arange(self.members, device=x.device) * weight.shape[1]
            index, weight = index + spread_members(first, self.members, len(x), 1), weight.flatten(0, 1)
        return x + nn.functional.embedding(index, weight)


POSITIONS = ("rope", "learned", "none")
KV_ROTATIONS: dict[str, type[Rope]] = {"once": RopeOnce, "on-read": RopeOnRead}


def choose_rotation(spec: AttentionSpec) -> type[Unrotated]:
    if spec.position != "rope":
        return Unrotated
    if spec.latent is not None:
        return RopeLatent
    if spec.makes_both_on_reading:
        return RopeOnRead
    return KV_ROTATIONS[spec.kv_rotation] if spec.key_is_value else Rope
