"""Mean, convolution and norm of queries and keys as one operation (README.md derives its backward)."""

from typing import Any

import torch
from torch import Tensor

from qklab.ops.convolution import reference
from qklab.ops.dispatch import Impl, choose_impl
from qklab.ops.heads import check_heads, find_precision, object_to_wide

WIDEST = 128  # head of the kernel
EASY, MOST_BYTES = 64, 227 * 2**10  # beyond heads of 64 it takes all the shared memory that a block has on an H200


def convolve_heads(
    q: Tensor,
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    temperature: Tensor,
    positions: Tensor,
    *,
    eps: float,
    kept: tuple[Tensor, Tensor] | None = None,
    members: int | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D], k [B, T, G, D] → the same shapes and dtype, R = H/G query heads to a key head.

    Of every head u of [q ; k], with its rows W0, W1, W2 of weight [H + G, 3D, D] and its c of bias [H + G, D]:

        s_t = u_t W0 + u_{t−1} W1 + u_{t−2} W2 + c + r_t       r_q = (q + k)/2 ; r_k = (q̄ + k)/2
        q⁺ = s_q/√(mean s_q² + eps) ; k⁺ = τ s_k/√(mean s_k² + eps)           τ of temperature [G]

    k in r_q is that of a query head's group, q̄ in r_k the mean of a key head's query heads. `positions` [B or 1, T] are
    the tokens' places in their own texts: u is 0 before place 0, also where that is another text of the row. `kept` is
    what stands before the first token of q [B, 2, H, D] and of k [B, 2, G, D].

    With `members` = S, the three parameters have a leading axis of S, and q, k have S·B rows, of which member s owns B
    from s·B on: S calls in one.

    Products are taken in autocast's dtype or the weights' own, summed in float32 (float64 for float64 inputs), and
    results rounded once. The kernel keeps its inputs for the backward and nothing else.
    """
    tensors = q, k, weight, bias, temperature, positions
    check_convolution(*tensors, kept, members)
    precision = find_precision(weight)
    obstacle = find_convolution_obstacle(q, precision, kept)
    if choose_impl("convolve_heads", impl, q.device, obstacle, object_to_wide(precision)) == "reference":
        return reference.convolve_heads(*tensors, eps, kept, members)
    return _convolve_heads(*tensors, eps, precision, members or 1)


def find_convolution_obstacle(q: Tensor, precision: torch.dtype, kept: tuple[Tensor, Tensor] | None) -> str | None:
    """What about these tensors keeps the kernel from taking them."""
    if kept is not None:
        return "the kernel takes whole texts, and these tokens follow what a cache kept"
    if q.is_cuda and torch.float64 in (q.dtype, precision):
        return "the kernel does not compute in float64"
    if q.shape[-1] > WIDEST:
        return f"the kernel takes heads of up to {WIDEST} entries, and these have {q.shape[-1]}"
    if q.is_cuda and q.shape[-1] > EASY and (room := find_shared_memory(q.device)) < MOST_BYTES:
        return (
            f"the kernel takes {MOST_BYTES} bytes of shared memory for heads of {q.shape[-1]}, and this GPU has {room}"
        )
    return None


def find_shared_memory(device: torch.device) -> int:
    """Bytes that a block of threads can have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


setattr(find_shared_memory, "_dynamo_marked_constant", True)  # noqa: B010


def check_convolution(
    q: Tensor,
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    temperature: Tensor,
    positions: Tensor,
    kept: tuple[Tensor, Tensor] | None,
    members: int | None,
) -> None:
    check_heads(q, k, members)
    B, T, H, D = q.shape
    G = k.shape[2]
    if q.dtype != k.dtype or not q.is_floating_point() or not q.device == k.device == weight.device == positions.device:
        raise ValueError(
            "q and k must be floating-point tensors of one dtype, on one device with weights and positions, "
            f"but {q.dtype} on {q.device}, {k.dtype} on {k.device}, weights on {weight.device} and positions on "
            f"{positions.device} came."
        )
    lead = () if members is None else (members,)
    shapes = {"weight": (H + G, 3 * D, D), "bias": (H + G, D), "temperature": (G,)}
    for (name, shape), parameter in zip(shapes.items(), (weight, bias, temperature), strict=True):
        if parameter.shape != (*lead, *shape):
            raise ValueError(f"{name} must have shape {[*lead, *shape]}, but {list(parameter.shape)} came.")
    if positions.dim() != 2 or positions.shape[0] not in (1, B) or positions.shape[1] != T:
        raise ValueError(f"positions must have shape [{B} or 1, {T}], but {list(positions.shape)} came.")
    for x, before in zip((q, k), kept or (), strict=False):
        if before.shape != (B, 2, *x.shape[2:]):
            raise ValueError(f"kept must be of shape {[B, 2, *x.shape[2:]]}, but {list(before.shape)} came.")


# what both operators take: `triton.Convolution` says what it is
GIVEN = (
    "Tensor q, Tensor k, Tensor weight, Tensor bias, Tensor temperature, Tensor positions, float eps, "
    "ScalarType precision, SymInt members"
)


@torch.library.custom_op("qklab::convolve_heads", mutates_args=(), schema=f"({GIVEN}) -> (Tensor, Tensor)")
def _convolve_heads(*given: Any) -> tuple[Tensor, Tensor]:
    from qklab.ops.convolution.triton import run_convolution

    return run_convolution(*given)


@_convolve_heads.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


BACKWARD = f"(Tensor dq, Tensor dk, {GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"


@torch.library.custom_op("qklab::convolve_heads_backward", mutates_args=(), schema=BACKWARD)
def _convolve_heads_backward(*given: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, weight, bias and temperature, in the dtype of each."""
    from qklab.ops.convolution.triton import run_convolution_backward

    return run_convolution_backward(*given)


@_convolve_heads_backward.register_fake
def _(dq: Tensor, dk: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given[:5])


def keep_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps, ctx.precision, ctx.members = inputs
    ctx.save_for_backward(*tensors)


def differentiate_convolution(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    gradients = _convolve_heads_backward(dq, dk, *ctx.saved_tensors, ctx.eps, ctx.precision, ctx.members)
    return *gradients, None, None, None, None


_convolve_heads.register_autograd(differentiate_convolution, setup_context=keep_operands)
