"""Files at a URL, on any filesystem that fsspec or one of its plugins knows. What fails is told in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from qklab.runs.files import describe_os_error
from qklab.study.spec import StudyError


class StoreError(StudyError):
    """A store that refused; it may not the next time."""


class Store:
    """Files under a URL, by name."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        try:
            self.files, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise StudyError(f"{url} cannot be used: {describe_os_error(OSError(str(error))).rstrip('.')}.") from None
        self.root = str(root)

    @contextmanager
    def explain(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # every store has errors of its own
            why = describe_os_error(error) if isinstance(error, OSError) else str(error)
            why = (why.strip().splitlines() or [type(error).__name__])[0].rstrip(".") or type(error).__name__
            raise StoreError(
                f"{what} {self.url} failed: {why}; what was saved is safe, mend this and run the same command again."
            ) from error

    def list_sizes(self, folder: str) -> dict[str, int]:
        """The size of every file under a folder, by its name in that folder."""
        path = f"{self.root}/{folder}"
        with self.explain(f"listing {folder} in"):
            self.files.invalidate_cache()  # others write, too
            found: Any = self.files.find(path, detail=True)
            return {str(name).removeprefix(path).lstrip("/"): info["size"] for name, info in found.items()}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        with suppress(FileNotFoundError), self.explain(f"reading {name} from"):
            return bytes(self.files.cat_file(f"{self.root}/{name}"))
        return None

    def download(self, name: str, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), self.explain(f"reading {name} from"):
            self.files.get_file(f"{self.root}/{name}", str(to))

    def write(self, name: str, content: bytes | Path) -> None:
        path = f"{self.root}/{name}"

        def send() -> None:
            if isinstance(content, Path):
                self.files.put_file(str(content), path)
            else:
                self.files.pipe_file(path, content)

        with self.explain(f"writing {name} to"):
            try:
                send()
            except FileNotFoundError as error:  # stores with real folders; a bucket is never made
                if not self.files.exists(path[: path.find("/", 1)]):
                    raise OSError(str(error)) from error
                self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
                send()

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), self.explain(f"deleting {name} from"):
            self.files.rm_file(f"{self.root}/{name}")
