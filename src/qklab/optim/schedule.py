"""Learning-rate schedules as pure functions of progress."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from qklab.schema import Rule, Spec, choice_field, number_field


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
