"""Settings of optimisers, learning-rate schedules and logit control."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from qklab.schema import Rule, Spec, choice_field, number_field, require_value

if TYPE_CHECKING:
    from torch import nn

    from qklab.optim.control import Optimisers
    from qklab.optim.logit_control import LogitControl
    from qklab.optim.qk_clip import QKClip


@dataclass(frozen=True, kw_only=True)
class OptimiserSpec(Spec):
    """AdamW on everything, or Muon on the blocks' matrices and AdamW on the rest.

    Muon's update is scaled to AdamW's root mean square (0.2·√max(rows, columns)), so one `lr` serves both. Weight decay
    is decoupled and spares vectors. `clip` bounds the global gradient norm; 0 leaves gradients alone.
    """

    kind: Literal["adamw", "muon"] = choice_field("adamw", ("adamw", "muon"))
    lr: float = number_field(3e-3, above=0.0)
    beta1: float = number_field(0.9, at_least=0.0, at_most=0.9999)
    beta2: float = number_field(0.95, at_least=0.0, at_most=0.999999)
    eps: float = number_field(1e-8, above=0.0)
    weight_decay: float = number_field(0.1, at_least=0.0)
    momentum: float = number_field(0.95, at_least=0.0, at_most=0.9999)
    clip: float = number_field(1.0, at_least=0.0)


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec(Spec):
    """The learning rate over a run, as a factor of its peak, at progress p ∈ (0, 1].

    All start with min(1, p/warmup). Then with t = (p − warmup)/(1 − warmup):
    `cosine`: final + (1 − final)·(1 + cos πt)/2; `wsd`: 1 until the last `decay` of the run, then linearly to `final`;
    `constant`: 1.
    """

    kind: Literal["cosine", "wsd", "constant"] = choice_field("cosine", ("cosine", "wsd", "constant"))
    warmup: float = number_field(0.05, at_least=0.0, at_most=1.0)
    decay: float = number_field(0.2, at_least=0.0, at_most=1.0)
    final: float = number_field(0.1, at_least=0.0, at_most=1.0)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "decay",
            lambda s: s.kind == "wsd" and s.warmup + s.decay > 1,
            lambda s: f"with warmup={s.warmup:g} the two take more than the whole run",
            lambda s: {"decay": 1 - s.warmup},
        ),
    )

    def factor(self, progress: float) -> float:
        """The learning rate at `progress` over its peak."""
        p = min(max(progress, 0.0), 1.0)
        if p < self.warmup:
            return p / self.warmup
        if self.kind == "constant":
            return 1.0
        if self.kind == "wsd":
            left = (1 - p) / self.decay if self.decay else 1.0
            return self.final + (1 - self.final) * min(1.0, left)
        t = (p - self.warmup) / (1 - self.warmup) if self.warmup < 1 else 1.0
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * t)) / 2


METHODS = ("quack", "fixed", "qk-clip", "none")
SCALED = ("quack", "fixed")  # the methods with a τ


@dataclass(frozen=True, kw_only=True)
class LogitControlSpec(Spec):
    """How attention logits are kept from moving too fast; QK-norm, the other way, is attention's `norm`.

    `quack` scales the learning rates of W_q and W_k per head by τ and the norm of the other matrix, `fixed` by τ alone;
    `qk-clip` shrinks the weights of heads whose logits passed `threshold`. `tau` alone means quack.
    """

    method: Literal["quack", "fixed", "qk-clip", "none"] = choice_field(None, METHODS)
    tau: float = number_field(None, above=0.0)
    norm: Literal["frobenius", "spectral"] = choice_field("frobenius", ("frobenius", "spectral"))
    threshold: float = number_field(None, above=0.0)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "tau",
            lambda s: s.tau is not None and s.method not in SCALED,
            lambda s: f"method={s.method!r} has no τ",
            lambda s: {"method": "quack", "threshold": None},
        ),
        require_value(
            "threshold",
            None,
            lambda s: s.method != "qk-clip",
            lambda s: f"method={s.method!r} has no threshold, only qk-clip has",
        ),
        require_value(
            "norm",
            "frobenius",
            lambda s: s.method != "quack",
            lambda s: f"method={s.method!r} measures no norm, only quack does",
        ),
    )

    def defaults(self) -> dict[str, Any]:
        method = self.method or ("none" if self.tau is None else "quack")
        filled = {"tau": 1.0 if method in SCALED else None, "threshold": 100.0 if method == "qk-clip" else None}
        return filled if self.method else {"method": method} | filled

    def wrap(self, optimisers: Optimisers, model: nn.Module) -> LogitControl | QKClip | None:
        """The optimisers of `model` under this control; None for method "none"."""
        from qklab.optim.logit_control import LogitControl
        from qklab.optim.qk_clip import QKClip
        from qklab.optim.roles import attention_roles

        if self.method == "none":
            return None
        roles = attention_roles(model)
        if self.method == "qk-clip":
            return QKClip(optimisers, roles, self.threshold)
        method: Literal["quack", "fixed"] = "quack" if self.method == "quack" else "fixed"
        return LogitControl(optimisers, roles, self.tau, self.norm, method=method)
