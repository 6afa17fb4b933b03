"""The kernels of the forced maps: persistent programs, each with some tiles (`share_of`), its weights loaded once.

Weight gradients are summed in registers over a program's tiles and written to the program's own row of a workspace, so
nothing is added in an order that may change.

Between the query heads of a group nothing differs but where they started: a map moves the group's mean q̄ together with
the key, and q_r follows as (q_r − q̄) ⊙ E + q̄⁺, with E = 1 except for the affine map. README.md derives the backward.
"""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from qklab.ops.coupling.maps import (
    EULER,
    GRADIENT,
    LEAPFROG,
    LINEAR,
    MLP,
    add_columns,
    column_of,
    force,
    load_rows,
    load_vector,
    pulled_back,
    store_rows,
)
from qklab.ops.coupling.tiles import (
    angles_at,
    as_result,
    begin_sum,
    finish_backward,
    finished,
    first_row,
    load_gain,
    load_matrix,
    mean_of_group,
    no_angles,
    rows_from,
    share_of,
)


@triton.jit
def sheared(
    b_q, b_k, step, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d,
    STEPS: tl.constexpr, UNROLL: tl.constexpr, KIND: tl.constexpr, FORCE: tl.constexpr, DOT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """STEPS times a kick and a drift; leapfrog's first kick is half a one, and its last half is left to the caller.

    UNROLL: only a loop without loops in it loads the next tiles while it computes.
    """
    if UNROLL:
        for i_step in tl.static_range(STEPS):
            share = 0.5 * step if KIND == LEAPFROG and i_step == 0 else step
            b_k += share * force(b_q, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
            b_q += step * b_k
    else:
        for i_step in range(STEPS):
            share = step
            if KIND == LEAPFROG:
                share = tl.where(i_step == 0, 0.5 * step, step)
            b_k += share * force(b_q, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
            b_q += step * b_k
    return b_q, b_k


@triton.jit
def forced_forward(
    p_q,  # [B, T, H, D], strides q_b, q_t, q_h, 1
    p_k,  # [B, T, G, D], strides k_b, k_t, k_h, 1
    p_cos,  # [B or 1, T, TURNED], strides a_b, a_t, 1; None: no rotation
    p_sin,
    p_step,  # [G or 1]
    p_w1,  # [G or 1, h, D]
    p_b1,  # [h] or None
    p_w2,  # [G or 1, D, h] or None
    p_b2,  # [D] or None; the amplitudes [G or 1, h] of a gradient force
    p_gain_q,  # [D] or None
    p_gain_k,
    p_q_out,  # [B, T, H, D], contiguous
    p_k_out,  # [B, T, G, D], contiguous
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    a_b,
    a_t,
    eps,
    rows,
    T,
    per_head,  # 1 where every key head has weights of its own, else 0
    step_per_head,
    HEADED: tl.constexpr,  # whether a program keeps to one key head
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
    KIND: tl.constexpr,
    FORCE: tl.constexpr,
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
    step = tl.load(p_step + tl.program_id(0) % G * step_per_head).to(WIDE)
    if FORCE == LINEAR:
        o_h, m_h = o_d, m_d  # its rows, too, are a head's entries
    b_w1 = load_matrix(p_w1 + i_w * WIDTH * D, o_h, m_h, D, o_d, m_d, 1, DOT)  # [h, D]
    b_w2 = b_w1
    if FORCE == MLP:
        b_w2 = load_matrix(p_w2 + i_w * WIDTH * D, o_h, m_h, 1, o_d, m_d, WIDTH, DOT)  # [h, D]
    if FORCE == GRADIENT:
        p_b2 += i_w * WIDTH
    b_b1 = load_vector(p_b1, o_h, m_h, WIDE)
    b_b2 = load_vector(p_b2, o_h, m_h, WIDE) if FORCE == GRADIENT else load_vector(p_b2, o_d, m_d, WIDE)
    b_gain_q, b_gain_k = load_gain(p_gain_q, o_d, m_d, WIDE), load_gain(p_gain_k, o_d, m_d, WIDE)

    o_held, b_cos, b_sin = no_angles(TURNED, WIDE, BM, DP)
    for i_tile in tl.range(first, last, stride, num_stages=STAGES):
        i_g = i_tile % G
        i_row = first_row(i_tile // G, rows, T, BM, EVEN)
        m_rows = i_row + tl.arange(0, BM) < rows
        p_queries = rows_from(p_q + i_g * R * q_h, i_row, q_b, q_t, T, BM, EVEN)
        b_q = mean_of_group(p_queries, q_h, m_rows, o_j, R, D, TURNED, WIDE, EVEN)
        p_keyed = rows_from(p_k + i_g * k_h, i_row, k_b, k_t, T, BM, EVEN)
        b_k = load_rows(p_keyed, m_rows, o_j, D, TURNED, p_k.dtype.element_ty, EVEN)
        b_k = as_result(b_k, DOT, WIDE) if KIND == EULER else b_k.to(WIDE)
        b_start = b_q
        if KIND == EULER:
            for _ in range(STEPS):
                b_f = force(b_q, b_w1, b_b1, b_w2, b_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
                b_q, b_k = b_q + step * b_k, b_k + step * b_f
        else:
            b_q, b_k = sheared(
                b_q, b_k, step, b_w1, b_b1, b_w2, b_b2, o_h, m_h, o_d, m_d, STEPS, STEPS <= 8, KIND, FORCE, DOT, FAST
            )
            if KIND == LEAPFROG:
                b_k += 0.5 * step * force(b_q, b_w1, b_b1, b_w2, b_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
        if TURNED:
            o_held, b_cos, b_sin = angles_at(
                i_row, o_held, b_cos, b_sin, p_cos, p_sin, a_b, a_t, m_rows, o_j, T, EVEN, TURNED, WIDE, BM, EVEN
            )
        o_first, o_out = i_row.to(tl.int64) * (G * D) + i_g * D, tl.arange(0, BM) * (G * D)
        b_y = finished(b_k, b_gain_k, b_cos, b_sin, eps, NORM, TURN_K * TURNED, D)
        store_rows(p_k_out + o_first + o_out, m_rows, o_j, b_y, D, TURNED, EVEN)
        if R == 1:
            b_y = finished(b_q, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D)
            store_rows(p_q_out + o_first + o_out, m_rows, o_j, b_y, D, TURNED, EVEN)
        else:
            b_q -= b_start
            for i_r in range(R):
                b_y = load_rows(p_queries + i_r * q_h, m_rows, o_j, D, TURNED, WIDE, EVEN) + b_q
                b_y = finished(b_y, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D)
                store_rows(p_q_out + o_first * R + i_r * D + o_out * R, m_rows, o_j, b_y, D, TURNED, EVEN)


@triton.jit
def forced_backward(
    p_q,  # as in forced_forward
    p_k,
    p_cos,
    p_sin,
    p_step,
    p_w1,
    p_b1,
    p_w2,
    p_b2,
    p_gain_q,
    p_gain_k,
    p_dq_out,  # gradients of the outputs, strides dq_b, dq_t, dq_h, 1 and dk_b, dk_t, dk_h, 1
    p_dk_out,
    p_dq,  # [B, T, H, D], contiguous
    p_dk,  # [B, T, G, D], contiguous
    p_sums,  # [programs, 1 + 2D]: this program's share of the gradients of the step (its drifts alone) and the gains
    p_work,  # [tiles, LEFT, 2, BM, DP] in DOT: argument and gradient of every evaluation of the force (LEAN: but of the
    # first; of Euler's only one then its gradient alone, [tiles, BM, DP])
    p_keys,  # [programs, STEPS, BM, DP] in DOT: the keys that Euler's queries drifted by; None for one step
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
    eps,
    rows,
    T,
    begin,  # first block of this launch
    tiles,  # and how many tiles it has
    per_head,
    step_per_head,
    HEADED: tl.constexpr,
    HOLD: tl.constexpr,  # keep a block's angles for its other heads
    LEAN: tl.constexpr,  # leave nothing of the first evaluation that q and dk hold anyway
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
    LEFT: tl.constexpr,
    KIND: tl.constexpr,
    FORCE: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq, dk, and what `forced_weights` needs. A gradient of c f(u) is kept as share · gradient, with c = share · δ."""
    first, last, stride = share_of(tiles, HEADED)
    i_w = tl.program_id(0) % G * per_head
    o_j, o_h = tl.arange(0, DP // 2), tl.arange(0, HP)
    m_h = o_h < WIDTH
    o_d, m_d = column_of(tl.arange(0, DP), D, TURNED)
    step = tl.load(p_step + tl.program_id(0) % G * step_per_head).to(WIDE)
    if FORCE == LINEAR:
        o_h, m_h = o_d, m_d
    b_w1 = load_matrix(p_w1 + i_w * WIDTH * D, o_h, m_h, D, o_d, m_d, 1, DOT)  # [h, D]
    b_w2 = b_w1
    if FORCE == MLP:
        b_w2 = load_matrix(p_w2 + i_w * WIDTH * D, o_h, m_h, 1, o_d, m_d, WIDTH, DOT)  # [h, D]
    if FORCE == GRADIENT:
        p_b2 += i_w * WIDTH
    p_sums += tl.program_id(0).to(tl.int64) * (1 + 2 * D)
    p_dgain_q, p_dgain_k = p_sums + 1, p_sums + 1 + D
    begin_sum(p_dgain_q, p_gain_q, o_d, m_d)
    begin_sum(p_dgain_k, p_gain_k, o_d, m_d)
    tl.debug_barrier()
    b_gain_q, b_gain_k = load_gain(p_gain_q, o_d, m_d, WIDE), load_gain(p_gain_k, o_d, m_d, WIDE)
    b_dstep = tl.zeros([BM], WIDE)
    o_state = tl.arange(0, BM)[:, None] * DP + tl.arange(0, DP)[None, :]
    SIZE: tl.constexpr = BM * DP

    o_held, b_cos, b_sin = no_angles(TURNED, WIDE, BM, DP)
    for i_tile in tl.range(first, last, stride, num_stages=STAGES):
        i_g = i_tile % G
        i_row = first_row(begin + i_tile // G, rows, T, BM, EVEN)
        m_rows = i_row + tl.arange(0, BM) < rows
        p_queries = rows_from(p_q + i_g * R * q_h, i_row, q_b, q_t, T, BM, EVEN)
        p_dqueries = rows_from(p_dq_out + i_g * R * dq_h, i_row, dq_b, dq_t, T, BM, EVEN)
        p_unit = p_work + (tl.zeros([], tl.int64) + i_tile) * (LEFT * 2 * SIZE) + o_state
        if LEAN:
            if KIND == EULER:
                p_unit = p_work + (tl.zeros([], tl.int64) + i_tile) * SIZE - SIZE + o_state
            else:
                p_unit -= 2 * SIZE
        b_q = mean_of_group(p_queries, q_h, m_rows, o_j, R, D, TURNED, WIDE, EVEN)
        p_keyed = rows_from(p_k + i_g * k_h, i_row, k_b, k_t, T, BM, EVEN)
        b_k = load_rows(p_keyed, m_rows, o_j, D, TURNED, WIDE, EVEN)
        b_start = b_q
        b_u, b_key = b_q.to(DOT), b_k.to(DOT)
        if KIND == EULER:
            if STEPS > 1:
                p_key = p_keys + tl.program_id(0).to(tl.int64) * (STEPS * SIZE) + o_state
                tl.debug_barrier()
                for i_step in range(STEPS):
                    tl.store(p_unit + 2 * i_step * SIZE, b_q.to(DOT))  # the first, too: it is read again below
                    tl.store(p_key + i_step * SIZE, b_k.to(DOT))
                    b_f = force(b_q, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
                    b_q, b_k = b_q + step * b_k, b_k + step * b_f
                tl.debug_barrier()
            else:
                if not LEAN:
                    tl.store(p_unit, b_u)
                if NORM:
                    b_f = force(b_u, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
                    b_q, b_k = b_q + step * b_k, b_k + step * b_f
        else:
            b_q, b_k = sheared(
                b_q, b_k, step, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, STEPS, False, KIND, FORCE, DOT, FAST
            )
            b_key = b_k.to(DOT)
        b_end = b_k
        if KIND == LEAPFROG and NORM:
            b_end += 0.5 * step * force(b_q, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)

        if TURNED:
            o_held, b_cos, b_sin = angles_at(
                i_row, o_held, b_cos, b_sin, p_cos, p_sin, a_b, a_t, m_rows, o_j, T, HOLD, TURNED, WIDE, BM, EVEN
            )
        p_dkeyed = rows_from(p_dk_out + i_g * dk_h, i_row, dk_b, dk_t, T, BM, EVEN)
        b_dk = load_rows(p_dkeyed, m_rows, o_j, D, TURNED, p_dk_out.dtype.element_ty, EVEN)
        b_dk, b_unit = finish_backward(
            as_result(b_dk, DOT, WIDE), b_end, b_gain_k, b_cos, b_sin, eps, NORM, TURN_K * TURNED, D
        )
        if p_gain_k is not None:
            add_columns(p_dgain_k, b_unit, o_d, m_d)
        if R == 1:
            b_dq = load_rows(p_dqueries, m_rows, o_j, D, TURNED, p_dq_out.dtype.element_ty, EVEN)
            b_dq, b_unit = finish_backward(
                as_result(b_dq, DOT, WIDE), b_q, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D
            )
            if p_gain_q is not None:
                add_columns(p_dgain_q, b_unit, o_d, m_d)
        else:
            b_shift = b_q - b_start
            b_dq = tl.zeros([BM, DP], WIDE)
            for i_r in range(R):
                b_y = load_rows(p_queries + i_r * q_h, m_rows, o_j, D, TURNED, WIDE, EVEN) + b_shift
                b_dhead = load_rows(p_dqueries + i_r * dq_h, m_rows, o_j, D, TURNED, WIDE, EVEN)
                b_dhead, b_unit = finish_backward(b_dhead, b_y, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D)
                b_dq += b_dhead
                if p_gain_q is not None:
                    add_columns(p_dgain_q, b_unit, o_d, m_d)
                    tl.debug_barrier()
        b_received = b_dq  # Σ over the group of the gradients of q⁺

        if KIND == LEAPFROG:
            b_u, b_dy = b_q.to(DOT), (0.5 * b_dk).to(DOT)
            tl.store(p_unit + 2 * STEPS * SIZE, b_u)
            tl.store(p_unit + (2 * STEPS + 1) * SIZE, b_dy)
            b_du, _ = pulled_back(b_u, b_dy, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, False, FORCE, DOT, FAST)
            b_dq += step * b_du
        for i_back in range(STEPS):
            i_step = STEPS - 1 - i_back
            if KIND == EULER:
                if STEPS > 1:
                    b_key, b_u = tl.load(p_key + i_step * SIZE), tl.load(p_unit + 2 * i_step * SIZE)
                b_dstep += tl.sum(b_dq * b_key.to(WIDE), 1)
                b_drift, b_dy = step * b_dq, b_dk.to(DOT)
                tl.store(p_unit + (2 * i_step + 1) * SIZE, b_dy)
                b_du, _ = pulled_back(b_u, b_dy, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, False, FORCE, DOT, FAST)
                b_dq += step * b_du
                b_dk += b_drift
            else:
                if STEPS == 1:
                    b_dstep += tl.sum(b_dq * b_key.to(WIDE), 1)
                    b_u = mean_of_group(p_queries, q_h, m_rows, o_j, R, D, TURNED, WIDE, EVEN).to(DOT)
                else:  # undone in float32, which is as good as having kept every state
                    b_dstep += tl.sum(b_dq * b_k, 1)
                    b_q -= step * b_k
                    b_u = b_q.to(DOT)
                b_dk += step * b_dq
                share = tl.full([], 1.0, WIDE)
                if KIND == LEAPFROG:
                    share = tl.where(i_step == 0, 0.5, 1.0).to(WIDE)
                b_dy = (share * b_dk).to(DOT)
                if (not LEAN) | (i_step > 0):
                    tl.store(p_unit + 2 * i_step * SIZE, b_u)
                    tl.store(p_unit + (2 * i_step + 1) * SIZE, b_dy)
                b_du, b_f = pulled_back(
                    b_u, b_dy, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, STEPS > 1, FORCE, DOT, FAST
                )
                b_dq += step * b_du
                if STEPS > 1:
                    b_k -= share * step * b_f

        o_first, o_out = i_row.to(tl.int64) * (G * D) + i_g * D, tl.arange(0, BM) * (G * D)
        store_rows(p_dk + o_first + o_out, m_rows, o_j, b_dk, D, TURNED, EVEN)
        if R == 1:
            store_rows(p_dq + o_first + o_out, m_rows, o_j, b_dq, D, TURNED, EVEN)
        else:
            b_dq = (b_dq - b_received) / R
            for i_r in range(R):
                b_y = load_rows(p_queries + i_r * q_h, m_rows, o_j, D, TURNED, WIDE, EVEN) + b_shift
                b_dhead = load_rows(p_dqueries + i_r * dq_h, m_rows, o_j, D, TURNED, WIDE, EVEN)
                b_dhead, b_unit = finish_backward(b_dhead, b_y, b_gain_q, b_cos, b_sin, eps, NORM, TURNED, D)
                store_rows(p_dq + o_first * R + i_r * D + o_out * R, m_rows, o_j, b_dhead + b_dq, D, TURNED, EVEN)

    tl.store(p_sums, tl.sum(b_dstep, 0))
