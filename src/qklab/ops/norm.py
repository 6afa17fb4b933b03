"""The one RMSNorm in torch."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """g ⊙ x / √(mean(x²) + eps) over the last axis, in x's dtype: x [..., D], gain [D] or none."""
    return F.rms_norm(x, x.shape[-1:], None if gain is None else gain.to(x.dtype), eps)
