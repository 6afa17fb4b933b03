"""The checkpoints in a run's folder: which are there, which one is used, which stay.

A checkpoint is written under another name and counts once it is renamed, so a process may die at any point. Searching
changes nothing.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from qklab.runs.files import rename_folder
from qklab.train.checkpoint import store
from qklab.train.checkpoint.store import Checkpoint, CheckpointError, step_of

TEMPORARY = ".tmp-"  # how the names of folders begin that do not count yet, or no longer


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, newest first; of one step first the current one, then the one it was replacing."""
    try:
        paths = [path for path in folder.iterdir() if step_of(path) >= 0]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be read: {error.strerror}.") from error
    return sorted(paths, key=lambda path: (step_of(path), path.name), reverse=True)


def find_checkpoint(folder: Path, run: str | None, best: bool) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest checkpoint, or the newest that was the best, that is whole; and what is wrong with those that are not.

    Of those older than the one found only the manifests are read.
    """
    found, wrong, vanished = None, {}, False
    for path in list_checkpoints(folder):
        try:
            manifest = store.read_manifest(path, run)
            if found is None and (manifest["best"] or not best):
                found = store.verify_checkpoint(path, run)
        except CheckpointError as error:
            if path.exists():
                wrong[path] = str(error)
            else:
                vanished = True
    if found is None and vanished:  # another process saves and prunes while we read
        return find_checkpoint(folder, run, best)
    if found is None and wrong and (not best or (folder / "best.json").exists()):
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in wrong.items())
        raise CheckpointError(
            f"no {'best ' * best}checkpoint in {folder} can be trusted ({reasons}); "
            "restore one from a copy or start again in a new folder."
        )
    return found, wrong


def describe_damage(path: Path, reason: str, found: Checkpoint | None) -> str:
    needed = found is not None and step_of(path) >= found.step
    instead = f"the one before it, {found.path.name}, is used" if found and needed else "it is not needed"
    return f"checkpoint {path} cannot be trusted: {reason}; {instead}."


def choose_surplus(folder: Path, run: str | None, keep: int, latest: Path) -> list[Path]:
    """What is neither `latest` nor among the last `keep` nor the best. What cannot be read is neither counted nor
    surplus: the next search will speak of it."""
    whole, surplus = {}, []
    for path in list_checkpoints(folder):
        if any(step_of(path) == step_of(other) for other in whole):
            surplus.append(path)
            continue
        try:
            whole[path] = store.read_manifest(path, run)["best"]
        except CheckpointError:
            continue
    bests = [path for path, best in whole.items() if best]
    needed = {latest, *list(whole)[:keep], *bests[:1]}
    return [*surplus, *(whole.keys() - needed)]


def prune_checkpoints(folder: Path, run: str | None, keep: int, latest: Path, say: Callable[[str], None]) -> None:
    for path in choose_surplus(folder, run, keep, latest):
        try:
            delete_checkpoint(path)
        except OSError as error:
            say(f"the old checkpoint {path} could not be deleted: {error.strerror}.")


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint to `damaged-step-…`, where it is neither counted nor overwritten."""
    if path.exists():
        rename_folder(path, find_unused_name(path.with_name(f"damaged-{path.name.removeprefix('.')}")))


def delete_checkpoint(path: Path) -> None:
    """Renamed first, so that dying halfway leaves nothing that looks like a damaged checkpoint."""
    if path.exists():
        renamed = find_unused_name(path.with_name(f"{TEMPORARY}deleted-{path.name.removeprefix('.')}"))
        rename_folder(path, renamed)
        shutil.rmtree(renamed)


def delete_leftovers(folder: Path) -> None:
    """Delete what processes that were killed while they saved or deleted left behind."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def find_unused_name(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, … that does not exist."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
