"""What logit control adds to a training step, against the same step without it, in one run.

    python benchmarks/logit_control.py --size 51m --sequences 32 --steps 20       # on a GPU
    python benchmarks/logit_control.py --size nano --sequences 8 --steps 4        # on the CPU

The step is the trainer's own, on one batch of random tokens, so no corpus is needed. All arms step the same weights of
one (on a GPU compiled) model and take turns in blocks; each ratio is that of neighbouring blocks, and "none again", a
second optimiser without control, shows what the machine's noise alone makes of it. QK-clip measures logits in the
forward pass, so it has a model of its own and is compared with "none" there too.

Correctness comes first: under quack with τ = 1 the first step must be the bare optimiser's bit for bit, and with W_k
doubled the update of W_q must halve; on a GPU AdamW's step must not wait for the device. Otherwise nothing is measured.

The floor is what no implementation could avoid: the weights of queries and keys read once for their norms and written
once, at this machine's copy rate. A wrapper that cannot look into the optimiser has to keep a copy as well and moves
five times the weights: read, copy written, copy read, new weights read, scaled ones written.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import RESULTS, copy_rate, interleaved, keep, median_and_spread, provenance
from qklab.data.batches import Batch
from qklab.model.decoder import Decoder
from qklab.optim import LogitControlSpec, Optimiser, OptimiserSpec, attention_roles
from qklab.train.launch import choose_precision
from qklab.train.machine import Machine, work_around_bf16
from qklab.train.objective import Objective
from qklab.train.parallel import distribute_objective
from qklab.train.settings import resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.trainer import State, Trainer

LR = 1e-5  # small, so that the weights stay those of a new model
ARMS: dict[str, LogitControlSpec] = {
    "none": LogitControlSpec(method="none"),
    "none again": LogitControlSpec(method="none"),
    "fixed": LogitControlSpec(method="fixed", tau=0.5),
    "quack": LogitControlSpec(method="quack", tau=1.0),
    "quack, spectral": LogitControlSpec(method="quack", tau=1.0, norm="spectral"),
}
CLIPPED: dict[str, LogitControlSpec] = {"qk-clip": LogitControlSpec(method="qk-clip")}


class Bench(Trainer):
    """The trainer's step, without a corpus, for several optimisers of the same weights."""

    def __init__(self, spec: RunSpec, execution: ExecutionSpec, machine: Machine, arms: dict[str, LogitControlSpec]):
        self.spec, self.execution, self.machine = spec, execution, machine
        self.bf16 = spec.precision == "bf16"
        self.state = State()
        self.objective = Objective(Decoder(spec.model, seed=spec.seed).to(machine.device))
        self.call = distribute_objective(self.objective, execution, machine, self.bf16)
        self.arms = {name: Optimiser(spec.optimiser, self.decoder, control) for name, control in arms.items()}
        self.optimiser = next(iter(self.arms.values()))

    def block(self, name: str, batch: Batch, steps: int) -> Callable[[], None]:
        def run() -> None:
            self.optimiser = self.arms[name]
            for _ in range(steps):
                self.step(batch, [LR])

        return run

    def updates(self, name: str, gradients: list[Tensor], steps: int) -> Callable[[], None]:
        """The optimiser's part alone, on the same gradients every time."""

        def run() -> None:
            for parameter, gradient in zip(self.decoder.parameters(), gradients, strict=True):
                parameter.grad = gradient
            for _ in range(steps):
                self.arms[name].step(LR, self.skip())
            self.arms[name].zero_grad()

        return run

    def skip(self) -> Tensor | None:
        """As the trainer says that nothing is to be skipped."""
        return torch.zeros((), device=self.machine.device) if self.deferred else None


def settings(options: argparse.Namespace, kind: str) -> tuple[RunSpec, ExecutionSpec]:
    return resolve_run(
        {
            "corpus": {"tokenizer": "bpe" if options.size == "nano" else "gpt2"},  # only its size matters here
            "model": {"recipe": options.size},
            "batch": {"sequences": options.sequences, "packing": "contiguous"},
            "optimiser": {"kind": kind, "lr": LR},
            "execution": {"device": options.device, "threads": options.threads},
        }
    )


def random_batch(spec: RunSpec, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(spec.model.vocab, (spec.batch.sequences, spec.model.context + 1), generator=generator)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None).to(device)


def random_gradients(model: Decoder) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(p.shape, generator=generator).to(p.device) for p in model.parameters()]


def gate(spec: RunSpec, machine: Machine) -> None:
    """Ends the benchmark unless control does what it says, on this device and with this optimiser."""
    start = Decoder(spec.model, seed=spec.seed).to(machine.device)
    gradients = random_gradients(start)
    asked = OptimiserSpec(kind=spec.optimiser.kind, lr=1e-3)

    def stepped(control: str, growth: float) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        optimiser = Optimiser(asked, model, ARMS[control])
        for layer in attention_roles(model).values():
            layer.projections["k"].weight.data.mul_(growth)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimiser.step(asked.lr)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    bare, controlled = stepped("none", 1.0), stepped("quack", 1.0)
    for name, weight in bare.items():
        if not torch.equal(controlled[name], weight):
            sys.exit(
                f"the first step under quack is not the bare {asked.kind}'s: {name} differs; nothing was measured."
            )
    bare, controlled = stepped("none", 2.0), stepped("quack", 2.0)
    kept = 1 - asked.lr * asked.weight_decay
    before = dict(start.named_parameters())
    queries = [name for name in bare if name.endswith("attention.project.query.weight")]
    for name, weight in bare.items():
        if name not in queries:
            if not torch.equal(controlled[name], weight):
                sys.exit(f"with W_k doubled, {name} should move as without control; nothing was measured.")
            continue
        update, halved = weight - kept * before[name], controlled[name] - kept * before[name]
        rounding = 4 * torch.finfo(weight.dtype).eps * weight.abs().max()
        if not (halved - update / 2).abs().max() <= rounding:
            sys.exit(f"with W_k doubled, the update of {name} is not halved; nothing was measured.")
    if not queries:
        sys.exit("the model has no W_q that could be looked at; nothing was measured.")


def gate_waits(bench: Bench, gradients: list[Tensor]) -> None:
    """Ends the benchmark if a step of the optimiser makes the host wait for the device."""
    for name in bench.arms:
        bench.updates(name, gradients, 1)()  # creates its state
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    name = ""
    try:
        for name in bench.arms:
            bench.updates(name, gradients, 3)()
    except RuntimeError as error:
        torch.cuda.set_sync_debug_mode("default")
        sys.exit(f"the optimiser's step waits for the device with {name!r}: {error}; nothing was measured.")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels(bench: Bench, name: str, gradients: list[Tensor], steps: int = 5) -> dict[str, float]:
    """Kernels launched in the optimiser's part of a step, and the milliseconds they take on the device."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        bench.updates(name, gradients, steps)()
        torch.cuda.synchronize()
    spans = [
        event.time_range.elapsed_us()
        for event in recorded.events() or []
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    return {"kernels": len(spans) / steps, "kernel_ms": sum(spans) / 1e3 / steps}


def compared(times: dict[str, list[float]], steps: int, base: str = "none") -> dict[str, dict[str, float]]:
    """Milliseconds a step, and the ratio to the base of the same round: medians, and half the quartiles' distance."""
    rows = {}
    for name, seconds in times.items():
        middle, spread = median_and_spread([1e3 * s / steps for s in seconds])
        ratio, of_ratio = median_and_spread([s / b for s, b in zip(seconds, times[base], strict=True)])
        added = statistics.median([1e3 * (s - b) / steps for s, b in zip(seconds, times[base], strict=True)])
        rows[name] = {"ms": middle, "spread": spread, "ratio": ratio, "ratio_spread": of_ratio * ratio, "added": added}
    return rows


def measure(kind: str, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """One optimiser with and without each control."""
    spec, execution = settings(options, kind)
    machine = Machine.open(execution)
    spec = choose_precision(spec, machine)
    gate(spec, machine)
    batch, gpu = random_batch(spec, machine.device), machine.device.type == "cuda"
    bench = Bench(spec, execution, machine, ARMS)
    clipped = Bench(spec, execution, machine, CLIPPED)
    gradients = random_gradients(bench.decoder)
    if gpu and kind == "adamw":
        gate_waits(bench, gradients)
        gate_waits(clipped, gradients)
    of = dict.fromkeys(bench.arms, bench) | dict.fromkeys(clipped.arms, clipped)
    for name, own in of.items():
        own.block(name, batch, 3)()  # compiles, and creates the optimiser's state
    steps = {name: own.block(name, batch, options.steps) for name, own in of.items()}
    whole = compared(interleaved(steps, options.rounds, machine.device.type), options.steps)
    many = 10 * options.steps
    alone = {name: own.updates(name, gradients, many) for name, own in of.items()}
    part = compared(interleaved(alone, options.rounds, machine.device.type), many)
    weights = {
        id(t): t
        for layer in attention_roles(bench.decoder).values()
        for p in layer.projections.values()
        for t in p.tensors
    }
    bytes_controlled = sum(t.numel() * t.element_size() for t in weights.values())
    floor = {"read_and_written": 2 * bytes_controlled / rate * 1e3, "with_a_copy": 5 * bytes_controlled / rate * 1e3}
    result: dict[str, Any] = {
        "step": whole,
        "optimiser": part,
        "bytes_controlled": bytes_controlled,
        "floor_ms": floor,
        "precision": spec.precision,
        "context": spec.model.context,
        "waits_for_the_device": False if gpu and kind == "adamw" else None,
    }
    if gpu:
        result["kernels"] = {name: kernels(own, name, gradients) for name, own in of.items()}
    show(kind, options, result, whole["none"]["ms"])
    return result


def show(kind: str, options: argparse.Namespace, result: dict[str, Any], step: float) -> None:
    print(
        f"\n{kind}, {options.size}, {options.sequences} × {result['context']}, {result['precision']}, blocks of "
        f"{options.steps} steps, {options.rounds} rounds, {torch.get_num_threads()} threads"
    )
    print(f"  {'':<16}{'ms a step':>10}{'ratio':>18}   {'optimiser alone':>15}{'added ms':>10}{'of a step':>10}")
    for name, row in result["step"].items():
        part = result["optimiser"][name]
        ratio = f"{row['ratio']:.4f} ± {row['ratio_spread']:.4f}"
        share = f"{part['added'] / step:>10.2%}"
        print(f"  {name:<16}{row['ms']:>10.3f}{ratio:>18}   {part['ms']:>15.3f}{part['added']:>10.4f}{share}")
        if "kernels" in result:
            found = result["kernels"][name]
            print(f"  {'':<16}{found['kernels']:.0f} kernels, {found['kernel_ms']:.4f} ms on the device")
    least, copied = result["floor_ms"]["read_and_written"], result["floor_ms"]["with_a_copy"]
    added = result["optimiser"]["quack"]["added"]
    print(
        f"  floor: {result['bytes_controlled'] / 2**20:.2f} MiB of weights read and written once {least:.4f} ms, with "
        f"a copy {copied:.4f} ms; quack adds {added:.4f} ms, {added / least:.1f} and {added / copied:.1f} times as much"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="nano", choices=["nano", "51m", "124m"])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps in a block")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of every arm")
    parser.add_argument("--optimisers", nargs="+", default=["adamw", "muon"], choices=["adamw", "muon"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", help="what the result file's name ends with; by default the device")
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    if options.device == "cpu" and "muon" in options.optimisers:
        work_around_bf16(print)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rate = copy_rate(options.device)
    kinds = {}
    for kind in options.optimisers:
        kinds[kind] = measure(kind, options, rate)
        torch._dynamo.reset()
    result = {
        "provenance": provenance(options.device, options.commit),
        "set_up": {name: getattr(options, name) for name in ("size", "sequences", "steps", "rounds")},
        "copy_bytes_per_s": rate,
        "optimisers": kinds,
    }
    keep(f"logit-control-cost-{options.size}-{options.name or options.device}", result, options.out)


if __name__ == "__main__":
    main()
