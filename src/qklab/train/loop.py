"""The training loop: when to step, evaluate, probe and save.

After step s come, in this order: its record, an evaluation and a probe where due, then a checkpoint where due. So a
checkpoint of step s always finds everything up to s recorded, and whatever is killed later is repeated from it.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from qklab.data.batches import Batches
from qklab.train.checkpoint import Checkpoints
from qklab.train.progress import Display, describe_step
from qklab.train.ranks import sum_over_ranks
from qklab.train.recorder import RunRecorder
from qklab.train.signals import StopRequest
from qklab.train.trainer import PendingStep, Trainer

Status = Literal["finished", "interrupted", "diverged"]


class Loop:
    """Trains until the budget is spent, someone asks to stop, or the run diverges."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        recorder: RunRecorder,
        display: Display,
    ):
        self.trainer, self.checkpoints, self.recorder, self.display = trainer, checkpoints, recorder, display
        self.spec, self.execution, self.machine = trainer.spec, trainer.execution, trainer.machine
        self.state = trainer.state
        self.spent: dict[str, float] = dict.fromkeys(("evaluation", "probes", "checkpoints", "first step"), 0.0)
        self.last_save = time.monotonic()

    def run(self, stop: StopRequest) -> Status:
        """Train from the present state."""
        batches = Batches(
            self.trainer.order, self.state.step, self.machine.rank, self.machine.world, self.machine.device
        )
        pending: PendingStep | None = None
        first = True
        try:
            while self.progress() < 1:
                before, began = self.progress(), time.perf_counter()
                lr = self.spec.optimiser.lr * self.spec.schedule.factor(self.upcoming())
                earlier, pending = pending, self.trainer.step(next(batches), lr)
                self.finish_step(earlier)
                if first or not self.trainer.deferred:
                    pending = self.finish_step(pending)
                self.count(time.perf_counter() - began, first)
                stopping = self.stopping(stop)
                if stopping or self.state.skipped > self.spec.max_skips or self.something_due(before):
                    pending = self.finish_step(pending)
                if self.state.skipped > self.spec.max_skips:
                    return "diverged"
                improved = self.evaluate_where_due(before)
                if first:
                    first, self.last_save = False, time.monotonic()
                if self.progress() >= 1 or stopping or improved or self.checkpoint_due():
                    pending = self.finish_step(pending)
                    self.save(improved)
                if stopping and self.progress() < 1:
                    return "interrupted"
        finally:
            batches.close()
        return "finished"

    def finish_step(self, pending: PendingStep | None) -> None:
        """Wait for a step and record it."""
        if pending is not None:
            nats, norm = pending.values()
            finite = math.isfinite(nats) and math.isfinite(norm)
            self.state.skipped += not finite
            self.record_step(pending.step, nats, norm, pending.lr, finite)

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
            self.state.seconds = sum_over_ranks(self.state.seconds if self.machine.main else 0.0)[0]

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
        """Whether someone asked to stop; raises on all ranks what the main one could not record."""
        asked, failed = sum_over_ranks(stop.came is not None, self.recorder.failure is not None)
        if failed:
            self.recorder.flush()
        return asked > 0

    def checkpoint_due(self) -> bool:
        if self.execution.checkpoint_steps is not None:
            return self.state.step % self.execution.checkpoint_steps == 0
        late = time.monotonic() - self.last_save > 60 * self.execution.checkpoint_minutes
        return sum_over_ranks(late and self.machine.main)[0] > 0

    def record_step(self, step: int, nats: float, norm: float, lr: float, finite: bool) -> None:
        state, speed = self.state, self.tokens_per_second()
        values = {"loss": nats, "lr": lr, "grad_norm": norm}
        skipped = {} if finite else {"skipped": True}
        clock = {"seconds": state.seconds, "tokens_per_second": speed}
        self.recorder.append("train", step, tokens=step * self.spec.tokens_per_step, **values, **skipped, time=clock)
        self.recorder.log(step, **values)
        if not finite:
            limit = self.spec.max_skips
            which = f"{state.skipped} of at most {limit}" if state.skipped <= limit else "one too many: it has diverged"
            self.display.say(
                f"step {step}: the loss ({nats}) or the gradient's norm ({norm}) is not finite; the step is skipped, "
                f"{which}."
            )
        done, left = self.progress(), None
        if done > 0 and state.timed_steps:
            each = state.seconds / state.timed_steps
            left = (
                self.spec.budget.seconds - state.seconds
                if self.spec.steps is None
                else (self.spec.steps - state.step) * each
            )
        self.display.show(min(1.0, done), describe_step(step, self.spec.steps, nats, speed, left))

    def tokens_per_second(self) -> float:
        """Over all training steps but the first."""
        return self.state.timed_steps * self.spec.tokens_per_step / self.state.seconds if self.state.seconds else 0.0

    def evaluate_where_due(self, before: float) -> bool:
        """Evaluate and probe if it is time; whether validation was the best so far."""
        improved = False
        if self.due(self.spec.evaluation.times, before) and "valid" in self.trainer.windows:
            with self.measure_time("evaluation"):
                result = self.trainer.evaluate("valid", self.spec.evaluation.tokens)
            improved = math.isfinite(result.loss) and (self.state.best is None or result.loss < self.state.best)
            if improved:
                self.state.best, self.state.best_step = result.loss, self.state.step
            self.recorder.append("evaluation", self.state.step, split="valid", **result.to_dict())
            self.recorder.log(self.state.step, validation_loss=result.loss, bits_per_byte=result.bits_per_byte)
        if self.due(self.spec.probes, before):
            with self.measure_time("probes"):
                self.take_probe()
        return improved

    def take_probe(self) -> None:
        """Keep what the probe finds as probes/step-….json."""
        record = {"layers": self.trainer.take_probe()}
        if factors := self.trainer.factors():
            record["factors"] = factors
        self.recorder.write_probe(self.state.step, record)

    @contextmanager
    def measure_time(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - began

    def save(self, best: bool) -> None:
        with self.measure_time("checkpoints"):
            self.recorder.flush()
            self.checkpoints.save(self.trainer.snapshot(), best=best)
            self.last_save = time.monotonic()
