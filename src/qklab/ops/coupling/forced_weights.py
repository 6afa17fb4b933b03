"""The gradients of a force's weights, summed over what `forced.forced_backward` left."""

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
    column_of,
    hidden,
    hidden_backward,
    load_rows,
    load_vector,
    product,
)
from qklab.ops.coupling.tiles import (
    first_row,
    load_matrix,
    load_unit,
    loaded_sums,
    part_sums,
    rows_from,
    store_matrix,
    unit_of,
    units,
)


@triton.jit
def load_first(
    p_work, p_q, p_dk, i_tile, begin, q_b, q_t, q_h, rows, T,
    KIND: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Argument and gradient [BM, DP] of a tile's first evaluation of the force: q, and dk or its half but for Euler."""
    i_g, i_row = i_tile % G, first_row(begin + i_tile // G, rows, T, BM, EVEN)
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
        b_y, b_t, b_h = hidden(b_u, b_w1, p_b1, p_b2, o_h, m_h, FORCE, DOT, FAST)
        b_h = b_h.to(DOT)
        if FORCE == GRADIENT:
            b_dh = -product(b_dy, tl.trans(b_w1), DOT)
            b_db2 += part_sums(b_dh * (0.5 + 0.5 * b_t))
            b_dw1 -= product(tl.trans(b_h), b_dy, DOT)
        else:
            b_dh = product(b_dy, tl.trans(b_w2), DOT)
            b_dw2 += product(tl.trans(b_h), b_dy, DOT)
            if p_b2 is not None:
                b_db2 += loaded_sums(b_dy, WIDE)
        b_dz = hidden_backward(b_dh, b_y, b_t, p_b2, o_h, m_h, FORCE)
        if p_b1 is not None:
            b_db1 += part_sums(b_dz)
        b_dw1 += product(tl.trans(b_dz.to(DOT)), b_u, DOT)
    return b_dw1, b_db1, b_dw2, b_db2


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
    p_drifts,  # [drifts, aside]: what forced_backward's programs summed, the step's gradient by its drifts first
    p_sums,  # [programs / SLICES, total]: the programs' share of every gradient, each weight from its own offset on
    p_kicks,  # [programs]: their share of the step's gradient by its kicks, where there are several slices
    q_b,
    q_t,
    q_h,
    rows,
    T,
    begin,
    tiles,
    per_head,
    step_per_head,
    drifts,
    aside,
    total,
    o_step,
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
        for i in tl.range(0, count, num_stages=STAGES):
            i_tile = unit_of(i, program, programs, 1, HEADED)
            b_u, b_dy = load_first(
                p_work, p_q, p_dk, i_tile, begin, q_b, q_t, q_h, rows, T, KIND, G, D, DP, TURNED, WIDE, BM, EVEN
            )
            b_dw1, b_db1, b_dw2, b_db2 = add_evaluation(
                b_u, b_dy, b_dw1, b_db1, b_dw2, b_db2, b_w1, p_b1, b_w2, p_b2, o_h, m_h, FORCE, DOT, WIDE, FAST
            )
    if LEFT > 0:
        count = units(tiles, program, programs, LEFT, HEADED)
        for i in tl.range(0, count, num_stages=STAGES):
            b_u, b_dy = load_left(p_work, unit_of(i, program, programs, LEFT, HEADED), BM, DP)
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
    if SLICES > 1:
        tl.store(p_kicks + tl.program_id(0), along)
        along = tl.zeros([], WIDE)
    if i_slice == 0:
        for i_drift in range(program, drifts, programs):  # of this program's key head, if headed
            along += tl.load(p_drifts + i_drift * aside)
        tl.store(p_sums + o_step, along)
