"""From a spec and a folder to a finished run: prepare, open or resume, train, evaluate, sum up."""

import resource
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qklab.data.prepare import prepare
from qklab.data.shards import Corpus, Split
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.environment import commit, environment
from qklab.runs.files import reason
from qklab.runs.metrics import MetricsFile
from qklab.runs.sinks import Sinks
from qklab.schema import shown
from qklab.train.checkpoint import CheckpointError
from qklab.train.loop import Status, Trainer
from qklab.train.machine import Machine, guard_bf16
from qklab.train.progress import Display, Silent, duration
from qklab.train.signals import StopRequest
from qklab.train.spec import ExecutionSpec, RunSpec, merged, read_toml, resolve

EXIT_CODES: dict[Status, int] = {"finished": 0, "diverged": 3, "interrupted": 75}


class InterruptedEvaluationError(Exception):
    """Someone asked to stop during the final evaluation; the last checkpoint is already there."""


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended; `summary` is summary.json, or None where the run is to be continued."""

    status: Status
    folder: Path
    summary: dict[str, Any] | None


def asked(values: dict[str, Any], file: Path | None, folder: Path | None) -> tuple[RunSpec, ExecutionSpec]:
    """The run that flags `values` over `file` describe; a directory that holds a run says the rest itself."""
    base = read_toml(file) if file is not None else {}
    directory = RunDirectory(folder) if folder is not None else None
    if directory is None or not directory.exists() or file is not None:
        return resolve(merged(base, values))
    values = dict(values)
    execution = ExecutionSpec.from_dict(values.pop("execution", {}))
    spec = RunSpec.from_dict(directory.read()["spec"])
    old, new = flat(spec.to_dict()), {rename(name): value for name, value in flat(values).items()}
    for name, value in new.items():
        if name != "model.recipe" and old.get(name, value) != value:
            raise RunError(other_setting(directory, name, old[name], value))
    return spec, execution


def rename(name: str) -> str:
    """Where a setting of the command line stands in a resolved run."""
    return f"model.{name}" if name.startswith("attention.") else name


def other_setting(directory: RunDirectory, name: str, old: Any, new: Any) -> str:
    return (
        f"{directory.path} holds a run with {name}={shown(old)}, but {shown(new)} came; "
        "choose another folder with --run, or leave the setting out to continue this one."
    )


def default_folder(spec: RunSpec) -> Path:
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
    display = display if display is not None and machine.main else Silent()
    try:
        spec = concrete(spec, machine)
        if machine.device.type == "cpu" and (spec.precision == "bf16" or spec.optimiser.kind == "muon"):
            guard_bf16(display.say)
        directory = RunDirectory(folder or default_folder(spec))
        with directory:
            machine.agree(lambda: directory.locked() and None)
            return run_in(directory, spec, execution, machine, data, display)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise RunError(
            f"the run stopped because of a file{where}: {reason(error)}; what was saved before is still there, "
            "mend this and run the same command again."
        ) from error
    finally:
        display.close()
        machine.close()


def concrete(spec: RunSpec, machine: Machine) -> RunSpec:
    """Precision auto: bf16 on a GPU, fp32 on a CPU."""
    if spec.precision != "auto":
        return spec
    return spec.replace(precision="bf16" if machine.device.type == "cuda" else "fp32")


def run_in(
    directory: RunDirectory,
    spec: RunSpec,
    execution: ExecutionSpec,
    machine: Machine,
    data: Path | None,
    display: Display,
) -> Outcome:
    old = machine.agree(lambda: directory.read() if directory.exists() else None)
    if old is not None:
        refuse_other_spec(directory, old["spec"], spec)
        summary = machine.agree(directory.summary)
        if summary is not None:
            display.say(f"{directory.path} is already {summary['status']}; nothing to do.")
            return Outcome(summary["status"], directory.path, summary)
    corpus = opened(spec, machine, data, display.say)
    if old is not None:
        refuse_other_data(directory, old["data"], corpus)
        if execution.threads is None and machine.world == 1 and machine.device.type == "cpu":
            torch.set_num_threads(old["environment"]["device"]["threads"])  # sums rounded as they were before
    record = old or machine.agree(lambda: new_record(spec, corpus, machine))
    if old is None and machine.main:
        corpus.tokenizer.save(directory.path / "tokenizer.json")
        directory.write("run.json", record)
    trainer = Trainer(spec, execution, corpus, machine, directory, record["id"], display)
    found = trainer.checkpoints.newest()
    if found is not None:
        trainer.restore(found)
        display.say(f"resuming {directory.path} at step {found.step}.")
    metrics = MetricsFile(directory.metrics_path) if machine.main else None
    sinks = None
    try:
        if metrics is not None:
            if old is not None:
                metrics.append({"kind": "resume", "step": trainer.state.step, "ranks": machine.world})
            names = [name.strip() for name in (execution.sinks or "").split(",") if name.strip()]
            sinks = Sinks(names, directory.path, directory.path.name, spec.to_dict(), display.say)
        return carried_out(trainer, metrics, sinks, directory, display)
    finally:
        if sinks is not None:
            sinks.close()
        if metrics is not None:
            metrics.close()


def carried_out(
    trainer: Trainer, metrics: MetricsFile | None, sinks: Sinks | None, directory: RunDirectory, display: Display
) -> Outcome:
    began = time.perf_counter()
    with StopRequest() as stop:
        try:
            status = trainer.run(stop, metrics, sinks)
            trainer.checkpoints.wait()
            results = final_evaluations(trainer, stop, display) if status == "finished" else {}
        except InterruptedEvaluationError:
            status, results = "interrupted", {}
        except BaseException:
            with suppress(CheckpointError):  # an error is already on its way
                trainer.checkpoints.wait()
            raise
    if status == "interrupted":
        display.say(
            f"stopped by {stop.came or 'another rank'} at step {trainer.state.step}, everything is saved; "
            f"the same command continues {directory.path}."
        )
        return Outcome(status, directory.path, None)
    summary = summed_up(trainer, status, results, time.perf_counter() - began)
    for split, result in results.items():
        trainer.record({"kind": "final", "split": split} | result)
    if metrics is not None:
        metrics.flush()
        directory.write("summary.json", summary)
    return Outcome(status, directory.path, summary)


def final_evaluations(trainer: Trainer, stop: StopRequest, display: Display) -> dict[str, dict[str, Any]]:
    """The whole of validation and test."""
    results = {}
    for split in trainer.windows:

        def tick(done: float, split: str = split) -> None:
            if stop.came is not None and trainer.machine.world == 1:
                raise InterruptedEvaluationError
            display.show(1.0, f"final evaluation on all of {split}: {done:.0%}")

        with trainer.timed("evaluation"):
            results[split] = trainer.evaluate(split, None, tick).to_dict()
        results[split]["unigram_loss"] = unigram_loss(trainer.corpus, split)
    return results


def unigram_loss(corpus: Corpus, split: str) -> float:
    """Nats per token on `split` of the best model without context: train's token frequencies, one added to each."""

    def counts(of: Split) -> np.ndarray:
        total = np.zeros(corpus.tokenizer.vocab, np.int64)
        for start in range(0, of.tokens, 1 << 24):
            piece = of.read(start, min(of.tokens, start + (1 << 24)))
            total += np.bincount(piece, minlength=len(total))
        return total

    train, test = counts(corpus.splits["train"]) + 1, counts(corpus.splits[split])
    return float(-(test * np.log(train / train.sum())).sum() / test.sum())


def summed_up(trainer: Trainer, status: Status, results: dict[str, Any], wall: float) -> dict[str, Any]:
    spec, state = trainer.spec, trainer.state
    tokens = state.step * spec.tokens_per_step
    return {
        "status": status,
        "steps": state.step,
        "tokens": tokens,
        "evaluation": results,
        "best": {"validation_loss": state.best, "step": state.best_step},
        "skipped_steps": state.skipped,
        "parameters": spec.model.parameters(),
        "training_flops": state.step * spec.flops_per_step,
        "cache_bytes_per_token": spec.model.cache_bytes(1),
        "seconds": state.seconds,
        "tokens_per_second": trainer.tokens_per_second(),
        "peak_memory_bytes": peak_memory(trainer.machine),
        "seconds_of_last_process": {"all": wall} | trainer.spent,
    }


def peak_memory(machine: Machine) -> int:
    """Of the device's allocator on a GPU, of the process on a CPU."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def opened(spec: RunSpec, machine: Machine, data: Path | None, say: Callable[[str], None]) -> Corpus:
    """The prepared corpus; rank 0 prepares it where that has not been done."""
    folder = machine.agree(lambda: prepare(spec.corpus, data=data, progress=say is not Silent.say).folder)
    corpus = Corpus.open(folder)
    if corpus.tokenizer.vocab > spec.model.vocab:
        raise RunError(
            f"the corpus {folder} was made with a tokenizer of {corpus.tokenizer.vocab} tokens, but the model has "
            f"vocab={spec.model.vocab}; set model.vocab to at least that or prepare the corpus anew."
        )
    return corpus


def new_record(spec: RunSpec, corpus: Corpus, machine: Machine) -> dict[str, Any]:
    return {
        "id": uuid.uuid4().hex,
        "spec": spec.to_dict(),
        "name": spec.model.name,
        "fingerprint": spec.fingerprint,
        "commit": commit(),
        "data": {"folder": str(corpus.folder), "hash": corpus.hash, "tokenizer": corpus.tokenizer.hash},
        "environment": environment(machine.describe()),
    }


def refuse_other_spec(directory: RunDirectory, old: dict[str, Any], spec: RunSpec) -> None:
    new = flat(spec.to_dict())
    before = flat(old)
    for name in sorted(before.keys() | new.keys()):
        if before.get(name) != new.get(name):
            raise RunError(other_setting(directory, name, before.get(name), new.get(name)))


def refuse_other_data(directory: RunDirectory, old: dict[str, Any], corpus: Corpus) -> None:
    if old["tokenizer"] != corpus.tokenizer.hash:
        raise RunError(
            f"{directory.path} was trained with another tokenizer ({old['tokenizer'][:12]}…) than {corpus.folder} has "
            f"({corpus.tokenizer.hash[:12]}…); restore the corpus it began with or start a new run."
        )
    if old["hash"] != corpus.hash:
        raise RunError(
            f"the corpus changed under {directory.path}: it began with {old['hash'][:12]}… and {corpus.folder} is now "
            f"{corpus.hash[:12]}…; restore the corpus it began with or start a new run."
        )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return result


def told(outcome: Outcome) -> str:
    """The end of a run in a few lines."""
    summary = outcome.summary
    if summary is None:
        return f"{outcome.folder}: to be continued"
    lines = [
        f"{outcome.folder}: {summary['status']} after {summary['steps']:,} steps, {summary['tokens']:,} tokens, "
        f"{duration(summary['seconds'])} of training at {summary['tokens_per_second']:,.0f} tokens/s"
    ]
    for split, result in summary["evaluation"].items():
        lines.append(
            f"  {split}: loss {result['loss']:.4f} nats per token, perplexity {result['perplexity']:.2f} per token, "
            f"{result['bits_per_byte']:.4f} bits per byte (a unigram model: {result['unigram_loss']:.4f} nats)"
        )
    return "\n".join(lines)
