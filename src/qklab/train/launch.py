"""From a spec and a folder to a finished run: prepare, open or resume, train, evaluate, sum up."""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qklab.data.shards import Corpus
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.files import describe_file_failure
from qklab.runs.progress import Display, format_duration
from qklab.runs.signals import StopRequest
from qklab.runs.sinks import Sinks
from qklab.train.checkpoint import CheckpointError
from qklab.train.loop import Loop, Member, Status
from qklab.train.machine import Machine, refuse_too_large, work_around_bf16
from qklab.train.open import OpenRun, group_by_step, open_runs
from qklab.train.population import PopulationTrainer, refuse_population
from qklab.train.ranks import call_on_first_rank, share_failures
from qklab.train.recorder import RunRecorder
from qklab.train.recover import describe_lost_steps, discard_summary, find_lost_steps, has_tokenizer
from qklab.train.resume import read_begun_run, refuse_other_spec
from qklab.train.score import Scorer, add_benchmarks, describe_benchmarks, open_scorer
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.summary import InterruptedEvaluationError, evaluate_splits, summarise_run
from qklab.train.trainer import Trainer

EXIT_CODES: dict[Status, int] = {"finished": 0, "diverged": 3, "interrupted": 75}


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended; `summary` is summary.json, or None where the run is to be continued."""

    status: Status
    folder: Path
    summary: dict[str, Any] | None


def name_folder(spec: RunSpec) -> Path:
    return Path("runs") / f"{spec.model.layers}x{spec.model.width}-s{spec.seed}-{spec.fingerprint[:10]}"


def train(
    spec: RunSpec,
    folder: Path | None = None,
    execution: ExecutionSpec | None = None,
    *,
    data: Path | None = None,
    display: Display | None = None,
) -> Outcome:
    """Train as `spec` says in the run directory `folder`, continuing what is there.

    Under torchrun call it on every rank. `data` is where corpora are looked for (by default $QKLAB_DATA).
    """
    return train_population([spec], [folder or name_folder(spec)], execution, data=data, display=display)[0]


def train_population(
    specs: Sequence[RunSpec],
    folders: Sequence[Path],
    execution: ExecutionSpec | None = None,
    *,
    data: Path | None = None,
    display: Display | None = None,
) -> list[Outcome]:
    """Train runs that differ in seed and in numbers of optimiser, schedule and logit control as one model, each in its
    own run directory, continuing what is there.

    Whatever has ended stays as it is. Runs that are at one step go on together; where memory does not suffice for that,
    half as many at a time.
    """
    execution = execution or ExecutionSpec()
    machine = Machine.open(execution)
    display = display if display is not None and machine.main else Display()
    try:
        with share_failures(), explain_failures():
            specs = [choose_precision(spec, machine) for spec in specs]
            if len(specs) != 1:
                refuse_population(specs, machine)
            refuse_too_large(specs[0], execution, machine)
            if machine.device.type == "cpu" and (specs[0].precision == "bf16" or specs[0].optimiser.kind == "muon"):
                work_around_bf16(display.say)
            directories = [RunDirectory(folder) for folder in folders]
            with ExitStack() as held:
                for directory in directories:
                    held.enter_context(directory)
                    call_on_first_rank(lambda directory=directory: directory.lock() and None)
                together = len(specs)
                while True:
                    try:
                        return train_in(directories, specs, execution, machine, data, display, together)
                    except torch.OutOfMemoryError:
                        if together == 1:
                            raise
                    together = halve_population(together, display)
    finally:
        display.close()
        machine.close()


def halve_population(together: int, display: Display) -> int:
    """How many runs go on together now that so many did not fit; what they held is let go."""
    half = math.ceil(together / 2)
    display.warn(f"{together} runs together need more memory than there is; they go on {half} at a time.")
    gc.collect()
    if torch.cuda.is_available():
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return half


@contextmanager
def explain_failures() -> Iterator[None]:
    """A disk that refuses, and too little memory, as one sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(describe_file_failure("run", error)) from error
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "not enough memory" not in str(error):
            raise
        raise RunError(
            "there is not enough memory for this run; fewer execution.rows take less, and so does execution.recompute; "
            "what was saved before is still there."
        ) from error


def choose_precision(spec: RunSpec, machine: Machine) -> RunSpec:
    """Precision auto: bf16 on a GPU, fp32 on a CPU."""
    if spec.precision != "auto":
        return spec
    return spec.replace(precision="bf16" if machine.device.type == "cuda" else "fp32")


def train_in(
    directories: Sequence[RunDirectory],
    specs: Sequence[RunSpec],
    execution: ExecutionSpec,
    machine: Machine,
    data: Path | None,
    display: Display,
    together: int,
) -> list[Outcome]:
    """Train runs in directories that are locked, at most so many together."""
    outcomes: dict[Path, Outcome] = {}
    begun: list[tuple[RunSpec, RunDirectory, dict[str, Any] | None]] = []
    for spec, directory in zip(specs, directories, strict=True):
        old = call_on_first_rank(lambda directory=directory: read_begun_run(directory))
        if old is not None:
            refuse_other_spec(directory, old["spec"], spec)
            call_on_first_rank(lambda directory=directory: discard_summary(directory, display.warn))
            summary = call_on_first_rank(directory.summary)
            intact = call_on_first_rank(
                lambda directory=directory, old=old: has_tokenizer(directory, old["data"]["tokenizer"])
            )
            if summary is not None and intact:
                display.say(f"{directory.path} is already {summary['status']}; nothing to do.")
                outcomes[directory.path] = Outcome(summary["status"], directory.path, summary)
                continue
        begun.append((spec, directory, old))
    if begun:
        scorer = open_scorer(begun[0][0], data, machine)
        runs, corpus = open_runs(begun, execution, machine, data, display)
        for run in runs:
            if summary := call_on_first_rank(run.directory.summary):  # only its tokenizer was missing
                outcomes[run.directory.path] = Outcome(summary["status"], run.directory.path, summary)
        for group in group_by_step([run for run in runs if run.directory.path not in outcomes], together):
            found = train_group(group, execution, corpus, machine, display, scorer)
            outcomes |= {outcome.folder: outcome for outcome in found}
            if any(outcome.status == "interrupted" for outcome in found):
                break
    missing = [Outcome("interrupted", directory.path, None) for directory in directories]
    return [outcomes.get(outcome.folder, outcome) for outcome in missing]


def train_group(
    runs: Sequence[OpenRun],
    execution: ExecutionSpec,
    corpus: Corpus,
    machine: Machine,
    display: Display,
    scorer: Scorer | None,
) -> list[Outcome]:
    """Train runs that are at one step to their end."""
    specs = [run.spec for run in runs]
    if len(runs) == 1:
        trainer = Trainer(specs[0], execution, corpus, machine)
    else:
        trainer = PopulationTrainer(specs, execution, corpus, machine)
    found = [run.found for run in runs if run.found is not None]
    if found:
        trainer.restore(found)
    describe_start(runs, machine, display)
    with ExitStack() as open_recorders:
        members = []
        for run, state in zip(runs, trainer.states, strict=True):
            recorder = open_recorders.enter_context(closing(open_recorder(run, execution, machine, display)))
            if run.resumed:
                append_resumption(recorder, state.step, machine, display)
            members.append(Member(run.spec, state, recorder, run.checkpoints))
        return complete_runs(Loop(trainer, members, display), scorer)


def append_resumption(recorder: RunRecorder, step: int, machine: Machine, display: Display) -> None:
    lost = call_on_first_rank(lambda: find_lost_steps(recorder.directory, step))
    recorder.append("resume", step, ranks=machine.world)
    if lost:
        recorder.append("lost", step, steps=len(lost), first=lost[0], last=lost[-1])
        display.warn(describe_lost_steps(recorder.directory, lost))


def describe_start(runs: Sequence[OpenRun], machine: Machine, display: Display) -> None:
    first, spec = runs[0], runs[0].spec
    which = str(first.directory.path)
    if len(runs) > 1:
        which = f"{len(runs)} runs together, {which} to {runs[-1].directory.path.name}"
    if first.found is not None:
        display.say(f"resuming {which} at step {first.step}.")
    elif first.resumed:
        display.say(f"{which} {'has' if len(runs) == 1 else 'have'} no checkpoint yet; it begins again at step 0.")
    else:
        display.say(
            f"{which}: {spec.model.name}, {spec.model.parameters():,} parameters, {spec.precision} on "
            f"{machine.device.type}, {spec.tokens_per_step:,} tokens a step{' and run' * (len(runs) > 1)}."
        )


def open_recorder(run: OpenRun, execution: ExecutionSpec, machine: Machine, display: Display) -> RunRecorder:
    names = [name.strip() for name in (execution.sinks or "").split(",") if name.strip() and machine.main]
    path = run.directory.path
    return RunRecorder(run.directory, Sinks(names, path, path.name, run.spec.to_dict(), display.say))


def complete_runs(loop: Loop, scorer: Scorer | None) -> list[Outcome]:
    began = time.perf_counter()
    outcomes: dict[str, Outcome] = {}

    def end(member: Member, status: Status = "diverged", results: dict[str, Any] | None = None) -> None:
        outcomes[member.name] = end_run(loop, member, status, results or {}, time.perf_counter() - began)

    results: list[dict[str, Any]] = [{} for _ in loop.members]
    with StopRequest() as stop:
        try:
            status = loop.run(stop, end)
            for member in loop.members:
                call_on_first_rank(member.checkpoints.wait)
            if status == "finished":
                results = evaluate_splits(loop, stop)
                if scorer is not None:
                    add_benchmarks(loop, scorer, results, stop)
        except InterruptedEvaluationError:
            status = "interrupted"
        except BaseException:
            for member in loop.members:
                with suppress(CheckpointError):  # an error is already on its way
                    member.checkpoints.wait()
            raise
    if status == "interrupted":
        folders = ", ".join(str(member.recorder.directory.path) for _, member in loop.live[:1])
        more = f" and {len(loop.live) - 1} more" if len(loop.live) > 1 else ""
        loop.display.say(
            f"stopped by {stop.came or 'another rank'} at step {loop.state.step}, everything is saved; "
            f"the same command continues {folders}{more}."
        )
    for member, result in zip(loop.members, results, strict=True):
        if status == "interrupted" and not member.diverged:
            outcomes[member.name] = Outcome(status, member.recorder.directory.path, None)
        elif member.name not in outcomes:
            end(member, status, result)
    return [outcomes[member.name] for member in loop.members]


def end_run(loop: Loop, member: Member, status: Status, results: dict[str, Any], wall: float) -> Outcome:
    """Write the summary of a run that has ended."""
    recorder = member.recorder
    summary = summarise_run(loop, member, status, results, wall)
    for split, result in results.items():
        recorder.append("final", member.state.step, split=split, **result)
    recorder.finish(summary)
    if not loop.execution.keep:
        call_on_first_rank(member.checkpoints.delete_all)
    return Outcome(status, recorder.directory.path, summary)


def describe_outcome(outcome: Outcome) -> str:
    """The end of a run in a few lines."""
    summary = outcome.summary
    if summary is None:
        return f"{outcome.folder}: to be continued"
    lines = [
        f"{outcome.folder}: {summary['status']} after {summary['steps']:,} steps, {summary['tokens']:,} tokens, "
        f"{format_duration(summary['seconds'])} of training at {summary['tokens_per_second']:,.0f} tokens/s"
    ]
    for split, result in summary["evaluation"].items():
        lines.append(f"  {split}: {describe_evaluation(result)}{describe_sample(result)}")
        lines += describe_benchmarks(result)
    return "\n".join(lines)


def describe_evaluation(result: dict[str, Any]) -> str:
    """What came of a split, and what would without reading what stands around."""
    loss, unigram = f"loss {result['loss']:.4f} nats per token", f"{result['unigram_loss']:.4f} nats"
    if "chance" in result:
        return (
            f"{result['accuracy']:.2%} of the answers right (chance {result['chance']:.2%}), "
            f"{result['sequence_accuracy']:.2%} of the sequences, {loss} (without reading: {unigram})"
        )
    perplexity = f"perplexity {result['perplexity']:.2f} per token"
    if "accuracy" in result:
        return f"{result['accuracy']:.2%} of the masked tokens right, {loss}, {perplexity} (a unigram model: {unigram})"
    return f"{loss}, {perplexity}, {result['bits_per_byte']:.4f} bits per byte (a unigram model: {unigram})"


def describe_sample(result: dict[str, Any]) -> str:
    """How much of a split was read, and what that may have changed, where it was not all of it."""
    if not result.get("standard_error"):
        return ""
    share = f"{result['tokens']:,} of {result['split_tokens']:,} tokens"
    if "split_sequences" in result:
        share = f"{result['sequences']:,} of {result['split_sequences']:,} sequences"
    return f", on {share}: ± {result['standard_error']:.4f} nats by the choice of windows"
