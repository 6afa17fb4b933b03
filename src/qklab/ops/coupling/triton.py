"""Launches of the coupling kernels: which blocks, how many programs, and where each weight and its gradient lies."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qklab.ops.coupling import affine, alone, forced, forced_weights
from qklab.ops.coupling.api import layout

KINDS = {"euler": 0, "symplectic-euler": 1, "linear": 1, "leapfrog": 2}
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
    hold: bool = False  # keep a block's angles in registers while its heads go by; the forwards always do
    slice: int = 64  # hidden entries whose weight gradients a program sums


def launch(direction: str, kind: str, DP: int, HP: int) -> Launch:
    """The launch for heads of DP and networks of HP padded entries: of the forward, of the backward, and of the weight
    gradients, whose block is the backward's."""
    if kind == "uncoupled":
        return Launch()
    if kind == "affine":
        return Launch(block=32, stages=2) if direction == "backward" else Launch()
    if DP * HP > 64 * 64:
        wide = {
            "forward": Launch(block=32, stages=2),
            "backward": Launch(block=32, warps=8, stages=2, programs=1, hold=True),
            "weights": Launch(),
        }
        return wide[direction]
    return Launch(stages=2) if direction == "backward" else Launch(stages=3)


def padded(width: int) -> int:
    """The power of two that a tile's side has; products take no less than 16."""
    return max(16, triton.next_power_of_2(width))


def row_major(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


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
    ):
        self.q, self.k, self.kind, self.limit = row_major(q), row_major(k), kind, scale_limit
        self.B, self.T, self.H, self.D = q.shape
        self.G = k.shape[2]
        self.rows = self.B * self.T
        self.weights = {name: w.contiguous() for name, w in zip(names.split(","), weights, strict=True)}
        self.gradient_rows, spans = layout(weights, self.G)
        self.starts = {name: start for name, (start, _) in zip(self.weights, spans, strict=True)}
        self.total = max((stop for _, stop in spans), default=0)
        self.cos, self.sin = (row_major(angle) for angle in angles) if angles else (None, None)
        if self.cos is not None and self.sin is not None and self.cos.stride() != self.sin.stride():
            self.cos, self.sin = self.cos.contiguous(), self.sin.contiguous()
        self.turned = 0 if self.cos is None else self.cos.shape[-1]
        self.eps, self.turn_key = eps, turn_key
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.width = self.weights["inner0"].shape[-2]
        self.DP, self.HP = padded(self.D), padded(self.width)
        step = self.weights.get("step")
        self.step_per_head = int(step is not None and step.dim() == 3)
        self.per_head = int(self.weights["inner0"].dim() == 3)
        # rounding to 16 bits hides what the GPU's own tanh leaves out
        fast = q.is_cuda and precision.itemsize == 2
        self.shape: dict[str, Any] = {
            "D": self.D, "DP": self.DP, "WIDTH": self.width, "HP": self.HP, "TURNED": self.turned,
            "NORM": eps is not None, "STEPS": steps,
            "DOT": DTYPES[precision], "WIDE": DTYPES[self.wide], "FAST": fast,
        }  # fmt: skip
        self.steps, self.precision = steps, precision

    @property
    def force(self) -> int:
        return 1 if "amplitude0" in self.weights else 0 if "outer0" in self.weights else 2

    def angle_strides(self) -> tuple[int, int]:
        """Of a batch row and of a token; one table may serve all rows."""
        if self.cos is None:
            return 0, 0
        return (self.cos.stride(0) if self.cos.shape[0] > 1 else 0), self.cos.stride(1)

    def network(self, i: int) -> tuple[Tensor | None, ...]:
        """W1, b1, W2, and b2 or the amplitudes."""
        w = self.weights
        last = w.get(f"outer_bias{i}", w.get(f"amplitude{i}"))
        return w[f"inner{i}"], w.get(f"inner_bias{i}"), w.get(f"outer{i}"), last

    def network_starts(self, i: int) -> tuple[int, ...]:
        s = self.starts
        last = s.get(f"outer_bias{i}", s.get(f"amplitude{i}", 0))
        return s[f"inner{i}"], s.get(f"inner_bias{i}", 0), s.get(f"outer{i}", 0), last

    def gains(self) -> tuple[Tensor | None, Tensor | None]:
        return self.weights.get("query_gain"), self.weights.get("key_gain")

    def grid(self, how: Launch, heads: int) -> int:
        """Programs: a whole number for each head, no more than there are blocks."""
        processors = torch.cuda.get_device_properties(self.q.device).multi_processor_count if self.q.is_cuda else 2
        blocks = triton.cdiv(self.rows, how.block)
        return heads * max(1, min(blocks, processors * how.programs // heads))

    def headed(self) -> bool:
        """Whether key heads have weights, or steps, of their own, so that a program keeps to one."""
        return self.gradient_rows > 1

    def tile_grid(self, how: Launch, tiles: int, slices: int = 1) -> int:
        """Programs (by `slices` at a time) for so many tiles, a tile being a block of one key head; a whole number for
        each head if headed."""
        processors = torch.cuda.get_device_properties(self.q.device).multi_processor_count if self.q.is_cuda else 2
        programs = max(1, min(tiles, processors * how.programs // slices))
        return self.G * max(1, programs // self.G) if self.headed() else programs

    def summed(self, sums: Tensor, heads: int) -> Tensor:
        """[programs, total] → [G or 1, total]: programs of one key head lie `heads` rows apart."""
        if self.gradient_rows == 1:
            return sums.sum(0, keepdim=True)
        return sums.unflatten(0, (-1, self.G, heads // self.G)).sum((0, 2))


def run(kernel: Any, programs: int, *arguments: Any, **choices: Any) -> None:
    kernel[(programs,)](*arguments, **choices)


def options(how: Launch, T: int | None = None) -> dict[str, int | None]:
    even = {} if T is None else {"EVEN": T % how.block == 0}
    return {"BM": how.block, **even, "STAGES": how.stages, "num_warps": how.warps, "maxnreg": how.registers}


def strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def forward(q: Tensor, k: Tensor, *choices: Any) -> tuple[Tensor, Tensor]:
    """The outputs of `api.couple`."""
    call = Call(q, k, *choices)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if not call.rows:
        return q_out, k_out
    how = launch("forward", call.kind, call.DP, call.HP)
    if call.kind == "uncoupled":
        for i, (x, out) in enumerate(((call.q, q_out), (call.k, k_out))):
            run_alone(call, how, i, x, out)
        return q_out, k_out
    common = {"G": call.G, "R": call.H // call.G, "TURN_K": call.turn_key, **call.shape, **options(how, call.T)}
    tensors = (call.q, call.k, call.cos, call.sin)
    scalars = (*strides(call.q), *strides(call.k), *call.angle_strides())
    if call.kind == "affine":
        run(
            affine.affine_forward, call.tile_grid(how, triton.cdiv(call.rows, how.block) * call.G),
            *tensors, *call.network(0), *call.network(1), *call.gains(), q_out, k_out, *scalars, call.limit,
            call.eps or 0.0, call.rows, call.T, call.per_head, HEADED=call.headed(), **common,
        )  # fmt: skip
    else:
        run(
            forced.forced_forward, call.tile_grid(how, triton.cdiv(call.rows, how.block) * call.G),
            *tensors, call.weights["step"], *call.network(0), *call.gains(), q_out, k_out, *scalars,
            call.eps or 0.0, call.rows, call.T, call.per_head, call.step_per_head,
            HEADED=call.headed(), KIND=KINDS[call.kind], FORCE=call.force, **common,
        )  # fmt: skip
    return q_out, k_out


def run_alone(call: Call, how: Launch, i: int, x: Tensor, out: Tensor) -> None:
    heads = x.shape[2]
    run(
        alone.alone_forward, call.grid(how, heads),
        x, call.cos, call.sin, call.weights["step"], *call.network(i), call.gains()[i], out,
        *strides(x), *call.angle_strides(), call.eps or 0.0, call.rows, call.T, call.per_head, call.step_per_head,
        HEADS=heads, R=heads // call.G, TURN=bool(call.turned) and (i == 0 or call.turn_key), FORCE=call.force,
        **call.shape, **options(how, call.T),
    )  # fmt: skip


def backward(dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, *choices: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and the weights' gradients in a row [G or 1, total]."""
    call = Call(q, k, *choices)
    dq_out, dk_out = row_major(dq_out), row_major(dk_out)
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    if not call.rows:
        return dq, dk, q.new_zeros((call.gradient_rows, call.total), dtype=call.wide)
    how = launch("backward", call.kind, call.DP, call.HP)
    if call.kind == "uncoupled":
        flat = None
        for i, (x, dout, dx) in enumerate(((call.q, dq_out, dq), (call.k, dk_out, dk))):
            part = run_alone_backward(call, how, i, x, dout, dx)
            flat = part if flat is None else flat + part
        assert flat is not None
        return dq, dk, flat
    both = affine_backward if call.kind == "affine" else forced_backward
    return dq, dk, both(call, how, dq_out, dk_out, dq, dk)


class Parts:
    """A backward in two launches: one gives dq and dk and leaves tiles, a second sums the weights' gradients from them.

    What is left takes at most WORKSPACE bytes: beyond, both run for some blocks at a time.
    """

    def __init__(self, call: Call, how: Launch, tiles: int, units: int, aside: int):
        """`tiles` are left for a tile, in `units` that a program of the second launch may take by themselves; the
        first launch sums `aside` numbers."""
        self.blocks = triton.cdiv(call.rows, how.block)
        left = call.G * tiles * how.block * call.DP
        most = max(1, min(self.blocks, WORKSPACE // max(1, left * call.precision.itemsize)))
        count = triton.cdiv(self.blocks, most)
        self.most = triton.cdiv(self.blocks, count)
        self.count = triton.cdiv(self.blocks, self.most)
        self.then = launch("weights", call.kind, call.DP, call.HP)
        self.programs = call.tile_grid(how, self.most * call.G)
        self.slice = call.HP if call.force == 2 else min(call.HP, self.then.slice)
        self.slices = call.HP // self.slice
        # a headed program takes whole tiles
        self.later = call.tile_grid(self.then, self.most * call.G * (1 if call.headed() else units), self.slices)
        self.sums = call.q.new_empty((self.count, self.later, call.total), dtype=call.wide)
        self.asides = call.q.new_empty((self.count, self.programs, aside), dtype=call.wide)
        self.work = call.q.new_empty(self.most * left, dtype=call.precision)
        self.call = call

    def __iter__(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """First block, number of tiles, and where both launches of a part put their sums."""
        for i in range(self.count):
            begin = i * self.most
            yield begin, min(self.most, self.blocks - begin) * self.call.G, self.sums[i], self.asides[i]

    def gradients(self) -> Tensor:
        """The weights' gradients [G or 1, total], but for the gains."""
        return self.call.summed(self.sums.flatten(0, 1), self.call.G)

    def put_gains(self, flat: Tensor, first: int) -> None:
        """Put the gradients of gains, which were summed aside from column `first` on, where they belong in `flat`."""
        if not self.call.starts.keys() & {"query_gain", "key_gain"}:
            return
        gains = self.call.summed(self.asides.flatten(0, 1), self.call.G)[:, first:].split(self.call.D, 1)
        for name, gain in zip(("query_gain", "key_gain"), gains, strict=True):
            if name in self.call.starts:
                flat[:, self.call.starts[name] :][:, : self.call.D] = gain


def affine_backward(call: Call, how: Launch, dq_out: Tensor, dk_out: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Fills dq and dk, and returns the weights' gradients in a row [G or 1, total]."""
    parts = Parts(call, how, tiles=6 * call.steps, units=call.steps, aside=2 * call.D)
    states = None
    if call.steps > 1:
        states = call.q.new_empty((parts.programs, call.steps, 2, how.block, call.DP), dtype=call.wide)
    shape = dict(call.shape)
    del shape["NORM"]
    for begin, tiles, sums, asides in parts:
        run(
            affine.affine_backward, parts.programs,
            call.q, call.k, call.cos, call.sin, *call.network(0), *call.network(1), *call.gains(),
            dq_out, dk_out, dq, dk, asides, parts.work, states,
            *strides(call.q), *strides(call.k), *strides(dq_out), *strides(dk_out), *call.angle_strides(),
            call.limit, call.eps or 0.0, call.rows, call.T, begin, tiles, call.per_head,
            HEADED=call.headed(), G=call.G, R=call.H // call.G, TURN_K=call.turn_key,
            **call.shape, **options(how, call.T),
        )  # fmt: skip
        for i, offset in ((0, 3), (1, 0)):  # a step's key tiles lie before its query tiles
            run(
                affine.affine_weights, parts.later * parts.slices,
                parts.work[offset * how.block * call.DP :], *call.network(i), sums, tiles, call.per_head, call.total,
                *call.network_starts(i), HEADED=call.headed(), G=call.G, SLICE=parts.slice, **shape,
                **options(parts.then) | {"BM": how.block},
            )  # fmt: skip
    flat = parts.gradients()
    parts.put_gains(flat, 0)
    return flat


def forced_backward(call: Call, how: Launch, dq_out: Tensor, dk_out: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Fills dq and dk, and returns the weights' gradients in a row [G or 1, total]."""
    lean = call.q.dtype == call.precision and call.H == call.G and (call.kind != "euler" or call.steps == 1)
    left = call.steps + (call.kind == "leapfrog") - lean
    tiles = 1 if lean and call.kind == "euler" else 2 * left
    parts = Parts(call, how, tiles=tiles, units=max(left, 1), aside=1 + 2 * call.D)
    kicks = call.q.new_empty((parts.count, parts.later, parts.slices), dtype=call.wide) if parts.slices > 1 else None
    keys = None
    if call.steps > 1 and call.kind == "euler":
        keys = call.q.new_empty((parts.programs, call.steps, how.block, call.DP), dtype=call.precision)
    shape = dict(call.shape)
    del shape["NORM"], shape["STEPS"]
    hold = how.hold and call.T % how.block == 0
    for begin, tiles, sums, asides in parts:
        run(
            forced.forced_backward, parts.programs,
            call.q, call.k, call.cos, call.sin, call.weights["step"], *call.network(0), *call.gains(),
            dq_out, dk_out, dq, dk, asides, parts.work, keys,
            *strides(call.q), *strides(call.k), *strides(dq_out), *strides(dk_out), *call.angle_strides(),
            call.eps or 0.0, call.rows, call.T, begin, tiles, call.per_head, call.step_per_head,
            HEADED=call.headed(), HOLD=hold, LEAN=lean, G=call.G, R=call.H // call.G, TURN_K=call.turn_key, LEFT=left,
            KIND=KINDS[call.kind], FORCE=call.force, **call.shape, **options(how, call.T),
        )  # fmt: skip
        run(
            forced_weights.forced_weights, parts.later * parts.slices,
            parts.work, call.q, dk, call.weights["step"], *call.network(0),
            asides, sums, None if kicks is None else kicks[begin // parts.most],
            *strides(call.q), call.rows, call.T, begin, tiles, call.per_head, call.step_per_head,
            parts.programs, asides.shape[1], call.total, call.starts["step"], *call.network_starts(0),
            HEADED=call.headed(), G=call.G, SLICE=parts.slice, LEFT=left, LEAN=lean,
            KIND=KINDS[call.kind], FORCE=call.force, EVEN=call.T % how.block == 0,
            **shape, **options(parts.then) | {"BM": how.block},
        )  # fmt: skip
    flat = parts.gradients()
    if kicks is not None:
        flat[:, call.starts["step"]] += call.summed(kicks.flatten(0, 1), call.G).sum(1)
    parts.put_gains(flat, 1)
    return flat


def run_alone_backward(call: Call, how: Launch, i: int, x: Tensor, dout: Tensor, dx: Tensor) -> Tensor:
    heads = x.shape[2]
    programs = call.grid(how, heads)
    sums = x.new_zeros((programs, call.total), dtype=call.wide)  # the other side's weights get nothing from here
    states = None
    if call.steps > 1:
        states = x.new_empty((programs, call.steps, how.block, call.DP), dtype=call.wide)
    gain = ("query_gain", "key_gain")[i]
    run(
        alone.alone_backward, programs,
        x, call.cos, call.sin, call.weights["step"], *call.network(i), call.weights.get(gain), dout, dx, sums, states,
        *strides(x), *strides(dout), *call.angle_strides(), call.eps or 0.0, call.rows, call.T,
        call.per_head, call.step_per_head, call.total,
        call.starts["step"], *call.network_starts(i), call.starts.get(gain, 0),
        HEADS=heads, R=heads // call.G, TURN=bool(call.turned) and (i == 0 or call.turn_key), FORCE=call.force,
        **call.shape, **options(how, call.T),
    )  # fmt: skip
    return call.summed(sums, heads)
