"""The kernels of the uncoupled map: x⁺ = x + δ f(x) of one tensor's heads, which is run on the queries and the keys."""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from qklab.ops.coupling.maps import GRADIENT, MLP, add_columns, column_of, force, force_backward, load_rows, store_rows
from qklab.ops.coupling.tiles import (
    begin_sum,
    finish_backward,
    finished,
    load_angles,
    load_gain,
    load_matrix,
    rows_from,
    store_matrix,
)


@triton.jit
def alone_forward(
    p_x,  # [B, T, heads, D], strides x_b, x_t, x_h, 1
    p_cos,  # the rest as in forced_forward; R heads share a set of weights
    p_sin,
    p_step,
    p_w1,
    p_b1,
    p_w2,
    p_b2,
    p_gain,
    p_out,
    x_b,
    x_t,
    x_h,
    a_b,
    a_t,
    eps,
    rows,
    T,
    per_head,
    step_per_head,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDTH: tl.constexpr,
    HP: tl.constexpr,
    TURNED: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    STEPS: tl.constexpr,
    FORCE: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_head = tl.program_id(0) % HEADS
    i_w = i_head // R * per_head
    o_j, o_h = tl.arange(0, DP // 2), tl.arange(0, HP)
    m_h = o_h < WIDTH
    o_d, m_d = column_of(tl.arange(0, DP), D, TURNED)
    step = tl.load(p_step + i_head // R * step_per_head).to(WIDE)
    b_w1 = load_matrix(p_w1 + i_w * WIDTH * D, o_h, m_h, D, o_d, m_d, 1, DOT)
    b_w2 = b_w1
    if FORCE == MLP:
        b_w2 = load_matrix(p_w2 + i_w * WIDTH * D, o_h, m_h, 1, o_d, m_d, WIDTH, DOT)
    if FORCE == GRADIENT:
        p_b2 += i_w * WIDTH
    b_gain = load_gain(p_gain, o_d, m_d, WIDE)
    for i_block in tl.range(
        tl.program_id(0) // HEADS, tl.cdiv(rows, BM), tl.num_programs(0) // HEADS, num_stages=STAGES
    ):
        i_row = i_block * BM
        m_rows = i_row + tl.arange(0, BM) < rows
        b_x = load_rows(rows_from(p_x + i_head * x_h, i_row, x_b, x_t, T, BM, EVEN), m_rows, o_j, D, TURNED, WIDE)
        b_cos, b_sin = tl.zeros([1, 1], WIDE), tl.zeros([1, 1], WIDE)
        if TURN:
            p_c = rows_from(p_cos, i_row, a_b, a_t, T, BM, EVEN)
            p_s = rows_from(p_sin, i_row, a_b, a_t, T, BM, EVEN)
            b_cos, b_sin = load_angles(p_c, p_s, m_rows, o_j, TURNED, WIDE)
        for _ in range(STEPS):
            b_x += step * force(b_x, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
        b_x = finished(b_x, b_gain, b_cos, b_sin, eps, NORM, TURN * TURNED, D)
        store_rows(
            p_out + i_row.to(tl.int64) * (HEADS * D) + i_head * D + tl.arange(0, BM) * (HEADS * D),
            m_rows,
            o_j,
            b_x,
            D,
            TURNED,
        )


@triton.jit
def alone_backward(
    p_x,
    p_cos,
    p_sin,
    p_step,
    p_w1,
    p_b1,
    p_w2,
    p_b2,
    p_gain,
    p_dout,  # the gradient of the output, strides d_b, d_t, d_h, 1
    p_dx,
    p_sums,  # [programs, total]
    p_states,  # [programs, STEPS, BM, DP], or None for one step
    x_b,
    x_t,
    x_h,
    d_b,
    d_t,
    d_h,
    a_b,
    a_t,
    eps,
    rows,
    T,
    per_head,
    step_per_head,
    total,
    o_step,
    o_w1,
    o_b1,
    o_w2,
    o_b2,
    o_gain,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDTH: tl.constexpr,
    HP: tl.constexpr,
    TURNED: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    STEPS: tl.constexpr,
    FORCE: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_head = tl.program_id(0) % HEADS
    i_w = i_head // R * per_head
    o_j, o_h = tl.arange(0, DP // 2), tl.arange(0, HP)
    m_h = o_h < WIDTH
    o_d, m_d = column_of(tl.arange(0, DP), D, TURNED)
    step = tl.load(p_step + i_head // R * step_per_head).to(WIDE)
    b_w1 = load_matrix(p_w1 + i_w * WIDTH * D, o_h, m_h, D, o_d, m_d, 1, DOT)
    b_w2, b_dw2 = b_w1, tl.zeros([1, 1], WIDE)
    if FORCE == MLP:
        b_w2 = load_matrix(p_w2 + i_w * WIDTH * D, o_h, m_h, 1, o_d, m_d, WIDTH, DOT)
        b_dw2 = tl.zeros([HP, DP], WIDE)
    b_gain, b_dstep, b_dw1 = load_gain(p_gain, o_d, m_d, WIDE), tl.zeros([BM], WIDE), tl.zeros([HP, DP], WIDE)
    if FORCE == GRADIENT:
        p_b2 += i_w * WIDTH
    p_sums += tl.program_id(0).to(tl.int64) * total
    p_db1, p_db2 = p_sums + o_b1, p_sums + o_b2
    begin_sum(p_db1, p_b1, o_h, m_h)
    if FORCE == GRADIENT:
        begin_sum(p_db2, p_b2, o_h, m_h)
    else:
        begin_sum(p_db2, p_b2, o_d, m_d)
    begin_sum(p_sums + o_gain, p_gain, o_d, m_d)
    tl.debug_barrier()
    for i_block in tl.range(
        tl.program_id(0) // HEADS, tl.cdiv(rows, BM), tl.num_programs(0) // HEADS, num_stages=STAGES
    ):
        i_row = i_block * BM
        m_rows = i_row + tl.arange(0, BM) < rows
        b_x = load_rows(rows_from(p_x + i_head * x_h, i_row, x_b, x_t, T, BM, EVEN), m_rows, o_j, D, TURNED, WIDE)
        b_dx = load_rows(rows_from(p_dout + i_head * d_h, i_row, d_b, d_t, T, BM, EVEN), m_rows, o_j, D, TURNED, WIDE)
        b_cos, b_sin = tl.zeros([1, 1], WIDE), tl.zeros([1, 1], WIDE)
        if TURN:
            p_c = rows_from(p_cos, i_row, a_b, a_t, T, BM, EVEN)
            p_s = rows_from(p_sin, i_row, a_b, a_t, T, BM, EVEN)
            b_cos, b_sin = load_angles(p_c, p_s, m_rows, o_j, TURNED, WIDE)
        b_end = b_x
        if STEPS > 1:
            o_state = tl.arange(0, BM)[:, None] * DP + tl.arange(0, DP)[None, :]
            p_state = p_states + tl.program_id(0).to(tl.int64) * (STEPS * BM * DP) + o_state
            tl.debug_barrier()
        if STEPS > 1 or NORM:
            for i_step in range(STEPS):
                if STEPS > 1:
                    tl.store(p_state + i_step * BM * DP, b_end)
                b_end += step * force(b_end, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
        if STEPS > 1:
            tl.debug_barrier()
        b_dx, b_unit = finish_backward(b_dx, b_end, b_gain, b_cos, b_sin, eps, NORM, TURN * TURNED, D)
        if p_gain is not None:
            add_columns(p_sums + o_gain, b_unit, o_d, m_d)
        for i_back in range(STEPS):
            if STEPS > 1:
                b_x = tl.load(p_state + (STEPS - 1 - i_back) * BM * DP)
            b_du, b_along, b_dw1, b_dw2 = force_backward(
                b_x, b_dx, step, b_w1, p_b1, b_w2, p_b2, b_dw1, p_db1, b_dw2, p_db2,
                o_h, m_h, o_d, m_d, FORCE, DOT, FAST,
            )  # fmt: skip
            b_dstep += b_along
            b_dx += b_du
        store_rows(
            p_dx + i_row.to(tl.int64) * (HEADS * D) + i_head * D + tl.arange(0, BM) * (HEADS * D),
            m_rows,
            o_j,
            b_dx,
            D,
            TURNED,
        )
    tl.store(p_sums + o_step, tl.sum(b_dstep, 0))
    store_matrix(p_sums + o_w1, b_dw1, o_h, m_h, D, o_d, m_d, 1)
    if FORCE == MLP:
        store_matrix(p_sums + o_w2, b_dw2, o_h, m_h, 1, o_d, m_d, WIDTH)
