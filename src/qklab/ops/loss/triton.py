"""Vocabulary loss with one fused kernel between the matrix products, which stay torch's own.

Prefixes: p_ pointer, o_ offsets, m_ mask, b_ block of values, i_ index.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # entries of a row at a time
WARPS = 16
SHORT = 16_384  # entries of a row that registers hold, 32 to a thread
SHORT_PER_WARP = 1024
ROWS_PER_SM = 2  # rows in work at a time: few enough that a row read twice is still in L2 the second time
ALIGNMENT = 64  # entries: rows of an odd vocabulary start on whole cache lines all the same
VECTOR = tl.constexpr(8)  # entries a thread holds side by side: 16 bytes of bf16
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def take_in(b_z, b_top, b_total):
    """Block [L, 8] into the running maxima and sums [L] of its lanes, which no thread has to wait for."""
    b_higher = tl.maximum(b_top, tl.max(b_z, 1))  # [L]
    b_new = tl.sum(tl.exp2((b_z - b_higher[:, None]) * LOG2_E), 1)  # [L]
    return b_higher, b_total * tl.exp2((b_top - b_higher) * LOG2_E) + b_new


@triton.jit
def loss_kernel(
    p_z,  # [rows, V], row stride `stride`; overwritten by its own gradient if GRADIENT
    p_targets,  # [S, n] with row stride `tokens`, rows being S·n
    p_nll,  # the same
    p_lse,  # the same
    rows,
    n,
    tokens,
    stride,
    V,
    IGNORED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    GRADIENT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row by row: lse in one online pass, then (1 + 2·z_loss·lse)·softmax(z) − onehot(y) in place."""
    narrow = p_z.dtype.element_ty
    long_stride = stride.to(tl.int64)  # a chunk may hold more than 2³¹ entries
    o_v = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [L, 8]
    whole = V // BLOCK * BLOCK  # blocks up to here need no mask
    m_rest = whole + o_v < V
    for i_row in range(tl.program_id(0), rows, tl.num_programs(0)):
        p_row = p_z + i_row * long_stride
        o_token = i_row // n * tokens + i_row % n
        y = tl.load(p_targets + o_token)
        if y == IGNORED:
            tl.store(p_nll + o_token, 0.0)
            tl.store(p_lse + o_token, 0.0)
            if GRADIENT:
                b_zero = tl.zeros([BLOCK // VECTOR, VECTOR], narrow)
                for i_v in range(0, whole, BLOCK):
                    tl.store(p_row + i_v + o_v, b_zero)
                tl.store(p_row + whole + o_v, b_zero, mask=m_rest)
        else:
            # read before the first reduction: its barrier lets no thread overwrite the entry before all have it
            known = (y >= 0) & (y < V)
            p_picked = p_row + tl.where(known, y, 0)
            picked = tl.where(known, tl.load(p_picked).to(WIDE), float("nan"))

            b_top = tl.full([BLOCK // VECTOR], -1e38, WIDE)  # not −∞, which minus itself is no number
            b_total = tl.zeros([BLOCK // VECTOR], WIDE)
            for i_v in range(0, whole, BLOCK):
                b_z = tl.load(p_row + i_v + o_v).to(WIDE)
                b_top, b_total = take_in(b_z, b_top, b_total)
            b_z = tl.load(p_row + whole + o_v, mask=m_rest, other=float("-inf")).to(WIDE)
            b_top, b_total = take_in(b_z, b_top, b_total)
            top = tl.max(b_top, 0)
            total = tl.sum(b_total * tl.exp2((b_top - top) * LOG2_E), 0)
            lse = top + tl.log(total)
            tl.store(p_nll + o_token, top - picked + tl.log(total))
            tl.store(p_lse + o_token, lse)

            if GRADIENT:
                scale = 1 + 2 * Z_LOSS * lse
                log_total = tl.log2(total)
                for i_v in range(0, whole, BLOCK):
                    b_z = tl.load(p_row + i_v + o_v).to(WIDE)
                    b_p = tl.exp2((b_z - top) * LOG2_E - log_total)
                    if Z_LOSS != 0:
                        b_p *= scale
                    tl.store(p_row + i_v + o_v, b_p.to(narrow))
                b_z = tl.load(p_row + whole + o_v, mask=m_rest, other=float("-inf")).to(WIDE)
                b_p = tl.exp2((b_z - top) * LOG2_E - log_total) * scale
                tl.store(p_row + whole + o_v, b_p.to(narrow), mask=m_rest)
                tl.debug_barrier()  # the target's own entry comes last, over what another thread put there
                tl.store(p_picked, (tl.exp2((picked - top) * LOG2_E - log_total) * scale - 1).to(narrow))


@triton.jit
def short_loss_kernel(
    p_z,  # [rows, V], row stride `stride`; overwritten by its own gradient if GRADIENT
    p_targets,  # [S, n] with row stride `tokens`, rows being S·n
    p_nll,  # the same
    p_lse,  # the same
    n,
    tokens,
    stride,
    V,
    IGNORED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    GRADIENT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What `loss_kernel` does, for a row that a program's registers hold: read once, written once."""
    i_row = tl.program_id(0)
    p_row = p_z + i_row.to(tl.int64) * stride
    o_token = i_row // n * tokens + i_row % n
    o_v = tl.arange(0, BLOCK)
    m_v = o_v < V
    y = tl.load(p_targets + o_token)
    counts = y != IGNORED
    b_z = tl.load(p_row + o_v, mask=m_v, other=float("-inf")).to(WIDE)
    top = tl.max(b_z, 0)
    b_p = tl.exp2((b_z - top) * LOG2_E)
    total = tl.sum(b_p, 0)
    known = (y >= 0) & (y < V)
    picked = tl.where(known, tl.sum(tl.where(o_v == y, b_z, 0.0), 0), float("nan"))
    lse = top + tl.log(total)
    tl.store(p_nll + o_token, tl.where(counts, lse - picked, 0.0))
    tl.store(p_lse + o_token, tl.where(counts, lse, 0.0))
    if GRADIENT:
        b_p *= (1 + 2 * Z_LOSS * lse) / total
        b_p = tl.where(counts, tl.where(o_v == y, b_p - 1, b_p), 0.0)
        tl.store(p_row + o_v, b_p.to(p_z.dtype.element_ty), mask=m_v)


def losses_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, ignored: int, z_loss: float, rows: int, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x [N, d], weight [V, d] of one dtype, targets [N] → nll [N], lse [N], dx [N, d], dW [V, d]; with members, all of
    them [S, …].

    nll_i = lse_i − z_i[y_i], both 0 where y_i is ignored. The gradients are those of Σ_i nll_i + z_loss·lse_i²; dx has
    x's dtype, the rest is float32 (float64 for float64 inputs). One buffer holds the logits of `rows` tokens a member.
    """
    lead, (tokens, _), vocabulary, targets = x.shape[:-2], x.shape[-2:], weight.shape[-2], targets.contiguous()
    wide = torch.promote_types(x.dtype, torch.float32)
    nll, lse = x.new_empty(x.shape[:-1], dtype=wide), x.new_empty(x.shape[:-1], dtype=wide)
    dx = torch.empty_like(x) if need_x else None
    dweight = torch.zeros_like(weight, dtype=wide) if need_weight else None
    multiply = torch.bmm if lead else torch.mm
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    programs = processors * ROWS_PER_SM
    padded = -(-vocabulary // ALIGNMENT) * ALIGNMENT
    buffer = x.new_empty(lead.numel() * min(rows, tokens), padded)
    for i in range(0, tokens, rows):
        n = min(rows, tokens - i)
        part, count = slice(i, i + n), lead.numel() * n
        z = buffer[:count].view(*lead, n, padded)[..., :vocabulary]
        multiply(x[..., part, :], weight.mT, out=z)
        operands = (z, targets[..., part], nll[..., part], lse[..., part])
        choices = {
            "IGNORED": ignored,
            "Z_LOSS": z_loss,
            "GRADIENT": need_x or need_weight,
            "WIDE": tl.float64 if wide == torch.float64 else tl.float32,
        }
        block = max(16, triton.next_power_of_2(vocabulary))
        if block <= SHORT:
            choices |= {"BLOCK": block, "num_warps": max(4, block // SHORT_PER_WARP)}
            short_loss_kernel[(count,)](*operands, n, tokens, padded, vocabulary, **choices)
        else:
            choices |= {"BLOCK": BLOCK, "num_warps": WARPS}
            loss_kernel[(min(count, programs),)](*operands, count, n, tokens, padded, vocabulary, **choices)
        if dx is not None:
            multiply(z, weight, out=dx[..., part, :])
        if dweight is not None:
            accumulate(dweight, z.mT, x[..., part, :])
    return nll, lse, dx, dweight


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total ← total + a b, rounded to total's dtype only."""
    add = torch.addmm if total.dim() == 2 else torch.baddbmm
    if a.is_cuda and a.dtype != total.dtype:
        add(total, a, b, out_dtype=total.dtype, out=total)
    else:  # torch's CPU products cannot widen
        add(total, a.to(total.dtype), b.to(total.dtype), out=total)
