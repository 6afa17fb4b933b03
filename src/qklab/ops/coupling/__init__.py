"""Coupling of queries and keys, with QK-norm and RoPE in the same pass."""

from qklab.ops.coupling.api import Network, Norm, couple

__all__ = ["Network", "Norm", "couple"]
