"""A study at a URL: whatever dies, fails or tears, a run goes on elsewhere and is what it would have been."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.spec import AbstractFileSystem

from qklab.data import DataSpec, prepare_corpus
from qklab.runs import MetricsFile, RunDirectory
from qklab.runs.files import write_json
from qklab.study import carry, mirror, remote
from qklab.study.carry import Carrier, TakenError
from qklab.study.mirror import Mirror, cache_of, carried, is_url
from qklab.study.spec import StudyError
from qklab.train.checkpoint import Checkpoints, Snapshot, store
from qklab.train.launch import train
from qklab.train.settings import resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec

URL = "frail://bucket/a1"
PLACE = Path("text", "k=v", "lr0.001-seed0")
AT = f"runs/{PLACE.as_posix()}"
LAST = 6  # steps of a run that is only played


class Dead(BaseException):
    """The machine is gone."""


class Frail(AbstractFileSystem):
    """Files of a folder as a store without renames, locks or folders, which remembers what it listed.

    `act` sees every operation before it happens, and for a write may answer how much of it arrives.
    """

    protocol = "frail"
    base: Path
    act: Callable[[str, str], int | None]
    done: list[tuple[str, str]]
    listed: dict[str, dict[str, Any]]
    tears: bool  # whether a write that is broken off leaves half of the file

    @classmethod
    def renew(cls, base: Path) -> None:
        cls.base, cls.act, cls.done, cls.listed = base, staticmethod(lambda what, path: None), [], {}
        cls.tears = True

    def on(self, what: str, path: str) -> int | None:
        answer = Frail.act(what, path)
        Frail.done.append((what, path))
        return answer

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        part: int | None = len(value) // 2
        target = self.base / path
        try:
            part = self.on("write", path)
        finally:
            if path.startswith("bucket/") and (part is None or Frail.tears):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(value if part is None else value[:part])

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        part = self.on("read", path)
        content = (self.base / path).read_bytes()
        return content if part is None else content[:part]

    def get_file(self, rpath: str, lpath: str, *args: Any, **kwargs: Any) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.on("list", path)
        if path not in Frail.listed:
            files = [file for file in (self.base / path).rglob("*") if file.is_file()]
            Frail.listed[path] = {
                str(file.relative_to(self.base)): {"size": file.stat().st_size} for file in sorted(files)
            }
        return Frail.listed[path]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if path not in Frail.listed:
            file = self.base / path
            Frail.listed[path] = {
                "name": path,
                "size": file.stat().st_size,
                "type": "directory" if file.is_dir() else "file",
            }
        return Frail.listed[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        Frail.listed = {}

    def rm_file(self, path: str) -> None:
        self.on("delete", path)
        (self.base / path).unlink()

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        target = self.base / path
        if not target.exists():
            raise FileNotFoundError(path)
        for file in sorted(target.rglob("*")) if recursive else [target]:
            if file.is_file():
                self.rm_file(str(file.relative_to(self.base)))
        shutil.rmtree(target, ignore_errors=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.on("makedirs", path)

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _frail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("frail", Frail, clobber=True)
    Frail.renew(tmp_path / "store")
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    monkeypatch.setattr(remote, "PATIENCE", 0.2)
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    monkeypatch.setattr(carry, "LOOK", 0.01)
    monkeypatch.setattr(os, "sync", lambda: None)  # no machine loses its power here
    monkeypatch.setattr(os, "fsync", lambda file: None)


def at_store(name: str = "") -> Path:
    return Frail.base / "bucket" / "a1" / name


class Machine:
    """Plays a run with a folder of its own: a checkpoint each step, kept two and the best, carried at once."""

    def __init__(self, folder: Path, url: str = URL):
        self.said: list[str] = []
        self.mirror = Mirror(url, folder, self.said.append)
        self.folder = folder / "runs" / PLACE
        self.carried = 0
        self.began_at = 0

    def begin(self) -> Carrier:
        self.carrier = self.mirror.carrier(PLACE)
        self.carrier.folder.mkdir(parents=True, exist_ok=True)
        self.carrier.begin()
        return self.carrier

    def checkpoints(self) -> Checkpoints:
        run = RunDirectory(self.folder).read()["id"]
        return Checkpoints(self.folder / "checkpoints", run=run, say=self.said.append, background=False)

    def live(self, last: int = LAST, *, begin: bool = True) -> None:
        """From where the run is to its end, or to step `last`."""
        if begin:
            self.begin()
        directory, old = RunDirectory(self.folder), RunDirectory(self.folder).exists()
        if directory.summary() is None if old else True:
            self.play(directory, old, last)
        self.carrier.carry(everything=True)

    def play(self, directory: RunDirectory, old: bool, last: int) -> None:
        if not old:
            (self.folder / "tokenizer.json").write_text('{"kind": "bytes"}')
            directory.write("run.json", {"id": os.urandom(16).hex(), "spec": {}, "data": {}, "environment": {}})
        found = self.checkpoints().find_newest()
        self.began_at = step = found.step if found else 0
        weights = found.read_tensors("model.")["model.w"] if found else torch.zeros(5)
        metrics = MetricsFile(directory.metrics_path)
        if old:
            metrics.append({"kind": "resume", "step": step})
        shelf = self.checkpoints()
        while step < last:
            step += 1
            weights = weights * 0.7 + step
            metrics.append({"kind": "train", "step": step, "loss": float(weights.sum())})
            directory.probes_path.mkdir(exist_ok=True)
            write_json(directory.probes_path / f"step-{step:010d}.json", {"step": step, "sum": float(weights.sum())})
            shelf.save(Snapshot(step, {"model.w": weights}, {"step": step}), best=step in (1, 2))
            self.carrier.carry()
            self.carried = step
        if step == LAST:
            metrics.append({"kind": "final", "step": step})  # after its checkpoint
        metrics.close()
        if step == LAST:
            directory.write("summary.json", {"status": "finished", "evaluation": {}, "loss": float(weights.sum())})


def left_behind(folder: Path) -> dict[str, Any]:
    """What a run left in its folder, but for names."""
    directory = RunDirectory(folder)
    checkpoints = {}
    for path in sorted(folder.glob("checkpoints/step-*")):
        assert store.verify_checkpoint(path, directory.read()["id"]).path == path
        checkpoints[path.name] = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
    return {
        "metrics": [{k: v for k, v in record.items() if k != "time"} for record in directory.metrics()],
        "probes": {path.name: path.read_bytes() for path in sorted(directory.probes_path.glob("*"))},
        "tokenizer": (folder / "tokenizer.json").read_bytes(),
        "summary": {k: v for k, v in (directory.summary() or {}).items() if k in ("status", "evaluation", "loss")},
        "checkpoints": checkpoints,
    }


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, Any]:
    """What a run that nothing happens to leaves behind, here and there."""
    machine = Machine(tmp_path / "undisturbed", f"file://{tmp_path}/quiet")
    machine.live()
    found = left_behind(machine.folder)
    assert [record["step"] for record in found["metrics"]] == [*range(1, LAST + 1), LAST]
    assert list(found["checkpoints"]) == [f"step-{step:010d}" for step in (2, 5, 6)]
    assert left_behind(tmp_path / "quiet" / AT) == found
    return found


def whole_at_store() -> list[int]:
    """Steps of the checkpoints at the store that pass verification, judged without the code under test."""
    found = []
    for path in at_store(AT).glob("checkpoints/step-*"):
        try:
            found.append(store.verify_checkpoint(path, None).step)
        except store.CheckpointError:
            continue
    return sorted(found)


def dies_at(operation: int) -> Callable[[str, str], None]:
    def act(what: str, path: str) -> None:
        if len(Frail.done) >= operation:
            raise Dead

    return act


def operations(tmp_path: Path, machine: Callable[[Path], object]) -> int:
    """How many operations a machine makes that nothing happens to."""
    machine(tmp_path / "counted")
    count = len(Frail.done)
    wipe()
    return count


def wipe() -> None:
    base = Frail.base
    shutil.rmtree(base)
    (base / "bucket").mkdir(parents=True)
    Frail.renew(base)


def revive() -> None:
    Frail.renew(Frail.base)


def test_what_is_a_url_and_where_it_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert all(map(is_url, ("s3://bucket/a1", "gs://b", "file:///tmp/x", "frail://x")))
    assert not any(map(is_url, ("runs/a1", "/tmp/a1", "a1", "C:/x", "./s3://x", "://x")))
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path))
    one, other = cache_of("s3://bucket/a1"), cache_of("s3://bucket/a/1")
    assert one != other
    assert one == cache_of("s3://bucket/a1/")
    assert one.parent == other.parent == tmp_path / "studies"
    assert Mirror("frail://bucket/a1/").local == cache_of(URL)
    monkeypatch.delenv("QKLAB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_of(URL).parent == tmp_path / "home" / ".cache" / "qklab" / "studies"


def check_everywhere(machine: Machine, expected: dict[str, Any]) -> None:
    """The run is what it should be where it ran, at the store, and where only its results are fetched."""
    fetched = Machine(machine.mirror.local.with_suffix(".fetched"))
    fetched.mirror.fetch_results(checkpoints=True)
    last = f"step-{LAST:010d}"
    for folder in (machine.folder, at_store(AT), fetched.folder):
        found = left_behind(folder)
        assert found["checkpoints"][last] == expected["checkpoints"][last]
        assert set(found["checkpoints"]) <= set(expected["checkpoints"])
        assert folder == fetched.folder or "step-0000000002" in found["checkpoints"]  # the best
        assert found | {"checkpoints": {}} == expected | {"checkpoints": {}}
    assert list(left_behind(fetched.folder)["checkpoints"]) == [last]


def test_the_order_in_which_a_run_is_carried(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.live()
    done = [(what, path.removeprefix(f"bucket/a1/{AT}/")) for what, path in Frail.done]
    written = [name for what, name in done if what == "write"]
    assert written[0] == "holder.json"
    assert written[-1] == "summary.json"
    assert [name for name in written if written.count(name) > 1 and name != "metrics.jsonl"] == []  # each once
    for step in range(1, LAST + 1):
        at = f"checkpoints/step-{step:010d}"
        own = [name for name in written if name.startswith(at)]
        assert own[-1] == f"{at}/manifest.json"
        assert set(own[:-1]) == {f"{at}/{name}" for name in ("model.safetensors", "metrics.jsonl")}
        assert written.index(f"probes/step-{step:010d}.json") < written.index(own[-1])
        deleted = [i for i, (what, name) in enumerate(done) if what == "delete" and name.startswith(at)]
        if step not in (2, 5, 6):
            assert done[deleted[0]][1] == f"{at}/manifest.json"
            assert len(deleted) == 4  # each file once
            later = f"checkpoints/step-{step + 1:010d}/manifest.json"
            assert deleted[0] > done.index(("write", later))
        else:
            assert not deleted
    first = "checkpoints/step-0000000001/manifest.json"
    assert written.index("tokenizer.json") < written.index("run.json") < written.index(first)


def failing(times: int, error: Exception, fits: Callable[[str, str], bool] = lambda what, path: True) -> list[str]:
    """Let that many operations fail; which they were."""
    failed: list[str] = []

    def act(what: str, path: str) -> None:
        if len(failed) < times and fits(what, path):
            failed.append(f"{what} {path}")
            raise error

    Frail.act = act
    return failed


class Foreign(Exception):  # noqa: N818
    """Stores raise what they like."""


@pytest.mark.parametrize(
    "error", [OSError("connection reset"), PermissionError(13, "Permission denied"), Foreign("503")]
)
@pytest.mark.parametrize("what", ["write", "read", "list", "delete"])
def test_what_fails_is_tried_again(
    what: str, error: Exception, tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 30.0)  # a busy machine may need more than the fixture's for three attempts
    failed = failing(3, error, lambda came, path: came == what)
    machine = Machine(tmp_path / "a")
    machine.live()
    assert len(failed) == 3
    said = [sentence for sentence in machine.said if "tried again" in sentence]
    assert len(said) == 1
    assert URL in said[0]
    assert str(error.args[-1]).lower() in said[0].lower()
    check_everywhere(machine, expected)


def test_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    for name, value in (("PATIENCE", 60.0), ("PAUSE", 0.5), ("LONGEST", 10.0)):
        monkeypatch.setattr(remote, name, value)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(pauses))
    failing(10**9, OSError("down"))
    with pytest.raises(StudyError, match="down"):
        remote.Store(URL, lambda sentence: None).read("x")
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]


def test_a_store_that_stays_away_is_told_in_one_sentence(tmp_path: Path, expected: dict[str, Any]) -> None:
    machine = Machine(tmp_path / "a")
    failed = failing(10**9, PermissionError(13, "Permission denied"), lambda what, path: "step-0000000004" in path)
    with pytest.raises(StudyError) as caught:
        machine.live()
    assert len(failed) >= 4
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert all(part in sentence for part in (URL, "permission denied", "run the same command again"))
    assert whole_at_store() == [2, 3]
    revive()
    machine.live()
    assert machine.began_at == 4  # though it never arrived
    check_everywhere(machine, expected)


def test_what_a_store_cannot_do_is_not_tried_again(tmp_path: Path) -> None:
    failed = failing(10**9, NotImplementedError(), lambda what, path: what == "write")
    with pytest.raises(StudyError, match="NotImplementedError"):
        Machine(tmp_path / "a").live()
    assert len(failed) == 1


@pytest.mark.parametrize("url", ["nonesuch://bucket/a", "frail-that-is-not-there://x"])
def test_a_filesystem_that_is_not_there(url: str) -> None:
    with pytest.raises(StudyError, match=f"{url} cannot be used: protocol not known"):
        Mirror(url)


def test_a_plugin_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(remote, "url_to_fs", missing)
    with pytest.raises(StudyError, match=r"^s3://bucket/a1 cannot be used: install s3fs to access S3\.$"):
        Mirror("s3://bucket/a1")


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "summary.json", "run.json", "metrics.jsonl"])
def test_a_dropped_upload_is_noticed(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    torn: list[str] = []

    def act(what: str, path: str) -> int | None:
        if what == "write" and path.endswith(name) and path not in torn:
            torn.append(path)
            return 10
        return None

    Frail.act = act
    machine = Machine(tmp_path / "a")
    machine.live()
    assert torn
    check_everywhere(machine, expected)


def test_a_dropped_download_is_noticed(tmp_path: Path, expected: dict[str, Any]) -> None:
    Machine(tmp_path / "a").live(4)
    torn: list[str] = []

    def act(what: str, path: str) -> int | None:
        if what == "read" and path.endswith("model.safetensors") and len(torn) < 2:
            torn.append(path)
            return 10
        return None

    Frail.act = act
    second = Machine(tmp_path / "b")
    second.live()
    assert second.began_at == 4
    assert len(torn) == 2
    check_everywhere(second, expected)


def test_a_checkpoint_damaged_there_is_refused_and_the_one_before_used(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    Machine(tmp_path / "a").live(5)
    path = at_store(f"{AT}/checkpoints/step-0000000005/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    second = Machine(tmp_path / "b")
    second.live()
    assert second.began_at == 4
    assert [s for s in second.said if "step-0000000005" in s and "does not match its hash" in s]
    check_everywhere(second, expected)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    Machine(tmp_path / "a").live(3)
    path = at_store(f"{AT}/run.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"id": "0" * 32}))
    second = Machine(tmp_path / "b")
    second.begin()
    assert not list(second.folder.glob("checkpoints/step-*"))
    assert [s for s in second.said if "belongs to run" in s]


def test_a_slow_upload_outlives_its_checkpoint(tmp_path: Path) -> None:
    """While the first file of a checkpoint is on its way, training goes on and deletes it."""
    machine = Machine(tmp_path / "a")
    machine.live(3)
    shelf, sent = machine.checkpoints(), list[str]()
    save(shelf, 4)

    def act(what: str, path: str) -> None:
        if what == "write" and "step-0000000004" in path:
            if not sent:
                for step in (5, 6, 7):
                    save(shelf, step)
            sent.append(path)

    Frail.act = act
    machine.carrier.carry()
    assert not (machine.folder / "checkpoints" / "step-0000000004").exists()
    assert len(sent) == 4
    assert 4 in whole_at_store()
    machine.carrier.carry()
    assert whole_at_store() == [2, 6, 7]


def save(shelf: Checkpoints, step: int, best: bool = False) -> None:
    shelf.save(Snapshot(step, {"model.w": torch.ones(3) * step}, {"step": step}), best=best)


def test_a_checkpoint_that_goes_before_it_is_sent_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(3)
    save(machine.checkpoints(), 4)
    there = machine.carrier.here()
    shutil.rmtree(machine.folder / "checkpoints" / "step-0000000004")
    monkeypatch.setattr(machine.carrier, "here", lambda: there)
    machine.carrier.carry()
    assert whole_at_store() == [2, 3]


def test_a_file_system_without_hard_links(
    tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    machine = Machine(tmp_path / "a")
    machine.live()
    check_everywhere(machine, expected)


def test_the_best_stays_until_another_best_is_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(3)
    shelf = machine.checkpoints()
    save(shelf, 4)

    def act(what: str, path: str) -> None:
        if what == "write" and path.endswith("4/manifest.json"):
            save(shelf, 5, best=True)

    Frail.act = act
    machine.carrier.carry()
    assert machine.carrier.here() == {"step-0000000004", "step-0000000005"}
    assert whole_at_store() == [2, 4]
    machine.carrier.carry()
    assert whole_at_store() == [4, 5]


def test_the_newest_is_sent_first(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(3)
    for step in (4, 5):
        save(machine.checkpoints(), step)
    Frail.act = dies_when(lambda what, path: what == "write" and "step-0000000004" in path)
    with pytest.raises(Dead):
        machine.carrier.carry()
    assert whole_at_store() == [2, 3, 5]


def dies_when(fits: Callable[[str, str], bool]) -> Callable[[str, str], None]:
    def act(what: str, path: str) -> None:
        if fits(what, path):
            raise Dead

    return act


def test_what_was_sent_in_part_and_is_gone_here_is_deleted_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(3)
    shelf = machine.checkpoints()
    save(shelf, 4)
    failing(10**9, OSError("down"), lambda what, path: path.endswith("4/model.safetensors"))
    with pytest.raises(StudyError):
        machine.carrier.carry()
    revive()
    for step in (5, 6):
        save(shelf, step)
    machine.carrier.carry()
    assert sorted(os.listdir(at_store(f"{AT}/checkpoints"))) == [f"step-{step:010d}" for step in (2, 5, 6)]


def test_what_a_store_lost_is_sent_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(3)
    path = at_store(f"{AT}/checkpoints/step-0000000003/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert whole_at_store() == [2]
    machine.begin().carry(everything=True)
    assert whole_at_store() == [2, 3]


def test_an_old_manifest_does_not_vouch_for_new_files(tmp_path: Path, expected: dict[str, Any]) -> None:
    """Someone who sends a checkpoint in the place of a damaged one dies, and goes on."""
    Machine(tmp_path / "a").live(5)
    path = at_store(f"{AT}/checkpoints/step-0000000005/model.safetensors")
    path.write_bytes(path.read_bytes()[::-1])
    second = Machine(tmp_path / "b")
    Frail.act = dies_when(lambda what, path: what == "write" and path.endswith("5/model.safetensors"))
    Frail.tears = False
    with pytest.raises(Dead):
        second.live()
    assert second.began_at == 4
    revive()
    second.begin().carry(everything=True)
    assert 5 in whole_at_store()


def test_records_after_the_checkpoint_are_those_of_who_went_on(tmp_path: Path, expected: dict[str, Any]) -> None:
    Frail.act = dies_when(lambda what, path: path.endswith("5/model.safetensors"))
    with pytest.raises(Dead):
        Machine(tmp_path / "a").live()
    probe = at_store(f"{AT}/probes/step-0000000005.json")
    other = probe.read_bytes().replace(b"sum", b"mus")
    probe.write_bytes(other)  # from a machine that rounds otherwise
    revive()
    second = Machine(tmp_path / "b")
    second.begin()
    assert not (second.folder / "probes" / probe.name).exists()
    second.live(begin=False)
    assert second.began_at == 4
    check_everywhere(second, expected)


def test_who_begins_a_run_is_its_holder_before_bringing_it(tmp_path: Path) -> None:
    """What the former holder sends while the new one looks could be overlooked."""
    first = Machine(tmp_path / "a")
    first.live(3)
    save(first.checkpoints(), 4)
    refused: list[str] = []

    def act(what: str, path: str) -> None:
        if what == "list" and not refused:
            refused.append(path)
            with pytest.raises(TakenError):
                first.carrier.carry()

    Frail.act = act
    Machine(tmp_path / "b").begin()
    assert refused


def test_a_summary_waits_for_the_last_metrics(tmp_path: Path) -> None:
    """A run that ends while its metrics are being sent."""
    machine = Machine(tmp_path / "a")
    machine.live(3)
    directory, path = RunDirectory(machine.folder), machine.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b"\n")

    def act(what: str, name: str) -> None:
        if what == "write" and name.endswith("metrics.jsonl") and directory.summary() is None:
            path.write_bytes(path.read_bytes() + b'{"kind": "final", "step": 3}\n')
            directory.write("summary.json", {"status": "finished", "evaluation": {}})

    Frail.act = act
    machine.carrier.carry(everything=True)
    assert directory.summary() is not None
    assert json_at_store("summary.json") is None
    machine.carrier.carry(everything=True)
    assert json_at_store("summary.json") is not None
    assert at_store(f"{AT}/metrics.jsonl").read_bytes() == path.read_bytes()


def test_who_lost_the_run_sends_nothing_more(tmp_path: Path, expected: dict[str, Any]) -> None:
    first, second = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    first.live(3)
    second.live(4)
    before = len(Frail.done)
    save(first.checkpoints(), 5)
    with pytest.raises(TakenError, match=f"{URL}/{AT} is carried by another process"):
        first.carrier.carry()
    assert [what for what, _ in Frail.done[before:]] == ["read"]
    second.live()
    check_everywhere(second, expected)
    first.live()  # brings what the other did, and nothing of its own is left
    assert left_behind(first.folder) | {"checkpoints": {}} == expected | {"checkpoints": {}}


def test_what_one_who_lost_the_run_had_not_carried_is_void(tmp_path: Path, expected: dict[str, Any]) -> None:
    first, second = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    first.live(3)
    save(first.checkpoints(), 5)
    second.live(4)
    first.live()
    assert first.began_at == 4
    check_everywhere(first, expected)


def test_a_run_that_is_taken_over_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    monkeypatch.setattr(carry, "stop_this_process", stopped.set)
    first, second = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    first.live(2)

    def trained() -> None:
        with first.mirror.carrying(PLACE):
            second.begin()
            save(first.checkpoints(), 3)
            assert stopped.wait(30)

    with pytest.raises(TakenError):
        trained()
    assert whole_at_store() == [1, 2]


def test_stopping_this_process_is_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        carry.stop_this_process()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def quiet(seconds: float = 0.5) -> bool:
    """Whether nothing is asked of the store for so long: then what goes with a checkpoint is there, too."""
    before = len(Frail.done)
    time.sleep(seconds)
    return len(Frail.done) == before


def test_while_it_trains_checkpoints_are_carried_at_once_and_records_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(2)
    metrics = at_store(f"{AT}/metrics.jsonl")
    size = metrics.stat().st_size
    metrics.unlink()
    with machine.mirror.carrying(PLACE):
        until(lambda: metrics.exists() and metrics.stat().st_size == size)  # its first look
        save(machine.checkpoints(), 3)
        until(lambda: 3 in whole_at_store())
        until(quiet)
        file = MetricsFile(machine.folder / "metrics.jsonl")
        file.append({"kind": "train", "step": 4})
        time.sleep(0.2)
        assert metrics.stat().st_size == size
        monkeypatch.setattr(carry, "INTERVAL", 0.0)
        until(lambda: metrics.stat().st_size > size)
        Frail.done.clear()
        until(lambda: len(Frail.done) > 5)
        assert "write" not in [what for what, _ in Frail.done]  # what did not change stays
        file.append({"kind": "train", "step": 5})
        file.close()
        monkeypatch.setattr(carry, "INTERVAL", 60.0)
    assert metrics.read_bytes() == (machine.folder / "metrics.jsonl").read_bytes()


def test_what_is_being_sent_when_training_ends_is_sent_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(2)
    begun = threading.Event()

    def act(what: str, path: str) -> None:
        if what == "write" and "step-0000000003" in path:
            begun.set()
            time.sleep(0.1)

    Frail.act = act
    with machine.mirror.carrying(PLACE):
        save(machine.checkpoints(), 3)
        assert begun.wait(30)
    written = [path for what, path in Frail.done if what == "write" and "step-0000000003" in path]
    assert len(written) == len(set(written)) == 4
    assert 3 in whole_at_store()


def test_a_store_that_fails_for_a_while_does_not_stop_training(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(2)
    with machine.mirror.carrying(PLACE):
        failing(10**9, OSError("down"))
        save(machine.checkpoints(), 3)
        until(lambda: any("not carried for now" in sentence for sentence in machine.said))
        revive()
        until(lambda: 3 in whole_at_store())


def test_what_ended_here_and_could_not_be_carried_is_carried_later(tmp_path: Path, expected: dict[str, Any]) -> None:
    machine = Machine(tmp_path / "a")
    failing(10**9, OSError("down"), lambda what, path: path.endswith("summary.json"))
    with pytest.raises(StudyError):
        machine.live()
    assert not json_at_store("summary.json")
    revive()
    machine.mirror.fetch_results()
    check_everywhere(machine, expected)
    before = len(Frail.done)
    machine.mirror.fetch_results()
    assert "write" not in [what for what, _ in Frail.done[before:]]


def test_what_ended_here_is_left_to_who_is_still_carrying_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    failing(10**9, OSError("down"), lambda what, path: path.endswith("summary.json"))
    with pytest.raises(StudyError):
        machine.live()
    revive()
    with machine.mirror.carrier(PLACE).alone():
        machine.mirror.fetch_results()
        assert not json_at_store("summary.json")


def test_what_ended_here_is_void_if_another_went_on(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    failing(10**9, OSError("down"), lambda what, path: path.endswith("summary.json"))
    with pytest.raises(StudyError):
        machine.live()
    revive()
    Machine(tmp_path / "b").begin()
    machine.mirror.fetch_results()
    assert RunDirectory(machine.folder).exists()
    assert RunDirectory(machine.folder).summary() is None


def json_at_store(name: str) -> Any:
    try:
        return json.loads(at_store(f"{AT}/{name}").read_text())
    except (OSError, ValueError):
        return None


def test_a_request_to_stop_while_the_last_is_carried_is_being_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(2)
    monkeypatch.setattr(carry, "LOOK", 60.0)  # so that nothing is carried before the end
    sent: list[str] = []

    def act(what: str, path: str) -> None:
        if what == "write" and path.endswith("manifest.json"):
            sent.append(path)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with machine.mirror.carrying(PLACE):
            Frail.act = act
            save(machine.checkpoints(), 3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(sent) == 1
    assert 3 in whole_at_store()


def test_one_at_a_time_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(2)
    monkeypatch.setattr(mirror, "ORPHAN", 0.1)
    order: list[str] = []
    with machine.mirror.carrying(PLACE):
        with pytest.raises(StudyError, match="still carried by another process"), machine.mirror.carrying(PLACE):
            pass
        monkeypatch.setattr(mirror, "ORPHAN", 30.0)

        def other() -> None:
            with machine.mirror.carrying(PLACE):
                order.append("second")

        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_the_lock_outlives_what_is_cleared(tmp_path: Path) -> None:
    first = Machine(tmp_path / "a")
    with first.mirror.carrying(PLACE):
        pass
    Machine(tmp_path / "b").live(2)
    with first.mirror.carrying(PLACE), first.mirror.carrier(PLACE).alone() as alone:
        assert RunDirectory(first.folder).exists()
        assert not alone


def test_results_are_fetched_while_runs_go_on(tmp_path: Path, expected: dict[str, Any]) -> None:
    runner, driver = Machine(tmp_path / "a"), Machine(tmp_path / "driver")
    at_store("logs/text/k=v").mkdir(parents=True)
    at_store(f"logs/{PLACE}.log").write_text("on the node x:\n")
    runner.live(3)
    driver.mirror.fetch_results(checkpoints=True)
    assert [record["step"] for record in RunDirectory(driver.folder).metrics()] == [1, 2, 3]
    assert RunDirectory(driver.folder).summary() is None
    assert not list(driver.folder.glob("checkpoints/*"))  # of runs that ended only
    assert (tmp_path / "driver" / "logs" / f"{PLACE}.log").read_text() == "on the node x:\n"
    runner.live(4)
    Frail.done.clear()
    driver.mirror.fetch_results([PLACE])
    assert not [path for _, path in Frail.done if "checkpoints/" in path]
    assert [record["step"] for record in RunDirectory(driver.folder).metrics()] == [1, 2, 3, 4]
    runner.live()
    driver.mirror.fetch_results()
    assert left_behind(driver.folder) | {"checkpoints": {}} == expected | {"checkpoints": {}}
    Frail.done.clear()
    driver.mirror.fetch_results()
    assert [what for what, _ in Frail.done] == ["list", "read"]  # is it still the same run?
    before = len(Frail.done)
    driver.mirror.fetch_results(checkpoints=True)
    assert sorted(left_behind(driver.folder)["checkpoints"]) == [f"step-{LAST:010d}"]
    again = len(Frail.done)
    driver.mirror.fetch_results(checkpoints=True)
    reads = [path for what, path in Frail.done[again:] if what == "read"]
    assert len([path for what, path in Frail.done[before:again] if path.endswith(".safetensors")]) == 1
    assert not [path for path in reads if path.endswith((".safetensors", "metrics.jsonl"))]


def test_the_newest_checkpoint_wherever_it_is(tmp_path: Path) -> None:
    runner, driver = Machine(tmp_path / "a"), Machine(tmp_path / "driver")
    assert driver.mirror.newest(PLACE) == ""
    runner.live(3)
    assert driver.mirror.newest(PLACE) == "step-0000000003"
    save(runner.checkpoints(), 4)
    assert runner.mirror.newest(PLACE) == "step-0000000004"
    (at_store(f"{AT}/checkpoints/step-0000000003") / "manifest.json").unlink()
    assert driver.mirror.newest(PLACE) == "step-0000000002"


def test_a_run_is_carried_from_its_folder(tmp_path: Path) -> None:
    with carried(None, tmp_path / "anywhere"):
        pass
    machine = Machine(tmp_path / "a")
    with carried(URL, machine.folder):
        assert json_at_store("holder.json")["pid"] == os.getpid()
        RunDirectory(machine.folder).write("run.json", {"id": "x"})
    assert json_at_store("run.json")["id"] == "x"


def test_what_others_wrote_since_the_last_look_is_seen(tmp_path: Path) -> None:
    driver = Machine(tmp_path / "driver")
    Machine(tmp_path / "a").live(2)
    driver.mirror.fetch_results()
    shutil.copytree(at_store(AT), at_store(AT).with_name("lr1-seed1"))
    driver.mirror.fetch_results()
    assert RunDirectory(driver.folder.with_name("lr1-seed1")).exists()


def test_a_fetched_copy_is_not_taken_for_the_run(tmp_path: Path, expected: dict[str, Any]) -> None:
    """The driver's machine fetched records of a run and then gets to continue it."""
    runner, driver = Machine(tmp_path / "a"), Machine(tmp_path / "driver")
    runner.live(2)
    driver.mirror.fetch_results(checkpoints=True)
    runner.live(4)
    driver.live()
    assert driver.began_at == 4
    check_everywhere(driver, expected)


def test_a_run_that_is_here_is_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.live(2)
    metrics = machine.folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "train", "step": 3}\n')
    machine.mirror.fetch_results()
    assert len(RunDirectory(machine.folder).metrics()) == 3


def test_a_run_in_use_by_one_who_lost_it_is_left_alone(tmp_path: Path) -> None:
    first, second = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    first.live(2)
    second.live()
    with open(first.folder / "carry.lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first.mirror.fetch_results()
        assert RunDirectory(first.folder).summary() is None
    first.mirror.fetch_results()
    assert RunDirectory(first.folder).summary() is not None
    assert not (first.folder / "holder.json").exists()
    assert not list(first.folder.glob("checkpoints/*"))


def test_the_url_is_the_truth(tmp_path: Path) -> None:
    """A run that was deleted there, or replaced by another, is no longer here either."""
    first, driver = Machine(tmp_path / "a"), Machine(tmp_path / "driver")
    first.live()
    driver.mirror.fetch_results()
    old = RunDirectory(driver.folder).read()["id"]
    shutil.rmtree(at_store(AT))
    Machine(tmp_path / "b").live()
    for machine in (driver, first):
        machine.mirror.fetch_results()
        assert RunDirectory(machine.folder).read()["id"] != old
        assert RunDirectory(machine.folder).summary() is not None
    shutil.rmtree(at_store(AT))
    for machine in (driver, first):
        machine.mirror.fetch_results()
        assert not RunDirectory(machine.folder).exists()
    first.live()
    assert first.began_at == 0
    assert RunDirectory(at_store(AT)).read()["id"] == RunDirectory(first.folder).read()["id"] != old


def test_a_result_is_fetched_whole_or_not_at_all(tmp_path: Path) -> None:
    """summary.json says that a run ended, so it is the last to be there."""
    Machine(tmp_path / "a").live()
    total = operations_of(lambda: Machine(tmp_path / "x").mirror.fetch_results())
    for operation in range(total):
        driver = Machine(tmp_path / f"driver-{operation}")
        Frail.done.clear()
        Frail.act = dies_at(operation)
        with pytest.raises(Dead):
            driver.mirror.fetch_results()
        revive()
        if (driver.folder / "summary.json").exists():
            assert len(RunDirectory(driver.folder).metrics()) == LAST + 1
            assert len(list(driver.folder.glob("probes/*"))) == LAST


def operations_of(act: Callable[[], object]) -> int:
    Frail.done.clear()
    act()
    return len(Frail.done)


@pytest.mark.parametrize("name", ["run.json", "summary.json", "probes/step-0000000002.json"])
def test_a_torn_record_is_ignored(name: str, tmp_path: Path) -> None:
    Machine(tmp_path / "a").live()
    path = at_store(f"{AT}/{name}")
    path.write_bytes(path.read_bytes()[:-20])
    driver = Machine(tmp_path / "driver")
    driver.mirror.fetch_results()
    assert not (driver.folder / name).exists()
    assert (driver.folder / "run.json").exists() == (name != "run.json")


def test_a_study_that_was_copied_to_the_url(tmp_path: Path, expected: dict[str, Any]) -> None:
    machine = Machine(tmp_path / "a", f"file://{tmp_path}/elsewhere")
    machine.live(4)
    (machine.folder / "holder.json").unlink()
    shutil.copytree(machine.folder, at_store(AT))
    second = Machine(tmp_path / "b")
    second.live()
    assert second.began_at == 4
    check_everywhere(second, expected)


def test_a_copy_made_while_the_run_went_on_is_replaced_when_it_has_ended(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    runner, driver = Machine(tmp_path / "a"), Machine(tmp_path / "driver")
    runner.live(3)
    driver.mirror.fetch_results()
    (driver.folder / "probes" / "step-0000000003.json").write_text("{}")  # of one who rounded otherwise
    runner.live()
    driver.mirror.fetch_results()
    assert left_behind(driver.folder) | {"checkpoints": {}} == expected | {"checkpoints": {}}


def test_a_damaged_record_is_made_and_sent_again(tmp_path: Path, expected: dict[str, Any]) -> None:
    Machine(tmp_path / "a").live()
    path = at_store(f"{AT}/summary.json")
    path.write_bytes(b"x" * path.stat().st_size)
    second = Machine(tmp_path / "b")
    second.live()
    assert second.began_at == LAST
    check_everywhere(second, expected)


def study(machine: Machine, content: str) -> None:
    machine.mirror.local.mkdir(parents=True, exist_ok=True)
    (machine.mirror.local / "study.json").write_text(content)
    machine.mirror.put("study.json")


def test_study_json_is_old_or_new_never_torn(tmp_path: Path) -> None:
    old, new = json.dumps({"spec": "old", "more": "x" * 30}), json.dumps({"spec": "new"})
    Frail.done.clear()
    study(Machine(tmp_path / "a"), old)
    total = operations_of(lambda: study(Machine(tmp_path / "a"), new))
    assert total >= 4
    for operation in range(total):
        study(Machine(tmp_path / "a"), old)
        Frail.done.clear()
        Frail.act = dies_at(operation)
        with pytest.raises(Dead):
            study(Machine(tmp_path / "a"), new)
        for again in range(operation + 1):  # and the next, who would mend it, dies as well
            Frail.done.clear()
            Frail.act = dies_at(again)
            try:
                other = Machine(tmp_path / "b")
                other.mirror.fetch_study()
                study(other, (tmp_path / "b" / "study.json").read_text())
            except Dead:
                continue
        revive()
        other = Machine(tmp_path / f"c{operation}")
        other.mirror.fetch_study()
        assert (other.mirror.local / "study.json").read_text() in (old, new)
        assert json.loads(at_store("study.json").read_text())["spec"] in ("old", "new")


@pytest.mark.parametrize("name", ["study.json", "study.json.next"])
def test_a_study_json_that_never_arrived(name: str, tmp_path: Path) -> None:
    at_store().mkdir()
    at_store(name).write_text('{"spec": ')
    machine = Machine(tmp_path / "a")
    machine.mirror.fetch_study()
    assert not (tmp_path / "a" / "study.json").exists()
    assert at_store("study.json").exists() == (name == "study.json")
    study(machine, "{}")
    assert at_store("study.json").read_text() == "{}"


def test_study_json_that_did_not_change_is_not_sent(tmp_path: Path) -> None:
    study(Machine(tmp_path / "a"), "{}")
    Frail.done.clear()
    study(Machine(tmp_path / "a"), "{}")
    assert [what for what, _ in Frail.done] == ["read"]
    assert not at_store("study.json.next").exists()


def test_a_url_without_the_study_that_is_here(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.mirror.fetch_study()  # nothing here, nothing there
    machine.live(2)
    with pytest.raises(StudyError, match=f"{URL} holds no study, but {tmp_path}/a has runs"):
        machine.mirror.fetch_study()
    study(machine, '{"spec": 1}')
    other = Machine(tmp_path / "b")
    other.mirror.fetch_study()
    assert (tmp_path / "b" / "study.json").read_text() == '{"spec": 1}'


def test_other_files_of_the_study(tmp_path: Path) -> None:
    machine, other = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "report.html").write_text("<p>ä", encoding="utf-8")
    machine.mirror.put("report.html")
    assert at_store("report.html").read_text(encoding="utf-8") == "<p>ä"
    (tmp_path / "a" / "looks.json").write_text("[1]")
    machine.mirror.put("looks.json")
    assert other.mirror.fetch("looks.json")
    assert (tmp_path / "b" / "looks.json").read_text() == "[1]"
    assert not other.mirror.fetch("nothing.json")
    log = machine.mirror.fetch_log(PLACE)
    assert not log.exists()
    log.write_text("on the node a:\n")
    machine.mirror.put_log(PLACE)
    there = other.mirror.fetch_log(PLACE)
    assert there == tmp_path / "b" / "logs" / f"{PLACE}.log"
    assert there.read_text() == "on the node a:\n"
    there.write_text("on the node a:\non the node b:\n")
    other.mirror.fetch_log(PLACE)
    assert there.read_text() == "on the node a:\non the node b:\n"  # not yet carried


def test_a_bucket_is_never_made(tmp_path: Path) -> None:
    failing(10**9, FileNotFoundError("no such bucket"), lambda what, path: what == "write")
    with pytest.raises(StudyError, match="no such bucket"):
        Machine(tmp_path / "a", "frail://typo/a1").live()
    assert "makedirs" not in [what for what, _ in Frail.done]


def test_real_folders_are_made(tmp_path: Path, expected: dict[str, Any]) -> None:
    url = f"file://{tmp_path}/deep/er/a1"
    Machine(tmp_path / "a", url).live(3)
    second = Machine(tmp_path / "b", url)
    second.live()
    assert second.began_at == 3
    found = left_behind(tmp_path / "deep" / "er" / "a1" / AT)
    assert found == expected
    assert sorted(os.listdir(tmp_path / "deep" / "er" / "a1" / AT / "checkpoints")) == sorted(expected["checkpoints"])


def test_another_machine_goes_on_from_the_last_carried_checkpoint(tmp_path: Path, expected: dict[str, Any]) -> None:
    """A machine dies at its n-th operation on the store, for every n, in the middle of a write where it is one."""
    total = operations(tmp_path, lambda folder: Machine(folder).live())
    assert total > 50
    for operation in range(total):
        wipe()
        first, second = Machine(tmp_path / f"{operation}-a"), Machine(tmp_path / f"{operation}-b")
        Frail.act = dies_at(operation)
        with pytest.raises(Dead):
            first.live()
        whole = whole_at_store()
        assert max(whole, default=0) >= first.carried
        revive()
        second.live()
        assert second.began_at == max(whole, default=0)
        check_everywhere(second, expected)
        assert not any("trusted" in sentence for sentence in second.said)


def test_the_same_machine_loses_nothing(tmp_path: Path, expected: dict[str, Any]) -> None:
    total = operations(tmp_path, lambda folder: Machine(folder).live())
    for operation in range(total):
        wipe()
        machine = Machine(tmp_path / str(operation))
        Frail.act = dies_at(operation)
        with pytest.raises(Dead):
            machine.live()
        saved = sorted(machine.folder.glob("checkpoints/step-*"))
        known = (machine.folder / "holder.json").exists()
        ended = (machine.folder / "summary.json").exists()
        revive()
        machine.live()
        assert ended or machine.began_at == (store.step_of(saved[-1]) if saved and known else 0)
        brought = [path for what, path in Frail.done if what == "read" and path.endswith(".safetensors")]
        assert not (known and brought)
        assert not ended or not any(what == "write" and path.endswith("run.json") for what, path in Frail.done)
        check_everywhere(machine, expected)


def test_one_who_dies_while_continuing_costs_no_more(tmp_path: Path, expected: dict[str, Any]) -> None:
    """Also what the second machine sends over what the first had sent is never the only one."""

    def second_life(folder: Path) -> None:
        Machine(folder / "a").live(3)
        Frail.done.clear()
        Machine(folder / "b").live()

    total = operations(tmp_path, second_life)
    for operation in range(total):
        wipe()
        Machine(tmp_path / f"{operation}-a").live(3)
        Frail.done.clear()
        second = Machine(tmp_path / f"{operation}-b")
        Frail.act = dies_at(operation)
        with pytest.raises(Dead):
            second.live()
        whole = whole_at_store()
        assert max(whole) >= max(3, second.carried)
        revive()
        third = Machine(tmp_path / f"{operation}-{'cb'[operation % 2]}")  # yet another one, or the second again
        third.live()
        assert third.began_at >= max(whole) or RunDirectory(third.folder).summary() is not None
        check_everywhere(third, expected)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, ExecutionSpec]:
    folder = tmp_path_factory.mktemp("corpus")
    paragraphs = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    (folder / "licence.txt").write_text("\n<|endoftext|>\n".join(paragraphs) + "\n", encoding="utf-8")
    corpus = prepare_corpus(
        DataSpec(source=str(folder / "licence.txt"), tokenizer="bytes", valid=0.1, test=0.1),
        out=folder / "prepared",
        workers=1,
    )
    return resolve_run(
        {
            "corpus": {"source": str(corpus.folder), "tokenizer": "bytes"},
            "model": {"layers": 1, "width": 16, "context": 32},
            "attention": {"heads": 2},
            "batch": {"sequences": 4},
            "budget": {"tokens": 4 * 32 * 300},
            "evaluation": {"times": 6, "tokens": 64, "probes": 3, "probe_tokens": 16},
            "execution": {"device": "cpu", "threads": 1, "checkpoint_steps": 20},
        }
    )


RUN = """
import json, sys, time
from pathlib import Path
from qklab.study import carry
from qklab.study.mirror import Mirror
from qklab.train import loop
from qklab.train.launch import train
from qklab.train.spec import ExecutionSpec, RunSpec
carry.LOOK = 0.01
url, local, place, spec, execution = sys.argv[1:]
progress = loop.Loop.progress
def slow(self):
    time.sleep(0.005)
    return progress(self)
loop.Loop.progress = slow
mirror = Mirror(url, Path(local))
with mirror.carrying(Path(place)):
    folder = mirror.local / "runs" / place
    train(RunSpec.from_dict(json.loads(spec)), folder, ExecutionSpec.from_dict(json.loads(execution)))
"""


@pytest.mark.long
def test_a_run_killed_on_one_machine_and_continued_on_another(
    tmp_path: Path, spec: tuple[RunSpec, ExecutionSpec]
) -> None:
    """Equals the run that nothing happened to, bit for bit."""
    run, execution = spec
    train(run, tmp_path / "undisturbed", execution)
    url, there = f"file://{tmp_path}/a1", tmp_path / "a1" / AT
    values = [json.dumps(each.to_dict()) for each in (run, execution)]
    process = subprocess.Popen([sys.executable, "-c", RUN, url, str(tmp_path / "a"), str(PLACE), *values])
    try:
        until(lambda: len(list(there.glob("checkpoints/step-*/manifest.json"))) >= 2, 120)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not (there / "summary.json").exists()
    assert not (tmp_path / "a" / "runs" / PLACE / "summary.json").exists()
    second = Mirror(url, tmp_path / "b", lambda sentence: None)
    with second.carrying(PLACE):
        folder = second.local / "runs" / PLACE
        began = max(path.name for path in folder.glob("checkpoints/step-*"))
        train(run, folder, execution)
    resumed = [json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines() if "resume" in line]
    assert [f"step-{record['step']:010d}" for record in resumed] == [began]
    assert 0 < resumed[0]["step"] < 300
    expected = left_behind(tmp_path / "undisturbed")
    assert len(expected["metrics"]) > 300
    Mirror(url, tmp_path / "driver").fetch_results(checkpoints=True)
    fetched = tmp_path / "driver" / "runs" / PLACE
    for found in map(left_behind, (folder, there, fetched)):
        last = max(expected["checkpoints"])
        assert found["checkpoints"][last] == expected["checkpoints"][last]
        assert found | {"checkpoints": {}} == expected | {"checkpoints": {}}
