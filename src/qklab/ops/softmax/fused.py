"""torch's fused attention kernels, called so that the log-sum-exp L they keep serves sinks, and with windows.

With sinks z_i = o_i σ(L_i − s). Its backward pass is the plain kernel's own with z for o and L' = log(e^L + e^s) for L:
weights e^{l_ij − L'} are then those with the sink, and Σ_d dz z is what every row's softmax takes off. Nothing runs
twice. The sink itself gets ∂s = −Σ_i e^{s − L'_i} Σ_d dz_i z_i.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

FLASH_DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 256  # entries of a head


def find_fused_obstacle(q: Tensor, window: int | None) -> str | None:
    """What keeps torch's kernels from attending for q [B, T, H, D]."""
    if not is_flash_enabled():
        return "flash attention is switched off"
    if q.numel() == 0:
        return "there are no tokens"
    if not q.is_cuda:
        return None if window is None else "the CPU's kernel knows no windows"
    if q.dtype not in FLASH_DTYPES:
        return f"it takes 16 bits, and these are {q.dtype}"
    return None if q.shape[-1] <= WIDEST else f"it takes heads of {WIDEST}, and these have {q.shape[-1]}"


def is_flash_enabled() -> bool:
    return torch.backends.cuda.flash_sdp_enabled()


setattr(is_flash_enabled, "_dynamo_marked_constant", True)  # noqa: B010 (as in ops/dispatch.py)


def choose_backend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None) -> str:
    """cuDNN where torch itself would take it; only flash knows windows."""
    if not q.is_cuda:
        return "cpu"
    if window is not None:
        return "flash"
    heads = [tensor.detach().transpose(1, 2) for tensor in (q, k, v)]  # the same forwards and backwards
    chosen = torch.ops.aten._fused_sdp_choice(
        *heads, None, 0.0, causal, scale=scale, enable_gqa=q.shape[2] != k.shape[2]
    )
    return "cudnn" if chosen == SDPBackend.CUDNN_ATTENTION.value else "flash"


def find_window_sides(causal: bool, window: int | None) -> dict[str, int]:
    """How many tokens before and after its own a query sees, as flash takes it; −1: all."""
    side = -1 if window is None else window - 1
    return {"window_size_left": side, "window_size_right": 0 if causal else side}


@torch.library.custom_op("qklab::attend_fused", mutates_args=())
def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D], k, v [B, T, G, D], sinks [H] or [B, H] → outputs [B, T, H, D], log-sum-exp [B, H, T]."""
    T, aten = q.shape[1], torch.ops.aten
    backend = choose_backend(q, k, v, scale, causal, window)
    if backend == "flash":
        sides = find_window_sides(causal, window)
        o, lse, *_ = aten._flash_attention_forward(q, k, v, None, None, T, T, 0.0, causal, False, scale=scale, **sides)
    else:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, *repeat_heads(q, k, v, backend)))
        if backend == "cudnn":
            o, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        else:
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        o, lse = o.transpose(1, 2), lse.reshape(o.shape[:3])
    o = o.contiguous()
    if sinks is None:
        return o, lse.contiguous()
    joint = torch.logaddexp(lse, sinks.to(lse.dtype)[..., None])
    share = (lse - joint).exp().transpose(1, 2)[..., None]
    return torch.mul(o, share, out=o), joint  # in the wider dtype, rounded once, in one pass


@attend_fused.register_fake
def _(q: Tensor, *_: Any) -> Any:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)


def repeat_heads(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Keys and values as the backend takes them: the CPU's gradients need a head for every query head."""
    groups = q.shape[2] // k.shape[2] if backend == "cpu" else 1
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2))


@torch.library.custom_op("qklab::attend_fused_backward", mutates_args=())
def attend_fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from those of the outputs."""
    T, aten, grad, groups = q.shape[1], torch.ops.aten, grad.contiguous(), q.shape[2] // k.shape[2]
    backend = choose_backend(q, k, v, scale, causal, window)
    if backend == "flash":
        state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)
        sides = find_window_sides(causal, window)
        found = aten._flash_attention_backward(
            grad, q, k, v, o, lse, None, None, T, T, 0.0, causal, state, unused, scale=scale, **sides
        )
        return tuple(part.contiguous() for part in found)
    given = [tensor.transpose(1, 2) for tensor in (grad, q, *repeat_heads(q, k, v, backend), o)]
    if backend == "cudnn":
        seed = q.new_empty((), dtype=torch.int64)
        options: tuple[Any, ...] = (seed, seed, None, None, None, T, T, 0.0, causal)
        found = aten._scaled_dot_product_cudnn_attention_backward(*given, lse[..., None], *options, scale=scale)
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, lse, 0.0, causal, scale=scale)
    dq, dk, dv = (part.transpose(1, 2) for part in found)
    if dk.shape != k.shape:
        dk, dv = (part.unflatten(2, (-1, groups)).sum(3) for part in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@attend_fused_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, ctx.scale, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)


def differentiate_fused(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, sinks, o, lse = ctx.saved_tensors
    dq, dk, dv = attend_fused_backward(grad, q, k, v, o, lse, ctx.scale, ctx.causal, ctx.window)
    ds = None
    if sinks is not None:
        taken = (grad.to(lse.dtype) * o).sum(-1).transpose(1, 2)  # [B, H, T]
        ds = -((sinks.to(lse.dtype)[..., None] - lse).exp() * taken).sum(-1)
        ds = (ds.sum(0) if sinks.dim() == 1 else ds).to(sinks.dtype)
    return dq, dk, dv, ds, None, None, None


attend_fused.register_autograd(differentiate_fused, setup_context=keep_for_backward)
