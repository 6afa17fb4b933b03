"""Softmax attention of a whole text, with sinks and windows."""

from qklab.ops.softmax.api import attend_softmax

__all__ = ["attend_softmax"]
