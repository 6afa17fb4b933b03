"""Optimisers that control attention logits: QuacK (arXiv 2511.21377) and its alternatives in one interface."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from qklab.attention.layer import Attention
from qklab.optim.attention_roles import MEANING, LayerRoles, Roles, as_roles, claimed, refuse_overlap
from qklab.optim.norms import Family, PerRow, families
from qklab.optim.quack import Table, clip_factors, learning_rate_factors
from qklab.optim.rows import AllRows
from qklab.optim.watch import Watch
from qklab.optim.wrapper import Wrapper
from qklab.schema import format_value, suggest_name

Norm = Literal["frobenius", "spectral"]
Method = Literal["quack", "fixed", "none"]
Optimisers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
GivenRoles = Mapping[str, LayerRoles | Mapping[str, Any]]

# what an optimiser does with a group's weight_decay: scale the weight by 1 − lr·decay, or add it to the gradient
DECOUPLED = ("Muon", "Adafactor")
COUPLED = ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop")


class Control(Wrapper):
    """What the controls share: roles, the rows they stand for, and tables of numbers per layer, part and head."""

    def __init__(self, optimizer: Optimisers, roles: GivenRoles, masters: Mapping[Any, Tensor] | None):
        super().__init__(optimizer)
        self.roles: Roles = as_roles(roles)
        refuse_overlap(self.roles)
        stand_in = {id(weight): master for weight, master in (masters or {}).items()}
        self.labels = {
            id(parameter): (number, at)
            for number, base in enumerate(self.bases)
            for at, group in enumerate(base.param_groups)
            for parameter in group["params"]
        }
        wanted = []
        for _, _, part in claimed(self.roles):
            for tensor, axis in ((part.weight, part.axis), (part.bias, 0)):
                if tensor is not None:
                    tensor = stand_in.get(id(tensor), tensor)
                    gain = part.gain if tensor.dim() == 2 else None
                    gain = gain if gain is None else stand_in.get(id(gain), gain)
                    wanted.append((tensor, axis, gain, self.labels.get(id(tensor))))
        self.refuse_strangers(wanted)
        self.rows = AllRows(wanted)
        self.families: list[Family] = families(self.roles, self.rows, stand_in)
        self.per_row = PerRow(self.families, self.rows)
        self.latest: list[Table] = []

    def refuse_strangers(self, wanted: Sequence[tuple[Tensor, int, Tensor | None, Any]]) -> None:
        if any(tensor.is_meta for tensor, *_ in wanted):
            raise ValueError("the attention weights have no values yet (device meta); give them values first.")
        if all(label is None for *_, label in wanted):
            raise ValueError(
                "none of the attention weights is in the optimiser; call attention_roles on the model whose parameters "
                "it got (after sharding it), or say with masters={weight: master} what stands for them."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimiser; not those of queries and keys, which it must have from the start."""
        given = param_group["params"]
        added = [given] if isinstance(given, Tensor) else list(given)
        known = {id(source.tensor) for source in self.rows.sources}
        if any(id(tensor) in known for tensor in added):
            raise ValueError("a weight that roles name must be in the optimiser before it is wrapped; wrap it anew.")
        super().add_param_group(param_group | {"params": added})

    def forget(self) -> None:
        """Forget what was seen since the last step."""

    def factors(self) -> dict[str, Table]:
        """Layer → part → a number per head [heads]: what the last step's updates were multiplied with, τ aside; for
        QK-clip, what the weights were. On the device, so that asking does not wait for it."""
        found: dict[str, Table] = {}
        for family, table in zip(self.families, self.latest, strict=True):
            found |= family.by_layer({symbol: value.clone() for symbol, value in table.items()})
        return {name: found[name] for name in self.roles}

    def tensors(self) -> dict[str, Tensor]:
        """The own state by name, as [heads] each; the tensors themselves, so that loading into them restores it."""
        return {f"factors.{name}": tensor for name, tensor in self.named(self.latest).items()}

    def named(self, tables: Sequence[Table]) -> dict[str, Tensor]:
        return {
            f"{name}.{symbol}": values
            for family, table in zip(self.families, tables, strict=True)
            for name, parts in family.by_layer(table).items()
            for symbol, values in parts.items()
        }

    def settings(self) -> dict[str, str]:
        """What must be the same where the state is loaded."""
        return {}

    def extra(self) -> dict[str, Any]:
        return {"tensors": {name: tensor.clone() for name, tensor in self.tensors().items()}} | self.settings()

    def load_extra(self, state: dict[str, Any]) -> None:
        for name, value in self.settings().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the state is of {name}={format_value(state.get(name))}, but here {name}={format_value(value)}."
                )
        own, theirs = self.tensors(), state["tensors"]
        for name in own.keys() | theirs.keys():
            if name not in own or name not in theirs or own[name].shape != theirs[name].shape:
                raise ValueError(f"the state is of another model: they differ in {name}.")
        for name, tensor in own.items():
            tensor.copy_(theirs[name])

    def refuse(self, reason: Callable[[LayerRoles], str | None]) -> None:
        for name, layer in self.roles.items():
            if (why := reason(layer)) is not None:
                raise ValueError(f"{type(self).__name__} refuses layer {name}: {why}")


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
        norm: Norm = "frobenius",
        *,
        method: Method = "quack",
        masters: Mapping[Any, Tensor] | None = None,
        decoupled_decay: bool | None = None,
    ):
        self.tau = positive("tau", tau)
        self.norm: Norm = one_of("norm", norm, ("frobenius", "spectral"))
        self.method: Method = one_of("method", method, ("quack", "fixed", "none"))
        self.decoupled_decay = decoupled_decay
        super().__init__(optimizer, roles, masters)
        self.kept()  # refuses decay of an unknown kind now, not at the first step
        if self.method == "quack":
            self.refuse(normalised)
        self.initial = self.measure(self.rows.read())
        if self.method == "quack":
            self.refuse_zero()
        self.latest = [{s: torch.ones_like(n) for s, n in table.items()} for table in self.initial]

    @torch.no_grad()
    def measure(self, copies: Sequence[Tensor]) -> list[Table]:
        """The norms of all parts: for each family, symbol → [layers, heads]."""
        if self.norm == "spectral":
            return [family.spectral(self.rows, copies) for family in self.families]
        squares = self.rows.squares(copies)
        return [family.frobenius(squares) for family in self.families]

    def refuse_zero(self) -> None:
        for family, table in zip(self.families, self.initial, strict=True):
            for symbol, norms in table.items():
                bad = (~(norms.isfinite() & (norms > 0))).nonzero().tolist()
                if bad:
                    layer, head = bad[0]
                    raise ValueError(
                        f"{MEANING[symbol]} of {family.names[layer]}, head {head}, is zero or not finite, so its norm "
                        "cannot be what later ones are compared with; initialise it first, or use method='fixed'."
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimisers, with the updates of queries and keys scaled."""
        if self.method == "none" or (self.method == "fixed" and self.tau == 1.0):
            return self.step_bases(closure)
        copies = self.rows.read()
        if self.method == "quack":
            for family, now, then, latest in zip(
                self.families, self.measure(copies), self.initial, self.latest, strict=True
            ):
                for symbol, factor in learning_rate_factors(family.layer, now, then).items():
                    latest[symbol].copy_(factor)
        scales = [{symbol: self.tau * factor for symbol, factor in table.items()} for table in self.latest]
        loss = self.step_bases(closure)
        self.rows.scale_updates(copies, self.per_row.spread(scales), self.kept())
        return loss

    def kept(self) -> dict[tuple[int, int], tuple[Any, Tensor | None]]:
        """For every parameter group (by its base's number and its own) the part of a weight that decay leaves in a
        step, 1 − lr·decay, and a scalar on the device that is 1 where the step was skipped there."""
        labels = {source.label for source in self.rows.sources}
        return {
            (number, at): (1 - group["lr"] * self.decay(base, group), getattr(base, "found_inf", None))
            for number, base in enumerate(self.bases)
            for at, group in enumerate(base.param_groups)
            if (number, at) in labels
        }

    def decay(self, base: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
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
        initial = {f"initial.{name}": tensor for name, tensor in self.named(self.initial).items()}
        return initial | super().tensors()

    def settings(self) -> dict[str, str]:
        return {"method": self.method, "norm": self.norm}


class QKClip(Control):
    """An optimiser that shrinks W_q and W_k after a step wherever a logit has grown too large (arXiv 2507.20534).

    Per layer and head, with S the largest scaled logit since the last step and t the threshold: γ = min(1, t/S), and
    the logits are multiplied with γ through the weights, W_q and W_k by √γ each; docs/logit-control.md has the other
    kinds of attention. S is measured in the forward passes in training mode, for which the layers are watched from now
    on, or told by `observe`.

    Args:
        optimizer: The optimiser, or several that share the model.
        roles: `attention_roles(model)`, or a mapping from names to keywords of `layer_roles`.
        threshold: t.
        masters: Where the optimiser holds float32 copies of the weights in `roles`: weight → master.
    """

    key = "qk_clip"

    def __init__(
        self,
        optimizer: Optimisers,
        roles: GivenRoles,
        threshold: float = 100.0,
        *,
        masters: Mapping[Any, Tensor] | None = None,
    ):
        self.threshold = positive("threshold", threshold)
        super().__init__(optimizer, roles, masters)
        self.refuse(normalised)
        self.refuse(not_clippable)
        heads = {name: layer.query.heads for name, layer in self.roles.items()}
        modules = {name: layer.module for name, layer in self.roles.items()}
        self.watch = Watch(heads, modules, self.rows.device)
        self.latest = [self.clips(family, ones=True) for family in self.families]

    def forget(self) -> None:
        self.watch.reset()

    def observe(self, layer: str, largest: Tensor) -> None:
        """Say that the logits of a layer reached `largest` [heads], for layers that cannot be watched."""
        self.watch.observe(layer, largest)

    def clips(self, family: Family, ones: bool = False) -> Table:
        largest = torch.stack([self.watch.largest[name] for name in family.names])
        table = clip_factors(family.layer, largest, self.threshold)
        return {symbol: torch.ones_like(value) for symbol, value in table.items()} if ones else table

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimisers, then the weights of heads whose logits were too large shrunk."""
        loss = self.step_bases(closure)
        skips = [skip for base in self.bases if (skip := getattr(base, "found_inf", None)) is not None]
        self.watch.agree()
        for family, latest in zip(self.families, self.latest, strict=True):
            for symbol, value in self.clips(family).items():
                for skip in skips:  # 1 where the device skipped the step
                    value = torch.where(skip > 0, 1.0, value)
                latest[symbol].copy_(value)
        self.watch.reset()
        self.rows.multiply(self.per_row.spread(self.latest))
        return loss


def normalised(layer: LayerRoles) -> str | None:
    why = "its q and k are normalised, so the norm decides how large its logits are, not W_q and W_k."
    return why if layer.qk_norm else None


def not_clippable(layer: LayerRoles) -> str | None:
    if isinstance(layer.module, Attention) and layer.module.spec.asymmetry_2d:
        return "its logits have a bias of their own (asymmetry_2d), which smaller W_q and W_k do not shrink."
    if layer.coupling == "nonlinear":
        return "its coupling is not linear, so smaller W_q and W_k do not make its logits smaller in proportion."
    if layer.coupling == "linear" and layer.key_is_value:
        return "under a linear coupling W_k would have to shrink, and with it the values, which are the keys."
    return None


def positive(name: str, value: Any) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number above 0, but {format_value(value)} came.")
    return float(number)


def one_of(name: str, value: Any, among: tuple[str, ...]) -> Any:
    if value not in among:
        words = ", ".join(map(repr, among))
        raise ValueError(f"{name} must be one of {words}{suggest_name(value, among)}, but {format_value(value)} came.")
    return value
