"""Attention over a cache: one call, several routes (README.md beside this says which is taken when, and why)."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from qklab.ops.decode import reference, sdpa
from qklab.ops.dispatch import Impl, choose_impl
from qklab.ops.rope import Angles

DecodeImpl = Literal[Impl, "sdpa"]  # torch's own attention, which "auto" falls back to
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNEL_ROWS = 128  # query rows of a group, H/G · T, up to which a call is bound by reading the cache


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    scale: float | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    angles: Angles | None = None,
    value_width: int | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    impl: DecodeImpl = "auto",
) -> Tensor:
    """o_i = Σ_j softmax_j(scale · q_i·k_j) v_j: q [B, T, H, D], k [B, S, G, D], v [B, S, G, E] → [B, T, H, E].

    The T queries stand in the last slots of their row, which has `lengths` [B] filled slots (S by default); each sees
    those from `starts` [B] (left padding, 0 by default) up to its own, and gives 0 where there are none. Query head h
    reads key/value head ⌊h·G/H⌋.

    A query sees at most `window` tokens, its own counted. With a window k may be a ring: `lengths` then counts all
    tokens that there were, of which number p stands in slot p mod S. `sinks`, [H] or [B, H], are logits that join the
    denominator of each head's softmax and bring no value.

    Without v the value is the key, or its first `value_width` entries, and is read once: (Q,K=V), and MLA's absorbed
    form over the latent (G = 1). `angles`, cos and sin [≥ S, r/2] by position, turn the pairs (k_i, k_{i+r/2}) of a key
    that is its own value: compared as R_j k_j, summed as k_j, where j counts from the row's start. `scale` is 1/√D by
    default. The cache may have another dtype than q; the result has q's. No copy of the cache is made, except by "sdpa"
    and "reference" under `angles` or another dtype.

    Only "reference" and "sdpa" have gradients; "auto" takes "sdpa" where they are wanted, or "reference" with sinks, of
    which torch's own attention knows nothing.
    """
    check_decode(q, k, v, starts, lengths, angles, value_width)
    check_window_and_sinks(q, angles, window, sinks, impl)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    width = k.shape[-1] if value_width is None else value_width
    obstacle, objection = find_decode_obstacle(q, k, v, sinks), find_decode_objection(q, k, sinks)
    route = choose_impl("decode", impl, q.device, obstacle, objection, "sdpa" if sinks is None else "reference")
    if route == "triton":
        cos, sin = (None, None) if angles is None else angles
        # compilers need an operator; called as one it takes the host a good deal longer
        plain = type(q) is Tensor and type(k) is Tensor and not torch.compiler.is_compiling()
        run = launch if plain else _decode
        return run(q, k, v, cos, sin, starts, lengths, sinks, window, width if v is None else v.shape[-1], scale)
    if v is None:
        v = k if width == k.shape[-1] else k[..., :width]
    if route == "reference":
        return reference.decode(q, k, v, scale, starts, lengths, angles, window, sinks)
    return sdpa.decode(q, k, v, scale, starts, lengths, angles, window)


def find_decode_obstacle(q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None) -> str | None:
    """What about these tensors keeps the kernel from taking them."""
    if not (q.dtype in KERNEL_DTYPES and k.dtype in KERNEL_DTYPES):
        return f"it takes 16 and 32 bits, and these are {q.dtype} and {k.dtype}"
    if needs_gradients(q, k, v, sinks):
        return "it has no gradients, which are wanted outside torch.no_grad()"
    return None


def find_decode_objection(q: Tensor, k: Tensor, sinks: Tensor | None) -> str | None:
    """Why the kernel, although it could, is not taken unless asked for; README.md has what was measured."""
    if not (q.dtype in KERNEL_DTYPES[:2] and k.dtype in KERNEL_DTYPES[:2]):
        return "the numbers are wider than 16 bits"
    if q.shape[1] * q.shape[2] > KERNEL_ROWS * k.shape[2] and sinks is None:
        return f"more than {KERNEL_ROWS} query rows read one key head"
    return None


def needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def check_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    angles: Angles | None,
    value_width: int | None,
) -> None:
    """Raise where the arguments do not fit together."""
    fits = q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            "q must have shape [B, T, H, D] and k [B, S, G, D] with G dividing H, "
            f"but q {list(q.shape)} and k {list(k.shape)} came."
        )
    if v is not None and (v.dim() != 4 or v.shape[:3] != k.shape[:3] or v.dtype != k.dtype):
        raise ValueError(
            f"v must be {k.dtype} of shape {[*k.shape[:3], 'E']}, as k is, but {v.dtype} {list(v.shape)} came."
        )
    if not (q.is_floating_point() and k.is_floating_point()):
        raise ValueError(f"q and k must be floating-point tensors, but {q.dtype} and {k.dtype} came.")
    if lengths is None and q.shape[1] > k.shape[1]:
        raise ValueError(f"the {q.shape[1]} queries stand in the last of the slots, but there are {k.shape[1]}.")
    for name, rows in (("starts", starts), ("lengths", lengths)):
        if rows is not None and (rows.shape != q.shape[:1] or rows.dtype not in (torch.int32, torch.int64)):
            raise ValueError(
                f"{name} must be {q.shape[0]} whole numbers, one per row, but {rows.dtype} {list(rows.shape)} came."
            )
    if value_width is not None and (v is not None or not 0 < value_width <= k.shape[3]):
        raise ValueError(
            f"value_width says how many of a key's {k.shape[3]} entries are its value, where there is no v, "
            f"but {value_width} came{' with a v' if v is not None else ''}."
        )
    if angles is not None:
        check_angles(k, v, angles, value_width)
    others = [tensor for tensor in (k, v, starts, lengths, *(angles or ())) if tensor is not None]
    if any(tensor.device != q.device for tensor in others):
        raise ValueError(f"all tensors must be on q's device {q.device}; move them together.")


def check_window_and_sinks(
    q: Tensor, angles: Angles | None, window: int | None, sinks: Tensor | None, impl: str
) -> None:
    if window is not None and (window < 1 or angles is not None):
        raise ValueError(
            f"window must be at least 1, and its keys turned beforehand, but {window} came"
            f"{'' if angles is None else ' with angles'}."
        )
    if sinks is not None and (sinks.shape not in (q.shape[2:3], q.shape[:3:2]) or sinks.device != q.device):
        raise ValueError(
            f"sinks must be of shape [{q.shape[2]}] or [{q.shape[0]}, {q.shape[2]}] on q's device, but "
            f"{list(sinks.shape)} on {sinks.device} came."
        )
    if sinks is not None and impl == "sdpa":
        raise ValueError("decode: impl='sdpa' cannot run: torch's own attention knows no sinks; use 'auto'.")


def check_angles(k: Tensor, v: Tensor | None, angles: Angles, value_width: int | None) -> None:
    if v is not None or value_width not in (None, k.shape[3]):
        raise ValueError("angles turn a key that is its own value; leave v and value_width out.")
    cos, sin = angles
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] < k.shape[1] or 2 * cos.shape[1] > k.shape[3]:
        raise ValueError(
            f"angles must be cos and sin of shape [positions ≥ {k.shape[1]}, at most {k.shape[3] // 2}], "
            f"but {list(cos.shape)} and {list(sin.shape)} came."
        )


# what the kernel's own `decode` takes
SCHEMA = (
    "(Tensor q, Tensor k, Tensor? v, Tensor? cos, Tensor? sin, Tensor? starts, Tensor? lengths, Tensor? sinks, "
    "SymInt? window, SymInt value_width, float scale) -> Tensor"
)


def launch(*given: Any) -> Tensor:
    from qklab.ops.decode.triton import decode

    return decode(*given)


_decode = torch.library.custom_op("qklab::decode", launch, mutates_args=(), schema=SCHEMA)


@_decode.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    value_width = others[-2]
    return q.new_empty(*q.shape[:3], value_width)
