"""Where the tokens of one call stand: their positions, who may attend to whom, and the RoPE angles.

A decoder computes this once and hands it to all its layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qklab.ops.rope import Angles, rope_angles, rope_tables

if TYPE_CHECKING:
    from qklab.attention.cache import Cache
    from qklab.attention.spec import AttentionSpec


class Places(NamedTuple):
    """T new tokens among the S tokens they may see (S = T without a cache)."""

    positions: Tensor  # [B or 1, T], each token's place in its own text, from 0
    mask: Tensor | None  # [B or 1, 1, T, S], True where a query may attend; None: see `causal`
    causal: bool  # without a mask: the plain causal triangle (True) or everything (False)
    angles: Angles | None  # cos, sin [B or 1, T, 1, rotated/2] of the new tokens
    key_angles: Angles | None  # of all S tokens, where keys are rotated on reading
    blocks: Any = None  # the mask of packed texts as flex_attention's BlockMask, inside a graph compiled for a GPU
    cached: bool = False  # the new tokens follow others, which a cache holds
    starts: Tensor | None = None  # [B], where a cached row's text starts after its left padding
    lengths: Tensor | None = None  # [B], how many of the S slots of a static cache are filled
    turns: Angles | None = None  # cos, sin [S, rotated/2] by position, where the keys of a cache turn on reading
    tables: Angles | None = None  # (cos, cos) and (−sin, sin) of the new tokens, where a cache is read step by step


def locate(spec: AttentionSpec, x: Tensor, segments: Tensor | None, cache: Cache | None) -> Places:
    """Places of the tokens x [B, T, …] that follow what `cache` holds, or that are packed as `segments` [B, T].

    A segment is a run of equal ids; positions restart with it and attention never leaves it. No real token sees the
    tokens of a cache's left padding; what these see themselves is of no meaning.
    """
    tokens, blocks, lengths = x.shape[1], None, None
    started = cache is not None and cache.started
    if cache is not None:
        own, slots, filled = cache.slots(tokens)
        lengths = None if filled is None else filled.repeat(x.shape[0])
    else:
        own = slots = torch.arange(tokens, device=x.device)
    if segments is not None:
        positions, mask = packed(segments, slots, spec.causal)
        if x.is_cuda and torch.compiler.is_compiling() and x.dtype != torch.float64 and spec.head_width >= 16:
            blocks = packed_blocks(segments, spec.causal)
        key_positions, causal = positions, False
    elif cache is not None and cache.left_padding is not None:
        padding = cache.left_padding[:, None]
        key_positions = (slots - padding).clamp(min=0)
        positions = (own - padding).clamp(min=0)
        mask = ((own >= padding)[:, :, None] == (slots >= padding)[:, None, :]) & (own[:, None] >= slots)
        mask, causal = mask[:, None], False
    else:
        key_positions, positions = slots[None], own[None]
        # SDPA's own triangle is aligned top-left: right for a first chunk, wrong after a cached prefix
        mask = (own[:, None] >= slots)[None, None] if spec.causal and started and tokens > 1 else None
        causal = spec.causal and not started
    angles = key_angles = turns = tables = None
    if spec.rotated_width:
        precision = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles = rope_angles(positions, spec.rotated_width, spec.rope_base, precision)
        if started and not torch.compiler.is_compiling():
            tables = rope_tables(angles)
        if spec.kv_rotation == "on-read":
            key_angles = rope_angles(key_positions, spec.rotated_width, spec.rope_base, precision)
            if started:
                cos, sin = rope_angles(slots[None], spec.rotated_width, spec.rope_base, precision)
                turns = cos[0, :, 0], sin[0, :, 0]
    starts = None if cache is None else cache.left_padding
    return Places(positions, mask, causal, angles, key_angles, blocks, started, starts, lengths, turns, tables)


def triangle(slots: Tensor, before: int) -> Tensor:
    """[T, S]: the query in slot i sees slots up to i."""
    return slots[before:, None] >= slots[None, :]


def packed(segments: Tensor, slots: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Positions [B, T] within each run of equal ids, and the mask [B, 1, T, T] that keeps attention inside the runs."""
    starts, runs = runs_of(segments)
    first = torch.where(starts, slots, 0).cummax(1).values
    mask = runs[:, :, None] == runs[:, None, :]
    if causal:
        mask = mask & triangle(slots, 0)
    return slots - first, mask[:, None]


def runs_of(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Where a run of equal ids starts, and the number of each token's run: [B, T] each."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return starts, starts.cumsum(1)


def packed_blocks(segments: Tensor, causal: bool) -> Any:
    """The mask of `packed` as flex_attention's BlockMask, which skips blocks nobody attends to."""
    from torch.nn.attention.flex_attention import create_block_mask

    _, runs = runs_of(segments)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = runs[b, q] == runs[b, k]
        return same & (q >= k) if causal else same

    B, T = segments.shape
    return create_block_mask(visible, B, None, T, T, device=segments.device)
