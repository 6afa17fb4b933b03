"""CouplingSpec: which coupling, and which of its options go together."""

from dataclasses import dataclass
from typing import ClassVar

from qklab import register
from qklab.attention.couple import Coupling
from qklab.attention.forces import FORCES
from qklab.schema import Rule, Spec, choice_field, integer_field, number_field, require_value

SHARINGS = ("per-layer", "per-head")


@dataclass(frozen=True, kw_only=True)
class CouplingSpec(Spec):
    """How q and k evolve together before they are compared (docs/mechanisms/).

    Args:
        kind: The map.
        steps: How often it is applied, with the same parameters.
        force: What moves the key: a two-layer network, or minus the gradient of a potential (truly symplectic).
        force_width: Hidden width of the force; by default head_width per layer, 8 per head, twice that for gradient
            forces and affine.
        force_sharing: One force for all heads of a layer, or a small one for each key head.
        step_size: Where the learned step size δ starts.
        step_sharing: One δ for the layer or one for each key head.
        init: "identity" starts as no coupling at all (δ = 0; affine always does).
        scale_limit: Largest |log scale| of affine.
    """

    kind: str = choice_field("leapfrog", register.coupling)
    steps: int = integer_field(1, at_most=1000)
    force: str = choice_field("mlp", FORCES)
    force_width: int | None = integer_field(None)
    force_sharing: str = choice_field("per-layer", SHARINGS)
    step_size: float = number_field(1.0)
    step_sharing: str = choice_field("per-layer", SHARINGS)
    init: str = choice_field("default", ("default", "identity"))
    scale_limit: float = number_field(2.0, above=0.0)

    rules: ClassVar[tuple[Rule, ...]] = (
        require_value(
            "force",
            "mlp",
            lambda c: c.force not in c.mechanism.forces,
            lambda c: f"{c.kind} is not moved by a force that could be a gradient",
        ),
        require_value(
            "force_width",
            None,
            lambda c: not c.mechanism.forces,
            lambda c: f"{c.kind} has no force and so no hidden width",
        ),
        Rule(
            "force_width",
            lambda c: c.force_width is not None and c.force_width % c.mechanism.nets,
            lambda c: f"{c.kind} splits the width evenly between its {c.mechanism.nets} forces",
            lambda c: {"force_width": c.force_width + -c.force_width % c.mechanism.nets},
        ),
        require_value("steps", 1, lambda c: not c.mechanism.repeats, lambda c: f"{c.kind} is applied once"),
        require_value(
            "force_sharing",
            "per-layer",
            lambda c: not c.mechanism.shares_force,
            lambda c: f"{c.kind} has no force that heads could share",
        ),
        require_value(
            "init",
            "default",
            lambda c: not c.mechanism.has_identity,
            lambda c: f"{c.kind} is the identity for no choice of its weights",
        ),
        require_value("step_size", 1.0, lambda c: not c.mechanism.stepped, lambda c: f"{c.kind} has no step size"),
        require_value(
            "step_size",
            1.0,
            lambda c: c.step_size != 0.0 and c.init == "identity",
            "init='identity' starts at step size 0, so another one would be ignored",
        ),
        require_value(
            "step_sharing", "per-layer", lambda c: not c.mechanism.stepped, lambda c: f"{c.kind} has no step size"
        ),
        require_value(
            "scale_limit",
            2.0,
            lambda c: not c.mechanism.limited,
            lambda c: f"{c.kind} has no scale that could be limited, only affine has",
        ),
    )

    @property
    def mechanism(self) -> type[Coupling]:
        return register.coupling[self.kind]

    @property
    def name(self) -> str:
        words = [f"{self.kind}×{self.steps}" if self.mechanism.repeats else self.kind]
        words += ["∇U"] * (self.force == "gradient")
        words += [f"h{self.force_width}"] * (self.force_width is not None)
        words += [self.force_sharing] * (self.force_sharing != "per-layer")
        words += [f"δ={self.step_size:g}"] * (self.step_size != 1.0)
        words += ["δ-per-head"] * (self.step_sharing != "per-layer")
        words += ["identity"] * (self.init == "identity")
        words += [f"|s|≤{self.scale_limit:g}"] * (self.scale_limit != 2.0)
        return " ".join(words)
