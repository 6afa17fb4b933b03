"""The one RMSNorm in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """g ⊙ x / √(mean(x²) + eps) over the last axis, in x's dtype: x [..., D], gain [D] or none.

    Or a gain [S, D] for each of S members, which own x's rows [S·B, ..., D] one after the other.
    """
    if gain is None or gain.dim() == 1:
        return F.rms_norm(x, x.shape[-1:], None if gain is None else gain.to(x.dtype), eps)
    members, rows = len(gain), len(x)
    if rows % members or gain.shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"gain must have shape [members, {x.shape[-1]}], its members dividing the {rows} rows of x, "
            f"but {list(gain.shape)} came."
        )
    wide = torch.promote_types(x.dtype, torch.float32)  # one rounding, as torch's own has
    y = F.rms_norm(x.to(wide), x.shape[-1:], None, eps).unflatten(0, (members, rows // members))
    gain = gain.to(x.dtype).view(members, *(1,) * (y.dim() - 2), -1)
    return (y * gain).flatten(0, 1).to(x.dtype)
