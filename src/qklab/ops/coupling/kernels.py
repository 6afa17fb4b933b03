"""The kernels of all maps that move a query together with its key: one forwards, one backwards.

Programs are persistent, each with some tiles (`divide_tiles`), its weights loaded once. The map itself is F, one of
`maps.MAPS`. A backward gives dq and dk and leaves what `gradients` sums for the weights.
"""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from qklab.ops.coupling.maps import EULER
from qklab.ops.coupling.tiles import (
    Tile,
    add_columns,
    as_result,
    clear_sum,
    divide_tiles,
    find_columns,
    find_first_row,
    find_head_rows,
    find_member,
    find_output_rows,
    find_program,
    find_query_rows,
    hold_angles,
    hold_no_angles,
    load_gain,
    load_group_mean,
    load_rows,
    normalise_and_rotate,
    normalise_and_rotate_backward,
    store_rows,
)


@triton.jit
def find_tile(q, i_block, i_g, rows, T, C):
    """The first row of a block and its queries' tile."""
    i_row, m_rows = find_first_row(i_block, rows, T, C)
    return i_row, Tile(find_head_rows(q, i_g * C.R, i_row, T, C), q.head, m_rows, tl.arange(0, C.DP // 2))


@triton.jit
def follow_mean(b_start, b_end, b_log, C):
    """E, and what to add to the start of a query head, times E where C.STRETCH, for its end (`load_difference`)."""
    b_e, b_shift = b_end, b_end
    if C.STRETCH:
        b_e = tl.exp(b_log)
    else:
        b_shift -= b_start
    return b_e, b_shift


@triton.jit
def load_difference(tile, i_r, b_start, b_e, C):
    """A query head's start; where C.STRETCH, its difference from the group's mean at the end."""
    b_x = load_rows(tile.p_queries + i_r * tile.head, tile, C.WIDE, C)
    if C.STRETCH:
        b_x = (b_x - b_start) * b_e
    return b_x


@triton.jit
def forward_kernel(
    q,  # Heads
    k,
    angles,  # AngleTables
    parameters,  # networks.MapParameters
    gains,  # Gains
    p_q_out,  # [B, T, G·R, D], contiguous
    p_k_out,  # [B, T, G, D], contiguous
    eps,
    rows,  # of a member
    T,
    F,  # maps.Functions
    C: tl.constexpr,  # Constants
):
    first, last, stride = divide_tiles(tl.cdiv(rows, C.BM) * C.G, C)
    o_d, m_d = find_columns(C)
    m = F.load(parameters, tl.program_id(0) % C.G, o_d, m_d, C)
    b_gain_q, b_gain_k = load_gain(gains.p_q, o_d, m_d, C), load_gain(gains.p_k, o_d, m_d, C)

    o_held, b_cos, b_sin = hold_no_angles(C)
    for i_tile in tl.range(first, last, stride, num_stages=C.STAGES):
        i_g = i_tile % C.G
        i_row, tile = find_tile(q, i_tile // C.G, i_g, rows, T, C)
        b_start = load_group_mean(tile, C)
        b_k = load_rows(find_head_rows(k, i_g, i_row, T, C), tile, k.p.dtype.element_ty, C)
        b_k = as_result(b_k, C) if C.KIND == EULER else b_k.to(C.WIDE)
        b_q, b_k, b_log = F.forward(b_start, b_k, m, C)
        if C.PAIRS:
            o_held, b_cos, b_sin = hold_angles(angles, o_held, b_cos, b_sin, i_row, tile, T, C)
        b_y = normalise_and_rotate(b_k, b_gain_k, b_cos, b_sin, eps, C.TURN_K, C)
        store_rows(find_output_rows(p_k_out, i_row, i_g, C), tile, b_y, C)
        if C.R == 1:
            b_y = normalise_and_rotate(b_q, b_gain_q, b_cos, b_sin, eps, C.PAIRS, C)
            store_rows(find_output_rows(p_q_out, i_row, i_g, C), tile, b_y, C)
        else:
            b_e, b_shift = follow_mean(b_start, b_q, b_log, C)
            for i_r in range(C.R):
                b_y = load_difference(tile, i_r, b_start, b_e, C) + b_shift
                b_y = normalise_and_rotate(b_y, b_gain_q, b_cos, b_sin, eps, C.PAIRS, C)
                store_rows(find_query_rows(p_q_out, i_row, i_g, i_r, C), tile, b_y, C)


@triton.jit
def backward_kernel(
    q,  # as in forward_kernel
    k,
    angles,
    parameters,
    gains,
    dq_out,  # Heads, gradients of the outputs
    dk_out,
    p_dq,  # [B, T, G·R, D], contiguous
    p_dk,  # [B, T, G, D], contiguous
    p_sums,  # [programs, 1 + 2D]: this program's share of the gradients of the step (its drifts alone) and the gains
    p_left,  # [tiles, UNIT] in DOT: what the map leaves for the gradients of its weights
    p_states,  # [programs, STATES]: what the map keeps of its states; or None
    eps,
    rows,
    T,
    begin,  # a member's first block of this launch
    tiles,  # and how many tiles it has
    F,
    C: tl.constexpr,
):
    first, last, stride = divide_tiles(tiles, C)
    o_d, m_d = find_columns(C)
    m = F.load(parameters, tl.program_id(0) % C.G, o_d, m_d, C)
    p_sums += find_program(C) * (1 + 2 * C.D)
    p_dgain_q, p_dgain_k = p_sums + 1, p_sums + 1 + C.D
    clear_sum(p_dgain_q, gains.p_q, o_d, m_d)
    clear_sum(p_dgain_k, gains.p_k, o_d, m_d)
    tl.debug_barrier()
    b_gain_q, b_gain_k = load_gain(gains.p_q, o_d, m_d, C), load_gain(gains.p_k, o_d, m_d, C)
    b_dstep = tl.zeros([C.BM], C.WIDE)
    o_state = tl.arange(0, C.BM)[:, None] * C.DP + tl.arange(0, C.DP)[None, :]
    p_state = None
    if p_states is not None:
        p_state = p_states + find_program(C) * C.STATES + o_state

    o_held, b_cos, b_sin = hold_no_angles(C)
    for i_tile in tl.range(first, last, stride, num_stages=C.STAGES):
        i_g = i_tile % C.G
        i_row, tile = find_tile(q, begin + i_tile // C.G, i_g, rows, T, C)
        p_dqueries = find_head_rows(dq_out, i_g * C.R, i_row, T, C)
        p_unit = p_left + (tl.zeros([], tl.int64) + find_member(C) * tiles + i_tile) * C.UNIT + o_state
        b_start = load_group_mean(tile, C)
        b_k = load_rows(find_head_rows(k, i_g, i_row, T, C), tile, C.WIDE, C)
        b_q_end, b_k_end, b_kept_q, b_kept_k, b_key, b_log = F.repeat(b_start, b_k, m, p_unit, p_state, C)
        if C.PAIRS:
            o_held, b_cos, b_sin = hold_angles(angles, o_held, b_cos, b_sin, i_row, tile, T, C)
        b_dk = load_rows(find_head_rows(dk_out, i_g, i_row, T, C), tile, dk_out.p.dtype.element_ty, C)
        b_dk = b_dk.to(C.WIDE) if C.STRETCH else as_result(b_dk, C)
        b_dk, b_dgain = normalise_and_rotate_backward(b_dk, b_k_end, b_gain_k, b_cos, b_sin, eps, C.TURN_K, C)
        if gains.p_k is not None:
            add_columns(p_dgain_k, b_dgain, o_d, m_d)
        b_dlog = tl.zeros([C.BM, C.DP], C.WIDE)  # the gradient of log E
        if C.R == 1:
            b_dq = load_rows(p_dqueries, tile, dq_out.p.dtype.element_ty, C)
            b_dq = b_dq.to(C.WIDE) if C.STRETCH else as_result(b_dq, C)
            b_dq, b_dgain = normalise_and_rotate_backward(b_dq, b_q_end, b_gain_q, b_cos, b_sin, eps, C.PAIRS, C)
            if gains.p_q is not None:
                add_columns(p_dgain_q, b_dgain, o_d, m_d)
        else:
            b_e, b_shift = follow_mean(b_start, b_q_end, b_log, C)
            b_dq = tl.zeros([C.BM, C.DP], C.WIDE)
            for i_r in range(C.R):
                b_x = load_difference(tile, i_r, b_start, b_e, C)
                b_dy = load_rows(p_dqueries + i_r * dq_out.head, tile, C.WIDE, C)
                b_dy, b_dgain = normalise_and_rotate_backward(
                    b_dy, b_x + b_shift, b_gain_q, b_cos, b_sin, eps, C.PAIRS, C
                )
                b_dq += b_dy
                if C.STRETCH:
                    b_dlog += b_dy * b_x
                if gains.p_q is not None:
                    add_columns(p_dgain_q, b_dgain, o_d, m_d)
                    tl.debug_barrier()
        b_received = b_dq  # Σ over the group of the gradients of q⁺

        kept = (b_kept_q, b_kept_k, b_key)
        b_dq, b_dk, b_dstep = F.backward(b_dq, b_dk, b_dlog, b_dstep, kept, m, tile, p_unit, p_state, C)

        store_rows(find_output_rows(p_dk, i_row, i_g, C), tile, b_dk, C)
        if C.R == 1:
            store_rows(find_output_rows(p_dq, i_row, i_g, C), tile, b_dq, C)
        else:
            b_dq = (b_dq - (b_received * b_e if C.STRETCH else b_received)) / C.R
            for i_r in range(C.R):
                b_x = load_difference(tile, i_r, b_start, b_e, C)
                b_dy = load_rows(p_dqueries + i_r * dq_out.head, tile, C.WIDE, C)
                b_dy, _ = normalise_and_rotate_backward(b_dy, b_x + b_shift, b_gain_q, b_cos, b_sin, eps, C.PAIRS, C)
                b_dy = b_dy * b_e if C.STRETCH else b_dy
                store_rows(find_query_rows(p_dq, i_row, i_g, i_r, C), tile, b_dy + b_dq, C)

    tl.store(p_sums, tl.sum(b_dstep, 0))
