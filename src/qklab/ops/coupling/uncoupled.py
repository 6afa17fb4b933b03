"""The kernels of the uncoupled map: x⁺ = x + δ f(x) of one tensor's heads, which is run on the queries and the keys.

Here C.G are that tensor's heads, C.R how many of them share a set of weights, and C.TURN_K says whether it turns.
"""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from qklab.ops.coupling.networks import (
    GRADIENT,
    MLP,
    force,
    hidden,
    hidden_backward,
    is_given,
    load_force,
    load_vector,
    outer_backward,
    store_matrix,
)
from qklab.ops.coupling.tiles import (
    Tile,
    add_columns,
    clear_sum,
    find_columns,
    find_first_row,
    find_head_rows,
    find_output_rows,
    find_program,
    find_set,
    load_angles,
    load_gain,
    load_rows,
    normalise_and_rotate,
    normalise_and_rotate_backward,
    product,
    store_rows,
)


@triton.jit
def load_parameters(parameters, i_head, o_d, m_d, C):
    """The step and the force of a head."""
    step = tl.load(parameters.p_step + find_set(i_head // C.R, C.G // C.R, parameters.step_per_head, C)).to(C.WIDE)
    i_w = find_set(i_head // C.R, C.G // C.R, parameters.per_head, C)
    return step, load_force(parameters.key, i_w, tl.arange(0, C.HP), o_d, m_d, C)


@triton.jit
def find_head_tile(x, i_block, i_head, rows, T, C):
    """The first row of a block and a head's tile."""
    i_row, m_rows = find_first_row(i_block, rows, T, C)
    return i_row, Tile(find_head_rows(x, i_head, i_row, T, C), x.head, m_rows, tl.arange(0, C.DP // 2))


@triton.jit
def load_block_angles(angles, i_row, tile, T, C):
    b_cos, b_sin = tl.zeros([1, 1], C.WIDE), tl.zeros([1, 1], C.WIDE)
    if C.TURN_K:
        b_cos, b_sin = load_angles(angles, i_row, tile.m_rows, tile.o_j, T, C)
    return b_cos, b_sin


@triton.jit
def uncoupled_forward_kernel(x, angles, parameters, p_gain, p_out, eps, rows, T, C: tl.constexpr):
    i_head = tl.program_id(0) % C.G
    o_d, m_d = find_columns(C)
    step, n = load_parameters(parameters, i_head, o_d, m_d, C)
    b_gain = load_gain(p_gain, o_d, m_d, C)
    first, stride = tl.program_id(0) // C.G, tl.num_programs(0) // C.G
    for i_block in tl.range(first, tl.cdiv(rows, C.BM), stride, num_stages=C.STAGES):
        i_row, tile = find_head_tile(x, i_block, i_head, rows, T, C)
        b_x = load_rows(tile.p_queries, tile, C.WIDE, C)
        b_cos, b_sin = load_block_angles(angles, i_row, tile, T, C)
        for _ in range(C.STEPS):
            b_x += step * force(b_x, n, C)
        b_x = normalise_and_rotate(b_x, b_gain, b_cos, b_sin, eps, C.TURN_K, C)
        store_rows(find_output_rows(p_out, i_row, i_head, C), tile, b_x, C)


@triton.jit
def force_weights_backward(b_u, b_dy, factor, b_dw1, p_db1, b_dw2, p_db2, n, C):
    """Backward of y = factor · f(u), given dy [BM, DP], with the gradients of the weights; not for a linear force.

    Returns du, the rows' Σ dy · f(u) [BM], and the sums of the matrices' gradients with this block's share added; so,
    in place, the biases'.
    """
    b_y, b_t, b_h = hidden(b_u, n, C.FORCE, C)
    b_dh = outer_backward(b_dy, n, C)
    b_along = tl.sum(b_dh * b_h, 1)
    if C.FORCE == GRADIENT:
        add_columns(p_db2, factor * b_dh * (0.5 + 0.5 * b_t), n.o_h, n.m_h)
        b_dw1 -= product(tl.trans((factor * b_h).to(C.DOT)), b_dy, C.DOT)
    else:
        b_dw2 += product(tl.trans((factor * b_h).to(C.DOT)), b_dy, C.DOT)
        if is_given(n.b2):
            b_along += tl.sum(b_dy * load_vector(n.b2, n.o_d, n.m_d, b_dy.dtype)[None, :], 1)
            add_columns(p_db2, factor * b_dy, n.o_d, n.m_d)
    b_dz = factor * hidden_backward(b_dh, b_y, b_t, n, C.FORCE)
    b_du = product(b_dz, n.w1, C.DOT)
    b_dw1 += product(tl.trans(b_dz.to(C.DOT)), b_u, C.DOT)
    if is_given(n.b1):
        add_columns(p_db1, b_dz, n.o_h, n.m_h)
    tl.debug_barrier()
    return b_du, b_along, b_dw1, b_dw2


@triton.jit
def uncoupled_backward_kernel(
    x,
    angles,
    parameters,
    p_gain,
    dout,  # Heads, the gradient of the output
    p_dx,
    p_sums,  # [programs, total]: each weight's gradient from its own offset on
    p_states,  # [programs, STEPS, BM, DP], or None for one step
    offsets,  # networks.NetworkPointers
    o_step,
    o_gain,
    total,
    eps,
    rows,
    T,
    C: tl.constexpr,
):
    i_head = tl.program_id(0) % C.G
    o_d, m_d = find_columns(C)
    step, n = load_parameters(parameters, i_head, o_d, m_d, C)
    b_dw1, b_dw2 = tl.zeros([C.HP, C.DP], C.WIDE), tl.zeros([1, 1], C.WIDE)
    if C.FORCE == MLP:
        b_dw2 = tl.zeros([C.HP, C.DP], C.WIDE)
    b_gain, b_dstep = load_gain(p_gain, o_d, m_d, C), tl.zeros([C.BM], C.WIDE)
    p_sums += find_program(C) * total
    p_db1, p_db2 = p_sums + offsets.p_b1, p_sums + offsets.p_b2
    clear_sum(p_db1, parameters.key.p_b1, n.o_h, n.m_h)
    if C.FORCE == GRADIENT:
        clear_sum(p_db2, parameters.key.p_b2, n.o_h, n.m_h)
    else:
        clear_sum(p_db2, parameters.key.p_b2, o_d, m_d)
    clear_sum(p_sums + o_gain, p_gain, o_d, m_d)
    tl.debug_barrier()
    first, stride = tl.program_id(0) // C.G, tl.num_programs(0) // C.G
    for i_block in tl.range(first, tl.cdiv(rows, C.BM), stride, num_stages=C.STAGES):
        i_row, tile = find_head_tile(x, i_block, i_head, rows, T, C)
        b_x = load_rows(tile.p_queries, tile, C.WIDE, C)
        b_dx = load_rows(find_head_rows(dout, i_head, i_row, T, C), tile, C.WIDE, C)
        b_cos, b_sin = load_block_angles(angles, i_row, tile, T, C)
        b_end = b_x
        if C.STEPS > 1:
            o_state = tl.arange(0, C.BM)[:, None] * C.DP + tl.arange(0, C.DP)[None, :]
            p_state = p_states + find_program(C) * (C.STEPS * C.BM * C.DP) + o_state
            tl.debug_barrier()
        if C.STEPS > 1 or C.NORM:
            for i_step in range(C.STEPS):
                if C.STEPS > 1:
                    tl.store(p_state + i_step * C.BM * C.DP, b_end)
                b_end += step * force(b_end, n, C)
        if C.STEPS > 1:
            tl.debug_barrier()
        b_dx, b_dgain = normalise_and_rotate_backward(b_dx, b_end, b_gain, b_cos, b_sin, eps, C.TURN_K, C)
        if p_gain is not None:
            add_columns(p_sums + o_gain, b_dgain, o_d, m_d)
        for i_back in range(C.STEPS):
            if C.STEPS > 1:
                b_x = tl.load(p_state + (C.STEPS - 1 - i_back) * C.BM * C.DP)
            b_du, b_along, b_dw1, b_dw2 = force_weights_backward(b_x, b_dx, step, b_dw1, p_db1, b_dw2, p_db2, n, C)
            b_dstep += b_along
            b_dx += b_du
        store_rows(find_output_rows(p_dx, i_row, i_head, C), tile, b_dx, C)
    tl.store(p_sums + o_step, tl.sum(b_dstep, 0))
    store_matrix(p_sums + offsets.p_w1, b_dw1, n.o_h, n.m_h, C.D, o_d, m_d, 1)
    if C.FORCE == MLP:
        store_matrix(p_sums + offsets.p_w2, b_dw2, n.o_h, n.m_h, 1, o_d, m_d, C.WIDTH)
