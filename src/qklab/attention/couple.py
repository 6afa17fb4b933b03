"""Stage 2, couple: let the query and the key of one token evolve together before they are compared.

Every map acts on q [B, T, H, D] and k [B, T, G, D] of the same token, so it never looks across tokens. A module holds a
map's parameters and knows its inverse; the map itself is `qklab.ops.coupling`. Inverses group heads as
q [B, T, G, R, D] and k [B, T, G, 1, D] with R = H/G: a query head meets its group's key by broadcasting, and the key
meets the mean q̄ of its group's query heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from qklab import register
from qklab.attention.draw import uniform_
from qklab.attention.forces import FORCES, HeadLinear
from qklab.ops.coupling import Network, Norm, apply_force, couple, group_mean, scale_and_shift
from qklab.ops.dispatch import Impl
from qklab.ops.rope import Angles

if TYPE_CHECKING:
    from qklab.attention.coupling_spec import CouplingSpec
    from qklab.attention.spec import AttentionSpec


class Coupling(nn.Module):
    """A map (q, k) → (q⁺, k⁺), n steps with shared parameters.

    Leaves that `qklab.ops.coupling` knows name their `kind` and `networks`; any other defines `flow`. Its inverse is
    `inverse_flow`.
    """

    kind: ClassVar[str | None] = None
    formula: ClassVar[str]
    invertible: ClassVar[bool] = False
    stepped: ClassVar[bool] = True  # has a learned step size δ
    forces: ClassVar[tuple[str, ...]] = ()  # which forces may move it; none where it has no force of a chosen width
    shares_force: ClassVar[bool] = True  # has something that is one for all heads, or one for each
    repeats: ClassVar[bool] = True  # may be applied several times
    has_identity: ClassVar[bool] = True  # can start as no coupling at all
    normalises: ClassVar[bool] = False  # decides the length of queries and keys, so that no norm may follow
    limited: ClassVar[bool] = False  # has scales that `scale_limit` bounds
    nets: ClassVar[int] = 1  # how many networks share the force's width between them
    width_factor: ClassVar[int] = 1  # default width, in units of the usual one
    takes_members: ClassVar[bool] = False  # whether a map without a kernel knows `members`, or is mapped over them
    impl: Impl = "auto"
    members: int | None = None  # of a stacked model, whose weights have one more axis in front

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        coupling = require_coupling(spec)
        self.kv_heads = spec.kv_heads
        self.steps, self.scale_limit = coupling.steps, coupling.scale_limit
        if self.stepped:
            self.initial_step = 0.0 if coupling.init == "identity" else coupling.step_size
            shape = () if coupling.step_sharing == "per-layer" else (spec.kv_heads, 1, 1)
            self.step = nn.Parameter(torch.full(shape, self.initial_step))

    def reset(self, generator: torch.Generator | None = None) -> None:
        if self.stepped:
            nn.init.constant_(self.step, self.initial_step)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, T, H, D], k [B, T, G, D] → the same shapes."""
        if self.fuses:
            return self.fuse(q, k)
        q, k = self.flow(q.unflatten(2, (self.kv_heads, -1)), k.unsqueeze(3))
        return q.flatten(2, 3), k.squeeze(3)

    @property
    def fuses(self) -> bool:
        """Whether one operation couples, normalises and rotates."""
        return self.kind is not None

    def fuse(
        self, q: Tensor, k: Tensor, norm: Norm | None = None, angles: Angles | None = None, turn_key: bool = True
    ) -> tuple[Tensor, Tensor]:
        """rotate(normalise(couple(q, k))) in one pass, which reads q and k once and writes them once."""
        assert self.kind is not None
        return couple(
            q,
            k,
            self.kind,
            self.networks(),
            step=self.step if self.stepped else None,
            steps=self.steps,
            scale_limit=self.scale_limit,
            norm=norm,
            angles=angles,
            turn_key=turn_key,
            members=self.members,
            impl=self.impl,
        )

    def networks(self) -> tuple[Network, ...]:
        """What moves q and k, as the operation takes it."""
        raise NotImplementedError

    def flow(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The map itself where the operation does not know it: q [B, T, G, R, D], k [B, T, G, 1, D] → the same."""
        raise NotImplementedError

    def inverse(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The (q, k) that `forward` maps to these, exact up to rounding times the map's condition number."""
        self.check_invertible("closed-form inverse")
        q, k = self.inverse_flow(q.unflatten(2, (self.kv_heads, -1)), k.unsqueeze(3))
        return q.flatten(2, 3), k.squeeze(3)

    def log_det(self, q: Tensor, k: Tensor) -> Tensor:
        """log |det ∂(q⁺, k⁺)/∂(q, k)| per key head and its query heads: [B, T, G]."""
        self.check_invertible("log-determinant")
        return self.flow_log_det(q.unflatten(2, (self.kv_heads, -1)), k.unsqueeze(3))

    def check_invertible(self, what: str) -> None:
        if not self.invertible:
            known = ", ".join(list_invertible())
            raise ValueError(f"{type(self).__name__} has no {what}; use one of {known}.")

    def inverse_flow(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def flow_log_det(self, q: Tensor, k: Tensor) -> Tensor:
        """Shears keep volume; maps that stretch override this."""
        return q.new_zeros(q.shape[:3])

    def drift(self, k: Tensor) -> Tensor:
        """δ k, by which a key moves its queries."""
        return (self.step * k).to(k.dtype)

    def kick(self, q: Tensor, share: float = 1.0) -> Tensor:
        """share · δ f(q̄), by which a group's queries move their key."""
        return (share * self.step * apply_force(self.networks()[0], group_mean(q))).to(q.dtype)

    @classmethod
    def formula_of(cls, spec: AttentionSpec) -> str:
        return cls.formula + (f"   ({require_coupling(spec).steps} times)" if require_coupling(spec).steps > 1 else "")

    @classmethod
    def parameters_of(cls, spec: AttentionSpec) -> int:
        coupling = require_coupling(spec)
        steps = {"per-layer": 1, "per-head": spec.kv_heads}[coupling.step_sharing] if cls.stepped else 0
        return steps + cls.map_parameters(spec, coupling)

    @classmethod
    def flops(cls, spec: AttentionSpec, context: int) -> int:
        """Matrix products per token."""
        return 2 * cls.map_products(spec, require_coupling(spec))

    @classmethod
    def map_parameters(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        """Learned numbers besides the step size."""
        raise NotImplementedError

    @classmethod
    def map_products(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        """Multiply-adds in matrix products per token."""
        raise NotImplementedError


class ForcedCoupling(Coupling):
    """Coupling through one force f, evaluated on q̄."""

    forces = tuple(FORCES)

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self.force = FORCES[require_coupling(spec).force](spec.head_width, choose_force_width(spec), count_forces(spec))

    def networks(self) -> tuple[Network, ...]:
        return (self.force.network(),)

    @classmethod
    def map_parameters(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        return FORCES[coupling.force].parameters_of(spec.head_width, choose_force_width(spec), count_forces(spec))

    @classmethod
    def map_products(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        """Evaluations × key heads × the two layers of the force."""
        return cls.evaluations(coupling.steps) * spec.kv_heads * 2 * spec.head_width * choose_force_width(spec)

    @staticmethod
    def evaluations(steps: int) -> int:
        """How often the force is evaluated in `steps` steps."""
        return steps


@register.coupling("euler")
class Euler(ForcedCoupling):
    """q⁺ = q + δ k ; k⁺ = k + δ f(q), the old q in both."""

    kind = "euler"
    formula = "q⁺ = q + δ k ; k⁺ = k + δ f(q)"


@register.coupling("symplectic-euler")
class SymplecticEuler(ForcedCoupling):
    """k⁺ = k + δ f(q) ; q⁺ = q + δ k⁺. Two shears: invertible, det J = 1."""

    invertible = True
    kind = "symplectic-euler"
    formula = "k⁺ = k + δ f(q) ; q⁺ = q + δ k⁺"

    def inverse_flow(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.steps):
            q = q - self.drift(k)
            k = k - self.kick(q)
        return q, k


@register.coupling("leapfrog")
class Leapfrog(ForcedCoupling):
    """k½ = k + δ/2 f(q) ; q⁺ = q + δ k½ ; k⁺ = k½ + δ/2 f(q⁺). Neighbouring half kicks share one evaluation of f."""

    invertible = True
    kind = "leapfrog"
    formula = "k½ = k + δ/2 f(q) ; q⁺ = q + δ k½ ; k⁺ = k½ + δ/2 f(q⁺)"

    def inverse_flow(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Leapfrog run backwards in time is its own inverse."""
        k = k - self.kick(q, 0.5)
        for step in range(self.steps):
            q = q - self.drift(k)
            k = k - self.kick(q, 1.0 if step < self.steps - 1 else 0.5)
        return q, k

    @staticmethod
    def evaluations(steps: int) -> int:
        return steps + 1


@register.coupling("affine")
class Affine(Coupling):
    """q⁺ = q ⊙ exp(s1(k)) + t1(k) ; k⁺ = k ⊙ exp(s2(q⁺)) + t2(q⁺), s = s_max tanh(raw).

    (s, t) of one side come from one two-layer network whose last layer starts at zero: the identity map.
    """

    invertible = True
    stepped = False
    forces = ("mlp",)
    limited = True
    width_factor = 2
    kind = "affine"
    formula = "q⁺ = q ⊙ exp(s₁(k)) + t₁(k) ; k⁺ = k ⊙ exp(s₂(q⁺)) + t₂(q⁺)"

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        head_width, force_width, heads = spec.head_width, choose_force_width(spec), count_forces(spec)
        self.query_inner = HeadLinear(head_width, force_width, heads)
        self.query_outer = HeadLinear(force_width, 2 * head_width, heads)
        self.key_inner = HeadLinear(head_width, force_width, heads)
        self.key_outer = HeadLinear(force_width, 2 * head_width, heads)
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        for parameter in [*self.query_outer.parameters(), *self.key_outer.parameters()]:
            nn.init.zeros_(parameter)

    def networks(self) -> tuple[Network, ...]:
        layers = ((self.query_inner, self.query_outer), (self.key_inner, self.key_outer))
        return tuple(Network(inner.weight, inner.bias, outer.weight, outer.bias) for inner, outer in layers)

    def stretch(self, network: Network, u: Tensor) -> tuple[Tensor, Tensor]:
        """The log scale s(u) and the shift t(u)."""
        return scale_and_shift(network, u, self.scale_limit, u.dtype)

    def inverse_flow(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        of_query, of_key = self.networks()
        for _ in range(self.steps):
            scale, shift = self.stretch(of_key, group_mean(q))
            k = ((k - shift) * (-scale).exp()).to(k.dtype)
            scale, shift = self.stretch(of_query, k)
            q = ((q - shift) * (-scale).exp()).to(q.dtype)
        return q, k

    def flow_log_det(self, q: Tensor, k: Tensor) -> Tensor:
        """Σ over steps of R · Σ s1 + Σ s2."""
        total, (of_query, of_key) = q.new_zeros(q.shape[:3]), self.networks()
        for _ in range(self.steps):
            scale, shift = self.stretch(of_query, k)
            total = total + q.shape[3] * scale.sum((-2, -1))
            q = (q * scale.exp() + shift).to(q.dtype)
            scale, shift = self.stretch(of_key, group_mean(q))
            total = total + scale.sum((-2, -1))
            k = (k * scale.exp() + shift).to(k.dtype)
        return total

    @classmethod
    def map_parameters(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        D, h, heads = spec.head_width, choose_force_width(spec), count_forces(spec)
        return 2 * (HeadLinear.parameters_of(D, h, heads) + HeadLinear.parameters_of(h, 2 * D, heads))

    @classmethod
    def map_products(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        return coupling.steps * spec.kv_heads * 2 * 3 * spec.head_width * choose_force_width(spec)


@register.coupling("uncoupled")
class Uncoupled(Coupling):
    """q⁺ = q + δ g(q) ; k⁺ = k + δ f(k). The control: the same capacity (width h/2 each), no coupling."""

    kind = "uncoupled"
    formula = "q⁺ = q + δ g(q) ; k⁺ = k + δ f(k)"
    forces = tuple(FORCES)
    nets = 2

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        force = FORCES[require_coupling(spec).force]
        self.query_force = force(spec.head_width, choose_force_width(spec) // 2, count_forces(spec))
        self.key_force = force(spec.head_width, choose_force_width(spec) // 2, count_forces(spec))

    def networks(self) -> tuple[Network, ...]:
        return self.query_force.network(), self.key_force.network()

    @classmethod
    def map_parameters(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        half = choose_force_width(spec) // 2
        return 2 * FORCES[coupling.force].parameters_of(spec.head_width, half, count_forces(spec))

    @classmethod
    def map_products(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        half = choose_force_width(spec) // 2
        return coupling.steps * (spec.query_heads + spec.kv_heads) * 2 * spec.head_width * half


@register.coupling("linear")
class Linear(Coupling):
    """k⁺ = k + δ A q ; q⁺ = q + δ k⁺. The control that folds exactly into new W_q, W_k: only a reparametrisation."""

    invertible = True
    kind = "linear"
    formula = "k⁺ = k + δ A q ; q⁺ = q + δ k⁺"

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        shape = (spec.head_width, spec.head_width)
        self.matrix = nn.Parameter(torch.empty(shape if count_forces(spec) is None else (spec.kv_heads, *shape)))
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        super().reset()
        uniform_(self.matrix, self.matrix.shape[-1], generator)

    def networks(self) -> tuple[Network, ...]:
        return (Network(self.matrix),)

    def inverse_flow(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.steps):
            q = q - self.drift(k)
            k = k - self.kick(q)
        return q, k

    @classmethod
    def map_parameters(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        return (count_forces(spec) or 1) * spec.head_width**2

    @classmethod
    def map_products(cls, spec: AttentionSpec, coupling: CouplingSpec) -> int:
        return coupling.steps * spec.kv_heads * spec.head_width**2


def list_invertible() -> list[str]:
    return [name for name, kind in register.coupling.items() if kind.invertible]


def require_coupling(spec: AttentionSpec) -> CouplingSpec:
    if spec.coupling is None:
        raise ValueError("this spec has no coupling; give it coupling=CouplingSpec(kind=…).")
    return spec.coupling


def count_forces(spec: AttentionSpec) -> int | None:
    """How many forces there are: None for one shared by all heads of the layer, else one per key head."""
    return None if require_coupling(spec).force_sharing == "per-layer" else spec.kv_heads


def choose_force_width(spec: AttentionSpec) -> int:
    """h, the force's hidden width: as given, or D for a layer's mlp force and 8 for a head's; twice that for a gradient
    force (one matrix instead of two) and for affine."""
    coupling = require_coupling(spec)
    if coupling.force_width is not None:
        return coupling.force_width
    kind = coupling.mechanism
    width = spec.head_width if coupling.force_sharing == "per-layer" else 8
    width *= kind.width_factor * (2 if coupling.force == "gradient" else 1)
    return max(kind.nets, width - width % kind.nets)
