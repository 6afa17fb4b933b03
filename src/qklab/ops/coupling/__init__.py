"""Coupling of queries and keys, with QK-norm and RoPE in the same pass."""

from qklab.ops.coupling.api import Network, Norm, couple
from qklab.ops.coupling.reference import finished, group_mean

__all__ = ["Network", "Norm", "couple", "finished", "group_mean"]
