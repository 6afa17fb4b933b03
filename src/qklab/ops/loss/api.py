"""The vocabulary loss as one operation that never forms the logits of all tokens (README.md beside this derives it)."""

import math
from typing import Any

import torch
from torch import Tensor

from qklab.ops.dispatch import Impl, check_impl, choose_impl
from qklab.ops.loss import reference

IGNORED = -100  # the target of a token that has none, as in torch's own cross_entropy
CHUNK_BYTES = {"cpu": 2**23, "cuda": 2**30}  # of logits at a time; README.md says why
CHUNK_STEP = 128  # tokens: a whole number of a matrix product's tiles


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """(loss, nll) of features x [..., d] under the output matrix weight [V, d], for targets [...].

    With z_i = W x_i and lse_i = log Σ_v exp z_iv, over the tokens whose target is not −100:
    loss = mean(lse_i − z_i[y_i] + z_loss·lse_i²), nll = mean(lse_i − z_i[y_i]), which carries no gradient.
    Both are float32 (float64 for float64 inputs), and 0 where no token counts.

    Or of S members, each with a matrix [S, V, d] and tokens of its own: x [S·B, ..., d], of whose rows member s owns B
    from s·B on, and both results are [S]. A sum over members gives each of them its own gradient.

    Under autocast the products are taken in autocast's dtype, as F.linear would. Gradients are found in the forward and
    kept instead of logits; dW is summed in float32. A target outside the vocabulary raises on the CPU and gives NaN on
    a GPU, which is not asked for its answer.
    """
    x, targets = flatten_tokens(x, weight, targets, impl)
    need_x, need_weight = (torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight))
    loss, nll, *_ = _linear_cross_entropy(x, weight, targets, float(z_loss), need_x, need_weight, impl)
    return loss, nll


@torch.no_grad()
def token_losses(x: Tensor, weight: Tensor, targets: Tensor, impl: Impl = "auto") -> Tensor:
    """lse_i − z_i[y_i] of every token [N], or [S, N] of members; 0 where the target is −100, without gradient."""
    x, targets = flatten_tokens(x, weight, targets, impl)
    return _token_losses(x, weight, targets, impl)


def flatten_tokens(x: Tensor, weight: Tensor, targets: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    """x [N, d] in the dtype of the products, and targets [N], or [S, N, d] and [S, N]; raises where they do not fit
    together."""
    check_impl(impl)
    if weight.dim() not in (2, 3) or x.dim() < weight.dim() - 1 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            "x must have shape [..., d] and weight [vocabulary, d], or [members, vocabulary, d], "
            f"but x {list(x.shape)} and weight {list(weight.shape)} came."
        )
    lead = weight.shape[:-2]
    if lead and (lead[0] == 0 or len(x) % lead[0]):
        raise ValueError(f"the {lead[0]} members of weight must divide the rows of x, but {list(x.shape)} came.")
    if targets.shape != x.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 of shape {list(x.shape[:-1])}, one per token of x, "
            f"but {targets.dtype} {list(targets.shape)} came."
        )
    if not x.device == weight.device == targets.device:
        raise ValueError(
            "x, weight and targets must be on one device, "
            f"but {x.device}, {weight.device} and {targets.device} came; move them together."
        )
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    if not (x.is_floating_point() and weight.is_floating_point() and (cast or x.dtype == weight.dtype)):
        raise ValueError(
            "x and weight must be floating-point tensors, of one dtype outside autocast, "
            f"but {x.dtype} and {weight.dtype} came; convert one of them."
        )
    x = x.to(torch.get_autocast_dtype(kind)) if cast else x
    tokens = targets.numel() // math.prod(lead)
    return x.reshape(*lead, tokens, x.shape[-1]), targets.reshape(*lead, tokens)


def chunk_rows(tokens: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens whose logits exist at a time: as few equal chunks as keep to `CHUNK_BYTES`, in whole tiles.

    Members go through their tokens side by side, so `vocabulary` counts the words of all.
    """
    limit = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])
    chunks = max(1, -(-tokens * vocabulary * dtype.itemsize // limit))
    rows = -(-tokens // chunks)
    return max(CHUNK_STEP, -(-rows // CHUNK_STEP) * CHUNK_STEP)


def compute_losses(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, need_x: bool, need_weight: bool, impl: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """nll and lse, [N] or [S, N], and the unscaled gradients, from the implementation that `impl` means here."""
    if x.device.type == "cpu":
        check_targets(targets, weight.shape[-2])
    rows = chunk_rows(x.shape[-2], weight.shape[:-1].numel(), x.dtype, x.device)
    kind = choose_impl("linear_cross_entropy", impl, x.device)
    if kind == "triton":
        from qklab.ops.loss.triton import losses_and_gradients
    else:
        losses_and_gradients = reference.losses_and_gradients
    # the matrix is converted here, so that its gradient is never rounded on the way back to float32
    return losses_and_gradients(x, weight.to(x.dtype), targets, IGNORED, z_loss, rows, need_x, need_weight)


def check_targets(targets: Tensor, vocabulary: int) -> None:
    wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= vocabulary))]
    if len(wrong):
        raise ValueError(
            f"targets must be from 0 to {vocabulary - 1}, or {IGNORED} for none, but {int(wrong[0])} came; "
            "is this text from another tokenizer?"
        )


@torch.library.custom_op("qklab::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, need_x: bool, need_weight: bool, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, nll, tokens counted (at least 1), and the gradients of the sum; empty where not needed."""
    nll, lse, dx, dweight = compute_losses(x, weight, targets, z_loss, need_x, need_weight, impl)
    counted = (targets != IGNORED).sum(-1).clamp(min=1).to(nll.dtype)
    mean = nll.sum(-1) / counted
    loss = mean + z_loss * (lse.square().sum(-1) / counted)
    dx = x.new_empty(0) if dx is None else dx
    dweight = nll.new_empty(0) if dweight is None else dweight
    return loss, mean, counted, dx, dweight


@_linear_cross_entropy.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, need_x: bool, need_weight: bool, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    loss, nll, counted = (x.new_empty(x.shape[:-2], dtype=wide) for _ in range(3))
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    dweight = torch.empty_like(weight, dtype=wide) if need_weight else x.new_empty(0, dtype=wide)
    return loss, nll, counted, dx, dweight


def keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, _, ctx.need_x, ctx.need_weight, _ = inputs
    _, nll, counted, dx, dweight = output
    ctx.weight_dtype = weight.dtype
    ctx.mark_non_differentiable(nll, counted, dx, dweight)
    ctx.save_for_backward(counted, dx, dweight)


def scale_gradients(ctx: Any, upstream: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    counted, dx, dweight = ctx.saved_tensors
    # stays on the device: nothing waits for its value. As a matrix it widens dx; as a scalar it would be rounded to
    # dx's dtype itself
    scale = (upstream / counted)[..., None, None]
    given_x = (dx * scale).to(dx.dtype) if ctx.need_x else None
    given_weight = (dweight * scale).to(ctx.weight_dtype) if ctx.need_weight else None
    return given_x, given_weight, None, None, None, None, None


_linear_cross_entropy.register_autograd(scale_gradients, setup_context=keep_gradients)


@torch.library.custom_op("qklab::token_losses", mutates_args=())
def _token_losses(x: Tensor, weight: Tensor, targets: Tensor, impl: str) -> Tensor:
    nll, *_ = compute_losses(x, weight, targets, 0.0, False, False, impl)
    return nll


@_token_losses.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, impl: str) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
