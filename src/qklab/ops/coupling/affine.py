"""The kernels of the affine map, laid out as those of the forced ones."""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from qklab.ops.coupling.maps import (
    MLP,
    add_columns,
    column_of,
    hidden,
    hidden_backward,
    load_rows,
    product,
    scale_and_shift,
    store_rows,
    stretch_backward,
)
from qklab.ops.coupling.tiles import (
    begin_sum,
    finish_backward,
    finished,
    load_angles,
    load_gain,
    load_matrix,
    load_unit,
    loaded_sums,
    mean_of_group,
    part_sums,
    rows_from,
    share_of,
    store_matrix,
    unit_of,
    units,
)


@triton.jit
def load_network(
    p_w1, p_w2, i_w, o_h, m_h, o_d, m_d, WIDTH: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """W1, and of the outer layer [2D, h] the scale's and the shift's half: [h, D] each."""
    b_w1 = load_matrix(p_w1 + i_w * WIDTH * D, o_h, m_h, D, o_d, m_d, 1, DOT)
    p_w2 += i_w * 2 * D * WIDTH
    b_w2 = load_matrix(p_w2, o_h, m_h, 1, o_d, m_d, WIDTH, DOT)
    b_w3 = load_matrix(p_w2 + D * WIDTH, o_h, m_h, 1, o_d, m_d, WIDTH, DOT)
    return b_w1, b_w2, b_w3


@triton.jit
def affine_forward(
    p_q,  # as in forced_forward
    p_k,
    p_cos,
    p_sin,
    p_qw1,  # [G or 1, h, D], the network that moves the query
    p_qb1,  # [h] or None
    p_qw2,  # [G or 1, 2D, h]
    p_qb2,  # [2D] or None
    p_kw1,  # the network that moves the key
    p_kb1,
    p_kw2,
    p_kb2,
    p_gain_q,
    p_gain_k,
    p_q_out,
    p_k_out,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    a_b,
    a_t,
    limit,
    eps,
    rows,
    T,
    per_head,
    HEADED: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDTH: tl.constexpr,
    HP: tl.constexpr,
    TURNED: tl.constexpr,
    TURN_K: tl.constexpr,
    NORM: tl.constexpr,
    STEPS: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    first, last, stride = share_of(tl.cdiv(rows, BM) * G, HEADED)
    i_w = tl.program_id(0) % G * per_head
    o_j, o_h = tl.arange(0, DP // 2), tl.arange(0, HP)
    m_h = o_h < WIDTH
    o_d, m_d = column_of(tl.arange(0, DP), D, TURNED)
    b_qw1, b_qw2, b_qw3 = load_network(p_qw1, p_qw2, i_w, o_h, m_h, o_d, m_d, WIDTH, D, DOT)
    b_kw1, b_kw2, b_kw3 = load_network(p_kw1, p_kw2, i_w, o_h, m_h, o_d, m_d, WIDTH, D, DOT)
    b_gain_q, b_gain_k = load_gain(p_gain_q, o_d, m_d, WIDE), load_gain(p_gain_k, o_d, m_d, WIDE)

    for i_tile in tl.range(first, last, stride, num_stages=STAGES):
        i_g = i_tile % G
        i_row = i_tile // G * BM
        m_rows = i_row + tl.arange(0, BM) < rows
        p_queries = rows_from(p_q + i_g * R * q_h, i_row, q_b, q_t, T, BM, EVEN)
        b_q = mean_of_group(p_queries, q_h, m_rows, o_j, R, D, TURNED, WIDE)
        p_keyed = rows_from(p_k + i_g * k_h, i_row, k_b, k_t, T, BM, EVEN)
        b_k = load_rows(p_keyed, m_rows, o_j, D, TURNED, WIDE)
        b_start, b_log = b_q, tl.zeros([BM, DP], WIDE)
        for _ in range(STEPS):
            b_s, b_t = scale_and_shift(b_k, b_qw1, p_qb1, b_qw2, b_qw3, p_qb2, o_h, m_h, o_d, m_d, limit, D, DOT, FAST)
            b_q = b_q * tl.exp(b_s) + b_t
            if R > 1:
                b_log += b_s
            b_s, b_t = scale_and_shift(b_q, b_kw1, p_kb1, b_kw2, b_kw3, p_kb2, o_h, m_h, o_d, m_d, limit, D, DOT, FAST)
            b_k = b_k * tl.exp(b_s) + b_t
        b_cos, b_sin = tl.zeros([1, 1], WIDE), tl.zeros([1, 1], WIDE)
        if TURNED:
            p_c = rows_from(p_cos, i_row, a_b, a_t, T, BM, EVEN)
            p_s = rows_from(p_sin, i_row, a_b, a_t, T, BM, EVEN)
            b_cos, b_sin = load_angles(p_c, p_s, m_rows, o_j, TURNED, WIDE)
        o_first, o_out = i_row.to(tl.int64) * (G * D) + i_g * D, tl.arange(0, BM) * (G * D)
        b_y = finished(b_k, b_gain_k, b_cos, b_sin, eps, NORM, TURN_K * TURNED, D)
        store_rows(p_k_out + o_first + o_out, m_rows, o_j, b_y, D, TURNED)
        if R == 1:
            b_y = finished(b_q, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D)
            store_rows(p_q_out + o_first + o_out, m_rows, o_j, b_y, D, TURNED)
        else:
            b_e = tl.exp(b_log)
            for i_r in range(R):
                b_y = load_rows(p_queries + i_r * q_h, m_rows, o_j, D, TURNED, WIDE)
                b_y = (b_y - b_start) * b_e + b_q
                b_y = finished(b_y, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D)
                store_rows(p_q_out + o_first * R + i_r * D + o_out * R, m_rows, o_j, b_y, D, TURNED)


@triton.jit
def affine_backward(
    p_q,  # as in affine_forward and forced_backward
    p_k,
    p_cos,
    p_sin,
    p_qw1,
    p_qb1,
    p_qw2,
    p_qb2,
    p_kw1,
    p_kb1,
    p_kw2,
    p_kb2,
    p_gain_q,
    p_gain_k,
    p_dq_out,
    p_dk_out,
    p_dq,
    p_dk,
    p_sums,  # [programs, 2D]: this program's share of the gains' gradients
    p_work,  # [tiles, STEPS, 2, 3, BM, DP] in DOT: what each network took, and the gradients of its raw scale and shift
    p_states,  # [programs, STEPS, 2, BM, DP]: the states before each step, where there are several; else None
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    dq_b,
    dq_t,
    dq_h,
    dk_b,
    dk_t,
    dk_h,
    a_b,
    a_t,
    limit,
    eps,
    rows,
    T,
    begin,  # first block of this launch
    tiles,  # and how many tiles it has
    per_head,
    HEADED: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDTH: tl.constexpr,
    HP: tl.constexpr,
    TURNED: tl.constexpr,
    TURN_K: tl.constexpr,
    NORM: tl.constexpr,
    STEPS: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq, dk, and what `affine_weights` needs."""
    first, last, stride = share_of(tiles, HEADED)
    i_w = tl.program_id(0) % G * per_head
    o_j, o_h = tl.arange(0, DP // 2), tl.arange(0, HP)
    m_h = o_h < WIDTH
    o_d, m_d = column_of(tl.arange(0, DP), D, TURNED)
    b_qw1, b_qw2, b_qw3 = load_network(p_qw1, p_qw2, i_w, o_h, m_h, o_d, m_d, WIDTH, D, DOT)
    b_kw1, b_kw2, b_kw3 = load_network(p_kw1, p_kw2, i_w, o_h, m_h, o_d, m_d, WIDTH, D, DOT)
    b_gain_q, b_gain_k = load_gain(p_gain_q, o_d, m_d, WIDE), load_gain(p_gain_k, o_d, m_d, WIDE)
    p_sums += tl.program_id(0).to(tl.int64) * (2 * D)
    begin_sum(p_sums, p_gain_q, o_d, m_d)
    begin_sum(p_sums + D, p_gain_k, o_d, m_d)
    tl.debug_barrier()
    SIZE: tl.constexpr = BM * DP

    for i_tile in tl.range(first, last, stride, num_stages=STAGES):
        i_g = i_tile % G
        i_row = (begin + i_tile // G) * BM
        m_rows = i_row + tl.arange(0, BM) < rows
        p_queries = rows_from(p_q + i_g * R * q_h, i_row, q_b, q_t, T, BM, EVEN)
        p_dqueries = rows_from(p_dq_out + i_g * R * dq_h, i_row, dq_b, dq_t, T, BM, EVEN)
        b_q = mean_of_group(p_queries, q_h, m_rows, o_j, R, D, TURNED, WIDE)
        p_keyed = rows_from(p_k + i_g * k_h, i_row, k_b, k_t, T, BM, EVEN)
        b_k = load_rows(p_keyed, m_rows, o_j, D, TURNED, WIDE)
        o_unit = (i_tile * (STEPS * 6 * BM) + tl.arange(0, BM)).to(tl.int64)
        p_unit = p_work + o_unit[:, None] * DP + tl.arange(0, DP)[None, :]

        b_start, b_q_end, b_k_end = b_q, b_q, b_k
        b_log = tl.zeros([BM, DP], WIDE)
        if STEPS > 1:
            o_state = tl.arange(0, BM)[:, None] * DP + tl.arange(0, DP)[None, :]
            p_state = p_states + tl.program_id(0).to(tl.int64) * (STEPS * 2 * BM * DP) + o_state
            tl.debug_barrier()
        if STEPS > 1 or NORM or R > 1:
            for i_step in range(STEPS):
                if STEPS > 1:
                    tl.store(p_state + (2 * i_step) * BM * DP, b_q_end)
                    tl.store(p_state + (2 * i_step + 1) * BM * DP, b_k_end)
                b_s, b_t = scale_and_shift(
                    b_k_end, b_qw1, p_qb1, b_qw2, b_qw3, p_qb2, o_h, m_h, o_d, m_d, limit, D, DOT, FAST
                )
                b_q_end = b_q_end * tl.exp(b_s) + b_t
                if R > 1:
                    b_log += b_s
                b_s, b_t = scale_and_shift(
                    b_q_end, b_kw1, p_kb1, b_kw2, b_kw3, p_kb2, o_h, m_h, o_d, m_d, limit, D, DOT, FAST
                )
                b_k_end = b_k_end * tl.exp(b_s) + b_t
        if STEPS > 1:
            tl.debug_barrier()
        b_e = tl.exp(b_log)

        b_cos, b_sin = tl.zeros([1, 1], WIDE), tl.zeros([1, 1], WIDE)
        if TURNED:
            p_c = rows_from(p_cos, i_row, a_b, a_t, T, BM, EVEN)
            p_s = rows_from(p_sin, i_row, a_b, a_t, T, BM, EVEN)
            b_cos, b_sin = load_angles(p_c, p_s, m_rows, o_j, TURNED, WIDE)
        p_dkeyed = rows_from(p_dk_out + i_g * dk_h, i_row, dk_b, dk_t, T, BM, EVEN)
        b_dk = load_rows(p_dkeyed, m_rows, o_j, D, TURNED, WIDE)
        b_dk, b_unit = finish_backward(b_dk, b_k_end, b_gain_k, b_cos, b_sin, eps, NORM, TURN_K * TURNED, D)
        if p_gain_k is not None:
            add_columns(p_sums + D, b_unit, o_d, m_d)
        b_extra = tl.zeros([BM, DP], WIDE)  # the gradient of log E
        if R == 1:
            b_dq = load_rows(p_dqueries, m_rows, o_j, D, TURNED, WIDE)
            b_dq, b_unit = finish_backward(b_dq, b_q_end, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D)
            if p_gain_q is not None:
                add_columns(p_sums, b_unit, o_d, m_d)
        else:
            b_dq = tl.zeros([BM, DP], WIDE)
            for i_r in range(R):
                b_x = (load_rows(p_queries + i_r * q_h, m_rows, o_j, D, TURNED, WIDE) - b_start) * b_e
                b_dy = load_rows(p_dqueries + i_r * dq_h, m_rows, o_j, D, TURNED, WIDE)
                b_dy, b_unit = finish_backward(b_dy, b_x + b_q_end, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D)
                b_dq += b_dy
                b_extra += b_dy * b_x
                if p_gain_q is not None:
                    add_columns(p_sums, b_unit, o_d, m_d)
                    tl.debug_barrier()
        b_received = b_dq

        for i_back in range(STEPS):
            if STEPS > 1:
                i_step = STEPS - 1 - i_back
                b_q = tl.load(p_state + (2 * i_step) * BM * DP)
                b_k = tl.load(p_state + (2 * i_step + 1) * BM * DP)
            b_s, b_t = scale_and_shift(b_k, b_qw1, p_qb1, b_qw2, b_qw3, p_qb2, o_h, m_h, o_d, m_d, limit, D, DOT, FAST)
            b_moved = b_q * tl.exp(b_s) + b_t
            p_key, p_query = p_unit + 6 * (STEPS - 1 - i_back) * SIZE, p_unit + (6 * (STEPS - 1 - i_back) + 3) * SIZE
            tl.store(p_key, b_moved.to(DOT))
            tl.store(p_key + 2 * SIZE, b_dk.to(DOT))
            b_dk, b_draw, b_du = stretch_backward(
                b_moved, b_k, b_dk, tl.zeros([BM, DP], WIDE), b_kw1, p_kb1, b_kw2, b_kw3, p_kb2,
                o_h, m_h, o_d, m_d, limit, DOT, FAST,
            )  # fmt: skip
            tl.store(p_key + SIZE, b_draw)
            b_dq += b_du
            tl.store(p_query, b_k.to(DOT))
            tl.store(p_query + 2 * SIZE, b_dq.to(DOT))
            b_dq, b_draw, b_du = stretch_backward(
                b_k, b_q, b_dq, b_extra, b_qw1, p_qb1, b_qw2, b_qw3, p_qb2,
                o_h, m_h, o_d, m_d, limit, DOT, FAST,
            )  # fmt: skip
            tl.store(p_query + SIZE, b_draw)
            b_dk += b_du

        o_first, o_out = i_row.to(tl.int64) * (G * D) + i_g * D, tl.arange(0, BM) * (G * D)
        store_rows(p_dk + o_first + o_out, m_rows, o_j, b_dk, D, TURNED)
        if R == 1:
            store_rows(p_dq + o_first + o_out, m_rows, o_j, b_dq, D, TURNED)
        else:
            b_dq = (b_dq - b_received * b_e) / R
            for i_r in range(R):
                b_x = (load_rows(p_queries + i_r * q_h, m_rows, o_j, D, TURNED, WIDE) - b_start) * b_e
                b_dy = load_rows(p_dqueries + i_r * dq_h, m_rows, o_j, D, TURNED, WIDE)
                b_dy, _ = finish_backward(b_dy, b_x + b_q_end, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D)
                store_rows(p_dq + o_first * R + i_r * D + o_out * R, m_rows, o_j, b_dy * b_e + b_dq, D, TURNED)


@triton.jit
def affine_weights(
    p_work,  # as affine_backward left it, from the network's first tile on
    p_w1,  # of one network, as in affine_forward
    p_b1,
    p_w2,
    p_b2,
    p_sums,  # [programs / SLICES, total]: the programs' share of every gradient, each weight from its own offset on
    tiles,
    per_head,
    total,
    o_w1,
    o_b1,
    o_w2,
    o_b2,
    HEADED: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDTH: tl.constexpr,
    HP: tl.constexpr,
    SLICE: tl.constexpr,  # hidden entries of a program
    TURNED: tl.constexpr,
    STEPS: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of one network's weights."""
    SLICES: tl.constexpr = HP // SLICE
    i_slice = tl.program_id(0) % SLICES
    program, programs = tl.program_id(0) // SLICES, tl.num_programs(0) // SLICES
    i_w = program % G * per_head
    o_h = i_slice * SLICE + tl.arange(0, SLICE)
    m_h = o_h < WIDTH
    o_d, m_d = column_of(tl.arange(0, DP), D, TURNED)
    b_w1, b_w2, b_w3 = load_network(p_w1, p_w2, i_w, o_h, m_h, o_d, m_d, WIDTH, D, DOT)
    b_dw1, b_dw2, b_dw3 = tl.zeros([SLICE, DP], WIDE), tl.zeros([SLICE, DP], WIDE), tl.zeros([SLICE, DP], WIDE)
    b_db1 = tl.zeros([BM // 16, 8, SLICE], WIDE)
    b_db2, b_db3 = tl.zeros([16, DP], WIDE), tl.zeros([16, DP], WIDE)

    count = units(tiles, program, programs, STEPS, HEADED)
    i_unit = unit_of(0, program, programs, STEPS, HEADED)
    b_next_u = load_unit(p_work, i_unit, 0, 6, BM, DP)
    b_next_draw, b_next_dy = load_unit(p_work, i_unit, 1, 6, BM, DP), load_unit(p_work, i_unit, 2, 6, BM, DP)
    for i in tl.range(0, count, num_stages=STAGES):
        b_u, b_draw, b_dy = b_next_u, b_next_draw, b_next_dy
        i_unit = unit_of(tl.minimum(i + 1, count - 1), program, programs, STEPS, HEADED)
        b_next_u = load_unit(p_work, i_unit, 0, 6, BM, DP)
        b_next_draw, b_next_dy = load_unit(p_work, i_unit, 1, 6, BM, DP), load_unit(p_work, i_unit, 2, 6, BM, DP)
        b_y, b_t, b_h = hidden(b_u, b_w1, p_b1, None, o_h, m_h, MLP, DOT, FAST)
        b_h = b_h.to(DOT)
        b_dw2 += product(tl.trans(b_h), b_draw, DOT)
        b_dw3 += product(tl.trans(b_h), b_dy, DOT)
        b_dh = product(b_draw, tl.trans(b_w2), DOT) + product(b_dy, tl.trans(b_w3), DOT)
        b_dz = hidden_backward(b_dh, b_y, b_t, None, o_h, m_h, MLP)
        b_dw1 += product(tl.trans(b_dz.to(DOT)), b_u, DOT)
        if p_b1 is not None:
            b_db1 += part_sums(b_dz)
        if p_b2 is not None:
            b_db2 += loaded_sums(b_draw, WIDE)
            b_db3 += loaded_sums(b_dy, WIDE)

    p_sums += program.to(tl.int64) * total
    store_matrix(p_sums + o_w1, b_dw1, o_h, m_h, D, o_d, m_d, 1)
    store_matrix(p_sums + o_w2, b_dw2, o_h, m_h, 1, o_d, m_d, WIDTH)
    store_matrix(p_sums + o_w2 + D * WIDTH, b_dw3, o_h, m_h, 1, o_d, m_d, WIDTH)
    if p_b1 is not None:
        tl.store(p_sums + o_b1 + o_h, tl.sum(tl.sum(b_db1, 0), 0), mask=m_h)
    if p_b2 is not None:
        tl.store(p_sums + o_b2 + o_d, tl.sum(b_db2, 0), mask=m_d & (o_d >= i_slice * D))
        tl.store(p_sums + o_b2 + D + o_d, tl.sum(b_db3, 0), mask=m_d & (o_d >= i_slice * D))
