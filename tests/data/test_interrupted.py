"""Preparing under adverse conditions: killed, out of disk, out of luck, together with others, on damaged files."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpora import Build, join_documents, make_documents, read_files, spec_of

from qklab.data import Corpus, DataError, DataSpec, prepare_corpus, shards, workers
from qklab.data import prepare as preparing
from qklab.data.scan import scan_or_resume


class Killed(BaseException):
    """Ends a preparation without anything being tidied up, as a kill does."""


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 12_000)


def fail_at(number: int, call: Callable[..., Any], error: BaseException, after: bool) -> Callable[..., Any]:
    """`call`, but its `number`-th use raises `error` instead of doing anything, or after having done it."""
    counter = iter(range(number + 1))

    def failing(*arguments: Any) -> Any:
        last = next(counter, None) == number
        if last and not after:
            raise error
        answer = call(*arguments)
        if last:
            raise error
        return answer

    return failing


def interrupt(spec: DataSpec, out: Path) -> Path:
    """A preparation that was killed when all shards were written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", fail_at(0, lambda *_: None, Killed(), after=False))
        with pytest.raises(Killed):
            prepare_corpus(spec, out=out)
    return out


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_rename_it_goes_on_and_ends_bit_equal(
    folder: Path, tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a power cut is not what is tested, and it takes long
    whole = read_files(build(folder).folder)
    replace, spec, number = os.replace, spec_of(folder), 0
    for number in range(1000):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail_at(number, replace, Killed(), after))
            try:
                prepare_corpus(spec, out=tmp_path / f"{number}")
                break
            except Killed:
                pass
        assert read_files(prepare_corpus(spec, out=tmp_path / f"{number}").folder) == whole
    assert number >= 15
    for _ in range(100):  # and killed again and again, at the rename that makes one more shard count
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail_at(4, replace, Killed(), after=True))
            try:
                prepare_corpus(spec, out=tmp_path / "again")
                break
            except Killed:
                continue
    assert read_files(tmp_path / "again") == whole


def test_what_is_finished_is_kept_and_what_is_damaged_is_made_again(
    folder: Path, tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_files(build(folder).folder)
    out = interrupt(spec_of(folder), tmp_path / "out")
    first, *others = sorted(out.glob("train-*.bin"))
    before = {path: path.stat().st_mtime_ns for path in others}
    last = others[-1]
    last.write_bytes(last.read_bytes()[:-2] + b"zz")
    (out / ".train-00001.bin.1.tmp").write_bytes(b"half-writ")
    monkeypatch.setattr("qklab.data.scan.scan_source", lambda *_: pytest.fail("read and planned again"))
    stamp = first.stat().st_mtime_ns
    assert read_files(prepare_corpus(spec_of(folder), out=out).folder) == whole
    assert first.stat().st_mtime_ns == stamp
    assert last.stat().st_mtime_ns != before[last]


def test_a_tokenizer_that_is_damaged_in_between_is_trained_again(folder: Path, tmp_path: Path, build: Build) -> None:
    settings = {"tokenizer": "bpe", "vocab": 300}
    whole = read_files(build(folder, **settings).folder)
    out = interrupt(spec_of(folder, **settings), tmp_path / "out")
    flip(out / "tokenizer.json")
    assert read_files(prepare_corpus(spec_of(folder, **settings), out=out).folder) == whole


def test_a_source_that_changes_in_between_is_noticed(folder: Path, tmp_path: Path, build: Build) -> None:
    out = interrupt(spec_of(folder), tmp_path / "out")
    with pytest.raises(DataError, match="holds an unfinished corpus of another spec"):
        prepare_corpus(spec_of(folder, valid=0.2), out=out)
    text = (folder / "a.txt").read_text()
    (folder / "a.txt").write_text(text[:-30] + "x" + text[-29:])
    with pytest.raises(DataError, match="the source has changed since"):
        prepare_corpus(spec_of(folder), out=out)
    (out / shards.UNFINISHED / "plan.json").unlink()  # then no shard of the old text counts
    assert (
        read_files(prepare_corpus(spec_of(folder), out=out).folder).items()
        >= {name: raw for name, raw in read_files(build(folder).folder).items() if name.endswith(".bin")}.items()
    )


def test_a_source_that_changes_meanwhile_is_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def scan_then_change(*arguments: Any) -> Any:
        plan = scan_or_resume(*arguments)
        (folder / "a.txt").write_text("something else\n<|endoftext|>\n" + (folder / "a.txt").read_text())
        return plan

    monkeypatch.setattr(preparing, "scan_or_resume", scan_then_change)
    with pytest.raises(DataError, match="the source has changed since"):
        prepare_corpus(spec_of(folder), out=tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_full_disk_is_one_sentence_and_loses_nothing(
    folder: Path, tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_files(build(folder).folder)
    full, fsync = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), os.fsync
    for number in range(0, 24, 4):
        out = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_at(number, fsync, full, after=False))
            with pytest.raises(DataError, match="cannot be written: No space left on device; finished shards are kept"):
                prepare_corpus(spec_of(folder), out=out)
        assert not list(out.glob(".*.tmp"))
        assert read_files(prepare_corpus(spec_of(folder), out=out).folder) == whole
    with pytest.raises(DataError, match=r"out cannot be written: Not a directory"):
        prepare_corpus(spec_of(folder), out=folder / "a.txt" / "out")


def test_a_second_preparation_waits_for_the_first(folder: Path, tmp_path: Path) -> None:
    out, waits, hashes = tmp_path / "out", threading.Event(), []

    def prepare_second() -> None:
        note = lambda what, done, total: waits.set() if "another process is preparing" in what else None  # noqa: E731
        hashes.append(prepare_corpus(spec_of(folder), out=out, progress=note).hash)

    (out / shards.UNFINISHED).mkdir(parents=True)
    thread = threading.Thread(target=prepare_second)
    with preparing.lock_folder(out, lambda *_: None):
        thread.start()
        assert waits.wait(20)
        assert not hashes
    thread.join(20)
    assert hashes == [prepare_corpus(spec_of(folder), out=out).hash]
    assert not (out / shards.UNFINISHED).exists()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def test_every_damaged_file_is_found(folder: Path, build: Build) -> None:
    corpus = build(folder)
    for path in corpus.folder.iterdir():
        raw = path.read_bytes()
        for damage in (flip, cut, Path.unlink):
            damage(path)
            with pytest.raises(DataError) as caught:
                Corpus.open(corpus.folder).verify()
            assert path.name in str(caught.value)
            if damage is not flip and path.suffix == ".bin":
                with pytest.raises(DataError, match="were expected"):
                    Corpus.open(corpus.folder)
            path.write_bytes(raw)
    Corpus.open(corpus.folder).verify()
    manifest = corpus.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"repeats_kept": 0', '"repeats_kept": 1'))
    with pytest.raises(DataError, match=r"manifest.json is damaged \(its hash does not fit\)"):
        Corpus.open(corpus.folder)


def test_a_folder_that_is_no_corpus_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no prepared corpus \(it has no manifest.json\); run qklab data prepare"):
        Corpus.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 7}')
    with pytest.raises(DataError, match="is not of format 1"):
        Corpus.open(tmp_path)


def test_a_worker_that_dies_is_one_sentence(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "FEW_BYTES", 0)
    monkeypatch.setattr(preparing, "BATCH_BYTES", 200)
    started, start = [], workers.start_worker

    def start_and_kill(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments))
        if len(started) == 2:
            started[1].kill()
        return started[-1]

    monkeypatch.setattr(workers, "start_worker", start_and_kill)
    with pytest.raises(DataError, match=r"a process that tokenises has ended \(code -9; is memory short\?\)"):
        prepare_corpus(spec_of(folder), out=tmp_path / "out", workers=2)
    assert [process.returncode for process in started] == [-9, -9]
    with pytest.raises(DataError, match=r"a process that trains the tokenizer has ended \(ValueError: invalid literal"):
        workers.train_in_worker([[b"text"]], "many")  # pyright: ignore[reportArgumentType]


def test_a_worker_leaves_ctrl_c_to_the_process_that_feeds_it(folder: Path, build: Build) -> None:
    process = workers.start_worker(workers.serve_encoding, str(build(folder).folder / "tokenizer.json"))
    for _ in range(2):
        assert [ids.tolist() for ids in workers.ask_worker(process, [[b"abc", b""]], "tokenises")] == [[97, 98, 99], []]
        process.send_signal(signal.SIGINT)
    workers.stop_worker(process)


PROGRAM = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell begins with it ignored
    from qklab.data import DataSpec, prepare as preparing, prepare_corpus, shards
    preparing.FEW_BYTES, preparing.BATCH_BYTES, shards.SHARD_TOKENS = 0, 10_000, 50_000
    note = lambda what, done, total: print(what, done, flush=True)
    prepare_corpus(DataSpec(source=sys.argv[1], tokenizer="bytes"), out=sys.argv[2], workers=2, progress=note)
"""


def list_processes(column: str) -> dict[int, str]:
    answer = subprocess.run(["ps", "-A", "-o", f"pid=,{column}="], capture_output=True, text=True, check=True)
    return {int(line.split()[0]): line.split()[1] for line in answer.stdout.splitlines()}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_no_worker_and_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    source, out = tmp_path / "large.txt", tmp_path / "out"
    source.write_text(join_documents(make_documents(2000, words=120)))
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(source), str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert process.stdout
    with process.stdout as lines:
        assert any(line.startswith("tokenising") and int(line.split()[1]) >= 200_000 for line in lines)
        children = [pid for pid, parent in list_processes("ppid").items() if int(parent) == process.pid]
        assert len(children) == 2
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.kill()
        assert process.wait(30) != 0
    deadline = time.monotonic() + 20
    while any(not list_processes("stat").get(pid, "Z").startswith("Z") for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list((out / shards.UNFINISHED).glob("train-*.json"))
    monkeypatch.setattr(shards, "SHARD_TOKENS", 50_000)
    spec = DataSpec(source=str(source), tokenizer="bytes")
    prepare_corpus(spec, out=out)
    prepare_corpus(spec, out=tmp_path / "whole")
    assert read_files(out) == read_files(tmp_path / "whole")


MEASURE = """
    import sys
    from qklab.data import DataSpec, prepare_corpus, shards, workers
    shards.SHARD_TOKENS = 2**18
    def peak(process):
        return next(int(line.split()[1]) for line in open(f"/proc/{process}/status") if line.startswith("VmHWM"))
    stop, before = workers.stop_worker, peak("self")
    def measure_and_stop(process):
        print(peak(process.pid))
        stop(process)
    workers.stop_worker = measure_and_stop
    prepare_corpus(DataSpec(source=sys.argv[1], tokenizer="bytes"), out=sys.argv[2], workers=2)
    print(peak("self") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    path, block = tmp_path / "huge.txt", "\n".join(make_documents(1000, words=100))
    path.write_text(join_documents(f"{i} {block[i:]}" for i in range(200)))
    assert path.stat().st_size > 50e6
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(path), str(tmp_path / "out")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    *of_workers, grown = (1024 * int(line) for line in answer.stdout.split())
    assert grown < 40e6
    assert len(of_workers) == 2
    assert max(of_workers) < 100e6
