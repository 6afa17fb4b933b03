"""The order of the text is a pure function, sees everything once an epoch, and knows nothing of ranks."""

import threading
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qklab.data.batches import IGNORED, Batches, EvaluationWindows, make_batch
from qklab.data.order import Order, make_permutation

EOT = 0


class Text:
    """Documents whose tokens are all different, so that each can be told from every other."""

    def __init__(self, lengths: list[int]):
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.tokens, self.documents = int(self.starts[-1]), len(lengths)
        self.stream = np.arange(1, self.tokens + 1)
        self.stream[self.starts[:-1]] = EOT

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.tokens
        return self.stream[start:stop]

    def document(self, token: int) -> int:
        return int(np.searchsorted(self.starts, token - 1, side="right")) - 1


def text(seed: int = 0, documents: int = 40) -> Any:
    return Text(np.random.default_rng(seed).integers(1, 60, documents).tolist())


@pytest.mark.parametrize("packing", ["packed", "contiguous"])
@given(seed=st.integers(0, 2**62), step=st.integers(0, 200), world=st.sampled_from([1, 2, 3, 4, 6, 12]))
@settings(max_examples=30, deadline=None)
def test_ranks_share_a_step_and_never_change_it(packing: str, seed: int, step: int, world: int) -> None:
    order = Order(text(), seed, 12, 16, packing)  # pyright: ignore[reportArgumentType]
    alone = order.rows(step).ids
    shared = [Order(text(), seed, 12, 16, packing).rows(step, rank, world).ids for rank in range(world)]  # pyright: ignore[reportArgumentType]
    assert np.array_equal(alone, np.concatenate(shared))


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_of_packed_windows_has_every_target_at_most_once_and_almost_all(epoch: int) -> None:
    source = text()
    order = Order(source, 7, 4, 16)
    n = order.per_epoch
    ids = order.windows(range(epoch * n, (epoch + 1) * n)).ids
    seen, counts = np.unique(ids[:, 1:], return_counts=True)
    assert counts[seen != EOT].max() == 1
    assert ids[:, 1:].size > source.tokens - 1 - 16


def test_epochs_and_seeds_differ_in_order_and_in_neighbours() -> None:
    order = Order(text(), 7, 4, 16)
    n = order.per_epoch
    first, second = (order.windows(range(e * n, (e + 1) * n)).ids for e in (0, 1))
    assert not np.array_equal(first, second)
    assert {tuple(row) for row in first} != {tuple(row) for row in second}
    assert not np.array_equal(Order(text(), 1, 4, 16).rows(0).ids, order.rows(0).ids)
    contiguous = Order(text(), 3, 4, 16, "contiguous")
    n = contiguous.per_epoch
    first, second = (contiguous.windows(range(e * n, (e + 1) * n)).ids for e in (0, 1))
    assert {tuple(row) for row in first} != {tuple(row) for row in second}  # from another offset
    assert first.max(1).argsort().tolist() != second.max(1).argsort().tolist()  # tokens tell where a window lies


def test_segments_are_the_documents_and_each_begins_with_end_of_text() -> None:
    source = text()
    order = Order(source, 3, 8, 32)
    for step in range(20):
        ids, segments, _ = order.rows(step)
        assert segments is not None
        for row, marks in zip(ids, segments, strict=True):
            starts = np.flatnonzero(np.diff(marks)) + 1
            assert np.array_equal(np.flatnonzero(row[1:] == EOT) + 1, starts)
            for segment in np.unique(marks):
                tokens = row[(marks == segment) & (row != EOT)]
                assert len({source.document(int(token)) for token in tokens}) <= 1
                assert np.all(np.diff(tokens) == 1)


def test_contiguous_windows_are_pieces_of_the_stored_stream() -> None:
    source = text()
    order = Order(source, 3, 8, 32, "contiguous")
    n = order.per_epoch
    windows = order.windows(range(2 * n))
    assert windows.segments is None
    text_of = "".join(f"<{t}>" for t in source.stream)
    assert all("".join(f"<{t}>" for t in row) in text_of for row in windows.ids)
    seen, counts = np.unique(windows.ids[:n, 1:], return_counts=True)
    assert counts[seen != EOT].max() == 1


def test_a_permutation_is_one_and_never_changes_with_versions() -> None:
    assert sorted(make_permutation(1000, 1, 2).tolist()) == list(range(1000))
    assert make_permutation(10, 0, 0).tolist() == [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]


def test_too_little_text_and_ranks_that_do_not_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="too few for one window of 64"):
        Order(cast(Any, Text([10, 20])), 0, 4, 64)
    with pytest.raises(ValueError, match="batch of 4 windows cannot be shared equally by 3 ranks"):
        Order(text(), 0, 4, 16).rows(0, 0, 3)


def test_one_window_is_enough() -> None:
    for packing in ("packed", "contiguous"):
        order = Order(cast(Any, Text([17])), 0, 2, 16, packing)
        assert order.per_epoch == 1
        assert order.rows(3).ids.tolist() == [Text([17]).stream.tolist()] * 2


def test_batches_come_in_order_from_any_step_and_errors_reach_the_caller() -> None:
    order = Order(text(), 0, 4, 16)
    batches = Batches(order, 5, 1, 2, torch.device("cpu"))
    for step in range(5, 12):
        expected = make_batch(order.rows(step, 1, 2))
        got = next(batches)
        assert torch.equal(got.ids, expected.ids)
        assert torch.equal(got.targets, expected.targets)
        assert got.segments is not None
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]

    class Broken(Text):
        def read(self, start: int, stop: int) -> np.ndarray:
            raise OSError("gone")

    broken = Batches(Order(cast(Any, Broken([100] * 5)), 0, 4, 16), 0, 0, 1, torch.device("cpu"))
    with pytest.raises(OSError, match="gone"):
        next(broken)
    broken.close()


@pytest.mark.parametrize("context", [16, 33, 64, 5000])
def test_evaluation_has_every_token_as_target_once_and_padding_never(context: int) -> None:
    source = text()
    windows = EvaluationWindows(source, context, EOT, packed=True)
    batch = windows.batch(windows.select_windows(None))
    counted = batch.targets[batch.targets != IGNORED].numpy()
    # every token but the very first end-of-text, plus the end of the last document
    assert np.array_equal(counted, np.concatenate([source.stream[1:], [EOT]]))
    real = batch.targets != IGNORED
    assert batch.segments is not None
    for row in range(len(batch.ids)):
        inside = batch.ids[row][real[row]]
        changes = (batch.segments[row][real[row]].diff() != 0).nonzero().flatten() + 1
        assert changes.tolist() == ((inside[1:] == EOT).nonzero().flatten() + 1).tolist()
        if not real[row].all():
            last = batch.segments[row][real[row]].max()
            assert (batch.segments[row][~real[row]] != last).all()


def test_a_part_of_the_evaluation_is_spread_over_the_split() -> None:
    windows = EvaluationWindows(text(documents=400), 16, EOT, packed=True)
    chosen = windows.select_windows(320)
    assert len(chosen) == 20
    assert chosen[0] == 0
    assert chosen[-1] == len(windows) - 1
    assert np.ptp(np.diff(chosen)) <= 1
