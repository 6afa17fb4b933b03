"""Every file that this package writes is written here.

A file that is replaced is the old version or the new one, never half of one: it is written under another name, flushed
to the disk and renamed. A kill can leave the other name behind; `remove_temporaries` clears a folder of them.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from torch import Tensor

MODE = 0o644


def flush_to_disk(path: Path) -> None:
    """Return once a file's content, or a folder's names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot flush folders
            raise
    finally:
        os.close(descriptor)


@contextmanager
def temporary_name(path: Path) -> Iterator[Path]:
    """A name beside `path`; what the block wrote there becomes `path`, or vanishes if the block fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        flush_to_disk(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    flush_to_disk(path.parent)


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which becomes `path` when the block ends."""
    with temporary_name(path) as temporary, open(temporary, "wb") as file:
        yield file


def write_bytes(path: Path, content: bytes) -> None:
    with replace_file(path) as file:
        file.write(content)


def write_text(path: Path, content: str) -> None:
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> None:
    text = json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def write_tensors(path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """Write contiguous CPU tensors as safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with temporary_name(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:  # what the system said is in its text only
            number = re.search(r"(?:os error|code:) (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        os.chmod(temporary, MODE)  # safetensors lets nobody else read its files


def remove_temporaries(folder: Path) -> None:
    """Delete what processes that were killed while they wrote left in `folder`, which no other process writes to."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def rename_folder(source: Path, target: Path) -> None:
    """Give a folder, whose files are on the disk, another name; `target` may exist only as an empty folder."""
    os.rename(source, target)
    flush_to_disk(target.parent)


def move_file(source: Path, target: Path) -> None:
    """Put a file in the place of `target`, on the same file system."""
    flush_to_disk(source)
    os.replace(source, target)
    flush_to_disk(target.parent)


def copy_file(source: Path, target: Path) -> None:
    """A copy, for reading: it may be half one if this process is killed."""
    shutil.copyfile(source, target)


def copy_folder(source: Path, target: Path, aside: Path) -> None:
    """A copy of a folder without its lock, made at `aside` and then put in the place of `target` in one step."""
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside, ignore=shutil.ignore_patterns("lock"))
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    rename_folder(aside, target)


def link_file(source: Path, target: Path) -> None:
    """The same file by another name; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        copy_file(source, target)


def open_append(path: Path) -> int:
    """A descriptor whose writes go to the end of `path`."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, MODE)


class AppendedFile:
    """A file of lines that only grows; a last line that a crash cut short is ended first, or cut off if it is none."""

    def __init__(self, path: Path):
        self.path = path
        self.descriptor = open_append(path)
        if not ends_with_newline(path):
            content = path.read_bytes()
            begin = content.rfind(b"\n") + 1
            if self.is_whole(content[begin:]):
                self.append_line("")
            else:
                os.ftruncate(self.descriptor, begin)

    def is_whole(self, line: bytes) -> bool:
        """Whether a last line without an end is a line all the same."""
        return True

    def append_line(self, line: str) -> None:
        """The line is on its way to the disk when this returns."""
        data = f"{line}\n".encode()
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError as error:
            error.filename = str(self.path)
            raise

    def flush(self) -> None:
        """Return once everything appended is on the disk."""
        os.fsync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


def ends_with_newline(path: Path) -> bool:
    """Whether a file is empty or ends a line."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 1))
        return file.read(1) in (b"", b"\n")


def lock_file(path: Path) -> int | None:
    """Lock `path`, with this process's id in it; None where another process holds the lock.

    Closing the descriptor frees the lock, and the system does so however this process ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def hash_file(path: Path) -> str:
    """SHA-256, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file_failure(what: str, error: OSError) -> str:
    """A sentence on work, such as a run, that a disk refused."""
    where = f" ({error.filename})" if error.filename else ""
    return (
        f"the {what} stopped because of a file{where}: {describe_os_error(error)}; what was saved before is still "
        "there, mend this and run the same command again."
    )


def describe_os_error(error: OSError) -> str:
    """What the system said, for use in a sentence: "no space left on device"."""
    said = (error.strerror or str(error)).strip()
    return said[:1].lower() + said[1:]
