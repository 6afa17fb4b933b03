"""Many runs in one step: runs of one shape that differ in seed and in the numbers of optimiser and schedule.

A small model cannot fill a GPU. Here S of them are one stacked model (`qklab.stack`) under one compiled step, whose
loss is a vector; the optimiser updates each member with its own numbers. Each stays a run: what it computes is, up to
rounding, what it would compute alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qklab.data.batches import Batch, Batches
from qklab.data.order import Order, Windows
from qklab.data.shards import Corpus
from qklab.model.decoder import Decoder
from qklab.model.dropout import set_dropout_key
from qklab.model.stack import list_unstackable, stack, view_member
from qklab.optim.norms import Table
from qklab.optim.population import PopulationOptimiser, measure_gradient_norms
from qklab.runs.directory import RunError
from qklab.schema import describe_change
from qklab.train.machine import Machine, measure_total_memory
from qklab.train.objective import Objective
from qklab.train.parallel import should_compile
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.trainer import BaseTrainer, PendingStep, draw_dropout_key, order_windows

LARGEST = 40_000_000  # parameters of a run that leaves a GPU idle: larger ones follow each other
MEMORY_SHARE = 0.4
STATE_BYTES = 18  # a parameter
# numbers kept for each token and layer, in units of the width and of the MLP's: a little more than nano and mini took
ACTIVATIONS, KEPT_MLP = 10, 3
# What a compiled step takes and what it gains on a GPU, in seconds. An H200 took 24 to 43 s for the first step of a run
# or population; 3,000 steps of a run alone, whose kernels the host launches, make up for that. A population's step is a
# CUDA graph, compiled or not: compiling only spares it what its kernels write and read in between, a third of a step.
# At the speeds measured for nano, micro and mini that is 2.9, 12 and 12 ms, or as much for each token, layer and unit
# of width. Most of the time that one population compiles another is trained on the same GPU: a fifth is taken as lost.
# So fifteen runs of nano need three thousand steps, and five of two layers, width 64 and 1,024 tokens a step a hundred
# thousand.
COMPILING, LOST, SAVED_LAUNCHES, SAVED_TRAFFIC = 30.0, 0.2, 0.01, 7e-11
WARM_UP = 3  # steps before one is recorded as a CUDA graph: by then everything is compiled and allocated


class SharedOrder:
    """The orders of several runs as one: windows [U, B, T] of the U that differ."""

    def __init__(self, orders: Sequence[Order]):
        self.orders = orders

    def samples(self, step: int, rank: int = 0, world: int = 1) -> range:
        return self.orders[0].samples(step, rank, world)

    def rows(self, step: int, rank: int = 0, world: int = 1) -> Windows:
        parts = [order.rows(step, rank, world) for order in self.orders]
        joined = (None if each[0] is None else np.stack(each) for each in zip(*parts, strict=True))
        return Windows(*joined)  # pyright: ignore[reportArgumentType]


class PopulationTrainer(BaseTrainer):
    """S runs' models, optimisers and data on one device."""

    optimiser: PopulationOptimiser

    def __init__(self, specs: Sequence[RunSpec], execution: ExecutionSpec, corpus: Corpus, machine: Machine):
        refuse_population(specs, machine)
        super().__init__(specs, execution, corpus, machine)
        self.members = len(specs)
        with torch.device("cpu"):
            decoder = stack([Decoder(spec.model, seed=spec.seed) for spec in specs]).to(machine.device)
        decoder.recompute(execution.recompute)
        self.objective = Objective(decoder, self.spec.z_loss)
        compiles = should_compile(execution, machine)
        self.call = torch.compile(self.objective, dynamic=False) if compiles else self.objective
        controls = [spec.logit_control for spec in specs]
        numbers = [spec.optimiser for spec in specs]
        self.optimiser = PopulationOptimiser(numbers, self.decoder, controls, compiles=compiles)
        seeds = list(dict.fromkeys(spec.seed for spec in specs))
        self.orders = SharedOrder([order_windows(self.spec.replace(seed=seed), corpus) for seed in seeds])
        self.reads = torch.tensor([seeds.index(spec.seed) for spec in specs], device=machine.device)
        self.dropout_keys = torch.zeros(len(specs), dtype=torch.int64, device=machine.device)
        set_dropout_key(self.decoder, self.dropout_keys)
        self.graph: StepGraph | None = None
        self.steps_done = 0

    @property
    def deferred(self) -> bool:
        return self.machine.device.type == "cuda"

    def read_batches(self, start: int) -> Batches:
        """Rows [U, B, T] of the runs whose order differs."""
        return Batches(self.orders, start, 0, 1, self.machine.device)

    def step(self, batch: Batch, lrs: Sequence[float]) -> PendingStep:
        if self.spec.model.dropout:
            keys = [draw_dropout_key(spec, state.step) for spec, state in zip(self.specs, self.states, strict=True)]
            self.dropout_keys.copy_(torch.tensor(keys), non_blocking=True)
        rates = torch.tensor(lrs, dtype=torch.float64).to(self.machine.device, non_blocking=True)
        if self.machine.device.type == "cuda" and self.graph is None and self.steps_done >= WARM_UP:
            self.graph = StepGraph(self.advance, batch, rates)
        outcome = self.advance(batch, rates) if self.graph is None else self.graph(batch, rates)
        self.steps_done += 1
        for state in self.states:
            state.step += 1
        return PendingStep.of(self.states[0].step, lrs, outcome)

    def advance(self, batch: Batch, lrs: Tensor) -> Tensor:
        """One step on the device, which the host need not wait for: loss and gradient norm of each run, [S, 2]."""
        self.optimiser.zero_grad()
        ids, targets, segments = (None if t is None else t[self.reads] for t in batch)
        with torch.autocast(self.machine.device.type, torch.bfloat16, enabled=self.bf16):
            losses, nll = self.call(ids, targets, segments)
        losses.sum().backward()
        norms = measure_gradient_norms(self.decoder)
        outcome = torch.stack([nll.double(), norms.double()], 1)
        self.optimiser.step(lrs, ~outcome.isfinite().all(1), norms)
        return outcome

    def view_decoder(self, run: int) -> Decoder:
        """Its parameters are those that are trained."""
        return view_member(self.decoder, run)

    def factors(self, run: int) -> dict[str, Table]:
        return self.optimiser.factors(run)

    def tensors(self, run: int) -> dict[str, Tensor]:
        model = {f"model.{name}": tensor.detach()[run] for name, tensor in self.decoder.named_parameters()}
        return model | {f"optimiser.{name}": tensor for name, tensor in self.optimiser.tensors(run).items()}


class StepGraph:
    """A step as a CUDA graph: one launch instead of hundreds, which small models wait for most of the time."""

    def __init__(self, advance: Callable[[Batch, Tensor], Tensor], batch: Batch, lrs: Tensor):
        self.batch = Batch(*(None if t is None else t.clone() for t in batch))  # pyright: ignore[reportArgumentType]
        self.lrs = lrs.clone()
        self.graph = torch.cuda.CUDAGraph()
        # other threads make batches and write checkpoints meanwhile, and what they ask of CUDA is none of the graph's
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outcome = advance(self.batch, self.lrs)

    def __call__(self, batch: Batch, lrs: Tensor) -> Tensor:
        for own, given in zip(self.batch, batch, strict=True):
            if own is not None and given is not None:
                own.copy_(given, non_blocking=True)
        self.lrs.copy_(lrs)
        self.graph.replay()
        return self.outcome


def describe_shape(spec: RunSpec) -> dict[str, Any]:
    """What the runs of a population have in common: all but the seed and the numbers of optimiser, schedule and logit
    control."""
    settings = spec.to_dict()
    settings["optimiser"] = {"kind": spec.optimiser.kind}
    settings["logit_control"] = {"method": spec.logit_control.method}
    return {name: value for name, value in settings.items() if name not in ("seed", "schedule")}


def explain_solo(spec: RunSpec) -> str | None:
    """Why a run trains alone rather than in a population; None where it need not."""
    if spec.steps is None:
        return "its budget is in seconds, and members of a population share their time"
    with torch.device("meta"):
        reasons = list_unstackable(Decoder(spec.model, seed=0))
    return "; ".join(reasons) or None


def choose_population_size(spec: RunSpec, device: str, population: str | int, runs: int) -> int:
    """How many of `runs` runs like this one are trained together: 1 where that does not pay or cannot be."""
    if population == "off" or runs < 2 or explain_solo(spec) is not None:
        return 1
    if population != "auto":
        return min(int(population), runs)
    if device != "cuda" or spec.model.parameters() > LARGEST:
        return 1
    fitting = max(1, int(min(runs, measure_device_memory() / estimate_bytes(spec))))
    return math.ceil(runs / math.ceil(runs / fitting))


def does_compiling_pay(spec: RunSpec, runs: int, population: str | int) -> bool:
    """Whether so many runs of this shape gain as much on a GPU by a compiled step as it takes to compile it."""
    if spec.steps is None:
        return True
    alone = choose_population_size(spec, "cuda", population, runs) == 1
    launches, lost = (SAVED_LAUNCHES, 1.0) if alone else (0.0, LOST)
    traffic = SAVED_TRAFFIC * spec.tokens_per_step * spec.model.layers * spec.model.width
    return runs * spec.steps * (launches + traffic) >= lost * COMPILING


def measure_device_memory() -> float:
    """What a population may take of the GPU: not all of it, since another may be on its way."""
    if not torch.cuda.is_available():  # the GPU is another machine's
        return math.inf
    return MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory


def estimate_bytes(spec: RunSpec) -> float:
    """Of one member: weights, gradients, moments and the copy autocast makes; and what a backward pass keeps."""
    model = spec.model
    kept = model.layers * (ACTIVATIONS * model.width + KEPT_MLP * model.hidden) + 4 * model.width
    return STATE_BYTES * model.parameters() + spec.tokens_per_step * 2 * kept


def refuse_population(specs: Sequence[RunSpec], machine: Machine) -> None:
    """Raise where these runs cannot be trained together."""
    if not specs:
        raise RunError("a population has at least one run, but none came.")
    if machine.world > 1:
        raise RunError(f"a population is trained by one process, but {machine.world} ranks came; start it without.")
    first = describe_shape(specs[0])
    for spec in specs[1:]:
        for name, value in describe_shape(spec).items():
            if value != first[name]:
                raise RunError(
                    "runs of a population may differ in seed and in numbers of optimiser, schedule and logit control, "
                    f"but {name} differs: {describe_change(name, value, first[name])}; train them apart."
                )
    if reason := explain_solo(specs[0]):
        raise RunError(f"this run cannot be part of a population: {reason}; train it alone.")
    each, total = estimate_bytes(specs[0]), measure_total_memory(machine.device)
    if len(specs) * each > total:
        raise RunError(
            f"a population of {len(specs)} needs about {len(specs) * each / 2**30:,.1f} GiB and the "
            f"{machine.device.type} has {total / 2**30:,.1f}; train at most {max(1, int(total // each))} together."
        )
