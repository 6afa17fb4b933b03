"""Stage 4, rotate: positions enter queries and keys, and a shared value is read back from the key.

A rotation has three moments: `forward` turns the new q and k before the key is cached, `read` turns what the cache
holds into keys and values, `undo` takes a rotation that came along with the value back out of the output.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from qklab.attention.places import Places
from qklab.ops.rope import Angles, apply_rope, apply_rope_tables

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


def rotate_new(x: Tensor, places: Places, inverse: bool = False) -> Tensor:
    """R_p x [B, T, heads, D] at the new tokens' positions, or R_p⁻¹ x."""
    if places.tables is None or places.tables[0].shape[-1] != x.shape[-1]:
        assert places.angles is not None
        return apply_rope(x, places.angles, inverse)
    return apply_rope_tables(x, places.tables, inverse)


class Unrotated(nn.Module):
    """No rotation: learned positions were added in the decoder, or there are none."""

    formula: ClassVar[str] = ""

    def __init__(self, spec: AttentionSpec):
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """q [B, T, H, D], k [B, T, G, D] → the same shapes."""
        angles, turns_key = self.turning(places)
        if angles is not None:
            q, k = rotate_new(q, places), rotate_new(k, places) if turns_key else k
        return self.scaled(q), k

    def turning(self, places: Places) -> tuple[Angles | None, bool]:
        """The angles by which `forward` turns q, and whether it turns k by them too."""
        return None, False

    def scaled(self, q: Tensor) -> Tensor:
        """What `forward` does to the turned q."""
        return q

    def read(self, k: Tensor, v: Tensor | None, places: Places) -> tuple[Tensor, Tensor]:
        """What is stored [B, S, G, D] → keys and values [B, S, G, D]."""
        return k, (k if v is None else v)

    def undo(self, o: Tensor, places: Places) -> Tensor:
        """o [B, T, H, D] → the same shape."""
        return o

    def bias(self, places: Places) -> Tensor | None:
        """What to add to the scores: [B, 1, T or 1, S], or nothing."""
        return None

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        return cls.formula

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return 0

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        return 0


class Rope(Unrotated):
    """q_i ← R_i q_i, k_j ← R_j k_j: scores depend on j − i."""

    formula = "q_i ← R_i q_i ; k_j ← R_j k_j"

    def turning(self, places: Places) -> tuple[Angles | None, bool]:
        return places.angles, True


class RopeOnce(Rope):
    """The rotated key is also the value: o_i = R_i⁻¹ Σ_j a_ij R_j k_j = Σ_j a_ij R_{j−i} k_j. One tensor, read once."""

    formula = "q_i ← R_i q_i ; k_j = v_j ← R_j k_j ; o_i ← R_i⁻¹ o_i"

    def undo(self, o: Tensor, places: Places) -> Tensor:
        return rotate_new(o, places, inverse=True)


class RopeOnRead(Unrotated):
    """The unrotated key is stored and is the value; the key is rotated whenever it is read: o_i = Σ_j a_ij k_j."""

    formula = "q_i ← R_i q_i ; v_j = k_j ; k_j ← R_j k_j on reading"

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        # differential attention's values are not its keys but pairs of them, and a bias keeps scores out of `decode`
        self.left_to_mix = spec.mix != "differential" and not spec.asymmetry_2d

    def turning(self, places: Places) -> tuple[Angles | None, bool]:
        return places.angles, False

    def read(self, k: Tensor, v: Tensor | None, places: Places) -> tuple[Tensor, Tensor]:
        if self.left_to_mix and places.turns is not None and not self.training:
            return k, k  # attention turns the keys of a cache as it reads them
        assert places.key_angles is not None
        return apply_rope(k, places.key_angles), k


class RopeLatent(Unrotated):
    """MLA: only the last d_rope entries of q [B, T, H, D + d_rope] and of the latent [B, T, 1, d_c + d_rope] turn."""

    formula = "q_rope,i ← R_i q_rope,i ; k_rope,j ← R_j k_rope,j"

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self.rotated_width = spec.rotated_width

    def forward(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        return self.tail_turned(q, places), self.tail_turned(k, places)

    def tail_turned(self, x: Tensor, places: Places) -> Tensor:
        head, tail = x[..., : -self.rotated_width], x[..., -self.rotated_width :]
        return torch.cat([head, rotate_new(tail, places)], -1)


class Asymmetry2D(nn.Module):
    """Breaks the symmetry of (Q=K,·) scores on non-causal tasks: a Linear(m→1) on (score_ij + P_ij) with P a fixed
    sinusoid over rows and columns of m channels. By linearity it is s·score_ij + w·P_ij with s = Σ w, or a free s.

    The first half of the channels depends on the row i alone. In w·P they add a constant to a row of scores, which the
    softmax cancels, so only the column half is ever computed; the row half still counts towards s.
    """

    channels: ClassVar[int] = 10
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

    def scaled(self, q: Tensor) -> Tensor:
        """s q, so that scores q·k are scaled by s."""
        return (q * (self.weight.sum() if self.scale is None else self.scale)).to(q.dtype)

    def bias(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """w·P_ij up to a constant per row: positions [B, T] → [B, 1, 1, T]."""
        column = self.channels // 2
        index = torch.arange(self.channels - column, device=positions.device)
        precision = torch.promote_types(dtype, torch.float32)
        frequency = torch.exp(-math.log(10_000.0) * (index - index % 2).to(precision) / len(index))
        angle = positions[:, :, None].to(precision) * frequency
        sinusoid = torch.where(index % 2 == 0, angle.sin(), angle.cos())
        return (sinusoid * self.weight[column:]).sum(-1).to(dtype)[:, None, None, :]


class Asymmetric(Unrotated):
    """Any rotation, and the 2-D asymmetry on the scores that follow."""

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self.inner = rotation(spec)(spec)
        self.asymmetry = Asymmetry2D(spec)

    def turning(self, places: Places) -> tuple[Angles | None, bool]:
        return self.inner.turning(places)

    def scaled(self, q: Tensor) -> Tensor:
        return self.asymmetry.scaled(q)

    def read(self, k: Tensor, v: Tensor | None, places: Places) -> tuple[Tensor, Tensor]:
        return self.inner.read(k, v, places)

    def undo(self, o: Tensor, places: Places) -> Tensor:
        return self.inner.undo(o, places)

    def bias(self, places: Places) -> Tensor | None:
        return self.asymmetry.bias(places.positions, self.asymmetry.weight.dtype)

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        return " ; ".join(filter(None, (rotation(spec).formula_of(spec), Asymmetry2D.formula)))

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return Asymmetry2D.channels + spec.asymmetry_free_scale


class LearnedPositions(nn.Module):
    """x_p ← x_p + e_p with a learned e [context, width]; lives in the decoder, before the first layer."""

    def __init__(self, context: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(context, width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, places: Places) -> Tensor:
        """Embeddings [B or 1, T, width] of the tokens' positions, which restart with every packed segment."""
        return nn.functional.embedding(places.positions, self.weight)


POSITIONS = ("rope", "learned", "none")
KV_ROTATIONS: dict[str, type[Unrotated]] = {"once": RopeOnce, "on-read": RopeOnRead}


def rotation(spec: AttentionSpec) -> type[Unrotated]:
    """The rotation itself, without the 2-D asymmetry that may stand on top of it."""
    if spec.position != "rope":
        return Unrotated
    if spec.latent is not None:
        return RopeLatent
    return KV_ROTATIONS[spec.kv_rotation] if spec.key_is_value else Rope
