"""Norms of the projections of attention layers, and numbers per head handed back to their rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qklab.optim.roles import LayerRoles, Roles
from qklab.optim.rows import AllRows

Table = dict[str, Tensor]  # symbol → a number per layer and head, [layers, heads]; of a population [S, layers, heads]


def repeat_keys(key: Tensor, query: Tensor) -> Tensor:
    """What belongs to a key head, at each query head that reads it: [..., G] → [..., H]."""
    return key.repeat_interleave(query.shape[-1] // key.shape[-1], -1)


def group_queries(query: Tensor, key: Tensor) -> Tensor:
    """What belongs to query heads, by the key head they read: [..., H] → [..., G, H/G]."""
    return query.unflatten(-1, (key.shape[-1], -1))


class LayerGroup:
    """Layers of one kind and shape, measured together: tables have a row for each."""

    def __init__(self, roles: Roles, rows: AllRows, masters: Mapping[int, Tensor]):
        self.names = list(roles)
        self.layers = list(roles.values())
        self.layer = self.layers[0]
        self.masters = masters
        symbols = self.layer.projections
        self.own = {s: [layer.projections[s].rows.to(rows.device) for layer in self.layers] for s in symbols}
        self.index = {s: torch.stack([self.row_numbers(layer, s, rows) for layer in self.layers]) for s in symbols}

    def row_numbers(self, layer: LayerRoles, symbol: str, rows: AllRows) -> Tensor:
        """The rows of a projection among all rows, those of its bias included: [heads, D or 2D]."""
        part = layer.projections[symbol]
        firsts = [rows.first[id(self.masters.get(id(tensor), tensor))] for tensor in part.tensors]
        return torch.cat([part.rows + first for first in firsts], 1).to(rows.device)

    def frobenius(self, squares: Tensor) -> Table:
        """Squared norms of all rows [..., rows] → symbol → [..., layers, heads]."""
        return {symbol: squares[..., index].sum(-1).sqrt() for symbol, index in self.index.items()}

    def spectral(self, read: Callable[[Tensor], Tensor]) -> Table:
        """Largest singular values: symbol → [..., layers, heads]; `read` gives a tensor as [..., outputs, inputs]."""
        return {
            symbol: largest_singular_value(
                torch.stack([self.matrix(number, symbol, read) for number in range(len(self.layers))], -4)
            )
            for symbol in self.index
        }

    def matrix(self, number: int, symbol: str, read: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., heads, D, inputs (+1)] of one layer."""
        part = self.layers[number].projections[symbol]
        columns = [read(self.masters.get(id(tensor), tensor)) for tensor in part.tensors]
        return torch.cat(columns, -1)[..., self.own[symbol][number], :]

    def by_layer(self, table: Mapping[str, Tensor]) -> dict[str, Table]:
        """Symbol → [layers, heads], as layer name → symbol → [heads]."""
        return {name: {symbol: values[i] for symbol, values in table.items()} for i, name in enumerate(self.names)}


def group_layers(roles: Roles, rows: AllRows, masters: Mapping[int, Tensor]) -> list[LayerGroup]:
    """Layers that can be measured together, in the order of their first."""
    alike: dict[Any, Roles] = {}
    for name, layer in roles.items():
        shapes = tuple((s, p.rows.shape, p.bias is None, p.gain is None) for s, p in layer.projections.items())
        kind = (shapes, layer.coupling, layer.qk_norm, layer.key_is_value)
        alike.setdefault(kind, {})[name] = layer
    return [LayerGroup(layers, rows, masters) for layers in alike.values()]


def name_tables(groups: Sequence[LayerGroup], tables: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The numbers of each group [layers, heads] as layer.symbol → [heads]: views."""
    return {
        f"{name}.{symbol}": values
        for group, table in zip(groups, tables, strict=True)
        for name, symbols in group.by_layer(table).items()
        for symbol, values in symbols.items()
    }


class RowValues:
    """Numbers per layer, symbol and head → one number per row of all weights, 1 for rows that nothing claims."""

    def __init__(self, groups: Sequence[LayerGroup], rows: AllRows):
        self.groups = groups
        self.owner = torch.full((rows.count,), -1, dtype=torch.long, device=rows.device)
        self.order: list[tuple[int, str]] = []
        first = 0
        for number, group in enumerate(groups):
            for symbol, index in group.index.items():
                count = index.shape[0] * index.shape[1]
                heads = torch.arange(first, first + count, device=rows.device).view(*index.shape[:2], 1)
                self.owner[index] = heads.expand_as(index)
                self.order.append((number, symbol))
                first += count
        self.owner[self.owner < 0] = first

    def spread(self, tables: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """[..., rows]; a symbol that is missing from a table counts as 1."""
        flat, like = [], next(iter(tables[0].values()))
        for number, symbol in self.order:
            value, heads = tables[number].get(symbol), self.groups[number].index[symbol].shape[:2]
            flat.append((like.new_ones(*like.shape[:-2], *heads) if value is None else value).flatten(-2))
        flat.append(torch.ones_like(flat[0][..., :1]))
        return torch.cat(flat, -1)[..., self.owner]


def largest_singular_value(matrix: Tensor, squarings: int = 9) -> Tensor:
    """σ₁ of [..., rows, columns], at most 0.5 % too large for matrices with up to 100 rows or columns, never too small.

    With G = M Mᵀ and p = 2^squarings, σ₁ ≤ (tr G^p)^(1/2p) ≤ rank^(1/2p) σ₁. Nothing but products, so unlike a
    decomposition it does not wait for the device.
    """
    if matrix.shape[-2] > matrix.shape[-1]:
        matrix = matrix.mT
    tiny = torch.finfo(matrix.dtype).tiny
    size = torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=tiny)
    gram = (matrix / size) @ (matrix / size).mT  # trace 1
    log = torch.zeros_like(size)
    for k in range(squarings):
        gram = gram @ gram
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=tiny)
        gram = gram / trace
        log = log + trace.log() / 2 ** (k + 1)
    return (size * (log / 2).exp())[..., 0, 0]
