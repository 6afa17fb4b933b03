"""What our tests and our users' tests share."""

from qklab.testing.contracts import CONTRACTS, contracts_of
from qklab.testing.grid import grid, randomise

__all__ = ["CONTRACTS", "contracts_of", "grid", "randomise"]
