"""The maps on a tile: what becomes of a group's mean query and of its key, and how gradients come back.

A map is four functions, which the kernels in `kernels` call, and a line in `MAPS`:

load(parameters, i_head, o_d, m_d, C): what the others take as `m`, loaded once for a program.
forward(b_q, b_k, m, C): q̄⁺, k⁺, and log E where C.STRETCH (else anything).
repeat(b_q, b_k, m, p_left, p_states, C): the forward again, for the backward. Gives q̄⁺ and k⁺, which only a norm needs,
    three tiles that the next function takes as `kept`, and log E.
backward(b_dq, b_dk, b_dlog, b_dstep, kept, m, tile, p_left, p_states, C): the gradients of q̄ and k, and b_dstep [BM]
    with the step's by its drifts added.

Of R query heads with one key, every map moves only the mean: q_r⁺ = (q_r − q̄) ⊙ E + q̄⁺. What the gradients of the
weights need is left at p_left for `gradients`. README.md derives all this.
"""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qklab.ops.coupling.networks import (
    force,
    force_backward,
    load_affine,
    load_biases,
    load_force,
    scale_and_shift,
    scale_and_shift_backward,
)
from qklab.ops.coupling.tiles import find_set, load_group_mean

EULER = tl.constexpr(0)
KICK_DRIFT = tl.constexpr(1)
LEAPFROG = tl.constexpr(2)
AFFINE = tl.constexpr(3)


class LoadedForce(NamedTuple):
    """A force and the step it acts for; `biased` has the biases in registers."""

    step: Any
    force: Any
    biased: Any


class LoadedStretch(NamedTuple):
    """The two networks of an affine map."""

    limit: Any
    query: Any
    key: Any


class Functions(NamedTuple):
    """What a map is to the kernels."""

    load: Any
    forward: Any
    repeat: Any
    backward: Any


@triton.jit
def load_forced(parameters, i_head, o_d, m_d, C):
    step = tl.load(parameters.p_step + find_set(i_head, C.G, parameters.step_per_head, C)).to(C.WIDE)
    i_w = find_set(i_head, C.G, parameters.per_head, C)
    network = load_force(parameters.key, i_w, tl.arange(0, C.HP), o_d, m_d, C)
    return LoadedForce(step, network, load_biases(network, C))


@triton.jit
def euler(b_q, b_k, m, C):
    """q⁺ = q + δ k ; k⁺ = k + δ f(q), the old q in both."""
    for _ in range(C.STEPS):
        b_f = force(b_q, m.biased, C)
        b_q, b_k = b_q + m.step * b_k, b_k + m.step * b_f
    return b_q, b_k, b_q


@triton.jit
def euler_repeat(b_q, b_k, m, p_left, p_states, C):
    """Keeps argument and key of every step, in DOT: in memory where there are several."""
    SIZE: tl.constexpr = C.BM * C.DP
    b_u, b_key = b_q.to(C.DOT), b_k.to(C.DOT)
    if C.STEPS > 1:
        tl.debug_barrier()
        for i_step in range(C.STEPS):
            tl.store(p_left + 2 * i_step * SIZE, b_q.to(C.DOT))  # the first, too: it is read again
            tl.store(p_states + i_step * SIZE, b_k.to(C.DOT))
            b_f = force(b_q, m.force, C)
            b_q, b_k = b_q + m.step * b_k, b_k + m.step * b_f
        tl.debug_barrier()
    else:
        if not C.LEAN:
            tl.store(p_left, b_u)
        if C.NORM:
            b_f = force(b_u, m.force, C)
            b_q, b_k = b_q + m.step * b_k, b_k + m.step * b_f
    return b_q, b_k, b_u, b_key, b_key, b_q


@triton.jit
def euler_backward(b_dq, b_dk, b_dlog, b_dstep, kept, m, tile, p_left, p_states, C):
    SIZE: tl.constexpr = C.BM * C.DP
    if C.LEAN:
        p_left -= SIZE  # of the one evaluation its gradient alone
    b_u, b_key = kept[0], kept[1]
    for i_back in range(C.STEPS):
        i_step = C.STEPS - 1 - i_back
        if C.STEPS > 1:
            b_key, b_u = tl.load(p_states + i_step * SIZE), tl.load(p_left + 2 * i_step * SIZE)
        b_dstep += tl.sum(b_dq * b_key.to(C.WIDE), 1)
        b_drift, b_dy = m.step * b_dq, b_dk.to(C.DOT)
        tl.store(p_left + (2 * i_step + 1) * SIZE, b_dy)
        b_du, _ = force_backward(b_u, b_dy, m.force, False, C)
        b_dq += m.step * b_du
        b_dk += b_drift
    return b_dq, b_dk, b_dstep


@triton.jit
def kick_and_drift(b_q, b_k, step, network, UNROLL: tl.constexpr, C):
    """STEPS times a kick and a drift; leapfrog's first kick is half a one, and its last half is left to the caller.

    UNROLL: only a loop without loops in it loads the next tiles while it computes.
    """
    if UNROLL:
        for i_step in tl.static_range(C.STEPS):
            share = 0.5 * step if C.KIND == LEAPFROG and i_step == 0 else step
            b_k += share * force(b_q, network, C)
            b_q += step * b_k
    else:
        for i_step in range(C.STEPS):
            share = step
            if C.KIND == LEAPFROG:
                share = tl.where(i_step == 0, 0.5 * step, step)
            b_k += share * force(b_q, network, C)
            b_q += step * b_k
    return b_q, b_k


@triton.jit
def shear(b_q, b_k, m, C):
    """k⁺ = k + δ f(q) ; q⁺ = q + δ k⁺; or k½ = k + δ/2 f(q) ; q⁺ = q + δ k½ ; k⁺ = k½ + δ/2 f(q⁺)."""
    b_q, b_k = kick_and_drift(b_q, b_k, m.step, m.biased, C.STEPS <= 8, C)
    if C.KIND == LEAPFROG:
        b_k += 0.5 * m.step * force(b_q, m.biased, C)
    return b_q, b_k, b_q


@triton.jit
def shear_repeat(b_q, b_k, m, p_left, p_states, C):
    """Keeps nothing but where it ended: the way back is undone."""
    b_q, b_k = kick_and_drift(b_q, b_k, m.step, m.force, False, C)
    b_end = b_k
    if C.KIND == LEAPFROG and C.NORM:
        b_end += 0.5 * m.step * force(b_q, m.force, C)
    return b_q, b_end, b_q, b_k, b_k.to(C.DOT), b_q


@triton.jit
def shear_backward(b_dq, b_dk, b_dlog, b_dstep, kept, m, tile, p_left, p_states, C):
    SIZE: tl.constexpr = C.BM * C.DP
    if C.LEAN:
        p_left -= 2 * SIZE
    b_q, b_k, b_key = kept[0], kept[1], kept[2]
    if C.KIND == LEAPFROG:
        b_u, b_dy = b_q.to(C.DOT), (0.5 * b_dk).to(C.DOT)
        tl.store(p_left + 2 * C.STEPS * SIZE, b_u)
        tl.store(p_left + (2 * C.STEPS + 1) * SIZE, b_dy)
        b_du, _ = force_backward(b_u, b_dy, m.force, False, C)
        b_dq += m.step * b_du
    for i_back in range(C.STEPS):
        i_step = C.STEPS - 1 - i_back
        if C.STEPS == 1:
            b_dstep += tl.sum(b_dq * b_key.to(C.WIDE), 1)
            b_u = load_group_mean(tile, C).to(C.DOT)
        else:  # undone in float32, which is as good as having kept every state
            b_dstep += tl.sum(b_dq * b_k, 1)
            b_q -= m.step * b_k
            b_u = b_q.to(C.DOT)
        b_dk += m.step * b_dq
        share = tl.full([], 1.0, C.WIDE)
        if C.KIND == LEAPFROG:
            share = tl.where(i_step == 0, 0.5, 1.0).to(C.WIDE)
        b_dy = (share * b_dk).to(C.DOT)
        if (not C.LEAN) | (i_step > 0):
            tl.store(p_left + 2 * i_step * SIZE, b_u)
            tl.store(p_left + (2 * i_step + 1) * SIZE, b_dy)
        b_du, b_f = force_backward(b_u, b_dy, m.force, C.STEPS > 1, C)
        b_dq += m.step * b_du
        if C.STEPS > 1:
            b_k -= share * m.step * b_f
    return b_dq, b_dk, b_dstep


@triton.jit
def load_stretch(parameters, i_head, o_d, m_d, C):
    i_w, o_h = find_set(i_head, C.G, parameters.per_head, C), tl.arange(0, C.HP)
    query = load_affine(parameters.query, i_w, o_h, o_d, m_d, C)
    return LoadedStretch(parameters.limit, query, load_affine(parameters.key, i_w, o_h, o_d, m_d, C))


@triton.jit
def stretch(b_q, b_k, m, C):
    """q⁺ = q ⊙ exp(s1(k)) + t1(k) ; k⁺ = k ⊙ exp(s2(q⁺)) + t2(q⁺); log E = Σ s1."""
    b_log = tl.zeros([C.BM, C.DP], C.WIDE)
    for _ in range(C.STEPS):
        b_s, b_t = scale_and_shift(b_k, m.query, m.limit, C)
        b_q = b_q * tl.exp(b_s) + b_t
        if C.R > 1:
            b_log += b_s
        b_s, b_t = scale_and_shift(b_q, m.key, m.limit, C)
        b_k = b_k * tl.exp(b_s) + b_t
    return b_q, b_k, b_log


@triton.jit
def stretch_repeat(b_q, b_k, m, p_left, p_states, C):
    """Keeps the states before each step: in memory where there are several."""
    SIZE: tl.constexpr = C.BM * C.DP
    b_q_end, b_k_end = b_q, b_k
    b_log = tl.zeros([C.BM, C.DP], C.WIDE)
    if C.STEPS > 1:
        tl.debug_barrier()
    if C.STEPS > 1 or C.NORM or C.R > 1:
        for i_step in range(C.STEPS):
            if C.STEPS > 1:
                tl.store(p_states + (2 * i_step) * SIZE, b_q_end)
                tl.store(p_states + (2 * i_step + 1) * SIZE, b_k_end)
            b_s, b_t = scale_and_shift(b_k_end, m.query, m.limit, C)
            b_q_end = b_q_end * tl.exp(b_s) + b_t
            if C.R > 1:
                b_log += b_s
            b_s, b_t = scale_and_shift(b_q_end, m.key, m.limit, C)
            b_k_end = b_k_end * tl.exp(b_s) + b_t
    if C.STEPS > 1:
        tl.debug_barrier()
    return b_q_end, b_k_end, b_q, b_k, b_k, b_log


@triton.jit
def stretch_backward(b_dq, b_dk, b_dlog, b_dstep, kept, m, tile, p_left, p_states, C):
    """Leaves of each step what both networks took and the gradients of their raw scales and shifts, the key's first."""
    SIZE: tl.constexpr = C.BM * C.DP
    b_q, b_k = kept[0], kept[1]
    for i_back in range(C.STEPS):
        i_step = C.STEPS - 1 - i_back
        if C.STEPS > 1:
            b_q = tl.load(p_states + (2 * i_step) * SIZE)
            b_k = tl.load(p_states + (2 * i_step + 1) * SIZE)
        b_s, b_t = scale_and_shift(b_k, m.query, m.limit, C)
        b_moved = b_q * tl.exp(b_s) + b_t
        p_key, p_query = p_left + 6 * i_step * SIZE, p_left + (6 * i_step + 3) * SIZE
        tl.store(p_key, b_moved.to(C.DOT))
        tl.store(p_key + 2 * SIZE, b_dk.to(C.DOT))
        b_none = tl.zeros([C.BM, C.DP], C.WIDE)
        b_dk, b_draw, b_du = scale_and_shift_backward(b_moved, b_k, b_dk, b_none, m.key, m.limit, C)
        tl.store(p_key + SIZE, b_draw)
        b_dq += b_du
        tl.store(p_query, b_k.to(C.DOT))
        tl.store(p_query + 2 * SIZE, b_dq.to(C.DOT))
        b_dq, b_draw, b_du = scale_and_shift_backward(b_k, b_q, b_dq, b_dlog, m.query, m.limit, C)
        tl.store(p_query + SIZE, b_draw)
        b_dk += b_du
    return b_dq, b_dk, b_dstep


class KernelMap(NamedTuple):
    """A map as the kernels know it."""

    functions: Functions
    variant: tl.constexpr  # C.KIND: which of the maps that share these functions
    stretches: bool = False  # C.STRETCH: whether E is not 1


MAPS: dict[str, KernelMap] = {}
SHEAR = Functions(load_forced, shear, shear_repeat, shear_backward)
MAPS["euler"] = KernelMap(Functions(load_forced, euler, euler_repeat, euler_backward), EULER)
MAPS["symplectic-euler"] = MAPS["linear"] = KernelMap(SHEAR, KICK_DRIFT)
MAPS["leapfrog"] = KernelMap(SHEAR, LEAPFROG)
MAPS["affine"] = KernelMap(Functions(load_stretch, stretch, stretch_repeat, stretch_backward), AFFINE, stretches=True)
