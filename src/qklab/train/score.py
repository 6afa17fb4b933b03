"""What a model is scored on beside its own corpus, once its run has ended its steps.

Who scores is found by name, since it needs more than training does; `qklab.hf.benchmarks` has ours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qklab import register
from qklab.data.tokenizer import Tokenizer
from qklab.model.decoder import Decoder
from qklab.runs.directory import SCORING, RunError
from qklab.runs.signals import StopRequest
from qklab.train.loop import Loop
from qklab.train.machine import Machine
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.summary import InterruptedEvaluationError


@dataclass(frozen=True)
class ScoringWork:
    """How scoring goes on where it was: the folder that keeps what is done, how often a fine-tuning is saved there, who
    may ask it to stop, and who is told how far it is."""

    folder: Path
    execution: ExecutionSpec
    stop: StopRequest
    show: Callable[[str], None] = lambda sentence: None

    def leave_if_asked(self) -> None:
        if self.stop.came is not None:
            raise InterruptedEvaluationError

    def tick(self, name: str, done: float) -> None:
        """Say what share of a benchmark is done."""
        self.leave_if_asked()
        self.show(f"benchmark {name}: {done:.0%}")


class Scorer(Protocol):
    """An entry of `register.scorer` makes one from a BenchmarkSpec and the folder of data."""

    def score(self, decoder: Decoder, tokenizer: Tokenizer, seed: int, work: ScoringWork) -> dict[str, dict[str, Any]]:
        """Name of a benchmark → its `score` from 0 to 1, `chance` where it has one, and what else is known of it."""
        ...


def open_scorer(spec: RunSpec, data: Path | None, machine: Machine | None = None) -> Scorer | None:
    """Who scores a run's benchmarks, if it has any; files and packages that are missing are told before anything is
    trained."""
    if not spec.benchmarks.listed:
        return None
    if machine is not None and machine.world > 1:
        raise RunError("benchmarks are scored by one process, but this run has several; use qklab eval afterwards.")
    try:
        make: Any = register.scorer["benchmarks"]
    except ImportError as error:
        raise RunError(f"benchmarks cannot be scored: {error}.") from None
    return make(spec.benchmarks, data)


def add_benchmarks(loop: Loop, scorer: Scorer, results: Sequence[dict[str, dict[str, Any]]], stop: StopRequest) -> None:
    """Put every live run's scores beside its evaluation of test, or of what else was evaluated last."""
    for run, member in loop.live:
        which = f"{member.name}: " if len(loop.members) > 1 else ""
        work = ScoringWork(
            member.recorder.directory.path / SCORING,
            loop.execution,
            stop,
            lambda sentence, which=which: loop.display.show(1.0, which + sentence),
        )
        work.leave_if_asked()
        work.show(f"benchmarks {member.spec.benchmarks.names}")
        with loop.measure_time("benchmarks"):
            decoder = loop.trainer.view_decoder(run)
            scores = scorer.score(decoder, loop.trainer.corpus.tokenizer, member.spec.seed, work)
        if results[run]:
            results[run]["test" if "test" in results[run] else [*results[run]][-1]]["benchmarks"] = scores


def describe_benchmarks(result: Mapping[str, Any]) -> list[str]:
    """A line for each that a model was scored on."""
    lines = []
    for name, found in result.get("benchmarks", {}).items():
        chance = f" (chance {found['chance']:.2%})" if "chance" in found else ""
        lines.append(f"  {name}: {found['score']:.2%}{chance}")
    return lines
