"""Headless Chromium over its debugging pipe: a page, what it asked for, what went wrong in it."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run", "--mute-audio"),
    "--remote-debugging-pipe",
)
FRAMES = "await new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)));"
# the pipe's ends become descriptors 3 and 4, where Chromium expects them
LAUNCH = """
import os, sys
ends = [os.dup(int(end)) for end in sys.argv[1:3]]
high = [__import__("fcntl").fcntl(end, 0, 20) for end in ends]
os.dup2(high[0], 3), os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page at a time."""

    def __init__(self, profile: Path, patience: float = 60.0):
        binary = chromium()
        assert binary is not None
        self.patience, self.number, self.buffer = patience, 0, b""
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        self.log = open(profile.with_suffix(".log"), "wb")  # noqa: SIM115
        launch = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out)]
        browse = [binary, *FLAGS, f"--user-data-dir={profile}"]
        ends = (theirs_in, theirs_out)
        self.process = subprocess.Popen([*launch, *browse], pass_fds=ends, stdout=self.log, stderr=self.log)
        os.close(theirs_in)
        os.close(theirs_out)
        self.target: str | None = None
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser, or the page if there is one, and wait for the answer; events on the way are kept."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.patience
        while True:
            answer = self.receive(until)
            if answer is None:
                raise TimeoutError(f"no answer to {method} within {self.patience:g} s")
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def receive(self, until: float) -> dict[str, Any] | None:
        """The next message, kept among the events if it is one; None if there is none in time."""
        while b"\0" not in self.buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.into], [], [], left)[0]:
                return None
            piece = os.read(self.into, 1 << 20)
            if not piece:
                said = Path(self.log.name).read_text(errors="replace")[-800:]
                raise RuntimeError(f"the browser ended; it said: {said}")
            self.buffer += piece
        line, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(line)
        if "method" in message and message.get("sessionId") == self.session:
            self.events.append(message)
        return message

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> float:
        """Load a page in a new tab instead of the one before; the seconds until it had loaded and drawn."""
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if self.target is not None:
            self.call("Target.closeTarget", targetId=self.target)
        self.target = target
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.dark(dark)
        self.events = []
        began = time.monotonic()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            if self.receive(began + self.patience) is None:
                raise TimeoutError(f"{url} did not load within {self.patience:g} s")
        self.settle()
        return time.monotonic() - began

    def show_all(self, url: str, **how: Any) -> None:
        """Load a page and scroll through it, as a reader would, so that every figure comes into view."""
        self.open(url, **how)
        self.run("sessionStorage.clear()")
        self.scroll_through()

    def scroll_through(self) -> None:
        self.run(
            "for (const f of document.querySelectorAll('figure')) { f.scrollIntoView({behavior: 'instant'});"
            f" {FRAMES} }} scrollTo({{top: 0, behavior: 'instant'}})"
        )
        self.settle()

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def dark(self, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def settle(self) -> None:
        """Two frames later, so that what was asked for is drawn."""
        self.run(FRAMES)

    def run(self, script: str) -> Any:
        """The value of `return …` in the page; `await` is fine."""
        expression = f"(async () => {{ {script} }})()"
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", {}).get("description", found)))
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.settle()

    def key(self, name: str) -> None:
        code = {"ArrowRight": 39, "Escape": 27, "Tab": 9, "Enter": 13}[name]
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            own = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **own)

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    @property
    def requests(self) -> list[str]:
        """The addresses asked for, but for those that are themselves the content."""
        urls = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    @property
    def complaints(self) -> list[str]:
        """Exceptions, console errors and warnings, and what the browser itself logged as an error."""
        found: list[str] = []
        for event in self.events:
            about = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(about["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                found.append(str(about["args"]))
            elif event["method"] == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                found.append(str(about["entry"]))
        return found

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self.out)  # Chromium ends when its pipe does
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.into)
        self.log.close()
