"""What coupling costs: the operation against a plain copy, and training steps against the standard layer's.

    python benchmarks/coupling.py op                  # on a GPU: forward and backward of the operation alone
    python benchmarks/coupling.py step --model 51m    # training steps, torch's own compiled code and the fused kernel
    python benchmarks/coupling.py step --model 51m --heads 4   # … with heads of 128
    python benchmarks/coupling.py step --model 51m --recompute # … and what Decoder.recompute saves and costs
    python benchmarks/coupling.py train --model nano  # loss curves of both implementations over 200 steps

Correctness comes first: where the kernel's error against float64 exceeds twice the low-precision reference's, or a
fused model's first loss is not the reference's, nothing is measured and the command fails. Times are medians.
"""

import argparse
import itertools
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import RESULTS, copy_rate, gpu_seconds, keep, median_and_spread, provenance
from qklab import CouplingSpec, Decoder, recipe, register
from qklab.attention.couple import Coupling
from qklab.attention.look_back import LookbackCoupling
from qklab.attention.past import Past
from qklab.attention.spec import AttentionSpec
from qklab.model.decoder import Recompute
from qklab.ops.dispatch import Impl
from qklab.ops.rope import Angles, rope_angles
from steps import STEPS_A_TURN, Arms, Step

COUPLED: dict[str, dict[str, Any]] = {
    "euler×1": {"kind": "euler"},
    "leapfrog×1": {"kind": "leapfrog"},
    "leapfrog×7": {"kind": "leapfrog", "steps": 7},
    "affine×1": {"kind": "affine"},
    "cca": {"kind": "cca"},  # not rotated in the same pass
}
BF16 = torch.bfloat16


class Op:
    """One coupling of q and k [B, T, width/D, D] in bf16, rotated in the same pass; and its backward alone."""

    def __init__(self, width: int, head_width: int, batch: int, tokens: int, choices: dict[str, Any]):
        torch.manual_seed(0)
        heads = width // head_width
        spec = AttentionSpec(width=width, heads=heads, coupling=CouplingSpec(**choices))
        self.couple: Coupling = register.coupling[choices["kind"]](spec).cuda()
        with torch.no_grad():
            for parameter in self.couple.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        shape = (batch, tokens, heads, head_width)
        self.q, self.k, self.dq, self.dk = (torch.randn(shape, device="cuda", dtype=BF16) for _ in range(4))
        self.q.requires_grad_()
        self.k.requires_grad_()
        self.positions = torch.arange(tokens, device="cuda")[None]
        self.angles = rope_angles(self.positions, head_width, 10_000.0, torch.float32)
        self.bytes = self.q.numel() * 2

    def forward(self, impl: Impl = "triton") -> tuple[Tensor, Tensor]:
        self.couple.impl = impl
        with torch.autocast("cuda", BF16):
            return self.run(self.q, self.k, self.angles)

    def run(self, q: Tensor, k: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        if isinstance(self.couple, LookbackCoupling):
            return self.couple(q, k, None, Past(self.positions))[:2]
        return self.couple.fuse(q, k, None, angles)

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
        outputs = self.run(q, k, (cos, sin))
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


def time_op(op: Op) -> tuple[float, float]:
    """Seconds of the forward and of the backward alone."""
    with torch.no_grad():
        forward = gpu_seconds(op.forward)
    both = gpu_seconds(op.all)
    return forward, both - forward


def explain_refusal(head_width: int, choices: dict[str, Any]) -> str | None:
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
        if refusal := explain_refusal(head_width, choices):
            print(f"  {label:<26} {refusal}")
            continue
        Op(options.width, head_width, 2, 100, choices).check(label)
        Op(options.width, head_width, 16, 1024, choices).check(label)  # several tiles a program
        op = Op(options.width, head_width, options.batch, 1024, choices)
        forward, backward = time_op(op)
        floors = 4 * op.bytes / rate, 6 * op.bytes / rate
        print(
            f"  {label:<26} forward {1e6 * forward:7.1f} µs ({floors[0] / forward:4.0%} of copy bandwidth), "
            f"backward {1e6 * backward:7.1f} µs ({floors[1] / backward:4.0%})",
            flush=True,
        )
        result["arms"][label] = {"forward_s": forward, "backward_s": backward, "floors_s": floors}
    keep(f"coupling-op-{options.name or 'cuda'}", result, options.out)


def prepare_step(
    model_name: str,
    batch: int,
    shape: dict[str, Any],
    choices: dict[str, Any] | None,
    impl: Impl,
    recompute: Recompute = "none",
) -> Step:
    """A training step of a model with this coupling on a GPU."""
    coupling = None if choices is None else CouplingSpec(**choices)
    model = Decoder(recipe(model_name, coupling=coupling, **shape), seed=0).cuda()
    for module in model.modules():
        if isinstance(module, Coupling):
            module.impl = impl
    model.recompute(recompute)
    torch.manual_seed(0)
    return Step(model, torch.randint(model.spec.vocab, (batch, 1025), device="cuda"))


def measure_step(options: argparse.Namespace) -> None:
    shape = {} if options.heads is None else {"heads": options.heads}
    arms: dict[str, tuple[dict[str, Any] | None, Impl, Recompute]] = {
        "standard": (None, "auto", "none"),
        "standard again": (None, "auto", "none"),
    }
    if options.recompute:
        arms["standard, layers recomputed"] = None, "auto", "layers"
    spec = recipe(options.model, **shape)
    for name in options.arms:
        choices = COUPLED[name]
        if not options.fused_only:
            arms[f"{name}, reference"] = choices, "reference", "none"
        if refusal := explain_refusal(spec.pattern[0].head_width, choices):
            print(f"{name}: {refusal}")
        else:
            arms[f"{name}, fused"] = choices, "triton", "none"
            if options.recompute:
                arms[f"{name}, fused, recomputed"] = choices, "triton", "coupling"
    print(f"preparing {', '.join(arms)} …", flush=True)
    processes = Arms({name: (prepare_step, options.model, options.batch, shape, *arm) for name, arm in arms.items()})
    first, peaks = processes.list_answers()
    for name, value in first.items():
        arm = name.split(", ")[0]
        twin = first.get(f"{arm}, reference", first.get(f"{arm}, fused", first["standard"]))
        if not abs(value - twin) < 2e-3 * twin:
            sys.exit(f"{name}: the first loss is {value}, its twin's {twin}; nothing was measured.")
    times = processes.seconds(options.rounds)
    standard = statistics.median(times["standard"] + times["standard again"])
    rows = {}
    print(f"\n{options.model}, {spec.pattern[0].heads} heads, {options.batch} × 1024 tokens, compiled, bf16")
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
            f"  {name:<30} {1e3 * middle:8.2f} ms ±{100 * spread:.1f}% {middle / standard:6.3f} ×  "
            f"{peaks[name] / 2**30:6.2f} GiB {memory:5.3f} ×"
        )
    result = {
        "provenance": provenance("cuda", options.commit),
        "set_up": {
            "model": options.model,
            "heads": spec.pattern[0].heads,
            "batch": options.batch,
            "tokens": 1024,
            "rounds": options.rounds,
            "steps_a_turn": STEPS_A_TURN,
            "processes": "one for each arm, taking turns",
        },
        "arms": rows,
    }
    name = options.name or f"{options.model}-heads{spec.pattern[0].heads}-cuda"
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


ORDERS = 3  # in which the rows of every batch are given
WARM_UP = 20  # steps until the learning rate of the loss curves is reached


def compare_training(options: argparse.Namespace) -> None:
    """Loss curves of both implementations, each with the rows of every batch in several orders: the same model up to
    rounding. As far as these stray from each other, so far may the kernel's mean curve stray from the reference's."""
    batch, length, steps = options.batch, options.length, options.steps
    text = library_text(batch * (length + 1) * min(steps, 40)).view(-1, batch, length + 1).cuda()
    result: dict[str, Any] = {"provenance": provenance("cuda", options.commit), "arms": {}}
    strays = []
    for name in options.arms:
        curves: dict[str, Tensor] = {}
        impls: tuple[Impl, ...] = ("reference", "triton")
        for impl in impls:
            torch._dynamo.reset()
            step = prepare_step(options.model, batch, {"context": length}, COUPLED[name], impl)
            step.ids = text[0].clone()
            start = {key: value.clone() for key, value in step.model.state_dict().items()}
            found = []
            for order in range(ORDERS):
                step.model.load_state_dict(start)
                step.optimiser = torch.optim.AdamW(step.model.parameters(), lr=1e-3, fused=True)
                losses = []
                for i in range(steps):
                    step.optimiser.param_groups[0]["lr"] = 1e-3 * min(1, (i + 1) / WARM_UP)
                    step.ids.copy_(text[i % len(text)].roll(order, 0))
                    losses.append(step())
                found.append(torch.stack(losses))
            curves[impl] = torch.stack(found).double().cpu()
        # a mean over orders errs by the spread over √orders, a difference of two by √2 times that
        noise = torch.cat([x - x.mean(0) for x in curves.values()]).square().sum(0) / (2 * ORDERS - 2)
        allowed = (2 / ORDERS * noise).mean().sqrt()
        apart = (curves["triton"].mean(0) - curves["reference"].mean(0)).square().mean().sqrt()
        ends = {impl: float(x[:, -20:].mean()) for impl, x in curves.items()}
        print(
            f"{options.model}, {name}, {ORDERS} × {steps} steps: loss {curves['reference'][0, 0]:.3f} → "
            f"{ends['reference']:.4f} over the last 20, kernel {ends['triton']:.4f}; "
            f"the mean curves are {apart:.2e} apart, as far as rounding alone makes them {allowed:.2e}",
            flush=True,
        )
        result["arms"][name] = {
            "curves": {impl: x.tolist() for impl, x in curves.items()},
            "apart": float(apart),
            "by_rounding": float(allowed),
        }
        if not apart <= 2 * allowed:
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
    parser.add_argument("--recompute", action="store_true", help="arms that compute again what others keep, too")
    parser.add_argument("--name", help="what the result file's name ends with")
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/coupling.py measures a GPU, and there is none here.")
    {"op": measure_op, "step": measure_step, "train": compare_training}[options.what](options)


if __name__ == "__main__":
    main()
