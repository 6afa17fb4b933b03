"""Differential attention as calls of plain attention (README.md beside this counts why it has no kernel of its own)."""

from collections.abc import Callable

from torch import Tensor

from qklab.ops.members import spread_members

# q [B, T, h, D], k [B, S, g, D], v [B, S, g, E], and sinks [h] or [B, h] where there are any → [B, T, h, E]
Attend = Callable[..., Tensor]


def differential(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, attend: Attend, sinks: Tensor | None = None
) -> Tensor:
    """v1: (A₁ − λ A₂) [v₁;v₂], A_i = softmax(s q_i k_iᵀ): q [B, T, H, D], k, v [B, S, G, D], λ → [B, T, H/2, 2D].

    Key/value heads 2g and 2g+1 form a pair; so do the r-th query heads of their two groups. `attend` is plain
    attention, called once per map with values of width 2D: keys and values are views of what came, never copies. λ may
    be [S], one for each of the S members that own the B rows one after the other. Of `sinks`, [H] or [B, H], each call
    gets those of its query heads.
    """
    if k.shape[2] % 2 or q.shape[2] % k.shape[2] or k.shape != v.shape:
        raise ValueError(
            "differential attention needs an even number G of key heads dividing H, and values like keys, "
            f"but q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} came."
        )
    if weight.dim() > 1 or (weight.dim() and len(q) % max(1, len(weight))):
        raise ValueError(
            f"λ must be a number, or [members] dividing the {len(q)} rows of q, but {list(weight.shape)} came."
        )
    pairs, groups = k.shape[2] // 2, q.shape[2] // k.shape[2]
    queries = q.unflatten(2, (pairs, 2, groups)).unbind(3)  # [B, T, G/2, H/G, D] each
    keys = k.unflatten(2, (pairs, 2)).unbind(3)  # [B, S, G/2, D] each
    value = v.unflatten(2, (pairs, 2)).flatten(3)  # [B, S, G/2, 2D]
    own = [()] * 2 if sinks is None else [(s.flatten(-2),) for s in sinks.unflatten(-1, (pairs, 2, groups)).unbind(-2)]
    first, second = (
        attend(query.flatten(2, 3), key, value, *sink) for query, key, sink in zip(queries, keys, own, strict=True)
    )
    weight = spread_members(weight, len(weight) if weight.dim() else None, len(q), 3)
    return first - (weight * second).to(first.dtype)


def differential_v2(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, attend: Attend) -> Tensor:
    """v2: o_h = (A_2h − λ_h A_2h+1) v: q [B, T, 2H, D], k, v [B, S, G, D], λ [B, T, H] → [B, T, H, D].

    One call of plain attention with all 2H query heads, then one subtraction.
    """
    if q.shape[2] % (2 * k.shape[2]) or weight.shape != (*q.shape[:2], q.shape[2] // 2):
        raise ValueError(
            "differential attention needs 2H query heads, a multiple of 2G, and a weight per token and head, "
            f"but q {list(q.shape)}, k {list(k.shape)} and weight {list(weight.shape)} came."
        )
    even, odd = attend(q, k, v).unflatten(2, (-1, 2)).unbind(3)
    return even - weight[..., None] * odd
