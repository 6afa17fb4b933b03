"""What our tests and our users' tests share."""

from qklab.testing.contracts import CONTRACTS, DECODER_CONTRACTS, contracts_of
from qklab.testing.grid import PATTERNS, grid, randomise
from qklab.testing.numerics import check_all_is_written, close, poison_memory, within_budget

__all__ = [
    "CONTRACTS",
    "DECODER_CONTRACTS",
    "PATTERNS",
    "check_all_is_written",
    "close",
    "contracts_of",
    "grid",
    "poison_memory",
    "randomise",
    "within_budget",
]
