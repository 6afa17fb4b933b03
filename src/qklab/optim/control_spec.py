"""Logit control as a choice: one spec for QuacK and every alternative to it, so that a study can sweep them."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from qklab.optim.attention_roles import attention_roles
from qklab.optim.logit_control import LogitControl, Optimisers, QKClip
from qklab.schema import Rule, Spec, choice_field, number_field

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
        Rule(
            "threshold",
            lambda s: s.threshold is not None and s.method != "qk-clip",
            lambda s: f"method={s.method!r} has no threshold, only qk-clip has",
            lambda s: {"threshold": None},
        ),
        Rule(
            "norm",
            lambda s: s.norm != "frobenius" and s.method != "quack",
            lambda s: f"method={s.method!r} measures no norm, only quack does",
            lambda s: {"norm": "frobenius"},
        ),
    )

    def defaults(self) -> dict[str, Any]:
        method = self.method or ("none" if self.tau is None else "quack")
        filled = {"tau": 1.0 if method in SCALED else None, "threshold": 100.0 if method == "qk-clip" else None}
        return filled if self.method else {"method": method} | filled

    def wrap(self, optimisers: Optimisers, model: nn.Module) -> LogitControl | QKClip | None:
        """The optimisers of `model` under this control; None for method "none"."""
        if self.method == "none":
            return None
        roles = attention_roles(model)
        if self.method == "qk-clip":
            return QKClip(optimisers, roles, self.threshold)
        method: Literal["quack", "fixed"] = "quack" if self.method == "quack" else "fixed"
        return LogitControl(optimisers, roles, self.tau, self.norm, method=method)
