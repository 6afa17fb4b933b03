"""How far, how well, how fast, how long still: one live line on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

EVERY = 10.0  # seconds between plain lines


class Display:
    """What a run tells people. This one tells nothing: for ranks other than the first, and for callers that only want
    the result."""

    live = False  # whether someone watches

    def say(self, sentence: str) -> None: ...

    def warn(self, sentence: str) -> None:
        """Something is wrong that the run goes on in spite of: told also where all else is kept quiet."""
        self.say(sentence)

    def show(self, done: float, line: str) -> None: ...

    def report_bytes(self, what: str, done: int, total: int) -> None:
        """How many bytes a preparation is through with; what it has to say where both numbers are 0."""
        if not done and not total:
            self.say(what)

    def close(self) -> None: ...


class QuietDisplay(Display):
    """Tells what is wrong and nothing else."""

    def warn(self, sentence: str) -> None:
        print(sentence, file=sys.stderr)


class Terminal(Display):
    """A bar that is redrawn in place; on a pipe or in a log file a plain line every ten seconds instead."""

    live = True

    def __init__(self) -> None:
        self.console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        self.shown = -float("inf")
        self.full = False
        self.begun: dict[str, tuple[float, int]] = {}
        self.bar: Progress | None = None
        self.task: Any = None

    def say(self, sentence: str) -> None:
        (self.bar.console if self.bar else self.console).print(sentence, markup=False)

    def show(self, done: float, line: str) -> None:
        if self.console.is_terminal:
            if self.bar is None:
                self.bar = Progress(BarColumn(20), TextColumn("{task.description}"), console=self.console)
                self.task = self.bar.add_task("", total=1.0)
                self.bar.start()
            self.bar.update(self.task, completed=done, description=line)
        elif (done >= 1 and not self.full) or time.monotonic() - self.shown >= EVERY:
            self.shown, self.full = time.monotonic(), done >= 1
            self.console.print(f"{done:4.0%}  {line}", markup=False)

    def report_bytes(self, what: str, done: int, total: int) -> None:
        super().report_bytes(what, done, total)
        if not done and not total:
            return
        now = time.monotonic()
        begun, before = self.begun.setdefault(what, (now, done))  # what an earlier attempt did tells no rate
        known = total and done > before
        left = f", {format_duration((now - begun) * (total - done) / (done - before))} left" if known else ""
        of = f" of {total / 1e6:.0f}" if total else ""
        self.show(done / max(1, total), f"{what}: {done / 1e6:.0f}{of} MB{left}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def format_duration(seconds: float) -> str:
    """ "42 s", "3 min 20 s", "5 h 7 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
