"""The checkpoints of one run.

A save copies the tensors and returns, and a thread writes the copy while training goes on. Tensors sharded over ranks
are written by every rank its own part, and the save returns when all is on disk. In a distributed job all ranks call
`save`, `find_newest` and `find_best` together; rank 0 decides, and all of them return or raise the same.
"""

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qklab.optim.rows import is_dtensor
from qklab.runs.files import flush_to_disk, hash_file, remove_temporaries, rename_folder, write_json
from qklab.train.checkpoint import retention, store
from qklab.train.checkpoint.distributed import save_shards
from qklab.train.checkpoint.store import Checkpoint, CheckpointError, Snapshot
from qklab.train.ranks import call_on_all_ranks, call_on_first_rank, own_rank

ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EROFS: "make the folder writable",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
}


class Checkpoints:
    """The last `keep` checkpoints and the best in `folder`.

    `run` is written into every manifest, and a checkpoint of another run is refused; with None any is accepted. The
    first save clears what killed processes left behind and sets aside what a search found damaged.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        *,
        run: str | None = None,
        say: Callable[[str], None] = print,
    ):
        if keep < 1:
            raise CheckpointError(f"at least 1 checkpoint must be kept, but keep={keep} came.")
        self.folder, self.keep, self.run, self.say = Path(folder), keep, run, say
        self.copies: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        self.damaged: set[Path] = set()
        self.cleared = False

    def save(self, snapshot: Snapshot, *, best: bool = False) -> None:
        """Save, after the save before is done; the tensors may change as soon as this returns.

        Raises CheckpointError for a save that failed since the last call; `snapshot` is then not saved.
        """
        manifest = snapshot.describe(self.run, best)
        call_on_first_rank(self.wait)
        if any(map(is_dtensor, snapshot.tensors.values())):
            self.write_shards(manifest, snapshot.tensors)
            return
        if own_rank() == 0:
            self.copy_tensors(snapshot.tensors)
            # Not a daemon: a program that ends without wait() still ends with its last checkpoint on disk.
            self.thread = threading.Thread(target=self.write_copies, args=(manifest,), name="checkpoint")
            self.thread.start()

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

    def find_newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, None if there is none at all; says a sentence for each damaged one."""
        return call_on_first_rank(lambda: self.search(best=False))

    def find_best(self) -> Checkpoint | None:
        """The last checkpoint that was saved as the best."""
        return call_on_first_rank(lambda: self.search(best=True))

    def find_step(self, step: int) -> Checkpoint | None:
        """The checkpoint of this step, if there is one and it is whole."""
        with suppress(CheckpointError):
            return store.verify_checkpoint(self.folder / f"step-{step:010d}", self.run)
        return None

    def find_previous_step(self) -> int:
        """The step of the checkpoint before the newest; 0 where there is none."""
        steps = sorted({store.step_of(path) for path in retention.list_checkpoints(self.folder)}, reverse=True)
        return steps[1] if len(steps) > 1 else 0

    def delete_all(self) -> None:
        """Leave none: nobody will go on from them."""
        self.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def search(self, best: bool) -> Checkpoint | None:
        self.wait()
        found, wrong = retention.find_checkpoint(self.folder, self.run, best)
        self.damaged |= wrong.keys()
        for path, reason in wrong.items():
            self.say(retention.describe_damage(path, reason, found))
        return found

    @torch.no_grad()
    def copy_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copies to the CPU, into the memory of the last save: getting fresh memory takes longer than copying."""
        last, self.copies = self.copies, {}
        for name, tensor in tensors.items():
            copy = last.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.copies[name] = copy.copy_(tensor, non_blocking=True)
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()

    def write_copies(self, manifest: dict[str, Any]) -> None:
        try:
            with self.draft(manifest) as folder:
                self.make_draft(folder)
                self.publish(folder, manifest, store.write_files(folder, self.copies))
        except Exception as error:
            self.failure = error

    def write_shards(self, manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        with self.draft(manifest) as folder:
            call_on_first_rank(lambda: self.make_draft(folder))
            parts = call_on_all_ranks(lambda: {path.name: hash_file(path) for path in save_shards(folder, tensors)})
            files = {name: digest for part in parts for name, digest in part.items()}
            call_on_first_rank(lambda: self.publish(folder, manifest, files))

    @contextmanager
    def draft(self, manifest: dict[str, Any]) -> Iterator[Path]:
        """The folder to write a checkpoint in. Leaves nothing half written, and one sentence where the disk refuses."""
        step = manifest["step"]
        folder = self.folder / f"{retention.TEMPORARY}step-{step:010d}"
        try:
            yield folder
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            advice = ADVICE.get(error.errno or 0, "look after the disk")
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error.strerror}; "
                f"{advice} and resume, the checkpoints before it are untouched."
            ) from error

    def make_draft(self, folder: Path) -> None:
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            flush_to_disk(self.folder.parent)
        if not self.cleared:
            retention.delete_leftovers(self.folder)
            remove_temporaries(self.folder)
            self.cleared = True
        for path in self.damaged:
            retention.set_aside(path)
        self.damaged = set()
        folder.mkdir()

    def publish(self, folder: Path, manifest: dict[str, Any], files: dict[str, str]) -> None:
        """Give a draft, whose tensors are written, its manifest and name; then let go what is surplus."""
        store.write_checkpoint_manifest(folder, manifest, files)
        final = self.folder / f"step-{manifest['step']:010d}"
        if final.exists():
            replaced = final.with_name(f".replaced-{final.name}")
            retention.delete_checkpoint(replaced)
            rename_folder(final, replaced)
        rename_folder(folder, final)
        if manifest["best"]:  # for people and other programs; here the manifests say which is the best
            loss = manifest["state"].get("validation_loss")
            write_json(self.folder / "best.json", {"step": manifest["step"], "validation_loss": loss})
        retention.prune_checkpoints(self.folder, self.run, self.keep, final, self.say)
