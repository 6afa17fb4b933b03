"""Preparing under adverse conditions: killed, out of disk, out of luck, together with others, on damaged files."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qklab.data import Corpus, DataError, DataSpec, prepare_corpus, shards, workers
from qklab.data import prepare as preparing


class Killed(BaseException):
    """Ends a preparation without anything being tidied up, as a kill does."""


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 6000)


def spec_of(source: Path, **more: Any) -> DataSpec:
    return DataSpec(source=str(source), **{"tokenizer": "bytes", "valid": 0.1, "test": 0.1, **more})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_rename_it_goes_on_and_ends_bit_equal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a power cut is not what is tested, and it takes long
    whole = contents(prepare_corpus(spec_of(folder), out=tmp_path / "whole").folder)
    out, replace, kills = tmp_path / "out", os.replace, 0
    for number in range(1000):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail_at(number, replace, Killed(), after))
            try:
                prepare_corpus(spec_of(folder), out=tmp_path / f"{number}")
                break
            except Killed:
                kills += 1
        assert contents(prepare_corpus(spec_of(folder), out=tmp_path / f"{number}").folder) == whole
    assert kills >= 15
    for _ in range(100):  # and killed again and again, at the rename that makes one more shard count
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail_at(8, replace, Killed(), after=True))
            try:
                prepare_corpus(spec_of(folder), out=out)
                break
            except Killed:
                continue
    assert contents(out) == whole


def test_finished_shards_are_not_tokenised_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", fail_at(0, lambda *_: None, Killed(), after=False))
        with pytest.raises(Killed):
            prepare_corpus(spec_of(folder), out=tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("train-*.bin")}
    assert before
    monkeypatch.setattr("qklab.data.scan.scan_source", lambda *_: pytest.fail("read and planned again"))
    prepare_corpus(spec_of(folder), out=tmp_path / "out")
    assert before.items() <= {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("train-*.bin")}.items()


def test_an_unfinished_shard_that_was_damaged_is_made_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(prepare_corpus(spec_of(folder), out=tmp_path / "whole").folder)
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", fail_at(0, lambda *_: None, Killed(), after=False))
        with pytest.raises(Killed):
            prepare_corpus(spec_of(folder), out=tmp_path / "out")
    shard = tmp_path / "out" / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2] + b"zz")
    (tmp_path / "out" / ".train-00001.bin.1.tmp").write_bytes(b"half-writ")
    assert contents(prepare_corpus(spec_of(folder), out=tmp_path / "out").folder) == whole


def test_a_source_that_changes_in_between_is_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", fail_at(0, lambda *_: None, Killed(), after=False))
        with pytest.raises(Killed):
            prepare_corpus(spec_of(folder), out=tmp_path / "out")
    with pytest.raises(DataError, match="holds an unfinished corpus of another spec"):
        prepare_corpus(spec_of(folder, valid=0.2), out=tmp_path / "out")
    text = (folder / "a.txt").read_text()
    (folder / "a.txt").write_text(text[:-30] + "x" + text[-29:])
    with pytest.raises(DataError, match="the source has changed since"):
        prepare_corpus(spec_of(folder), out=tmp_path / "out")
    (folder / "a.txt").write_text(text)
    prepare_corpus(spec_of(folder), out=tmp_path / "out").verify()


def test_a_source_that_changes_meanwhile_is_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan_or_resume = preparing.scan_or_resume

    def then_changed(*arguments: Any) -> Any:
        plan = scan_or_resume(*arguments)
        (folder / "a.txt").write_text("something else\n<|endoftext|>\n" + (folder / "a.txt").read_text())
        return plan

    monkeypatch.setattr(preparing, "scan_or_resume", then_changed)
    with pytest.raises(DataError, match="the source has changed since"):
        prepare_corpus(spec_of(folder), out=tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_full_disk_is_one_sentence_and_loses_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(prepare_corpus(spec_of(folder), out=tmp_path / "whole").folder)
    full, fsync = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), os.fsync
    for number in range(0, 40, 3):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_at(number, fsync, full, after=False))
            with pytest.raises(DataError, match="cannot be written: No space left on device; finished shards are kept"):
                prepare_corpus(spec_of(folder), out=tmp_path / str(number))
        assert not list((tmp_path / str(number)).glob(".*.tmp"))
        assert contents(prepare_corpus(spec_of(folder), out=tmp_path / str(number)).folder) == whole


def test_a_folder_that_cannot_be_made_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"out cannot be written: Not a directory"):
        prepare_corpus(spec_of(folder), out=folder / "a.txt" / "out")


def test_a_second_preparation_waits_for_the_first(folder: Path, tmp_path: Path) -> None:
    out, said, hashes = tmp_path / "out", threading.Event(), []

    def second() -> None:
        told = lambda what, done, total: said.set() if "another process is preparing" in what else None  # noqa: E731
        hashes.append(prepare_corpus(spec_of(folder), out=out, progress=told).hash)

    (out / shards.UNFINISHED).mkdir(parents=True)
    thread = threading.Thread(target=second)
    with preparing.lock_folder(out, lambda *_: None):
        thread.start()
        assert said.wait(20)
        assert not hashes
    thread.join(20)
    assert hashes == [prepare_corpus(spec_of(folder), out=out).hash]
    assert not (out / shards.UNFINISHED).exists()


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [flipped, truncated, Path.unlink])
def test_every_damaged_file_is_found(folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    corpus = prepare_corpus(spec_of(folder, tokenizer="bpe", vocab=280), out=tmp_path / "out")
    for path in corpus.folder.iterdir():
        raw = path.read_bytes()
        damage(path)
        with pytest.raises(DataError) as caught:
            Corpus.open(corpus.folder).verify()
        assert path.name in str(caught.value)
        path.write_bytes(raw)
    Corpus.open(corpus.folder).verify()


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

    def start_and_kill(*arguments: str) -> subprocess.Popen[bytes]:
        started.append(start(*arguments))
        if len(started) == 2:
            started[1].kill()
        return started[-1]

    monkeypatch.setattr(workers, "start_worker", start_and_kill)
    with pytest.raises(DataError, match=r"a process that tokenises has ended \(code -9; is memory short\?\)"):
        prepare_corpus(spec_of(folder), out=tmp_path / "out", workers=2)
    assert [process.returncode for process in started] == [-9, -9]


def test_a_tokenizer_that_is_damaged_in_between_is_trained_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(folder, tokenizer="bpe", vocab=300)
    whole = contents(prepare_corpus(spec, out=tmp_path / "whole").folder)
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", fail_at(0, lambda *_: None, Killed(), after=False))
        with pytest.raises(Killed):
            prepare_corpus(spec, out=tmp_path / "out")
    flipped(tmp_path / "out" / "tokenizer.json")
    assert contents(prepare_corpus(spec, out=tmp_path / "out").folder) == whole


def test_the_last_words_of_a_worker_are_passed_on() -> None:
    with pytest.raises(DataError, match=r"a process that trains the tokenizer has ended \(ValueError: invalid literal"):
        workers.train_in_worker([[b"text"]], "many")  # pyright: ignore[reportArgumentType]


PROGRAM = """
    import sys, signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell begins with it ignored
    from qklab.data import DataSpec, prepare as preparing, prepare_corpus, shards
    preparing.FEW_BYTES, preparing.BATCH_BYTES, shards.SHARD_TOKENS = 0, 20_000, 50_000
    told = lambda what, done, total: print(what, done, flush=True)
    prepare_corpus(DataSpec(source=sys.argv[1], vocab=400), out=sys.argv[2], workers=2, progress=told)
"""


@pytest.fixture
def large(tmp_path: Path, documents: Callable[..., list[str]]) -> Path:
    path = tmp_path / "large.txt"
    path.write_text("\n<|endoftext|>\n".join(documents(4000, words=120)))
    return path


def children(parent: int) -> list[int]:
    answer = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in answer.stdout.splitlines()]
    return [int(pid) for pid, above in rows if int(above) == parent]


def running(pids: list[int]) -> list[int]:
    answer = subprocess.run(["ps", "-A", "-o", "pid=,stat="], capture_output=True, text=True, check=True)
    states = {int(line.split()[0]): line.split()[1] for line in answer.stdout.splitlines()}
    return [pid for pid in pids if pid in states and not states[pid].startswith("Z")]


def lines_until(process: subprocess.Popen[str], done: int) -> Iterator[str]:
    assert process.stdout
    for line in process.stdout:
        yield line
        if line.startswith("tokenising") and int(line.split()[1]) >= done:
            return


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_no_worker_and_is_continued(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(large), str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert list(lines_until(process, 300_000))
    workers_of = children(process.pid)
    assert len(workers_of) == 2
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.kill()
    assert process.wait(30) != 0
    deadline = time.monotonic() + 20
    while running(workers_of) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(workers_of)
    assert process.stdout
    process.stdout.close()
    finished = len(list((out / shards.UNFINISHED).glob("train-*.json")))
    assert finished >= 1
    monkeypatch.setattr(shards, "SHARD_TOKENS", 50_000)
    spec = DataSpec(source=str(large), vocab=400)
    assert prepare_corpus(spec, out=out).hash == prepare_corpus(spec, out=tmp_path / "whole").hash
    assert contents(out) == contents(tmp_path / "whole")


MEASURE = """
    import sys
    from qklab.data import DataSpec, prepare_corpus, workers
    def peak(process):
        return next(int(line.split()[1]) for line in open(f"/proc/{process}/status") if line.startswith("VmHWM"))
    stop, before = workers.stop_worker, peak("self")
    def measured(process):
        print(peak(process.pid))
        stop(process)
    workers.stop_worker = measured
    prepare_corpus(DataSpec(source=sys.argv[1], tokenizer=sys.argv[3]), out=sys.argv[2], workers=2)
    print(peak("self") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, documents: Callable[..., list[str]]) -> None:
    path, block = tmp_path / "huge.txt", "\n".join(documents(5000, words=100))
    with path.open("w") as file:
        for i in range(90):
            file.write(f"{i} {block[i:]}\n<|endoftext|>\n")
    assert path.stat().st_size > 115e6
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(path), str(tmp_path / "out"), "bytes"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    *of_workers, grown = (1024 * int(line) for line in answer.stdout.split())
    assert grown < 120e6
    assert len(of_workers) == 2
    assert max(of_workers) < 120e6
