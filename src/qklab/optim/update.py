"""The updates of AdamW and Muon on stacked parameters [S, …], with numbers per member: plain functions of tensors,
which a compiler turns into a few kernels.

A member's row of `skip` [S] is chosen with `where`, never multiplied: 0 · NaN is NaN. `speeds` and `shrinks` are logit
control's: what a parameter's update, and the parameter after it, are multiplied with; None for 1.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Factors = Sequence[Tensor | None]
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # torch.optim.Muon's own coefficients, steps and least norm
NEWTON_SCHULZ_STEPS = 5
LEAST_NORM = 1e-7


def update_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    decays: Sequence[bool],
    speeds: Factors,
    shrinks: Factors,
    numbers: Tensor,
    skip: Tensor,
    compiles: bool,
) -> None:
    """torch's AdamW; `numbers` [8, S]: what the gradient is clipped to, 1 − β₁, β₂, 1 − β₂, 1/√(1 − β₂ᵗ), ε,
    lr/(1 − β₁ᵗ) and 1 − lr·decay.

    A kernel for each parameter, compiled once for each number of weights: one graph of all of them takes longer to
    compile than the model's, and anew for every arm.
    """
    update = fuse(update_one, compiles)
    for *tensors, decay, speed, shrink in zip(
        parameters, gradients, averages, squares, decays, speeds, shrinks, strict=True
    ):
        if speed is None and shrink is None:
            tensors = [tensor.reshape(len(skip), -1) for tensor in tensors]
        update(*tensors, decay, speed, shrink, numbers, skip)


def update_one(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    decay: bool,
    speed: Tensor | None,
    shrink: Tensor | None,
    numbers: Tensor,
    skip: Tensor,
) -> None:
    """`update_adamw` of one parameter."""
    clip, new, beta2, new_square, correction, eps, lr, kept = broadcast_members(numbers, p)
    keep = broadcast_members(skip[None], p)[0]
    g = g * clip
    average = m + (g - m) * new
    square = v * beta2 + g * g * new_square
    change = lr * average / (square.sqrt() * correction + eps)
    p.copy_(torch.where(keep, p, apply_change(p * kept if decay else p, change, speed, shrink)))
    m.copy_(torch.where(keep, m, average))
    v.copy_(torch.where(keep, v, square))


def update_muon(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    speeds: Factors,
    shrinks: Factors,
    alike: Sequence[Sequence[int]],
    numbers: Tensor,
    skip: Tensor,
) -> None:
    """torch's Muon (Nesterov, AdamW's root mean square) on matrices [S, outputs, inputs]; those `alike` in shape are
    orthogonalised together. `numbers` [5, S]: what the gradient is clipped to, the momentum μ, 1 − μ, lr and
    1 − lr·decay."""
    for places in alike:
        clip, momentum, new, lr, kept = broadcast_members(numbers, parameters[places[0]])
        keep = broadcast_members(skip[None], parameters[places[0]])[0]
        lr = lr * (0.2 * math.sqrt(max(parameters[places[0]].shape[1:])))
        directions = []
        for i in places:
            g, b = gradients[i] * clip, momenta[i]
            average = b + (g - b) * new
            directions.append((g + (average - g) * momentum).bfloat16())
            b.copy_(torch.where(keep, b, average))
        for i, direction in zip(places, orthogonalise(torch.stack(directions)), strict=True):
            p = parameters[i]
            p.copy_(torch.where(keep, p, apply_change(p * kept, lr * direction, speeds[i], shrinks[i])))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton–Schulz on every matrix of [..., rows, columns], as torch.optim.Muon does to one."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).flatten(0, -3)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).unflatten(0, matrices.shape[:-2])


def apply_change(kept: Tensor, change: Tensor, speed: Tensor | None, shrink: Tensor | None) -> Tensor:
    moved = kept - (change if speed is None else speed * change)
    return moved if shrink is None else moved * shrink


def broadcast_members(numbers: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """[n, S] → n times [S, 1, …], to be multiplied with `like` [S, …]."""
    return numbers.view(*numbers.shape, *[1] * (like.dim() - 1)).unbind(0)


@torch.no_grad()
def norm_members(gradients: Sequence[Tensor]) -> Tensor:
    """√Σ‖g‖² over tensors [S, …], of each member: [S]. A few kernels for all tensors, which a compiler would give one
    or two each."""
    shares = [share for gradient in gradients for share in gradient.unbind()]
    norms = torch.stack(torch._foreach_norm(shares))  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(norms.view(len(gradients), -1), dim=0)


def square_rows(weights: Sequence[Tensor], gains: Factors) -> Tensor:
    """Σ over a row's entries of their squares, of matrices [S, outputs, inputs] with the gain [S, inputs] in front of
    them, and of biases [S, outputs]: [S, all outputs]."""
    matrices = [w if gain is None else w * gain[:, None, :] for w, gain in zip(weights, gains, strict=True)]
    return torch.cat([m.square() if m.dim() == 2 else m.square().sum(-1) for m in matrices], -1)


def fuse(function: Callable[..., Any], compiles: bool) -> Callable[..., Any]:
    """The function itself, or compiled: as few kernels, each tensor read and written once."""
    return compile_once(function) if compiles and not torch.compiler.is_compiling() else function


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import config  # the compiler takes seconds to import

    # a process may train many arms and sizes, each with shapes of its own
    config.recompile_limit = max(config.recompile_limit, 64)
    return torch.compile(function, fullgraph=True, dynamic=False)
