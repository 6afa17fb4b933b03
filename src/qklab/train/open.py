"""What there is of runs before they train: run.json, the corpus they share, checkpoints, and which go on together."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qklab.data.prepare import prepare_corpus
from qklab.data.shards import Corpus
from qklab.data.spec import DataError
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.environment import describe_environment, find_commit, hash_code
from qklab.runs.progress import Display
from qklab.train.checkpoint import Checkpoint, Checkpoints
from qklab.train.machine import Machine
from qklab.train.ranks import call_on_first_rank
from qklab.train.recover import TOKENIZER, restore_tokenizer
from qklab.train.resume import refuse_other_data
from qklab.train.spec import ExecutionSpec, RunSpec, pad_vocab


@dataclass(frozen=True)
class OpenRun:
    """A run that has not ended: its spec and directory, what run.json says, and from where it goes on."""

    spec: RunSpec
    directory: RunDirectory
    record: dict[str, Any]
    checkpoints: Checkpoints
    found: Checkpoint | None
    resumed: bool

    @property
    def step(self) -> int:
        return 0 if self.found is None else self.found.step


def open_runs(
    begun: Sequence[tuple[RunSpec, RunDirectory, dict[str, Any] | None]],
    execution: ExecutionSpec,
    machine: Machine,
    data: Path | None,
    display: Display,
) -> tuple[list[OpenRun], Corpus]:
    """What is there of each run, and the corpus they share."""
    oldest = next((old for *_, old in begun if old is not None), None)
    corpus = open_corpus(begun[0][0], data, display, oldest["data"] if oldest is not None else None)
    if oldest is not None and execution.threads is None and machine.world == 1 and machine.device.type == "cpu":
        torch.set_num_threads(oldest["environment"]["device"]["threads"])  # sums rounded as they were before
    runs = []
    for spec, directory, old in begun:
        if old is not None:
            refuse_other_data(directory, old["data"], corpus)
            call_on_first_rank(lambda directory=directory: restore_tokenizer(directory, corpus, display.warn))
        record = old or call_on_first_rank(
            lambda directory=directory, spec=spec: begin_record(directory, spec, corpus, machine, len(begun))
        )
        kept = max(1, execution.keep)
        checkpoints = Checkpoints(directory.checkpoints_path, kept, run=record["id"], say=display.warn)
        runs.append(OpenRun(spec, directory, record, checkpoints, checkpoints.find_newest(), old is not None))
    return runs, corpus


def group_by_step(runs: Sequence[OpenRun], most: int) -> list[list[OpenRun]]:
    """Runs that can go on together, at most so many, those furthest behind last.

    A process killed while it saved leaves some runs a checkpoint ahead of others; they go back by that one, which is no
    more than a run alone would have lost. Whatever else is at another step, such as a run that never began or one whose
    checkpoint is damaged, catches up by itself.
    """
    sound = [run.step for run in runs if run.resumed and not run.checkpoints.damaged]
    aligned = [align_run(run, min(sound, default=0)) for run in runs]
    steps = sorted({run.step for run in aligned}, reverse=True)
    alike = [[run for run in aligned if run.step == step] for step in steps]
    return [group[first : first + most] for group in alike for first in range(0, len(group), most)]


def align_run(run: OpenRun, step: int) -> OpenRun:
    """The run at `step`, if that was its last save but one."""
    if run.step <= step or run.checkpoints.find_previous_step() != step:
        return run
    if step == 0:
        return replace(run, found=None)
    found = run.checkpoints.find_step(step)
    return run if found is None else replace(run, found=found)


def open_corpus(spec: RunSpec, data: Path | None, display: Display, before: dict[str, Any] | None) -> Corpus:
    """The prepared corpus; rank 0 prepares it where that has not been done. A run that began with it (`before`) can do
    without the source."""

    def find_folder() -> Path:
        try:
            progress = display.report_bytes if display.live else None
            return prepare_corpus(spec.corpus, data=data, progress=progress).folder
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


def begin_record(
    directory: RunDirectory, spec: RunSpec, corpus: Corpus, machine: Machine, members: int
) -> dict[str, Any]:
    """Write run.json, and before it what belongs to every run."""
    record = {
        "id": uuid.uuid4().hex,
        "spec": spec.to_dict(),
        "name": spec.model.name,
        "fingerprint": spec.fingerprint,
        "commit": find_commit(),
        "code": hash_code(),
        "data": {"folder": str(corpus.folder), "hash": corpus.hash, "tokenizer": corpus.tokenizer.hash},
        "environment": describe_environment(machine.describe()),
    } | ({"population": members} if members > 1 else {})
    corpus.tokenizer.save(directory.path / TOKENIZER)
    directory.write("run.json", record)
    return record
