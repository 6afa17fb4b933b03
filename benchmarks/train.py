"""Training speed and memory, end to end, against a plain loop on the same batches in the same process.

    python benchmarks/train.py CORPUS --size 51m --sequences 64      # on a GPU, CORPUS a prepared folder
    python benchmarks/train.py CORPUS --size nano --steps 20         # on the CPU

The plain loop is what one would write by hand: compiled model, torch's cross-entropy over all logits, autocast, fused
AdamW, clipping. Ours is `qklab.train` as everyone runs it: data loading, records, evaluation, probes, checkpoints.
Correctness comes first: the two loss curves must agree within the noise of the precision, or nothing is reported.
"""

import argparse
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measure import RESULTS, keep, matrix_rate, provenance, synchronize
from qklab.data.batches import Batches
from qklab.data.order import Order
from qklab.data.shards import Corpus
from qklab.model.decoder import Decoder
from qklab.runs.directory import RunDirectory
from qklab.train.launch import choose_precision, train
from qklab.train.machine import Machine
from qklab.train.settings import resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.trainer import Trainer

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, NVIDIA's data sheets
GATE = {"bf16": 0.02, "fp32": 2e-3}  # nats
KINDS = {
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitk",
    "attention": r"flash|fmha|cudnn|flex_attention",
    "vocabulary loss": r"loss_kernel",
    "optimiser and clipping": r"multi_tensor|adam|foreach|norm_kernel|lpnorm",
    "copies": r"memcpy|memset",
}


def settings(corpus: Path, options: argparse.Namespace, packing: str) -> tuple[RunSpec, ExecutionSpec]:
    context = {} if options.context is None else {"context": options.context}
    spec, execution = resolve_run(
        {
            "corpus": {"source": str(corpus), "tokenizer": "gpt2" if options.size != "nano" else "bpe"},
            "model": {"recipe": options.size} | context,
            "batch": {"sequences": options.sequences, "packing": packing},
            "optimiser": {"lr": 1e-3},
            "budget": {"tokens": 1},
            "evaluation": {"times": 2},
            "execution": {"device": options.device},
        }
    )
    return spec.replace(budget=spec.budget.replace(tokens=options.steps * spec.tokens_per_step)), execution


def plain_loop(spec: RunSpec, corpus: Corpus, machine: Machine, gpu: bool) -> dict[str, Any]:
    """The loop one would write by hand. All steps but the first five are timed, waiting for the device at both ends."""
    assert spec.steps is not None
    began = 0.0
    order = Order(corpus.splits["train"], spec.seed, spec.batch.sequences, spec.model.context, spec.batch.packing)
    model = Decoder(spec.model, seed=spec.seed).to(machine.device)
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=spec.optimiser.lr, betas=(0.9, 0.95), fused=True)

    def loss(ids: Tensor, targets: Tensor, segments: Tensor | None) -> Tensor:
        logits = model(ids, segments=segments)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    call = torch.compile(loss, dynamic=False) if gpu else loss
    batches = Batches(order, 0, 0, 1, machine.device)
    losses: list[Tensor] = []
    for step in range(spec.steps):
        if step == 5:
            synchronize(machine.device.type)
            began = time.perf_counter()
        for group in optimiser.param_groups:
            group["lr"] = spec.optimiser.lr * spec.schedule.factor((step + 1) / spec.steps)
        with torch.autocast(machine.device.type, torch.bfloat16, enabled=spec.precision == "bf16"):
            value = call(*next(batches))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(value.detach())
    synchronize(machine.device.type)
    seconds = time.perf_counter() - began
    batches.close()
    return {
        "loss": torch.stack(losses).tolist(),
        "tokens_per_second": (spec.steps - 5) * spec.tokens_per_step / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else 0,
    }


def ours(spec: RunSpec, execution: ExecutionSpec, folder: Path) -> dict[str, Any]:
    """`qklab.train`, with everything on."""
    summary = train(spec, folder, execution).summary
    assert summary is not None
    metrics = RunDirectory(folder).metrics("train")
    parts = summary["seconds_of_last_process"]
    running = parts["all"] - parts["first step"]
    return {
        "loss": [record["loss"] for record in metrics],
        "tokens_per_second": summary["tokens_per_second"],
        "tokens_per_second_all_in": (summary["tokens"] - spec.tokens_per_step) / running,
        "seconds": {"training steps": summary["seconds"]} | parts,
        "peak_bytes": summary["peak_memory_bytes"],
    }


def gate(plain: list[float], own: list[float], precision: str) -> float:
    """The distance between the curves' means over the first twenty steps; ends the benchmark if it is too large.

    Later the two drift apart as any two runs do whose sums are rounded differently.
    """
    early = min(20, len(plain))
    apart = abs(sum(plain[:early]) - sum(own[:early])) / early
    if not apart <= GATE[precision]:
        sys.exit(f"the loss curves begin {apart:.4f} nats apart, more than {GATE[precision]}; nothing was measured.")
    return apart


def profile(spec: RunSpec, execution: ExecutionSpec, corpus: Corpus, machine: Machine) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and the slowest kernels."""
    trainer = Trainer(spec, execution, corpus, machine)
    batches = Batches(trainer.order, 0, 0, 1, machine.device)
    for _ in range(5):
        trainer.step(next(batches), [1e-4])
    steps = 5
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            trainer.step(next(batches), [1e-4])
        torch.cuda.synchronize()
    batches.close()
    kernels: dict[str, float] = defaultdict(float)
    spans: list[tuple[float, float]] = []
    for event in recorded.events() or []:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernels[event.name] += event.time_range.elapsed_us() / 1e3 / steps
            spans.append((event.time_range.start, event.time_range.end))
    kinds: dict[str, float] = defaultdict(float)
    for name, ms in kernels.items():
        kind = next(
            (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.I)), "elementwise and norms"
        )
        kinds[kind] += ms
    span = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e3 / steps
    slowest = sorted(kernels.items(), key=lambda item: -item[1])[:25]
    return {
        "ms_per_step": span,
        "idle_ms": span - sum(kernels.values()),
        "kinds_ms": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "slowest_ms": {name[:100]: round(ms, 3) for name, ms in slowest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="a prepared corpus")
    parser.add_argument("--size", default="nano", help="a recipe")
    parser.add_argument("--context", type=int)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--packings", nargs="+", default=["contiguous", "packed"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--name", help="what the result file's name ends with; by default the device")
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    corpus = Corpus.open(options.corpus)
    result: dict[str, Any] = {"provenance": provenance(options.device, options.commit), "packings": {}}
    for packing in options.packings:
        spec, execution = settings(options.corpus, options, packing)
        machine = Machine.open(execution)
        spec = choose_precision(spec, machine)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        plain = plain_loop(spec, corpus, machine, gpu)
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as scratch:
            own = ours(spec, execution, Path(scratch) / "run")
        apart = gate(plain["loss"], own["loss"], spec.precision)
        late = abs(sum(plain["loss"][-10:]) - sum(own["loss"][-10:])) / 10
        flops = 3 * spec.model.flops_per_token()
        rows = {"plain loop": plain, "qklab": own}
        peak = next((value for name, value in PEAKS.items() if gpu and name in torch.cuda.get_device_name()), None)
        print(
            f"\n{options.size}, {options.sequences} × {spec.model.context}, {packing}, {spec.precision}, "
            f"{options.steps} steps"
        )
        for name, row in rows.items():
            row["model_flop_utilisation"] = row["tokens_per_second"] * flops / peak if peak else None
            used = f"  MFU {row['model_flop_utilisation']:.1%}" if peak else ""
            memory = f"  peak {row['peak_bytes'] / 2**30:.2f} GiB"
            print(f"  {name:<11} {row['tokens_per_second']:>12,.0f} tokens/s{memory}{used}")
        print(
            f"  {own['tokens_per_second'] / plain['tokens_per_second']:.3f} × the plain loop; all in "
            f"(evaluation, probes, checkpoints): {own['tokens_per_second_all_in']:,.0f} tokens/s; "
            f"the first twenty losses are {apart:.4f} nats apart, the last ten {late:.4f}"
        )
        print("  seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in own["seconds"].items()))
        entry: dict[str, Any] = {"rows": rows, "losses_apart": {"first 20": apart, "last 10": late}}
        if gpu:
            entry["profile"] = profile(spec, execution, corpus, machine)
            kinds = entry["profile"]["kinds_ms"]
            print(
                "  ms a step: "
                + ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.items())
                + f", idle {entry['profile']['idle_ms']:.2f}"
            )
            result["matrix_flops_per_s"] = matrix_rate("cuda", torch.bfloat16)
        result["packings"][packing] = entry
        torch._dynamo.reset()
    result["set_up"] = {"size": options.size, "sequences": options.sequences, "steps": options.steps}
    keep(f"train-{options.size}-{options.name or options.device}", result, options.out)


if __name__ == "__main__":
    main()
