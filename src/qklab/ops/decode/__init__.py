"""Attention of one or a few new queries over a cache."""

from qklab.ops.decode.api import DecodeImpl, decode

__all__ = ["DecodeImpl", "decode"]
