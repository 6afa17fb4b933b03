"""Reference of softmax attention: torch only, all scores at once."""

import torch
from torch import Tensor


def attend_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Σ_j a_ij v_j, a_ij = e^{l_ij} / (e^{s_h} + Σ_j e^{l_ij}), over the pairs in mask [B or 1, 1, T, S],
    or l with a mask of numbers added: q [B, T, H, D], k, v [B, S, G, ·], sinks [H] or [B, H] → [B, T, H, ·]."""
    groups = q.shape[2] // k.shape[2]
    k, v = (tensor.repeat_interleave(groups, 2).transpose(1, 2) for tensor in (k, v))
    scores = (q.transpose(1, 2) @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights * torch.sigmoid(scores.logsumexp(-1) - sinks[..., None])[..., None]
    return (weights.to(v.dtype) @ v).transpose(1, 2)
