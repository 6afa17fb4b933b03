"""How far a preparation is: a live line on a terminal, a plain line now and then elsewhere, or a function of yours."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

PLAIN_EVERY = 10.0


class Progress:
    """`show` is True, False or a function of (what is done, bytes done, bytes in all; 0: not known)."""

    def __init__(self, show: bool | Callable[[str, int, int], None]):
        self.call = show if callable(show) else None
        self.live: Any = None
        self.tasks: dict[str, Any] = {}
        self.plain = show is True and not sys.stderr.isatty()
        self.begun: dict[str, tuple[float, int]] = {}
        self.last = 0.0
        if show is True and not self.plain:
            from rich import progress
            from rich.console import Console

            self.live = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def say(self, sentence: str) -> None:
        if self.live:
            self.live.console.print(sentence, highlight=False)
        elif self.plain:
            print(sentence, file=sys.stderr, flush=True)
        elif self.call:
            self.call(sentence, 0, 0)

    def update(self, what: str, done: int, total: int) -> None:
        if self.call:
            self.call(what, done, total)
        elif self.live:
            if what not in self.tasks:
                self.tasks[what] = self.live.add_task(what, total=total or None)
            self.live.update(self.tasks[what], completed=done)
        elif self.plain:
            self._line(what, done, total)

    def _line(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        begun, done_before = self.begun.setdefault(what, (now, done))  # what an earlier attempt did tells no rate
        if now == begun or now - max(self.last, begun) < PLAIN_EVERY:
            return
        self.last = now
        rate = (done - done_before) / (now - begun)
        left = f" of {total / 1e6:.0f} MB, about {(total - done) / rate:.0f} s left" if total and rate else " MB"
        print(f"{what}: {done / 1e6:.0f}{left}", file=sys.stderr, flush=True)
