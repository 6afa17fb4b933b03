"""A folder at a URL, as snapshots of a folder here.

    objects/SHA256              the content of files, each under its own hash
    snapshots/0000000007.json   name → hash and size of every file of the folder, sent when all of them are there

A snapshot counts once its list is there and everything it names is, of the right size; what is downloaded must match
its hash. The newest two are kept.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from qklab.runs.files import hash_file, move_file
from qklab.study.remote.store import Store

KEPT = 2


@dataclass(frozen=True)
class FolderSnapshot:
    """File name → its hash and size."""

    number: int
    files: dict[str, tuple[str, int]]

    @property
    def name(self) -> str:
        return f"snapshots/{self.number:010d}.json"

    def to_json(self) -> bytes:
        return json.dumps({"format": 1, "number": self.number, "files": self.files}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "FolderSnapshot | None":
        """None for one that was cut off or is of another kind."""
        try:
            body = json.loads(content)
            files = {str(name): (str(digest), int(size)) for name, (digest, size) in body["files"].items()}
            return cls(int(body["number"]), files) if body["format"] == 1 else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


class RemoteFolder:
    """A folder at `path` under the store's URL. One process writes it at a time; any number read."""

    def __init__(self, store: Store, path: str):
        self.store, self.path = store, path
        self.digests: dict[tuple[Path, int, int], str] = {}

    def upload(self, folder: Path) -> None:
        """Make a snapshot of all files in `folder`, unless the newest says the same."""
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        files = {name: self.measure(folder / name) for name in names}
        there = self.store.list_sizes(self.path)
        newest = next(self.read_snapshots(there), None)
        if newest is None or newest.files != files:
            for name, (digest, size) in files.items():
                if there.get(f"objects/{digest}") != size:
                    self.store.write(f"{self.path}/objects/{digest}", folder / name)
            newest = FolderSnapshot(1 + max(map(parse_number, list_snapshots(there)), default=0), files)
            self.store.write(f"{self.path}/{newest.name}", newest.to_json())
        self.prune(newest, there)

    def measure(self, path: Path) -> tuple[str, int]:
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)
        if key not in self.digests:
            self.digests[key] = hash_file(path)
        return self.digests[key], stat.st_size

    def prune(self, newest: FolderSnapshot, there: dict[str, int]) -> None:
        """Delete all but the newest whole snapshots: first what none but them names, then their lists."""
        before = [snapshot for snapshot in self.read_snapshots(there) if snapshot.number < newest.number]
        kept = [newest, *before[: KEPT - 1]]
        needed = {digest for snapshot in kept for digest, _ in snapshot.files.values()}
        for name in list_snapshots(there):
            if name not in {snapshot.name for snapshot in kept} and parse_number(name) < newest.number:
                old = FolderSnapshot.from_json(self.store.read(f"{self.path}/{name}") or b"")
                for digest in {digest for digest, _ in old.files.values()} - needed if old is not None else ():
                    self.store.delete(f"{self.path}/objects/{digest}")
                self.store.delete(f"{self.path}/{name}")

    def read_snapshots(self, there: dict[str, int] | None = None) -> Iterator[FolderSnapshot]:
        """The snapshots that are whole, newest first."""
        there = self.store.list_sizes(self.path) if there is None else there
        for name in reversed(list_snapshots(there)):
            snapshot = FolderSnapshot.from_json(self.store.read(f"{self.path}/{name}") or b"")
            if snapshot is not None and all(there.get(f"objects/{d}") == size for d, size in snapshot.files.values()):
                yield snapshot

    def newest(self) -> FolderSnapshot | None:
        return next(self.read_snapshots(), None)

    def download(
        self,
        folder: Path,
        wanted: Callable[[FolderSnapshot, str], bool] = lambda *_: True,
        make_room: Callable[[], None] = lambda: None,
    ) -> bool:
        """Bring the wanted files of the newest snapshot that is whole and undamaged; whether there is one. Once all are
        here, `make_room` is called and each is moved into `folder`, run.json and then summary.json last."""
        stage = folder.with_name(f".{folder.name}.download")
        try:
            for snapshot in self.read_snapshots():
                shutil.rmtree(stage, ignore_errors=True)
                names = [name for name in snapshot.files if wanted(snapshot, name)]
                if all(self.fetch(stage / name, *snapshot.files[name]) for name in names):
                    make_room()
                    for name in sorted(names, key=lambda name: (name == "summary.json", name == "run.json")):
                        (folder / name).parent.mkdir(parents=True, exist_ok=True)
                        move_file(stage / name, folder / name)
                    return True
            return False
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def fetch(self, to: Path, digest: str, size: int) -> bool:
        """Whether the file came as it was sent."""
        self.store.download(f"{self.path}/objects/{digest}", to)
        return to.exists() and to.stat().st_size == size and hash_file(to) == digest


def list_snapshots(there: Iterable[str]) -> list[str]:
    """The lists of snapshots, oldest first."""
    return sorted(name for name in there if re.fullmatch(r"snapshots/\d{10}\.json", name))


def parse_number(name: str) -> int:
    return int(Path(name).stem)


def describe_progress(files: Collection[str]) -> tuple[bool, str]:
    """Of a run with these files: whether it has ended, and its newest checkpoint."""
    names = [name.split("/")[1] for name in files if name.startswith("checkpoints/step-")]
    return "summary.json" in files, max(names, default="")
