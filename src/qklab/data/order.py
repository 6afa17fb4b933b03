"""Which text is seen when: a pure function of (seed, step, rank, world).

An epoch is one shuffled stream of the split's tokens, cut into windows of `context` + 1 tokens that overlap by one, so
that each token is a target once. Step s consists of samples s·batch … (s+1)·batch − 1, sample i is window i mod n of
epoch ⌊i/n⌋, and rank r of w takes the r-th of w equal runs of the step's samples. So neither the number of ranks nor an
interruption changes what a step sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from qklab.data.shards import Split

Packing = Literal["packed", "contiguous"]
PACKINGS: tuple[Packing, ...] = ("packed", "contiguous")


class Windows(NamedTuple):
    """Rows of tokens and the text each belongs to: T + 1 of them, where each is to be predicted from those before, or T
    with a target at each."""

    ids: np.ndarray  # [B, T + 1] or [B, T] int64
    segments: np.ndarray | None  # as ids, counted from 0 in each row; None: the row is one text
    targets: np.ndarray | None = None  # [B, T] int64, −100 where nothing is asked


def mix_bits(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: uint64 → uint64, a bijection that scatters neighbours."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def combine_numbers(*numbers: int) -> np.ndarray:
    """One uint64 from several whole numbers, in order."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mix_bits(state + np.uint64(number % 2**64) + np.uint64(0x9E3779B97F4A7C15))
    return state


def make_permutation(n: int, *numbers: int) -> np.ndarray:
    """A permutation of 0 … n−1 that depends on nothing but its arguments, whatever the version of numpy."""
    scattered = mix_bits(
        combine_numbers(*numbers) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    )
    return np.argsort(scattered, kind="stable")


@dataclass(frozen=True)
class Order:
    """The order of a training split.

    `packed`: documents are shuffled every epoch, and segments keep those that share a window apart. `contiguous`:
    windows of the split as it is stored, from a new offset every epoch; attention crosses documents.
    """

    split: Split
    seed: int
    batch: int
    context: int
    packing: Packing = "packed"

    def __post_init__(self) -> None:
        if self.split.tokens <= self.context:
            raise ValueError(
                f"the training split has {self.split.tokens} tokens, too few for one window of {self.context} + 1; "
                "use more text or a shorter context."
            )

    @property
    def per_epoch(self) -> int:
        """Windows in an epoch."""
        whole = (self.split.tokens - 1) // self.context
        return whole if self.packing == "packed" else max(1, (self.split.tokens - self.context) // self.context)

    def samples(self, step: int, rank: int = 0, world: int = 1) -> range:
        """The sample numbers of one rank's share of a step."""
        if self.batch % world:
            raise ValueError(f"a batch of {self.batch} windows cannot be shared equally by {world} ranks.")
        share = self.batch // world
        first = step * self.batch + rank * share
        return range(first, first + share)

    def rows(self, step: int, rank: int = 0, world: int = 1) -> Windows:
        """The windows of one rank's share of a step."""
        return self.windows(self.samples(step, rank, world))

    def windows(self, samples: Sequence[int]) -> Windows:
        ids = np.empty((len(samples), self.context + 1), np.int64)
        segments = np.zeros_like(ids) if self.packing == "packed" else None
        for row, sample in enumerate(samples):
            epoch, place = divmod(sample, self.per_epoch)
            window = int(self._windows(epoch)[place])
            if segments is None:
                offset = self._offset(epoch) + window * self.context
                ids[row] = self.split.read(offset, offset + self.context + 1)
            else:
                self._pack(epoch, window * self.context, ids[row], segments[row])
        return Windows(ids, segments)

    def _pack(self, epoch: int, position: int, ids: np.ndarray, segments: np.ndarray) -> None:
        """Fill one row from `position` of the epoch's shuffled stream."""
        order, begins = self._documents(epoch)
        document = int(np.searchsorted(begins, position, side="right")) - 1
        filled = segment = 0
        while filled < len(ids):
            source = int(order[document])
            skipped = position + filled - int(begins[document])
            start = int(self.split.starts[source]) + skipped
            stop = min(int(self.split.starts[source + 1]), start + len(ids) - filled)
            ids[filled : filled + stop - start] = self.split.read(start, stop)
            segments[filled : filled + stop - start] = segment
            filled, segment, document = filled + stop - start, segment + 1, document + 1

    def _documents(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of documents, and where each begins in its stream."""
        return shuffle_documents(self.split, self.seed, epoch)

    def _windows(self, epoch: int) -> np.ndarray:
        return shuffle_windows(self.per_epoch, self.seed, epoch)

    def _offset(self, epoch: int) -> int:
        room = self.split.tokens - 1 - self.per_epoch * self.context
        return int(combine_numbers(self.seed, epoch, 2)[0]) % (room + 1)


@lru_cache(maxsize=4)
def shuffle_documents(split: Split, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    order = make_permutation(split.documents, seed, epoch, 0)
    lengths = np.diff(split.starts)[order]
    return order, np.concatenate([[0], np.cumsum(lengths)])


@lru_cache(maxsize=8)
def shuffle_windows(n: int, seed: int, epoch: int) -> np.ndarray:
    return make_permutation(n, seed, epoch, 1)
