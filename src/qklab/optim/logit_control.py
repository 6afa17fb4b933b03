"""LogitControl: learning rates of queries and keys that bound how fast attention changes (QuacK, arXiv 2511.21377)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from qklab.optim.control import Control, GivenRoles, Optimisers, check_positive, refuse_layers, why_normalised
from qklab.optim.norms import LayerGroup, Table, group_queries, name_tables, repeat_keys
from qklab.optim.roles import MEANING, LayerRoles, check_choice

NormKind = Literal["frobenius", "spectral"]
Method = Literal["quack", "fixed", "none"]
FLOOR = 0.3  # of its initial value, below which a norm counts no further

# what an optimiser does with a group's weight_decay: scale the weight by 1 − lr·decay, or add it to the gradient
DECOUPLED = ("Muon", "Adafactor")
COUPLED = ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop")


class LogitControl(Control):
    """An optimiser whose updates of W_q and W_k are scaled per head, so that attention logits change at a set speed.

    A step changes logits by about (Q ΔKᵀ + ΔQ Kᵀ)/√D, so an update of bounded size moves them in proportion to the
    *other* matrix. Before every step, per layer and head, with ‖·‖₀ the norm when this object was made:

        W_q^h: lr = τ η ‖W_k^h‖₀/‖W_k^h‖        W_k^h: lr = τ η ‖W_q^h‖₀/‖W_q^h‖

    Everything else keeps η, and weight decay is not scaled. docs/logit-control.md has the formulas for grouped, shared,
    coupled, differential and latent attention, and the bound on the change of a logit.

    Args:
        optimizer: The optimiser, or several that share the model (Muon for matrices, AdamW for the rest).
        roles: `attention_roles(model)`, or a mapping from names to keywords of `layer_roles`.
        tau: τ, the speed.
        norm: ‖·‖, "frobenius" or "spectral".
        method: "quack" as above; "fixed": τη for all these weights; "none": η, the optimiser as it is.
        masters: Where the optimiser holds float32 copies of the weights in `roles`: weight → master.
        decoupled_decay: Whether the optimiser applies weight decay to the weight itself (AdamW) or to the gradient
            (Adam); only needed for one that is not torch's.
    """

    key = "logit_control"

    def __init__(
        self,
        optimizer: Optimisers,
        roles: GivenRoles,
        tau: float = 1.0,
        norm: NormKind = "frobenius",
        *,
        method: Method = "quack",
        masters: Mapping[Any, Tensor] | None = None,
        decoupled_decay: bool | None = None,
    ):
        self.tau = check_positive("tau", tau)
        self.norm: NormKind = check_choice("norm", norm, ("frobenius", "spectral"))
        self.method: Method = check_choice("method", method, ("quack", "fixed", "none"))
        self.decoupled_decay = decoupled_decay
        super().__init__(optimizer, roles, masters)
        self.decay_factors()  # refuses decay of an unknown kind now, not at the first step
        if self.method == "quack":
            refuse_layers(LogitControl, self.roles, why_normalised)
        self.initial = self.measure(self.rows.read())
        if self.method == "quack":
            refuse_zero(self.groups, self.initial)
        self.latest = [{s: torch.ones_like(n) for s, n in table.items()} for table in self.initial]

    @torch.no_grad()
    def measure(self, copies: Sequence[Tensor]) -> list[Table]:
        """The norms of all projections: for each group of layers, symbol → [layers, heads]."""
        if self.norm == "spectral":
            return [group.spectral(functools.partial(self.rows.matrix, copies=copies)) for group in self.groups]
        squares = self.rows.squares(copies)
        return [group.frobenius(squares) for group in self.groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimisers, with the updates of queries and keys scaled."""
        if self.method == "none" or (self.method == "fixed" and self.tau == 1.0):
            return self.step_bases(closure)
        copies = self.rows.read()
        if self.method == "quack":
            for group, now, then, latest in zip(
                self.groups, self.measure(copies), self.initial, self.latest, strict=True
            ):
                for symbol, factor in learning_rate_factors(group.layer, now, then).items():
                    latest[symbol].copy_(factor)
        scales = [{symbol: self.tau * factor for symbol, factor in table.items()} for table in self.latest]
        loss = self.step_bases(closure)
        self.rows.scale_updates(copies, self.row_values.spread(scales), self.decay_factors())
        return loss

    def decay_factors(self) -> dict[tuple[int, int], tuple[Any, Tensor | None]]:
        """For every parameter group (by its base's number and its own) the part of a weight that decay leaves in a
        step, 1 − lr·decay, and a scalar on the device that is 1 where the step was skipped there."""
        labels = {source.label for source in self.rows.sources}
        return {
            (number, at): (1 - group["lr"] * self.decoupled_decay_of(base, group), getattr(base, "found_inf", None))
            for number, base in enumerate(self.bases)
            for at, group in enumerate(base.param_groups)
            if (number, at) in labels
        }

    def decoupled_decay_of(self, base: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
        """The group's weight decay where it is applied to the weight itself; 0 where it is part of the update."""
        decay = group.get("weight_decay", 0.0)
        names = {kind.__name__ for kind in type(base).__mro__}
        decoupled = self.decoupled_decay
        if decoupled is None:
            decoupled = group.get("decoupled_weight_decay", True if names & set(DECOUPLED) else None)
        if decoupled is None and not names & set(COUPLED) and decay:
            raise ValueError(
                f"{type(base).__name__} has weight_decay={decay:g}, and LogitControl, which does not scale decay, "
                "cannot tell whether that acts on the weight or on the gradient; say decoupled_decay=True or False."
            )
        return decay if decoupled else 0.0

    def tensors(self) -> dict[str, Tensor]:
        initial = {f"initial.{name}": tensor for name, tensor in name_tables(self.groups, self.initial).items()}
        return initial | super().tensors()

    def settings(self) -> dict[str, str]:
        return {"method": self.method, "norm": self.norm}


def refuse_zero(groups: Sequence[LayerGroup], initial: Sequence[Table]) -> None:
    for group, table in zip(groups, initial, strict=True):
        for symbol, norms in table.items():
            bad = (~(norms.isfinite() & (norms > 0))).nonzero().tolist()
            if bad:
                *_, layer, head = bad[0]
                raise ValueError(
                    f"{MEANING[symbol]} of {group.names[layer]}, head {head}, is zero or not finite, so its norm "
                    "cannot be what later ones are compared with; initialise it first, or use method='fixed'."
                )


def find_allowance(layer: LayerRoles, n: Mapping[str, Tensor]) -> Table:
    """How fast each projection may move, up to a constant, for logits to move at a constant speed; `n` are the norms.

    MHA: q: 1/n(k), k: 1/n(q), of a group the largest. One matrix: 1/n of its own. Coupled: 1/√(n(q)² + n(k)²) for both.
    MLA: one over the product of the norms of the other matrices on the way to the logit, the largest over heads for
    what all heads share.
    """
    if layer.kind == "shared":
        return {"qk": 1 / n["qk"]}
    if layer.kind == "latent":
        return find_latent_allowance(layer, n)
    q, k = group_queries(n["q"], n["k"]).amax(-1), repeat_keys(n["k"], n["q"])
    if layer.coupling == "none":
        return {"q": 1 / k, "k": 1 / q}
    return {"q": 1 / torch.hypot(n["q"], k), "k": 1 / torch.hypot(q, n["k"])}


def find_latent_allowance(layer: LayerRoles, n: Mapping[str, Tensor]) -> Table:
    uq, uk, dkv = n["uq"], n["uk"], n["dkv"]
    dq = n.get("dq", torch.ones_like(dkv))
    # what a norm divides out again does not reach the logit
    dq_seen = torch.ones_like(dq) if layer.projections["uq"].gain is not None else dq
    dkv_seen = torch.ones_like(dkv) if layer.projections["uk"].gain is not None else dkv
    allowed = {
        "uq": 1 / (dq_seen * uk * dkv_seen),
        "uk": 1 / (uq * dq_seen * dkv_seen),
        "dq": 1 / (uq * uk * dkv).amax(-1, keepdim=True),
        "dkv": 1 / (uq * dq * uk).amax(-1, keepdim=True),
    }
    if "qr" in n:
        qr, kr = n["qr"], n["kr"]
        allowed["qr"] = 1 / (dq_seen * kr).expand_as(qr)
        allowed["kr"] = 1 / (qr * dq_seen).amax(-1, keepdim=True)
        allowed["dq"] = torch.minimum(allowed["dq"], 1 / (qr * kr).amax(-1, keepdim=True))
    return {symbol: allowed[symbol] for symbol in n}


def learning_rate_factors(layer: LayerRoles, now: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> Table:
    """lr/(τη) of every projection: allowance(now)/allowance(initial), each norm now at least 0.3 of the initial one.

    The down-projection of a normalised latent is also multiplied by min(1, n(now)/n(initial)): the smaller it is, the
    more a step turns the latent.
    """
    held = {symbol: torch.maximum(now[symbol], FLOOR * initial[symbol]) for symbol in now}
    then = find_allowance(layer, initial)
    factors = {symbol: value / then[symbol] for symbol, value in find_allowance(layer, held).items()}
    for down, up in (("dq", "uq"), ("dkv", "uk")):
        if down in factors and layer.projections[up].gain is not None:
            factors[down] = factors[down] * (held[down] / initial[down]).clamp(max=1.0)
    return factors
