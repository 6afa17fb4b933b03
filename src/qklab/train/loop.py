"""The training loop: when to step, evaluate, probe and save, for one run or for several that go together.

After step s come, in this order: its record, an evaluation and a probe where due, then a checkpoint where due. So a
checkpoint of step s always finds everything up to s recorded, and whatever is killed later is repeated from it.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from qklab.runs.progress import Display, format_duration
from qklab.runs.signals import StopRequest
from qklab.train.checkpoint import Checkpoints
from qklab.train.ranks import sum_over_ranks
from qklab.train.recorder import RunRecorder
from qklab.train.spec import RunSpec
from qklab.train.trainer import BaseTrainer, PendingStep, State

LOGGED = ("bits_per_byte", "accuracy", "sequence_accuracy")  # beside the validation loss

Status = Literal["finished", "interrupted", "diverged"]


@dataclass
class Member:
    """One of the runs that a loop trains: what it is, how far it is, and where it is written down."""

    spec: RunSpec
    state: State
    recorder: RunRecorder
    checkpoints: Checkpoints
    diverged: bool = False

    @property
    def name(self) -> str:
        return self.recorder.directory.path.name

    def append_step(self, step: int, nats: float, norm: float, lr: float, finite: bool, speed: float) -> None:
        values = {"loss": nats, "lr": lr, "grad_norm": norm}
        skipped = {} if finite else {"skipped": True}
        clock = {"seconds": self.state.seconds, "tokens_per_second": speed}
        self.recorder.append("train", step, tokens=step * self.spec.tokens_per_step, **values, **skipped, time=clock)
        self.recorder.log(step, **values)

    def describe_skip(self, step: int, nats: float, norm: float) -> str:
        skipped, limit = self.state.skipped, self.spec.max_skips
        which = f"{skipped} of at most {limit}" if skipped <= limit else "one too many: it has diverged"
        return (
            f"step {step}: the loss ({nats}) or the gradient's norm ({norm}) is not finite; the step is skipped, "
            f"{which}."
        )


class Loop:
    """Trains until the budget is spent, someone asks to stop, or every run has diverged.

    All its runs have one budget and are at one step; each has its own records, checkpoints and best loss. One that
    diverges ends there, and the others do not notice.
    """

    def __init__(self, trainer: BaseTrainer, members: Sequence[Member], display: Display):
        self.trainer, self.members, self.display = trainer, list(members), display
        self.spec, self.execution, self.machine = trainer.spec, trainer.execution, trainer.machine
        self.state = self.members[0].state  # all have the same step and the same share of the time
        self.spent: dict[str, float] = dict.fromkeys(("evaluation", "probes", "checkpoints", "first step"), 0.0)
        self.last_save = time.monotonic()

    def run(self, stop: StopRequest, end: Callable[[Member], None] = lambda member: None) -> Status:
        """Train from the present state; `end` is told of each run that diverges while others go on."""
        batches = self.trainer.read_batches(self.state.step)
        pending: PendingStep | None = None
        first = True
        try:
            while self.measure_progress() < 1:
                before, began = self.measure_progress(), time.perf_counter()
                done = self.foresee_progress()
                lrs = [member.spec.optimiser.lr * member.spec.schedule.factor(done) for member in self.members]
                earlier, pending = pending, self.trainer.step(next(batches), lrs)
                self.finish_step(earlier)
                if first or not self.trainer.deferred:
                    pending = self.finish_step(pending)
                self.count(time.perf_counter() - began, first)
                stopping = self.should_stop(stop)
                if stopping or self.find_diverging() or self.is_anything_due(before):
                    pending = self.finish_step(pending)
                if not self.retire_diverging(end):
                    return "diverged"
                improved = self.evaluate_where_due(before)
                if first:
                    first, self.last_save = False, time.monotonic()
                if self.should_save(any(improved), stopping):
                    pending = self.finish_step(pending)
                    self.save(improved)
                if stopping and self.measure_progress() < 1:
                    return "interrupted"
        finally:
            batches.close()
        return "finished"

    @property
    def live(self) -> list[tuple[int, Member]]:
        """The runs that go on, each with its place among all."""
        return [(run, member) for run, member in enumerate(self.members) if not member.diverged]

    def finish_step(self, pending: PendingStep | None) -> None:
        """Wait for a step and record it."""
        if pending is None:
            return
        values, speed = pending.values(), self.tokens_per_second()
        for run, member in self.live:
            nats, norm = values[run]
            finite = math.isfinite(nats) and math.isfinite(norm)
            member.state.skipped += not finite
            member.append_step(pending.step, nats, norm, pending.lrs[run], finite, speed)
            if not finite:
                which = f"{member.name}: " if len(self.members) > 1 else ""
                self.display.say(which + member.describe_skip(pending.step, nats, norm))
        shown = fmean(values[run][0] for run, _ in self.live)
        self.display.show(
            min(1.0, self.measure_progress()),
            describe_step(pending.step, self.spec.steps, shown, speed, self.estimate_seconds_left()),
        )

    def estimate_seconds_left(self) -> float | None:
        state = self.state
        if not self.measure_progress() or not state.timed_steps:
            return None
        if self.spec.steps is None:
            return self.spec.budget.seconds - state.seconds
        return (self.spec.steps - state.step) * len(self.members) * state.seconds / state.timed_steps

    def find_diverging(self) -> list[tuple[int, Member]]:
        return [(run, member) for run, member in self.live if member.state.skipped > member.spec.max_skips]

    def retire_diverging(self, end: Callable[[Member], None]) -> bool:
        """Let runs that have diverged end here, whatever their place among the others still computes; whether any is
        left."""
        for _, member in self.find_diverging():
            member.diverged = True
            if self.live:
                end(member)
        return bool(self.live)

    def is_anything_due(self, before: float) -> bool:
        evaluation = self.spec.evaluation.times
        return self.measure_progress() >= 1 or self.is_due(evaluation, before) or self.is_due(self.spec.probes, before)

    def count(self, seconds: float, first: bool) -> None:
        """Add the time of a step, of which each run takes its share."""
        if first:
            self.spent["first step"] += seconds
            return
        for member in self.members:
            member.state.timed_steps += 1
            member.state.seconds += seconds / len(self.members)
        if self.machine.world > 1 and self.spec.budget.seconds is not None:  # rank 0's clock is everyone's
            self.state.seconds = sum_over_ranks(self.state.seconds if self.machine.main else 0.0)[0]

    def measure_progress(self) -> float:
        """The part of the budget that is spent."""
        if self.spec.steps is not None:
            return self.state.step / self.spec.steps
        return min(1.0, self.state.seconds / self.spec.budget.seconds)

    def foresee_progress(self) -> float:
        """What `measure_progress` will give after the coming step, as far as can be known."""
        if self.spec.steps is not None:
            return (self.state.step + 1) / self.spec.steps
        usual = self.state.seconds / self.state.timed_steps if self.state.timed_steps else 0.0
        return min(1.0, (self.state.seconds + usual) / self.spec.budget.seconds)

    def is_due(self, times: int, before: float) -> bool:
        """Whether one of `times` evenly spaced moments has passed since `before`."""
        return math.floor(times * self.measure_progress() + 1e-9) > math.floor(times * before + 1e-9)

    def should_stop(self, stop: StopRequest) -> bool:
        """Whether someone asked to stop; raises on all ranks what the main one could not record."""
        failures = [member.recorder.failure for member in self.members]
        asked, failed = sum_over_ranks(stop.came is not None, any(failure is not None for failure in failures))
        if failed:
            self.flush()
        return asked > 0

    def should_save(self, improved: bool, stopping: bool) -> bool:
        if stopping or self.is_checkpoint_due():
            return self.execution.keep > 0 or self.measure_progress() < 1
        return self.execution.keep > 0 and (improved or self.measure_progress() >= 1)

    def is_checkpoint_due(self) -> bool:
        due = self.execution.is_checkpoint_due(self.state.step, time.monotonic() - self.last_save)
        return sum_over_ranks(due and self.machine.main)[0] > 0

    def tokens_per_second(self) -> float:
        """Over all training steps but the first; what all runs see counts."""
        return self.state.timed_steps * self.spec.tokens_per_step / self.state.seconds if self.state.seconds else 0.0

    def evaluate_where_due(self, before: float) -> list[bool]:
        """Evaluate and probe if it is time; of each run whether validation was its best so far."""
        improved = [False] * len(self.members)
        if self.is_due(self.spec.evaluation.times, before) and "valid" in self.trainer.windows:
            with self.measure_time("evaluation"):
                results = self.trainer.evaluate("valid", self.spec.evaluation.tokens)
            for run, member in self.live:
                state, result = member.state, results[run]
                improved[run] = math.isfinite(result.loss) and (state.best is None or result.loss < state.best)
                if improved[run]:
                    state.best, state.best_step = result.loss, state.step
                member.recorder.append("evaluation", state.step, split="valid", **result.to_dict())
                shown = {name: value for name, value in result.to_dict().items() if name in LOGGED}
                member.recorder.log(state.step, validation_loss=result.loss, **shown)
        if self.is_due(self.spec.probes, before):
            with self.measure_time("probes"):
                for run, member in self.live:
                    member.recorder.write_probe(member.state.step, self.trainer.take_probe(run))
        return improved

    @contextmanager
    def measure_time(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - began

    def flush(self) -> None:
        for member in self.members:
            member.recorder.flush()

    def save(self, best: Sequence[bool]) -> None:
        """A checkpoint of every run that goes on, all of one step."""
        with self.measure_time("checkpoints"):
            self.flush()
            for run, member in self.live:
                member.checkpoints.save(self.trainer.snapshot(run), best=best[run])
            self.last_save = time.monotonic()


def describe_step(step: int, steps: int | None, loss: float, tokens_per_second: float, left: float | None) -> str:
    """The line of a training run."""
    of = f"/{steps:,}" if steps is not None else ""
    still = f" · {format_duration(left)} left" if left is not None else ""
    speed = f" · {tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
    return f"step {step:,}{of} · loss {loss:.3f}{speed}{still}"
