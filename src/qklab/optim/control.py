"""What the controls of attention logits share: one optimiser around one or several others.

Their groups and state are its own, so that learning-rate schedules, gradient scalers and checkpoints take it for an
optimiser like any other.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qklab.optim.norms import LayerGroup, RowValues, Table, group_layers, name_tables
from qklab.optim.roles import LayerRoles, Roles, each_projection, read_roles, refuse_overlap
from qklab.optim.rows import AllRows
from qklab.schema import format_value

Optimisers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
GivenRoles = Mapping[str, LayerRoles | Mapping[str, Any]]


class Control(torch.optim.Optimizer):
    """`bases` stepped one after another; subclasses add what happens to the rows of `roles` around the step, and keep
    tables of numbers per layer, projection and head."""

    key: str  # under which the own state stands beside the bases'

    def __init__(self, optimizer: Optimisers, roles: GivenRoles, masters: Mapping[Any, Tensor] | None):
        self.bases = list_optimisers(type(self).__name__, optimizer)
        self.defaults = self.bases[0].defaults
        # Optimizer.__init__ would make param_groups and state of its own
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._patch_step_function()
        self.roles: Roles = read_roles(roles)
        refuse_overlap(self.roles)
        masters = {id(weight): master for weight, master in (masters or {}).items()}
        labels = {
            id(parameter): (number, at)
            for number, base in enumerate(self.bases)
            for at, group in enumerate(base.param_groups)
            for parameter in group["params"]
        }
        wanted = list_sources(self.roles, masters, labels)
        refuse_strangers(wanted)
        self.rows = AllRows(wanted)
        self.groups: list[LayerGroup] = group_layers(self.roles, self.rows, masters)
        self.row_values = RowValues(self.groups, self.rows)
        self.latest: list[Table] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bases' groups themselves: what a schedule writes into them, they read."""
        return [group for base in self.bases for group in base.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bases' state; one dictionary only where there is one base."""
        if len(self.bases) == 1:
            return self.bases[0].state
        merged: defaultdict[Tensor, Any] = defaultdict(dict)
        for base in self.bases:
            merged.update(base.state)
        return merged

    # with a gradient scaler: let it unscale and check gradients itself, and call `step` only where they are finite
    _step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimiser; not those of queries and keys, which it must have from the start."""
        given = param_group["params"]
        added = [given] if isinstance(given, Tensor) else list(given)
        known = {id(source.tensor) for source in self.rows.sources}
        if any(id(tensor) in known for tensor in added):
            raise ValueError("a weight that roles name must be in the optimiser before it is wrapped; wrap it anew.")
        if len(self.bases) > 1:
            raise ValueError("a parameter group must be added to one of the wrapped optimisers, not to all of them.")
        self.bases[0].add_param_group(param_group | {"params": added})

    def __getstate__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; make one around another optimiser and load this "
            "one's state_dict into it."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        for base in self.bases:
            base.zero_grad(set_to_none=set_to_none)

    def step_bases(self, closure: Callable[[], Any] | None) -> Any:
        if len(self.bases) == 1:
            return self.bases[0].step(closure) if closure is not None else self.bases[0].step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for base in self.bases:
            base.step()
        return loss

    def forget(self) -> None:
        """Forget what was seen since the last step."""

    def factors(self) -> dict[str, Table]:
        """Layer → symbol → a number per head [heads]: what the last step's updates were multiplied with, τ aside; for
        QK-clip, what the weights were. On the device, so that asking does not wait for it."""
        return copy_by_layer(self.roles, self.groups, self.latest)

    def tensors(self) -> dict[str, Tensor]:
        """The own state by name, as [heads] each; the tensors themselves, so that loading into them restores it."""
        return {f"factors.{name}": tensor for name, tensor in name_tables(self.groups, self.latest).items()}

    def settings(self) -> dict[str, str]:
        """What must be the same where the state is loaded."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """As any optimiser's: `state` and `param_groups`, parameters numbered through all bases; and the own state."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for base in self.bases:
            part = base.state_dict()
            state |= {first + number: values for number, values in part["state"].items()}
            groups += [group | {"params": [first + n for n in group["params"]]} for group in part["param_groups"]]
            first += sum(len(group["params"]) for group in part["param_groups"])
        own = {"tensors": {name: tensor.clone() for name, tensor in self.tensors().items()}} | self.settings()
        return {"state": state, "param_groups": groups, self.key: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        missing = [name for name in ("state", "param_groups", self.key) if name not in state_dict]
        if missing:
            raise ValueError(
                f"the state has no {missing[0]!r}, so it is not that of a {type(self).__name__}; load it into the "
                "wrapped optimiser instead."
            )
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(state_dict['param_groups'])} parameter groups, but the wrapped optimisers have "
                f"{len(self.param_groups)}."
            )
        self.load_own_state(state_dict[self.key])
        first = at = 0
        for base in self.bases:
            count = sum(len(group["params"]) for group in base.param_groups)
            groups = state_dict["param_groups"][at : at + len(base.param_groups)]
            own = range(first, first + count)
            base.load_state_dict(
                {
                    "state": {n - first: values for n, values in state_dict["state"].items() if n in own},
                    "param_groups": [group | {"params": [n - first for n in group["params"]]} for group in groups],
                }
            )
            first, at = first + count, at + len(groups)

    def load_own_state(self, state: dict[str, Any]) -> None:
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


def list_sources(
    roles: Roles, masters: Mapping[int, Tensor], labels: Mapping[int, Any]
) -> list[tuple[Tensor, int, Tensor | None, Any]]:
    """What `AllRows` counts: every weight and bias of the roles, or its master, with its label."""
    found = []
    for _, _, rows in each_projection(roles):
        for tensor, axis in ((rows.weight, rows.axis), (rows.bias, 0)):
            if tensor is not None:
                tensor = masters.get(id(tensor), tensor)
                gain = rows.gain if tensor.dim() == 2 else None
                gain = gain if gain is None else masters.get(id(gain), gain)
                found.append((tensor, axis, gain, labels.get(id(tensor))))
    return found


def copy_by_layer(roles: Roles, groups: Sequence[LayerGroup], tables: Sequence[Table]) -> dict[str, Table]:
    found: dict[str, Table] = {}
    for group, table in zip(groups, tables, strict=True):
        found |= group.by_layer({symbol: value.clone() for symbol, value in table.items()})
    return {name: found[name] for name in roles}


def refuse_layers(wrapper: type, roles: Roles, reason: Callable[[LayerRoles], str | None]) -> None:
    for name, layer in roles.items():
        if (why := reason(layer)) is not None:
            raise ValueError(f"{wrapper.__name__} refuses layer {name}: {why}")


def list_optimisers(wrapper: str, given: Optimisers) -> list[torch.optim.Optimizer]:
    listed = [given] if isinstance(given, torch.optim.Optimizer) else given
    bases = list(listed) if isinstance(listed, Iterable) else []
    if not bases or not all(isinstance(base, torch.optim.Optimizer) for base in bases):
        raise ValueError(f"{wrapper} wraps a torch optimiser or several, but {format_value(given)} came.")
    return bases


def refuse_strangers(wanted: Sequence[tuple[Tensor, int, Tensor | None, Any]]) -> None:
    if any(tensor.is_meta for tensor, *_ in wanted):
        raise ValueError("the attention weights have no values yet (device meta); give them values first.")
    if all(label is None for *_, label in wanted):
        raise ValueError(
            "none of the attention weights is in the optimiser; call attention_roles on the model whose parameters "
            "it got (after sharding it), or say with masters={weight: master} what stands for them."
        )


def why_normalised(layer: LayerRoles) -> str | None:
    why = "its q and k are normalised, so the norm decides how large its logits are, not W_q and W_k."
    return why if layer.qk_norm else None


def check_positive(name: str, value: Any) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number above 0, but {format_value(value)} came.")
    return float(number)
