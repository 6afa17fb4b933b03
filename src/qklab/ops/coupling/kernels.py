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
    hidden,
    hidden_backward,
    inverse_rms,
    load_rows,
    load_vector,
    norm_backward,
    product,
    pulled_back,
    store_rows,
    turned,
)


@triton.jit
def load_matrix(p_w, o_row, m_row, row, o_col, m_col, col, DOT: tl.constexpr):
    """[h, D] in DOT: entry (i, d) at i·row + d·col."""
    b_w = tl.load(p_w + o_row[:, None] * row + o_col[None, :] * col, mask=m_row[:, None] & m_col[None, :], other=0.0)
    return b_w.to(DOT)


@triton.jit
def begin_sum(p_sum, p_b, o_b, m_b):
    """Zeros where the gradient of p_b, if it exists, is going to be summed."""
    if p_b is not None:
        tl.store(p_sum + o_b, tl.zeros([o_b.shape[0]], p_sum.dtype.element_ty), mask=m_b)


@triton.jit
def load_gain(p_gain, o_d, m_d, WIDE: tl.constexpr):
    """[D]; ones where there is none."""
    if p_gain is None:
        b_gain = tl.full([o_d.shape[0]], 1.0, WIDE)
    else:
        b_gain = tl.load(p_gain + o_d, mask=m_d, other=0.0).to(WIDE)
    return b_gain


@triton.jit
def store_matrix(p_w, b_w, o_row, m_row, row, o_col, m_col, col):
    p_w += o_row[:, None] * row + o_col[None, :] * col
    tl.store(p_w, b_w, mask=m_row[:, None] & m_col[None, :])


@triton.jit
def rows_from(p_x, i_row, batch, token, T, BM: tl.constexpr, EVEN: tl.constexpr):
    """Where the rows i_row, …, i_row + BM − 1 of [B, T, …] with these strides start: [BM].

    EVEN: no block reaches over the end of a batch row, so that all but one number is the same for all blocks.
    """
    o_m = tl.arange(0, BM)
    if EVEN:
        p_rows = p_x + (i_row // T).to(tl.int64) * batch + (i_row % T).to(tl.int64) * token + o_m * token
    else:
        o_row = i_row + o_m
        p_rows = p_x + (o_row // T).to(tl.int64) * batch + (o_row % T).to(tl.int64) * token
    return p_rows


@triton.jit
def load_angles(p_cos, p_sin, m_rows, o_j, TURNED: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr = False):
    """cos and sin [M, D/2] of the tokens whose tables start at p_cos, p_sin [M]; 1 and 0 where nothing turns."""
    o = o_j[None, :]
    if FULL and o_j.shape[0] == TURNED:
        b_cos, b_sin = tl.load(p_cos[:, None] + o), tl.load(p_sin[:, None] + o)
    else:
        m = m_rows[:, None] & (o_j < TURNED)[None, :]
        b_cos, b_sin = tl.load(p_cos[:, None] + o, mask=m, other=1.0), tl.load(p_sin[:, None] + o, mask=m, other=0.0)
    return b_cos.to(WIDE), b_sin.to(WIDE)


@triton.jit
def finished(b_x, b_gain, b_cos, b_sin, eps, NORM: tl.constexpr, TURN: tl.constexpr, D: tl.constexpr):
    """rotate(normalise(x))."""
    if NORM:
        b_x = b_x * inverse_rms(b_x, eps, D)[:, None] * b_gain[None, :]
    if TURN:
        b_x = turned(b_x, b_cos, b_sin, TURN)
    return b_x


@triton.jit
def finish_backward(b_dy, b_x, b_gain, b_cos, b_sin, eps, NORM: tl.constexpr, TURN: tl.constexpr, D: tl.constexpr):
    """dx of `finished`, and what adds up to dgain (anything without NORM)."""
    if TURN:
        b_dy = turned(b_dy, b_cos, -b_sin, TURN)
    b_unit = b_dy
    if NORM:
        b_dy, b_unit = norm_backward(b_dy, b_x, b_gain, eps, D)
    return b_dy, b_unit


@triton.jit
def as_result(b_x, DOT: tl.constexpr, WIDE: tl.constexpr):
    """b_x in WIDE, laid out over the threads as a product's result is, by multiplying it with 1.

    Without this the compiler would compute all that follows twice, in the layout it was loaded in and in this one.
    """
    if b_x.dtype == DOT and DOT != WIDE:
        o_d = tl.arange(0, b_x.shape[1])
        b_y = product(b_x, tl.where(o_d[:, None] == o_d[None, :], 1.0, 0.0).to(DOT), DOT)
    else:
        b_y = b_x.to(WIDE)
    return b_y


@triton.jit
def mean_of_group(
    p_rows, q_h, m_rows, o_j,
    R: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr = False,
):  # fmt: skip
    """q̄ [M, D] of the R query heads whose first starts at p_rows."""
    b_q = load_rows(p_rows, m_rows, o_j, D, TURNED, WIDE, FULL)
    if R > 1:
        for i_r in range(1, R):
            b_q += load_rows(p_rows + i_r * q_h, m_rows, o_j, D, TURNED, WIDE, FULL)
        b_q = b_q / R
    return b_q


@triton.jit
def share_of(tiles, HEADED: tl.constexpr):
    """First, last and stride of this program's tiles, of which tile i is key head i mod G of token block i // G.

    HEADED, for P programs, a multiple of G: every P-th, all of one key head. Else neighbours, so that the heads of a
    block find its angles in the multiprocessor's own cache.
    """
    first, last, stride = tl.program_id(0), tiles, tl.num_programs(0)
    if not HEADED:
        count = tl.cdiv(tiles, tl.num_programs(0))
        first = tl.program_id(0) * count
        last, stride = tl.minimum(first + count, tiles), 1
    return first, last, stride


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

    for i_tile in tl.range(first, last, stride, num_stages=STAGES):
        i_g = i_tile % G
        i_row = i_tile // G * BM
        m_rows = i_row + tl.arange(0, BM) < rows
        p_queries = rows_from(p_q + i_g * R * q_h, i_row, q_b, q_t, T, BM, EVEN)
        b_q = mean_of_group(p_queries, q_h, m_rows, o_j, R, D, TURNED, WIDE, EVEN)
        p_keyed = rows_from(p_k + i_g * k_h, i_row, k_b, k_t, T, BM, EVEN)
        b_k = load_rows(p_keyed, m_rows, o_j, D, TURNED, WIDE, EVEN)
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
        b_cos, b_sin = tl.zeros([1, 1], WIDE), tl.zeros([1, 1], WIDE)
        if TURNED:
            p_c = rows_from(p_cos, i_row, a_b, a_t, T, BM, EVEN)
            p_s = rows_from(p_sin, i_row, a_b, a_t, T, BM, EVEN)
            b_cos, b_sin = load_angles(p_c, p_s, m_rows, o_j, TURNED, WIDE, EVEN)
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

    for i_tile in tl.range(first, last, stride, num_stages=STAGES):
        i_g = i_tile % G
        i_row = (begin + i_tile // G) * BM
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

        b_cos, b_sin = tl.zeros([1, 1], WIDE), tl.zeros([1, 1], WIDE)
        if TURNED:
            p_c = rows_from(p_cos, i_row, a_b, a_t, T, BM, EVEN)
            p_s = rows_from(p_sin, i_row, a_b, a_t, T, BM, EVEN)
            b_cos, b_sin = load_angles(p_c, p_s, m_rows, o_j, TURNED, WIDE, EVEN)
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


@triton.jit
def unit_of(i, program, programs, evaluations: tl.constexpr, HEADED: tl.constexpr):
    """The i-th of a program's units, of which every tile left `evaluations`."""
    i_unit = program + i * programs
    if HEADED:
        i_unit = (program + i // evaluations * programs) * evaluations + i % evaluations
    return i_unit


@triton.jit
def units(tiles, program, programs, evaluations: tl.constexpr, HEADED: tl.constexpr):
    """How many units a program has."""
    count = tl.cdiv(tiles * evaluations - program, programs)
    if HEADED:
        count = tl.cdiv(tiles - program, programs) * evaluations
    return count


@triton.jit
def load_unit(p_work, i_unit, i, TILES: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr):
    """Tile i [BM, DP] of a unit of so many."""
    o_row = ((i_unit * TILES + i) * BM + tl.arange(0, BM)).to(tl.int64)
    return tl.load(p_work + o_row[:, None] * DP + tl.arange(0, DP)[None, :])


@triton.jit
def load_first(
    p_work, p_q, p_dk, i_tile, begin, q_b, q_t, q_h, rows, T,
    KIND: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Argument and gradient [BM, DP] of a tile's first evaluation of the force: q, and dk or its half but for Euler."""
    i_g, i_row = i_tile % G, (begin + i_tile // G) * BM
    m_rows, o_j = i_row + tl.arange(0, BM) < rows, tl.arange(0, DP // 2)
    p_queries = rows_from(p_q + i_g * q_h, i_row, q_b, q_t, T, BM, EVEN)
    b_u = load_rows(p_queries, m_rows, o_j, D, TURNED, p_q.dtype.element_ty, EVEN)
    if KIND == EULER:
        b_dy = load_unit(p_work, i_tile, 0, 1, BM, DP)
    else:
        p_rows = p_dk + i_row.to(tl.int64) * (G * D) + i_g * D + tl.arange(0, BM) * (G * D)
        b_dy = load_rows(p_rows, m_rows, o_j, D, TURNED, p_dk.dtype.element_ty, EVEN)
        if KIND == LEAPFROG:
            b_dy = (0.5 * b_dy.to(WIDE)).to(p_dk.dtype.element_ty)
    return b_u, b_dy


@triton.jit
def load_left(p_work, i_unit, BM: tl.constexpr, DP: tl.constexpr):
    """Argument and gradient [BM, DP] that forced_backward left of an evaluation."""
    return load_unit(p_work, i_unit, 0, 2, BM, DP), load_unit(p_work, i_unit, 1, 2, BM, DP)


@triton.jit
def add_evaluation(
    b_u, b_dy, b_dw1, b_db1, b_dw2, b_db2, b_w1, p_b1, b_w2, p_b2, o_h, m_h,
    FORCE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Adds one evaluation's share to the sums."""
    if FORCE == LINEAR:
        b_dw1 += product(tl.trans(b_dy), b_u, DOT)
    else:
        b_z, b_s, b_h = hidden(b_u, b_w1, p_b1, p_b2, o_h, m_h, FORCE, DOT, FAST)
        b_h = b_h.to(DOT)
        if FORCE == GRADIENT:
            b_dh = -product(b_dy, tl.trans(b_w1), DOT)
            b_db2 += part_sums(b_dh * b_s)
            b_dw1 -= product(tl.trans(b_h), b_dy, DOT)
        else:
            b_dh = product(b_dy, tl.trans(b_w2), DOT)
            b_dw2 += product(tl.trans(b_h), b_dy, DOT)
            if p_b2 is not None:
                b_db2 += loaded_sums(b_dy, WIDE)
        b_dz = hidden_backward(b_dh, b_z, b_s, p_b2, o_h, m_h, FORCE)
        if p_b1 is not None:
            b_db1 += part_sums(b_dz)
        b_dw1 += product(tl.trans(b_dz.to(DOT)), b_u, DOT)
    return b_dw1, b_db1, b_dw2, b_db2


@triton.jit
def part_sums(b_x):
    """[M, N] → [M/16, 8, N], whose sum are the column sums: rows 8 apart lie in one thread of a product's result."""
    return tl.sum(tl.reshape(b_x, [b_x.shape[0] // 16, 2, 8, b_x.shape[1]]), 1)


@triton.jit
def loaded_sums(b_x, WIDE: tl.constexpr):
    """[M, N] → [16, N], whose sum are the column sums, of a tile as it is loaded."""
    return tl.sum(tl.reshape(b_x.to(WIDE), [b_x.shape[0] // 16, 16, b_x.shape[1]]), 0)


@triton.jit
def forced_weights(
    p_work,  # as forced_backward left it
    p_q,  # as in forced_forward
    p_dk,  # as forced_backward gave it
    p_step,
    p_w1,
    p_b1,
    p_w2,
    p_b2,
    p_sums,  # [programs / SLICES, total]: the programs' share of every gradient, each weight from its own offset on
    p_kicks,  # [programs]: their share of the step's gradient
    q_b,
    q_t,
    q_h,
    rows,
    T,
    begin,
    tiles,
    per_head,
    step_per_head,
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
    LEFT: tl.constexpr,  # evaluations of a tile that are in the workspace with argument and gradient
    LEAN: tl.constexpr,
    KIND: tl.constexpr,
    FORCE: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of the force's weights, and the step's by its kicks: Σ ⟨dy, f(u)⟩, which the sums below hold."""
    SLICES: tl.constexpr = HP // SLICE
    i_slice = tl.program_id(0) % SLICES
    program, programs = tl.program_id(0) // SLICES, tl.num_programs(0) // SLICES
    i_w = program % G * per_head
    o_h = i_slice * SLICE + tl.arange(0, SLICE)
    m_h = o_h < WIDTH
    o_d, m_d = column_of(tl.arange(0, DP), D, TURNED)
    step = tl.load(p_step + program % G * step_per_head).to(WIDE)
    if FORCE == LINEAR:
        o_h, m_h = o_d, m_d
    b_w1 = load_matrix(p_w1 + i_w * WIDTH * D, o_h, m_h, D, o_d, m_d, 1, DOT)  # [h, D]
    b_w2 = b_w1
    if FORCE == MLP:
        b_w2 = load_matrix(p_w2 + i_w * WIDTH * D, o_h, m_h, 1, o_d, m_d, WIDTH, DOT)  # [h, D]
    if FORCE == GRADIENT:
        p_b2 += i_w * WIDTH
    b_dw1 = tl.zeros([o_h.shape[0], DP], WIDE)
    b_dw2, b_db1, b_db2 = tl.zeros([1, 1], WIDE), tl.zeros([1, 1, 1], WIDE), tl.zeros([1, 1], WIDE)
    if FORCE == MLP:
        b_dw2, b_db2 = tl.zeros([SLICE, DP], WIDE), tl.zeros([16, DP], WIDE)
    if FORCE != LINEAR:
        b_db1 = tl.zeros([BM // 16, 8, SLICE], WIDE)
    if FORCE == GRADIENT:
        b_db2 = tl.zeros([BM // 16, 8, SLICE], WIDE)

    if LEAN:
        count = units(tiles, program, programs, 1, HEADED)
        i_tile = tl.minimum(unit_of(0, program, programs, 1, HEADED), tiles - 1)  # a program may have none
        b_next_u, b_next_dy = load_first(
            p_work, p_q, p_dk, i_tile, begin, q_b, q_t, q_h, rows, T, KIND, G, D, DP, TURNED, WIDE, BM, EVEN
        )
        for i in tl.range(0, count, num_stages=STAGES):
            b_u, b_dy = b_next_u, b_next_dy
            i_tile = unit_of(tl.minimum(i + 1, count - 1), program, programs, 1, HEADED)
            b_next_u, b_next_dy = load_first(
                p_work, p_q, p_dk, i_tile, begin, q_b, q_t, q_h, rows, T, KIND, G, D, DP, TURNED, WIDE, BM, EVEN
            )
            b_dw1, b_db1, b_dw2, b_db2 = add_evaluation(
                b_u, b_dy, b_dw1, b_db1, b_dw2, b_db2, b_w1, p_b1, b_w2, p_b2, o_h, m_h, FORCE, DOT, WIDE, FAST
            )
    if LEFT > 0:
        count = units(tiles, program, programs, LEFT, HEADED)
        b_next_u, b_next_dy = load_left(p_work, unit_of(0, program, programs, LEFT, HEADED), BM, DP)
        for i in tl.range(0, count, num_stages=STAGES):
            b_u, b_dy = b_next_u, b_next_dy
            i_unit = unit_of(tl.minimum(i + 1, count - 1), program, programs, LEFT, HEADED)
            b_next_u, b_next_dy = load_left(p_work, i_unit, BM, DP)
            b_dw1, b_db1, b_dw2, b_db2 = add_evaluation(
                b_u, b_dy, b_dw1, b_db1, b_dw2, b_db2, b_w1, p_b1, b_w2, p_b2, o_h, m_h, FORCE, DOT, WIDE, FAST
            )

    p_sums += program.to(tl.int64) * total
    if FORCE == MLP:
        along = tl.sum(tl.sum(b_dw2 * b_w2.to(WIDE), 1), 0)
        store_matrix(p_sums + o_w2, step * b_dw2, o_h, m_h, 1, o_d, m_d, WIDTH)
        if p_b2 is not None:
            b_sum = tl.sum(b_db2, 0)
            along += tl.where(i_slice == 0, tl.sum(b_sum * load_vector(p_b2, o_d, m_d, WIDE), 0), 0.0)
            tl.store(p_sums + o_b2 + o_d, step * b_sum, mask=m_d & (o_d >= i_slice * D))
    elif FORCE == GRADIENT:
        b_damplitude = tl.sum(tl.sum(b_db2, 0), 0)
        along = tl.sum(b_damplitude * load_vector(p_b2, o_h, m_h, WIDE), 0)
        tl.store(p_sums + o_b2 + o_h, step * b_damplitude, mask=m_h)
    else:
        along = tl.sum(tl.sum(b_dw1 * b_w1.to(WIDE), 1), 0)
    store_matrix(p_sums + o_w1, step * b_dw1, o_h, m_h, D, o_d, m_d, 1)
    if p_b1 is not None:
        tl.store(p_sums + o_b1 + o_h, step * tl.sum(tl.sum(b_db1, 0), 0), mask=m_h)
    tl.store(p_kicks + tl.program_id(0), along)
