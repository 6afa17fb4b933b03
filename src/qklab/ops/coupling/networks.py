"""The networks that move queries and keys, on tiles: forces, and the scale and shift of an affine map.

`reference.apply_force` and `reference.scale_and_shift` are the same in torch.
"""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qklab.ops.coupling.tiles import find_member, product

MLP = tl.constexpr(0)
GRADIENT = tl.constexpr(1)
LINEAR = tl.constexpr(2)


class NetworkPointers(NamedTuple):
    """Where one network's weights lie, [S, …] of members, or their gradients."""

    p_w1: Any  # [G or 1, h, D]
    p_b1: Any  # [h] or None
    p_w2: Any  # [G or 1, D or 2D, h] or None
    p_b2: Any  # [D or 2D] or None; the amplitudes [G or 1, h] of a gradient force


class MapParameters(NamedTuple):
    """The parameters of a map: a step and a key's force, or the two networks of an affine one."""

    p_step: Any  # [G or 1] or None
    step_per_head: Any  # 1 where every key head has its own, else 0
    limit: Any
    per_head: Any  # 1 where every key head has matrices of its own, else 0
    query: Any  # NetworkPointers or None
    key: Any  # NetworkPointers


class LoadedNetwork(NamedTuple):
    """One key head's network, its matrices loaded: [h, D] each, the outer ones transposed."""

    w1: Any
    w2: Any
    w3: Any  # of an affine map, whose w2 gives the scale and w3 the shift; else w1
    b1: Any  # loaded, or where to load them: `load_vector` takes both
    b2: Any
    o_h: Any  # [h]
    m_h: Any
    o_d: Any  # [D]
    m_d: Any


@triton.jit
def load_matrix(p_w, o_row, m_row, row, o_col, m_col, col, C):
    """[h, D] in DOT: entry (i, d) at i·row + d·col."""
    b_w = tl.load(p_w + o_row[:, None] * row + o_col[None, :] * col, mask=m_row[:, None] & m_col[None, :], other=0.0)
    return b_w.to(C.DOT)


@triton.jit
def store_matrix(p_w, b_w, o_row, m_row, row, o_col, m_col, col):
    p_w += o_row[:, None] * row + o_col[None, :] * col
    tl.store(p_w, b_w, mask=m_row[:, None] & m_col[None, :])


@triton.jit
def keep_bias(p_b, o_b, C):
    """p_b + o_b, or one zero in its place: a function's result cannot hold None."""
    return tl.zeros([1], C.WIDE) if p_b is None else p_b + o_b


@triton.constexpr_function
def is_given(bias):
    """Whether there is one, after `keep_bias`."""
    return bias.type.is_ptr() or bias.shape[0] > 1


@triton.jit
def load_vector(p_b, o_b, m_b, WIDE: tl.constexpr):
    """[·] in WIDE; p_b itself where it is loaded already, zeros where there is none.

    Backwards, biases are read where they are used: kept, each would take as many registers as half a tile.
    """
    if not is_given(p_b):
        b_b = tl.zeros([o_b.shape[0]], WIDE)
    elif p_b.type.is_ptr():
        b_b = tl.load(p_b + o_b, mask=m_b, other=0.0).to(WIDE)
    else:
        b_b = p_b
    return b_b


@triton.jit
def load_force(weights, i_w, o_h, o_d, m_d, C):
    """The force whose matrices are set i_w, hidden entries o_h: its matrices loaded."""
    m_h = o_h < C.WIDTH
    if C.FORCE == LINEAR:
        o_h, m_h = o_d, m_d  # its rows, too, are a head's entries
    b_w1 = load_matrix(weights.p_w1 + i_w * C.WIDTH * C.D, o_h, m_h, C.D, o_d, m_d, 1, C)
    b_w2, b1 = b_w1, keep_bias(weights.p_b1, find_member(C) * C.WIDTH, C)
    if C.FORCE == MLP:
        b_w2 = load_matrix(weights.p_w2 + i_w * C.WIDTH * C.D, o_h, m_h, 1, o_d, m_d, C.WIDTH, C)
    if C.FORCE == GRADIENT:
        b2 = keep_bias(weights.p_b2, i_w * C.WIDTH, C)
    else:
        b2 = keep_bias(weights.p_b2, find_member(C) * C.D, C)
    return LoadedNetwork(b_w1, b_w2, b_w1, b1, b2, o_h, m_h, o_d, m_d)


@triton.jit
def load_biases(n, C):
    """The same force, with its biases loaded, too."""
    b_b1 = load_vector(n.b1, n.o_h, n.m_h, C.WIDE)
    b_b2 = load_vector(n.b2, n.o_h, n.m_h, C.WIDE) if C.FORCE == GRADIENT else load_vector(n.b2, n.o_d, n.m_d, C.WIDE)
    return LoadedNetwork(n.w1, n.w2, n.w3, b_b1, b_b2, n.o_h, n.m_h, n.o_d, n.m_d)


@triton.jit
def load_affine(weights, i_w, o_h, o_d, m_d, C):
    """An affine map's network, set i_w: W1, and of the outer layer [2D, h] the scale's and the shift's half."""
    m_h = o_h < C.WIDTH
    b_w1 = load_matrix(weights.p_w1 + i_w * C.WIDTH * C.D, o_h, m_h, C.D, o_d, m_d, 1, C)
    p_w2 = weights.p_w2 + i_w * 2 * C.D * C.WIDTH
    b_w2 = load_matrix(p_w2, o_h, m_h, 1, o_d, m_d, C.WIDTH, C)
    b_w3 = load_matrix(p_w2 + C.D * C.WIDTH, o_h, m_h, 1, o_d, m_d, C.WIDTH, C)
    i_member = find_member(C)
    b1, b2 = keep_bias(weights.p_b1, i_member * C.WIDTH, C), keep_bias(weights.p_b2, i_member * 2 * C.D, C)
    return LoadedNetwork(b_w1, b_w2, b_w3, b1, b2, o_h, m_h, o_d, m_d)


@triton.jit
def tanh(b_x, FAST: tl.constexpr):
    if FAST:
        b_y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1)
    else:
        b_e = tl.exp(-2 * tl.abs(b_x))
        b_y = tl.where(b_x < 0, b_e - 1, 1 - b_e) / (1 + b_e)
    return b_y


@triton.jit
def hidden(b_u, n, FORCE: tl.constexpr, C):
    """y = z/2 for z = W1 u + b1, t = tanh y, and what the outer layer takes: silu(z) = y + y t, or of a gradient force
    a ⊙ σ(z), σ(z) = (1 + t)/2: [M, h] each."""
    b_y = 0.5 * product(b_u, tl.trans(n.w1), C.DOT)
    if is_given(n.b1):
        b_y += 0.5 * load_vector(n.b1, n.o_h, n.m_h, b_y.dtype)[None, :]
    b_t = tanh(b_y, C.FAST)
    b_h = b_y + b_y * b_t
    if FORCE == GRADIENT:
        b_h = load_vector(n.b2, n.o_h, n.m_h, b_y.dtype)[None, :] * (0.5 + 0.5 * b_t)
    return b_y, b_t, b_h


@triton.jit
def hidden_backward(b_dh, b_y, b_t, n, FORCE: tl.constexpr):
    """dz from the gradient dh of what the outer layer takes: silu′(z) = σ(z) (1 + y (1 − t)), σ′(z) = (1 − t²)/4."""
    if FORCE == GRADIENT:
        b_dz = b_dh * load_vector(n.b2, n.o_h, n.m_h, b_y.dtype)[None, :] * (0.25 - 0.25 * b_t * b_t)
    else:
        b_s = 0.5 + 0.5 * b_t
        b_dz = b_dh * (b_s + b_s * (b_y - b_y * b_t))
    return b_dz


@triton.jit
def outer(b_h, n, C):
    """What the outer layer makes of the hidden one: [M, D]."""
    if C.FORCE == GRADIENT:
        b_f = -product(b_h, n.w1, C.DOT)
    else:
        b_f = product(b_h, n.w2, C.DOT)
        if is_given(n.b2):
            b_f += load_vector(n.b2, n.o_d, n.m_d, b_f.dtype)[None, :]
    return b_f


@triton.jit
def outer_backward(b_dy, n, C):
    """dh of y = f(u), given dy: [M, h]."""
    return -product(b_dy, tl.trans(n.w1), C.DOT) if C.FORCE == GRADIENT else product(b_dy, tl.trans(n.w2), C.DOT)


@triton.jit
def force(b_u, n, C):
    """f(u) [M, D]: W2 silu(W1 u + b1) + b2; −W1ᵀ(a ⊙ σ(W1 u + b1)), a in place of b2; A u, A in place of W1."""
    if C.FORCE == LINEAR:
        b_f = product(b_u, tl.trans(n.w1), C.DOT)
    else:
        _, _, b_h = hidden(b_u, n, C.FORCE, C)
        b_f = outer(b_h, n, C)
    return b_f


@triton.jit
def force_backward(b_u, b_dy, n, VALUE: tl.constexpr, C):
    """du of y = f(u), given dy, and f(u) itself if VALUE (else dy): [M, D] each."""
    b_f = b_dy
    if C.FORCE == LINEAR:
        b_du = product(b_dy, n.w1, C.DOT)
        if VALUE:
            b_f = product(b_u, tl.trans(n.w1), C.DOT)
    else:
        b_y, b_t, b_h = hidden(b_u, n, C.FORCE, C)
        if VALUE:
            b_f = outer(b_h, n, C)
        b_dh = outer_backward(b_dy, n, C)
        b_du = product(hidden_backward(b_dh, b_y, b_t, n, C.FORCE), n.w1, C.DOT)
    return b_du, b_f


@triton.jit
def scale_and_shift(b_u, n, limit, C):
    """s = limit · tanh(W2 h + b2) and t = W3 h + b3 with h = silu(W1 u + b1): [M, D] each; n.b2 [2D] is b2, then b3."""
    _, _, b_h = hidden(b_u, n, MLP, C)
    b_h = b_h.to(C.DOT)
    b_s, b_t = product(b_h, n.w2, C.DOT), product(b_h, n.w3, C.DOT)
    if is_given(n.b2):
        b_s += load_vector(n.b2, n.o_d, n.m_d, b_s.dtype)[None, :]
        b_t += load_vector(n.b2 + C.D, n.o_d, n.m_d, b_s.dtype)[None, :]
    return limit * tanh(b_s, C.FAST), b_t


@triton.jit
def scale_and_shift_backward(b_u, b_x, b_dy, b_extra, n, limit, C):
    """Backward of y = x ⊙ exp(s(u)) + t(u), given dy and what else b_extra the scale s gets: [M, D] each.

    Returns dx, the gradient of what s is the tanh of (in DOT), and du.
    """
    b_y, b_t, b_h = hidden(b_u, n, MLP, C)
    b_tanh = product(b_h, n.w2, C.DOT)
    if is_given(n.b2):
        b_tanh += load_vector(n.b2, n.o_d, n.m_d, b_tanh.dtype)[None, :]
    b_tanh = tanh(b_tanh, C.FAST)
    b_dx = b_dy * tl.exp(limit * b_tanh)
    b_draw = ((b_dx * b_x + b_extra) * limit * (1 - b_tanh * b_tanh)).to(C.DOT)
    b_dh = product(b_draw, tl.trans(n.w2), C.DOT) + product(b_dy, tl.trans(n.w3), C.DOT)
    b_du = product(hidden_backward(b_dh, b_y, b_t, n, MLP), n.w1, C.DOT)
    return b_dx, b_draw, b_du
