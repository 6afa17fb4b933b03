"""Reference of the vocabulary loss: torch only, one chunk of tokens after the other."""

import torch
from torch import Tensor


def losses_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, ignored: int, z_loss: float, rows: int, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x [N, d], weight [V, d] of one dtype, targets [N] → nll [N], lse [N], dx [N, d], dW [V, d]; with members, all of
    them [S, …].

    nll_i = lse_i − z_i[y_i], both 0 where y_i is ignored. The gradients are those of Σ_i nll_i + z_loss·lse_i²; dx has
    x's dtype, the rest is float32 (float64 for float64 inputs). Only `rows` tokens of a member have logits at a time.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    nll, lse = x.new_empty(x.shape[:-1], dtype=wide), x.new_empty(x.shape[:-1], dtype=wide)
    dx = torch.empty_like(x) if need_x else None
    dweight = torch.zeros_like(weight, dtype=wide) if need_weight else None
    tokens = x.shape[-2]
    for i in range(0, tokens, rows):
        part = slice(i, min(i + rows, tokens))
        z = (x[..., part, :] @ weight.mT).to(wide)  # [n, V] or [S, n, V]
        skipped = targets[..., part] == ignored
        y = targets[..., part].masked_fill(skipped, 0)[..., None]
        picked = z.gather(-1, y)[..., 0]
        top = z.amax(-1)
        p = z.sub_(top[..., None]).exp_()
        total = p.sum(-1)
        lse[..., part] = (top + total.log()).masked_fill(skipped, 0)
        nll[..., part] = (top - picked + total.log()).masked_fill(skipped, 0)
        if dx is None and dweight is None:
            continue
        d = p.mul_(((1 + 2 * z_loss * lse[..., part]) / total)[..., None])
        d.scatter_(-1, y, d.gather(-1, y) - 1).masked_fill_(skipped[..., None], 0)
        if dx is not None:
            dx[..., part, :] = d.to(x.dtype) @ weight
        if dweight is not None:
            add = dweight.addmm_ if dweight.dim() == 2 else dweight.baddbmm_
            add(d.mT, x[..., part, :].to(wide))
    return nll, lse, dx, dweight
