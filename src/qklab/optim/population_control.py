"""Logit control of a population: the formulas of `LogitControl` and `QKClip`, with τ or a threshold per member."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qklab.optim.control import copy_by_layer, list_sources, refuse_layers, why_normalised
from qklab.optim.logit_control import LogitControl, learning_rate_factors, refuse_zero
from qklab.optim.norms import RowValues, Table, group_layers, name_tables
from qklab.optim.qk_clip import LogitWatch, QKClip, clip_factors, why_not_clippable
from qklab.optim.roles import Roles, attention_roles
from qklab.optim.rows import AllRows, RowSource, wide_dtype
from qklab.optim.spec import LogitControlSpec
from qklab.optim.update import fuse, square_rows

RowFactors = dict[str, Tensor]  # parameter → a factor per member and row, shaped to multiply it


class PopulationControl:
    """What logit control multiplies the members' updates (`quack`, `fixed`) or weights (`qk-clip`) with.

    Roles and rows are those of one member; tables have the members in front, [S, layers, heads]. For QK-clip every
    attention layer must raise its `watched`, here [S, heads], to the largest logit of each member's own rows.
    """

    def __init__(self, controls: Sequence[LogitControlSpec], stacked: nn.Module):
        self.method, self.norm = controls[0].method, controls[0].norm
        self.parameters = {name: parameter.detach() for name, parameter in stacked.named_parameters()}
        shares = {name: parameter[0] for name, parameter in self.parameters.items()}
        self.names = {id(share): name for name, share in shares.items()}
        self.roles: Roles = functional_call(RolesReader(stacked), {f"model.{n}": s for n, s in shares.items()}, ())
        self.rows = AllRows(list_sources(self.roles, {}, {}))
        self.sources = {id(source.tensor): source for source in self.rows.sources}
        self.groups = group_layers(self.roles, self.rows, {})
        self.row_values = RowValues(self.groups, self.rows)
        if self.method == "qk-clip":
            refuse_layers(QKClip, self.roles, why_normalised)
            refuse_layers(QKClip, self.roles, why_not_clippable)
            self.watch = LogitWatch(self.roles, self.rows, len(controls))
            self.setting = self.per_member([control.threshold for control in controls])
            like = self.find_tables()
        else:
            self.setting = self.per_member([control.tau for control in controls])
            like = self.initial = self.measure()
        if self.method == "quack":
            refuse_layers(LogitControl, self.roles, why_normalised)
            refuse_zero(self.groups, self.initial)
        self.latest = [{symbol: torch.ones_like(value) for symbol, value in table.items()} for table in like]

    @classmethod
    def of(cls, controls: Sequence[LogitControlSpec], stacked: nn.Module) -> PopulationControl | None:
        """None for method "none"."""
        members = len(next(stacked.parameters()))
        if len(controls) != members:
            raise ValueError(f"logit control is one per member, {members}, but {len(controls)} came.")
        kinds = sorted({f"method={control.method!r} with norm={control.norm!r}" for control in controls})
        if len(kinds) > 1:
            raise ValueError(f"the members of a population share one logit control, but {' and '.join(kinds)} came.")
        return None if controls[0].method == "none" else cls(controls, stacked)

    def per_member(self, values: Sequence[float]) -> Tensor:
        """[S, 1, 1], to be multiplied with tables."""
        return torch.tensor(values, dtype=self.rows.precision, device=self.rows.device)[:, None, None]

    @torch.no_grad()
    def measure(self) -> list[Table]:
        """The norms of all projections: for each group of layers, symbol → [S, layers, heads]."""
        if self.norm == "spectral":
            return [group.spectral(self.read_matrix) for group in self.groups]
        weights = [self.of_members(source.tensor) for source in self.rows.sources]
        gains = [None if source.gain is None else self.of_members(source.gain) for source in self.rows.sources]
        squares = fuse(square_rows, self.rows.device.type == "cuda")(weights, gains).to(self.rows.precision)
        return [group.frobenius(squares) for group in self.groups]

    def of_members(self, share: Tensor) -> Tensor:
        """The first member's share of a parameter → the parameter, in the precision norms are taken in."""
        parameter = self.parameters[self.names[id(share)]]
        return parameter.to(wide_dtype(parameter.dtype))

    def read_matrix(self, share: Tensor) -> Tensor:
        """[S, outputs, inputs], gain included; a bias as one column."""
        matrix, gain = self.of_members(share), self.sources[id(share)].gain
        if matrix.dim() == 2:
            return matrix[..., None]
        return matrix if gain is None else matrix * self.of_members(gain)[:, None, :]

    def find_factors(self, skip: Tensor) -> tuple[RowFactors, RowFactors]:
        """For the coming step: what updates, and what the weights after it, are multiplied with. A member that skips
        it keeps the factors of its last."""
        for latest, table in zip(self.latest, self.find_tables(), strict=True):
            for symbol, value in table.items():
                latest[symbol].copy_(torch.where(skip[:, None, None], latest[symbol], value))
        if self.method == "qk-clip":
            self.watch.reset()
            return {}, self.spread(self.latest)
        return self.spread([{s: self.setting * value for s, value in table.items()} for table in self.latest]), {}

    def find_tables(self) -> list[Table]:
        """The factors that follow from the weights as they are, or from the logits since the last step."""
        if self.method == "fixed":
            return [{} for _ in self.groups]
        if self.method == "qk-clip":
            return [clip_factors(group.layer, self.watch.of_group(group), self.setting) for group in self.groups]
        return [
            learning_rate_factors(group.layer, now, then)
            for group, now, then in zip(self.groups, self.measure(), self.initial, strict=True)
        ]

    def spread(self, tables: Sequence[Table]) -> RowFactors:
        per_row = self.row_values.spread(tables)  # [S, rows]
        return {self.names[id(source.tensor)]: self.of_source(source, per_row) for source in self.rows.sources}

    def of_source(self, source: RowSource, per_row: Tensor) -> Tensor:
        values = per_row[:, source.first : source.first + source.rows].to(wide_dtype(source.tensor.dtype))
        return values if source.tensor.dim() == 1 else values[..., None]

    def of_member(self, tables: Sequence[Table], member: int) -> list[Table]:
        return [{symbol: value[member] for symbol, value in table.items()} for table in tables]

    def factors(self, member: int) -> dict[str, Table]:
        return copy_by_layer(self.roles, self.groups, self.of_member(self.latest, member))

    def tensors(self, member: int) -> dict[str, Tensor]:
        """A member's own state under the names that `Control.tensors` gives it; views."""
        tables = (
            {"factors": self.latest} if self.method == "qk-clip" else {"initial": self.initial, "factors": self.latest}
        )
        return {
            f"{key}.{name}": tensor
            for key, table in tables.items()
            for name, tensor in name_tables(self.groups, self.of_member(table, member)).items()
        }


class RolesReader(nn.Module):
    """The roles of a model's attention, in a call: so that they can be read with other tensors as its parameters."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self) -> Roles:
        return attention_roles(self.model)
