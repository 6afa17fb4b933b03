"""Cross-entropy over a vocabulary, straight from features and output matrix."""

from qklab.ops.loss.api import IGNORED, linear_cross_entropy, token_losses

__all__ = ["IGNORED", "linear_cross_entropy", "token_losses"]
