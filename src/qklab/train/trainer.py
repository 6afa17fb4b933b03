"""What can be done to a model in training: a step, an evaluation, a probe, a snapshot. When, is the loop's business."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qklab.data.batches import Batch, Batches, EvaluationWindows
from qklab.data.order import Order
from qklab.data.shards import Corpus
from qklab.data.targets import MaskedOrder, MaskedWindows, TaskOrder, TaskWindows
from qklab.model.decoder import Decoder
from qklab.model.dropout import set_dropout_key
from qklab.model.initialise import seed_of
from qklab.model.spec import DecoderSpec
from qklab.optim.norms import Table
from qklab.optim.optimiser import Optimiser
from qklab.optim.rows import full_tensor
from qklab.train.checkpoint import Checkpoint, Snapshot
from qklab.train.evaluate import Evaluation, EvaluationSums, evaluate_windows
from qklab.train.machine import Machine
from qklab.train.objective import Objective, named_weights
from qklab.train.parallel import (
    accumulate_gradients,
    distribute_objective,
    gradient_norm,
    release_gathered,
    should_compile,
)
from qklab.train.probe import Probe, round_numbers
from qklab.train.spec import ExecutionSpec, RunSpec


@dataclass
class State:
    """How far a run is: saved with every checkpoint."""

    step: int = 0  # steps done
    seconds: float = 0.0  # spent in training steps, the first of each process left out: it compiles and warms up
    timed_steps: int = 0
    skipped: int = 0  # steps whose loss or gradient was not finite
    best: float | None = None  # lowest validation loss
    best_step: int | None = None


@dataclass(frozen=True)
class PendingStep:
    """A step under way: its loss and gradient norm, for each run, are known once the device has got that far."""

    step: int
    lrs: Sequence[float]
    outcome: Tensor  # [runs, 2] on the host
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, step: int, lrs: Sequence[float], outcome: Tensor) -> Self:
        if not outcome.is_cuda:
            return cls(step, lrs, outcome, None)
        host = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True).copy_(outcome, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(step, lrs, host, arrived)

    def values(self) -> list[tuple[float, float]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return [(nats, norm) for nats, norm in self.outcome.tolist()]


class BaseTrainer:
    """Models, optimisers and data of runs, of which `Trainer` has one and `PopulationTrainer` several; asked by run."""

    objective: Objective
    optimiser: Any  # Optimiser or PopulationOptimiser
    members: int | None = None  # where one stacked model is all of them

    def __init__(self, specs: Sequence[RunSpec], execution: ExecutionSpec, corpus: Corpus, machine: Machine):
        self.specs, self.spec, self.execution, self.corpus, self.machine = specs, specs[0], execution, corpus, machine
        self.bf16 = self.spec.precision == "bf16"
        self.states = [State() for _ in specs]
        self.windows = split_windows(self.spec, corpus)
        self.probes = [make_probe(spec, self.windows) for spec in specs]

    @property
    def decoder(self) -> Decoder:
        return self.objective.decoder

    @property
    def deferred(self) -> bool:
        """Whether the host goes on to the next step before it knows how this one went."""
        raise NotImplementedError

    def read_batches(self, start: int) -> Batches:
        """What steps `start`, `start` + 1, … see."""
        raise NotImplementedError

    def step(self, batch: Batch, lrs: Sequence[float]) -> PendingStep:
        """Forward, backward and update of every run on its own rows; nothing changes for one whose loss or gradient is
        not finite."""
        raise NotImplementedError

    def evaluate(
        self,
        split: str,
        tokens: int | None,
        tick: Callable[[float], None] = lambda done: None,
        sums: EvaluationSums | None = None,
    ) -> list[Evaluation]:
        """Each run's loss."""
        result = evaluate_windows(
            self.objective,
            self.windows[split],
            self.corpus.tokenizer.byte_lengths,
            self.machine,
            tokens=tokens,
            rows=self.execution.rows or max(1, min(self.spec.batch.sequences // self.machine.world, 64)),
            bf16=self.bf16,
            tick=tick,
            sums=sums,
            members=self.members,
            counts_hits=self.spec.asks != "next token",
        )
        release_gathered(self.objective)
        return result

    def view_decoder(self, run: int) -> Decoder:
        """One run's model, whole."""
        raise NotImplementedError

    def factors(self, run: int) -> dict[str, Table]:
        """What logit control did at a run's last step."""
        raise NotImplementedError

    def take_probe(self, run: int) -> dict[str, Any]:
        """Attention on the probe batch, and what logit control did at the last step."""
        layers = self.probes[run].measure(self.view_decoder(run))
        return {"layers": layers} | describe_factors(self.factors(run))

    def tensors(self, run: int) -> dict[str, Tensor]:
        """Everything that a run continues from, under the names it has alone; views of what is trained."""
        raise NotImplementedError

    def snapshot(self, run: int) -> Snapshot:
        return take_snapshot(self.specs[run], self.states[run], self.tensors(run), self.probes[run])

    def restore(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Continue each run from its checkpoint; all are of one step."""
        self.optimiser.materialise()
        self.states = [
            load_checkpoint(checkpoint, self.tensors(run), self.probes[run])
            for run, checkpoint in enumerate(checkpoints)
        ]


class Trainer(BaseTrainer):
    """One run's model, optimiser and data on one rank."""

    optimiser: Optimiser

    def __init__(self, spec: RunSpec, execution: ExecutionSpec, corpus: Corpus, machine: Machine):
        super().__init__([spec], execution, corpus, machine)
        if machine.world == 1 and should_compile(execution, machine):
            self.objective, self.call = build_compiled(spec.model, spec.z_loss, execution, machine, self.bf16)
            renew_decoder(self.decoder, spec.seed)
        else:
            self.objective = build_objective(spec.model, spec.seed, spec.z_loss, machine)
            self.call = distribute_objective(self.objective, execution, machine, self.bf16)
        self.optimiser = Optimiser(spec.optimiser, self.decoder, spec.logit_control)
        self.order = order_windows(spec, corpus)
        self.dropout_key = torch.zeros(1, dtype=torch.int64, device=machine.device)
        set_dropout_key(self.decoder, self.dropout_key)

    def read_batches(self, start: int) -> Batches:
        return Batches(self.order, start, self.machine.rank, self.machine.world, self.machine.device)

    def step(self, batch: Batch, lrs: Sequence[float]) -> PendingStep:
        """On one global batch."""
        (state,), (lr,) = self.states, lrs
        rows = min(self.execution.rows or len(batch.ids), len(batch.ids))
        parts = batch.micro_batches(rows)
        total = torch.zeros((), device=self.machine.device, dtype=torch.float32)
        for number, part in enumerate(parts):
            self.dropout_key.fill_(draw_dropout_key(self.spec, state.step, self.machine.rank, number))
            with accumulate_gradients(self.call, last=number == len(parts) - 1):
                with torch.autocast(self.machine.device.type, torch.bfloat16, enabled=self.bf16):
                    loss, nll = self.call(*part)
                share = len(part.ids) / len(batch.ids)
                (loss * share).backward()
                total += nll * share
        parameters = list(self.decoder.parameters())
        norm = gradient_norm(parameters)
        outcome = self.average_over_ranks(total, norm)
        wrong = 1.0 - outcome.isfinite().all().float()
        waits = not self.deferred
        if waits and wrong.item():
            self.optimiser.forget()
        else:
            if self.spec.optimiser.clip:
                nn.utils.clip_grads_with_norm_(parameters, self.spec.optimiser.clip, norm)
            self.optimiser.step(lr, skip=None if waits else wrong)
        self.optimiser.zero_grad()
        state.step += 1
        return PendingStep.of(state.step, lrs, outcome[None])

    @property
    def deferred(self) -> bool:
        """The device then skips a bad update by itself, which fused AdamW can and Muon cannot."""
        return self.machine.device.type == "cuda" and self.spec.optimiser.kind == "adamw" and not self.sharded

    def average_over_ranks(self, nats: Tensor, norm: Tensor) -> Tensor:
        """The loss averaged over ranks, and the norm, which is the same on all: [2] on the device."""
        pair = torch.stack([nats.double(), norm.double()])
        if self.machine.world > 1:
            dist.all_reduce(pair)
            pair = pair / self.machine.world
        return pair

    def view_decoder(self, run: int) -> Decoder:
        return gather_decoder(self.decoder) if self.sharded else self.decoder

    def factors(self, run: int) -> dict[str, Table]:
        return self.optimiser.factors()

    @property
    def sharded(self) -> bool:
        return self.machine.world > 1 and self.execution.parallel == "fsdp"

    def tensors(self, run: int) -> dict[str, Tensor]:
        model = {f"model.{name}": tensor.detach() for name, tensor in named_weights(self.decoder)}
        return model | {f"optimiser.{name}": tensor for name, tensor in self.optimiser.tensors().items()}


def build_objective(model: DecoderSpec, seed: int, z_loss: float, machine: Machine) -> Objective:
    with torch.device("cpu"):
        decoder = Decoder(model, seed=seed)
    return Objective(decoder.to(machine.device), z_loss)


@functools.lru_cache(maxsize=1)
def build_compiled(
    model: DecoderSpec, z_loss: float, execution: ExecutionSpec, machine: Machine, bf16: bool
) -> tuple[Objective, nn.Module]:
    """A model and its compiled step, which the next run of this shape in the process takes over: compiling takes longer
    than many a run."""
    objective = build_objective(model, 0, z_loss, machine)
    return objective, distribute_objective(objective, execution, machine, bf16)


def renew_decoder(decoder: Decoder, seed: int) -> None:
    """The decoder as if it had just been built from `seed`."""
    decoder.initialise(seed)
    decoder.zero_grad(set_to_none=True)
    decoder.train()
    for layer in range(decoder.spec.layers):
        decoder.attention(layer).watched = None


def order_windows(spec: RunSpec, corpus: Corpus) -> Order:
    """Which text the run sees when, and what is asked of it there."""
    batch, eot = spec.batch, corpus.tokenizer.eot
    common = (corpus.splits["train"], spec.seed, batch.sequences, spec.model.context, batch.packing)
    if spec.asks == "next token":
        return Order(*common)
    return (TaskOrder if spec.asks == "answers" else MaskedOrder)(*common, eot)


def split_windows(spec: RunSpec, corpus: Corpus) -> dict[str, EvaluationWindows]:
    """What there is to evaluate on."""
    kind = {"next token": EvaluationWindows, "answers": TaskWindows, "masked tokens": MaskedWindows}[spec.asks]
    return {
        name: kind(split, spec.model.context, corpus.tokenizer.eot, spec.batch.packing == "packed")
        for name, split in corpus.splits.items()
        if name != "train" and split.tokens
    }


def make_probe(spec: RunSpec, splits: Mapping[str, EvaluationWindows]) -> Probe:
    """A probe on a fixed batch: the first validation windows, cut short."""
    wanted, windows = spec.evaluation, splits["valid" if "valid" in splits else next(iter(splits))]
    batch = windows.batch(windows.select_windows(None)[: wanted.probe_rows])
    cut = min(wanted.probe_tokens, spec.model.context)
    return Probe(batch.ids[:, :cut], None if batch.segments is None else batch.segments[:, :cut])


def draw_dropout_key(spec: RunSpec, step: int, rank: int = 0, part: int = 0) -> int:
    """What decides over dropout in one part of a step: another number for each, whatever was interrupted."""
    return seed_of(spec.seed, f"dropout/{step}/{rank}/{part}") if spec.model.dropout else 0


def describe_factors(factors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """For a probe's record, layer → part → a number per head; nothing where nothing was controlled."""
    table = {
        name: {symbol: round_numbers(values.tolist()) for symbol, values in parts.items()}
        for name, parts in factors.items()
    }
    return {"factors": table} if table else {}


def take_snapshot(spec: RunSpec, state: State, tensors: dict[str, Tensor], probe: Probe) -> Snapshot:
    """Everything that a run continues from. Random numbers need no state: each step's follow from (seed, step,
    rank)."""
    probed = {f"probe.{name}": tensor for name, tensor in probe.state().items()}
    about = asdict(state) | {"validation_loss": state.best, "seed": spec.seed}
    return Snapshot(state.step, tensors | probed, about)


def load_checkpoint(checkpoint: Checkpoint, tensors: dict[str, Tensor], probe: Probe) -> State:
    """Fill a run's tensors and its probe; how far it is."""
    probed = checkpoint.read_tensors("probe.")
    checkpoint.load_into(tensors | probed)
    probe.restore({name.removeprefix("probe."): tensor for name, tensor in probed.items()})
    fields = State.__dataclass_fields__
    return State(**{name: value for name, value in checkpoint.state.items() if name in fields})


@torch.no_grad()
def gather_decoder(sharded: Decoder) -> Decoder:
    """A copy of a sharded model with plain parameters, on every rank."""
    device = next(sharded.parameters()).device
    plain = Decoder(sharded.spec, seed=0).to(device)
    weights = dict(named_weights(plain))
    for name, tensor in named_weights(sharded):
        weights[name].copy_(full_tensor(tensor))
    return plain
