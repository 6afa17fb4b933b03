"""Attention under observation while it trains: one diagnosis per call, on the same few windows each time."""

from typing import Any

import torch
from torch import Tensor

from qklab.model.decoder import Decoder
from qklab.model.diagnose import Logits, diagnose, logit_change
from qklab.model.generate import check_ids

CHANGES = ("logit_change", "largest_logit_change")


class Probe:
    """Measures a model on the fixed batch `ids` [B, T], packed as `segments` [B, T] says.

    Expects a model with plain parameters, not a sharded or compiled one (a compiled step that wraps it is left as it
    is). Two calls differ by what happened in between, so the logits of the last one are part of a checkpoint: `state`.
    """

    def __init__(self, ids: Tensor, segments: Tensor | None = None):
        check_ids(ids)
        self.ids = ids.cpu().clone()
        self.segments = None if segments is None else segments.cpu().clone()
        self.last: Logits | None = None

    def measure(self, model: Decoder) -> dict[str, Any]:
        """Quantity → a list per layer of a number per softmax, None where it does not exist or is not finite.

        `logit_change` and `largest_logit_change` compare with the previous call; at the first they are None.
        """
        device = model.embed.weight.device
        segments = None if self.segments is None else self.segments.to(device)
        diagnosis = diagnose(model, self.ids.to(device), segments)
        table = dict(diagnosis)
        if self.last is not None:
            before = Logits(self.last.queries.to(device), self.last.keys.to(device))  # a restored one is on the CPU
            table |= logit_change(before, diagnosis)
        self.last = diagnosis.logits
        numbers = torch.stack(list(table.values())).tolist()  # one wait for the device
        return dict.fromkeys(CHANGES) | dict(zip(table, map(round_numbers, numbers), strict=True))

    def state(self) -> dict[str, Tensor]:
        """The batch and the logits of the last call, as their two factors; on the CPU."""
        state = {"ids": self.ids}
        if self.segments is not None:
            state["segments"] = self.segments
        if self.last is not None:
            state |= {"queries": self.last.queries.cpu(), "keys": self.last.keys.cpu()}
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from another probe's `state`: the next change is the one that probe would have seen."""
        own = {name: tensor for name, tensor in self.state().items() if name in ("ids", "segments")}
        theirs = {name: state[name].cpu() for name in ("ids", "segments") if name in state}
        if own.keys() != theirs.keys() or not all(torch.equal(own[name], theirs[name]) for name in own):
            raise ValueError("the probe's state is of another batch; resume with the data and settings of the run.")
        self.last = Logits(state["queries"].clone(), state["keys"].clone()) if "queries" in state else None


def round_numbers(value: Any) -> Any:
    """Nested lists with six digits a number; JSON has no NaN."""
    if isinstance(value, list):
        return [round_numbers(item) for item in value]
    return float(f"{value:.6g}") if abs(value) < float("inf") else None
