"""Softmax attention where torch's own function does not go: with sinks in the denominator, or over a window."""

import torch
import torch.nn.functional as F
from torch import Tensor

from qklab.ops.dispatch import log_choice
from qklab.ops.softmax import reference
from qklab.ops.softmax.fused import attend_fused, find_fused_obstacle


def attend_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """o_i = Σ_j e^{l_ij} v_j / (e^{s_h} + Σ_j e^{l_ij}), l = scale · q kᵀ: q [B, T, H, D], k [B, T, G, D],
    v [B, T, G, E] → [B, T, H, E], by one of torch's fused kernels; None where there is none, and a log says once why.

    `window` hides what is that many tokens away or further; `sinks` s is [H], or [B, H] where rows differ.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (tensor.to(torch.get_autocast_dtype(q.device.type)) for tensor in (q, k, v))
    obstacle = find_fused_obstacle(q, window)
    if obstacle is not None:
        log_choice("softmax attention", "torch's operations", obstacle)
        return None
    width = -8 * (-max(q.shape[-1], v.shape[-1]) // 8)  # kernels want keys and values of one width, in eights
    padded = (F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in (q, k, v))
    return attend_fused(*padded, sinks, scale, causal, window)[0][..., : v.shape[-1]]


def attend_densely(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool, sinks: Tensor | None
) -> Tensor:
    """The same over the pairs in mask [B or 1, 1, T, S] (`causal`: those of a square triangle): q [B, T, H, ·] →
    [B, T, H, ·]. With sinks all scores exist at once."""
    if sinks is None:
        heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        o = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        return o.transpose(1, 2)
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    return reference.attend_softmax(q, k, v, scale, mask, sinks)
