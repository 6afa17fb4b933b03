"""A study at a URL and its folder on this machine.

study/               snapshots of study.json and analyses.json
runs/CORPUS/ARM/…/   snapshots of each run directory
report.html
"""

import hashlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qklab.runs.environment import find_cache_root
from qklab.runs.files import copy_file, hash_file, link_file
from qklab.study.records import ANALYSES, STUDY, find_newest_checkpoint, is_in_use
from qklab.study.remote.snapshot import FolderSnapshot, RemoteFolder, describe_progress
from qklab.study.remote.store import Store, StoreError
from qklab.study.spec import StudyError

INTERVAL = 15.0  # seconds after which records that changed are sent though no checkpoint is new
POLL = 0.5  # seconds between looks for a new checkpoint
PATIENCE, PAUSE = 120.0, 2.0  # seconds that the last snapshot of a run is tried for, and between tries
STAGE = ".upload"
GROWING = ("metrics.jsonl", "log.txt")  # appended to while they are sent


def is_url(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def find_cache(url: str) -> Path:
    """Where the study at `url` lives on this machine."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[-40:]
    return (
        find_cache_root() / "studies" / f"{name}-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:12]}"
    ).absolute()


def print_flushed(sentence: str) -> None:
    print(sentence, flush=True)


class RemoteStudy:
    """The study at `url`; `local` is its folder on this machine, by default one in the cache."""

    def __init__(self, url: str, local: Path | None = None, say: Callable[[str], None] = print_flushed):
        self.url, self.store, self.local, self.say = url, Store(url), local or find_cache(url), say

    # What is not a run's

    def fetch_study(self) -> None:
        """Bring study.json and analyses.json, where the URL has them."""
        if not RemoteFolder(self.store, "study").download(self.local) and any(self.local.glob("runs/*/*/*/run.json")):
            raise StudyError(
                f"{self.url} holds no study, but {self.local} has runs of one that was there; delete that folder to "
                "begin anew."
            )

    def send_study(self) -> None:
        stage = self.local / STAGE
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        for name in (STUDY, ANALYSES):
            if (self.local / name).exists():
                copy_file(self.local / name, stage / name)
        RemoteFolder(self.store, "study").upload(stage)
        shutil.rmtree(stage)

    def send_report(self) -> None:
        self.store.write("report.html", self.local / "report.html")

    # Runs

    def folder_of(self, run: Path) -> RemoteFolder:
        return RemoteFolder(self.store, run.relative_to(self.local).as_posix())

    def measure_progress(self, run: Path) -> tuple[bool, str]:
        """Whether the run at the URL has ended, and its newest checkpoint there."""
        newest = self.folder_of(run).newest()
        return describe_progress(newest.files if newest is not None else ())

    def fetch_records(self, runs: Iterable[Path] | None = None, *, checkpoints: bool = False) -> None:
        """Bring what a report needs of runs (of all, if not told which), unless as much is here; if asked for also the
        newest checkpoint of those that ended."""
        if runs is None:
            names = (name.split("/") for name in self.store.list_sizes("runs") if "/snapshots/" in name)
            runs = {self.local.joinpath("runs", *parts[:-2]) for parts in names}
        for run in sorted(runs):
            remote = self.folder_of(run)
            newest = remote.newest()
            if newest is None or is_as_far(run, newest, checkpoints=checkpoints) or is_in_use(run):
                continue
            remote.download(run, is_wanted_file if checkpoints else is_record, lambda run=run: clear_run(run))

    @contextmanager
    def keep_run(self, run: Path) -> Iterator[None]:
        """Bring the run, unless what is here is as far; send snapshots while it trains; return when all is sent."""
        remote = self.folder_of(run)
        newest = remote.newest()
        if newest is not None and not is_as_far(run, newest, checkpoints=True):
            remote.download(run, make_room=lambda: clear_run(run))
        done = threading.Event()
        thread = threading.Thread(target=self.send_while_training, args=(remote, run, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.send_patiently(remote, run)

    def send_while_training(self, remote: RemoteFolder, run: Path, done: threading.Event) -> None:
        sent, at, quiet = "", time.monotonic(), False
        while not done.wait(POLL):
            newest = find_newest_checkpoint(run)
            if newest == sent and time.monotonic() - at < INTERVAL:
                continue
            try:
                self.send_run(remote, run)
                quiet = False
            except (StudyError, OSError) as error:  # training goes on, and at its end all is sent or refused
                if not quiet:
                    self.say(f"the run is not sent for now: {error}")
                quiet = True
            sent, at = newest, time.monotonic()

    def send_patiently(self, remote: RemoteFolder, run: Path) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self.send_run(remote, run)
            except StoreError as error:
                if time.monotonic() + PAUSE > until:
                    raise
                self.say(f"{error} It is tried again.")
                time.sleep(PAUSE)

    def send_run(self, remote: RemoteFolder, run: Path) -> None:
        """A snapshot of the run as it is. Checkpoints first: records may be ahead of them and never behind."""
        if not (run / "run.json").exists():
            return
        stage = run / STAGE
        shutil.rmtree(stage, ignore_errors=True)
        for checkpoint in sorted(run.glob("checkpoints/step-*")):
            try:
                for file in checkpoint.iterdir():
                    stage_file(file, stage / file.relative_to(run))
            except FileNotFoundError:  # it gave way to a newer one
                shutil.rmtree(stage / checkpoint.relative_to(run), ignore_errors=True)
        unsent = {"lock", "checkpoints", STAGE} | set(() if (run / "summary.json").exists() else ("summary.json",))
        # not into checkpoints, which give way while one looks
        sent = [top for top in sorted(run.iterdir()) if top.name not in unsent]
        for path in (inner for top in sent for inner in (top, *sorted(top.rglob("*")))):
            name = path.relative_to(run)  # a summary that comes now is sent with the last records, which come before it
            if path.is_file() and not name.name.startswith("."):
                stage_file(path, stage / name, copy=name.name in GROWING)
        remote.upload(stage)
        shutil.rmtree(stage)


def stage_file(source: Path, target: Path, *, copy: bool = False) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    (copy_file if copy else link_file)(source, target)


def is_as_far(run: Path, snapshot: FolderSnapshot, *, checkpoints: bool) -> bool:
    """Whether the folder here holds the run of the snapshot, and is as far."""
    record = run / "run.json"
    if not record.exists() or hash_file(record) != snapshot.files.get("run.json", ("", 0))[0]:
        return False
    here = ((run / "summary.json").exists(), find_newest_checkpoint(run))
    there = describe_progress(snapshot.files)
    return here >= there if checkpoints else here[0] or (not there[0] and here >= there)


def is_record(snapshot: FolderSnapshot, name: str) -> bool:
    return not name.startswith("checkpoints/")


def is_wanted_file(snapshot: FolderSnapshot, name: str) -> bool:
    """Records, and of a run that ended the newest checkpoint."""
    ended, newest = describe_progress(snapshot.files)
    return is_record(snapshot, name) or (ended and name.startswith(f"checkpoints/{newest}/"))


def clear_run(run: Path) -> None:
    for path in run.iterdir() if run.exists() else ():
        if path.name not in ("lock", "log.txt"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
