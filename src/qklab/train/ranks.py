"""Ranks that act as one: all of them return the same, or all of them raise the same.

Without a process group there is one rank, and these do nothing but call.
"""

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from qklab.runs.directory import RunError

T = TypeVar("T")
FAILURE = "qklab/failure"
BROKEN = re.compile("connection (closed|reset)|broken pipe|socket", re.IGNORECASE)


def count_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if count_ranks() > 1 else 0


def make_sendable(error: Exception) -> Exception:
    """`error`, or one that says the same where it would not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return (
            ValueError(str(error))
            if isinstance(error, ValueError)
            else RuntimeError(f"{type(error).__name__}: {error}")
        )
    return error


def call_on_first_rank(function: Callable[[], T]) -> T:
    """What `function()` gives or raises on rank 0, on all ranks; the others do not call it."""
    if count_ranks() == 1:
        return function()
    outcome: list[Any] = [None, None]
    if own_rank() == 0:
        try:
            outcome = [function(), None]
        except Exception as error:
            dist.broadcast_object_list([None, make_sendable(error)], src=0)
            raise
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def call_on_all_ranks(function: Callable[[], T]) -> list[T]:
    """What `function()` gives on each rank, on all ranks; what the first rank to fail raises is raised on all."""
    if count_ranks() == 1:
        return [function()]
    mine: Any
    try:
        mine = (function(), None)
    except Exception as error:
        mine = (None, make_sendable(error))
    outcomes: list[Any] = [None] * count_ranks()
    dist.all_gather_object(outcomes, mine)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [given for given, _ in outcomes]


def sum_over_ranks(*values: float) -> list[float]:
    """Elementwise sums over all ranks, in float64, between the hosts: no device has to be waited for."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if count_ranks() > 1:
        dist.all_reduce(tensor)
    return tensor.tolist()


@contextmanager
def share_failures() -> Iterator[None]:
    """Let the other ranks say what one of them failed with, instead of that their connection to it broke."""
    store: Any = None
    if count_ranks() > 1:
        with suppress(Exception):  # a private name of torch's, and this is only for a better sentence
            store = dist.distributed_c10d._get_default_store()
    try:
        yield
    except ValueError as error:
        if store is not None:
            with suppress(Exception):
                store.set(FAILURE, str(error))
        raise
    except RuntimeError as error:
        if count_ranks() == 1 or not BROKEN.search(str(error)):
            raise
        raise RunError(read_failure(store) or "another rank has stopped, and says why.") from error


def read_failure(store: Any) -> str | None:
    """What a rank that failed said, where that can still be read."""
    with suppress(Exception):
        if store is not None and store.check([FAILURE]):
            return store.get(FAILURE).decode()
    return None
