"""Couplings and convolutions that look a few tokens back, and whose cache keeps these tokens too."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from qklab import register
from qklab.attention.couple import Coupling
from qklab.attention.draw import uniform_
from qklab.attention.past import Past
from qklab.ops.convolution import convolve_heads
from qklab.ops.members import spread_members

if TYPE_CHECKING:
    from qklab.attention.coupling_spec import CouplingSpec
    from qklab.attention.spec import AttentionSpec

Remembered = tuple[tuple[int, int], ...]  # tokens and entries of each tensor that is looked back on


class LookbackCoupling(Coupling):
    """A map (q, k, v) → (q⁺, k⁺, v⁺) that also sees tokens before its own: `past.before(u, 2)` is u of one and of two
    tokens earlier. `remembers` says how many tokens and entries each such call needs, in the order of the calls."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None, past: Past) -> tuple[Tensor, Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """q [B, T, H, D], k and v [B, T, G, D] → the same shapes; v is None where the value will be the key."""
        raise NotImplementedError

    @classmethod
    def remembers(cls, spec: AttentionSpec) -> Remembered:
        raise NotImplementedError


@register.coupling("cca")
class ConvolutionalCoupling(LookbackCoupling):
    """CCA: queries and keys are averaged with each other, and convolved over three tokens; arXiv 2510.04476.

    r_q = (q + k)/2, r_k = r̄_q. Of u = [q ; k]: a_t = w0 ⊙ u_t + w1 ⊙ u_{t−1} + b, y_t = W0 a_t + W1 a_{t−1} + c, W by
    head. q⁺ = y_q + r_q and k⁺ = y_k + r_k at length √D, the key times a temperature τ of its head. The second half of
    a token's value entries comes from the token before.
    """

    stepped = False
    repeats = False
    shares_force = False
    has_identity = False
    normalises = True
    takes_members = True
    formula = (
        "r_q = (q + k)/2 ; r_k = r̄_q ; (q⁺, k⁺) = conv₂(conv₁([q ; k])) + (r_q, r_k) ; "
        "q⁺ ← √D q⁺/‖q⁺‖ ; k⁺ ← τ √D k⁺/‖k⁺‖ ; half of v from the token before"
    )

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        heads, width = spec.query_heads + spec.kv_heads, spec.head_width
        self.eps = spec.norm_eps
        self.entry_weight = nn.Parameter(torch.empty(2, heads, width))  # of this token and of the one before
        self.entry_bias = nn.Parameter(torch.empty(heads, width))
        self.head_weight = nn.Parameter(torch.empty(heads, 2 * width, width))  # rows: this token, the one before
        self.head_bias = nn.Parameter(torch.empty(heads, width))
        self.temperature = nn.Parameter(torch.ones(spec.kv_heads))
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        """torch's default for convolutions; keys at length √D."""
        for parameter in (self.entry_weight, self.entry_bias):
            uniform_(parameter, 2, generator)
        for parameter in (self.head_weight, self.head_bias):
            uniform_(parameter, self.head_weight.shape[-2], generator)
        nn.init.ones_(self.temperature)

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None, past: Past) -> tuple[Tensor, Tensor, Tensor | None]:
        kept_q, kept_k = past.recall(q, 2), past.recall(k, 2)
        new_q, new_k = convolve_heads(
            q,
            k,
            *self.fold_convolutions(),
            self.temperature,
            past.positions,
            eps=self.eps,
            kept=None if kept_q is None or kept_k is None else (kept_q, kept_k),
            members=self.members,
            impl=self.impl,
        )
        return new_q, new_k, None if v is None else delay_half(v, past)

    def fold_convolutions(self) -> tuple[Tensor, Tensor]:
        """Entry by entry over two tokens, then head by head over two: both are linear, so they are one product with
        three tokens, [H + G, 3D, D], and a bias [H + G, D]."""
        now, before = self.entry_weight.unsqueeze(-1).unbind(-4)  # [H + G, D, 1]
        this, last = self.head_weight.chunk(2, -2)  # [H + G, D, D]
        weight = torch.cat([now * this, before * this + now * last, before * last], -2)
        return weight, (self.entry_bias.unsqueeze(-1) * (this + last)).sum(-2) + self.head_bias

    @classmethod
    def remembers(cls, spec: AttentionSpec) -> Remembered:
        queries, keys = ((2, heads * spec.head_width) for heads in (spec.query_heads, spec.kv_heads))
        return (queries, keys) if spec.key_is_value else (queries, keys, (1, spec.kv_heads * spec.head_width // 2))

    @classmethod
    def map_parameters(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        heads, width = spec.query_heads + spec.kv_heads, spec.head_width
        return heads * width * (2 + 1 + 2 * width + 1) + spec.kv_heads

    @classmethod
    def map_products(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        return (spec.query_heads + spec.kv_heads) * 3 * spec.head_width**2


class ShortConvolution(nn.Module):
    """k_t ← Σ_i c_i ⊙ k_{t−i} over n tokens, entry by entry, and the value alike; at the start k and v as they are."""

    formula: ClassVar[str] = "k_t ← Σ_i c_i ⊙ k_{t−i}"
    members: int | None = None  # of a stacked model, whose weights have one more axis in front

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        assert spec.short_conv is not None
        shape = (spec.short_conv, spec.kv_heads, spec.head_width)
        self.key = nn.Parameter(torch.empty(shape))
        self.value = None if spec.key_is_value else nn.Parameter(torch.empty(shape))
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        with torch.no_grad():
            for weight in self.parameters():
                weight.zero_()[0] = 1

    def forward(self, k: Tensor, v: Tensor | None, past: Past) -> tuple[Tensor, Tensor | None]:
        """k and v [B, T, G, D] → the same shapes."""
        k = self.convolve(k, self.key, past)
        return k, v if v is None or self.value is None else self.convolve(v, self.value, past)

    def convolve(self, u: Tensor, weight: Tensor, past: Past) -> Tensor:
        first, *others = (spread_members(each, self.members, len(u), 1) for each in weight.unbind(-3))
        y = first * u
        for each, earlier in zip(others, past.before(u, len(others)), strict=True):
            y = y + each * earlier
        return y.to(u.dtype)

    @classmethod
    def remembers(cls, spec: AttentionSpec) -> Remembered:
        assert spec.short_conv is not None
        return ((spec.short_conv - 1, spec.kv_heads * spec.head_width),) * (1 if spec.key_is_value else 2)

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        return cls.formula + ("" if spec.key_is_value else " ; v alike")

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        assert spec.short_conv is not None
        return spec.short_conv * spec.kv_heads * spec.head_width * (1 if spec.key_is_value else 2)

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        return 0


class KeyShift:
    """Entries of a key that RoPE does not turn come from the token before; a text's first token keeps its own."""

    formula: ClassVar[str] = "unrotated entries of k_t ← those of k_{t−1}"

    def __init__(self, spec: AttentionSpec):
        self.rotated = spec.rotated_width

    def __call__(self, k: Tensor, past: Past) -> Tensor:
        """k [B, T, G, D] → the same shape."""
        turned, still = k[..., : self.rotated], k[..., self.rotated :]
        (before,) = past.before(still, 1)
        first = (past.positions == 0)[..., None, None]
        return torch.cat([turned, torch.where(first, still, before)], -1)

    @classmethod
    def remembers(cls, spec: AttentionSpec) -> Remembered:
        return ((1, spec.kv_heads * (spec.head_width - spec.rotated_width)),)


def list_remembered(spec: AttentionSpec) -> Remembered:
    """Tokens and entries of everything that a layer of this spec looks back on, in the order it does."""
    found: Remembered = () if spec.short_conv is None else ShortConvolution.remembers(spec)
    if spec.coupler is not None and issubclass(spec.coupler, LookbackCoupling):
        found += spec.coupler.remembers(spec)
    return found + (KeyShift.remembers(spec) if spec.key_shift else ())


def delay_half(v: Tensor, past: Past) -> Tensor:
    """The second half of the entries of v [B, T, G, D], which is half of the heads where there are several, as they
    were one token earlier."""
    flat = v.flatten(2)
    now, late = flat.tensor_split([flat.shape[-1] - flat.shape[-1] // 2], -1)
    return torch.cat([now, *past.before(late, 1)], -1).view(v.shape)
