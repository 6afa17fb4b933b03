"""Ctrl-C and SIGTERM as a request to stop at the next safe place; a second one stops at once."""

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def replace_handlers(
    handler: Callable[[int, FrameType | None], None], signals: Sequence[signal.Signals] = SIGNALS
) -> Callable[[], None]:
    """Let signals call `handler` until what is given back is called; only in the main thread, which alone can."""
    listens = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in signals} if listens else {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    return restore


class StopRequest:
    """`with StopRequest() as stop:` sets `stop.came` to the signal's name instead of ending the process."""

    came: str | None = None

    def __enter__(self) -> "StopRequest":
        self.restore = replace_handlers(self.note)
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(number).name
        self.restore()

    def __exit__(self, *_: object) -> None:
        self.restore()
