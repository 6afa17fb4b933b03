"""Ranks that act as one: all of them return the same, or all of them raise the same.

Without a process group there is one rank, and these do nothing but call.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if ranks() > 1 else 0


def sent(error: Exception) -> Exception:
    """`error` if it is of a kind that is sure to survive the way to another process."""
    return error if isinstance(error, OSError | ValueError) else RuntimeError(f"{type(error).__name__}: {error}")


def first_decides(decide: Callable[[], T]) -> T:
    """What `decide()` gives or raises on rank 0, on all ranks."""
    if ranks() == 1:
        return decide()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome = [decide(), None]
        except Exception as error:
            dist.broadcast_object_list([None, sent(error)], src=0)
            raise
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def from_all(give: Callable[[], T]) -> list[T]:
    """What `give()` gives on each rank, on all ranks; what the first rank to fail raises is raised on all."""
    if ranks() == 1:
        return [give()]
    mine: Any
    try:
        mine = (give(), None)
    except Exception as error:
        mine = (None, sent(error))
    outcomes: list[Any] = [None] * ranks()
    dist.all_gather_object(outcomes, mine)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [given for given, _ in outcomes]
