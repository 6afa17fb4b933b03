"""The report on 127.0.0.1 while runs are going on: built again when something was recorded, and the page reloads."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from qklab.report.build import render_report
from qklab.report.data import gather_data
from qklab.report.maps import MapCache
from qklab.runs.directory import RunError
from qklab.runs.files import describe_os_error
from qklab.runs.signals import StopRequest

SHARE = 30
WATCHED = ("study.json", "run.json", "summary.json", "metrics.jsonl")


class ReportServer:
    """A server of the report on what lies at `paths`, looked at every `every` seconds."""

    def __init__(self, paths: Sequence[Path], port: int, every: float = 2.0):
        self.paths, self.every, self.maps = [Path(path) for path in paths], every, MapCache()
        self.version, self.page = "", b""
        self.seen: tuple[object, ...] = ()
        self.stop = threading.Event()
        self.refresh()
        try:
            self.server = ThreadingHTTPServer(("127.0.0.1", port), self.handler())
        except (OSError, OverflowError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else "there is no such port"
            raise RunError(f"port {port} cannot be served on: {why}; choose another with --port.") from None
        self.server.daemon_threads = True
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self.server.serve_forever, self.watch)]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/"

    def refresh(self) -> bool:
        """Build the page anew if anything was recorded since; whether it was."""
        now = tuple(sorted(list_file_stamps(self.paths)))
        if now == self.seen:
            return False
        page = render_report(gather_data(self.paths, self.maps), watch=self.every).encode()
        self.page, self.seen = page, now
        self.version = str(hash(now))
        return True

    def watch(self) -> None:
        """Look again and again, but spend no more than a thirtieth of a core on it: the runs need the machine."""
        rest = self.every
        while not self.stop.wait(rest):
            began = time.monotonic()
            try:
                self.refresh()
            except (ValueError, OSError):  # a file that is being written: the page stays as it was until the next look
                continue
            finally:
                rest = max(self.every, SHARE * (time.monotonic() - began))

    def handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers = {"/": ("text/html", server.page), "/version": ("text/plain", server.version.encode())}
                host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
                if self.path not in answers or host not in ("127.0.0.1", "localhost"):
                    self.send_error(404)
                    return
                kind, content = answers[self.path]
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None: ...

        return Handler

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop.set()
        self.server.shutdown()
        self.server.server_close()
        for thread in self.threads:
            thread.join()


def list_file_stamps(paths: Sequence[Path]) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of everything whose change is news."""
    for path in paths:
        for folder, below, names in os.walk(path):
            if "run.json" in names:
                below[:] = [name for name in below if name == "probes"]
            for name in names:
                if name in WATCHED or folder.endswith("probes"):
                    full = os.path.join(folder, name)
                    try:
                        stat = os.stat(full)
                    except OSError:
                        continue
                    yield full, stat.st_size, stat.st_mtime_ns


def serve_report(paths: Sequence[Path], port: int) -> None:
    """Serve the report until Ctrl-C."""
    with ReportServer(paths, port) as server:
        print(f"The report is at {server.address} and follows the runs; Ctrl-C ends it.")
        with StopRequest() as stop:
            while stop.came is None:
                time.sleep(0.2)
        print("The report is no longer served.")
