"""How near numbers must be, and what unwritten memory looks like."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to rounding, in float64."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def within_budget(actual: Tensor, low_precision: Tensor, exact: Tensor) -> None:
    """The error against float64 stays within twice that of an independent low-precision run, plus one rounding."""
    allowed = 2 * (low_precision.double() - exact).norm() + torch.finfo(actual.dtype).eps * exact.norm()
    error = (actual.double() - exact).norm()
    assert error <= allowed, f"error {float(error):.2e} exceeds {float(allowed):.2e}"


@contextmanager
def poison_memory() -> Iterator[None]:
    """Fill what torch.empty and its kind return with NaN, so that what a kernel leaves unwritten shows in its result.

    torch does so itself under deterministic algorithms; operations that have none are left as they are.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            assert torch.empty(1).isnan().all(), "torch.utils.deterministic.fill_uninitialized_memory is off"
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check_all_is_written(call: Callable[[], Sequence[Tensor]]) -> None:
    """Two runs are bit-equal, the second one in poisoned memory."""
    before = call()
    with poison_memory():
        after = call()
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after)), "results differ, or some of their memory was never written"
