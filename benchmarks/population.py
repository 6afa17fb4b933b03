"""What a population buys: tokens/s of S runs in one step against one run alone, as `qklab study` trains them.

    python benchmarks/population.py --sizes nano micro mini          # on a GPU: solo and population, standard attention
    python benchmarks/population.py --sizes nano --arms standard leapfrog affine k=v qk-norm
    python benchmarks/population.py --sizes nano --profile           # where a population's step spends its time
    python benchmarks/population.py --sizes nano --curves            # whole loss curves, population against solo

Each case is a process of its own, which trains with everything that belongs to a run: data, records, optimiser. All
steps but the first are timed. Correctness comes first: over the first steps every member's loss must be its solo run's
within the noise of the precision, or nothing is reported. The floor is the products alone at 700 TFLOP/s, or the bytes
of the optimiser's state (weights, gradients, two moments: read once, all but the gradient written once) at 4.8 TB/s,
whichever is more.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import RESULTS, keep, provenance
from qklab.data.batches import Batch
from qklab.data.prepare import prepare_corpus
from qklab.data.shards import Corpus
from qklab.runs.directory import RunDirectory
from qklab.study.compare import list_arms
from qklab.train.launch import choose_precision, train_population
from qklab.train.machine import Machine
from qklab.train.population import PopulationTrainer
from qklab.train.settings import merge_settings, resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.trainer import Trainer

SIZES = {"nano": (16, 15), "micro": (16, 15), "mini": (16, 9), "34m": (16, 6)}  # windows a step, members
RATES = (1e-3, 2e-3, 4e-3)
PRODUCTS, BYTES = 700e12, 4.8e12  # FLOP/s in bf16 and bytes/s that an H200 reaches
GATE = {"bf16": 0.03, "fp32": 2e-3}  # nats, over the first steps
EARLY = 20
ORDERS, WARM_UP = 3, 20  # of the curves: orders of the rows, steps until the learning rate is reached


def make_specs(size: str, arm: str, members: int, options: argparse.Namespace) -> tuple[list[RunSpec], ExecutionSpec]:
    """Runs of a size and arm that differ in seed and learning rate."""
    settings: dict[str, Any] = {
        "model": {"recipe": size},
        "corpus": {"source": options.corpus},
        "batch": {"sequences": SIZES[size][0], "packing": options.packing},
        "evaluation": {"times": 1, "final_tokens": 8192, "probes": 0},
        "execution": {"device": options.device, "keep": 0},
    }
    spec, execution = resolve_run(merge_settings(settings, list_arms()[arm]))
    spec = spec.replace(budget=spec.budget.replace(tokens=options.steps * spec.tokens_per_step))
    return [
        spec.replace(seed=index // len(RATES), optimiser=spec.optimiser.replace(lr=RATES[index % len(RATES)]))
        for index in range(members)
    ], execution


def run_case(size: str, arm: str, members: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and read off what the runs recorded."""
    specs, execution = make_specs(size, arm, members, options)
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / f"{number}" for number in range(members)]
        outcomes = train_population(specs, folders, execution)
        curves = [[step["loss"] for step in RunDirectory(path).metrics("train")] for path in folders]
    summary = outcomes[0].summary
    assert summary is not None
    spec = specs[0]
    step = members * spec.tokens_per_step
    floor = max(step * 3 * spec.model.flops_per_token() / PRODUCTS, members * spec.model.parameters() * 28 / BYTES)
    return {
        "size": size,
        "arm": arm,
        "members": members,
        "packing": options.packing,
        "parameters": spec.model.parameters(),
        "tokens_per_second": summary["tokens_per_second"],
        "floor_tokens_per_second": step / floor,
        "first_step_seconds": summary["seconds_of_last_process"]["first step"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "early": [sum(curve[:EARLY]) / EARLY for curve in curves],
        "precision": "bf16" if torch.cuda.is_available() else "fp32",
    }


def run_in_process(size: str, arm: str, members: int, options: argparse.Namespace) -> dict[str, Any]:
    """The case in a process of its own."""
    given = ["--corpus", options.corpus, "--steps", str(options.steps), "--packing", options.packing]
    case = [sys.executable, __file__, *given, "--device", options.device, "--case", size, arm, str(members)]
    done = subprocess.run(case, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{size} {arm} × {members} failed with code {done.returncode}; what it said is above.")
    return json.loads(done.stdout.splitlines()[-1])


def check_agreement(solo: dict[str, Any], population: dict[str, Any]) -> float:
    """How far the first member's curve begins from the same run alone; ends the benchmark if that is too far."""
    apart = abs(solo["early"][0] - population["early"][0])
    if not apart <= GATE[solo["precision"]]:
        sys.exit(f"{solo['size']} {solo['arm']}: the loss begins {apart:.4f} nats from the solo run's; not measured.")
    return apart


def describe_case(case: dict[str, Any], solo: dict[str, Any] | None) -> str:
    rate, floor = case["tokens_per_second"], case["floor_tokens_per_second"]
    against = f", {rate / solo['tokens_per_second']:.1f} × solo" if solo else ""
    return (
        f"{case['size']:6} {case['arm']:10} × {case['members']:2}: {rate / 1e6:6.2f} M tokens/s{against}, "
        f"{rate / floor:.0%} of the floor's {floor / 1e6:.1f} M; first step {case['first_step_seconds']:.1f} s, "
        f"{case['peak_memory_bytes'] / 2**30:.1f} GiB"
    )


def open_trainer(specs: list[RunSpec], execution: ExecutionSpec) -> Trainer | PopulationTrainer:
    """What trains these runs, before its first step."""
    machine = Machine.open(execution)
    specs = [choose_precision(spec, machine) for spec in specs]
    corpus = Corpus.open(prepare_corpus(specs[0].corpus).folder)
    if len(specs) == 1:
        return Trainer(specs[0], execution, corpus, machine)
    return PopulationTrainer(specs, execution, corpus, machine)


def profile_step(size: str, arm: str, members: int, options: argparse.Namespace) -> None:
    """Print the kernels of a population's step, slowest first."""
    trainer = open_trainer(*make_specs(size, arm, members, options))
    batches = trainer.read_batches(0)
    for _ in range(10):
        trainer.step(next(batches), [1e-3] * members)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(5):
            trainer.step(next(batches), [1e-3] * members)
        torch.cuda.synchronize()
    batches.close()
    print(recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))


def draw_curves(specs: list[RunSpec], execution: ExecutionSpec) -> Tensor:
    """Loss curves of runs trained together, each with the rows of every batch in several orders, which are the same
    model up to rounding: [orders, steps, runs]."""
    trainer = open_trainer(specs, execution)
    trainer.optimiser.materialise()
    alone = isinstance(trainer, Trainer)
    tensors = [trainer.tensors()] if alone else [trainer.tensors(run) for run in range(len(specs))]
    live = [(name, tensor) for named in tensors for name, tensor in named.items()]
    # an optimiser's state begins at zero, and creating it may have counted as a step
    start = [torch.zeros_like(value) if name.startswith("optimiser.") else value.clone() for name, value in live]
    curves = []
    for order in range(ORDERS):
        for (_, tensor), value in zip(live, start, strict=True):
            tensor.copy_(value)
        batches, losses = trainer.read_batches(0), []
        for step in range(specs[0].steps or 0):
            batch = Batch(*(None if t is None else t.roll(order, -2) for t in next(batches)))  # pyright: ignore[reportArgumentType]
            lrs = [min(1.0, (step + 1) / WARM_UP) * spec.optimiser.lr for spec in specs]
            losses.append([nats for nats, _ in trainer.step(batch, lrs).values()])
        batches.close()
        curves.append(losses)
    return torch.tensor(curves, dtype=torch.float64)


def compare_curves(size: str, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs at every rate, alone and together. As far as orders of the rows make a run stray from itself, so far may the
    population's mean curve stray from the solo run's."""
    specs, execution = make_specs(size, arm, len(RATES), options)
    together = draw_curves(specs, execution)
    alone = torch.cat([draw_curves([spec], execution) for spec in specs], 2)
    both = torch.stack([alone, together])
    noise = (both - both.mean(1, keepdim=True)).square().sum((0, 1)) / (2 * ORDERS - 2)
    # a mean over orders errs by the spread over √orders, a difference of two by √2 times that
    allowed = (2 / ORDERS * noise).mean(0).sqrt()
    apart = (together.mean(0) - alone.mean(0)).square().mean(0).sqrt()
    ends = both[:, :, -20:].mean((1, 2))
    for lr, *numbers in zip(RATES, ends[0], ends[1], apart, allowed, strict=True):
        solo, population, distance, rounding = map(float, numbers)
        print(
            f"{size} {arm} at {lr:g}, {ORDERS} × {both.shape[2]} steps: ends at {solo:.4f} alone and {population:.4f} "
            f"in a population; mean curves {distance:.2e} apart, as far as rounding alone makes them {rounding:.2e}",
            flush=True,
        )
    return {"size": size, "arm": arm, "rates": RATES, "apart": apart.tolist(), "by_rounding": allowed.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["nano", "micro", "mini"])
    parser.add_argument("--arms", nargs="+", default=["standard"])
    parser.add_argument("--members", type=int)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--packing", default="packed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="population")
    parser.add_argument("--commit", help="where git does not know it")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        size, arm, members = options.case
        print(json.dumps(run_case(size, arm, int(members), options)))
        return
    cases, curves = [], []
    for size in options.sizes:
        members = options.members or SIZES[size][1]
        for arm in options.arms:
            if options.profile:
                profile_step(size, arm, members, options)
                continue
            if options.curves:
                curves.append(compare_curves(size, arm, options))
                continue
            solo = run_in_process(size, arm, 1, options)
            together = run_in_process(size, arm, members, options)
            together["apart"] = check_agreement(solo, together)
            for case in (solo, together):
                print(describe_case(case, None if case is solo else solo), flush=True)
                cases.append({name: value for name, value in case.items() if name != "early"})
    if found := {name: value for name, value in {"cases": cases, "curves": curves}.items() if value}:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        keep(options.name, found | provenance(device, options.commit), options.out)
    strays = [case for case in curves if max(map(truediv, case["apart"], case["by_rounding"])) > 2]
    if strays:
        sys.exit("a population strays from its solo runs by more than twice what rounding does.")


if __name__ == "__main__":
    main()
