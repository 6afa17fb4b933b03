"""What coupling costs: the operation against a plain copy, and training steps against the standard layer's.

    python benchmarks/coupling.py op                  # on a GPU: forward and backward of the operation alone
    python benchmarks/coupling.py op --try            # the same for many launches, to fill the table in ops/coupling
    python benchmarks/coupling.py step --model 51m    # training steps, torch's own compiled code and the fused kernel
    python benchmarks/coupling.py step --model 51m --heads 4   # … with heads of 128

Correctness comes first: where the kernel's error against float64 exceeds twice the low-precision reference's, or a
fused model's first loss is not the reference's, nothing is measured and the command fails. Times are medians.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from measure import RESULTS, copy_rate, interleaved, keep, median_and_spread, provenance
from qklab import CouplingSpec, Decoder, recipe
from qklab.attention.couple import COUPLINGS, Coupling
from qklab.attention.places import rope_angles
from qklab.attention.spec import AttentionSpec
from qklab.ops.dispatch import Impl
from qklab.ops.loss import linear_cross_entropy

COUPLED: dict[str, dict[str, Any]] = {
    "euler×1": {"kind": "euler"},
    "leapfrog×1": {"kind": "leapfrog"},
    "leapfrog×7": {"kind": "leapfrog", "steps": 7},
    "affine×1": {"kind": "affine"},
}
BF16 = torch.bfloat16


class Op:
    """One coupling of q and k [B, T, width/D, D] in bf16, rotated in the same pass; and its backward alone."""

    def __init__(self, width: int, head_width: int, batch: int, tokens: int, choices: dict[str, Any]):
        torch.manual_seed(0)
        heads = width // head_width
        spec = AttentionSpec(width=width, heads=heads, coupling=CouplingSpec(**choices))
        self.couple: Coupling = COUPLINGS[choices["kind"]](spec).cuda()
        with torch.no_grad():
            for parameter in self.couple.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        shape = (batch, tokens, heads, head_width)
        self.q, self.k, self.dq, self.dk = (torch.randn(shape, device="cuda", dtype=BF16) for _ in range(4))
        self.q.requires_grad_()
        self.k.requires_grad_()
        positions = torch.arange(tokens, device="cuda")[None]
        self.angles = rope_angles(positions, head_width, 10_000.0, torch.float32)
        self.bytes = self.q.numel() * 2

    def forward(self, impl: Impl = "triton") -> tuple[Tensor, Tensor]:
        self.couple.impl = impl
        with torch.autocast("cuda", BF16):
            return self.couple(self.q, self.k, None, self.angles)

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, *self.couple.parameters()]

    def all(self, impl: Impl = "triton") -> list[Tensor]:
        outputs = self.forward(impl)
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, self.leaves(), (self.dq, self.dk))]

    def exact(self) -> list[Tensor]:
        self.couple.impl = "reference"
        wide = self.couple.double()
        q, k = (x.detach().double().requires_grad_() for x in (self.q, self.k))
        cos, sin = (angle.double() for angle in self.angles)
        outputs = wide(q, k, None, (cos, sin))
        found = torch.autograd.grad(outputs, [q, k, *wide.parameters()], (self.dq.double(), self.dk.double()))
        self.couple.float()
        return [*(y.detach() for y in outputs), *found]

    def check(self, name: str) -> None:
        exact, low, fused = self.exact(), self.all("reference"), self.all("triton")
        again = self.all("triton")
        if not all(map(torch.equal, fused, again)):
            sys.exit(f"{name}: two runs differ; nothing was measured.")
        for i, (actual, other, true) in enumerate(zip(fused, low, exact, strict=True)):
            error, allowed = (float((x.double() - true).norm() / true.norm()) for x in (actual, other))
            if true.numel() > 1 and not error <= 2 * allowed + torch.finfo(BF16).eps:
                sys.exit(
                    f"{name}: result {i} errs by {error:.1e}, the reference by {allowed:.1e}; nothing was measured."
                )


def gpu_seconds(call: Callable[[], object], rounds: int = 20) -> float:
    """Median time on the GPU."""
    call()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def timed(op: Op) -> tuple[float, float]:
    """Seconds of the forward and of the backward alone."""
    with torch.no_grad():
        forward = gpu_seconds(op.forward)
    outputs = op.forward()
    given = (op.dq, op.dk)
    return forward, gpu_seconds(lambda: torch.autograd.grad(outputs, op.leaves(), given, retain_graph=True))


def launches(direction: str) -> list[Any]:
    from qklab.ops.coupling.triton import Launch

    sizes = [(64, 4), (128, 8)]
    registers = [None, 168, 128] if direction == "forward" else [None]
    parts = [1] if direction == "forward" else [1, 2]
    return [
        Launch(block=block, warps=warps, stages=stages, programs=programs, parts=part, registers=limit)
        for (block, warps), stages, programs, part, limit in itertools.product(
            sizes, (1, 2), (1, 2, 4), parts, registers
        )
    ]


def measure_launches(op: Op, name: str) -> dict[str, Any]:
    """The operation under every launch; what does not fit says so."""
    from qklab.ops.coupling import triton

    usual, found = triton.launch, {}
    for direction in ("forward", "backward"):
        rows = {}
        for how in launches(direction):

            def chosen(asked: str, *rest: Any, how: Any = how, direction: str = direction) -> Any:
                return how if asked == direction else usual(asked, *rest)

            triton.launch = chosen
            try:
                rows[str(how)] = 1e3 * timed_part(op, direction)
            except Exception as error:
                rows[str(how)] = f"{type(error).__name__}: {str(error)[:60]}"
            triton.launch = usual
        best = sorted((ms, how) for how, ms in rows.items() if isinstance(ms, float))
        print(f"  {name}, {direction}:")
        for ms, how in best[:5]:
            print(f"    {ms:8.3f} ms  {how}")
        found[direction] = rows
    return found


def timed_part(op: Op, direction: str) -> float:
    if direction == "forward":
        with torch.no_grad():
            return gpu_seconds(op.forward, 5)
    outputs = op.forward()
    return gpu_seconds(lambda: torch.autograd.grad(outputs, op.leaves(), (op.dq, op.dk), retain_graph=True), 5)


def refused(head_width: int, choices: dict[str, Any]) -> str | None:
    """What the kernel says to this coupling, if it does not take it."""
    try:
        Op(head_width, head_width, 1, 1, choices).forward()
    except ValueError as error:
        return str(error)
    return None


def measure_op(options: argparse.Namespace) -> None:
    rate = copy_rate("cuda")
    result: dict[str, Any] = {"provenance": provenance("cuda", options.commit), "copy_bytes_per_s": rate, "arms": {}}
    print(f"copies run at {rate / 1e12:.2f} TB/s; q and k of {options.batch} × 1024 tokens × {options.width}")
    for head_width, name in itertools.product(options.head_widths, options.arms):
        label, choices = f"{name}, heads of {head_width}", COUPLED[name]
        if refusal := refused(head_width, choices):
            print(f"  {label:<26} {refusal}")
            continue
        Op(options.width, head_width, 2, 100, choices).check(label)
        op = Op(options.width, head_width, options.batch, 1024, choices)
        forward, backward = timed(op)
        floors = 4 * op.bytes / rate, 6 * op.bytes / rate
        print(
            f"  {label:<26} forward {1e6 * forward:7.1f} µs ({floors[0] / forward:4.0%} of copy bandwidth), "
            f"backward {1e6 * backward:7.1f} µs ({floors[1] / backward:4.0%})",
            flush=True,
        )
        row: dict[str, Any] = {"forward_s": forward, "backward_s": backward, "floors_s": floors}
        if options.try_launches:
            row["launches"] = measure_launches(op, label)
        result["arms"][label] = row
    keep(f"coupling-op-{options.name or 'cuda'}", result, options.out)


class Step:
    """One training step: forward under bf16 autocast, vocabulary loss, backward, clipping, fused AdamW."""

    def __init__(self, model: Decoder, ids: Tensor):
        self.model, self.ids = model, ids
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.loss = torch.compile(self.eager, dynamic=False)

    def eager(self) -> Tensor:
        with torch.autocast("cuda", BF16):
            features = self.model.features(self.ids[:, :-1])
            return linear_cross_entropy(features, self.model.head.weight, self.ids[:, 1:])[0]

    def __call__(self) -> None:
        self.loss().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def peak(self) -> int:
        """Bytes a step needs beyond what lies on the GPU before it."""
        self()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self()
        return torch.cuda.max_memory_allocated() - before


def measure_step(options: argparse.Namespace) -> None:
    shape = {} if options.heads is None else {"heads": options.heads}
    arms: dict[str, tuple[dict[str, Any] | None, Impl]] = {"standard": (None, "auto"), "standard again": (None, "auto")}
    head_width = recipe(options.model, **shape).attention.head_width
    for name in options.arms:
        choices = COUPLED[name]
        if not options.fused_only:
            arms[f"{name}, reference"] = choices, "reference"
        if refusal := refused(head_width, choices):
            print(f"{name}: {refusal}")
        else:
            arms[f"{name}, fused"] = choices, "triton"
    torch._dynamo.config.recompile_limit = 4 * len(arms)
    torch.manual_seed(0)
    spec = recipe(options.model, **shape)
    ids = torch.randint(spec.vocab, (options.batch, 1025), device="cuda")
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    first: dict[str, float] = {}
    for name, (choices, impl) in arms.items():
        print(f"preparing {name} …", flush=True)
        coupling = None if choices is None else CouplingSpec(**choices)
        model = Decoder(recipe(options.model, coupling=coupling, **shape), seed=0).cuda()
        for module in model.modules():
            if isinstance(module, Coupling):
                module.impl = impl
        steps[name] = Step(model, ids)
        first[name] = float(steps[name].loss().detach())
        peaks[name] = steps[name].peak()
        twin = first.get(name.replace("fused", "reference"), first[name])
        if not abs(first[name] - twin) < 2e-3 * twin:
            sys.exit(f"{name}: the first loss is {first[name]}, the reference's {twin}; nothing was measured.")
    times = interleaved(steps, options.rounds, "cuda")
    standard, _ = median_and_spread(times["standard"])
    rows = {}
    print(f"\n{options.model}, {spec.attention.heads} heads, {options.batch} × 1024 tokens, compiled, bf16")
    for name, values in times.items():
        middle, spread = median_and_spread(values)
        memory = peaks[name] / peaks["standard"]
        rows[name] = {
            "ms": 1e3 * middle,
            "spread": spread,
            "ratio": middle / standard,
            "peak_bytes": peaks[name],
            "peak_ratio": memory,
            "first_loss": first[name],
        }
        print(
            f"  {name:<24} {1e3 * middle:8.2f} ms ±{100 * spread:.1f}% {middle / standard:6.3f} ×  "
            f"{peaks[name] / 2**30:6.2f} GiB {memory:5.3f} ×"
        )
    result = {
        "provenance": provenance("cuda", options.commit),
        "set_up": {"model": options.model, "heads": spec.attention.heads, "batch": options.batch, "tokens": 1024},
        "arms": rows,
    }
    name = options.name or f"{options.model}-heads{spec.attention.heads}-cuda"
    keep(f"coupling-step-{name}", result, options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["op", "step"])
    parser.add_argument("--try", dest="try_launches", action="store_true", help="the operation under many launches")
    parser.add_argument("--head-widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--arms", nargs="+", default=list(COUPLED), choices=list(COUPLED))
    parser.add_argument("--width", type=int, default=512, help="of q and of k, for the operation alone")
    parser.add_argument("--model", default="51m", help="a recipe")
    parser.add_argument("--heads", type=int, help="instead of the recipe's")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fused-only", action="store_true", help="leave the reference's arms out")
    parser.add_argument("--name", help="what the result file's name ends with")
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/coupling.py measures a GPU, and there is none here.")
    {"op": measure_op, "step": measure_step}[options.what](options)


if __name__ == "__main__":
    main()
