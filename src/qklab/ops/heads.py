"""What operations on the queries and keys of a token have in common."""

import torch
from torch import Tensor


def check_heads(q: Tensor, k: Tensor, members: int | None) -> None:
    """Raise where these are no queries [B, T, H, D] and keys [B, T, G, D], or their rows not those of the members."""
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q must have shape [batch, tokens, heads, width] and k [batch, tokens, groups, width], "
            f"but {list(q.shape)} and {list(k.shape)} came."
        )
    rows, heads, groups = q.shape[0], q.shape[2], k.shape[2]
    if groups == 0 or heads % groups:
        raise ValueError(f"the key heads must divide the {heads} query heads, but {groups} came.")
    if members is not None and (members < 1 or rows % members):
        raise ValueError(f"members must be at least 1 and divide the {rows} rows, but {members} came.")


def find_precision(tensor: Tensor) -> torch.dtype:
    """In which products with this tensor are taken: autocast's dtype where that is on, else its own."""
    device = tensor.device.type
    cast = torch.is_autocast_enabled(device) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(device) if cast else tensor.dtype


def object_to_wide(precision: torch.dtype) -> str | None:
    """Why a kernel, although it could, is not taken unless asked for; the operations' pages have what was measured."""
    return "the products are wider than 16 bits" if precision.itemsize > 2 else None
