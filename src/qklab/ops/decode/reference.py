"""Reference of decoding: torch only, all scores at once."""

import torch
from torch import Tensor

from qklab.ops.rope import Angles, apply_rope


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    angles: Angles | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over the slots each query sees: q [B, T, H, D], k, v [B, S, G, ·] → [B, T, H, ·].

    Scores and softmax are in float32 (float64 for float64 queries). A query that sees nothing gives 0.
    """
    (T, H), (S, G) = q.shape[1:3], k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(q.dtype), v.to(q.dtype)
    if angles is not None:
        k = rotate_cached(k, angles, starts)
    scores = torch.einsum("btgrd,bsgd->bgrts", q.unflatten(2, (G, H // G)).to(wide), k.to(wide)) * scale
    seen = find_visible_slots(T, S, starts, lengths, q.device, window)  # [B or 1, 1, T, S]
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    weights = scores.softmax(-1)
    if sinks is not None:
        own = sinks.to(wide).unflatten(-1, (G, H // G))[..., None]  # [G, H/G, 1] or [B, G, H/G, 1]
        weights = weights * torch.sigmoid(scores.logsumexp(-1) - own)[..., None]
    weights = weights.masked_fill(~seen.any(-1)[:, :, None, :, None], 0).to(q.dtype)
    # what nobody sees may be anything, even no number
    v = v.masked_fill(~seen.any(2)[:, 0, :, None, None], 0)
    return torch.einsum("bgrts,bsgd->btgrd", weights, v).flatten(2, 3)


def find_visible_slots(
    queries: int,
    slots: int,
    starts: Tensor | None,
    lengths: Tensor | None,
    device: torch.device,
    window: int | None = None,
) -> Tensor:
    """Which slots each query sees: [B or 1, 1, T, S].

    The queries stand in the last slots of their row, which has `lengths` of them (all S by default). Each sees the
    slots from `starts` up to its own. With a window, `lengths` counts the tokens so far, of which number p stands in
    slot p mod S, and it sees only the last ones.
    """
    slot = torch.arange(slots, device=device)
    if window is not None:
        length = torch.tensor([slots], device=device) if lengths is None else lengths
        last = length[:, None] - 1
        number = (last - (last - slot) % max(slots, 1))[:, None]  # [B or 1, 1, S], below 0 where nothing stands yet
        own = (length[:, None] - queries + torch.arange(queries, device=device))[:, :, None]
        first = 0 if starts is None else starts.clamp(min=0)[:, None, None]
        return ((number <= own) & (number > own - window) & (number >= first))[:, None]
    if lengths is None:
        own = slot[None, slots - queries :]  # [1, T]
    else:
        own = lengths[:, None] - queries + torch.arange(queries, device=device)  # [B, T]
    seen = slot <= own[:, :, None]  # [B or 1, T, S]
    if starts is not None:
        seen = seen & (slot >= starts[:, None, None])
    return seen[:, None]


def rotate_cached(k: Tensor, angles: Angles, starts: Tensor | None) -> Tensor:
    """R_p k for the k [B, S, G, D] of a cache, p counted from its row's start; angles are tables [positions, r/2]."""
    slot = torch.arange(k.shape[1], device=k.device)
    position = slot[None] if starts is None else (slot - starts[:, None]).clamp(min=0)
    cos, sin = (table[position][:, :, None] for table in angles)  # [B or 1, S, 1, r/2]
    return apply_rope(k, (cos, sin))
