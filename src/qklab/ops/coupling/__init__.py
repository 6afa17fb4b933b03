"""Coupling of queries and keys, with QK-norm and RoPE in the same pass."""

from qklab.ops.coupling.api import Network, Norm, couple
from qklab.ops.coupling.reference import apply_force, group_mean, scale_and_shift

__all__ = ["Network", "Norm", "apply_force", "couple", "group_mean", "scale_and_shift"]
