"""Attention over a cache, the context split over the whole GPU and put together in a fixed order.

Prefixes: p_ pointer, o_ offsets, m_ mask, b_ block of values, i_ index.
"""
# what is bound under a constexpr is used under the same one, and kernels' types are not Python's
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false

import functools
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e38)  # of a maximum over nothing; not −∞, which minus itself is no number
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
MOST_SPLITS = 128
SHORTEST, LONGEST = 256, 4096  # slots of one program


class Config(NamedTuple):
    """How one call is cut up. README.md has the table it was chosen from."""

    block_n: int  # slots at a time
    warps: int
    stages: int  # blocks under way from memory
    chunk: int | None = None  # slots of one program; None: as `choose_chunk` finds
    resident: int = 3  # programs that fit onto a multiprocessor


@triton.jit
def load_columns(p_rows, o_d, stride, W: tl.constexpr, dtype: tl.constexpr):
    """Entries o_d < W of the rows at p_rows, 0 beyond: [rows, len(o_d)]."""
    p_block = p_rows[:, None] + o_d[None, :] * stride
    b_block = tl.load(p_block) if o_d.shape[0] == W else tl.load(p_block, mask=o_d[None, :] < W, other=0.0)
    return b_block.to(dtype)


@triton.jit
def add_product(b_x, b_y, b_sum):
    """b_sum + b_x b_y, float32 within; the interpreter cannot multiply 16-bit numbers otherwise."""
    b_x = b_x.to(tl.float32) if INTERPRETED else b_x
    b_y = b_y.to(tl.float32) if INTERPRETED else b_y
    return tl.dot(b_x, b_y, b_sum, input_precision="ieee")


@triton.jit
def store_columns(p_rows, o_d, b_o, m_rows, W: tl.constexpr):
    """b_o [rows, len(o_d)] into entries o_d < W of the rows at p_rows."""
    p_block = p_rows[:, None] + o_d[None, :]
    tl.store(p_block, b_o.to(p_rows.dtype.element_ty), mask=m_rows[:, None] & (o_d < W)[None, :])


@triton.jit
def row_range(
    p_starts, p_lengths, i_b, S, T, window, STARTS: tl.constexpr, LENGTHS: tl.constexpr, WINDOW: tl.constexpr
):
    """Of row i_b: its start and end, and the slots between which something may be seen."""
    start, end = 0, S
    if STARTS:
        start = tl.maximum(tl.load(p_starts + i_b).to(tl.int32), 0)
    if LENGTHS:
        end = tl.load(p_lengths + i_b).to(tl.int32)
    high = tl.minimum(end, S)
    if WINDOW:
        low = tl.where(end <= S, tl.maximum(start, end - T + 1 - window), 0)  # in a ring they may be anywhere
    else:
        low, end = start, high
    return start, end, low, high


@triton.jit
def sink_share(p_sinks, stride_sb, i_b, o_h, b_top):
    """What sinks [·, H] add to totals relative to b_top; bounded, since there may be nothing that b_top is of."""
    b_sink = tl.load(p_sinks + i_b * stride_sb + o_h) * 1.4426950408889634
    return tl.exp2(tl.minimum(b_sink - b_top, 100.0))


@triton.jit(do_not_specialize=["S", "T", "chunk", "splits", "window"])
def attend_kernel(
    p_q,  # [B, T, G·R, ·]
    p_k,  # [B, S, G, ·]
    p_v,  # [B, S, G, WV], unless SHARED
    p_cos,  # [≥ S, WA], where TURN
    p_sin,
    p_starts,  # [B], where STARTS
    p_lengths,  # [B], where LENGTHS
    p_sinks,  # [B, G·R], where SINKS
    p_o,  # [B, T, G·R, E], or where SPLIT [B, splits, G·R·T, E]: sums not yet divided by their totals
    p_top,  # [B, splits, G·R·T]: largest exponent to base 2, where SPLIT
    p_total,  # [B, splits, G·R·T]: sum of the weights relative to it, where SPLIT
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_ks,
    stride_kg,
    stride_kd,
    stride_vb,
    stride_vs,
    stride_vg,
    stride_vd,
    stride_sb,
    S,
    T,
    chunk,
    splits,
    window,
    exponent,  # scale · log₂e
    G: tl.constexpr,
    R: tl.constexpr,
    WA: tl.constexpr,  # widths of a key's parts, and the blocks that hold them
    WB: tl.constexpr,
    WC: tl.constexpr,
    WV: tl.constexpr,
    BA: tl.constexpr,
    BB: tl.constexpr,
    BC: tl.constexpr,
    BV: tl.constexpr,
    SHARED: tl.constexpr,  # part A is (also) the value
    TURN: tl.constexpr,  # A and B are the halves that turn, and B and C are values too
    STARTS: tl.constexpr,
    LENGTHS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCKS_M: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One chunk of one row's slots, for all queries (BM of them) that read one key/value head."""
    pid = tl.program_id(0)
    i_m = pid % BLOCKS_M
    i_g = pid // BLOCKS_M % G
    i_s = pid // (BLOCKS_M * G) % splits
    i_b = (pid // (BLOCKS_M * G) // splits).to(tl.int64)
    dtype: tl.constexpr = p_q.dtype.element_ty
    E: tl.constexpr = (WA + WB + WC) if TURN else (WA if SHARED else WV)

    start, end, first, last = row_range(p_starts, p_lengths, i_b, S, T, window, STARTS, LENGTHS, WINDOW)
    low = first + i_s * chunk
    high = tl.minimum(low + chunk, last)
    if (low < high) | (i_s == 0):
        o_m = i_m * BM + tl.arange(0, BM)
        m_m = o_m < T * R
        o_t = o_m // R  # rows are query tokens × query heads of the group
        o_h = i_g * R + o_m % R
        b_slot = end - T + o_t  # [BM], where the queries stand

        p_queries = p_q + i_b * stride_qb + tl.where(m_m, o_t, 0) * stride_qt + o_h * stride_qh
        o_a = tl.arange(0, BA)
        b_qa = load_columns(p_queries, o_a, stride_qd, WA, dtype)  # [BM, BA]
        if WB > 0:
            o_b = tl.arange(0, BB)
            b_qb = load_columns(p_queries + WA * stride_qd, o_b, stride_qd, WB, dtype)
        if WC > 0:
            o_c = tl.arange(0, BC)
            b_qc = load_columns(p_queries + (WA + WB) * stride_qd, o_c, stride_qd, WC, dtype)
        if SHARED:
            b_oa = tl.zeros([BM, BA], tl.float32)
        else:
            o_v = tl.arange(0, BV)
            b_oa = tl.zeros([BM, BV], tl.float32)
        if TURN:
            b_ob = tl.zeros([BM, BB], tl.float32)
            if WC > 0:
                b_oc = tl.zeros([BM, BC], tl.float32)
            o_near = tl.arange(0, BN)  # positions within a block
            m_near = (o_near < S)[:, None] & (o_a < WA)[None, :]
            o_near = o_near[:, None] * WA + o_a[None, :]
            b_near_cos = tl.load(p_cos + o_near, mask=m_near, other=0.0)  # [BN, BA]
            b_near_sin = tl.load(p_sin + o_near, mask=m_near, other=0.0)
        b_top = tl.full([BM], LOWEST, tl.float32)
        b_total = tl.zeros([BM], tl.float32)
        p_keys = p_k + i_b * stride_kb + i_g * stride_kg
        if not SHARED:
            p_values = p_v + i_b * stride_vb + i_g * stride_vg

        for i_n in range(low, high, BN):
            o_n = i_n + tl.arange(0, BN)
            o_row = tl.minimum(o_n, high - 1).to(tl.int64)  # nothing beyond is read, and no load needs a mask
            p_rows = p_keys + o_row * stride_ks
            b_a = load_columns(p_rows, o_a, stride_kd, WA, dtype)  # [BN, BA]
            if WB > 0:
                b_b = load_columns(p_rows + WA * stride_kd, o_b, stride_kd, WB, dtype)
            if WC > 0:
                b_c = load_columns(p_rows + (WA + WB) * stride_kd, o_c, stride_kd, WC, dtype)
            b_s = tl.zeros([BM, BN], tl.float32)
            if TURN:
                # q·R_p k = (R_base⁻¹ q)·(R_{p−base} k): the keys of every block turn by the same angles
                o_base = (i_n - start) * WA + o_a
                b_cos = tl.load(p_cos + o_base, mask=o_a < WA, other=0.0)[None, :]
                b_sin = tl.load(p_sin + o_base, mask=o_a < WA, other=0.0)[None, :]
                b_ua = (b_qa * b_cos + b_qb * b_sin).to(dtype)
                b_ub = (b_qb * b_cos - b_qa * b_sin).to(dtype)
                b_s = add_product(b_ua, tl.trans((b_a * b_near_cos - b_b * b_near_sin).to(dtype)), b_s)
                b_s = add_product(b_ub, tl.trans((b_b * b_near_cos + b_a * b_near_sin).to(dtype)), b_s)
            else:
                b_s = add_product(b_qa, tl.trans(b_a), b_s)
                if WB > 0:
                    b_s = add_product(b_qb, tl.trans(b_b), b_s)
            if WC > 0:
                b_s = add_product(b_qc, tl.trans(b_c), b_s)

            if WINDOW:
                o_p = end - 1 - (end - 1 - tl.minimum(o_n, high - 1)) % S  # the tokens' numbers: slots may be a ring
                m_s = (o_p[None, :] <= b_slot[:, None]) & (o_p[None, :] > b_slot[:, None] - window)
                m_s = m_s & ((o_n < high) & (o_p >= start))[None, :]
            else:
                m_s = (o_n < high)[None, :] & (o_n[None, :] <= b_slot[:, None])
            b_s = tl.where(m_s, b_s * exponent, float("-inf"))
            b_higher = tl.maximum(b_top, tl.max(b_s, 1))
            b_p = tl.exp2(b_s - b_higher[:, None])
            b_shrink = tl.exp2(b_top - b_higher)
            b_top = b_higher
            b_total = b_total * b_shrink + tl.sum(b_p, 1)
            b_p = b_p.to(dtype)
            b_oa *= b_shrink[:, None]
            if SHARED:
                b_oa = add_product(b_p, b_a, b_oa)
            else:
                b_v = load_columns(p_values + o_row * stride_vs, o_v, stride_vd, WV, dtype)  # [BN, BV]
                b_oa = add_product(b_p, b_v, b_oa)
            if TURN:
                b_ob = add_product(b_p, b_b, b_ob * b_shrink[:, None])
                if WC > 0:
                    b_oc = add_product(b_p, b_c, b_oc * b_shrink[:, None])

        if SPLIT:
            o_out = (i_b * splits + i_s) * (G * R * T) + i_g * (R * T) + o_m
            tl.store(p_top + o_out, b_top, mask=m_m)
            tl.store(p_total + o_out, b_total, mask=m_m)
            b_share = tl.full([BM], 1.0, tl.float32)
        else:
            o_out = (i_b * T + o_t) * (G * R) + o_h
            if SINKS:
                b_total += sink_share(p_sinks, stride_sb, i_b, o_h, b_top)
            b_share = 1 / tl.where(b_total > 0, b_total, 1.0)
        p_outputs = p_o + o_out * E
        if SHARED:
            store_columns(p_outputs, o_a, b_oa * b_share[:, None], m_m, WA)
        else:
            store_columns(p_outputs, o_v, b_oa * b_share[:, None], m_m, WV)
        if TURN:
            store_columns(p_outputs + WA, o_b, b_ob * b_share[:, None], m_m, WB)
            if WC > 0:
                store_columns(p_outputs + WA + WB, o_c, b_oc * b_share[:, None], m_m, WC)


@triton.jit(do_not_specialize=["S", "T", "chunk", "splits", "window"])
def combine_kernel(
    p_parts,  # [B, splits, G·R·T, E]
    p_top,  # [B, splits, G·R·T]
    p_total,  # [B, splits, G·R·T]
    p_starts,
    p_lengths,
    p_sinks,
    p_o,  # [B, T, G·R, E]
    stride_sb,
    S,
    T,
    chunk,
    splits,
    window,
    G: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    STARTS: tl.constexpr,
    LENGTHS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,  # ≥ splits
    AT_ONCE: tl.constexpr,
):
    """o = Σ_s 2^(top_s − top) sum_s / Σ_s 2^(top_s − top) total_s over the chunks of one row's query, first to last."""
    pid = tl.program_id(0)
    rows = G * R * T
    i_b = (pid // rows).to(tl.int64)
    i_row = pid % rows
    i_g, i_m = i_row // (R * T), i_row % (R * T)
    _, _, low, high = row_range(p_starts, p_lengths, i_b, S, T, window, STARTS, LENGTHS, WINDOW)
    used = tl.maximum((high - low + chunk - 1) // chunk, 1)
    o_s = tl.arange(0, BS)
    o_one = i_b * splits * rows + i_row
    b_top = tl.load(p_top + o_one + o_s * rows, mask=o_s < used, other=LOWEST)
    b_total = tl.load(p_total + o_one + o_s * rows, mask=o_s < used, other=0.0)
    top = tl.max(b_top, 0)
    total = tl.sum(tl.exp2(b_top - top) * b_total, 0)
    if SINKS:
        total += sink_share(p_sinks, stride_sb, i_b, i_g * R + i_m % R, top)
    o_e = tl.arange(0, BE)
    b_o = tl.zeros([BE], tl.float32)
    for i_s in range(0, used, AT_ONCE):
        o_n = i_s + tl.arange(0, AT_ONCE)
        b_weight = tl.exp2(tl.load(p_top + o_one + o_n * rows, mask=o_n < used, other=float("-inf")) - top)
        p_block = p_parts + (o_one + o_n * rows)[:, None] * E + o_e[None, :]
        b_part = tl.load(p_block, mask=(o_n < used)[:, None] & (o_e < E)[None, :], other=0.0)
        b_o += tl.sum(b_part * b_weight[:, None], 0)
    p_row = p_o + ((i_b * T + i_m // R) * (G * R) + i_g * R + i_m % R) * E
    tl.store(p_row + o_e, (b_o / tl.where(total > 0, total, 1.0)).to(p_o.dtype.element_ty), mask=o_e < E)


def choose_block(width: int) -> int:
    """The block that holds `width` entries; products need at least 16."""
    return max(16, triton.next_power_of_2(width))


def choose_config(rows: int, widest: int, itemsize: int, shared: bool, turned: bool) -> Config:
    """For `rows` query rows in a block, keys of `widest` entries padded, of `itemsize` bytes each."""
    if itemsize > 2:
        return Config(block_n=16 if widest > 128 else 32, warps=4, stages=2)
    if widest > 256:
        return Config(block_n=32, warps=8, stages=2, resident=1) if rows > 16 else Config(32, 4, 2, resident=4)
    if turned:
        return Config(block_n=64, warps=4, stages=3, resident=2)
    return Config(block_n=128 if shared and rows == 16 and widest <= 128 else 64, warps=4, stages=3)


def choose_chunk(S: int, programs: int, at_once: int, block_n: int) -> int:
    """Slots of one program, where unsplit there would be `programs` of them and the GPU runs `at_once` at a time.

    As few rounds of programs as keep to `LONGEST` slots each, and as many programs as fill them.
    """
    rounds = -(-programs * S // (LONGEST * at_once))
    splits = max(1, min(MOST_SPLITS, rounds * at_once // programs, S // SHORTEST))
    slots = -(-S // splits)
    return max(block_n, -(-slots // block_n) * block_n)


@functools.cache
def count_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
    value_width: int,
    scale: float,
    config: Config | None = None,
) -> Tensor:
    """q [B, T, H, D], k [B, S, G, D], v [B, S, G, E] or None → [B, T, H, E] as `qklab.ops.decode.decode` defines it."""
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    R, turn = H // G, cos is not None
    if cos is not None and sin is not None:
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        widths = cos.shape[1], cos.shape[1], D - 2 * cos.shape[1]
    else:
        widths = (value_width, D - value_width, 0) if v is None else (D, 0, 0)
    o = q.new_empty(B, T, H, value_width)
    if o.numel() == 0:
        return o
    if S == 0:
        return o.zero_()
    BM = min(64, max(16, triton.next_power_of_2(R * T)))
    blocks_m = triton.cdiv(R * T, BM)
    config = config or choose_config(BM, choose_block(max(D, value_width)), q.dtype.itemsize, v is None, turn)
    at_once = count_processors(q.device) * config.resident
    most = S if window is None or lengths is not None else min(S, window + T - 1)  # slots that are read of a row
    chunk = config.chunk or choose_chunk(most, B * G * blocks_m, at_once, config.block_n)
    splits = triton.cdiv(most, chunk)
    if splits > 1:
        parts = q.new_empty(B, splits, H * T, value_width, dtype=torch.float32)
        top, total = (q.new_empty(B, splits, H * T, dtype=torch.float32) for _ in range(2))
    else:
        parts, top, total = o, None, None
    rows: dict[str, Any] = {"G": G, "R": R, "STARTS": starts is not None, "LENGTHS": lengths is not None}
    rows |= {"WINDOW": window is not None, "SINKS": sinks is not None}
    sinks = None if sinks is None else sinks.float().contiguous()
    stride_sb = H if sinks is not None and sinks.dim() == 2 else 0
    parts_of_key: dict[str, Any] = {
        **dict(zip(("WA", "WB", "WC", "WV"), (*widths, value_width), strict=True)),
        **{
            name: choose_block(width)
            for name, width in zip(("BA", "BB", "BC", "BV"), (*widths, value_width), strict=True)
        },
        "SHARED": v is None,
        "TURN": turn,
    }
    shape: dict[str, Any] = {"BLOCKS_M": blocks_m, "BM": BM, "BN": config.block_n, "SPLIT": splits > 1}
    launch: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages}
    strides = *q.stride(), *k.stride(), *((0, 0, 0, 0) if v is None else v.stride())
    arguments: list[Any] = [q, k, v, cos, sin, starts, lengths, sinks, parts, top, total, *strides]
    arguments += [stride_sb, S, T, chunk, splits, window or 0, scale * LOG2_E]
    attend_kernel[(B * splits * G * blocks_m,)](
        *arguments,
        **rows,
        **parts_of_key,
        **shape,
        **launch,
    )
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        wide = triton.next_power_of_2(value_width)
        combining: dict[str, Any] = {"E": value_width, "BE": wide, "BS": padded, "AT_ONCE": min(16, padded)}
        combine_kernel[(B * H * T,)](
            *(parts, top, total, starts, lengths, sinks, o, stride_sb, S, T, chunk, splits, window or 0),
            **rows,
            **combining,
        )
    return o
