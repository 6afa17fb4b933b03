"""Differential attention, composed from plain attention."""

from qklab.ops.differential.api import differential, differential_v2

__all__ = ["differential", "differential_v2"]
