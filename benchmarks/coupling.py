"""What coupling costs: the operation against a plain copy, and training steps against the standard layer's.

    python benchmarks/coupling.py op                  # on a GPU: forward and backward of the operation alone
    python benchmarks/coupling.py step --model 51m    # training steps, torch's own compiled code and the fused kernel
    python benchmarks/coupling.py step --model 51m --heads 4   # … with heads of 128
    python benchmarks/coupling.py train --model nano  # loss curves of both implementations over 200 steps

Correctness comes first: where the kernel's error against float64 exceeds twice the low-precision reference's, or a
fused model's first loss is not the reference's, nothing is measured and the command fails. Times are medians.
"""

import argparse
import itertools
import os
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


def gpu_seconds(call: Callable[[], object], rounds: int = 9, calls: int = 10) -> float:
    """Median time on the GPU of one call, replayed from a graph so that the host's share does not count."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / calls)
    return statistics.median(times)


def timed(op: Op) -> tuple[float, float]:
    """Seconds of the forward and of the backward alone."""
    with torch.no_grad():
        forward = gpu_seconds(op.forward)
    both = gpu_seconds(op.all)
    return forward, both - forward


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
        Op(options.width, head_width, 16, 1024, choices).check(label)  # several tiles a program
        op = Op(options.width, head_width, options.batch, 1024, choices)
        forward, backward = timed(op)
        floors = 4 * op.bytes / rate, 6 * op.bytes / rate
        print(
            f"  {label:<26} forward {1e6 * forward:7.1f} µs ({floors[0] / forward:4.0%} of copy bandwidth), "
            f"backward {1e6 * backward:7.1f} µs ({floors[1] / backward:4.0%})",
            flush=True,
        )
        result["arms"][label] = {"forward_s": forward, "backward_s": backward, "floors_s": floors}
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

    def __call__(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()

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


def library_text(count: int) -> Tensor:
    """Bytes of Python's own library, as ids."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= count:
            break
    if len(text) < count:
        sys.exit(f"Python's library has {len(text)} bytes of text here, but {count} are needed; ask for fewer steps.")
    return torch.frombuffer(text[:count], dtype=torch.uint8).long()


def compare_training(options: argparse.Namespace) -> None:
    """Loss curves of the reference, of the reference with the rows of every batch in another order (the same model up
    to rounding), and of the kernel, which may stray from the reference twice as far as rounding alone does."""
    batch, length, steps = options.batch, options.length, options.steps
    text = library_text(batch * (length + 1) * min(steps, 40)).view(-1, batch, length + 1).cuda()
    result: dict[str, Any] = {"provenance": provenance("cuda", options.commit), "arms": {}}
    strays = []
    for name in options.arms:
        curves = {}
        impls: dict[str, Impl] = {"reference": "reference", "rounding": "reference", "fused": "triton"}
        for label, impl in impls.items():
            torch._dynamo.reset()
            coupling = CouplingSpec(**COUPLED[name])
            model = Decoder(recipe(options.model, coupling=coupling, context=length), seed=0).cuda()
            for module in model.modules():
                if isinstance(module, Coupling):
                    module.impl = impl
            step = Step(model, text[0].clone())
            step.optimiser.param_groups[0]["lr"] = 1e-3
            losses = []
            for i in range(steps):
                step.ids.copy_(text[i % len(text)].flip(0) if label == "rounding" else text[i % len(text)])
                losses.append(step())
            curves[label] = torch.stack(losses).tolist()
        truth = curves["reference"]
        off = {
            label: [abs(a - b) for a, b in zip(curves[label], truth, strict=True)] for label in ("rounding", "fused")
        }
        mean = {label: sum(values) / steps for label, values in off.items()}
        print(
            f"{options.model}, {name}: loss {truth[0]:.3f} → {truth[-1]:.4f}; kernel {curves['fused'][-1]:.4f}; "
            f"mean |difference| over {steps} steps {mean['fused']:.2e}, by rounding alone {mean['rounding']:.2e}",
            flush=True,
        )
        result["arms"][name] = {"curves": curves, "mean_difference": mean}
        if not mean["fused"] <= 2 * mean["rounding"]:
            strays.append(name)
    keep(f"coupling-train-{options.name or options.model}", result, options.out)
    if strays:
        sys.exit(f"{', '.join(strays)}: the kernel strays from the reference by more than twice what rounding does.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["op", "step", "train"])
    parser.add_argument("--head-widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--arms", nargs="+", default=list(COUPLED), choices=list(COUPLED))
    parser.add_argument("--width", type=int, default=512, help="of q and of k, for the operation alone")
    parser.add_argument("--model", default="51m", help="a recipe")
    parser.add_argument("--heads", type=int, help="instead of the recipe's")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, for the loss curves")
    parser.add_argument("--steps", type=int, default=200, help="of the loss curves")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fused-only", action="store_true", help="leave the reference's arms out")
    parser.add_argument("--name", help="what the result file's name ends with")
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/coupling.py measures a GPU, and there is none here.")
    {"op": measure_op, "step": measure_step, "train": compare_training}[options.what](options)


if __name__ == "__main__":
    main()
