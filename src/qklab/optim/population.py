"""The optimiser of a population: S runs of one arm in one update, each at numbers of its own.

A stacked model's parameters are [S, …], member s being parameter[s], and so is the state. What differs between members
is a vector [S] on the device, so an update is a few fused kernels whatever S is, nothing waits for the host, and a CUDA
graph can hold it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qklab.optim.optimiser import DECAYED, find_parameter_role
from qklab.optim.spec import LogitControlSpec, OptimiserSpec
from qklab.schema import format_value

NUMBERS = ("beta1", "beta2", "eps", "weight_decay", "momentum", "clip")


class PopulationOptimiser:
    """The optimisers of a stacked model's members: what `Optimiser` does to each of them alone, up to rounding.

    Args:
        specs: One per member, all of one kind.
        stacked: The model; every parameter is [S, …].
        controls: Logit control, one per member, all of one method.
    """

    def __init__(
        self, specs: Sequence[OptimiserSpec], stacked: nn.Module, controls: Sequence[LogitControlSpec] | None = None
    ):
        self.parameters = dict(stacked.named_parameters())
        refuse_mixture(specs, self.parameters, controls)
        self.device = next(iter(self.parameters.values())).device
        self.clips = any(spec.clip for spec in specs)
        self.numbers = {
            name: torch.tensor([getattr(spec, name) for spec in specs], dtype=torch.float64, device=self.device)
            for name in NUMBERS
        }
        roles = {name: find_parameter_role(name, parameter[0]) for name, parameter in self.parameters.items()}
        self.decays = {name: role in DECAYED for name, role in roles.items()}
        self.steps = torch.zeros(len(specs), device=self.device)  # updates so far, in the dtype torch counts them in
        self.state = {
            name: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def step(self, lrs: Tensor, skip: Tensor, norms: Tensor | None = None) -> None:
        """One update of every member at its learning rate `lrs` [S], its gradient clipped by its norm in `norms` [S],
        measured here where it is not given. Members whose `skip` [S] is true keep every bit of weights and state."""
        if norms is None and self.clips:
            norms = measure_gradients(self.read_gradients())
        self.steps += ~skip
        names = list(self.parameters)
        fuse(update_adamw, self.device)(
            [self.parameters[name].detach() for name in names],
            self.read_gradients(),
            [self.state[name]["exp_avg"] for name in names],
            [self.state[name]["exp_avg_sq"] for name in names],
            [self.decays[name] for name in names],
            self.adamw_numbers(lrs, norms),
            skip,
        )

    def read_gradients(self) -> list[Tensor]:
        return list_gradients(self.parameters)

    def clip_factors_of(self, norms: Tensor | None) -> Tensor:
        """What each member's gradient is multiplied with, as torch's `clip_grads_with_norm_` does: [S]."""
        clip = self.numbers["clip"]
        if norms is None:
            return torch.ones_like(clip)
        return torch.where(clip > 0, (clip / (norms.double() + 1e-6)).clamp(max=1.0), 1.0)

    def adamw_numbers(self, lrs: Tensor, norms: Tensor | None) -> Tensor:
        """What `update_adamw` needs of every member: [8, S].

        In float64, since 1 − βᵗ would lose digits; and stacked, so that no compiler computes powers anew for every
        weight.
        """
        n, lrs, steps = self.numbers, lrs.double(), self.steps.double()
        numbers = [
            self.clip_factors_of(norms),
            1 - n["beta1"],
            n["beta2"],
            1 - n["beta2"],
            (1 - n["beta2"] ** steps).rsqrt(),
            n["eps"],
            lrs / (1 - n["beta1"] ** steps),
            1 - lrs * n["weight_decay"],
        ]
        return torch.stack(numbers).to(next(iter(self.parameters.values())).dtype)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self, member: int) -> dict[str, Tensor]:
        """A member's state under the names that `Optimiser.tensors` gives it; the tensors themselves, not copies."""
        found: dict[str, Tensor] = {}
        for name, state in self.state.items():
            if "exp_avg" in state:
                found[f"step.{name}"] = self.steps[member]
            found |= {f"{key}.{name}": value[member] for key, value in state.items()}
        return found

    def materialise(self) -> None:
        """Nothing: unlike `Optimiser`'s, the state is there from the start, where CUDA graphs expect it."""


def measure_gradient_norms(stacked: nn.Module) -> Tensor:
    """√Σ‖g‖² over all parameters, of each member: [S] on the device."""
    return measure_gradients(list_gradients(dict(stacked.named_parameters())))


def measure_gradients(gradients: Sequence[Tensor]) -> Tensor:
    return fuse(norm_members, gradients[0].device)(gradients)


@torch.no_grad()
def norm_members(gradients: Sequence[Tensor]) -> Tensor:
    norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
    return torch.linalg.vector_norm(norms, dim=0)


def update_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    decays: Sequence[bool],
    numbers: Tensor,
    skip: Tensor,
) -> None:
    """torch's AdamW on every [S, …] at once; `numbers` [8, S] as `adamw_numbers` gives them, `skip` [S]."""
    for p, g, m, v, decay in zip(parameters, gradients, averages, squares, decays, strict=True):
        broadcast = [-1] + [1] * (p.dim() - 1)
        clip, new, beta2, new_square, correction, eps, lr, kept = (number.view(broadcast) for number in numbers)
        keep = skip.view(broadcast)
        g = g * clip
        average = m + (g - m) * new
        square = v * beta2 + g * g * new_square
        moved = (p * kept if decay else p) - lr * average / (square.sqrt() * correction + eps)
        # chosen, not multiplied: 0 · NaN is NaN
        p.copy_(torch.where(keep, p, moved))
        m.copy_(torch.where(keep, m, average))
        v.copy_(torch.where(keep, v, square))


def list_gradients(parameters: dict[str, nn.Parameter]) -> list[Tensor]:
    missing = [name for name, parameter in parameters.items() if parameter.grad is None]
    if missing:
        raise ValueError(f"every parameter of a population needs a gradient, but {missing[0]} has none.")
    return [parameter.grad for parameter in parameters.values() if parameter.grad is not None]


def fuse(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function itself; on a GPU as few kernels, each tensor read and written once."""
    return compile_once(function) if device.type == "cuda" and not torch.compiler.is_compiling() else function


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def refuse_mixture(
    specs: Sequence[OptimiserSpec],
    parameters: dict[str, nn.Parameter],
    controls: Sequence[LogitControlSpec] | None,
) -> None:
    """Raise where the members cannot be updated together."""
    if not specs:
        raise ValueError("a population needs at least one member, but no optimiser's settings came.")
    kinds = sorted({spec.kind for spec in specs})
    if len(kinds) > 1:
        raise ValueError(f"the members of a population share one optimiser, but {' and '.join(kinds)} came.")
    for name, parameter in parameters.items():
        if not parameter.dim() or len(parameter) != len(specs):
            raise ValueError(
                f"every parameter of a population of {len(specs)} is [{len(specs)}, …], but {name} is "
                f"{format_value(list(parameter.shape))}; stack as many models as there are members."
            )
    if controls is not None and len(controls) != len(specs):
        raise ValueError(f"logit control is one per member, {len(specs)}, but {len(controls)} came.")
    if kinds == ["muon"] or any(control.method != "none" for control in controls or ()):
        raise ValueError("a population has no Muon and no logit control yet; train these runs one by one.")
