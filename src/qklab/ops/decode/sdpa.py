"""Decoding through scaled_dot_product_attention."""

import contextlib

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qklab.ops.decode.reference import find_visible_slots, rotate_cached
from qklab.ops.rope import Angles


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    angles: Angles | None = None,
    window: int | None = None,
    order: list[SDPBackend] | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over the slots each query sees: q [B, T, H, D], k, v [B, S, G, ·] → [B, T, H, ·].

    Keys and values are read where they lie: [B, S, G, ·] seen as [B, G, S, ·]. `order` names the backends to
    try instead of torch's own.
    """
    T, G = q.shape[1], k.shape[2]
    shared = v is k
    k = k.to(q.dtype)
    v = k if shared else v.to(q.dtype)
    if angles is not None:
        k = rotate_cached(k, angles, starts)
    mask = None
    if T > 1 or starts is not None or lengths is not None or (window is not None and window < k.shape[1]):
        mask = find_visible_slots(T, k.shape[1], starts, lengths, q.device, window)
    # a single query's heads of one group are as good as that many queries of one head, which every backend takes;
    # cuDNN and flash take groups themselves, and cuDNN is the faster for it
    packed = T == 1 and not (q.is_cuda and mask is None and k.shape[3] == v.shape[3] <= 128)
    grouped = not packed and q.shape[2] != G
    q = q.unflatten(2, (G, -1))[:, 0] if packed else q.transpose(1, 2)  # [B, G, H/G, D] or [B, H, T, D]
    with contextlib.nullcontext() if order is None else sdpa_kernel(order, set_priority=True):
        o = F.scaled_dot_product_attention(
            q,
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            scale=scale,
            enable_gqa=grouped,
        )
    o = o.flatten(1, 2)[:, None] if packed else o.transpose(1, 2)
    if mask is not None and (starts is not None or lengths is not None):  # then a query may see nothing
        o = o.masked_fill(~mask.any(-1).transpose(1, 2)[..., None], 0)
    return o
