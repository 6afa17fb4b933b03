"""From a spec and a folder to a finished run: prepare, open or resume, train, evaluate, sum up."""

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qklab.data.prepare import prepare_corpus
from qklab.data.shards import Corpus
from qklab.data.spec import DataError
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.environment import commit, environment
from qklab.runs.files import describe_os_error
from qklab.runs.metrics import MetricsFile
from qklab.runs.sinks import Sinks
from qklab.train.checkpoint import CheckpointError, Checkpoints
from qklab.train.finish import InterruptedEvaluationError, final_evaluations, summed_up
from qklab.train.loop import Loop, Status
from qklab.train.machine import Machine, guard_bf16
from qklab.train.progress import Display, Silent, duration
from qklab.train.same import flat, other_setting, part_of, recorded, refuse_other_data, refuse_other_spec
from qklab.train.signals import StopRequest
from qklab.train.spec import ExecutionSpec, RunSpec, merged, padded, read_toml, resolve
from qklab.train.trainer import Trainer

EXIT_CODES: dict[Status, int] = {"finished": 0, "diverged": 3, "interrupted": 75}


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended; `summary` is summary.json, or None where the run is to be continued."""

    status: Status
    folder: Path
    summary: dict[str, Any] | None


def asked(values: dict[str, Any], file: Path | None, folder: Path | None) -> tuple[RunSpec, ExecutionSpec]:
    """The run that flags `values` over `file` describe; a directory that holds a run says the rest itself."""
    base = read_toml(file) if file is not None else {}
    if "budget" in values:  # one of three: a flag replaces the file's
        base.pop("budget", None)
    directory = RunDirectory(folder) if folder is not None else None
    if directory is None or not directory.exists() or file is not None:
        return resolve(merged(base, values))
    values = dict(values)
    execution = ExecutionSpec.from_dict(values.pop("execution", {}))
    spec = RunSpec.from_dict(directory.read()["spec"])
    old, new = flat(spec.to_dict()), {rename(name): value for name, value in flat(values).items()}
    old.setdefault("model.attention.coupling.kind", "none")
    if "model.recipe" in new:  # stands for every field of the model
        model = flat({"model": resolve(values)[0].model.to_dict()})
        new = {name: value for name, value in (model | new).items() if name not in ("model.recipe", "model.vocab")}
    for name, value in new.items():
        if name not in old or old[name] != value:
            raise RunError(other_setting(directory, name, old.get(name, part_of(old, name)), value))
    return spec, execution


def rename(name: str) -> str:
    """Where a setting of the command line stands in a resolved run."""
    return f"model.{name}" if name.startswith("attention.") else name


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
            f"the run stopped because of a file{where}: {describe_os_error(error)}; what was saved before is "
            "still there, mend this and run the same command again."
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
    old = machine.agree(lambda: recorded(directory))
    if old is not None:
        refuse_other_spec(directory, old["spec"], spec)
        summary = machine.agree(directory.summary)
        if summary is not None:
            display.say(f"{directory.path} is already {summary['status']}; nothing to do.")
            return Outcome(summary["status"], directory.path, summary)
    corpus = opened(spec, machine, data, display.say, old["data"] if old is not None else None)
    if old is not None:
        refuse_other_data(directory, old["data"], corpus)
        if execution.threads is None and machine.world == 1 and machine.device.type == "cpu":
            torch.set_num_threads(old["environment"]["device"]["threads"])  # sums rounded as they were before
    record = old or machine.agree(lambda: new_record(spec, corpus, machine))
    if old is None and machine.main:
        corpus.tokenizer.save(directory.path / "tokenizer.json")
        directory.write("run.json", record)
    trainer = Trainer(spec, execution, corpus, machine)
    checkpoints = Checkpoints(directory.checkpoints_path, execution.keep, run=record["id"], say=display.say)
    found = checkpoints.newest()
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
    metrics = MetricsFile(directory.metrics_path) if machine.main else None
    sinks = None
    try:
        if metrics is not None:
            if old is not None:
                metrics.append({"kind": "resume", "step": trainer.state.step, "ranks": machine.world})
            names = [name.strip() for name in (execution.sinks or "").split(",") if name.strip()]
            sinks = Sinks(names, directory.path, directory.path.name, spec.to_dict(), display.say)
        return carried_out(Loop(trainer, checkpoints, directory, metrics, sinks, display))
    finally:
        if sinks is not None:
            sinks.close()
        if metrics is not None:
            metrics.close()


def carried_out(loop: Loop) -> Outcome:
    began, folder = time.perf_counter(), loop.directory.path
    with StopRequest() as stop:
        try:
            status = loop.run(stop)
            loop.checkpoints.wait()
            results = final_evaluations(loop, stop) if status == "finished" else {}
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
    summary = summed_up(loop, status, results, time.perf_counter() - began)
    for split, result in results.items():
        loop.record({"kind": "final", "split": split} | result)
    if loop.metrics is not None:
        loop.metrics.flush()
        loop.directory.write("summary.json", summary)
    return Outcome(status, folder, summary)


def opened(
    spec: RunSpec, machine: Machine, data: Path | None, say: Callable[[str], None], before: dict[str, Any] | None
) -> Corpus:
    """The prepared corpus; rank 0 prepares it where that has not been done. A run that began with it (`before`) can do
    without the source."""

    def found() -> Path:
        try:
            return prepare_corpus(spec.corpus, data=data, progress=say is not Silent.say).folder
        except DataError:
            folder = Path(before["folder"]) if before is not None else None
            if folder is None or not folder.exists():
                raise
            say(f"the source {spec.corpus.source!r} cannot be read; the run goes on with {folder}, prepared from it.")
            return folder

    folder = machine.agree(found)
    corpus = Corpus.open(folder)
    if corpus.tokenizer.vocab > spec.model.vocab:
        raise RunError(
            f"the corpus {folder} was made with a tokenizer of {corpus.tokenizer.vocab} tokens, but the model has "
            f"vocab={spec.model.vocab}; set model.vocab to at least that or prepare the corpus anew."
        )
    if padded(corpus.tokenizer.vocab) < spec.model.vocab:
        say(
            f"the corpus {folder} has a tokenizer of {corpus.tokenizer.vocab} tokens, and the rest of the model's "
            f"vocab={spec.model.vocab} is never used; model.vocab={padded(corpus.tokenizer.vocab)} would do."
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
