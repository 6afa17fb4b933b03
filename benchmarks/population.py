"""What a population buys: tokens/s of S runs in one step against one run alone, as `qklab study` trains them.

    python benchmarks/population.py --sizes nano micro mini          # on a GPU: solo and population, standard attention
    python benchmarks/population.py --sizes nano micro mini --arms standard leapfrog affine k=v qk-norm  # at nano
    python benchmarks/population.py --sizes nano --profile           # where a population's step spends its time
    python benchmarks/population.py --sizes nano --curves            # whole loss curves, population against solo

Each case is a process of its own, which trains with everything that belongs to a run: data, records, optimiser. All
begin together, since most of their time is compiling, and are then timed one after another while the others wait.
Correctness comes first: over the first steps every member's loss must be its solo run's within the noise of the
precision, or nothing is reported. The floor is the products alone at 700 TFLOP/s, or the bytes
of the optimiser's state (weights, gradients, two moments: read once, all but the gradient written once) at 4.8 TB/s,
whichever is more.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import RESULTS, keep, list_kernels, provenance
from qklab.data.batches import Batch
from qklab.data.prepare import prepare_corpus
from qklab.data.shards import Corpus
from qklab.runs.directory import RunDirectory
from qklab.study.arms import list_arms
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
ORDERS, WARM_UP = 6, 20  # of the curves: orders of the rows, steps until the learning rate is reached
ALPHA = 0.01  # of the curves' p-values, after Holm
Case = tuple[str, str, int]  # size, arm, members


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


class Turn:
    """Times the steps after the first EARLY ones, which wait until it is their turn: until the file "go" is there."""

    def __init__(self, folder: Path, steps: int):
        self.folder, self.last, self.done, self.seconds = folder, steps, 0, 0.0

    def watch(self, trainer: type[Trainer] | type[PopulationTrainer]) -> None:
        """Let steps of this kind of trainer be counted and timed."""
        step = trainer.step

        def step_in_turn(own: Any, *given: Any) -> Any:
            if self.done == EARLY:
                self.wait()
                self.seconds = -time.perf_counter()
            outcome = step(own, *given)
            self.done += 1
            if self.done == self.last:
                wait_for_device()
                self.seconds += time.perf_counter()
            return outcome

        setattr(trainer, "step", step_in_turn)  # noqa: B010

    def wait(self) -> None:
        wait_for_device()
        (self.folder / "ready").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.02)


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_case(size: str, arm: str, members: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train, time the steps, and read off what the runs recorded."""
    specs, execution = make_specs(size, arm, members, options)
    turn = Turn(options.turn, options.steps)
    turn.watch(Trainer if members == 1 else PopulationTrainer)
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
        "tokens_per_second": (options.steps - EARLY) * step / turn.seconds,
        "floor_tokens_per_second": step / floor,
        "first_step_seconds": summary["seconds_of_last_process"]["first step"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "early": [sum(curve[:EARLY]) / EARLY for curve in curves],
        "precision": "bf16" if torch.cuda.is_available() else "fp32",
    }


def begin_case(case: Case, folder: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    """The case in a process of its own, which says in its folder when it is ready to be timed."""
    given = ["--corpus", options.corpus, "--steps", str(options.steps), "--packing", options.packing]
    given += ["--device", options.device, "--turn", str(folder), "--case", *map(str, case)]
    folder.mkdir()
    return subprocess.Popen([sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True)


def run_cases(cases: Sequence[Case], options: argparse.Namespace) -> dict[Case, dict[str, Any]]:
    """All of them begun together and timed one after another."""
    found: dict[Case, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {case: Path(name) / str(number) for number, case in enumerate(cases)}
        processes = {case: begin_case(case, folder, options) for case, folder in folders.items()}
        while any(p.poll() is None and not (folders[case] / "ready").exists() for case, p in processes.items()):
            time.sleep(0.1)
        for case, process in processes.items():
            (folders[case] / "go").touch()
            told, _ = process.communicate()
            if process.returncode:
                print(f"{' '.join(map(str, case))} failed with code {process.returncode}; what it said is above.")
            else:
                found[case] = json.loads(told.splitlines()[-1])
    return found


def check_agreement(solo: dict[str, Any], population: dict[str, Any]) -> float:
    """How far the first member's curve begins from the same run alone; ends the benchmark if that is too far."""
    apart = abs(solo["early"][0] - population["early"][0])
    if not apart <= GATE[solo["precision"]]:
        sys.exit(
            f"{solo['size']} {solo['arm']}: the loss begins {apart:.4f} nats from the solo run's; nothing is kept."
        )
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
    print(list_kernels(lambda: trainer.step(next(batches), [1e-3] * members)))
    batches.close()


def draw_curves(specs: list[RunSpec], execution: ExecutionSpec) -> Tensor:
    """Loss curves of runs trained together, each with the rows of every batch in several orders, which are the same
    model up to rounding: [orders, steps, runs]."""
    trainer = open_trainer(specs, execution)
    trainer.optimiser.materialise()
    tensors = [trainer.tensors(run) for run in range(len(specs))]
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
    """Runs at every rate, alone and together, with the rows of every batch in several orders, which changes rounding
    alone. p: the share of the ways to call half of a run's curves those of the population, for which the two mean
    curves are at least as far apart; small if being in a population changes more than an order does."""
    specs, execution = make_specs(size, arm, len(RATES), options)
    together = draw_curves(specs, execution)
    alone = torch.cat([draw_curves([spec], execution) for spec in specs], 2)
    curves = torch.cat([alone, together])
    halves = torch.tensor([[n in half for n in range(2 * ORDERS)] for half in combinations(range(2 * ORDERS), ORDERS)])
    signs = torch.where(halves, -1.0, 1.0).double() / ORDERS  # the first half is that of the runs alone
    apart = torch.einsum("po,otr->ptr", signs, curves).square().mean(1).sqrt()
    p_values = (apart >= apart[0] * (1 - 1e-9)).double().mean(0)
    for run, lr in enumerate(RATES):
        solo, population = (float(own[:, -20:, run].mean()) for own in (alone, together))
        print(
            f"{size} {arm} at {lr:g}, {ORDERS} × {curves.shape[1]} steps: ends at {solo:.4f} alone, {population:.4f} "
            f"in a population; mean curves {apart[0, run]:.2e} apart, halves at random {apart[:, run].median():.2e}; "
            f"p = {p_values[run]:.3f}",
            flush=True,
        )
    distances = {"apart": apart[0].tolist(), "halves": apart.median(0).values.tolist(), "p": p_values.tolist()}
    return {"size": size, "arm": arm, "rates": RATES, "orders": ORDERS, "steps": curves.shape[1]} | distances


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
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        size, arm, members = options.case
        print(json.dumps(run_case(size, arm, int(members), options)))
        return
    first, *larger = options.sizes
    asked = [*((first, arm) for arm in options.arms), *((size, "standard") for size in larger)]
    together = {(size, arm): options.members or SIZES[size][1] for size, arm in asked}
    if options.profile:
        for size, arm in asked:
            profile_step(size, arm, together[size, arm], options)
        return
    if options.curves:
        found: dict[str, Any] = {"curves": [compare_curves(size, arm, options) for size, arm in asked]}
    else:
        done = run_cases([(*one, members) for one in asked for members in (1, together[one])], options)
        for one in asked:
            solo, population = done.get((*one, 1)), done.get((*one, together[one]))
            if solo is not None and population is not None:
                population["apart"] = check_agreement(solo, population)
        for case in done.values():
            solo = done.get((case["size"], case["arm"], 1))
            print(describe_case(case, None if case is solo else solo), flush=True)
            del case["early"]
        found = {"cases": list(done.values())}
    keep(options.name, found | provenance("cuda" if torch.cuda.is_available() else "cpu", options.commit), options.out)
    if any(min(case["p"]) * len(case["p"]) < ALPHA for case in found.get("curves", [])):
        sys.exit("a population strays from its solo runs by more than rounding makes them stray from each other.")


if __name__ == "__main__":
    main()
