"""Ctrl-C and SIGTERM as a request to stop at the next safe place; a second one stops at once."""

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """`with StopRequest() as stop:` sets `stop.came` to the signal's name instead of ending the process."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.came: str | None = None
        self.previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}

    def __exit__(self, *_: object) -> None:
        self._restore()
