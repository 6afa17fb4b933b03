"""Stage 5, mix: scores, softmax, and the weighted sum of values.

A mix takes q [B, T, H, D], the keys and values of all tokens and the layer's input x [B, T, width], and returns the
heads' outputs [B, T, H, D]. `finish` is what remains to be done after stage 4 has taken its rotation back out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from qklab import register
from qklab.attention.draw import normal_
from qklab.attention.finish import exclude_own_value
from qklab.attention.positions import Positions, rotate_every
from qklab.attention.visibility import Visibility, render_mask, render_range, split_band
from qklab.ops.decode import decode
from qklab.ops.differential import differential, differential_v2
from qklab.ops.members import spread_members
from qklab.ops.norm import rms_norm
from qklab.ops.softmax.api import attend_densely, attend_softmax

if TYPE_CHECKING:
    from qklab.attention.spec import AttentionSpec


class KeyValue(NamedTuple):
    """Keys and values [B, S, G, ·] of all tokens, as they are stored."""

    key: Tensor
    value: Tensor | None = None  # None: the key is the value, or its first `value_width` entries are
    value_width: int | None = None
    positions: Positions | None = None  # where the key is stored unturned, and turns when it is compared
    make: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # key (unturned) and value of what is stored instead

    def separate(self) -> tuple[Tensor, Tensor]:
        """Keys as they are compared, and values."""
        key, value = self.key, self.key[..., : self.value_width] if self.value is None else self.value
        if self.make is not None:
            key, value = self.make(self.key)
        return key if self.positions is None else rotate_every(key, self.positions), value


def attend(
    q: Tensor,
    stored: KeyValue,
    scale: float,
    visibility: Visibility,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + bias) v over what is visible: q [B, T, H, ·] → [B, T, H, ·].

    Query head h reads key/value head ⌊h·G/H⌋. Sinks [H], or [B, H], are logits that take their share and give nothing.
    """
    if visibility.function is not None:
        return visibility.function(q, *(tensor.to(q.dtype) for tensor in stored.separate()), scale, sinks)
    if visibility.slots.cached and bias is None:
        return attend_cached(q, stored, scale, visibility, sinks)
    k, v = (tensor.to(q.dtype) for tensor in stored.separate())
    if visibility.blocks is not None and bias is None:
        return attend_blocks(q, k, v, scale, visibility.blocks, sinks)
    if bias is not None:
        return attend_densely(q, k, v, scale, join_bias(visibility, bias.to(q.dtype)), False, sinks)
    masked = visibility.mask is not None or visibility.slots.texts is not None or visibility.slots.starts is not None
    if not masked and (visibility.window is not None or sinks is not None):
        o = attend_softmax(q, k, v, scale=scale, causal=visibility.causal, window=visibility.window, sinks=sinks)
        if o is not None:
            return o
    if visibility.window is None:
        return attend_densely(q, k, v, scale, visibility.mask, visibility.triangle, sinks)
    parts = [
        attend_densely(q[:, rows], k[:, keys], v[:, keys], scale, mask, False, sinks)
        for rows, keys, mask in split_band(visibility, q.shape[1])
    ]
    return torch.cat(parts, 1)


def attend_cached(q: Tensor, stored: KeyValue, scale: float, visibility: Visibility, sinks: Tensor | None) -> Tensor:
    within = render_range(visibility)
    if stored.make is not None or (stored.positions is not None and visibility.window is not None):
        # a window's few keys may as well turn beforehand
        return decode(q, *stored.separate(), scale=scale, sinks=sinks, **within)
    table = None if stored.positions is None else stored.positions.every_table
    width = stored.value_width
    return decode(q, stored.key, stored.value, scale=scale, angles=table, value_width=width, sinks=sinks, **within)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, blocks: Any, sinks: Tensor | None) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    flex: Any = flex_attention
    heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
    options: dict[str, Any] = {"block_mask": blocks, "scale": scale, "enable_gqa": q.shape[2] != k.shape[2]}
    if sinks is None:
        return flex(*heads, **options).transpose(1, 2)
    o, found = flex(*heads, **options, return_aux=AuxRequest(lse=True))
    return (o * torch.sigmoid(found.lse - sinks[..., None])[..., None]).to(o.dtype).transpose(1, 2)


def join_bias(visibility: Visibility, bias: Tensor) -> Tensor:
    """The bias [B or 1, 1, 1 or T, S] where there is sight, −∞ elsewhere."""
    drawn = visibility.mask is None and (visibility.blocks is not None or visibility.window is not None)
    mask = render_mask(visibility) if drawn else visibility.mask
    return bias if mask is None else torch.where(mask, bias, -math.inf)


@torch.no_grad()
def largest_logits(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, causal: bool, bias: Tensor | None = None, rows: int = 512
) -> Tensor:
    """max over a row's visible pairs of scale · q·k + bias, per query head: q [B, T, H, ·], k [B, S, G, ·] → [B, H].

    Takes `rows` queries at a time, so that never all scores exist, and under `causal` only the keys up to the last of
    them.
    """
    q, k = q.detach().transpose(1, 2), k.detach().to(q.dtype).transpose(1, 2)
    groups, keys, largest = q.shape[1] // k.shape[1], k.shape[2], []
    for start in range(0, q.shape[2], rows):
        stop = min(start + rows, q.shape[2])
        seen = stop if causal else keys
        part = q[:, :, start:stop].unflatten(1, (-1, groups))  # [B, G, H/G, T', ·]
        scores = (part @ k[:, :, None, :seen].mT).flatten(1, 2) * scale
        if bias is not None:
            scores = scores + (bias if bias.shape[-2] == 1 else bias[..., start:stop, :])[..., :seen]
        if causal:
            slots = torch.arange(seen, device=q.device)
            scores = scores.masked_fill(slots[start:stop, None] < slots, -torch.inf)
        elif mask is not None:
            scores = scores.masked_fill(~mask[:, :, start:stop], -torch.inf)
        largest.append(scores.amax((2, 3)))
    return torch.stack(largest).amax(0).to(torch.promote_types(q.dtype, torch.float32))


class SinkLogits(nn.Module):
    """A learned logit for every query head, which joins its softmax's denominator and brings no value."""

    members: int | None = None  # of a stacked model, whose logits have one more axis in front

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.logits = nn.Parameter(torch.empty(spec.query_heads))
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        normal_(self.logits, 0.02, generator)

    def forward(self, q: Tensor) -> Tensor:
        """[H], or [B, H] for the rows of q [B, T, H, D] where they belong to members."""
        return spread_members(self.logits, self.members, len(q), 0)


class Mix(nn.Module):
    """What scores become, as other packages may extend it; as it is, plain attention."""

    formula: ClassVar[str]
    label: ClassVar[str | None] = None  # in the names of specs; None: the name it is registered under
    query_factor: ClassVar[int] = 1  # query heads per output head
    pairs_heads: ClassVar[bool] = False  # whether heads go in pairs, so that their numbers must be even
    has_gain: ClassVar[bool] = False  # whether `differential_gain` is a choice
    takes_sinks: ClassVar[bool] = False  # whether `forward` hands `find_sinks` on

    def __init__(self, spec: AttentionSpec, layer: int):
        super().__init__()
        self.scale = 1 / math.sqrt(spec.head_width)
        self.sinks = SinkLogits(spec) if spec.sinks else None

    def forward(self, q: Tensor, stored: KeyValue, x: Tensor, visibility: Visibility, bias: Tensor | None) -> Tensor:
        return attend(q, stored, self.scale, visibility, bias, self.find_sinks(q))

    def find_sinks(self, q: Tensor) -> Tensor | None:
        """[H] or [B, H] for q [B, T, H, D]."""
        return None if self.sinks is None else self.sinks(q)

    def keys_and_values(self, stored: KeyValue) -> tuple[Tensor, Tensor]:
        """Keys and values as the heads use them, [B, S, G, ·] each."""
        return stored.separate()

    def values(self, stored: KeyValue) -> Tensor:
        """The values alone."""
        return stored.separate()[1]

    def exclude(self, o: Tensor, v: Tensor) -> Tensor:
        """Outputs o [B, T, H, ·] without their parts along the values v [B, T, G, ·] of the same tokens."""
        return exclude_own_value(o, v)

    def largest_logits(self, q: Tensor, stored: KeyValue, visibility: Visibility, bias: Tensor | None) -> Tensor:
        """The largest score of every row and query head, among those that `forward` would use: [B, H]."""
        k, _ = self.keys_and_values(stored)
        slots, mask = visibility.slots, visibility.mask
        hidden = slots.cached or visibility.window is not None or slots.texts is not None or slots.starts is not None
        if mask is None and hidden and not visibility.triangle:
            mask = render_mask(visibility)
        return largest_logits(q, k, self.scale, mask, visibility.triangle, bias)

    def finish(self, o: Tensor) -> Tensor:
        return o

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        mixed, *finished = cls.formula.split(" ; ", 1)
        window = [f"{'0 ≤ i − j' if spec.causal else '|i − j|'} < {spec.window}"] * (spec.window is not None)
        sinks = [*window, *["a_ij = e^{l_ij} / (e^{s_h} + Σ_j e^{l_ij}) for each softmax"] * spec.sinks]
        excluded = ["o_i ← o_i − (o_i·v_i/‖v_i‖²) v_i"] * spec.exclusive
        return " ; ".join([mixed, *sinks, *excluded, *finished])

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return 0

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        return 4 * context * spec.query_heads * spec.head_width


@register.mix("softmax")
class Softmax(Mix):
    """o = softmax(q kᵀ/√D) v."""

    formula = "o = softmax(q kᵀ/√D) v"
    label = ""
    takes_sinks = True


@register.mix("differential")
class Differential(Mix):
    """v1: o = (softmax₁ − λ softmax₂) V for a pair of heads, V of width 2D; then RMSNorm per pair, times 1 − λ_init.

    λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init, λ_init = 0.8 − 0.6 exp(−0.3·layer). Key/value heads 2g and 2g+1 form a
    pair; so do the r-th query heads of their two groups. A value pair is [v_2g ; v_2g+1].
    """

    formula = "o = (softmax(q₁k₁ᵀ/√D) − λ softmax(q₂k₂ᵀ/√D)) [v₁;v₂] ; o ← (1−λ_init)·norm(o)"
    label = "diff"
    pairs_heads = True
    has_gain = True
    takes_sinks = True
    eps: ClassVar[float] = 1e-5
    members: int | None = None  # of a stacked model, whose λ and gain have one more axis in front

    def __init__(self, spec: AttentionSpec, layer: int):
        super().__init__(spec, layer)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.query_lambdas = nn.Parameter(torch.empty(2, spec.head_width))
        self.key_lambdas = nn.Parameter(torch.empty(2, spec.head_width))
        self.gain = nn.Parameter(torch.ones(2 * spec.head_width)) if spec.differential_gain else None
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        for lambdas in (self.query_lambdas, self.key_lambdas):
            normal_(lambdas, 0.1, generator)
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def weight(self) -> Tensor:
        """λ, a scalar, or one for each member."""
        first, second = (self.query_lambdas * self.key_lambdas).sum(-1).exp().unbind(-1)
        return first - second + self.lambda_init

    def forward(self, q: Tensor, stored: KeyValue, x: Tensor, visibility: Visibility, bias: Tensor | None) -> Tensor:
        def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            return attend(q, KeyValue(k, v), self.scale, visibility, bias, sinks)

        o = differential(q, *stored.separate(), self.weight(), plain, sinks=self.find_sinks(q))  # [B, T, H/2, 2D]
        return o.unflatten(-1, (2, -1)).flatten(2, 3)

    def exclude(self, o: Tensor, v: Tensor) -> Tensor:
        """The value of a pair is [v₁;v₂]."""
        o, v = (pair.unflatten(2, (-1, 2)).flatten(3) for pair in (o, v))
        return exclude_own_value(o, v).unflatten(-1, (2, -1)).flatten(2, 3)

    def finish(self, o: Tensor) -> Tensor:
        o = o.unflatten(2, (-1, 2)).flatten(3)  # [B, T, H/2, 2D]
        o = rms_norm(o, self.gain, self.eps) * (1 - self.lambda_init)
        return o.unflatten(-1, (2, -1)).flatten(2, 3)

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return 4 * spec.head_width + 2 * spec.head_width * spec.differential_gain

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        return 2 * context * spec.heads * (spec.head_width + 2 * spec.head_width)


@register.mix("differential-v2")
class DifferentialV2(Mix):
    """v2: 2H query heads over unchanged keys and values; o_h = a_2h − sigmoid(w_h·x) a_2h+1, λ per token and head."""

    formula = "o_h = softmax(q_2h kᵀ/√D) v − σ(w_h·x) softmax(q_2h+1 kᵀ/√D) v"
    label = "diff-v2"
    query_factor = 2
    takes_sinks = True

    def __init__(self, spec: AttentionSpec, layer: int):
        super().__init__(spec, layer)
        self.weight = nn.Linear(spec.width, spec.heads, bias=False)

    def forward(self, q: Tensor, stored: KeyValue, x: Tensor, visibility: Visibility, bias: Tensor | None) -> Tensor:
        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # `stored` knows whether k is also v
            return attend(q, stored, self.scale, visibility, bias, self.find_sinks(q))

        return differential_v2(q, stored.key, stored.key, torch.sigmoid(self.weight(x)), plain)

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        return spec.width * spec.heads

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        return super().flops(spec, context) + 2 * spec.width * spec.heads


class LatentSoftmax(Mix):
    """MLA: softmax over q [B, T, H, D + d_rope] and the latent [B, S, 1, d_c + d_rope] = [c ; rotated shared key].

    Expanded: k^h = [W_uk^h c ; k_rope], v^h = W_uv^h c. Absorbed: q_nope W_uk^h is compared with c itself, and the
    output is (Σ a c) W_uv^h. The same numbers; which is cheaper depends on how many queries share the keys.
    """

    formula = "o = softmax(q kᵀ/√(D+d_rope)) v"
    takes_sinks = True

    def __init__(self, spec: AttentionSpec, layer: int):
        super().__init__(spec, layer)
        latent = spec.latent
        assert latent is not None
        self.heads, self.head_width = spec.heads, spec.head_width
        self.kv_rank, self.rope_width = latent.kv_rank, latent.rope_width
        self.scale = 1 / math.sqrt(spec.head_width + latent.rope_width)
        self.up_key = nn.Linear(latent.kv_rank, spec.heads * spec.head_width, bias=False)
        self.up_value = nn.Linear(latent.kv_rank, spec.heads * spec.head_width, bias=False)

    def forward(self, q: Tensor, stored: KeyValue, x: Tensor, visibility: Visibility, bias: Tensor | None) -> Tensor:
        stored = KeyValue(stored.key.to(q.dtype))
        absorbs = visibility.function is None and self.prefers_absorbed(q.shape[1], stored.key.shape[1])
        return (self.attend_absorbed if absorbs else self.attend_expanded)(q, stored, visibility)

    def prefers_absorbed(self, queries: int, keys: int) -> bool:
        """Whether the absorbed form needs fewer multiply-adds for this many queries after a cached prefix."""
        D, c, r = self.head_width, self.kv_rank, self.rope_width
        expanded = queries * keys * (2 * D + r) + keys * 2 * D * c
        absorbed = queries * keys * (2 * c + r) + queries * 2 * D * c
        return queries < keys and absorbed < expanded

    def keys_and_values(self, stored: KeyValue) -> tuple[Tensor, Tensor]:
        """The latent stands for both: [B, S, 1, d_c + d_rope] → keys [B, S, H, D + d_rope], values [B, S, H, D]."""
        c, rope = stored.key[..., 0, : self.kv_rank], stored.key[..., self.kv_rank :]
        key = self.up_key(c).unflatten(-1, (self.heads, -1))
        key = torch.cat([key, rope.expand(-1, -1, self.heads, -1)], -1)
        return key, self.values(stored)

    def values(self, stored: KeyValue) -> Tensor:
        return self.up_value(stored.key[..., 0, : self.kv_rank]).unflatten(-1, (self.heads, -1))

    def attend_expanded(self, q: Tensor, stored: KeyValue, visibility: Visibility) -> Tensor:
        stored = KeyValue(*self.keys_and_values(stored))
        return attend(q, stored, self.scale, visibility, None, self.find_sinks(q))

    def attend_absorbed(self, q: Tensor, stored: KeyValue, visibility: Visibility) -> Tensor:
        up_key = self.up_key.weight.unflatten(0, (self.heads, -1))  # [H, D, d_c]
        up_value = self.up_value.weight.unflatten(0, (self.heads, -1))
        nope = torch.einsum("bthd,hdc->bthc", q[..., : self.head_width], up_key)
        q = torch.cat([nope, q[..., self.head_width :]], -1)
        stored = stored._replace(value_width=self.kv_rank)
        o = attend(q, stored, self.scale, visibility, None, self.find_sinks(q))  # [B, T, H, d_c]
        return torch.einsum("bthc,hdc->bthd", o, up_value)

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        assert spec.latent is not None
        return 2 * spec.latent.kv_rank * spec.heads * spec.head_width

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        latent = spec.latent
        assert latent is not None
        scores = context * spec.heads * (2 * spec.head_width + latent.rope_width)
        return 2 * (scores + (2 + spec.exclusive) * latent.kv_rank * spec.heads * spec.head_width)
