"""What the kernels share: where a program's tiles lie, how they come and go, how a map ends in norm and rotation."""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from qklab.ops.coupling.maps import inverse_rms, load_rows, norm_backward, product, turned


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
def first_row(i_block, rows, T, BM: tl.constexpr, EVEN: tl.constexpr):
    """Row of [B, T, …] that block i of BM rows starts with.

    EVEN: blocks of the same tokens in all batch rows follow each other, so that they find their angles loaded.
    """
    i_row = i_block * BM
    if EVEN:
        i_row = i_block % (rows // T) * T + i_block // (rows // T) * BM
    return i_row


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
def angles_at(
    i_row, o_held, b_cos, b_sin, p_cos, p_sin, a_b, a_t, m_rows, o_j, T,
    HOLD: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Where the angles of the block that starts at i_row lie, and their cos and sin [BM, D/2].

    HOLD: those are b_cos and b_sin if o_held is where these lie.
    """
    o_angles = (i_row // T).to(tl.int64) * a_b + (i_row % T).to(tl.int64) * a_t
    if not HOLD or o_angles != o_held:
        p_c = rows_from(p_cos, i_row, a_b, a_t, T, BM, EVEN)
        p_s = rows_from(p_sin, i_row, a_b, a_t, T, BM, EVEN)
        b_cos, b_sin = load_angles(p_c, p_s, m_rows, o_j, TURNED, WIDE, EVEN)
    return o_angles, b_cos, b_sin


@triton.jit
def no_angles(TURNED: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr):
    """What a program holds before its first block."""
    b_none = tl.zeros([1, 1], WIDE)
    if TURNED:
        b_none = tl.zeros([BM, DP // 2], WIDE)
    return tl.full([], -1, tl.int64), b_none, b_none


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
