"""The checkpoints of one run in their folder: which are there, how one comes in and how one goes.

A checkpoint is written under another name and counts once it is renamed, so a process may die at any point. Reading
changes nothing. The first writing of a process clears what killed ones left behind and puts checkpoints that failed
verification aside as `damaged-step-…`, where they are neither counted nor overwritten.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qklab.train import store, tensorfile
from qklab.train.store import CheckpointError, Found


@dataclass(frozen=True)
class Draft:
    """A checkpoint being written: the folder it is written in, and what its manifest will say."""

    path: Path
    step: int
    best: bool
    kinds: dict[str, str]
    state: bytes
    loss: float | None


class Shelf:
    """Keeps the last `keep` checkpoints and the best one in `folder`."""

    def __init__(self, folder: Path, keep: int, run: str | None, say: Callable[[str], None]):
        self.folder = folder
        self.keep = keep
        self.run = run
        self.say = say
        self.distrusted: set[Path] = set()
        self.tidy = False

    def folders(self) -> list[Path]:
        """All checkpoints, newest first; of one step first the current one, then the one it was replacing."""
        try:
            paths = [path for path in self.folder.iterdir() if store.step_of(path) >= 0]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"the checkpoints in {self.folder} cannot be read: {error.strerror}.") from error
        return sorted(paths, key=lambda path: (store.step_of(path), path.name), reverse=True)

    def search(self, best: bool) -> Found | None:
        """The newest checkpoint, or the newest that was the best, that is whole; says a sentence for each that is not.

        Of those older than the one found only the manifests are read.
        """
        found, wrong, vanished = None, {}, False
        for path in self.folders():
            try:
                manifest = store.read_manifest(path, self.run)
                if found is None and (manifest["best"] or not best):
                    found = store.verify(path, self.run)
            except CheckpointError as error:
                if path.exists():
                    wrong[path] = str(error)
                else:
                    vanished = True
        if found is None and vanished:  # another process saves and prunes while we read
            return self.search(best)
        self.distrusted |= wrong.keys()
        if found is None and wrong and (not best or (self.folder / "best.json").exists()):
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in wrong.items())
            raise CheckpointError(
                f"no {'best ' * best}checkpoint in {self.folder} can be trusted ({reasons}); "
                "restore one from a copy or start again in a new folder."
            )
        for path, reason in wrong.items():
            needed = found is not None and store.step_of(path) >= found.step
            instead = f"the one before it, {found.path.name}, is used" if found and needed else "it is not needed"
            self.say(f"checkpoint {path} cannot be trusted: {reason}; {instead}.")
        return found

    def open(self, draft: Draft) -> None:
        """Make the folder of `draft`, and room for it."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            tensorfile.flush_names(self.folder.parent)
        if not self.tidy:
            for leftover in self.folder.glob(".tmp-*"):
                remove(leftover)
            self.tidy = True
        for path in self.distrusted:
            if path.exists():
                path.rename(unused(path.with_name(f"damaged-{path.name.removeprefix('.')}")))
        self.distrusted = set()
        draft.path.mkdir()

    def close(self, draft: Draft, files: dict[str, dict[str, Any]]) -> None:
        """Give `draft`, whose tensor files are written, its state, manifest and name; then let go what is surplus."""
        for name, entry in files.items():
            if not (draft.path / name).exists():
                raise CheckpointError(
                    f"{name} was written to {self.folder} by another rank but rank 0 does not see it there; "
                    "checkpoints must lie on a file system that all machines share."
                )
            entry["tensors"] = tensorfile.headers(draft.path / name)
        files["state.json"] = tensorfile.write(draft.path / "state.json", [draft.state])
        manifest = store.manifest(self.run, draft.step, draft.best, draft.kinds, files)
        tensorfile.write(draft.path / "manifest.json", [manifest])
        tensorfile.flush_names(draft.path)
        final = self.folder / f"step-{draft.step:010d}"
        if final.exists():
            replaced = final.with_name(f".replaced-{final.name}")
            self.delete(replaced)
            final.rename(replaced)
        draft.path.rename(final)
        tensorfile.flush_names(self.folder)
        if draft.best:
            self.point_to_best(draft)
        self.prune(final)

    def point_to_best(self, draft: Draft) -> None:
        """For people and other programs; here the manifests say which is the best."""
        aside = self.folder / ".tmp-best.json"
        aside.unlink(missing_ok=True)
        tensorfile.write(aside, [json.dumps({"step": draft.step, "validation_loss": draft.loss}).encode() + b"\n"])
        aside.replace(self.folder / "best.json")
        tensorfile.flush_names(self.folder)

    def prune(self, latest: Path) -> None:
        """Delete what is neither among the last `keep` nor the best. What cannot be read is neither counted nor
        deleted: the next search will speak of it."""
        whole, surplus = {}, []
        for path in self.folders():
            if any(store.step_of(path) == store.step_of(other) for other in whole):
                surplus.append(path)
                continue
            try:
                whole[path] = store.read_manifest(path, self.run)["best"]
            except CheckpointError:
                continue
        bests = [path for path, best in whole.items() if best]
        needed = {latest, *list(whole)[: self.keep], *bests[:1]}
        for path in [*surplus, *(whole.keys() - needed)]:
            try:
                self.delete(path)
            except OSError as error:
                self.say(f"the old checkpoint {path} could not be deleted: {error.strerror}.")

    def delete(self, path: Path) -> None:
        """Renamed first, so that dying halfway leaves nothing that looks like a damaged checkpoint."""
        if path.exists():
            gone = unused(self.folder / f".tmp-deleted-{path.name.removeprefix('.')}")
            path.rename(gone)
            remove(gone)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, … that does not exist."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
