"""Rows of many weights at once: their norms before an optimiser's step, and their updates scaled after it.

A weight may be an ordinary tensor or a rank's share of a DTensor (FSDP2, tensor parallelism); a bias is a weight whose
rows have one entry. Weights of one shape are handled together, so that a model of any depth costs a few kernel calls,
and nothing here waits for the device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowSource:
    """One tensor whose output rows are counted: where its rows start among all rows, and this rank's share of them."""

    tensor: Tensor
    axis: int
    gain: Tensor | None
    first: int  # of its rows among those of all sources
    rows: int
    start: int  # of this rank's share among its rows
    groups: tuple[Any, ...]  # process groups over which sums along its rows must be added up
    label: Any  # the same for all of a stack

    @property
    def local(self) -> Tensor:
        """This rank's share, in place."""
        return local_share(self.tensor)


def is_dtensor(tensor: Any) -> bool:
    """Told by what it can do: importing torch.distributed.tensor takes seconds, and most models have none."""
    return hasattr(tensor, "to_local")


def local_share(tensor: Any) -> Tensor:
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


def full_tensor(tensor: Any) -> Tensor:
    """A sharded tensor whole, on every rank; any other as it is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor.detach()


def locate_share(tensor: Any, axis: int) -> tuple[int, tuple[Any, ...]]:
    """Where this rank's share starts along `axis`, and over which groups the tensor is cut."""
    if not is_dtensor(tensor):
        return 0, ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if shape != local_share(tensor).shape:
        raise ValueError(
            f"a weight {list(tensor.shape)} is cut as {placements}, which gives this rank {list(shape)} of it, but it "
            f"has {list(local_share(tensor).shape)}; logit control needs weights cut as DTensor itself cuts them."
        )
    # all that is not copied is cut: FSDP2's strided cut of a tensor-parallel weight is no Shard
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    return offset[axis], tuple(mesh.get_group(dim) for dim in cut)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision norms and scaled updates of `dtype` are computed in."""
    return torch.promote_types(dtype, torch.float32)


class AllRows:
    """The output rows of weights and biases, numbered through from 0 to `count`."""

    def __init__(self, wanted: Iterable[tuple[Tensor, int, Tensor | None, Any]]):
        """`wanted`: (tensor, axis that counts outputs, gain of its inputs, label)."""
        unique: dict[int, tuple[Tensor, int, Tensor | None, Any]] = {}
        for tensor, axis, gain, label in wanted:
            known = unique.setdefault(id(tensor), (tensor, axis, gain, label))
            if known[1] != axis or known[2] is not gain:
                raise ValueError("one weight was given two roles that read it differently; give it one.")
        alike: dict[tuple[Any, ...], list[tuple[Tensor, Tensor | None]]] = {}
        tensor: Any
        for tensor, axis, gain, label in unique.values():
            # by the whole's shape and not this rank's share of it: all ranks must count rows in the same order
            layout = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
            kind = (tensor.shape, tensor.dtype, layout, axis, label, gain is None)
            alike.setdefault(kind, []).append((tensor, gain))
        self.stacks: list[list[RowSource]] = []
        self.count = 0
        for (shape, _, _, axis, label, _), entries in alike.items():
            start, groups = locate_share(entries[0][0], axis)
            rows = shape[axis]
            self.stacks.append([])
            for tensor, gain in entries:
                self.stacks[-1].append(RowSource(tensor, axis, gain, self.count, rows, start, groups, label))
                self.count += rows
        self.first = {id(source.tensor): source.first for stack in self.stacks for source in stack}
        self.device = self.stacks[0][0].local.device
        self.precision = wide_dtype(self.stacks[0][0].tensor.dtype)

    @property
    def sources(self) -> Iterable[RowSource]:
        return (source for stack in self.stacks for source in stack)

    def read(self) -> list[Tensor]:
        """A copy of every source, one [sources, …] per stack."""
        return [torch.stack([source.local for source in stack]) for stack in self.stacks]

    def squares(self, copies: Sequence[Tensor]) -> Tensor:
        """Σ over a row's entries of their squares: [count], the same on every rank."""
        pieces: dict[tuple[Any, ...], list[Tensor]] = {}
        for stack, copy in zip(self.stacks, copies, strict=True):
            source, precision = stack[0], wide_dtype(copy.dtype)
            matrices = copy.to(precision)
            if source.gain is not None:
                gains = torch.stack([self.local_gain(source) for source in stack]).to(precision)
                matrices = matrices * gains[:, None, :] if source.axis == 0 else matrices * gains[:, :, None]
            if matrices.dim() == 2:  # biases
                sums = matrices.square()
            else:
                sums = torch.linalg.vector_norm(matrices, dim=2 - source.axis).square()
            after = source.rows - source.start - sums.shape[1]
            if source.start or after:
                sums = torch.nn.functional.pad(sums, (source.start, after))
            pieces.setdefault(source.groups, []).append(sums.flatten().to(self.precision))
        if len(pieces) == 1:
            return self.add_up(torch.cat(next(iter(pieces.values()))), *next(iter(pieces)))
        ordered = {
            groups: iter(self.add_up(torch.cat(parts), *groups).split([len(p) for p in parts]))
            for groups, parts in pieces.items()
        }
        return torch.cat([next(ordered[stack[0].groups]) for stack in self.stacks])

    @staticmethod
    def add_up(sums: Tensor, *groups: Any) -> Tensor:
        for group in groups:
            dist.all_reduce(sums, group=group)
        return sums

    @staticmethod
    def local_gain(source: RowSource) -> Tensor:
        """The gain of this rank's columns of a source."""
        assert source.gain is not None
        gain, columns = full_tensor(source.gain), source.local.shape[1 - source.axis]
        if columns == len(gain):
            return gain
        start, _ = locate_share(source.tensor, 1 - source.axis)
        return gain[start : start + columns]

    def matrix(self, tensor: Tensor, copies: Sequence[Tensor]) -> Tensor:
        """The whole of a source as [outputs, inputs], gain included, from `read`'s copies where no rank lacks a part;
        a bias as one column."""
        for stack, copy in zip(self.stacks, copies, strict=True):
            for source, own in zip(stack, copy, strict=True):
                if source.tensor is not tensor:
                    continue
                full = (full_tensor(tensor) if source.groups else own).to(wide_dtype(own.dtype))
                if full.dim() == 1:
                    return full[:, None]
                full = full if source.axis == 0 else full.mT
                return full if source.gain is None else full * full_tensor(source.gain).to(full.dtype)
        raise KeyError("the tensor is none of the sources")

    def local_values(self, stack: Sequence[RowSource], per_row: Tensor) -> Tensor:
        """`per_row` [count] → the values of this rank's rows of a stack, shaped to multiply it."""
        source, local = stack[0], stack[0].local
        values = per_row[source.first : source.first + len(stack) * source.rows].view(len(stack), source.rows)
        values = values[:, source.start : source.start + local.shape[source.axis]].to(wide_dtype(local.dtype))
        if local.dim() == 1:
            return values
        return values[:, :, None] if source.axis == 0 else values[:, None, :]

    def scale_updates(self, copies: Sequence[Tensor], factors: Tensor, steps: Mapping[Any, tuple[Any, Any]]) -> None:
        """w ← c·before + f·(w − c·before): the update since `read`, times its row's f [count]; the decay as it was.

        `steps` has, for every label whose tensors were updated, c, the part of a weight that its decay left, and None
        or a scalar that is 1 where the device skipped the update. f = 1 leaves the weight as it is, bit for bit.
        """
        for stack, copy in zip(self.stacks, copies, strict=True):
            updated = [i for i, source in enumerate(stack) if source.tensor.grad is not None]
            if stack[0].label not in steps or not updated or not copy.numel():
                continue
            kept, skipped = steps[stack[0].label]
            before, scale = copy.to(wide_dtype(copy.dtype)), self.local_values(stack, factors)
            if skipped is not None:
                scale, kept = torch.where(skipped > 0, 1.0, scale), torch.where(skipped > 0, 1.0, kept)
            if isinstance(kept, Tensor) or kept != 1.0:
                before = before * kept
            results = [before[i] for i in updated]
            weights = [stack[i].local for i in updated]
            torch._foreach_lerp_(results, [w.to(before.dtype) for w in weights], [scale[i] for i in updated])  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_copy_(weights, results)  # pyright: ignore[reportPrivateImportUsage]

    def multiply(self, factors: Tensor) -> None:
        """w ← f·w for every row's f [count], of tensors that some optimiser has."""
        for stack in self.stacks:
            if stack[0].label is not None:
                for source, scale in zip(stack, self.local_values(stack, factors), strict=True):
                    source.local.mul_(scale)
