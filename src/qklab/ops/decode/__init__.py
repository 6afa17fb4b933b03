"""Attention of one or a few new queries over a cache."""

from qklab.ops.decode.api import IMPLS, Impl, decode

__all__ = ["IMPLS", "Impl", "decode"]
