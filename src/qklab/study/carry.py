"""Carry a run between its folder on this machine and its folder at a URL.

What holds on any store, also without renames, locks or atomic writes. A file that can be told from a torn one by
itself (JSON) is ignored if torn; a checkpoint counts once its manifest is there, which is sent last, and is verified by
hash when brought; whatever a checkpoint needs is there before it and is never overwritten; a checkpoint is deleted
after a newer one is whole, and summary.json is sent when all else is there. So dying at any moment costs the time since
the last checkpoint, and not even that where the same machine goes on.

Exactly one writer per run holds as far as a store without locks allows. On one machine a lock sees to it. Between
machines whoever begins a run writes its name into holder.json, and whoever finds another's there sends nothing more and
stops. Not guaranteed is that a former holder notices at once: what it is sending at that moment still arrives. It can
damage a checkpoint of the same step, which is then refused by its hash and an older one used, or a record that the new
holder sends again. A machine without connection trains on, for nothing, until it has one.
"""

import json
import os
import platform
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qklab.runs.files import link_file, lock_file, rename_folder, write_bytes
from qklab.study.remote import Store
from qklab.study.spec import StudyError
from qklab.train.checkpoint import store as checkpoint

INTERVAL = 15.0  # seconds after which records that changed are carried though no checkpoint is
LOOK = 0.5  # seconds between looks for a new checkpoint
HOLDER, STAGE, LOCKS = "holder.json", ".carrying", ("lock", "carry.lock")


class TakenError(StudyError):
    """A run that someone else carries by now."""


class Carrier:
    """One run: between its folder here and its folder at the URL."""

    def __init__(self, store: Store, folder: Path, place: str):
        self.store, self.folder, self.at = store, folder, f"runs/{place}"
        self.sizes: dict[str, int] = {}  # of the records at the URL
        self.whole: dict[str, dict[str, Any]] = {}  # checkpoints at the URL by name, with their manifests
        self.torn: set[str] = set()  # what there looks like a checkpoint and is none
        self.sent: tuple[int, int] | None = None
        self.last = -INTERVAL

    @contextmanager
    def alone(self, patience: float = 0.0) -> Iterator[bool]:
        """Whether no other process of this machine carries the run, or ends with it in time; if so, none begins."""
        self.folder.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + patience
        while (lock := lock_file(self.folder / "carry.lock")) is None and time.monotonic() < until:
            time.sleep(LOOK)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                os.close(lock)

    def mine(self) -> bytes | None:
        path = self.folder / HOLDER
        return path.read_bytes() if path.exists() else None

    def at_home(self) -> bool:
        """Whether this machine was the last to hold the run: its folder is then newer than the URL."""
        mine = self.mine()
        return mine is not None and mine == self.store.read(f"{self.at}/{HOLDER}")

    def begin(self) -> None:
        """Become the holder of the run, with all that is known of it here."""
        if self.at_home():
            self.survey()
            return
        self.clear()
        own = json.dumps({"holder": uuid.uuid4().hex, "node": platform.node(), "pid": os.getpid()}).encode()
        self.store.write(f"{self.at}/{HOLDER}", own)  # first, so that who held it stops
        self.survey()
        self.bring()
        os.sync()
        write_bytes(self.folder / HOLDER, own)

    def clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in LOCKS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def survey(self, *, checkpoints: bool = True) -> None:
        """See what the URL has of the run."""
        found = self.store.sizes(self.at)
        self.sizes = {name: size for name, size in found.items() if not name.startswith("checkpoints/")}
        self.whole, self.torn = {}, set()
        names = {path.split("/")[1] for path in found if path.startswith("checkpoints/step-")}
        for name in names if checkpoints else ():
            folder = f"checkpoints/{name}"
            body = checkpoint.parse_manifest(self.store.read(f"{self.at}/{folder}/manifest.json") or b"")
            files = body["files"] if body is not None else {}
            if body is not None and all(found.get(f"{folder}/{file}") == files[file]["size"] for file in files):
                self.whole[name] = body
            else:
                self.torn.add(name)

    def record(self, name: str) -> bytes | None:
        """A JSON file at the URL; None if it is missing or torn."""
        content = self.store.read(f"{self.at}/{name}") if name in self.sizes else None
        if content is None or not is_json(content):
            self.sizes.pop(name, None)
            return None
        return content

    def bring(self) -> None:
        """Bring all that training continues from; what was recorded after the checkpoint is made and sent again."""
        run, summary = self.record("run.json"), self.record("summary.json")
        if run is None:
            return
        newest = self.bring_checkpoints(json.loads(run)["id"])
        if summary is None:
            last = f"probes/{newest or ''}.json"
            late = [name for name in self.sizes if name.startswith("probes/") and name > last]
            self.sizes = {name: size for name, size in self.sizes.items() if name not in late}
        here = (self.folder / "metrics.jsonl").exists()  # those of the checkpoint
        self.bring_records(run, summary, metrics=summary is not None or not here)

    def bring_records(self, run: bytes, summary: bytes | None, *, metrics: bool = True) -> None:
        """run.json, which makes a folder a run, comes after what belongs to it, and summary.json last."""
        for name in list(self.sizes):
            wanted = name == "tokenizer.json" or name.startswith("probes/")
            new = summary is not None or not (self.folder / name).exists()
            if wanted and new and (content := self.record(name)):
                write_file(self.folder / name, content)
        if metrics and (content := self.store.read(f"{self.at}/metrics.jsonl")):
            write_file(self.folder / "metrics.jsonl", content)
        write_file(self.folder / "run.json", run)
        if summary is not None:
            write_file(self.folder / "summary.json", summary)

    def bring_results(self, *, checkpoints: bool) -> None:
        """Bring what a report needs, unless the run is here anyway; of a run that ended also the newest checkpoint if
        asked for."""
        path = self.folder / "run.json"
        known = path.read_bytes() if self.ended() and self.mine() is None else None
        if known is not None and not checkpoints and known == self.store.read(f"{self.at}/run.json"):
            return
        self.survey(checkpoints=checkpoints)
        run, summary = self.record("run.json"), self.record("summary.json")
        if self.mine() is not None or not path.exists() or path.read_bytes() != run:
            self.clear()  # another run, one that is no longer there, or one that went on elsewhere
        if run is None:
            return
        if not self.ended():
            self.bring_records(run, summary)
        if checkpoints and summary is not None:
            self.bring_checkpoints(json.loads(run)["id"], training=False)

    def bring_checkpoints(self, run: str, *, training: bool = True) -> str | None:
        """Bring the newest checkpoint that passes verification, and for training the best and the metrics up to the
        newest; the name of the newest."""
        newest, best = None, not training
        for name in sorted(self.whole, reverse=True):
            if newest is None or (not best and self.whole[name]["best"]):
                try:
                    self.bring_checkpoint(name, run)
                except checkpoint.CheckpointError as error:
                    self.store.say(f"checkpoint {name} in {self.store.url}/{self.at} cannot be trusted: {error}.")
                    self.torn.add(name)
                    del self.whole[name]
                    continue
                newest, best = newest or name, best or self.whole[name]["best"]
        metrics = self.store.read(f"{self.at}/checkpoints/{newest}/metrics.jsonl") if newest and training else None
        if metrics is not None:
            write_file(self.folder / "metrics.jsonl", metrics)
        return newest

    def bring_checkpoint(self, name: str, run: str) -> None:
        final, manifest = self.folder / "checkpoints" / name, checkpoint.format_manifest(self.whole[name])
        if (final / "manifest.json").exists() and (final / "manifest.json").read_bytes() == manifest:
            return
        stage = self.fresh_stage() / name
        for file, entry in self.whole[name]["files"].items():
            self.store.bring(f"{self.at}/checkpoints/{name}/{file}", stage / file, entry["size"])
        write_bytes(stage / "manifest.json", manifest)
        checkpoint.verify_checkpoint(stage, run)
        final.parent.mkdir(exist_ok=True)
        shutil.rmtree(final, ignore_errors=True)
        rename_folder(stage, final)

    def fresh_stage(self) -> Path:
        stage = self.folder / STAGE
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        return stage

    def ended(self) -> bool:
        return (self.folder / "summary.json").exists()

    def here(self) -> set[str]:
        """The names of the checkpoints in the folder here, each of them complete."""
        return {path.name for path in self.folder.glob("checkpoints/step-*")}

    def left(self) -> bool:
        """Whether the run ended here without the URL knowing of it."""
        self.survey(checkpoints=False)
        path = self.folder / "summary.json"
        return path.exists() and self.sizes.get(path.name) != path.stat().st_size

    def keep_carrying(self, done: threading.Event) -> None:
        """What a thread does while the run trains."""
        while not done.wait(LOOK):
            try:
                self.carry()
            except TakenError as error:
                self.store.say(str(error))
                stop_this_process()
                return
            except (ValueError, OSError) as error:  # training goes on, and at its end all is carried or refused
                self.store.say(f"the run is not carried for now: {error}")

    def carry(self, *, everything: bool = False) -> None:
        """Send what is new, if there is a checkpoint or it is time."""
        missing = sorted(self.here() - self.whole.keys(), reverse=True)
        due = everything or missing or time.monotonic() - self.last >= INTERVAL
        if not due or not (self.folder / "run.json").exists():
            return
        ended = self.ended()  # before the metrics are read, whose last lines come before it
        if self.mine() != self.store.read(f"{self.at}/{HOLDER}"):
            raise TakenError(f"{self.store.url}/{self.at} is carried by another process now, so this one stops.")
        probes = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.glob("probes/step-*.json"))
        for name in ("tokenizer.json", "run.json", *probes):
            self.send_record(name)
        for name in missing:
            self.send_checkpoint(name)
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists() and (state := (metrics.stat().st_size, metrics.stat().st_mtime_ns)) != self.sent:
            self.store.write(f"{self.at}/metrics.jsonl", metrics.read_bytes())
            self.sent = state
        self.prune()
        if ended:
            self.send_record("summary.json")
        self.last = time.monotonic()

    def send_record(self, name: str) -> None:
        """Send a file that never changes once it is there."""
        path = self.folder / name
        if path.exists() and self.sizes.get(name) != path.stat().st_size:
            self.store.write(f"{self.at}/{name}", path.read_bytes())
            self.sizes[name] = path.stat().st_size

    def send_checkpoint(self, name: str) -> None:
        stage, at = self.fresh_stage(), f"{self.at}/checkpoints/{name}"
        try:
            for file in (self.folder / "checkpoints" / name).iterdir():
                link_file(file, stage / file.name)  # sending may take longer than the checkpoint is kept
            manifest = (stage / "manifest.json").read_bytes()
        except FileNotFoundError:
            return
        body = checkpoint.parse_manifest(manifest)
        if body is None:
            return
        if name in self.torn:
            self.store.delete(at, "manifest.json")  # which must not vouch for a mixture
        self.torn.add(name)
        for file in body["files"]:
            self.store.write(f"{at}/{file}", stage / file)
        self.store.write(f"{at}/metrics.jsonl", (self.folder / "metrics.jsonl").read_bytes())
        self.store.write(f"{at}/manifest.json", manifest)
        self.torn.discard(name)
        self.whole[name] = body
        shutil.rmtree(stage)

    def prune(self) -> None:
        """Delete there what is gone here, if something newer is whole there, and not the best before another is."""
        here = self.here()
        newest = max(self.whole.keys() & here, default="")
        best = max((name for name, body in self.whole.items() if body["best"]), default="")
        for name in sorted((self.whole.keys() | self.torn) - here - {best}):
            if name < newest:
                self.store.delete(f"{self.at}/checkpoints/{name}", "manifest.json")
                self.whole.pop(name, None)
                self.torn.discard(name)


def is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def write_file(path: Path, content: bytes) -> None:
    """With the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
