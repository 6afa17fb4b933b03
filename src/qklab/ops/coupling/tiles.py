"""Tiles: a block of tokens of one head, how it comes and goes, and how a map ends in norm and rotation.

A rotation must find the two entries it turns together in one thread. Where all D = 2^n entries turn they lie D/2 apart,
as columns of a product's result do; else a tile [M, D] holds its columns in pairs: entries 2j and 2j + 1 turn together.
Weights are tiles [h, D] in the same order. State is float32; products take their operands in DOT. Prefixes: p_ pointer,
o_ offsets, m_ mask, b_ block of values, i_ index; capitals are known when a kernel is compiled.
"""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # its products take bf16 operands for integers


class Heads(NamedTuple):
    """A tensor [B, T, heads, D], entries side by side: where it lies, and its strides."""

    p: Any
    batch: Any
    token: Any
    head: Any


class AngleTables(NamedTuple):
    """cos and sin [B or 1, T, PAIRS], entries side by side, with their strides; or no pointers and no rotation."""

    p_cos: Any
    p_sin: Any
    batch: Any
    token: Any


class Gains(NamedTuple):
    """[D] each, or of members [S, D]; or None."""

    p_q: Any
    p_k: Any


class Constants(NamedTuple):
    """What a kernel is compiled for."""

    G: Any  # key heads
    R: Any  # query heads of each
    D: Any  # entries of a head
    DP: Any  # and of its tile, a power of two
    WIDTH: Any  # hidden entries of a network
    HP: Any  # and of its tile
    PAIRS: Any  # pairs that RoPE turns
    TURN_K: Any  # whether it turns the key, too
    NORM: Any
    STEPS: Any
    KIND: Any  # which of the maps that share their functions
    FORCE: Any
    STRETCH: Any  # whether a map stretches the differences between a group's query heads
    HEADED: Any  # whether a program keeps to one key head
    MEMBERS: Any  # whether weights and rows are those of several models, to one of which a program keeps
    DOT: Any  # dtype of the products' operands
    WIDE: Any  # dtype of the states
    FAST: Any  # whether the GPU's own tanh does
    BM: Any  # tokens of a block
    EVEN: Any  # no block reaches over the end of a batch row
    FULL: Any  # and every row of a tile exists
    HOLD: Any  # keep a block's angles for its other heads
    STAGES: Any
    LEAN: Any = False  # a backward leaves nothing of the first evaluation that q and dk hold anyway
    LEFT: Any = 0  # evaluations of a tile that it leaves with argument and gradient
    UNIT: Any = 0  # entries that it leaves of a tile
    STATES: Any = 0  # entries that a program of it keeps of its states
    SLICE: Any = 0  # hidden entries whose weight gradients a program sums


class Tile(NamedTuple):
    """A block of tokens of one key head."""

    p_queries: Any  # [BM], the first query head's rows
    head: Any  # from one query head to the next
    m_rows: Any  # [BM]
    o_j: Any  # [DP/2]


@triton.jit
def find_member(C):
    """Whose rows and weights a program has: programs of one member lie along the grid's first axis."""
    i_member = 0
    if C.MEMBERS:
        i_member = tl.program_id(1)
    return i_member


@triton.jit
def find_program(C):
    """A program's number among those of all members, of which every member has as many."""
    return (find_member(C) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)


@triton.jit
def find_set(i_head, heads, per_head, C):
    """Which set of weights a key head has: a member has one, or, if per_head is 1 and not 0, one for each."""
    return i_head * per_head + find_member(C) * (1 + (heads - 1) * per_head)


@triton.jit
def product(b_a, b_b, DOT: tl.constexpr):
    """a b with operands in DOT, summed in float32 or wider."""
    wide: tl.constexpr = tl.float64 if tl.float64 == DOT else tl.float32
    b_a, b_b = b_a.to(DOT), b_b.to(DOT)
    if INTERPRETED:
        b_a, b_b = b_a.to(wide), b_b.to(wide)
    return tl.dot(b_a, b_b, input_precision="ieee", out_dtype=wide)


@triton.jit
def find_pairs(o_j, C):
    """Where pair j's two entries lie among the D of a head, of which the first 2·PAIRS turn: offsets and masks."""
    half: tl.constexpr = (C.D + 1) // 2
    o_a, o_b = o_j, o_j + half
    if half != C.PAIRS:
        o_a = tl.where(o_j < C.PAIRS, o_j, o_j + C.PAIRS)
        o_b = tl.where(o_j < C.PAIRS, o_j + C.PAIRS, o_j + half)
    return o_a, o_b, o_j < half, (o_j < half) & (o_b < C.D)


@triton.jit
def find_columns(C):
    """Where the tile's columns [DP] lie among a head's entries, and which of them exist."""
    o_d = tl.arange(0, C.DP)
    if C.PAIRS == 0 or C.DP == 2 * C.PAIRS:
        o_column, m_column = o_d, o_d < C.D
    else:
        o_a, o_b, m_a, m_b = find_pairs(o_d // 2, C)
        even = o_d % 2 == 0
        o_column, m_column = tl.where(even, o_a, o_b), tl.where(even, m_a, m_b)
    return o_column, m_column


@triton.jit
def join_pairs(b_a, b_b, ALTERNATE: tl.constexpr):
    """Two [M, D/2] → [M, D]: their columns alternating, or all of the first before the second's."""
    b_x = tl.join(b_a, b_b)
    if not ALTERNATE:
        b_x = tl.permute(b_x, (0, 2, 1))
    return tl.reshape(b_x, [b_a.shape[0], 2 * b_a.shape[1]])


@triton.jit
def split_pairs(b_x, ALTERNATE: tl.constexpr):
    """[M, D] → its even and its odd columns, or its first and second half: two [M, D/2]."""
    if ALTERNATE:
        b_x = tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2])
    else:
        b_x = tl.permute(tl.reshape(b_x, [b_x.shape[0], 2, b_x.shape[1] // 2]), (0, 2, 1))
    return tl.split(b_x)


@triton.jit
def load_rows(p_rows, tile, dtype: tl.constexpr, C):
    """The rows that start at p_rows [BM], as a tile [BM, DP]."""
    m_rows = tile.m_rows
    if C.PAIRS == 0 or 2 * C.PAIRS == C.DP:
        o_d = tl.arange(0, C.DP)
        if C.FULL and C.D == C.DP:
            b_x = tl.load(p_rows[:, None] + o_d[None, :])
        else:
            b_x = tl.load(p_rows[:, None] + o_d[None, :], mask=m_rows[:, None] & (o_d < C.D)[None, :], other=0.0)
    else:
        o_a, o_b, m_a, m_b = find_pairs(tile.o_j, C)
        b_a = tl.load(p_rows[:, None] + o_a[None, :], mask=m_rows[:, None] & m_a[None, :], other=0.0)
        b_b = tl.load(p_rows[:, None] + o_b[None, :], mask=m_rows[:, None] & m_b[None, :], other=0.0)
        b_x = join_pairs(b_a, b_b, True)
    return b_x.to(dtype)


@triton.jit
def store_rows(p_rows, tile, b_x, C):
    m_rows = tile.m_rows
    b_x = b_x.to(p_rows.dtype.element_ty)
    if C.PAIRS == 0 or 2 * C.PAIRS == C.DP:
        o_d = tl.arange(0, C.DP)
        if C.FULL and C.D == C.DP:
            tl.store(p_rows[:, None] + o_d[None, :], b_x)
        else:
            tl.store(p_rows[:, None] + o_d[None, :], b_x, mask=m_rows[:, None] & (o_d < C.D)[None, :])
    else:
        o_a, o_b, m_a, m_b = find_pairs(tile.o_j, C)
        b_a, b_b = split_pairs(b_x, True)
        tl.store(p_rows[:, None] + o_a[None, :], b_a, mask=m_rows[:, None] & m_a[None, :])
        tl.store(p_rows[:, None] + o_b[None, :], b_b, mask=m_rows[:, None] & m_b[None, :])


@triton.jit
def find_rows(p_x, batch, token, i_row, T, C):
    """Where the rows i_row, …, i_row + BM − 1 of [B, T, …] with these strides start: [BM].

    EVEN: all but one number is the same for all blocks.
    """
    o_m = tl.arange(0, C.BM)
    if C.EVEN:
        p_rows = p_x + (i_row // T).to(tl.int64) * batch + (i_row % T).to(tl.int64) * token + o_m * token
    else:
        o_row = i_row + o_m
        p_rows = p_x + (o_row // T).to(tl.int64) * batch + (o_row % T).to(tl.int64) * token
    return p_rows


@triton.jit
def find_head_rows(x, i_head, i_row, T, C):
    """Where a head's rows start in x: [BM]."""
    return find_rows(x.p + i_head * x.head, x.batch, x.token, i_row, T, C)


@triton.jit
def find_output_rows(p_x, i_row, i_g, C):
    """The same in a contiguous [B, T, G, D]."""
    o_first, o_out = i_row.to(tl.int64) * (C.G * C.D) + i_g * C.D, tl.arange(0, C.BM) * (C.G * C.D)
    return p_x + o_first + o_out


@triton.jit
def find_query_rows(p_x, i_row, i_g, i_r, C):
    """And of a group's i_r-th query head in a contiguous [B, T, G·R, D]."""
    o_first, o_out = i_row.to(tl.int64) * (C.G * C.D) + i_g * C.D, tl.arange(0, C.BM) * (C.G * C.D)
    return p_x + o_first * C.R + i_r * C.D + o_out * C.R


@triton.jit
def find_first_row(i_block, rows, T, C):
    """Row of [B, T, …] that a member's block starts with, and which of its rows [BM] are among the member's.

    FULL: blocks of the same tokens in all batch rows follow each other, so that they find their angles loaded.
    """
    i_row = i_block * C.BM
    if C.FULL:
        i_row = i_block % (rows // T) * T + i_block // (rows // T) * C.BM
    m_rows = i_row + tl.arange(0, C.BM) < rows
    return i_row + find_member(C) * rows, m_rows


@triton.jit
def load_angles(angles, i_row, m_rows, o_j, T, C):
    """cos and sin [BM, DP/2] of the block that starts at i_row; 1 and 0 where nothing turns."""
    p_cos = find_rows(angles.p_cos, angles.batch, angles.token, i_row, T, C)
    p_sin = find_rows(angles.p_sin, angles.batch, angles.token, i_row, T, C)
    o = o_j[None, :]
    if C.FULL and C.DP == 2 * C.PAIRS:
        b_cos, b_sin = tl.load(p_cos[:, None] + o), tl.load(p_sin[:, None] + o)
    else:
        m = m_rows[:, None] & (o_j < C.PAIRS)[None, :]
        b_cos, b_sin = tl.load(p_cos[:, None] + o, mask=m, other=1.0), tl.load(p_sin[:, None] + o, mask=m, other=0.0)
    return b_cos.to(C.WIDE), b_sin.to(C.WIDE)


@triton.jit
def hold_angles(angles, o_held, b_cos, b_sin, i_row, tile, T, C):
    """Where the angles of the block that starts at i_row lie, and their cos and sin [BM, DP/2].

    HOLD: those are b_cos and b_sin if o_held is where these lie.
    """
    o_angles = (i_row // T).to(tl.int64) * angles.batch + (i_row % T).to(tl.int64) * angles.token
    if not C.HOLD or o_angles != o_held:
        b_cos, b_sin = load_angles(angles, i_row, tile.m_rows, tile.o_j, T, C)
    return o_angles, b_cos, b_sin


@triton.jit
def hold_no_angles(C):
    """What a program holds before its first block."""
    b_none = tl.zeros([1, 1], C.WIDE)
    if C.PAIRS:
        b_none = tl.zeros([C.BM, C.DP // 2], C.WIDE)
    return tl.full([], -1, tl.int64), b_none, b_none


@triton.jit
def load_gain(p_gain, o_d, m_d, C):
    """A member's [DP]; ones where there is none."""
    b_gain = tl.full([C.DP], 1.0, C.WIDE)
    if p_gain is not None:
        b_gain = tl.load(p_gain + find_member(C) * C.D + o_d, mask=m_d, other=0.0).to(C.WIDE)
    return b_gain


@triton.jit
def rotate(b_x, b_cos, b_sin, C):
    """R x: b_cos, b_sin [M, DP/2]."""
    ALTERNATE: tl.constexpr = C.DP != 2 * C.PAIRS
    b_a, b_b = split_pairs(b_x, ALTERNATE)
    return join_pairs(b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin, ALTERNATE)


@triton.jit
def inverse_rms(b_x, eps, C):
    """1/√(mean x² + eps): [M]."""
    return 1 / tl.sqrt(tl.sum(b_x * b_x, 1) / C.D + eps)


@triton.jit
def normalise_and_rotate(b_x, b_gain, b_cos, b_sin, eps, TURN: tl.constexpr, C):
    """How every map ends."""
    if C.NORM:
        b_x = b_x * inverse_rms(b_x, eps, C)[:, None] * b_gain[None, :]
    if TURN:
        b_x = rotate(b_x, b_cos, b_sin, C)
    return b_x


@triton.jit
def normalise_and_rotate_backward(b_dy, b_x, b_gain, b_cos, b_sin, eps, TURN: tl.constexpr, C):
    """dx, and what adds up to dgain (anything without NORM): dy ⊙ x/rms(x) before the gain."""
    if TURN:
        b_dy = rotate(b_dy, b_cos, -b_sin, C)
    b_dgain = b_dy
    if C.NORM:
        b_r = inverse_rms(b_x, eps, C)[:, None]
        b_unit = b_x * b_r
        b_dunit = b_dy * b_gain[None, :]
        b_mean = tl.sum(b_dunit * b_unit, 1)[:, None] / C.D
        b_dy, b_dgain = b_r * (b_dunit - b_unit * b_mean), b_dy * b_unit
    return b_dy, b_dgain


@triton.jit
def as_result(b_x, C):
    """b_x in WIDE, laid out over the threads as a product's result is, by multiplying it with 1.

    Without this the compiler would compute all that follows twice, in the layout it was loaded in and in this one.
    """
    if b_x.dtype == C.DOT and C.DOT != C.WIDE:
        o_d = tl.arange(0, b_x.shape[1])
        b_y = product(b_x, tl.where(o_d[:, None] == o_d[None, :], 1.0, 0.0).to(C.DOT), C.DOT)
    else:
        b_y = b_x.to(C.WIDE)
    return b_y


@triton.jit
def load_group_mean(tile, C):
    """q̄ [BM, DP] of a group's R query heads."""
    b_q = load_rows(tile.p_queries, tile, C.WIDE, C)
    if C.R > 1:
        for i_r in range(1, C.R):
            b_q += load_rows(tile.p_queries + i_r * tile.head, tile, C.WIDE, C)
        b_q = b_q / C.R
    return b_q


@triton.jit
def divide_tiles(tiles, C):
    """First, last and stride of this program's tiles, of which tile i is key head i mod G of token block i // G.

    HEADED, for P programs, a multiple of G: every P-th, all of one key head. Else neighbours, so that the heads of a
    block find its angles in the multiprocessor's own cache.
    """
    first, last, stride = tl.program_id(0), tiles, tl.num_programs(0)
    if not C.HEADED:
        count = tl.cdiv(tiles, tl.num_programs(0))
        first = tl.program_id(0) * count
        last, stride = tl.minimum(first + count, tiles), 1
    return first, last, stride


@triton.jit
def clear_sum(p_sum, p_b, o_b, m_b):
    """Zeros where the gradient of p_b, if it exists, is going to be summed."""
    if p_b is not None:
        tl.store(p_sum + o_b, tl.zeros([o_b.shape[0]], p_sum.dtype.element_ty), mask=m_b)


@triton.jit
def add_columns(p_sum, b_x, o_b, m_b):
    """Add the column sums of b_x to the program's own p_sum; a barrier must come before the next time."""
    tl.store(p_sum + o_b, tl.load(p_sum + o_b, mask=m_b, other=0.0) + tl.sum(b_x, 0), mask=m_b)
