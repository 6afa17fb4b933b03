"""The gradients of the weights, summed over what a backward left of every evaluation of their network.

Sums stay in registers over a program's units and are written to the program's own row of a workspace, so nothing is
added in an order that may change.
"""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from qklab.ops.coupling.maps import EULER, LEAPFROG
from qklab.ops.coupling.networks import (
    GRADIENT,
    LINEAR,
    MLP,
    hidden,
    hidden_backward,
    is_given,
    load_affine,
    load_force,
    load_vector,
    outer_backward,
    store_matrix,
)
from qklab.ops.coupling.tiles import (
    Tile,
    find_columns,
    find_first_row,
    find_head_rows,
    find_member,
    find_output_rows,
    find_program,
    find_set,
    load_rows,
    product,
)


@triton.jit
def count_units(tiles, program, programs, EVALUATIONS: tl.constexpr, C):
    """How many units a program has, of which every tile left EVALUATIONS."""
    count = tl.cdiv(tiles * EVALUATIONS - program, programs)
    if C.HEADED:
        count = tl.cdiv(tiles - program, programs) * EVALUATIONS
    return count


@triton.jit
def find_unit(i, program, programs, EVALUATIONS: tl.constexpr, C):
    """The i-th of a program's units."""
    i_unit = program + i * programs
    if C.HEADED:
        i_unit = (program + i // EVALUATIONS * programs) * EVALUATIONS + i % EVALUATIONS
    return i_unit


@triton.jit
def load_unit(p_left, i_unit, i, TILES: tl.constexpr, C):
    """Tile i [BM, DP] of a unit of so many."""
    o_row = ((i_unit * TILES + i) * C.BM + tl.arange(0, C.BM)).to(tl.int64)
    return tl.load(p_left + o_row[:, None] * C.DP + tl.arange(0, C.DP)[None, :])


@triton.jit
def sum_result_rows(b_x):
    """[M, N] → [M/16, 8, N], whose sum are the column sums: rows 8 apart lie in one thread of a product's result."""
    return tl.sum(tl.reshape(b_x, [b_x.shape[0] // 16, 2, 8, b_x.shape[1]]), 1)


@triton.jit
def sum_loaded_rows(b_x, C):
    """[M, N] → [16, N], whose sum are the column sums, of a tile as it is loaded."""
    return tl.sum(tl.reshape(b_x.to(C.WIDE), [b_x.shape[0] // 16, 16, b_x.shape[1]]), 0)


@triton.jit
def load_first(p_left, q, p_dk, i_tile, begin, rows, T, C):
    """Argument and gradient [BM, DP] of a tile's first evaluation of the force: q, and dk or its half but for Euler."""
    i_g = i_tile % C.G
    i_row, m_rows = find_first_row(begin + i_tile // C.G, rows, T, C)
    p_queries = find_head_rows(q, i_g, i_row, T, C)
    tile = Tile(p_queries, q.head, m_rows, tl.arange(0, C.DP // 2))
    b_u = load_rows(p_queries, tile, q.p.dtype.element_ty, C)
    if C.KIND == EULER:
        b_dy = load_unit(p_left, i_tile, 0, 1, C)
    else:
        b_dy = load_rows(find_output_rows(p_dk, i_row, i_g, C), tile, p_dk.dtype.element_ty, C)
        if C.KIND == LEAPFROG:
            b_dy = (0.5 * b_dy.to(C.WIDE)).to(p_dk.dtype.element_ty)
    return b_u, b_dy


@triton.jit
def add_evaluation(b_u, b_dy, b_dw1, b_db1, b_dw2, b_db2, n, C):
    """Adds one evaluation's share to the sums."""
    if C.FORCE == LINEAR:
        b_dw1 += product(tl.trans(b_dy), b_u, C.DOT)
    else:
        b_y, b_t, b_h = hidden(b_u, n, C.FORCE, C)
        b_h = b_h.to(C.DOT)
        b_dh = outer_backward(b_dy, n, C)
        if C.FORCE == GRADIENT:
            b_db2 += sum_result_rows(b_dh * (0.5 + 0.5 * b_t))
            b_dw1 -= product(tl.trans(b_h), b_dy, C.DOT)
        else:
            b_dw2 += product(tl.trans(b_h), b_dy, C.DOT)
            if is_given(n.b2):
                b_db2 += sum_loaded_rows(b_dy, C)
        b_dz = hidden_backward(b_dh, b_y, b_t, n, C.FORCE)
        if is_given(n.b1):
            b_db1 += sum_result_rows(b_dz)
        b_dw1 += product(tl.trans(b_dz.to(C.DOT)), b_u, C.DOT)
    return b_dw1, b_db1, b_dw2, b_db2


@triton.jit
def force_gradients_kernel(
    q,  # as in kernels.backward_kernel
    parameters,
    p_dk,
    p_left,
    p_drifts,  # [drifts, aside]: what its programs summed, the step's gradient by its drifts first
    p_sums,  # [programs / SLICES, total]: the programs' share of every gradient, each weight from its own offset on
    p_kicks,  # [programs]: their share of the step's gradient by its kicks, where there are several slices
    offsets,  # networks.NetworkPointers: where the gradients of the force begin in a row of p_sums
    o_step,
    total,
    drifts,
    aside,
    rows,
    T,
    begin,
    tiles,
    C: tl.constexpr,
):
    """The gradients of the force's weights, and the step's by its kicks: Σ ⟨dy, f(u)⟩, which the sums below hold."""
    SLICES: tl.constexpr = C.HP // C.SLICE
    i_slice = tl.program_id(0) % SLICES
    program, programs = tl.program_id(0) // SLICES, tl.num_programs(0) // SLICES
    o_d, m_d = find_columns(C)
    step = tl.load(parameters.p_step + find_set(program % C.G, C.G, parameters.step_per_head, C)).to(C.WIDE)
    o_slice = i_slice * C.SLICE + tl.arange(0, C.SLICE)
    n = load_force(parameters.key, find_set(program % C.G, C.G, parameters.per_head, C), o_slice, o_d, m_d, C)
    b_dw1 = tl.zeros([n.o_h.shape[0], C.DP], C.WIDE)
    b_dw2, b_db1, b_db2 = tl.zeros([1, 1], C.WIDE), tl.zeros([1, 1, 1], C.WIDE), tl.zeros([1, 1], C.WIDE)
    if C.FORCE == MLP:
        b_dw2, b_db2 = tl.zeros([C.SLICE, C.DP], C.WIDE), tl.zeros([16, C.DP], C.WIDE)
    if C.FORCE != LINEAR:
        b_db1 = tl.zeros([C.BM // 16, 8, C.SLICE], C.WIDE)
    if C.FORCE == GRADIENT:
        b_db2 = tl.zeros([C.BM // 16, 8, C.SLICE], C.WIDE)

    p_left += (tl.zeros([], tl.int64) + find_member(C) * tiles) * C.UNIT
    if C.LEAN:
        count = count_units(tiles, program, programs, 1, C)
        for i in tl.range(0, count, num_stages=C.STAGES):
            i_tile = find_unit(i, program, programs, 1, C)
            b_u, b_dy = load_first(p_left, q, p_dk, i_tile, begin, rows, T, C)
            b_dw1, b_db1, b_dw2, b_db2 = add_evaluation(b_u, b_dy, b_dw1, b_db1, b_dw2, b_db2, n, C)
    if C.LEFT > 0:
        count = count_units(tiles, program, programs, C.LEFT, C)
        for i in tl.range(0, count, num_stages=C.STAGES):
            i_unit = find_unit(i, program, programs, C.LEFT, C)
            b_u, b_dy = load_unit(p_left, i_unit, 0, 2, C), load_unit(p_left, i_unit, 1, 2, C)
            b_dw1, b_db1, b_dw2, b_db2 = add_evaluation(b_u, b_dy, b_dw1, b_db1, b_dw2, b_db2, n, C)

    p_sums += (find_member(C) * programs + program).to(tl.int64) * total
    if C.FORCE == MLP:
        along = tl.sum(tl.sum(b_dw2 * n.w2.to(C.WIDE), 1), 0)
        store_matrix(p_sums + offsets.p_w2, step * b_dw2, n.o_h, n.m_h, 1, o_d, m_d, C.WIDTH)
        if is_given(n.b2):
            b_sum = tl.sum(b_db2, 0)
            along += tl.where(i_slice == 0, tl.sum(b_sum * load_vector(n.b2, o_d, m_d, C.WIDE), 0), 0.0)
            tl.store(p_sums + offsets.p_b2 + o_d, step * b_sum, mask=m_d & (o_d >= i_slice * C.D))
    elif C.FORCE == GRADIENT:
        b_damplitude = tl.sum(tl.sum(b_db2, 0), 0)
        along = tl.sum(b_damplitude * load_vector(n.b2, n.o_h, n.m_h, C.WIDE), 0)
        tl.store(p_sums + offsets.p_b2 + n.o_h, step * b_damplitude, mask=n.m_h)
    else:
        along = tl.sum(tl.sum(b_dw1 * n.w1.to(C.WIDE), 1), 0)
    store_matrix(p_sums + offsets.p_w1, step * b_dw1, n.o_h, n.m_h, C.D, o_d, m_d, 1)
    if is_given(n.b1):
        tl.store(p_sums + offsets.p_b1 + n.o_h, step * tl.sum(tl.sum(b_db1, 0), 0), mask=n.m_h)
    if SLICES > 1:
        tl.store(p_kicks + find_program(C), along)
        along = tl.zeros([], C.WIDE)
    if i_slice == 0:
        p_drifts += find_member(C) * drifts * aside
        for i_drift in range(program, drifts, programs):  # of this program's key head, if headed
            along += tl.load(p_drifts + i_drift * aside)
        tl.store(p_sums + o_step, along)


@triton.jit
def affine_gradients_kernel(
    p_left,  # as kernels.backward_kernel left it, from the network's first tile on
    weights,  # networks.NetworkPointers of one network
    per_head,
    p_sums,  # as in force_gradients_kernel
    offsets,
    total,
    tiles,
    C: tl.constexpr,
):
    """The gradients of one network's weights."""
    SLICES: tl.constexpr = C.HP // C.SLICE
    i_slice = tl.program_id(0) % SLICES
    program, programs = tl.program_id(0) // SLICES, tl.num_programs(0) // SLICES
    o_d, m_d = find_columns(C)
    o_slice = i_slice * C.SLICE + tl.arange(0, C.SLICE)
    n = load_affine(weights, find_set(program % C.G, C.G, per_head, C), o_slice, o_d, m_d, C)
    b_dw1, b_dw2 = tl.zeros([C.SLICE, C.DP], C.WIDE), tl.zeros([C.SLICE, C.DP], C.WIDE)
    b_dw3, b_db1 = tl.zeros([C.SLICE, C.DP], C.WIDE), tl.zeros([C.BM // 16, 8, C.SLICE], C.WIDE)
    b_db2, b_db3 = tl.zeros([16, C.DP], C.WIDE), tl.zeros([16, C.DP], C.WIDE)

    p_left += (tl.zeros([], tl.int64) + find_member(C) * tiles) * C.UNIT
    count = count_units(tiles, program, programs, C.STEPS, C)
    i_unit = find_unit(0, program, programs, C.STEPS, C)
    b_next_u = load_unit(p_left, i_unit, 0, 6, C)
    b_next_draw, b_next_dy = load_unit(p_left, i_unit, 1, 6, C), load_unit(p_left, i_unit, 2, 6, C)
    for i in tl.range(0, count, num_stages=C.STAGES):
        b_u, b_draw, b_dy = b_next_u, b_next_draw, b_next_dy
        i_unit = find_unit(tl.minimum(i + 1, count - 1), program, programs, C.STEPS, C)
        b_next_u = load_unit(p_left, i_unit, 0, 6, C)
        b_next_draw, b_next_dy = load_unit(p_left, i_unit, 1, 6, C), load_unit(p_left, i_unit, 2, 6, C)
        b_y, b_t, b_h = hidden(b_u, n, MLP, C)
        b_h = b_h.to(C.DOT)
        b_dw2 += product(tl.trans(b_h), b_draw, C.DOT)
        b_dw3 += product(tl.trans(b_h), b_dy, C.DOT)
        b_dh = product(b_draw, tl.trans(n.w2), C.DOT) + product(b_dy, tl.trans(n.w3), C.DOT)
        b_dz = hidden_backward(b_dh, b_y, b_t, n, MLP)
        b_dw1 += product(tl.trans(b_dz.to(C.DOT)), b_u, C.DOT)
        if is_given(n.b1):
            b_db1 += sum_result_rows(b_dz)
        if is_given(n.b2):
            b_db2 += sum_loaded_rows(b_draw, C)
            b_db3 += sum_loaded_rows(b_dy, C)

    p_sums += (find_member(C) * programs + program).to(tl.int64) * total
    store_matrix(p_sums + offsets.p_w1, b_dw1, n.o_h, n.m_h, C.D, o_d, m_d, 1)
    store_matrix(p_sums + offsets.p_w2, b_dw2, n.o_h, n.m_h, 1, o_d, m_d, C.WIDTH)
    store_matrix(p_sums + offsets.p_w2 + C.D * C.WIDTH, b_dw3, n.o_h, n.m_h, 1, o_d, m_d, C.WIDTH)
    if is_given(n.b1):
        tl.store(p_sums + offsets.p_b1 + n.o_h, tl.sum(tl.sum(b_db1, 0), 0), mask=n.m_h)
    if is_given(n.b2):
        m_own = m_d & (o_d >= i_slice * C.D)  # one slice writes what all of them have
        tl.store(p_sums + offsets.p_b2 + o_d, tl.sum(b_db2, 0), mask=m_own)
        tl.store(p_sums + offsets.p_b2 + C.D + o_d, tl.sum(b_db3, 0), mask=m_own)
