"""Who may see whom: one rule, and how it is told to each way of computing attention.

`scaled_dot_product_attention` takes a mask or its own triangle, `flex_attention` blocks, `decode` the range of slots
that a row has filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qklab.attention.positions import TokenSlots
    from qklab.attention.spec import AttentionSpec


class Visibility(NamedTuple):
    """Which of S slots each of T new tokens may attend to."""

    slots: TokenSlots
    causal: bool  # a token sees only itself and earlier ones
    window: int | None = None  # it sees those less far away than this; None: all
    mask: Tensor | None = None  # for SDPA: [B or 1, 1, T, S]; None where all see all, or its own triangle will do
    triangle: bool = False  # for SDPA: is_causal
    blocks: Any = None  # for Flex: a BlockMask, inside a graph compiled for a GPU
    function: Callable[..., Tensor] | None = None  # (q, k, v, scale, sinks) → outputs, instead of all these


def find_visibility(spec: AttentionSpec, slots: TokenSlots, x: Tensor) -> Visibility:
    """A text that is packed or padded sees only itself; what padding sees is of no meaning."""
    visibility = state_visibility(spec, slots, x)
    if slots.cached:
        return visibility  # `decode` takes the range
    if slots.texts is not None and takes_blocks(spec, x):
        return visibility._replace(blocks=render_blocks(visibility))
    if visibility.window is not None:
        return visibility  # `attend` goes along the diagonal
    if slots.texts is not None or slots.starts is not None:
        return visibility._replace(mask=render_mask(visibility))
    return visibility._replace(triangle=spec.causal)


def state_visibility(spec: AttentionSpec, slots: TokenSlots, x: Tensor) -> Visibility:
    """The rule alone; a window is left out where it hides none of the tokens x [B, T, …] from another."""
    hides = spec.window is not None and (slots.cached or spec.window < x.shape[1])
    return Visibility(slots, spec.causal, spec.window if hides else None)


def may_see(visibility: Visibility, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether the token in slot `query` of a row attends to slot `key`, for indices that broadcast: the rule."""
    slots = visibility.slots
    seen = query >= key
    if not visibility.causal:
        seen = torch.ones_like(seen)
    if visibility.window is not None:
        seen = seen & ((query - key).abs() < visibility.window)
    if slots.texts is not None:
        seen = seen & (slots.texts[row, query] == slots.texts[row, key])
    if slots.starts is not None:
        start = slots.starts[row]
        seen = seen & ((query >= start) == (key >= start))
    return seen


def render_mask(visibility: Visibility) -> Tensor:
    """The rule for all pairs: [B or 1, 1, T, S], True where a query may attend."""
    slots = visibility.slots
    of_rows = slots.texts if slots.texts is not None else slots.starts
    rows = torch.arange(1 if of_rows is None else len(of_rows), device=slots.new.device)
    seen = may_see(visibility, rows[:, None, None], slots.new[:, None], slots.every)
    return seen.expand(len(rows), -1, -1)[:, None]


def split_band(visibility: Visibility, tokens: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries a few at a time, the keys that any of them sees, and the rule for these: so much of the square as lies
    along its diagonal."""
    window = visibility.window
    assert window is not None
    step = max(window, 128)
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        rows = slice(start, stop)
        keys = slice(max(0, start - window + 1), stop if visibility.causal else min(tokens, stop + window - 1))
        slots = visibility.slots._replace(new=visibility.slots.new[rows], every=visibility.slots.every[keys])
        yield rows, keys, render_mask(visibility._replace(slots=slots))


def takes_blocks(spec: AttentionSpec, x: Tensor) -> bool:
    """Whether packed texts x [B, T, …] go through `flex_attention`, which skips blocks that nobody attends to."""
    return x.is_cuda and torch.compiler.is_compiling() and x.dtype != torch.float64 and spec.head_width >= 16


def render_blocks(visibility: Visibility) -> Any:
    """The rule as flex_attention's BlockMask, for packed texts."""
    from torch.nn.attention.flex_attention import create_block_mask

    texts = visibility.slots.texts
    assert texts is not None
    (B, T), device = texts.shape, texts.device
    return create_block_mask(lambda b, h, q, k: may_see(visibility, b, q, k), B, None, T, T, device=device)


def render_range(visibility: Visibility) -> dict[str, Any]:
    """The rule as `decode` takes it."""
    slots = visibility.slots
    starts = None if slots.starts is None else slots.starts - slots.first
    return {"starts": starts, "lengths": slots.lengths, "window": visibility.window}
