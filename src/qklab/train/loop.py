"""The training loop.

After step s come, in this order: its record, an evaluation and a probe where due, then a checkpoint where due. So a
checkpoint of step s always finds everything up to s recorded, and whatever is killed later is repeated from it.
"""

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qklab.data.batches import Batch, Batches, EvaluationWindows
from qklab.data.order import Order
from qklab.data.shards import Corpus
from qklab.model.decoder import Decoder
from qklab.model.initialise import seed_of
from qklab.optim.optimiser import Optimiser
from qklab.runs.directory import RunDirectory
from qklab.runs.files import write_json
from qklab.runs.metrics import MetricsFile
from qklab.runs.sinks import Sinks
from qklab.train.checkpoint import Checkpoints, Found, Snapshot
from qklab.train.evaluate import Evaluation, evaluate
from qklab.train.machine import Machine
from qklab.train.objective import Objective, named_weights
from qklab.train.parallel import accumulating, distribute, gradient_norm, settle
from qklab.train.probe import Probe
from qklab.train.progress import Display, status
from qklab.train.signals import StopRequest
from qklab.train.spec import ExecutionSpec, RunSpec

Status = Literal["finished", "interrupted", "diverged"]


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
class Flight:
    """A step under way: its loss and gradient norm are known once the device has got that far."""

    step: int
    lr: float
    outcome: Tensor  # [2] on the host
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, step: int, lr: float, outcome: Tensor) -> "Flight":
        if not outcome.is_cuda:
            return cls(step, lr, outcome, None)
        host = torch.empty(2, dtype=outcome.dtype, pin_memory=True).copy_(outcome, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(step, lr, host, arrived)

    def values(self) -> tuple[float, float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        nats, norm = self.outcome.tolist()
        return nats, norm


class Trainer:
    """One run on one rank. `run` trains until the budget is spent, someone asks to stop, or the run diverges."""

    def __init__(
        self,
        spec: RunSpec,
        execution: ExecutionSpec,
        corpus: Corpus,
        machine: Machine,
        directory: RunDirectory,
        run_id: str,
        display: Display,
    ):
        self.spec, self.execution, self.corpus, self.machine = spec, execution, corpus, machine
        self.directory, self.display = directory, display
        self.bf16 = spec.precision == "bf16"
        self.state = State()
        self.spent: dict[str, float] = dict.fromkeys(("evaluation", "probes", "checkpoints", "first step"), 0.0)
        with torch.device("cpu"):
            decoder = Decoder(spec.model, seed=spec.seed)
        self.objective = Objective(decoder.to(machine.device), spec.z_loss)
        self.call = distribute(self.objective, execution, machine, self.bf16)
        self.optimiser = Optimiser(spec.optimiser, decoder)
        packed = spec.batch.packing == "packed"
        self.order = Order(
            corpus.splits["train"], spec.seed, spec.batch.sequences, spec.model.context, spec.batch.packing
        )
        self.windows = {
            name: EvaluationWindows(split, spec.model.context, corpus.tokenizer.eot, packed)
            for name, split in corpus.splits.items()
            if name != "train" and split.tokens
        }
        self.probe = self.new_probe()
        self.checkpoints = Checkpoints(
            directory.checkpoints_path, execution.keep, run=run_id, say=display.say, background=True
        )
        self.last_save = time.monotonic()

    @property
    def decoder(self) -> Decoder:
        return self.objective.decoder

    def new_probe(self) -> Probe:
        """The probe's fixed batch: the first validation windows, cut short."""
        wanted, name = self.spec.evaluation, "valid" if "valid" in self.windows else next(iter(self.windows))
        windows = self.windows[name]
        batch = windows.batch(windows.chosen(None)[: wanted.probe_rows])
        cut = min(wanted.probe_tokens, self.spec.model.context)
        return Probe(batch.ids[:, :cut], None if batch.segments is None else batch.segments[:, :cut])

    # ---- one step

    def step(self, batch: Batch, lr: float) -> "Flight":
        """Forward, backward and update on one global batch. If the loss or the gradient is not finite nothing changes."""
        if self.spec.model.dropout:
            torch.manual_seed(seed_of(self.spec.seed, f"dropout/{self.state.step}/{self.machine.rank}"))
        rows = min(self.execution.rows or len(batch.ids), len(batch.ids))
        parts = batch.parts(rows)
        total = torch.zeros((), device=self.machine.device, dtype=torch.float32)
        for number, part in enumerate(parts):
            with accumulating(self.call, last=number == len(parts) - 1):
                with torch.autocast(self.machine.device.type, torch.bfloat16, enabled=self.bf16):
                    loss, nll = self.call(*part)
                share = len(part.ids) / len(batch.ids)
                (loss * share).backward()
                total += nll * share
        parameters = list(self.decoder.parameters())
        norm = gradient_norm(parameters)
        outcome = self.shared(total, norm)
        wrong = 1.0 - outcome.isfinite().all().float()
        waits = not self.deferred
        if not (waits and wrong.item()):
            if self.spec.optimiser.clip:
                nn.utils.clip_grads_with_norm_(parameters, self.spec.optimiser.clip, norm)
            self.optimiser.step(lr, skip=None if waits else wrong)
        self.optimiser.zero_grad()
        self.state.step += 1
        return Flight.of(self.state.step, lr, outcome)

    @property
    def deferred(self) -> bool:
        """Whether the host goes on to the next step before it knows how this one went; the device then skips a bad
        update by itself, which fused AdamW can and Muon cannot."""
        return self.machine.device.type == "cuda" and self.spec.optimiser.kind == "adamw" and not self.sharded

    def shared(self, nats: Tensor, norm: Tensor) -> Tensor:
        """The loss averaged over ranks, and the norm, which is the same on all: [2] on the device."""
        pair = torch.stack([nats.double(), norm.double()])
        if self.machine.world > 1:
            dist.all_reduce(pair)
            pair = pair / self.machine.world
        return pair

    # ---- the loop

    def run(self, stop: StopRequest, metrics: MetricsFile | None, sinks: Sinks | None) -> Status:
        """Train from the present state; `metrics` and `sinks` on the main rank only."""
        self.metrics, self.sinks = metrics, sinks
        batches = Batches(self.order, self.state.step, self.machine.rank, self.machine.world, self.machine.device)
        flight: Flight | None = None
        first = True
        try:
            while self.progress() < 1:
                before, began = self.progress(), time.perf_counter()
                lr = self.spec.optimiser.lr * self.spec.schedule.factor(self.upcoming())
                earlier, flight = flight, self.step(next(batches), lr)
                self.land(earlier)
                if first or not self.deferred:
                    flight = self.land(flight)
                self.count(time.perf_counter() - began, first)
                stopping = self.stopping(stop)
                if stopping or self.state.skipped > self.spec.max_skips or self.something_due(before):
                    flight = self.land(flight)
                if self.state.skipped > self.spec.max_skips:
                    return "diverged"
                improved = self.evaluate_where_due(before)
                if first:
                    first, self.last_save = False, time.monotonic()
                if self.progress() >= 1 or stopping or improved or self.checkpoint_due():
                    flight = self.land(flight)
                    self.save(improved)
                if stopping and self.progress() < 1:
                    return "interrupted"
        finally:
            batches.close()
        return "finished"

    def land(self, flight: "Flight | None") -> None:
        """Wait for a step and record it."""
        if flight is not None:
            nats, norm = flight.values()
            finite = math.isfinite(nats) and math.isfinite(norm)
            self.state.skipped += not finite
            self.record_step(flight.step, nats, norm, flight.lr, finite)

    def something_due(self, before: float) -> bool:
        evaluation = self.spec.evaluation.times
        return self.progress() >= 1 or self.due(evaluation, before) or self.due(self.spec.probes, before)

    def count(self, seconds: float, first: bool) -> None:
        if first:
            self.spent["first step"] += seconds
        else:
            self.state.timed_steps += 1
            self.state.seconds += seconds
        if self.machine.world > 1 and self.spec.budget.seconds is not None:  # rank 0's clock is everyone's
            self.state.seconds = self.machine.sum([self.state.seconds if self.machine.main else 0.0])[0]

    def progress(self) -> float:
        """The part of the budget that is spent."""
        if self.spec.steps is not None:
            return self.state.step / self.spec.steps
        return min(1.0, self.state.seconds / self.spec.budget.seconds)

    def upcoming(self) -> float:
        """What `progress` will be after the coming step, as far as can be known."""
        if self.spec.steps is not None:
            return (self.state.step + 1) / self.spec.steps
        usual = self.state.seconds / self.state.timed_steps if self.state.timed_steps else 0.0
        return min(1.0, (self.state.seconds + usual) / self.spec.budget.seconds)

    def due(self, times: int, before: float) -> bool:
        """Whether one of `times` evenly spaced moments has passed since `before`."""
        return math.floor(times * self.progress() + 1e-9) > math.floor(times * before + 1e-9)

    def stopping(self, stop: StopRequest) -> bool:
        asked = float(stop.came is not None)
        return bool(self.machine.sum([asked])[0] if self.machine.world > 1 else asked)

    def checkpoint_due(self) -> bool:
        if self.execution.checkpoint_steps is not None:
            return self.state.step % self.execution.checkpoint_steps == 0
        late = time.monotonic() - self.last_save > 60 * self.execution.checkpoint_minutes
        return bool(self.machine.sum([float(late and self.machine.main)])[0])

    # ---- records

    def record_step(self, step: int, nats: float, norm: float, lr: float, finite: bool) -> None:
        state, speed = self.state, self.tokens_per_second()
        if self.metrics is not None:
            values = {"loss": nats, "lr": lr, "grad_norm": norm}
            record = {"kind": "train", "step": step, "tokens": step * self.spec.tokens_per_step} | values
            if not finite:
                record["skipped"] = True
            self.metrics.append(record | {"time": {"seconds": state.seconds, "tokens_per_second": speed}})
            if self.sinks is not None:
                self.sinks.log(values, step)
        if not finite:
            self.display.say(
                f"step {step}: the loss ({nats}) or the gradient's norm ({norm}) is not finite; the step is "
                f"skipped, {state.skipped} of at most {self.spec.max_skips}."
            )
        done, left = self.progress(), None
        if done > 0 and state.timed_steps:
            each = state.seconds / state.timed_steps
            left = (
                self.spec.budget.seconds - state.seconds
                if self.spec.steps is None
                else (self.spec.steps - state.step) * each
            )
        self.display.show(min(1.0, done), status(step, self.spec.steps, nats, speed, left))

    def tokens_per_second(self) -> float:
        """Over all training steps but the first."""
        return self.state.timed_steps * self.spec.tokens_per_step / self.state.seconds if self.state.seconds else 0.0

    def evaluate_where_due(self, before: float) -> bool:
        """Evaluate and probe if it is time; whether validation was the best so far."""
        improved = False
        if self.due(self.spec.evaluation.times, before) and "valid" in self.windows:
            with self.timed("evaluation"):
                result = self.evaluate("valid", self.spec.evaluation.tokens)
            improved = self.state.best is None or result.loss < self.state.best
            if improved:
                self.state.best, self.state.best_step = result.loss, self.state.step
            self.record({"kind": "evaluation", "split": "valid"} | result.to_dict())
            if self.sinks is not None:
                self.sinks.log({"validation_loss": result.loss, "bits_per_byte": result.bits_per_byte}, self.state.step)
        if self.due(self.spec.probes, before):
            with self.timed("probes"):
                self.take_probe()
        return improved

    def evaluate(self, split: str, tokens: int | None, tick: Callable[[float], None] = lambda done: None) -> Evaluation:
        rows = self.execution.rows or max(1, min(self.spec.batch.sequences // self.machine.world, 64))
        result = evaluate(
            self.objective,
            self.windows[split],
            self.corpus.tokenizer.byte_lengths,
            self.machine,
            tokens=tokens,
            rows=rows,
            bf16=self.bf16,
            tick=tick,
        )
        settle(self.objective)
        return result

    def take_probe(self) -> None:
        """Measure attention on the probe batch and keep the result as probes/step-….json."""
        decoder = whole(self.decoder) if self.sharded else self.decoder
        measured = self.probe.measure(decoder)
        if self.metrics is not None:
            self.directory.probes_path.mkdir(exist_ok=True)
            path = self.directory.probes_path / f"step-{self.state.step:010d}.json"
            write_json(path, {"step": self.state.step, "layers": measured})

    def record(self, values: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.append({"kind": values.pop("kind"), "step": self.state.step} | values)

    @contextmanager
    def timed(self, what: str) -> Any:
        began = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - began

    # ---- checkpoints

    @property
    def sharded(self) -> bool:
        return self.machine.world > 1 and self.execution.parallel == "fsdp"

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training continues from, by name; the tensors themselves."""
        model = {f"model.{name}": tensor.detach() for name, tensor in named_weights(self.decoder)}
        return model | {f"optimiser.{name}": tensor for name, tensor in self.optimiser.tensors().items()}

    def save(self, best: bool) -> None:
        with self.timed("checkpoints"):
            if self.metrics is not None:
                self.metrics.flush()
            probe = {f"probe.{name}": tensor for name, tensor in self.probe.state().items()}
            state = asdict(self.state) | {"validation_loss": self.state.best, "seed": self.spec.seed}
            self.checkpoints.save(Snapshot(self.state.step, self.tensors() | probe, state), best=best)
            self.last_save = time.monotonic()

    def restore(self, found: Found) -> None:
        """Continue from a checkpoint. Random numbers need no state: each step's follow from (seed, step, rank)."""
        self.optimiser.materialise()
        probe = found.tensors("probe.")
        found.load_into(self.tensors() | probe)
        self.probe.restore({name.removeprefix("probe."): tensor for name, tensor in probe.items()})
        fields = State.__dataclass_fields__
        self.state = State(**{name: value for name, value in found.state.items() if name in fields})


@torch.no_grad()
def whole(sharded: Decoder) -> Decoder:
    """A copy of a sharded model with plain parameters, on every rank."""
    device = next(sharded.parameters()).device
    plain = Decoder(sharded.spec, seed=0).to(device)
    for name, tensor in named_weights(sharded):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        dict(named_weights(plain))[name].copy_(full)
    return plain
