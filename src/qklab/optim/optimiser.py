"""torch's own AdamW and Muon, chosen by parameter role, as one object with one flat state."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qklab.optim.control_spec import LogitControlSpec
from qklab.optim.roles import Role, role
from qklab.schema import Spec, choice_field, number_field

DECAYED: frozenset[Role] = frozenset({"embedding", "head", "matrix", "coupling"})


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


class Optimiser:
    """The optimisers of one model: `step` at a learning rate, and their state as flat named tensors.

    `control`, where one is asked for, steps them and acts on the weights of queries and keys.
    """

    def __init__(self, spec: OptimiserSpec, model: nn.Module, control: LogitControlSpec | None = None):
        self.spec = spec
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        kinds = {parameter: role(name, parameter) for name, parameter in model.named_parameters()}
        orthogonal = [p for p, kind in kinds.items() if kind == "matrix" and spec.kind == "muon"]
        rest = [p for p in kinds if not any(p is o for o in orthogonal)]
        groups = [
            {"params": [p for p in rest if (kinds[p] in DECAYED) == decayed], "weight_decay": decay}
            for decayed, decay in ((True, spec.weight_decay), (False, 0.0))
        ]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=spec.lr,
                betas=(spec.beta1, spec.beta2),
                eps=spec.eps,
                fused=all(p.device.type in ("cpu", "cuda") for p in rest),
            )
        ]
        if orthogonal:
            self.parts.append(
                torch.optim.Muon(
                    orthogonal,
                    lr=spec.lr,
                    weight_decay=spec.weight_decay,
                    momentum=spec.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        self.control = None if control is None else control.wrap(self.parts, model)

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """One update of every parameter at this learning rate; none where `skip`, a scalar on the device, is 1.

        Only fused AdamW can look at `skip` without the host knowing it (torch's name for it is `found_inf`).
        """
        for group in self.groups():
            group["lr"] = lr
        for part in self.parts:
            if skip is not None:
                part.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        for part in self.parts if self.control is None else [self.control]:
            part.step()

    def forget(self) -> None:
        """Say that the passes since the last step will not be followed by one."""
        if self.control is not None:
            self.control.forget()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def groups(self) -> Iterator[dict]:
        for part in self.parts:
            yield from part.param_groups

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, e.g. "exp_avg.blocks.0.mlp.up.weight"; the tensors themselves, not copies."""
        control = {} if self.control is None else self.control.tensors()
        return {f"logit_control.{name}": tensor for name, tensor in control.items()} | {
            f"{key}.{self.names[parameter]}": value
            for part in self.parts
            for parameter, state in part.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def materialise(self) -> None:
        """Create the state that the first step would create, leaving the weights as they are, so that it can be
        loaded into."""
        for parameter in self.names:
            parameter.grad = torch.zeros_like(parameter)
        self.step(0.0)
        self.zero_grad()
