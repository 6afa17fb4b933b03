"""What a model is asked for other than the next token: the answers of a task, and tokens of a text that were masked.

A masked token is replaced by end-of-text, which stands for no text anyway. Which ones follows from the seed and the
number of the window, so that neither an interruption nor the number of ranks changes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qklab.data.batches import IGNORED, Batch, EvaluationWindows
from qklab.data.order import Order, Windows, shuffle_windows
from qklab.data.shards import Corpus, Split
from qklab.data.tasks import Draws

MASKED = 0.15  # of the tokens of a window, as in BERT
REPLACED, CHANGED = 0.8, 0.1  # of these become end-of-text and another token; the others stay, and are asked for too


def read_sequences(split: Split, numbers: Sequence[int], length: int, nothing: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and answers [rows, length] of these sequences of a task; IGNORED where the answer is `nothing`."""
    whole, wanted = 1 + 2 * length, np.asarray(numbers, np.int64)
    rows, first = np.empty((len(wanted), whole), np.int64), split.borders // whole
    owner = np.searchsorted(first, wanted, side="right") - 1
    for shard in np.unique(owner):  # which are of whole sequences
        own = owner == shard
        rows[own] = split.shards[shard].reshape(-1, whole)[wanted[own] - first[shard]]
    tokens, answers = rows[:, 1 : 1 + length], rows[:, 1 + length :]
    return tokens, np.where(answers == nothing, IGNORED, answers)


@dataclass(frozen=True)
class TaskOrder(Order):
    """The order of a task's training sequences: all of them, shuffled every epoch."""

    eot: int = 0

    @property
    def per_epoch(self) -> int:
        return self.split.documents

    def windows(self, samples: Sequence[int]) -> Windows:
        places = (divmod(sample, self.per_epoch) for sample in samples)
        numbers = [int(shuffle_windows(self.per_epoch, self.seed, epoch)[place]) for epoch, place in places]
        tokens, answers = read_sequences(self.split, numbers, self.context, self.eot)
        return Windows(tokens, None, answers)


class TaskWindows(EvaluationWindows):
    """The sequences of a split of a task."""

    @property
    def tokens(self) -> int:
        return self.split.documents * self.context

    def batch(self, windows: np.ndarray) -> Batch:
        tokens, answers = read_sequences(self.split, windows.tolist(), self.context, self.eot)
        return Batch(torch.from_numpy(tokens.copy()), torch.from_numpy(answers), None)


def mask_row(ids: np.ndarray, asked: np.ndarray, vocab: int, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """One row [T] with some of the tokens where `asked` masked, and what they were, IGNORED elsewhere."""
    order = np.argsort(draws.draw_bits(len(ids)), kind="stable")
    chosen = order[asked[order]][: max(1, round(MASKED * len(ids)))]
    fate, other = draws.integers(1000, len(ids)) / 1000, draws.integers(vocab - 1, len(ids))
    shown, targets = ids.copy(), np.full(len(ids), IGNORED, np.int64)
    targets[chosen] = ids[chosen]
    shown[chosen] = np.where(
        fate[chosen] < REPLACED, vocab - 1, np.where(fate[chosen] < REPLACED + CHANGED, other[chosen], ids[chosen])
    )
    return shown, targets


@dataclass(frozen=True)
class MaskedOrder(Order):
    """The windows of an order, with tokens masked anew every epoch."""

    eot: int = 0

    def windows(self, samples: Sequence[int]) -> Windows:
        plain = super().windows(samples)
        ids = plain.ids[:, :-1]
        masked = [
            mask_row(row, row != self.eot, self.eot + 1, Draws(self.seed, 3, sample))
            for row, sample in zip(ids, samples, strict=True)
        ]
        shown, targets = (np.stack(rows) for rows in zip(*masked, strict=True))
        return Windows(shown, None if plain.segments is None else plain.segments[:, :-1], targets)


class MaskedWindows(EvaluationWindows):
    """The windows of a split, with the same tokens masked whoever asks."""

    def batch(self, windows: np.ndarray) -> Batch:
        plain = super().batch(windows)
        real = (plain.targets != IGNORED).numpy()
        shown, targets = plain.ids.numpy().copy(), np.empty_like(real, np.int64)
        for row, window in enumerate(windows.tolist()):
            asked = real[row] & (shown[row] != self.eot)
            shown[row], targets[row] = mask_row(shown[row], asked, self.eot + 1, Draws(0, 4, window))
        return Batch(torch.from_numpy(shown), torch.from_numpy(targets), plain.segments)


def measure_chance(corpus: Corpus, length: int, split: str) -> dict[str, float]:
    """What can be known of a task without reading the sequence: how much of a split is right where the most frequent
    answer of training is said at each place, of answers and of whole sequences, and the loss of saying each answer as
    often as it was right."""
    vocab, eot = corpus.tokenizer.vocab, corpus.tokenizer.eot
    answers = {
        name: read_sequences(each, range(each.documents), length, eot)[1]
        for name, each in corpus.splits.items()
        if name in ("train", split)
    }
    place, said = find_asked(answers["train"])
    counts = np.bincount(place * vocab + said, minlength=length * vocab).reshape(length, vocab)
    asked = answers[split] != IGNORED
    right = answers[split] == counts.argmax(1)
    likely = np.log((counts + 1) / (counts + 1).sum(1, keepdims=True))
    return {
        "chance": float(right[asked].mean()),
        "sequence_chance": float((right | ~asked).all(1).mean()),
        "unigram_loss": float(-likely[find_asked(answers[split])].mean()),
    }


def find_asked(answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place, answer) of every one that is asked for among answers [sequences, length]."""
    sequence, place = np.nonzero(answers != IGNORED)
    return place, answers[sequence, place]
