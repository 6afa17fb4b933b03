"""The kernels: persistent programs, each with the tokens of one key head, its weights loaded once.

Program p owns key head p mod G and every (P/G)-th block of tokens. Weight gradients are summed in registers over a
program's blocks and written to the program's own row of a workspace, so nothing is added in an order that may change.

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
def begin_sum(p_sum, p_b, o_b, m_b, NEEDED: tl.constexpr):
    """Zeros where the gradient of p_b, if it exists, is going to be summed."""
    if NEEDED and p_b is not None:
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
def load_angles(p_cos, p_sin, o_token, m_rows, o_j, TURNED: tl.constexpr, WIDE: tl.constexpr):
    """cos and sin [M, D/2] of the tokens that start at o_token [M]; 1 and 0 where nothing turns."""
    m = m_rows[:, None] & (o_j < TURNED)[None, :]
    o = o_token[:, None] + o_j[None, :]
    return tl.load(p_cos + o, mask=m, other=1.0).to(WIDE), tl.load(p_sin + o, mask=m, other=0.0).to(WIDE)


@triton.jit
def finished(b_x, b_gain, b_cos, b_sin, eps, NORM: tl.constexpr, TURN: tl.constexpr, D: tl.constexpr):
    """rotate(normalise(x))."""
    if NORM:
        b_x = b_x * inverse_rms(b_x, eps, D)[:, None] * b_gain[None, :]
    if TURN:
        b_x = turned(b_x, b_cos, b_sin)
    return b_x


@triton.jit
def finish_backward(b_dy, b_x, b_gain, b_cos, b_sin, eps, NORM: tl.constexpr, TURN: tl.constexpr, D: tl.constexpr):
    """dx of `finished`, and what adds up to dgain (anything without NORM)."""
    if TURN:
        b_dy = turned(b_dy, b_cos, -b_sin)
    b_unit = b_dy
    if NORM:
        b_dy, b_unit = norm_backward(b_dy, b_x, b_gain, eps, D)
    return b_dy, b_unit


@triton.jit
def mean_of_group(p_rows, q_h, m_rows, o_j, R: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr):
    """q̄ [M, D] of the R query heads whose first starts at p_rows."""
    b_q = load_rows(p_rows, m_rows, o_j, D, TURNED, WIDE)
    if R > 1:
        for i_r in range(1, R):
            b_q += load_rows(p_rows + i_r * q_h, m_rows, o_j, D, TURNED, WIDE)
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
    b_q,
    b_k,
    step,
    b_w1,
    p_b1,
    b_w2,
    p_b2,
    o_h,
    m_h,
    o_d,
    m_d,
    STEPS: tl.constexpr,
    KIND: tl.constexpr,
    FORCE: tl.constexpr,
    DOT: tl.constexpr,
    FAST: tl.constexpr,
):
    """STEPS times a kick and a drift; leapfrog's first kick is half a one, and its last half is left to the caller."""
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
    p_b1,  # [G or 1, h] or None
    p_w2,  # [G or 1, D, h] or None
    p_b2,  # [G or 1, D], the amplitudes [G or 1, h] of a gradient force, or None
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
    if p_b1 is not None:
        p_b1 += i_w * WIDTH
    if p_b2 is not None:
        p_b2 += i_w * (WIDTH if FORCE == GRADIENT else D)
    b_gain_q, b_gain_k = load_gain(p_gain_q, o_d, m_d, WIDE), load_gain(p_gain_k, o_d, m_d, WIDE)

    for i_tile in tl.range(first, last, stride, num_stages=STAGES):
        i_g = i_tile % G
        o_row = i_tile // G * BM + tl.arange(0, BM)
        m_rows = o_row < rows
        i_b, i_t = (o_row // T).to(tl.int64), (o_row % T).to(tl.int64)
        p_queries = p_q + i_b * q_b + i_t * q_t + i_g * R * q_h
        b_q = mean_of_group(p_queries, q_h, m_rows, o_j, R, D, TURNED, WIDE)
        b_k = load_rows(p_k + i_b * k_b + i_t * k_t + i_g * k_h, m_rows, o_j, D, TURNED, WIDE)
        b_start = b_q
        if KIND == EULER:
            for _ in range(STEPS):
                b_f = force(b_q, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
                b_q, b_k = b_q + step * b_k, b_k + step * b_f
        else:
            b_q, b_k = sheared(
                b_q, b_k, step, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, STEPS, KIND, FORCE, DOT, FAST
            )
            if KIND == LEAPFROG:
                b_k += 0.5 * step * force(b_q, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
        b_cos, b_sin = tl.zeros([1, 1], WIDE), tl.zeros([1, 1], WIDE)
        if TURNED:
            b_cos, b_sin = load_angles(p_cos, p_sin, i_b * a_b + i_t * a_t, m_rows, o_j, TURNED, WIDE)
        o_out = o_row.to(tl.int64) * (G * D) + i_g * D
        b_y = finished(b_k, b_gain_k, b_cos, b_sin, eps, NORM, TURN_K, D)
        store_rows(p_k_out + o_out, m_rows, o_j, b_y, D, TURNED)
        if R == 1:
            b_y = finished(b_q, b_gain_q, b_cos, b_sin, eps, NORM, TURNED != 0, D)
            store_rows(p_q_out + o_out, m_rows, o_j, b_y, D, TURNED)
        else:
            b_q -= b_start
            for i_r in range(R):
                b_y = load_rows(p_queries + i_r * q_h, m_rows, o_j, D, TURNED, WIDE) + b_q
                b_y = finished(b_y, b_gain_q, b_cos, b_sin, eps, NORM, TURNED != 0, D)
                store_rows(p_q_out + o_out * R + i_r * D, m_rows, o_j, b_y, D, TURNED)


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
    p_work,  # [tiles, EVALUATIONS, 2, BM, DP] in DOT: for every evaluation of the force, its argument and gradient
    p_keys,  # [programs, STEPS, BM, DP] in DOT: the keys that the queries drifted by; None for one step
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
    EVALUATIONS: tl.constexpr,
    KIND: tl.constexpr,
    FORCE: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
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
    if p_b1 is not None:
        p_b1 += i_w * WIDTH
    if p_b2 is not None:
        p_b2 += i_w * (WIDTH if FORCE == GRADIENT else D)
    p_sums += tl.program_id(0).to(tl.int64) * (1 + 2 * D)
    p_dgain_q, p_dgain_k = p_sums + 1, p_sums + 1 + D
    begin_sum(p_dgain_q, p_gain_q, o_d, m_d, True)
    begin_sum(p_dgain_k, p_gain_k, o_d, m_d, True)
    tl.debug_barrier()
    b_gain_q, b_gain_k = load_gain(p_gain_q, o_d, m_d, WIDE), load_gain(p_gain_k, o_d, m_d, WIDE)
    b_dstep = tl.zeros([BM], WIDE)
    o_state = tl.arange(0, BM)[:, None] * DP + tl.arange(0, DP)[None, :]
    SIZE: tl.constexpr = BM * DP

    for i_tile in tl.range(first, last, stride, num_stages=STAGES):
        i_g = i_tile % G
        o_row = (begin + i_tile // G) * BM + tl.arange(0, BM)
        m_rows = o_row < rows
        i_b, i_t = (o_row // T).to(tl.int64), (o_row % T).to(tl.int64)
        p_queries = p_q + i_b * q_b + i_t * q_t + i_g * R * q_h
        p_dqueries = p_dq_out + i_b * dq_b + i_t * dq_t + i_g * R * dq_h
        o_unit = (i_tile * (EVALUATIONS * 2 * BM) + tl.arange(0, BM)).to(tl.int64)
        p_unit = p_work + o_unit[:, None] * DP + tl.arange(0, DP)[None, :]
        b_q = mean_of_group(p_queries, q_h, m_rows, o_j, R, D, TURNED, WIDE)
        b_k = load_rows(p_k + i_b * k_b + i_t * k_t + i_g * k_h, m_rows, o_j, D, TURNED, WIDE)
        b_start = b_q

        if STEPS > 1:
            p_key = p_keys + tl.program_id(0).to(tl.int64) * (STEPS * SIZE) + o_state
            tl.debug_barrier()
        b_u, b_key = b_q.to(DOT), b_k.to(DOT)
        for i_step in range(STEPS):
            b_u = b_q.to(DOT)
            tl.store(p_unit + 2 * i_step * SIZE, b_u)
            if KIND == EULER:
                b_key = b_k.to(DOT)
                if NORM or STEPS > 1:
                    b_f = force(b_u, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
                    b_q, b_k = b_q + step * b_k, b_k + step * b_f
            else:
                share = step
                if KIND == LEAPFROG:
                    share = tl.where(i_step == 0, 0.5 * step, step)
                b_k += share * force(b_u, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
                b_key = b_k.to(DOT)
                if NORM or KIND == LEAPFROG or STEPS > 1:
                    b_q += step * b_k
            if STEPS > 1:
                tl.store(p_key + i_step * SIZE, b_key)
        if KIND == LEAPFROG:
            b_u = b_q.to(DOT)
            tl.store(p_unit + 2 * STEPS * SIZE, b_u)
            if NORM:
                b_k += 0.5 * step * force(b_u, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE, DOT, FAST)
        tl.debug_barrier()

        b_cos, b_sin = tl.zeros([1, 1], WIDE), tl.zeros([1, 1], WIDE)
        if TURNED:
            b_cos, b_sin = load_angles(p_cos, p_sin, i_b * a_b + i_t * a_t, m_rows, o_j, TURNED, WIDE)
        b_dk = load_rows(p_dk_out + i_b * dk_b + i_t * dk_t + i_g * dk_h, m_rows, o_j, D, TURNED, WIDE)
        b_dk, b_unit = finish_backward(b_dk, b_k, b_gain_k, b_cos, b_sin, eps, NORM, TURN_K, D)
        if p_gain_k is not None:
            add_columns(p_dgain_k, b_unit, o_d, m_d)
        b_shift = b_q
        if R == 1:
            b_dq = load_rows(p_dqueries, m_rows, o_j, D, TURNED, WIDE)
            b_dq, b_unit = finish_backward(b_dq, b_q, b_gain_q, b_cos, b_sin, eps, NORM, TURNED != 0, D)
            if p_gain_q is not None:
                add_columns(p_dgain_q, b_unit, o_d, m_d)
        else:
            b_shift = b_q - b_start
            b_dq = tl.zeros([BM, DP], WIDE)
            for i_r in range(R):
                b_y = load_rows(p_queries + i_r * q_h, m_rows, o_j, D, TURNED, WIDE) + b_shift
                b_dy = load_rows(p_dqueries + i_r * dq_h, m_rows, o_j, D, TURNED, WIDE)
                b_dy, b_unit = finish_backward(b_dy, b_y, b_gain_q, b_cos, b_sin, eps, NORM, TURNED != 0, D)
                b_dq += b_dy
                if p_gain_q is not None:
                    add_columns(p_dgain_q, b_unit, o_d, m_d)
                    tl.debug_barrier()
        b_received = b_dq  # Σ over the group of the gradients of q⁺

        if KIND == LEAPFROG:
            b_dy = (0.5 * b_dk).to(DOT)
            tl.store(p_unit + (2 * STEPS + 1) * SIZE, b_dy)
            b_dq += step * pulled_back(b_u, b_dy, b_w1, p_b1, b_w2, p_b2, o_h, m_h, FORCE, DOT, FAST)
        for i_back in range(STEPS):
            i_step = STEPS - 1 - i_back
            if STEPS > 1:
                b_key = tl.load(p_key + i_step * SIZE)
            if STEPS > 1 or KIND == LEAPFROG:
                b_u = tl.load(p_unit + 2 * i_step * SIZE)
            b_dstep += tl.sum(b_dq * b_key.to(WIDE), 1)
            b_drift = step * b_dq
            if KIND != EULER:
                b_dk += b_drift
            b_dy = b_dk.to(DOT)
            if KIND == LEAPFROG:
                b_dy = (tl.where(i_step == 0, 0.5, 1.0).to(WIDE) * b_dk).to(DOT)
            tl.store(p_unit + (2 * i_step + 1) * SIZE, b_dy)
            b_dq += step * pulled_back(b_u, b_dy, b_w1, p_b1, b_w2, p_b2, o_h, m_h, FORCE, DOT, FAST)
            if KIND == EULER:
                b_dk += b_drift

        o_out = o_row.to(tl.int64) * (G * D) + i_g * D
        store_rows(p_dk + o_out, m_rows, o_j, b_dk, D, TURNED)
        if R == 1:
            store_rows(p_dq + o_out, m_rows, o_j, b_dq, D, TURNED)
        else:
            b_dq = (b_dq - b_received) / R
            for i_r in range(R):
                b_y = load_rows(p_queries + i_r * q_h, m_rows, o_j, D, TURNED, WIDE) + b_shift
                b_dy = load_rows(p_dqueries + i_r * dq_h, m_rows, o_j, D, TURNED, WIDE)
                b_dy, _ = finish_backward(b_dy, b_y, b_gain_q, b_cos, b_sin, eps, NORM, TURNED != 0, D)
                store_rows(p_dq + o_out * R + i_r * D, m_rows, o_j, b_dy + b_dq, D, TURNED)

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
    p_step,  # as in forced_forward
    p_w1,
    p_b1,
    p_w2,
    p_b2,
    p_sums,  # [programs / SLICES, total]: the programs' share of every gradient, each weight from its own offset on
    p_kicks,  # [programs]: their share of the step's gradient
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
    EVALUATIONS: tl.constexpr,
    FORCE: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of the force's weights, and the step's by its kicks: Σ ⟨dy, f(u)⟩, which the sums below hold."""
    SLICES: tl.constexpr = HP // SLICE
    AHEAD: tl.constexpr = DP <= 64  # whether registers hold the next tiles, too
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
    if p_b1 is not None:
        p_b1 += i_w * WIDTH
    if p_b2 is not None:
        p_b2 += i_w * (WIDTH if FORCE == GRADIENT else D)
    b_dw1 = tl.zeros([o_h.shape[0], DP], WIDE)
    b_dw2, b_db1, b_db2 = tl.zeros([1, 1], WIDE), tl.zeros([1, 1, 1], WIDE), tl.zeros([1, 1], WIDE)
    if FORCE == MLP:
        b_dw2, b_db2 = tl.zeros([SLICE, DP], WIDE), tl.zeros([16, DP], WIDE)
    if FORCE != LINEAR:
        b_db1 = tl.zeros([BM // 16, 8, SLICE], WIDE)
    if FORCE == GRADIENT:
        b_db2 = tl.zeros([BM // 16, 8, SLICE], WIDE)

    count = units(tiles, program, programs, EVALUATIONS, HEADED)
    b_next_u, b_next_dy = tl.zeros([1, 1], DOT), tl.zeros([1, 1], DOT)
    if AHEAD:
        i_unit = unit_of(0, program, programs, EVALUATIONS, HEADED)
        b_next_u, b_next_dy = load_unit(p_work, i_unit, 0, 2, BM, DP), load_unit(p_work, i_unit, 1, 2, BM, DP)
    for i in tl.range(0, count, num_stages=STAGES):
        if AHEAD:
            b_u, b_dy = b_next_u, b_next_dy
            i_unit = unit_of(tl.minimum(i + 1, count - 1), program, programs, EVALUATIONS, HEADED)
            b_next_u, b_next_dy = load_unit(p_work, i_unit, 0, 2, BM, DP), load_unit(p_work, i_unit, 1, 2, BM, DP)
        else:
            i_unit = unit_of(i, program, programs, EVALUATIONS, HEADED)
            b_u, b_dy = load_unit(p_work, i_unit, 0, 2, BM, DP), load_unit(p_work, i_unit, 1, 2, BM, DP)
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
