"""Checkpoints one can trust: written aside, hashed, flushed, renamed; a run resumes from the newest that is whole.

A save copies the tensors and returns, and a thread writes the copy while training goes on. Tensors sharded over ranks
are written by every rank its own part, and the save returns when all is on disk. In a distributed job `save`, `newest`
and `best` are called by all ranks together; rank 0 decides, and all of them return or raise the same.
"""

import errno
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qklab.schema import format_value
from qklab.train import accord, shards, tensorfile
from qklab.train.shelf import Draft, Shelf
from qklab.train.store import CheckpointError, Found

__all__ = ["CheckpointError", "Checkpoints", "Found", "Snapshot"]

ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EROFS: "make the folder writable",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
}


@dataclass(frozen=True)
class Snapshot:
    """What is saved: tensors by flat name ("model.…", "optimiser.…") and everything else as JSON."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run: the last `keep` and the best.

    `run` is written into every manifest, and a checkpoint of another run is refused; with None any is accepted.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        *,
        run: str | None = None,
        say: Callable[[str], None] = print,
        background: bool = True,
    ):
        if keep < 1:
            raise CheckpointError(f"at least 1 checkpoint must be kept, but keep={keep} came.")
        self.shelf = Shelf(Path(folder), keep, run, say)
        self.background = background
        self.copies: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None

    def save(self, snapshot: Snapshot, *, best: bool = False) -> None:
        """Save, after the save before is done; the tensors may change as soon as this returns.

        Raises CheckpointError for a save that failed since the last call; `snapshot` is then not saved.
        """
        draft = self.draft(snapshot, best)
        accord.first_decides(self.wait)
        if any(isinstance(tensor, DTensor) for tensor in snapshot.tensors.values()):
            self.write_shards(draft, snapshot.tensors)
            return
        if accord.rank() == 0:
            self.copy(snapshot.tensors)
            # Not a daemon: a program that ends without wait() still ends with its last checkpoint on disk.
            self.thread = threading.Thread(target=self.write_copies, args=(draft,), name="checkpoint")
            self.thread.start()
        if not self.background:
            accord.first_decides(self.wait)

    def wait(self) -> None:
        """Return when all that this rank writes is on disk; raises CheckpointError if it could not be written.

        Only rank 0 has anything to wait for, and no other rank is asked: an error's way out may lead through here.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def newest(self) -> Found | None:
        """The newest checkpoint that is whole, None if there is none at all; says a sentence for each damaged one."""
        return self.search(best=False)

    def best(self) -> Found | None:
        """The last checkpoint that was saved as the best."""
        return self.search(best=True)

    def search(self, best: bool) -> Found | None:
        def after_writing() -> Found | None:
            self.wait()
            return self.shelf.search(best)

        return accord.first_decides(after_writing)

    def draft(self, snapshot: Snapshot, best: bool) -> Draft:
        """Refuses now what could not be written or told apart later."""
        step, state = snapshot.step, snapshot.state
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"a checkpoint's step is a whole number ≥ 0, but {format_value(step)} came.")
        if state.get("step", step) != step:
            raise CheckpointError(
                f"a checkpoint of step {step} came with the state of step {format_value(state['step'])}."
            )
        for name in snapshot.tensors:
            if not re.fullmatch(r"\w+\..+", name):
                raise CheckpointError(
                    f"tensors are named 'model.…', 'optimiser.…' and so on, but {format_value(name)} came."
                )
        try:
            text = json.dumps({**state, "step": step}, indent=1).encode()
            kinds = {name: tensorfile.kind(name, tensor) for name, tensor in snapshot.tensors.items()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"this state cannot be saved: {error}") from error
        path = self.shelf.folder / f".tmp-step-{step:010d}"
        return Draft(path, step, best, kinds, text, state.get("validation_loss"))

    @torch.no_grad()
    def copy(self, tensors: dict[str, Tensor]) -> None:
        """Copies to the CPU, into the memory of the last save: getting fresh memory takes longer than copying."""
        last, self.copies = self.copies, {}
        for name, tensor in tensors.items():
            copy = last.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.copies[name] = copy.copy_(tensor, non_blocking=True)
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()

    def write_copies(self, draft: Draft) -> None:
        try:
            with self.writing(draft):
                self.shelf.open(draft)
                files = {}
                for prefix in sorted({name.split(".")[0] for name in self.copies}):
                    tensors = {name: copy for name, copy in self.copies.items() if name.split(".")[0] == prefix}
                    path = draft.path / f"{prefix}.safetensors"
                    metadata = {"format": "pt", "step": str(draft.step)}
                    files[path.name] = tensorfile.write_tensors(path, tensors, metadata)
                self.shelf.close(draft, files)
        except Exception as error:
            self.failure = error

    def write_shards(self, draft: Draft, tensors: dict[str, Tensor]) -> None:
        def write_part() -> dict[str, Any]:
            shards.save(draft.path, tensors)
            return {path.name: tensorfile.measured(path) for path in shards.own_files(draft.path)}

        with self.writing(draft):
            accord.first_decides(lambda: self.shelf.open(draft))
            files = {name: entry for part in accord.from_all(write_part) for name, entry in part.items()}
            accord.first_decides(lambda: self.shelf.close(draft, files))

    @contextmanager
    def writing(self, draft: Draft) -> Iterator[None]:
        """Leaves nothing half written, and one sentence where the disk refuses."""
        try:
            yield
        except Exception as error:
            shutil.rmtree(draft.path, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            advice = ADVICE.get(error.errno or 0, "look after the disk")
            raise CheckpointError(
                f"the checkpoint of step {draft.step} could not be written to {self.shelf.folder}: {error.strerror}; "
                f"{advice} and resume, the checkpoints before it are untouched."
            ) from error
