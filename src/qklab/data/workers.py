"""Tokenising in worker processes: batches go out, come back in the order they went, and few are under way at once.

Workers run `encoder.py` as a program and speak frames over pipes. They need no guarded main module, hold no lock or
file of this process, and end by themselves when it does, however it ends.
"""

import contextlib
import json
import os
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

from qklab.data import encoder
from qklab.data.spec import DataError


def start(task: str, argument: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true" if task == "train" else "false"}
    return subprocess.Popen(
        [sys.executable, "-P", encoder.__file__, task, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            with contextlib.suppress(OSError):  # what was left to write to a worker that is gone
                stream.close()


def ended(process: subprocess.Popen[bytes], task: str) -> DataError:
    """What to say of a process that is gone: its last words, or how it ended."""
    code = process.wait()
    try:
        said = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
    except ValueError:  # closed by `stop`
        said = ""
    reason = said.splitlines()[-1] if said and code > 0 else f"code {code}; is memory short?"
    return DataError(f"a process that {task} has ended ({reason}); run again, finished shards are kept.")


def ask(process: subprocess.Popen[bytes], pieces: list[bytes]) -> list[bytes]:
    """One frame out, one frame back."""
    assert process.stdin
    assert process.stdout
    try:
        encoder.write_frame(process.stdin, pieces)
        answer = encoder.read_frame(process.stdout)
    except (OSError, ValueError):  # ValueError: the pipe was closed on this side, by `stop`
        answer = None
    if answer is None:
        raise ended(process, "tokenises")
    return answer


class Workers:
    """Encodes batches of texts in `count` processes, or with count=1 in this one."""

    def __init__(self, definition: Path, count: int, dtype: np.dtype, encode: Callable[[list[str]], list[np.ndarray]]):
        self.dtype, self.encode, self.count = dtype, encode, count
        self.processes = [start("encode", str(definition)) for _ in range(count if count > 1 else 0)]
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self.processes:
            self.idle.put(process)
        self.threads = ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            stop(process)
        self.threads.shutdown(cancel_futures=True)

    def tokens(self, texts: list[bytes]) -> list[np.ndarray]:
        process = self.idle.get()
        try:
            answer = ask(process, texts)
        finally:
            self.idle.put(process)
        return [np.frombuffer(raw, self.dtype) for raw in answer]

    def map(self, batches: Iterable[tuple[Any, list[bytes]]]) -> Iterator[tuple[Any, list[np.ndarray]]]:
        """(label, tokens) for each batch (label, texts), in order."""
        if not self.processes:
            for label, texts in batches:
                yield label, self.encode([text.decode() for text in texts])
            return
        under_way: deque[tuple[Any, Future[list[np.ndarray]]]] = deque()
        for label, texts in batches:
            under_way.append((label, self.threads.submit(self.tokens, texts)))
            if len(under_way) > 2 * self.count:
                label, future = under_way.popleft()
                yield label, future.result()
        for label, future in under_way:
            yield label, future.result()


def trained_definition(texts: Iterable[list[bytes]], vocab: int) -> dict[str, Any]:
    """The definition of a BPE trained on batches of texts, in a process of its own, where its threads stay."""
    process = start("train", str(vocab))
    try:
        assert process.stdin
        assert process.stdout
        try:
            for batch in texts:
                encoder.write_frame(process.stdin, batch)
            process.stdin.close()
            answer = encoder.read_frame(process.stdout)
        except OSError:
            answer = None
        if answer is None:
            raise ended(process, "trains the tokenizer")
        return json.loads(answer[0])
    finally:
        stop(process)
