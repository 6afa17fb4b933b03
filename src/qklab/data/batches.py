"""Windows → tensors on the device, made ahead of the step that needs them; and the fixed windows of evaluation."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from qklab.data.order import Windows
from qklab.data.shards import Split

IGNORED = -100


class Batch(NamedTuple):
    """What a model reads and what it should predict."""

    ids: Tensor  # [B, T]
    targets: Tensor  # [B, T], −100 where there is no text
    segments: Tensor | None  # [B, T]

    def to(self, device: torch.device) -> "Batch":
        """Copied to the device without waiting for it, where the memory is pinned."""
        moved = (None if tensor is None else tensor.to(device, non_blocking=True) for tensor in self)
        return Batch(*moved)  # pyright: ignore[reportArgumentType]

    def pin_memory(self) -> "Batch":
        return Batch(*(None if tensor is None else tensor.pin_memory() for tensor in self))  # pyright: ignore[reportArgumentType]

    def micro_batches(self, rows: int) -> list["Batch"]:
        """Micro-batches of `rows` rows."""
        starts = range(0, len(self.ids), rows)
        return [Batch(*(None if t is None else t[i : i + rows] for t in self)) for i in starts]  # pyright: ignore[reportArgumentType]


def make_batch(windows: Windows) -> Batch:
    ids = torch.from_numpy(windows.ids)
    if windows.targets is not None:
        segments = None if windows.segments is None else torch.from_numpy(windows.segments).contiguous()
        return Batch(ids.contiguous(), torch.from_numpy(windows.targets).contiguous(), segments)
    segments = None if windows.segments is None else torch.from_numpy(windows.segments[..., :-1].copy())
    return Batch(ids[..., :-1].contiguous(), ids[..., 1:].contiguous(), segments)


class WindowSource(Protocol):
    """What `Order` is: rows of every step, the same whoever asks."""

    def samples(self, step: int, rank: int = 0, world: int = 1) -> range: ...

    def rows(self, step: int, rank: int = 0, world: int = 1) -> Windows: ...


class Batches:
    """Steps `start`, `start` + 1, … of one rank, each prepared by a thread while the ones before are computed."""

    def __init__(self, order: WindowSource, start: int, rank: int, world: int, device: torch.device, ahead: int = 4):
        order.samples(start, rank, world)  # raises here rather than in the thread
        self.order, self.rank, self.world, self.device = order, rank, world, device
        self.thread = ThreadPoolExecutor(1, "batches")
        self.ready = deque(self.thread.submit(self._prepare, step) for step in range(start, start + ahead))
        self.following = start + ahead

    def _prepare(self, step: int) -> Batch:
        batch = make_batch(self.order.rows(step, self.rank, self.world))
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def __next__(self) -> Batch:
        batch = self.ready.popleft().result()
        self.ready.append(self.thread.submit(self._prepare, self.following))
        self.following += 1
        return batch.to(self.device)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


class EvaluationWindows:
    """A split as windows of `context` tokens in stored order, every token a target exactly once, the last document's
    end included. The same for every model that has this context and reads this corpus."""

    def __init__(self, split: Split, context: int, eot: int, packed: bool):
        self.split, self.context, self.eot, self.packed = split, context, eot, packed

    def __len__(self) -> int:
        return -(-self.tokens // self.context)

    @property
    def tokens(self) -> int:
        """Tokens of all windows together."""
        return self.split.tokens

    def select_windows(self, tokens: int | None) -> np.ndarray:
        """All windows, or evenly spread ones with about `tokens` tokens."""
        if tokens is None or tokens >= self.tokens:
            return np.arange(len(self))
        count = max(1, tokens // self.context)
        return np.unique(np.linspace(0, len(self) - 1, count).round().astype(np.int64))

    def batch(self, windows: np.ndarray) -> Batch:
        """Rows of these windows; what lies past the end of the split is a text of its own whose targets are ignored."""
        rows = np.full((len(windows), self.context + 1), self.eot, np.int64)
        targets = np.full((len(windows), self.context), IGNORED, np.int64)
        segments = np.zeros((len(windows), self.context), np.int64)
        for row, window in enumerate(windows):
            start = int(window) * self.context
            real = min(self.context, self.split.tokens - start)
            piece = self.split.read(start, min(self.split.tokens, start + self.context + 1))
            rows[row, : len(piece)] = piece  # past the last document comes its end of text, which is already there
            targets[row, :real] = rows[row, 1 : real + 1]
            first, last = np.searchsorted(self.split.starts, (start, start + real))
            begins = self.split.starts[first:last] - start
            segments[row, begins[begins > 0]] = 1
            segments[row] = segments[row].cumsum()
            segments[row, real:] = self.context
        ids = torch.from_numpy(np.ascontiguousarray(rows[:, :-1]))
        return Batch(ids, torch.from_numpy(targets), torch.from_numpy(segments) if self.packed else None)
