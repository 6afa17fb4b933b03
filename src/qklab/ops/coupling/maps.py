"""The coupling maps on tiles: what one program does with the queries and keys of a block of tokens.

A rotation must find the two entries it turns together in one thread. Where all D = 2^n entries turn they lie D/2 apart,
as columns of a product's result do; else a tile [M, D] holds its columns in pairs: entries 2j and 2j + 1 turn together.
Weights are tiles [h, D] in the same order. State is float32; products take their operands in DOT. Prefixes: p_ pointer,
o_ offsets, m_ mask, b_ block of values, i_ index.
"""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

EULER = tl.constexpr(0)
KICK_DRIFT = tl.constexpr(1)
LEAPFROG = tl.constexpr(2)

MLP = tl.constexpr(0)
GRADIENT = tl.constexpr(1)
LINEAR = tl.constexpr(2)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # its products take bf16 operands for integers


@triton.jit
def product(b_a, b_b, DOT: tl.constexpr):
    """a b with operands in DOT, summed in float32 or wider."""
    wide: tl.constexpr = tl.float64 if tl.float64 == DOT else tl.float32
    b_a, b_b = b_a.to(DOT), b_b.to(DOT)
    if INTERPRETED:
        b_a, b_b = b_a.to(wide), b_b.to(wide)
    return tl.dot(b_a, b_b, input_precision="ieee", out_dtype=wide)


@triton.jit
def tanh(b_x, FAST: tl.constexpr):
    if FAST:
        b_y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1)
    else:
        b_e = tl.exp(-2 * tl.abs(b_x))
        b_y = tl.where(b_x < 0, b_e - 1, 1 - b_e) / (1 + b_e)
    return b_y


@triton.jit
def columns(o_j, D: tl.constexpr, TURNED: tl.constexpr):
    """Where pair j's two entries lie among the D of a head, of which the first 2·TURNED turn: offsets and masks."""
    half: tl.constexpr = (D + 1) // 2
    o_a, o_b = o_j, o_j + half
    if half != TURNED:
        o_a = tl.where(o_j < TURNED, o_j, o_j + TURNED)
        o_b = tl.where(o_j < TURNED, o_j + TURNED, o_j + half)
    return o_a, o_b, o_j < half, (o_j < half) & (o_b < D)


@triton.jit
def paired(b_a, b_b, ALTERNATE: tl.constexpr):
    """Two [M, D/2] → [M, D]: their columns alternating, or all of the first before the second's."""
    b_x = tl.join(b_a, b_b)
    if not ALTERNATE:
        b_x = tl.permute(b_x, (0, 2, 1))
    return tl.reshape(b_x, [b_a.shape[0], 2 * b_a.shape[1]])


@triton.jit
def unpaired(b_x, ALTERNATE: tl.constexpr):
    """[M, D] → its even and its odd columns, or its first and second half: two [M, D/2]."""
    if ALTERNATE:
        b_x = tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2])
    else:
        b_x = tl.permute(tl.reshape(b_x, [b_x.shape[0], 2, b_x.shape[1] // 2]), (0, 2, 1))
    return tl.split(b_x)


@triton.jit
def load_rows(
    p_rows, m_rows, o_j, D: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr = False
):  # fmt: skip
    """The rows that start at p_rows [M], as a tile [M, D]; FULL: all of them exist."""
    DP: tl.constexpr = 2 * o_j.shape[0]
    if TURNED == 0 or 2 * TURNED == DP:
        o_d = tl.arange(0, DP)
        if FULL and D == DP:
            b_x = tl.load(p_rows[:, None] + o_d[None, :])
        else:
            b_x = tl.load(p_rows[:, None] + o_d[None, :], mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        o_a, o_b, m_a, m_b = columns(o_j, D, TURNED)
        b_a = tl.load(p_rows[:, None] + o_a[None, :], mask=m_rows[:, None] & m_a[None, :], other=0.0)
        b_b = tl.load(p_rows[:, None] + o_b[None, :], mask=m_rows[:, None] & m_b[None, :], other=0.0)
        b_x = paired(b_a, b_b, True)
    return b_x.to(WIDE)


@triton.jit
def store_rows(p_rows, m_rows, o_j, b_x, D: tl.constexpr, TURNED: tl.constexpr, FULL: tl.constexpr = False):
    DP: tl.constexpr = 2 * o_j.shape[0]
    b_x = b_x.to(p_rows.dtype.element_ty)
    if TURNED == 0 or 2 * TURNED == DP:
        o_d = tl.arange(0, DP)
        if FULL and D == DP:
            tl.store(p_rows[:, None] + o_d[None, :], b_x)
        else:
            tl.store(p_rows[:, None] + o_d[None, :], b_x, mask=m_rows[:, None] & (o_d < D)[None, :])
    else:
        o_a, o_b, m_a, m_b = columns(o_j, D, TURNED)
        b_a, b_b = unpaired(b_x, True)
        tl.store(p_rows[:, None] + o_a[None, :], b_a, mask=m_rows[:, None] & m_a[None, :])
        tl.store(p_rows[:, None] + o_b[None, :], b_b, mask=m_rows[:, None] & m_b[None, :])


@triton.jit
def column_of(o_d, D: tl.constexpr, TURNED: tl.constexpr):
    """Where the tile's columns [D] lie among a head's entries, and which of them exist."""
    if TURNED == 0 or o_d.shape[0] == 2 * TURNED:
        o_column, m_column = o_d, o_d < D
    else:
        o_a, o_b, m_a, m_b = columns(o_d // 2, D, TURNED)
        even = o_d % 2 == 0
        o_column, m_column = tl.where(even, o_a, o_b), tl.where(even, m_a, m_b)
    return o_column, m_column


@triton.jit
def turned(b_x, b_cos, b_sin, TURNED: tl.constexpr):
    """R x: b_cos, b_sin [M, D/2]."""
    ALTERNATE: tl.constexpr = b_x.shape[1] != 2 * TURNED
    b_a, b_b = unpaired(b_x, ALTERNATE)
    return paired(b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin, ALTERNATE)


@triton.jit
def inverse_rms(b_x, eps, D: tl.constexpr):
    """1/√(mean x² + eps): [M]."""
    return 1 / tl.sqrt(tl.sum(b_x * b_x, 1) / D + eps)


@triton.jit
def norm_backward(b_dy, b_x, b_gain, eps, D: tl.constexpr):
    """dx of y = g ⊙ x/rms(x), and dy ⊙ x/rms(x), whose column sums are dg."""
    b_r = inverse_rms(b_x, eps, D)[:, None]
    b_unit = b_x * b_r
    b_dunit = b_dy * b_gain[None, :]
    b_mean = tl.sum(b_dunit * b_unit, 1)[:, None] / D
    return b_r * (b_dunit - b_unit * b_mean), b_dy * b_unit


@triton.jit
def load_vector(p_b, o_b, m_b, WIDE: tl.constexpr):
    """[·] in WIDE; zeros where there is none; p_b itself where it is loaded already.

    Backwards, biases are read where they are used: kept, each would take as many registers as half a tile.
    """
    if p_b is None:
        b_b = tl.zeros([o_b.shape[0]], WIDE)
    elif p_b.type.is_ptr():
        b_b = tl.load(p_b + o_b, mask=m_b, other=0.0).to(WIDE)
    else:
        b_b = p_b
    return b_b


@triton.jit
def add_columns(p_sum, b_x, o_b, m_b):
    """Add the column sums of b_x to the program's own p_sum; a barrier must come before the next time."""
    tl.store(p_sum + o_b, tl.load(p_sum + o_b, mask=m_b, other=0.0) + tl.sum(b_x, 0), mask=m_b)


@triton.jit
def hidden(b_u, b_w1, p_b1, p_b2, o_h, m_h, FORCE: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr):
    """y = z/2 for z = W1 u + b1, t = tanh y, and what the outer layer takes: silu(z) = y + y t, or of a gradient force
    a ⊙ σ(z), σ(z) = (1 + t)/2: [M, h] each."""
    b_y = 0.5 * product(b_u, tl.trans(b_w1), DOT)
    if p_b1 is not None:
        b_y += 0.5 * load_vector(p_b1, o_h, m_h, b_y.dtype)[None, :]
    b_t = tanh(b_y, FAST)
    b_h = b_y + b_y * b_t
    if FORCE == GRADIENT:
        b_h = load_vector(p_b2, o_h, m_h, b_y.dtype)[None, :] * (0.5 + 0.5 * b_t)
    return b_y, b_t, b_h


@triton.jit
def hidden_backward(b_dh, b_y, b_t, p_b2, o_h, m_h, FORCE: tl.constexpr):
    """dz from the gradient dh of what the outer layer takes: silu′(z) = σ(z) (1 + y (1 − t)), σ′(z) = (1 − t²)/4."""
    if FORCE == GRADIENT:
        b_dz = b_dh * load_vector(p_b2, o_h, m_h, b_y.dtype)[None, :] * (0.25 - 0.25 * b_t * b_t)
    else:
        b_s = 0.5 + 0.5 * b_t
        b_dz = b_dh * (b_s + b_s * (b_y - b_y * b_t))
    return b_dz


@triton.jit
def force(b_u, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d, FORCE: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr):
    """f(u) [M, D]: W2 silu(W1 u + b1) + b2; −W1ᵀ(a ⊙ σ(W1 u + b1)), with a in place of b2; A u with A in place of W1.

    b_w1, b_w2 [h, D] (the outer matrix transposed); p_b1 [h] and p_b2 [D], or the amplitudes [h], or None.
    """
    if FORCE == LINEAR:
        b_f = product(b_u, tl.trans(b_w1), DOT)
    else:
        _, _, b_h = hidden(b_u, b_w1, p_b1, p_b2, o_h, m_h, FORCE, DOT, FAST)
        if FORCE == GRADIENT:
            b_f = -product(b_h, b_w1, DOT)
        else:
            b_f = product(b_h, b_w2, DOT)
            if p_b2 is not None:
                b_f += load_vector(p_b2, o_d, m_d, b_f.dtype)[None, :]
    return b_f


@triton.jit
def pulled_back(
    b_u, b_dy, b_w1, p_b1, b_w2, p_b2, o_h, m_h, o_d, m_d,
    VALUE: tl.constexpr, FORCE: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """du of y = f(u), given dy, and f(u) itself if VALUE (else dy): [M, D] each."""
    b_f = b_dy
    if FORCE == LINEAR:
        b_du = product(b_dy, b_w1, DOT)
        if VALUE:
            b_f = product(b_u, tl.trans(b_w1), DOT)
    else:
        b_y, b_t, b_h = hidden(b_u, b_w1, p_b1, p_b2, o_h, m_h, FORCE, DOT, FAST)
        if VALUE:
            if FORCE == GRADIENT:
                b_f = -product(b_h, b_w1, DOT)
            else:
                b_f = product(b_h, b_w2, DOT)
                if p_b2 is not None:
                    b_f += load_vector(p_b2, o_d, m_d, b_f.dtype)[None, :]
        b_dh = -product(b_dy, tl.trans(b_w1), DOT) if FORCE == GRADIENT else product(b_dy, tl.trans(b_w2), DOT)
        b_du = product(hidden_backward(b_dh, b_y, b_t, p_b2, o_h, m_h, FORCE), b_w1, DOT)
    return b_du, b_f


@triton.jit
def force_backward(
    b_u, b_dy, factor, b_w1, p_b1, b_w2, p_b2, b_dw1, p_db1, b_dw2, p_db2, o_h, m_h, o_d, m_d,
    FORCE: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Backward of y = factor · f(u), given dy [M, D], with the gradients of the weights; not for a linear force.

    Returns du, the rows' Σ dy · f(u) [M], and the sums of the matrices' gradients with this block's share added; so, in
    place, the biases'.
    """
    b_y, b_t, b_h = hidden(b_u, b_w1, p_b1, p_b2, o_h, m_h, FORCE, DOT, FAST)
    if FORCE == GRADIENT:
        b_dh = -product(b_dy, tl.trans(b_w1), DOT)
        b_along = tl.sum(b_dh * b_h, 1)
        add_columns(p_db2, factor * b_dh * (0.5 + 0.5 * b_t), o_h, m_h)
        b_dw1 -= product(tl.trans((factor * b_h).to(DOT)), b_dy, DOT)
    else:
        b_dh = product(b_dy, tl.trans(b_w2), DOT)
        b_along = tl.sum(b_dh * b_h, 1)
        b_dw2 += product(tl.trans((factor * b_h).to(DOT)), b_dy, DOT)
        if p_b2 is not None:
            b_along += tl.sum(b_dy * load_vector(p_b2, o_d, m_d, b_dy.dtype)[None, :], 1)
            add_columns(p_db2, factor * b_dy, o_d, m_d)
    b_dz = factor * hidden_backward(b_dh, b_y, b_t, p_b2, o_h, m_h, FORCE)
    b_du = product(b_dz, b_w1, DOT)
    b_dw1 += product(tl.trans(b_dz.to(DOT)), b_u, DOT)
    if p_b1 is not None:
        add_columns(p_db1, b_dz, o_h, m_h)
    tl.debug_barrier()
    return b_du, b_along, b_dw1, b_dw2


@triton.jit
def scale_and_shift(
    b_u, b_w1, p_b1, b_w2, b_w3, p_b2, o_h, m_h, o_d, m_d, limit,
    D: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s = limit · tanh(W2 h + b2) and t = W3 h + b3 with h = silu(W1 u + b1): [M, D] each; p_b2 [2D] is b2, then b3."""
    _, _, b_h = hidden(b_u, b_w1, p_b1, None, o_h, m_h, MLP, DOT, FAST)
    b_h = b_h.to(DOT)
    b_s, b_t = product(b_h, b_w2, DOT), product(b_h, b_w3, DOT)
    if p_b2 is not None:
        b_s += load_vector(p_b2, o_d, m_d, b_s.dtype)[None, :]
        b_t += load_vector(p_b2 + D, o_d, m_d, b_s.dtype)[None, :]
    return limit * tanh(b_s, FAST), b_t


@triton.jit
def stretch_backward(
    b_u, b_x, b_dy, b_extra, b_w1, p_b1, b_w2, b_w3, p_b2, o_h, m_h, o_d, m_d, limit,
    DOT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Backward of y = x ⊙ exp(s(u)) + t(u), given dy and what else b_extra the scale s gets: [M, D] each.

    Returns dx, the gradient of what s is the tanh of (in DOT), and du.
    """
    b_y, b_t, b_h = hidden(b_u, b_w1, p_b1, None, o_h, m_h, MLP, DOT, FAST)
    b_tanh = product(b_h, b_w2, DOT)
    if p_b2 is not None:
        b_tanh += load_vector(p_b2, o_d, m_d, b_tanh.dtype)[None, :]
    b_tanh = tanh(b_tanh, FAST)
    b_dx = b_dy * tl.exp(limit * b_tanh)
    b_draw = ((b_dx * b_x + b_extra) * limit * (1 - b_tanh * b_tanh)).to(DOT)
    b_dh = product(b_draw, tl.trans(b_w2), DOT) + product(b_dy, tl.trans(b_w3), DOT)
    b_du = product(hidden_backward(b_dh, b_y, b_t, None, o_h, m_h, MLP), b_w1, DOT)
    return b_dx, b_draw, b_du
