"""The formulas of logit control and QK-clip, per layer and head, on norms and logits alone.

Tensors are [..., heads]; symbols as in `LayerRoles`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from qklab.optim.attention_roles import LayerRoles

FLOOR = 0.3  # of its initial value, below which a norm counts no further
Table = dict[str, Tensor]


def at_queries(key: Tensor, query: Tensor) -> Tensor:
    """What belongs to a key head, at each query head that reads it: [..., G] → [..., H]."""
    return key.repeat_interleave(query.shape[-1] // key.shape[-1], -1)


def by_group(query: Tensor, key: Tensor) -> Tensor:
    """What belongs to query heads, by the key head they read: [..., H] → [..., G, H/G]."""
    return query.unflatten(-1, (key.shape[-1], -1))


def allowance(layer: LayerRoles, n: Mapping[str, Tensor]) -> Table:
    """How fast each part may move, up to a constant, for its logits to move at a constant speed; `n` are the norms.

    MHA: q: 1/n(k), k: 1/n(q), of a group the largest. One matrix: 1/n of its own. Coupled: 1/√(n(q)² + n(k)²) for both.
    MLA: one over the product of the norms of the other matrices on the way to the logit, the largest over heads for
    what all heads share.
    """
    if layer.kind == "shared":
        return {"qk": 1 / n["qk"]}
    if layer.kind == "latent":
        return latent_allowance(layer, n)
    q, k = by_group(n["q"], n["k"]).amax(-1), at_queries(n["k"], n["q"])
    if layer.coupling == "none":
        return {"q": 1 / k, "k": 1 / q}
    return {"q": 1 / torch.hypot(n["q"], k), "k": 1 / torch.hypot(q, n["k"])}


def latent_allowance(layer: LayerRoles, n: Mapping[str, Tensor]) -> Table:
    uq, uk, dkv = n["uq"], n["uk"], n["dkv"]
    dq = n.get("dq", torch.ones_like(dkv))
    # what a norm divides out again does not reach the logit
    dq_seen = torch.ones_like(dq) if layer.parts["uq"].gain is not None else dq
    dkv_seen = torch.ones_like(dkv) if layer.parts["uk"].gain is not None else dkv
    allowed = {
        "uq": 1 / (dq_seen * uk * dkv_seen),
        "uk": 1 / (uq * dq_seen * dkv_seen),
        "dq": 1 / (uq * uk * dkv).amax(-1, keepdim=True),
        "dkv": 1 / (uq * dq * uk).amax(-1, keepdim=True),
    }
    if "qr" in n:
        qr, kr = n["qr"], n["kr"]
        allowed["qr"] = 1 / (dq_seen * kr).expand_as(qr)
        allowed["kr"] = 1 / (qr * dq_seen).amax(-1, keepdim=True)
        allowed["dq"] = torch.minimum(allowed["dq"], 1 / (qr * kr).amax(-1, keepdim=True))
    return {symbol: allowed[symbol] for symbol in n}


def learning_rate_factors(layer: LayerRoles, now: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> Table:
    """lr/(τη) of every part: allowance(now)/allowance(initial), each norm now at least 0.3 of the initial one.

    The down-projection of a normalised latent is also multiplied by min(1, n(now)/n(initial)): the smaller it is, the
    more a step turns the latent.
    """
    held = {symbol: torch.maximum(now[symbol], FLOOR * initial[symbol]) for symbol in now}
    then = allowance(layer, initial)
    factors = {symbol: value / then[symbol] for symbol, value in allowance(layer, held).items()}
    for down, up in (("dq", "uq"), ("dkv", "uk")):
        if down in factors and layer.parts[up].gain is not None:
            factors[down] = factors[down] * (held[down] / initial[down]).clamp(max=1.0)
    return factors


def clip_factors(layer: LayerRoles, largest: Tensor, threshold: float) -> Table:
    """What QK-clip multiplies every part with, so that a head's largest logit S [..., H] comes down to the threshold t:
    γ = t/S where S > t, else 1.

    MHA: √γ on both. GQA: √γ_g on the key, γ_h/√γ_g on a query, γ_g the group's smallest. (Q,K=V): γ on the query, as
    the key is also the value. One matrix: √γ. MLA: √γ on uq and uk, γ on qr; the shared rotary key is left alone.
    Under a linear coupling queries and keys must shrink alike: √γ_g on both.
    """
    gamma = torch.where(largest.isfinite() & (largest > threshold), threshold / largest, 1.0)
    root = gamma.sqrt()
    if layer.kind == "shared":
        return {"qk": root}
    if layer.kind == "latent":
        return {"uq": root, "uk": root} | ({"qr": gamma} if "qr" in layer.parts else {})
    grouped = gamma.unflatten(-1, (layer.parts["k"].heads, -1))
    smallest = grouped.amin(-1)
    if layer.key_is_value:
        return {"q": gamma}
    if layer.coupling != "none":
        return {"q": at_queries(smallest.sqrt(), gamma), "k": smallest.sqrt()}
    return {"q": (grouped / smallest.sqrt()[..., None]).flatten(-2), "k": smallest.sqrt()}
