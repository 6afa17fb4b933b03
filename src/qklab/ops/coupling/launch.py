"""Launches of the coupling kernels: which blocks, how many programs, and where each weight and its gradient lies."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qklab.ops.coupling import gradients, kernels, uncoupled
from qklab.ops.coupling.api import is_per_head, lay_out_gradients
from qklab.ops.coupling.maps import MAPS
from qklab.ops.coupling.networks import GRADIENT, LINEAR, MLP, MapParameters, NetworkPointers
from qklab.ops.coupling.tiles import INTERPRETED, AngleTables, Constants, Gains, Heads

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

WORKSPACE = 2**28  # bytes that a backward may take for a moment


@dataclass(frozen=True)
class Launch:
    """How a kernel runs: tokens a block, warps, pipeline stages, programs on a multiprocessor."""

    block: int = 64
    warps: int = 4
    stages: int = 1
    programs: int = 2
    registers: int | None = None  # the most a thread may have; by default the compiler's choice
    hold: bool = False  # keep a block's angles in registers while its heads go by
    slice: int = 64  # hidden entries whose weight gradients a program sums


def choose_launch(direction: str, kind: str, DP: int, HP: int, plain: bool) -> Launch:
    """The launch for heads of DP and networks of HP padded entries: of the forward, of the backward, and of the weight
    gradients, whose block is the backward's. A `plain` call has one step and no norm."""
    if kind == "uncoupled":
        return Launch()
    if kind == "affine":
        if direction != "backward":
            return Launch()
        return Launch(block=32, stages=2) if plain else Launch(block=16)  # more does not fit into shared memory
    if DP * HP > 64 * 64:
        wide = {
            "forward": Launch(block=32, stages=2, hold=True),
            "backward": Launch(block=32, warps=8, stages=2, programs=1, hold=True),
            "gradients": Launch(),
        }
        return wide[direction]
    return Launch(stages=2) if direction == "backward" else Launch(stages=3, hold=True)


def run(kernel: Any, grid: tuple[int, int], how: Launch, *arguments: Any) -> None:
    kernel[grid](*arguments, num_warps=how.warps, maxnreg=how.registers)


def pad_width(width: int) -> int:
    """The power of two that a tile's side has; products take no less than 16."""
    return max(16, triton.next_power_of_2(width))


def make_row_major(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def make_heads(x: Tensor) -> Heads:
    return Heads(x, x.stride(0), x.stride(1), x.stride(2))


class WorkspacePlan(NamedTuple):
    """What a map's backward leaves for the gradients of its weights, and keeps for itself."""

    tiles: int  # of a tile
    units: int  # that a program of the second launch may take by themselves
    states: int = 0  # tiles of a program's states
    lean: bool = False  # nothing of the first evaluation that q and dk hold anyway
    evaluations: int = 0  # with argument and gradient


class Call:
    """What the launches of one call share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        angles: list[Tensor],
        weights: list[Tensor],
        names: str,
        kind: str,
        steps: int,
        scale_limit: float,
        eps: float | None,
        turn_key: bool,
        precision: torch.dtype,
        members: int | None,
    ):
        self.q, self.k, self.kind, self.limit = make_row_major(q), make_row_major(k), kind, scale_limit
        self.T, self.H, self.D = q.shape[1:]
        self.G = k.shape[2]
        self.members = members or 1
        self.rows = q.shape[0] // self.members * self.T  # of a member
        self.steps, self.precision, self.eps = steps, precision, eps
        self.plain = steps == 1 and eps is None
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.weights = {name: w.contiguous() for name, w in zip(names.split(","), weights, strict=True)}
        self.gradient_rows, spans = lay_out_gradients(weights, self.G, members)
        self.starts = {name: start for name, (start, _) in zip(self.weights, spans, strict=True)}
        self.total = max((stop for _, stop in spans), default=0)
        self.angles = self.place_angles(angles)
        inner = self.weights["inner0"]
        self.per_head = int(is_per_head(inner, members))
        self.step_per_head = int("step" in self.weights and is_per_head(self.weights["step"], members))
        self.DP, self.HP = pad_width(self.D), pad_width(inner.shape[-2])
        # where key heads have weights, or steps, of their own, a program keeps to one
        self.headed = self.gradient_rows > self.members
        two_layers = MLP if "outer0" in self.weights else LINEAR
        self.force = GRADIENT if "amplitude0" in self.weights else two_layers
        self.map = MAPS.get(kind)  # uncoupled has kernels of its own
        self.stretches = self.map is not None and self.map.stretches
        self.shape: dict[str, Any] = {
            "G": self.G, "R": self.H // self.G, "D": self.D, "DP": self.DP, "WIDTH": inner.shape[-2], "HP": self.HP,
            "PAIRS": angles[0].shape[-1] if angles else 0, "TURN_K": turn_key, "NORM": eps is not None, "STEPS": steps,
            "KIND": self.map.variant.value if self.map else -1, "FORCE": self.force.value, "STRETCH": self.stretches,
            "HEADED": self.headed, "MEMBERS": self.members > 1, "DOT": DTYPES[precision], "WIDE": DTYPES[self.wide],
            # rounding to 16 bits hides what the GPU's own tanh leaves out
            "FAST": q.is_cuda and precision.itemsize == 2,
        }  # fmt: skip

    def place_angles(self, angles: list[Tensor]) -> AngleTables:
        """One table may serve all rows."""
        if not angles:
            return AngleTables(None, None, 0, 0)
        cos, sin = (make_row_major(angle) for angle in angles)
        if cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        return AngleTables(cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))

    def constants(self, how: Launch, **changes: Any) -> Constants:
        """What a kernel that is launched like this is compiled for."""
        even = self.T % how.block == 0
        full = even and self.map is not None and not self.stretches
        blocks = {"BM": how.block, "EVEN": even, "FULL": full, "HOLD": full and how.hold, "STAGES": how.stages}
        bare = Constants(**self.shape | blocks | changes)
        # compiled code wants its numbers marked as constants one by one, the interpreter wants numbers
        return bare if INTERPRETED else Constants(*map(tl.constexpr, bare))

    def network(self, i: int) -> NetworkPointers:
        w = self.weights
        last = w.get(f"outer_bias{i}", w.get(f"amplitude{i}"))
        return NetworkPointers(w[f"inner{i}"], w.get(f"inner_bias{i}"), w.get(f"outer{i}"), last)

    def offsets(self, i: int) -> NetworkPointers:
        """Where a network's gradients begin in a row of all."""
        s = self.starts
        last = s.get(f"outer_bias{i}", s.get(f"amplitude{i}", 0))
        return NetworkPointers(s[f"inner{i}"], s.get(f"inner_bias{i}", 0), s.get(f"outer{i}", 0), last)

    def parameters(self, query: NetworkPointers | None, key: NetworkPointers) -> MapParameters:
        step, limit = self.weights.get("step"), self.limit if self.stretches else None
        return MapParameters(step, self.step_per_head, limit, self.per_head, query, key)

    def inputs(self) -> tuple[Any, ...]:
        """The first arguments of `forward_kernel` and `backward_kernel`."""
        networks = (self.network(0), self.network(1)) if self.stretches else (None, self.network(0))
        gains = Gains(self.weights.get("query_gain"), self.weights.get("key_gain"))
        return make_heads(self.q), make_heads(self.k), self.angles, self.parameters(*networks), gains

    def size(self) -> tuple[float, int, int]:
        return self.eps or 0.0, self.rows, self.T

    def share_programs(self, how: Launch) -> int:
        """Programs of a member, all of which run at a time."""
        gpu = torch.cuda.get_device_properties(self.q.device).multi_processor_count if self.q.is_cuda else 2
        return gpu * how.programs // self.members

    def head_grid(self, how: Launch, heads: int) -> int:
        """Programs of a member: a whole number for each head, no more than there are blocks."""
        blocks = triton.cdiv(self.rows, how.block)
        return heads * max(1, min(blocks, self.share_programs(how) // heads))

    def tile_grid(self, how: Launch, tiles: int, slices: int = 1) -> int:
        """Programs (by `slices` at a time) for so many tiles of a member, a tile being a block of one key head; a whole
        number for each head if headed."""
        programs = max(1, min(tiles, self.share_programs(how) // slices))
        return self.G * max(1, programs // self.G) if self.headed else programs

    def sum_programs(self, sums: Tensor, heads: int) -> Tensor:
        """[launches, S, programs, total] → [S · (G or 1), total]: programs of one key head lie `heads` rows apart."""
        sums = sums.transpose(0, 1).flatten(1, 2)
        if not self.headed:
            return sums.sum(1)
        return sums.unflatten(1, (-1, self.G, heads // self.G)).sum((1, 3)).flatten(0, 1)

    def plan_workspace(self) -> WorkspacePlan:
        if self.stretches:
            return WorkspacePlan(tiles=6 * self.steps, units=self.steps, states=2 * self.steps)
        euler = self.kind == "euler"
        lean = self.q.dtype == self.precision and self.H == self.G and not (euler and self.steps > 1)
        left = self.steps + (self.kind == "leapfrog") - lean
        tiles = 1 if lean and euler else 2 * left
        return WorkspacePlan(tiles, max(left, 1), self.steps if euler else 0, lean, left)


def forward(q: Tensor, k: Tensor, *choices: Any) -> tuple[Tensor, Tensor]:
    """The outputs of `api.couple`."""
    call = Call(q, k, *choices)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if not call.rows:
        return q_out, k_out
    how = choose_launch("forward", call.kind, call.DP, call.HP, call.plain)
    if call.map is None:
        for i, (x, out) in enumerate(((call.q, q_out), (call.k, k_out))):
            *inputs, C = uncoupled_arguments(call, how, i, x)
            grid = call.head_grid(how, x.shape[2]), call.members
            run(uncoupled.uncoupled_forward_kernel, grid, how, *inputs, out, *call.size(), C)
    else:
        grid = call.tile_grid(how, triton.cdiv(call.rows, how.block) * call.G), call.members
        arguments = (*call.inputs(), q_out, k_out, *call.size(), call.map.functions, call.constants(how))
        run(kernels.forward_kernel, grid, how, *arguments)
    return q_out, k_out


def backward(dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, *choices: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and the weights' gradients in a row [S · (G or 1), total]."""
    call = Call(q, k, *choices)
    dq_out, dk_out = make_row_major(dq_out), make_row_major(dk_out)
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    if not call.rows:
        return dq, dk, q.new_zeros((call.gradient_rows, call.total), dtype=call.wide)
    how = choose_launch("backward", call.kind, call.DP, call.HP, call.plain)
    if call.map is not None:
        return dq, dk, coupled_backward(call, how, dq_out, dk_out, dq, dk)
    of_queries = uncoupled_backward(call, how, 0, call.q, dq_out, dq)
    return dq, dk, of_queries + uncoupled_backward(call, how, 1, call.k, dk_out, dk)


class Workspace:
    """A backward in two launches: one gives dq and dk and leaves tiles, a second sums the weights' gradients from them.

    What is left takes at most WORKSPACE bytes: beyond, both run for some blocks at a time.
    """

    def __init__(self, call: Call, how: Launch, left: WorkspacePlan):
        self.call, self.blocks = call, triton.cdiv(call.rows, how.block)
        size = call.G * left.tiles * how.block * call.DP
        S = call.members
        most = max(1, min(self.blocks, WORKSPACE // max(1, S * size * call.precision.itemsize)))
        self.most = triton.cdiv(self.blocks, triton.cdiv(self.blocks, most))
        self.count = triton.cdiv(self.blocks, self.most)
        self.programs = call.tile_grid(how, self.most * call.G)
        self.then = replace(choose_launch("gradients", call.kind, call.DP, call.HP, call.plain), block=how.block)
        self.slice = call.HP if call.force is LINEAR else min(call.HP, self.then.slice)
        self.slices = call.HP // self.slice
        # a headed program takes whole tiles
        self.later = call.tile_grid(self.then, self.most * call.G * (1 if call.headed else left.units), self.slices)
        self.sums = call.q.new_empty((self.count, S, self.later, call.total), dtype=call.wide)
        self.asides = call.q.new_empty((self.count, S, self.programs, 1 + 2 * call.D), dtype=call.wide)
        self.kicks = call.q.new_empty((self.count, S, self.later, self.slices), dtype=call.wide)
        self.tiles = call.q.new_empty(S * self.most * size, dtype=call.precision)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Number of a pass, a member's first block, and how many tiles it has."""
        for i in range(self.count):
            begin = i * self.most
            yield i, begin, min(self.most, self.blocks - begin) * self.call.G

    def gradients(self) -> Tensor:
        """The weights' gradients [S · (G or 1), total]."""
        call = self.call
        flat = call.sum_programs(self.sums, call.G)
        if "step" in call.starts and self.slices > 1:
            flat[:, call.starts["step"]] += call.sum_programs(self.kicks, call.G).sum(1)
        if call.starts.keys() & {"query_gain", "key_gain"}:
            gains = call.sum_programs(self.asides, call.G)[:, 1:].split(call.D, 1)
            for name, gain in zip(("query_gain", "key_gain"), gains, strict=True):
                if name in call.starts:
                    flat[:, call.starts[name] :][:, : call.D] = gain
        return flat


def coupled_backward(call: Call, how: Launch, dq_out: Tensor, dk_out: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Fills dq and dk, and returns the weights' gradients in a row [S · (G or 1), total]."""
    left, size = call.plan_workspace(), how.block * call.DP
    space = Workspace(call, how, left)
    states = None
    if left.states and call.steps > 1:
        dtype = call.wide if call.stretches else call.precision
        states = call.q.new_empty((call.members * space.programs, left.states * size), dtype=dtype)
    unit = {"LEAN": left.lean, "LEFT": left.evaluations, "UNIT": left.tiles * size}
    assert call.map is not None
    C = call.constants(how, STATES=left.states * size, **unit)
    C_later = call.constants(space.then, SLICE=space.slice, **unit)
    for i, begin, tiles in space:
        run(
            kernels.backward_kernel, (space.programs, call.members), how, *call.inputs(), make_heads(dq_out),
            make_heads(dk_out), dq, dk, space.asides[i], space.tiles, states, *call.size(), begin, tiles,
            call.map.functions, C,
        )  # fmt: skip
        grid = space.later * space.slices, call.members
        if call.stretches:
            for network, first in ((0, 3), (1, 0)):  # a step's key tiles lie before its query tiles
                run(
                    gradients.affine_gradients_kernel, grid, space.then, space.tiles[first * size :],
                    call.network(network), call.per_head, space.sums[i], call.offsets(network), call.total, tiles,
                    C_later,
                )  # fmt: skip
        else:
            run(
                gradients.force_gradients_kernel, grid, space.then, make_heads(call.q),
                call.parameters(None, call.network(0)), dk, space.tiles, space.asides[i], space.sums[i],
                space.kicks[i], call.offsets(0), call.starts["step"], call.total, space.programs,
                1 + 2 * call.D, call.rows, call.T, begin, tiles, C_later,
            )  # fmt: skip
    return space.gradients()


def uncoupled_arguments(call: Call, how: Launch, i: int, x: Tensor) -> tuple[Any, ...]:
    """The first arguments of both kernels for the queries (i = 0) or keys, and the last."""
    heads = x.shape[2]
    turn = bool(call.shape["PAIRS"]) and (i == 0 or call.shape["TURN_K"])
    gain = call.weights.get(("query_gain", "key_gain")[i])
    C = call.constants(how, G=heads, R=heads // call.G, TURN_K=turn)
    return make_heads(x), call.angles, call.parameters(None, call.network(i)), gain, C


def uncoupled_backward(call: Call, how: Launch, i: int, x: Tensor, dout: Tensor, dx: Tensor) -> Tensor:
    heads = x.shape[2]
    programs = call.head_grid(how, heads)
    # the other side's weights get nothing from here
    sums = x.new_zeros((1, call.members, programs, call.total), dtype=call.wide)
    states = None
    if call.steps > 1:
        states = x.new_empty((call.members * programs, call.steps, how.block, call.DP), dtype=call.wide)
    *inputs, C = uncoupled_arguments(call, how, i, x)
    o_gain = call.starts.get(("query_gain", "key_gain")[i], 0)
    run(
        uncoupled.uncoupled_backward_kernel, (programs, call.members), how, *inputs, make_heads(dout), dx, sums, states,
        call.offsets(i), call.starts["step"], o_gain, call.total, *call.size(), C,
    )  # fmt: skip
    return call.sum_programs(sums, heads)
