"""The optimiser of a population: S runs of one arm in one update, each at numbers of its own.

A stacked model's parameters are [S, …], member s being parameter[s], and so is the state. What differs between members
is a vector [S] on the device, so an update is a few fused kernels whatever S is, nothing waits for the host, and a CUDA
graph can hold it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qklab.optim.norms import Table
from qklab.optim.optimiser import DECAYED, find_parameter_role
from qklab.optim.population_control import PopulationControl
from qklab.optim.spec import LogitControlSpec, OptimiserSpec
from qklab.optim.update import fuse, norm_members, update_adamw, update_muon

NUMBERS = ("beta1", "beta2", "eps", "weight_decay", "momentum", "clip")


class PopulationOptimiser:
    """The optimisers of a stacked model's members: what `Optimiser` does to each of them alone, up to rounding.

    Args:
        specs: One per member, all of one kind.
        stacked: The model; every parameter is [S, …].
        controls: Logit control, one per member, all of one method and norm.
        compiles: Whether the update is compiled, which a GPU takes seconds for and then fewer kernels.
    """

    def __init__(
        self,
        specs: Sequence[OptimiserSpec],
        stacked: nn.Module,
        controls: Sequence[LogitControlSpec] | None = None,
        compiles: bool = False,
    ):
        self.parameters = dict(stacked.named_parameters())
        refuse_mixture(specs, self.parameters)
        first = next(iter(self.parameters.values()))
        self.device, self.dtype = first.device, first.dtype
        self.compiles = compiles and self.device.type == "cuda"
        self.clips = any(spec.clip for spec in specs)
        self.numbers = {
            name: torch.tensor([getattr(spec, name) for spec in specs], dtype=torch.float64, device=self.device)
            for name in NUMBERS
        }
        roles = {name: find_parameter_role(name, parameter[0]) for name, parameter in self.parameters.items()}
        self.orthogonal = [name for name, role in roles.items() if role == "matrix" and specs[0].kind == "muon"]
        self.rest = [name for name in roles if name not in set(self.orthogonal)]
        self.decays = {name: role in DECAYED for name, role in roles.items()}
        self.alike = list_alike([self.parameters[name] for name in self.orthogonal])
        self.steps = torch.zeros(len(specs), device=self.device)  # updates so far, in the dtype torch counts them in
        keys = {"exp_avg": self.rest, "exp_avg_sq": self.rest, "momentum_buffer": self.orthogonal}
        self.state = {
            key: {name: torch.zeros_like(self.parameters[name].detach()) for name in names}
            for key, names in keys.items()
        }
        self.control = None if controls is None else PopulationControl.of(controls, stacked)

    @torch.no_grad()
    def step(self, lrs: Tensor, skip: Tensor, norms: Tensor | None = None) -> None:
        """One update of every member at its learning rate `lrs` [S], its gradient clipped by its norm in `norms` [S],
        measured here where it is not given. Members whose `skip` [S] is true keep every bit of weights and state."""
        gradients = read_gradients(self.parameters)
        if norms is None and self.clips:
            norms = norm_members(list(gradients.values()))
        clips, lrs = self.find_clips(norms), lrs.double()
        speeds, shrinks = ({}, {}) if self.control is None else self.control.find_factors(skip)
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        self.steps += ~skip
        tables = (weights, gradients, self.state["exp_avg"], self.state["exp_avg_sq"], self.decays, speeds, shrinks)
        numbers = self.adamw_numbers(clips, lrs)
        update_adamw(*select_tables(self.rest, *tables), numbers=numbers, skip=skip, compiles=self.compiles)
        if self.orthogonal:
            fuse(update_muon, self.compiles)(
                *select_tables(self.orthogonal, weights, gradients, self.state["momentum_buffer"], speeds, shrinks),
                self.alike,
                self.muon_numbers(clips, lrs),
                skip,
            )

    def find_clips(self, norms: Tensor | None) -> Tensor:
        """What each member's gradient is multiplied with, as torch's `clip_grads_with_norm_` does: [S]."""
        clip = self.numbers["clip"]
        if norms is None:
            return torch.ones_like(clip)
        return torch.where(clip > 0, (clip / (norms.double() + 1e-6)).clamp(max=1.0), 1.0)

    def adamw_numbers(self, clips: Tensor, lrs: Tensor) -> Tensor:
        """What `update_adamw` needs of every member: [8, S].

        In float64, since 1 − βᵗ would lose digits; and stacked, so that no compiler computes powers anew for every
        weight.
        """
        n, steps = self.numbers, self.steps.double()
        correction, kept = (1 - n["beta2"] ** steps).rsqrt(), 1 - lrs * n["weight_decay"]
        step_size = lrs / (1 - n["beta1"] ** steps)
        numbers = [clips, 1 - n["beta1"], n["beta2"], 1 - n["beta2"], correction, n["eps"], step_size, kept]
        return torch.stack(numbers).to(self.dtype)

    def muon_numbers(self, clips: Tensor, lrs: Tensor) -> Tensor:
        """What `update_muon` needs of every member: [5, S]."""
        momentum, kept = self.numbers["momentum"], 1 - lrs * self.numbers["weight_decay"]
        return torch.stack([clips, momentum, 1 - momentum, lrs, kept]).to(self.dtype)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self, member: int) -> dict[str, Tensor]:
        """A member's state under the names that `Optimiser.tensors` gives it; the tensors themselves, not copies."""
        control = {} if self.control is None else self.control.tensors(member)
        found = {f"logit_control.{name}": tensor for name, tensor in control.items()}
        found |= {f"step.{name}": self.steps[member] for name in self.rest}
        return found | {
            f"{key}.{name}": tensor[member] for key, named in self.state.items() for name, tensor in named.items()
        }

    def factors(self, member: int) -> dict[str, Table]:
        """What logit control did to a member at its last step, as `Control.factors` says it; nothing without it."""
        return {} if self.control is None else self.control.factors(member)

    def materialise(self) -> None:
        """Nothing: unlike `Optimiser`'s, the state is there from the start, where CUDA graphs expect it."""


def measure_gradient_norms(stacked: nn.Module) -> Tensor:
    """√Σ‖g‖² over all parameters, of each member: [S] on the device."""
    return norm_members(list(read_gradients(dict(stacked.named_parameters())).values()))


def read_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    missing = [name for name in parameters if name not in found]
    if missing:
        raise ValueError(f"every parameter of a population needs a gradient, but {missing[0]} has none.")
    return found


def select_tables(names: Sequence[str], *tables: Mapping[str, Any]) -> list[list[Any]]:
    """Of every table a list in the order of the names; None for a name it lacks."""
    return [[table.get(name) for name in names] for table in tables]


def list_alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors of one shape, for every shape."""
    places: dict[torch.Size, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.shape, []).append(place)
    return list(places.values())


def refuse_mixture(specs: Sequence[OptimiserSpec], parameters: dict[str, nn.Parameter]) -> None:
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
                f"{list(parameter.shape)}; stack as many models as there are members."
            )
