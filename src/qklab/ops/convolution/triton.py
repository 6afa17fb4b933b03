"""The convolution in one kernel forwards and two backwards.

Programs are persistent: each keeps to one head of one member, whose weights it loads once, and goes through some of its
tiles, a tile being a block of tokens of one row. Programs of all heads lie side by side and take the same tokens at the
same time, so that what one head needs of another is found in the cache. Prefixes: p_ pointer, o_ offsets, m_ mask, b_
block of values, i_ index; capitals are known when a kernel is compiled.
"""

# Triton's language is not Python's: its types mean nothing to a checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qklab.ops.coupling.launch import DTYPES, Launch, make_heads, make_row_major, pad_width, run
from qklab.ops.coupling.tiles import INTERPRETED, Heads, inverse_rms, product


class ConvolutionConstants(NamedTuple):
    """What a kernel is compiled for."""

    H: Any  # query heads
    G: Any  # key heads
    R: Any  # query heads of each
    D: Any  # entries of a head
    DP: Any  # and of its tile, a power of two
    MEMBERS: Any
    DOT: Any  # dtype of the products' operands
    WIDE: Any  # dtype of all else
    BM: Any  # tokens of a block
    SLICE: Any  # entries of a head whose gradients a program of the last kernel has
    STAGES: Any


class Places(NamedTuple):
    """Every token's place in its own text [B or 1, T], and the stride of a row."""

    p: Any
    batch: Any


class Partners(NamedTuple):
    """The heads that one meets in its mean, one after the other: a query its key, a key its queries."""

    heads: Heads
    count: Any


@triton.jit
def find_share(rows, T, C):
    """This program's unit, which is a head of a member, its first tile and the one after its last, and its own number
    among those of its unit."""
    units: tl.constexpr = C.MEMBERS * (C.H + C.G)
    slices: tl.constexpr = C.DP // C.SLICE
    i_program, programs = tl.program_id(0) // (units * slices), tl.num_programs(0) // (units * slices)
    tiles = rows * tl.cdiv(T, C.BM)
    count = tl.cdiv(tiles, programs)
    return tl.program_id(0) % units, i_program * count, tl.minimum((i_program + 1) * count, tiles), i_program


@triton.jit
def find_tokens(i_tile, i_unit, rows, T, C):
    """The row of [B, T, …] that a tile lies in, and its tokens [BM], some of which may not exist."""
    blocks = tl.cdiv(T, C.BM)
    i_row = i_unit // (C.H + C.G) * rows + i_tile // blocks
    return i_row.to(tl.int64), i_tile % blocks * C.BM + tl.arange(0, C.BM)


@triton.jit
def find_group(i_head, C):
    """Whether this is a query head, and the group it is of."""
    return i_head < C.H, tl.where(i_head < C.H, i_head // C.R, i_head - C.H)


@triton.jit
def find_own(q, k, i_head, C):
    """A head of [q ; k]."""
    query, i_g = find_group(i_head, C)
    p_own = tl.where(query, q.p + i_head * q.head, k.p + i_g * k.head)
    return Heads(p_own, tl.where(query, q.batch, k.batch), tl.where(query, q.token, k.token), 0)


@triton.jit
def find_partners(q, k, i_head, C):
    query, i_g = find_group(i_head, C)
    p_first = tl.where(query, k.p + i_g * k.head, q.p + i_g * C.R * q.head)
    heads = Heads(p_first, tl.where(query, k.batch, q.batch), tl.where(query, k.token, q.token), q.head)
    return Partners(heads, tl.where(query, 1, C.R))


@triton.jit
def load_tokens(x, i_row, o_t, m_t, o_d, C):
    """Entries o_d [N] of a head's tokens o_t [BM]: [BM, N], zeros where m_t or an entry is not."""
    p_x = x.p + i_row * x.batch + o_t.to(tl.int64)[:, None] * x.token + o_d[None, :]
    # tokens come three times, shifted: from the second time on out of the multiprocessor's own cache
    return tl.load(p_x, mask=m_t[:, None] & (o_d < C.D)[None, :], other=0.0, cache_modifier=".ca")


@triton.jit
def store_tokens(x, i_row, o_t, T, o_d, b_x, C):
    p_x = x.p + i_row * x.batch + o_t.to(tl.int64)[:, None] * x.token + o_d[None, :]
    tl.store(p_x, b_x.to(x.p.dtype.element_ty), mask=(o_t < T)[:, None] & (o_d < C.D)[None, :])


@triton.jit
def sum_partners(partners, i_row, o_t, T, o_d, C):
    """[BM, N] in WIDE."""
    x = partners.heads
    b_sum = load_tokens(x, i_row, o_t, o_t < T, o_d, C).to(C.WIDE)
    # within a condition loads do not run ahead, so that shared memory holds one partner's and no more
    if partners.count > 1:
        for i_r in tl.static_range(1, C.R):
            other = Heads(x.p + i_r * x.head, x.batch, x.token, 0)
            b_sum += load_tokens(other, i_row, o_t, o_t < T, o_d, C).to(C.WIDE)
    return b_sum


@triton.jit
def load_tap(p_weight, i_unit, i_back, o_in, C):
    """The rows o_in [N] of a head's matrix for tokens i_back before: [N, DP]."""
    o_out = tl.arange(0, C.DP)
    o_row = (i_unit * 3 + i_back) * C.D + o_in
    m = (o_in < C.D)[:, None] & (o_out < C.D)[None, :]
    return tl.load(p_weight + o_row[:, None] * C.D + o_out[None, :], mask=m, other=0.0)


@triton.jit
def load_temperature(p_temperature, i_unit, C):
    """τ of a key head, 1 of a query head."""
    query, i_g = find_group(i_unit % (C.H + C.G), C)
    return tl.load(p_temperature + i_unit // (C.H + C.G) * C.G + i_g, mask=not query, other=1.0).to(C.WIDE)


@triton.jit
def load_bias(p_bias, i_unit, C):
    o_d = tl.arange(0, C.DP)
    return tl.load(p_bias + i_unit * C.D + o_d, mask=o_d < C.D, other=0.0).to(C.WIDE)


@triton.jit
def convolve_tokens(own, partners, places, b_w0, b_w1, b_w2, b_bias, i_row, o_t, T, C):
    """s [BM, DP] in WIDE: the convolution and the mean, before the norm."""
    o_d = tl.arange(0, C.DP)
    b_place = tl.load(places.p + i_row * places.batch + o_t, mask=o_t < T, other=0)
    b_u = load_tokens(own, i_row, o_t, o_t < T, o_d, C)
    b_s = product(b_u, b_w0, C.DOT) + b_bias[None, :]
    # chosen by place after the product, so that loads wait for nothing
    b_last = load_tokens(own, i_row, o_t - 1, (o_t >= 1) & (o_t <= T), o_d, C)
    b_s += tl.where((b_place >= 1)[:, None], product(b_last, b_w1, C.DOT), 0.0)
    b_first = load_tokens(own, i_row, o_t - 2, (o_t >= 2) & (o_t <= T + 1), o_d, C)
    b_s += tl.where((b_place >= 2)[:, None], product(b_first, b_w2, C.DOT), 0.0)
    b_partners = sum_partners(partners, i_row, o_t, T, o_d, C)
    return b_s + (b_u.to(C.WIDE) + b_partners / partners.count) / 2


@triton.jit
def convolution_kernel(
    q,  # Heads
    k,
    places,
    p_weight,  # [S, H + G, 3, D, D] in DOT
    p_bias,  # [S, H + G, D]
    p_temperature,  # [S, G]
    q_out,  # Heads
    k_out,
    eps,
    rows,  # of a member
    T,
    C: tl.constexpr,  # ConvolutionConstants
):
    i_unit, first, last, _ = find_share(rows, T, C)
    i_head = i_unit % (C.H + C.G)
    own, partners, out = find_own(q, k, i_head, C), find_partners(q, k, i_head, C), find_own(q_out, k_out, i_head, C)
    o_d = tl.arange(0, C.DP)
    b_w0, b_w1 = load_tap(p_weight, i_unit, 0, o_d, C), load_tap(p_weight, i_unit, 1, o_d, C)
    b_w2, b_bias = load_tap(p_weight, i_unit, 2, o_d, C), load_bias(p_bias, i_unit, C)
    b_temperature = load_temperature(p_temperature, i_unit, C)
    for i_tile in tl.range(first, last, num_stages=C.STAGES):
        i_row, o_t = find_tokens(i_tile, i_unit, rows, T, C)
        b_s = convolve_tokens(own, partners, places, b_w0, b_w1, b_w2, b_bias, i_row, o_t, T, C)
        b_y = b_s * (b_temperature * inverse_rms(b_s, eps, C))[:, None]
        store_tokens(out, i_row, o_t, T, o_d, b_y, C)


@triton.jit
def norm_backward_kernel(
    q,  # as in convolution_kernel
    k,
    places,
    p_weight,
    p_bias,
    p_temperature,
    dq_out,  # Heads, gradients of the outputs
    dk_out,
    ds_q,  # Heads: the gradients of s, heads of queries before those of keys
    ds_k,
    p_sums,  # [programs, S, H + G, D + 1] in WIDE: this program's share of the gradients of bias and temperature
    eps,
    rows,
    T,
    C: tl.constexpr,
):
    """Repeats the convolution and goes back through the norm."""
    i_unit, first, last, i_program = find_share(rows, T, C)
    i_head = i_unit % (C.H + C.G)
    own, partners = find_own(q, k, i_head, C), find_partners(q, k, i_head, C)
    dout, ds = find_own(dq_out, dk_out, i_head, C), find_own(ds_q, ds_k, i_head, C)
    o_d = tl.arange(0, C.DP)
    b_w0, b_w1 = load_tap(p_weight, i_unit, 0, o_d, C), load_tap(p_weight, i_unit, 1, o_d, C)
    b_w2, b_bias = load_tap(p_weight, i_unit, 2, o_d, C), load_bias(p_bias, i_unit, C)
    b_temperature = load_temperature(p_temperature, i_unit, C)
    b_dbias, b_dtemperature = tl.zeros([C.BM, C.DP], C.WIDE), tl.zeros([C.BM], C.WIDE)
    for i_tile in tl.range(first, last, num_stages=C.STAGES):
        i_row, o_t = find_tokens(i_tile, i_unit, rows, T, C)
        b_s = convolve_tokens(own, partners, places, b_w0, b_w1, b_w2, b_bias, i_row, o_t, T, C)
        b_dy = load_tokens(dout, i_row, o_t, o_t < T, o_d, C).to(C.WIDE)
        b_r = inverse_rms(b_s, eps, C)
        b_unit = b_s * b_r[:, None]
        b_along = tl.sum(b_dy * b_unit, 1)
        b_ds = (b_temperature * b_r)[:, None] * (b_dy - b_unit * (b_along / C.D)[:, None])
        b_ds = tl.where((o_t < T)[:, None], b_ds, 0.0)  # without eps and bias a token that is not there gives NaN
        store_tokens(ds, i_row, o_t, T, o_d, b_ds, C)
        b_dbias += b_ds
        b_dtemperature += tl.where(o_t < T, b_along, 0.0)

    p_sums += (i_program * C.MEMBERS * (C.H + C.G) + i_unit).to(tl.int64) * (C.D + 1)
    tl.store(p_sums + o_d, tl.sum(b_dbias, 0), mask=o_d < C.D)
    tl.store(p_sums + C.D, tl.sum(b_dtemperature, 0))


@triton.jit
def load_later(ds, places, i_row, o_t, i_back: tl.constexpr, T, C):
    """The gradients [BM, DP] of what the tokens o_t are part of i_back tokens later, in their own text."""
    o_later = o_t + i_back
    b_place = tl.load(places.p + i_row * places.batch + o_later, mask=o_later < T, other=-1)
    return load_tokens(ds, i_row, o_later, b_place >= i_back, tl.arange(0, C.DP), C)


@triton.jit
def convolution_backward_kernel(
    q,  # as in norm_backward_kernel
    k,
    places,
    p_weight,
    ds_q,
    ds_k,
    dq,  # Heads
    dk,
    p_dweight,  # [programs, S, H + G, 3, D, D] in WIDE: this program's share
    rows,
    T,
    C: tl.constexpr,
):
    """The gradients of a slice of a head's entries, and of the rows of its matrices that these meet."""
    i_unit, first, last, i_program = find_share(rows, T, C)
    i_head = i_unit % (C.H + C.G)
    slices: tl.constexpr = C.DP // C.SLICE
    own, out, ds = find_own(q, k, i_head, C), find_own(dq, dk, i_head, C), find_own(ds_q, ds_k, i_head, C)
    partners = find_partners(ds_q, ds_k, i_head, C)
    among = tl.where(i_head < C.H, C.R, 1)  # how many the mean is of that a partner takes
    o_d = tl.program_id(0) // (C.MEMBERS * (C.H + C.G)) % slices * C.SLICE + tl.arange(0, C.SLICE)
    b_w0, b_w1 = load_tap(p_weight, i_unit, 0, o_d, C), load_tap(p_weight, i_unit, 1, o_d, C)
    b_w2 = load_tap(p_weight, i_unit, 2, o_d, C)
    b_dw0 = tl.zeros([C.SLICE, C.DP], C.WIDE)
    b_dw1, b_dw2 = tl.zeros([C.SLICE, C.DP], C.WIDE), tl.zeros([C.SLICE, C.DP], C.WIDE)
    for i_tile in tl.range(first, last, num_stages=C.STAGES):
        i_row, o_t = find_tokens(i_tile, i_unit, rows, T, C)
        b_u = tl.trans(load_tokens(own, i_row, o_t, o_t < T, o_d, C))
        b_ds0 = load_later(ds, places, i_row, o_t, 0, T, C)
        b_ds1 = load_later(ds, places, i_row, o_t, 1, T, C)
        b_ds2 = load_later(ds, places, i_row, o_t, 2, T, C)
        b_du = product(b_ds0, tl.trans(b_w0), C.DOT)
        b_du += product(b_ds1, tl.trans(b_w1), C.DOT)
        b_du += product(b_ds2, tl.trans(b_w2), C.DOT)
        b_dw0 += product(b_u, b_ds0, C.DOT)
        b_dw1 += product(b_u, b_ds1, C.DOT)
        b_dw2 += product(b_u, b_ds2, C.DOT)
        b_own = b_ds0 if slices == 1 else load_tokens(ds, i_row, o_t, o_t < T, o_d, C)
        b_du += (b_own.to(C.WIDE) + sum_partners(partners, i_row, o_t, T, o_d, C) / among) / 2
        store_tokens(out, i_row, o_t, T, o_d, b_du, C)

    o_out = tl.arange(0, C.DP)
    m = (o_d < C.D)[:, None] & (o_out < C.D)[None, :]
    p_dweight += (i_program * C.MEMBERS * (C.H + C.G) + i_unit).to(tl.int64) * (3 * C.D * C.D)
    p_dweight += o_d[:, None] * C.D + o_out[None, :]
    tl.store(p_dweight, b_dw0, mask=m)
    tl.store(p_dweight + C.D * C.D, b_dw1, mask=m)
    tl.store(p_dweight + 2 * C.D * C.D, b_dw2, mask=m)


def plan_launch(DP: int, itemsize: int) -> Launch:
    """The launch for heads of DP padded entries and operands of so many bytes; README.md has what each takes."""
    if itemsize > 2:
        return Launch(block=32, warps=8, programs=1, slice=min(DP, 32))
    if DP > 64:
        return Launch(warps=8, stages=2, programs=1)
    return Launch(stages=2, programs=2 if DP == 64 else 4, slice=DP)


class Plan(NamedTuple):
    """How a kernel is launched: with so many programs for every head of a member, and in all."""

    how: Launch
    programs: int
    grid: int
    constants: ConvolutionConstants


class Convolution:
    """What the launches of one call share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        weight: Tensor,
        bias: Tensor,
        temperature: Tensor,
        positions: Tensor,
        eps: float,
        precision: torch.dtype,
        members: int,
    ):
        self.q, self.k, self.eps, self.precision, self.members = q, k, eps, precision, members
        self.B, self.T, self.H, self.D = q.shape
        self.G = k.shape[2]
        self.units = members * (self.H + self.G)
        self.left = torch.promote_types(q.dtype, precision)  # of what one kernel leaves for the next
        self.wide = torch.promote_types(self.left, torch.float32)
        positions = make_row_major(positions)
        self.places = Places(positions, positions.stride(0) if positions.shape[0] > 1 else 0)
        self.weight = weight.to(precision).contiguous()
        self.vectors = bias.contiguous(), temperature.contiguous()

    def plan(self, sliced: bool = False) -> Plan:
        DP = pad_width(self.D)
        how = plan_launch(DP, self.precision.itemsize)
        width = how.slice if sliced else DP
        bare = ConvolutionConstants(
            self.H, self.G, self.H // self.G, self.D, DP, self.members, DTYPES[self.precision], DTYPES[self.wide],
            how.block, width, how.stages,
        )  # fmt: skip
        gpu = torch.cuda.get_device_properties(self.q.device).multi_processor_count if self.q.is_cuda else 16
        tiles = self.B // self.members * triton.cdiv(self.T, how.block)
        each = self.units * (DP // width)
        programs = max(1, min(tiles, gpu * how.programs // each))
        # compiled code wants its numbers marked as constants one by one, the interpreter wants numbers
        constants = bare if INTERPRETED else ConvolutionConstants(*map(tl.constexpr, bare))
        return Plan(how, programs, programs * each, constants)

    def launch(self, kernel: Any, plan: Plan, *arguments: Any) -> None:
        inputs = make_heads(make_row_major(self.q)), make_heads(make_row_major(self.k)), self.places, self.weight
        size = self.B // self.members, self.T
        run(kernel, (plan.grid, 1), plan.how, *inputs, *arguments, *size, plan.constants)


def run_convolution(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """The outputs of `api.convolve_heads`."""
    call = Convolution(q, k, *others)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if q_out.numel():
        outputs = make_heads(q_out), make_heads(k_out)
        call.launch(convolution_kernel, call.plan(), *call.vectors, *outputs, call.eps)
    return q_out, k_out


def run_convolution_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, weight, bias and temperature."""
    call = Convolution(q, k, *others)
    weight, bias, temperature = others[:3]
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    if not dq.numel():
        return dq, dk, torch.zeros_like(weight), torch.zeros_like(bias), torch.zeros_like(temperature)
    heads = call.H + call.G
    ds = q.new_empty((call.B, call.T, heads, call.D), dtype=call.left)
    gradients = tuple(map(make_heads, ds.split([call.H, call.G], 2)))
    plan = call.plan()
    sums = q.new_empty((plan.programs, call.members, heads, call.D + 1), dtype=call.wide)
    given = make_heads(make_row_major(dq_out)), make_heads(make_row_major(dk_out))
    call.launch(norm_backward_kernel, plan, *call.vectors, *given, *gradients, sums, call.eps)
    plan = call.plan(sliced=True)
    dweight = q.new_empty((plan.programs, weight.numel()), dtype=call.wide)
    call.launch(convolution_backward_kernel, plan, *gradients, make_heads(dq), make_heads(dk), dweight)
    return (
        dq,
        dk,
        dweight.sum(0).view(weight.shape).to(weight.dtype),
        sums[..., :-1].sum(0).view(bias.shape).to(bias.dtype),
        sums[:, :, call.H :, -1].sum(0).view(temperature.shape).to(temperature.dtype),
    )
