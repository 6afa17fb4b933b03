"""Coupling of queries and keys, with QK-norm and RoPE in the same pass."""

from qklab.ops.coupling.api import Network, Norm, couple
from qklab.ops.coupling.reference import finished

__all__ = ["Network", "Norm", "couple", "finished"]
