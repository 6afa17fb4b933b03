"""How far a preparation is: a live line on a terminal, a plain line now and then elsewhere, or a function of yours."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_EVERY = 10.0
ReportProgress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in all; a sentence, 0, 0


@contextmanager
def open_progress(show: bool | ReportProgress) -> Iterator[ReportProgress]:
    """`show` itself where it is a function; True shows progress on stderr."""
    if callable(show):
        yield show
    elif not show:
        yield lambda what, done, total: None
    elif not sys.stderr.isatty():
        yield PlainProgress()
    else:
        with show_bars() as report:
            yield report


@contextmanager
def show_bars() -> Iterator[ReportProgress]:
    from rich import progress
    from rich.console import Console

    columns = (progress.BarColumn, progress.DownloadColumn, progress.TransferSpeedColumn, progress.TimeRemainingColumn)
    words = progress.TextColumn("{task.description}")
    with progress.Progress(
        words, *(column() for column in columns), console=Console(stderr=True), transient=True
    ) as bars:
        tasks: dict[str, progress.TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if not done and not total:
                bars.console.print(what, highlight=False)
                return
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done)

        yield report


class PlainProgress:
    """Lines on stderr, with a rate and the time that is left."""

    def __init__(self) -> None:
        self.begun: dict[str, tuple[float, int]] = {}
        self.last = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if not done and not total:
            print(what, file=sys.stderr, flush=True)
            return
        now = time.monotonic()
        begun, done_before = self.begun.setdefault(what, (now, done))  # what an earlier attempt did tells no rate
        if now == begun or now - max(self.last, begun) < PLAIN_EVERY:
            return
        self.last = now
        rate = (done - done_before) / (now - begun)
        left = f" of {total / 1e6:.0f} MB, about {(total - done) / rate:.0f} s left" if total and rate else " MB"
        print(f"{what}: {done / 1e6:.0f}{left}", file=sys.stderr, flush=True)
