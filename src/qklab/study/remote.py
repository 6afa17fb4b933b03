"""Files at a URL, on any filesystem that fsspec or one of its plugins knows, with patience for those that fail."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from qklab.runs.files import describe_os_error
from qklab.study.spec import StudyError

PATIENCE = 120.0  # seconds that a store is tried for
PAUSE, LONGEST = 0.5, 15.0  # seconds between tries: the first, and what doubling leads to
T = TypeVar("T")


class Store:
    """Files under a URL, by name. What fails is tried again for a while, then told in one sentence."""

    def __init__(self, url: str, say: Callable[[str], None]):
        self.url, self.say = url.rstrip("/"), say
        try:
            self.files, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise StudyError(f"{url} cannot be used: {describe_os_error(OSError(str(error))).rstrip('.')}.") from None
        self.root = str(root)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def patiently(self, what: str, act: Callable[[], T]) -> T:
        until, pause = time.monotonic() + PATIENCE, PAUSE
        while True:
            try:
                return act()
            except Exception as error:  # every store has errors of its own
                why = describe_os_error(error) if isinstance(error, OSError) else str(error)
                why = (why.strip().splitlines() or [type(error).__name__])[0].rstrip(".") or type(error).__name__
                if isinstance(error, NotImplementedError) or time.monotonic() + pause > until:
                    raise StudyError(
                        f"{what} {self.url} failed: {why}; what was saved is safe, mend this and run the same command "
                        "again."
                    ) from error
                if pause == PAUSE:
                    self.say(f"{what} {self.url} failed ({why}); it is tried again.")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)

    def sizes(self, under: str) -> dict[str, int]:
        """The size of every file under a folder, by its name in that folder."""
        folder = self.path(under)

        def act() -> dict[str, int]:
            self.files.invalidate_cache()  # others write, too
            found: Any = self.files.find(folder, detail=True)
            return {str(path).removeprefix(folder).lstrip("/"): info["size"] for path, info in found.items()}

        return self.patiently(f"listing {under} in", act)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""

        def act() -> bytes | None:
            try:
                return bytes(self.files.cat_file(self.path(name)))
            except FileNotFoundError:
                return None

        return self.patiently(f"reading {name} from", act)

    def write(self, name: str, content: bytes | Path) -> None:
        """Return once all of the content has arrived."""
        path = self.path(name)
        size = content.stat().st_size if isinstance(content, Path) else len(content)

        def send() -> None:
            if isinstance(content, Path):
                self.files.put_file(str(content), path)
            else:
                self.files.pipe_file(path, content)

        def act() -> None:
            try:
                send()
            except FileNotFoundError:  # stores with real folders; a bucket is never made
                if not self.files.exists(path[: path.find("/", 1)]):
                    raise
                self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
                send()
            self.files.invalidate_cache()
            if (came := self.files.size(path)) not in (None, size):
                raise OSError(f"only {came:,} of {size:,} bytes of {name} arrived")

        self.patiently(f"writing {name} to", act)

    def bring(self, name: str, to: Path, size: int) -> None:
        def act() -> None:
            self.files.get_file(self.path(name), str(to))
            if (came := to.stat().st_size) != size:
                raise OSError(f"only {came:,} of {size:,} bytes of {name} came")

        to.parent.mkdir(parents=True, exist_ok=True)
        self.patiently(f"reading {name} from", act)

    def delete(self, name: str, first: str = "") -> None:
        """Delete a file, or a folder with one of its files first."""

        def act() -> None:
            self.files.invalidate_cache()
            if first:
                with suppress(FileNotFoundError):
                    self.files.rm_file(self.path(f"{name}/{first}"))
            with suppress(FileNotFoundError):
                self.files.rm(self.path(name), recursive=bool(first))

        self.patiently(f"deleting {name} from", act)
