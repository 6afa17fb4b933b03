"""How far, how well, how fast, how long still: one live line on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class Display:
    """What a run tells people. This one tells nothing: for ranks other than the first, and for callers that only want
    the result."""

    live = False  # whether someone watches

    def say(self, sentence: str) -> None: ...

    def warn(self, sentence: str) -> None:
        """Something is wrong that the run goes on in spite of: told also where all else is kept quiet."""
        self.say(sentence)

    def show(self, done: float, line: str) -> None: ...

    def close(self) -> None: ...


class QuietDisplay(Display):
    """Tells what is wrong and nothing else."""

    def warn(self, sentence: str) -> None:
        print(sentence, file=sys.stderr)


class Terminal(Display):
    """A bar that is redrawn in place; on a pipe or in a log file a plain line every `every` seconds instead."""

    live = True

    def __init__(self, console: Console | None = None, every: float = 10.0):
        self.console = console or Console(file=sys.stderr, soft_wrap=True, highlight=False)
        self.every, self.shown = every, -float("inf")
        self.full = False
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
        elif (done >= 1 and not self.full) or time.monotonic() - self.shown >= self.every:
            self.shown, self.full = time.monotonic(), done >= 1
            self.console.print(f"{done:4.0%}  {line}", markup=False)

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


def describe_step(step: int, steps: int | None, loss: float, tokens_per_second: float, left: float | None) -> str:
    """The line of a training run."""
    of = f"/{steps:,}" if steps is not None else ""
    still = f" · {format_duration(left)} left" if left is not None else ""
    speed = f" · {tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
    return f"step {step:,}{of} · loss {loss:.3f}{speed}{still}"
