"""torch's own AdamW and Muon, chosen by what each parameter is for, as one object with one flat state."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from qklab.optim.spec import LogitControlSpec, OptimiserSpec

ParameterRole = Literal["embedding", "head", "matrix", "coupling", "vector"]
DECAYED: frozenset[ParameterRole] = frozenset({"embedding", "head", "matrix", "coupling"})


def find_parameter_role(name: str, parameter: Tensor) -> ParameterRole:
    """The role of a decoder's parameter.

    - `embedding`: token embeddings (also where they are tied to the output) and learned positions
    - `head`: an output matrix of its own
    - `matrix`: two-dimensional weights of the blocks' linear maps
    - `coupling`: weights of the coupling's forces, layer-wide or per head
    - `vector`: gains, biases, step sizes, λ: what neither weight decay nor orthogonalisation is meant for
    """
    if name.startswith(("embed.", "positions.")):
        return "embedding"
    if name.startswith("head."):
        return "head"
    if parameter.dim() < 2 or ".mix.query_lambdas" in name or ".mix.key_lambdas" in name:
        return "vector"
    if ".couple." in name:
        return "coupling"
    return "matrix" if parameter.dim() == 2 and name.endswith(".weight") else "vector"


class Optimiser:
    """The optimisers of what is trained of a model: `step` at a learning rate, and their state as flat named tensors.

    `control`, where one is asked for, steps them and acts on the weights of queries and keys.
    """

    def __init__(self, spec: OptimiserSpec, model: nn.Module, control: LogitControlSpec | None = None):
        self.spec = spec
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        kinds = {parameter: find_parameter_role(name, parameter) for parameter, name in self.names.items()}
        orthogonal = [p for p, kind in kinds.items() if kind == "matrix" and spec.kind == "muon"]
        rest = [p for p in kinds if not any(p is o for o in orthogonal)]
        groups = [
            {"params": [p for p in rest if (kinds[p] in DECAYED) == decayed], "weight_decay": decay}
            for decayed, decay in ((True, spec.weight_decay), (False, 0.0))
        ]
        self.bases: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=spec.lr,
                betas=(spec.beta1, spec.beta2),
                eps=spec.eps,
                fused=all(p.device.type in ("cpu", "cuda") for p in rest),
            )
        ]
        if orthogonal:
            self.bases.append(
                torch.optim.Muon(
                    orthogonal,
                    lr=spec.lr,
                    weight_decay=spec.weight_decay,
                    momentum=spec.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        self.control = None if control is None else control.wrap(self.bases, model)

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """One update of every parameter at this learning rate; none where `skip`, a scalar on the device, is 1.

        Only fused AdamW can look at `skip` without the host knowing it (torch's name for it is `found_inf`).
        """
        for group in self.groups():
            group["lr"] = lr
        for base in self.bases:
            if skip is not None:
                base.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        for base in self.bases if self.control is None else [self.control]:
            base.step()

    def forget(self) -> None:
        """Say that the passes since the last step will not be followed by one."""
        if self.control is not None:
            self.control.forget()

    def factors(self) -> dict[str, dict[str, Tensor]]:
        """What logit control did at the last step: layer → part → a number per head; nothing without it."""
        return {} if self.control is None else self.control.factors()

    def zero_grad(self) -> None:
        for base in self.bases:
            base.zero_grad(set_to_none=True)

    def groups(self) -> Iterator[dict]:
        for base in self.bases:
            yield from base.param_groups

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, e.g. "exp_avg.blocks.0.mlp.up.weight"; the tensors themselves, not copies."""
        control = {} if self.control is None else self.control.tensors()
        return {f"logit_control.{name}": tensor for name, tensor in control.items()} | {
            f"{key}.{self.names[parameter]}": value
            for base in self.bases
            for parameter, state in base.state.items()
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
