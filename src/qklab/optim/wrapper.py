"""One optimiser around one or several others: their groups and state as its own, so that learning-rate schedules,
gradient scalers and checkpoints take it for an optimiser like any other."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from qklab.schema import format_value


class Wrapper(torch.optim.Optimizer):
    """`bases` stepped one after another; subclasses add what happens around the step and their own `extra` state."""

    key: str  # under which `extra` stands in the state

    def __init__(self, bases: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]):
        listed = [bases] if isinstance(bases, torch.optim.Optimizer) else bases
        self.bases: list[torch.optim.Optimizer] = list(listed) if isinstance(listed, Iterable) else []
        if not self.bases or not all(isinstance(base, torch.optim.Optimizer) for base in self.bases):
            raise ValueError(
                f"{type(self).__name__} wraps a torch optimiser or several, but {format_value(bases)} came."
            )
        self.defaults = self.bases[0].defaults
        # Optimizer.__init__ would make param_groups and state of its own
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._patch_step_function()

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
        if len(self.bases) > 1:
            raise ValueError("a parameter group must be added to one of the wrapped optimisers, not to all of them.")
        self.bases[0].add_param_group(param_group)

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

    def extra(self) -> dict[str, Any]:
        """The wrapper's own state."""
        raise NotImplementedError

    def load_extra(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

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
        return {"state": state, "param_groups": groups, self.key: self.extra()}

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
        self.load_extra(state_dict[self.key])
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
