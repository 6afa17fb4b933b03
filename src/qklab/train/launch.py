"""From a spec and a folder to a finished run: prepare, open or resume, train, evaluate, sum up."""

import time
import uuid
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qklab.data.prepare import prepare_corpus
from qklab.data.shards import Corpus
from qklab.data.spec import DataError
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.environment import describe_environment, find_commit
from qklab.runs.files import describe_os_error
from qklab.runs.sinks import Sinks
from qklab.train.checkpoint import CheckpointError, Checkpoints
from qklab.train.loop import Loop, Status
from qklab.train.machine import Machine, refuse_too_large, work_around_bf16
from qklab.train.mend import (
    TOKENIZER,
    describe_lost_steps,
    discard_summary,
    find_lost_steps,
    has_tokenizer,
    restore_tokenizer,
)
from qklab.train.progress import Display, format_duration
from qklab.train.ranks import call_on_first_rank
from qklab.train.recorder import RunRecorder
from qklab.train.resume import read_begun_run, refuse_other_data, refuse_other_spec
from qklab.train.signals import StopRequest
from qklab.train.spec import ExecutionSpec, RunSpec, pad_vocab
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
    execution = execution or ExecutionSpec()
    machine = Machine.open(execution)
    display = display if display is not None and machine.main else Display()
    try:
        spec = choose_precision(spec, machine)
        refuse_too_large(spec, execution, machine)
        if machine.device.type == "cpu" and (spec.precision == "bf16" or spec.optimiser.kind == "muon"):
            work_around_bf16(display.say)
        directory = RunDirectory(folder or name_folder(spec))
        with directory:
            call_on_first_rank(lambda: directory.lock() and None)
            return train_in(directory, spec, execution, machine, data, display)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise RunError(
            f"the run stopped because of a file{where}: {describe_os_error(error)}; what was saved before is "
            "still there, mend this and run the same command again."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "not enough memory" not in str(error):
            raise
        raise RunError(
            "there is not enough memory for this run; fewer execution.rows take less, and so does execution.recompute; "
            "what was saved before is still there."
        ) from error
    finally:
        display.close()
        machine.close()


def choose_precision(spec: RunSpec, machine: Machine) -> RunSpec:
    """Precision auto: bf16 on a GPU, fp32 on a CPU."""
    if spec.precision != "auto":
        return spec
    return spec.replace(precision="bf16" if machine.device.type == "cuda" else "fp32")


def train_in(
    directory: RunDirectory,
    spec: RunSpec,
    execution: ExecutionSpec,
    machine: Machine,
    data: Path | None,
    display: Display,
) -> Outcome:
    old = call_on_first_rank(lambda: read_begun_run(directory))
    if old is not None:
        refuse_other_spec(directory, old["spec"], spec)
        call_on_first_rank(lambda: discard_summary(directory, display.warn))
        summary = call_on_first_rank(directory.summary)
        intact = call_on_first_rank(lambda: has_tokenizer(directory, old["data"]["tokenizer"]))
        if summary is not None and intact:
            display.say(f"{directory.path} is already {summary['status']}; nothing to do.")
            return Outcome(summary["status"], directory.path, summary)
    corpus = open_corpus(spec, data, display, old["data"] if old is not None else None)
    if old is not None:
        refuse_other_data(directory, old["data"], corpus)
        call_on_first_rank(lambda: restore_tokenizer(directory, corpus, display.warn))
        if summary is not None:
            return Outcome(summary["status"], directory.path, summary)
        if execution.threads is None and machine.world == 1 and machine.device.type == "cpu":
            torch.set_num_threads(old["environment"]["device"]["threads"])  # sums rounded as they were before
    record = old or call_on_first_rank(lambda: begin_record(directory, spec, corpus, machine))
    trainer = Trainer(spec, execution, corpus, machine)
    checkpoints = Checkpoints(directory.checkpoints_path, execution.keep, run=record["id"], say=display.warn)
    found = checkpoints.find_newest()
    if found is not None:
        trainer.restore(found)
        display.say(f"resuming {directory.path} at step {found.step}.")
    elif old is not None:
        display.say(f"{directory.path} has no checkpoint yet; it begins again at step 0.")
    else:
        display.say(
            f"{directory.path}: {spec.model.name}, {spec.model.parameters():,} parameters, {spec.precision} on "
            f"{machine.device.type}, {spec.tokens_per_step:,} tokens a step."
        )
    names = [name.strip() for name in (execution.sinks or "").split(",") if name.strip() and machine.main]
    sinks = Sinks(names, directory.path, directory.path.name, spec.to_dict(), display.say)
    with closing(RunRecorder(directory, sinks)) as recorder:
        if old is not None:
            lost = call_on_first_rank(lambda: find_lost_steps(directory, trainer.state.step))
            recorder.append("resume", trainer.state.step, ranks=machine.world)
            if lost:
                recorder.append("lost", trainer.state.step, steps=len(lost), first=lost[0], last=lost[-1])
                display.warn(describe_lost_steps(directory, lost))
        return complete_run(Loop(trainer, checkpoints, recorder, display))


def complete_run(loop: Loop) -> Outcome:
    began, folder = time.perf_counter(), loop.recorder.directory.path
    with StopRequest() as stop:
        try:
            status = loop.run(stop)
            call_on_first_rank(loop.checkpoints.wait)
            results = evaluate_splits(loop, stop) if status == "finished" else {}
        except InterruptedEvaluationError:
            status, results = "interrupted", {}
        except BaseException:
            with suppress(CheckpointError):  # an error is already on its way
                loop.checkpoints.wait()
            raise
    if status == "interrupted":
        loop.display.say(
            f"stopped by {stop.came or 'another rank'} at step {loop.state.step}, everything is saved; "
            f"the same command continues {folder}."
        )
        return Outcome(status, folder, None)
    summary = summarise_run(loop, status, results, time.perf_counter() - began)
    for split, result in results.items():
        loop.recorder.append("final", loop.state.step, split=split, **result)
    loop.recorder.finish(summary)
    return Outcome(status, folder, summary)


def open_corpus(spec: RunSpec, data: Path | None, display: Display, before: dict[str, Any] | None) -> Corpus:
    """The prepared corpus; rank 0 prepares it where that has not been done. A run that began with it (`before`) can do
    without the source."""

    def find_folder() -> Path:
        try:
            return prepare_corpus(spec.corpus, data=data, progress=display.live).folder
        except DataError:
            folder = Path(before["folder"]) if before is not None else None
            if folder is None or not folder.exists():
                raise
            display.say(
                f"the source {spec.corpus.source!r} cannot be read; the run goes on with {folder}, prepared from it."
            )
            return folder

    folder = call_on_first_rank(find_folder)
    corpus = Corpus.open(folder)
    if corpus.tokenizer.vocab > spec.model.vocab:
        raise RunError(
            f"the corpus {folder} was made with a tokenizer of {corpus.tokenizer.vocab} tokens, but the model has "
            f"vocab={spec.model.vocab}; set model.vocab to at least that or prepare the corpus anew."
        )
    if pad_vocab(corpus.tokenizer.vocab) < spec.model.vocab:
        display.say(
            f"the corpus {folder} has a tokenizer of {corpus.tokenizer.vocab} tokens, and the rest of the model's "
            f"vocab={spec.model.vocab} is never used; model.vocab={pad_vocab(corpus.tokenizer.vocab)} would do."
        )
    return corpus


def begin_record(directory: RunDirectory, spec: RunSpec, corpus: Corpus, machine: Machine) -> dict[str, Any]:
    """Write run.json, and before it what belongs to every run."""
    record = {
        "id": uuid.uuid4().hex,
        "spec": spec.to_dict(),
        "name": spec.model.name,
        "fingerprint": spec.fingerprint,
        "commit": find_commit(),
        "data": {"folder": str(corpus.folder), "hash": corpus.hash, "tokenizer": corpus.tokenizer.hash},
        "environment": describe_environment(machine.describe()),
    }
    corpus.tokenizer.save(directory.path / TOKENIZER)
    directory.write("run.json", record)
    return record


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
        lines.append(
            f"  {split}: loss {result['loss']:.4f} nats per token, perplexity {result['perplexity']:.2f} per token, "
            f"{result['bits_per_byte']:.4f} bits per byte (a unigram model: {result['unigram_loss']:.4f} nats)"
            f"{describe_sample(result)}"
        )
    return "\n".join(lines)


def describe_sample(result: dict[str, Any]) -> str:
    """How much of a split was read, and what that may have changed, where it was not all of it."""
    if not result.get("standard_error"):
        return ""
    share = f"{result['tokens']:,} of {result['split_tokens']:,} tokens"
    return f", on {share}: ± {result['standard_error']:.4f} nats by the choice of windows"
