"""A study at a URL: a reader gets a whole snapshot or the one before, whatever dies, fails or tears meanwhile."""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem
from small_study import InProcess, RecordingDisplay, check_whole, small_spec, until

from qklab.runs import RunDirectory
from qklab.study.execute import Study, StudyInterrupted
from qklab.study.executors import RunTask, Unit, worker
from qklab.study.executors.worker import perform_runs
from qklab.study.plan import PlannedRun
from qklab.study.remote import RemoteStudy, is_url, study
from qklab.study.remote.snapshot import FolderSnapshot, RemoteFolder
from qklab.study.remote.store import Store, StoreError
from qklab.study.remote.study import find_cache, is_as_far
from qklab.study.spec import StudyError

URL = "frail://bucket/a1"
Content = dict[str, bytes]


class DeadError(BaseException):
    """The machine is gone."""


class Frail(AbstractFileSystem):
    """Files of a folder as a store without renames, locks or folders, which remembers what it listed, and where a write
    that is broken off leaves half of the file. `act` sees every operation before it happens."""

    protocol = "frail"
    base: Path
    act: Callable[[str, str], None]
    done: list[tuple[str, str]]
    listed: dict[str, Any]

    @classmethod
    def renew(cls, base: Path) -> None:
        cls.base, cls.act, cls.done, cls.listed = base, staticmethod(lambda what, path: None), [], {}

    def on(self, what: str, path: str) -> None:
        Frail.done.append((what, path))
        Frail.act(what, path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        target = self.base / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(value[: len(value) // 2])
        self.on("write", path)
        target.write_bytes(value)

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self.on("read", path)
        return (self.base / path).read_bytes()

    def get_file(self, rpath: str, lpath: str, *args: Any, **kwargs: Any) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.on("list", path)
        found = Frail.listed.get(path)
        if found is None:
            found = {}
            for file in (Path(folder) / name for folder, _, names in os.walk(self.base / path) for name in names):
                with contextlib.suppress(FileNotFoundError):  # deleted by another since: a store lists what is there
                    found[str(file.relative_to(self.base))] = {"size": file.stat().st_size}
            Frail.listed[path] = found
        return found

    def invalidate_cache(self, path: str | None = None) -> None:
        Frail.listed = {}

    def rm_file(self, path: str) -> None:
        self.on("delete", path)
        (self.base / path).unlink()


@pytest.fixture(autouse=True)
def _frail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("frail", Frail, clobber=True)
    Frail.renew(tmp_path / "store")
    monkeypatch.setattr(study, "POLL", 0.01)
    monkeypatch.setattr(study, "INTERVAL", 3600.0)
    monkeypatch.setattr(study, "PAUSE", 0.01)


def fill(folder: Path, content: Content) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    for name, value in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(value)
    return folder


def read(folder: Path) -> Content:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def states(count: int) -> list[Content]:
    """What a folder held, one after another: a file that stays, one that changes, one that comes and goes."""
    return [
        {"stays": b"the same", "grows": b"line\n" * (k + 1), f"checkpoints/step-{k}/model": bytes([k]) * 100}
        for k in range(count)
    ]


# the guarantee


def test_a_reader_gets_the_last_completed_snapshot_or_the_one_before_whatever_the_writer_is_doing(
    tmp_path: Path,
) -> None:
    """A reader looks before every operation of the writer, and a writer that dies there changes nothing for it."""
    wanted, folder, seen = states(5), RemoteFolder(Store(URL), "run"), list[int]()

    def look(number: int) -> None:
        act, Frail.act = Frail.act, lambda what, path: None
        shutil.rmtree(tmp_path / "reader", ignore_errors=True)
        came = RemoteFolder(Store(URL), "run").download(tmp_path / "reader")
        assert came or number == 0
        if came:
            seen.append(wanted.index(read(tmp_path / "reader")) + 1)
            assert seen[-1] in (number, number + 1)
        Frail.act = act

    counted: list[str] = []

    def look_and_die(number: int, at: int) -> Callable[[str, str], None]:
        def act(what: str, path: str) -> None:
            look(number)
            if len(counted) == at:
                raise DeadError
            counted.append(what)

        return act

    for number, content in enumerate(wanted):
        fill(tmp_path / "writer", content)
        operation = 0
        for operation in range(100):
            counted.clear()
            Frail.act = look_and_die(number, operation)
            try:
                folder.upload(tmp_path / "writer")
                break
            except DeadError:
                look(number)
        assert operation > 3
    Frail.renew(Frail.base)
    look(len(wanted))
    assert seen[-1] == len(wanted)
    left = read(Frail.base / "bucket/a1/run")
    assert len([name for name in left if name.startswith("snapshots/")]) == 2
    assert len([name for name in left if name.startswith("objects/")]) == 1 + 2 * 2  # what both of them need


@pytest.mark.parametrize("damage", ["object", "cut object", "lost object", "list", "lost list"])
def test_what_is_damaged_there_is_not_taken_and_the_one_before_is(damage: str, tmp_path: Path) -> None:
    first, second = states(2)
    folder = RemoteFolder(Store(URL), "run")
    for content in (first, second):
        folder.upload(fill(tmp_path / "writer", content))
    newest = folder.newest()
    assert newest is not None
    digest = newest.files["checkpoints/step-1/model"][0]
    path = Frail.base / "bucket/a1/run" / (newest.name if "list" in damage else f"objects/{digest}")
    if "lost" in damage:
        path.unlink()
    else:
        path.write_bytes(b"x" * 100 if damage == "object" else path.read_bytes()[:-1])
    assert RemoteFolder(Store(URL), "run").download(tmp_path / "reader")
    assert read(tmp_path / "reader") == first
    if damage != "object":  # whose size says nothing
        seen = RemoteFolder(Store(URL), "run").newest()
        assert (seen and seen.number) == 1
        folder.upload(tmp_path / "writer")  # sends again what is not there
        assert RemoteFolder(Store(URL), "run").download(tmp_path / "again")
        assert read(tmp_path / "again") == second


def test_what_is_there_is_not_sent_again(tmp_path: Path) -> None:
    folder = RemoteFolder(Store(URL), "run")
    folder.upload(fill(tmp_path / "writer", {"a": b"1", "b": b"2"}))
    Frail.done.clear()
    folder.upload(tmp_path / "writer")
    assert not [path for what, path in Frail.done if what == "write"]
    folder.upload(fill(tmp_path / "writer", {"a": b"1", "b": b"3"}))
    assert len([path for what, path in Frail.done if what == "write"]) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 9, "number": 1, "files": {}}', '{"format": 1, "nu'])
def test_what_is_no_snapshot(content: str) -> None:
    assert FolderSnapshot.from_json(content.encode()) is None


# stores


def test_what_is_a_url_and_where_it_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert all(map(is_url, ("s3://bucket/a1", "gs://b", "file:///tmp/x", "frail://x")))
    assert not any(map(is_url, ("runs/a1", "/tmp/a1", "a1", "C:/x", "./s3://x", "://x")))
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path))
    one, other = find_cache("s3://bucket/a1"), find_cache("s3://bucket/a/1")
    assert one != other
    assert one == find_cache("s3://bucket/a1/")
    assert one.parent == other.parent == tmp_path / "studies"
    assert RemoteStudy("frail://bucket/a1/").local == find_cache(URL)


def test_stores_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StudyError, match="nonesuch://bucket/a cannot be used: protocol not known"):
        Store("nonesuch://bucket/a")

    def miss(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("qklab.study.remote.store.url_to_fs", miss)
    with pytest.raises(StudyError, match=r"^s3://bucket/a1 cannot be used: install s3fs to access S3\.$"):
        Store("s3://bucket/a1")


def test_real_folders_are_made_and_buckets_are_not(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/a/b")
    store.write("c/d", b"x")
    assert (tmp_path / "a/b/c/d").read_bytes() == b"x"
    assert store.list_sizes("c") == {"d": 1}
    assert (store.read("c/d"), store.read("none")) == (b"x", None)
    store.delete("c/d")
    store.delete("c/d")
    assert store.read("c/d") is None


class Foreign(Exception):  # noqa: N818
    """Stores raise what they like."""


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), Foreign("permission denied\nand more")])
@pytest.mark.parametrize("what", ["write", "read", "list", "delete"])
def test_what_fails_is_told_in_one_sentence(what: str, error: Exception) -> None:
    def act(came: str, path: str) -> None:
        if came == what:
            raise error

    Store(URL).write("x", b"1")
    Frail.act = act
    calls = {"write": lambda s: s.write("x", b"1"), "read": lambda s: s.read("x"), "list": lambda s: s.list_sizes("")}
    with pytest.raises(StoreError, match=f"{URL} failed: permission denied; what was saved is safe.*again\\.$"):
        (calls | {"delete": lambda s: s.delete("x")})[what](Store(URL))


# runs


class Machine:
    """Plays a run: a checkpoint a step, of which two are kept; `at` is the step it began with."""

    def __init__(self, folder: Path):
        self.said: list[str] = []
        self.remote = RemoteStudy(URL, folder, self.said.append)
        self.run = folder / "runs" / "text" / "k=v" / "lr0.001-seed0"
        self.at = 0

    def train(self, last: int, end: bool = False, wait: bool = True) -> None:
        """From where the run is to a step, waiting for each checkpoint to be sent."""
        with self.remote.keep_run(self.run):
            steps = [int(path.name[5:]) for path in self.run.glob("checkpoints/step-*")]
            self.at = max(steps, default=0)
            self.run.mkdir(parents=True, exist_ok=True)
            if not (self.run / "run.json").exists():
                (self.run / "run.json").write_text('{"id": "x"}')
            for step in range(self.at + 1, last + 1):
                with open(self.run / "metrics.jsonl", "a") as file:
                    file.write(f"step {step}\n")
                aside = self.run / "checkpoints" / f".tmp-{step}"
                fill(aside, {"model": bytes([step]) * 50, "manifest.json": b"{}"})
                aside.rename(self.run / "checkpoints" / f"step-{step:010d}")
                for old in sorted(self.run.glob("checkpoints/step-*"))[:-2]:
                    shutil.rmtree(old)
                name = f"step-{step:010d}"
                if wait:
                    until(lambda name=name: self.remote.measure_progress(self.run)[1] >= name, "checkpoint at the URL")
            if end:
                (self.run / "summary.json").write_text("{}")

    def fetch(self, **how: Any) -> Content:
        self.remote.fetch_records(**how)
        return read(self.run)


def test_another_machine_goes_on_from_the_last_checkpoint_that_was_sent(tmp_path: Path) -> None:
    first, second = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    first.train(3)
    second.train(5, end=True)
    assert second.at == 3
    assert (second.run / "metrics.jsonl").read_text() == "".join(f"step {k}\n" for k in range(1, 6))
    assert second.remote.measure_progress(second.run) == (True, "step-0000000005")
    reader = Machine(tmp_path / "c")
    assert set(reader.fetch()) == {"run.json", "metrics.jsonl", "summary.json"}
    assert set(reader.fetch(checkpoints=True)) - set(reader.fetch()) == set()
    assert (reader.run / "checkpoints" / "step-0000000005" / "model").read_bytes() == bytes([5]) * 50
    assert not (reader.run / "checkpoints" / "step-0000000004").exists()
    first.train(5)  # which finds that all is done
    assert first.at == 5


def test_the_same_machine_loses_nothing_that_was_not_sent(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.train(2)

    def refuse(what: str, path: str) -> None:
        if what == "write":
            raise OSError("down")

    Frail.act = refuse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "PATIENCE", 0.0)
        with pytest.raises(StoreError, match="failed: down"):
            machine.train(4, wait=False)
    Frail.renew(Frail.base)
    machine.train(5)
    assert machine.at == 4
    other = Machine(tmp_path / "b")
    other.train(5)
    assert other.at == 5


def test_a_store_that_fails_for_a_while_is_tried_again_at_the_end(tmp_path: Path) -> None:
    machine, failed = Machine(tmp_path / "a"), list[str]()

    def fail(what: str, path: str) -> None:
        if what == "write" and len(failed) < 3:
            failed.append(path)
            raise OSError("down")

    Frail.act = fail
    machine.train(2, end=True, wait=False)
    assert machine.remote.measure_progress(machine.run) == (True, "step-0000000002")
    assert [sentence for sentence in machine.said if "tried again" in sentence or "not sent for now" in sentence]


def test_a_checkpoint_that_gives_way_while_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "a")
    machine.train(2)
    fill(machine.run / "checkpoints" / "step-0000000003", {"model": b"3", "manifest.json": b"{}"})
    stage = study.stage_file

    def lose(source: Path, target: Path, *, copy: bool = False) -> None:
        if "step-0000000003" in str(source):
            shutil.rmtree(machine.run / "checkpoints" / "step-0000000003", ignore_errors=True)
        stage(source, target, copy=copy)

    monkeypatch.setattr(study, "stage_file", lose)
    machine.remote.send_run(machine.remote.folder_of(machine.run), machine.run)
    newest = machine.remote.folder_of(machine.run).newest()
    assert newest is not None
    assert {name.split("/")[1] for name in newest.files if name.startswith("checkpoints/")} == {
        "step-0000000001",
        "step-0000000002",
    }


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    Machine(tmp_path / "a").train(2)
    second = Machine(tmp_path / "b")
    second.train(2)
    assert second.at == 2


def test_which_of_two_folders_is_further(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.train(2)
    newest = machine.remote.folder_of(machine.run).newest()
    assert newest is not None
    assert is_as_far(machine.run, newest, checkpoints=True)
    (machine.run / "run.json").write_text('{"id": "y"}')  # another run
    assert not is_as_far(machine.run, newest, checkpoints=True)
    shutil.rmtree(machine.run)
    assert not is_as_far(machine.run, newest, checkpoints=False)


def test_records_of_a_run_in_use_here_are_left_alone(tmp_path: Path) -> None:
    Machine(tmp_path / "a").train(3)
    here = Machine(tmp_path / "b")
    here.run.mkdir(parents=True)
    with RunDirectory(here.run).lock():
        assert set(here.fetch()) == {"lock"}
    assert "run.json" in here.fetch()


def test_a_url_without_the_study_that_is_here(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a")
    machine.remote.local.mkdir()
    machine.remote.fetch_study()
    machine.train(1)
    with pytest.raises(StudyError, match=r"holds no study, but .* has runs of one that was there; delete that folder"):
        machine.remote.fetch_study()
    (machine.remote.local / "study.json").write_text("{}")
    machine.remote.send_study()
    other = Machine(tmp_path / "b")
    other.remote.fetch_study()
    assert (other.remote.local / "study.json").read_text() == "{}"


# studies


def remote_study(corpus: str, folder: Path, **changes: Any) -> Study:
    return Study(small_spec(corpus, **changes), folder, remote=RemoteStudy(URL, folder))


@contextmanager
def stopped_after_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C in the midst of the third run, to the run and to the study."""
    runs: list[str] = []

    def show(self: Any, done: float, line: str) -> None:
        if len(runs) == 3 and done > 0.4:
            os.kill(os.getpid(), signal.SIGINT)

    def act(unit: Unit, task: RunTask) -> None:
        runs.append(task.name)
        if perform_runs(unit, [task]) == 75:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(worker.LogDisplay, "show", show)
        patch.setattr(InProcess, "wait", lambda self, seconds: [task for task in waited(self, act) if task.ended])
        yield


def waited(executor: InProcess, act: Callable[[Unit, RunTask], object]) -> list[RunTask]:
    units, executor.waiting = executor.waiting, []
    for unit in units:
        act(unit, unit.tasks[0])
    return [unit.tasks[0] for unit in units]


@pytest.mark.long
def test_a_study_begun_on_one_machine_and_ended_on_another(
    corpus: str, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        stopped_after_a_checkpoint(monkeypatch),
        pytest.raises(StudyInterrupted),
        remote_study(corpus, tmp_path / "a").open() as first,
    ):
        first.carry_out(InProcess(), RecordingDisplay())
    shutil.rmtree(tmp_path / "a")
    edited = remote_study(corpus, tmp_path / "c", lrs=[0.1])
    with pytest.raises(StudyError, match="began with lrs"), edited.open():
        pass
    executor = InProcess()
    with remote_study(corpus, tmp_path / "b").open() as second:
        second.carry_out(executor, RecordingDisplay())
        assert second.remote is not None
        second.remote.fetch_records(checkpoints=True)
    assert len(executor.units) == 4  # two had ended
    check_whole(tmp_path / "b", undisturbed)
    third = remote_study(corpus, tmp_path / "d")
    with third.open():
        assert len(third.carry_out(InProcess(lambda *_: pytest.fail("nothing is left to do")), RecordingDisplay())) == 6
    assert PlannedRun(corpus, "k=v", 1e-2, 0).folder_in(tmp_path / "d").exists()
