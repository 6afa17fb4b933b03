"""Tokenising in worker processes: batches go out, come back in the order they went, and few are under way at once.

Not multiprocessing's pools: they import the caller's main module again, which need not be guarded, and their workers
outlive a parent that is killed. These are programs that read a pipe, and end when it does.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from qklab.data.spec import DataError
from qklab.data.tokenizer import Tokenizer, train_bpe


def start_worker(task: Callable[[str], None], argument: str) -> subprocess.Popen[bytes]:
    """A process that runs a task of this module."""
    program = (  # Ctrl-C is for the process that feeds this one
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"from {__name__} import {task.__name__} as task; task(sys.argv[1])"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "TOKENIZERS_PARALLELISM": "true" if task is serve_training else "false",
    }
    command = [sys.executable, "-P", "-c", program, argument]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)


def serve_training(vocab: str) -> None:
    """In a worker: lists of texts → the definition of a BPE trained on them."""
    texts = (str(text, "utf-8") for batch in receive_all() for text in batch)
    pickle.dump(train_bpe(texts, int(vocab)), sys.stdout.buffer)


def serve_encoding(tokenizer: str) -> None:
    """In a worker: each list of texts → the tokens of each."""
    encode = Tokenizer.load(tokenizer).encode
    for texts in receive_all():
        pickle.dump(encode([str(text, "utf-8") for text in texts]), sys.stdout.buffer)
        sys.stdout.buffer.flush()


def receive_all() -> Iterator[list[bytes]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(sys.stdin.buffer)


def stop_worker(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            with contextlib.suppress(OSError):  # what was left to write to a worker that is gone
                stream.close()


def ask_worker(process: subprocess.Popen[bytes], batches: Iterable[list[bytes]], task: str, last: bool = False) -> Any:
    """Batches of texts out, one answer back."""
    assert process.stdin
    assert process.stdout
    try:
        for batch in batches:
            pickle.dump(batch, process.stdin)
        process.stdin.close() if last else process.stdin.flush()
        return pickle.load(process.stdout)
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):  # ValueError: the pipe was closed by `stop_worker`
        raise describe_end(process, task) from None


def describe_end(process: subprocess.Popen[bytes], task: str) -> DataError:
    """What to say of a worker that is gone: its last words, or how it ended."""
    code = process.wait()
    try:
        said = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
    except ValueError:  # closed by `stop_worker`
        said = ""
    reason = said.splitlines()[-1] if said and code > 0 else f"code {code}; is memory short?"
    return DataError(f"a process that {task} has ended ({reason}); run again, finished shards are kept.")


def train_in_worker(batches: Iterable[list[bytes]], vocab: int) -> dict[str, Any]:
    """The definition of a BPE trained on batches of texts, in a process of its own, where its threads stay."""
    process = start_worker(serve_training, str(vocab))
    try:
        return ask_worker(process, batches, "trains the tokenizer", last=True)
    finally:
        stop_worker(process)


class EncoderPool:
    """Encodes batches of texts in `count` processes, or with count=1 in this one."""

    def __init__(self, tokenizer: Path, count: int):
        self.count, self.tokenizer = count, Tokenizer.load(tokenizer)
        self.processes = [start_worker(serve_encoding, str(tokenizer)) for _ in range(count if count > 1 else 0)]
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self.processes:
            self.idle.put(process)
        self.threads = ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            stop_worker(process)
        self.threads.shutdown(cancel_futures=True)

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        if not self.processes:
            return self.tokenizer.encode([str(text, "utf-8") for text in texts])
        process = self.idle.get()
        try:
            return ask_worker(process, [texts], "tokenises")
        finally:
            self.idle.put(process)

    def map(self, batches: Iterable[tuple[Any, list[bytes]]]) -> Iterator[tuple[Any, list[np.ndarray]]]:
        """(label, tokens) for each batch (label, texts), in order."""
        under_way: deque[tuple[Any, Future[list[np.ndarray]]]] = deque()
        for label, texts in batches:
            under_way.append((label, self.threads.submit(self.encode, texts)))
            if len(under_way) > 2 * self.count:
                label, future = under_way.popleft()
                yield label, future.result()
        for label, future in under_way:
            yield label, future.result()
