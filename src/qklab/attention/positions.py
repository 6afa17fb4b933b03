"""Where the tokens of one call stand: their slots, their positions in their own texts, and the angles that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qklab.ops.rope import Angles, apply_rope, apply_rope_tables, rope_angles, rope_tables

if TYPE_CHECKING:
    from qklab.attention.cache import Cache
    from qklab.attention.spec import AttentionSpec


class TokenSlots(NamedTuple):
    """T new tokens among the S of their row that a call knows of (S = T without a cache)."""

    new: Tensor  # [T], where the new tokens stand
    every: Tensor  # [S]
    texts: Tensor | None = None  # [B, T], to which of the packed texts of its row a token belongs
    starts: Tensor | None = None  # [B], where a row's text starts after its left padding
    lengths: Tensor | None = None  # [B], how many tokens there are, where not all slots are filled or some went round
    first: int | Tensor = 0  # which token the first slot holds
    cached: bool = False  # whether the new tokens follow others, which a cache holds


def find_slots(x: Tensor, segments: Tensor | None, cache: Cache | None) -> TokenSlots:
    """TokenSlots of the tokens x [B, T, …] that follow what `cache` holds, or that are packed as `segments` [B, T].

    A text is a run of equal segment ids, so that a later one may use an id again.
    """
    check_packing(x.shape[:2], segments, cache)
    if cache is not None:
        new, every, filled, first = cache.slots(x.shape[1])
        lengths = None if filled is None else filled.repeat(x.shape[0])
        return TokenSlots(new, every, None, cache.left_padding, lengths, first, cache.started)
    every = torch.arange(x.shape[1], device=x.device)
    return TokenSlots(every, every, None if segments is None else text_starts(segments).cumsum(1))


def text_starts(segments: Tensor) -> Tensor:
    """Where a run of equal ids starts: [B, T]."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return starts


def check_packing(shape: torch.Size, segments: Tensor | None, cache: Cache | None) -> None:
    if segments is None:
        return
    if cache is not None:
        raise ValueError("segments and a cache exclude each other; decode packed texts as separate rows.")
    if not isinstance(segments, Tensor) or segments.shape != shape or segments.is_floating_point():
        came = f"{segments.dtype} {list(segments.shape)}" if isinstance(segments, Tensor) else type(segments).__name__
        raise ValueError(f"segments must be a tensor of whole numbers of shape {list(shape)}, but {came} came.")


class Positions(NamedTuple):
    """Places of the T new tokens in their own texts, from 0, and what RoPE turns them by."""

    new: Tensor  # [B or 1, T]
    angles: Angles | None = None  # cos, sin [B or 1, T, 1, r/2]
    tables: Angles | None = None  # the same for `apply_rope_tables`, where a cache is read step by step
    every: Tensor | None = None  # [B or 1, S], of all tokens, where cached keys are turned on reading
    every_table: Angles | None = None  # cos, sin [S, r/2] by position, there
    every_angles: Angles | None = None  # cos, sin [B or 1, S, 1, r/2] of all tokens instead, where they are a window's


def find_positions(spec: AttentionSpec, slots: TokenSlots, dtype: torch.dtype) -> Positions:
    """Positions restart with every packed text, and start after the left padding."""
    if slots.texts is not None:
        starts = text_starts(slots.texts)
        new = slots.new - torch.where(starts, slots.new, 0).cummax(1).values
    else:
        new = count_from(slots.starts, slots.new)
    if not spec.rotated_width:
        return Positions(new)

    angles = make_angles(spec, new, dtype)
    if not slots.cached:
        return Positions(new, angles)
    tables = None if torch.compiler.is_compiling() else rope_tables(angles)
    if spec.rotation.turns_key:
        return Positions(new, angles, tables)
    if spec.window is not None:
        every = count_from(slots.starts, slots.every)
        return Positions(new, angles, tables, every_angles=make_angles(spec, every, dtype))
    cos, sin = make_angles(spec, slots.every[None], dtype)
    return Positions(new, angles, tables, count_from(slots.starts, slots.every), (cos[0, :, 0], sin[0, :, 0]))


def make_angles(spec: AttentionSpec, positions: Tensor, dtype: torch.dtype) -> Angles:
    """What RoPE turns tokens of this precision by at positions [B or 1, ·]."""
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    return rope_angles(positions, spec.rotated_width, spec.rope_base, precision)


def count_from(starts: Tensor | None, slots: Tensor) -> Tensor:
    """Positions [B or 1, ·] of slots [·]; what stands before the start is of no meaning."""
    return slots[None] if starts is None else (slots - starts[:, None]).clamp(min=0)


def rotate_new(x: Tensor, positions: Positions, inverse: bool = False) -> Tensor:
    """R_p x [B, T, heads, D] at the new tokens' positions, or R_p⁻¹ x."""
    if positions.tables is not None and positions.tables[0].shape[-1] == x.shape[-1]:
        return apply_rope_tables(x, positions.tables, inverse)
    assert positions.angles is not None
    return apply_rope(x, positions.angles, inverse)


def rotate_every(k: Tensor, positions: Positions) -> Tensor:
    """R_p k [B, S, heads, D] at the positions of all tokens."""
    if positions.every_angles is not None:
        return apply_rope(k, positions.every_angles)
    if positions.every is None or positions.every_table is None:
        return rotate_new(k, positions)
    cos, sin = (table[positions.every][:, :, None] for table in positions.every_table)
    return apply_rope(k, (cos, sin))
