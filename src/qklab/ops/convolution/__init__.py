"""Queries and keys averaged with each other, convolved over three tokens and normalised."""

from qklab.ops.convolution.api import convolve_heads

__all__ = ["convolve_heads"]
