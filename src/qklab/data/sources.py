"""Where documents come from: files and folders, the Python that runs this, the Hugging Face hub, or your own class.

@register.source("poems")
class Poems(Source): ...      # DataSpec(source="poems") or DataSpec(source="poems:ANYTHING") makes Poems of that name
"""

import os
import re
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from qklab import register
from qklab.data.formats import BESIDE, COMPRESSED, READERS, detect_format, read_documents, split_long_text
from qklab.data.spec import DataError, DataSpec
from qklab.schema import suggest_name

SPLITS = ("train", "valid", "test")
SPLIT_NAME = re.compile(r"(train(?:ing)?|val(?:id(?:ation)?)?|dev|test)(?![a-z])", re.IGNORECASE)
NAMED = 5  # files that are named one by one
SPLIT_STARTS = {"train": "train", "valid": ("val", "dev"), "test": "test"}


class Document(NamedTuple):
    """A document as UTF-8, the split its file belongs to (None: not said), and how far the source has been read."""

    raw: bytes
    split: str | None
    position: int


class Source(ABC):
    """A stream of documents that comes out the same every time until the source changes.

    Documents of the test split come first, then valid, then the rest: what is held out is known before training
    text is read.
    """

    name: str
    size: int  # the last position of a document
    splits: frozenset[str] = frozenset()  # those the source itself keeps apart; empty where it assigns no document
    notes: tuple[str, ...] = ()  # what was left out, for people
    alphabet: list[str] | None = None  # the symbols of documents that are no text but symbols between spaces
    without: ClassVar[dict[str, str]] = dict.fromkeys(  # settings that mean nothing here, and why
        ("column", "encoding", "skip_bad"), "is for files and folders"
    )

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def list_contents(self) -> list[list[Any]]:
        """[name, size, time of change] of everything the source consists of; unchanged list, unchanged source."""

    @abstractmethod
    def read_documents(self) -> Iterator[Document]: ...


def parse_split_name(name: str) -> str | None:
    """The split that a file or folder name such as train.0.txt, val-00.jsonl or test/ says, if any."""
    match = SPLIT_NAME.match(name)
    first = match[1].lower() if match else ""
    return next((split for split, starts in SPLIT_STARTS.items() if first.startswith(starts) and first), None)


def stat_file(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def show_name(name: str) -> str:
    """A file's name as text that can be written and printed; bytes of it that are no UTF-8 become escapes."""
    return os.fsencode(name).decode(errors="backslashreplace")


def enumerate_names(names: list[str]) -> str:
    others = f" and {len(names) - NAMED:,} others" if len(names) > NAMED else ""
    return ", ".join(map(show_name, names[:NAMED])) + others


class Files(Source):
    """A file, or a folder with everything under it that can be read, by name; `skipped` is what cannot."""

    def __init__(self, name: str, root: Path, paths: list[Path], skipped: list[Path], spec: DataSpec):
        super().__init__(name)
        self.spec, self.root = spec, root
        inside = root if root.is_dir() else root.parent
        if skipped:
            left = enumerate_names(sorted(str(path.relative_to(inside)) for path in skipped))
            self.notes = (f"left out of {name}, since they are none of {describe_formats(paths)}: {left}.",)
        if spec.skip_bad:
            paths = self.leave_out_bad(paths, inside)
        named = sorted((path.relative_to(inside).as_posix(), path) for path in paths)
        splits = {relative: parse_split_name(relative) for relative, _ in named}
        named_splits = {split for split in splits.values() if split}
        if "train" not in named_splits or len(named_splits) < 2:
            splits = dict.fromkeys(splits)
        elif None in splits.values():
            stray = next(relative for relative, split in splits.items() if split is None)
            raise DataError(
                f"{root} has files named for their splits, but also {show_name(stray)}; name it train…, valid… or "
                "test…, or move it."
            )
        order = {"test": 0, "valid": 1}
        self.files = sorted(
            ((splits[relative], relative, path) for relative, path in named),
            key=lambda file: (order.get(file[0] or "", 2), file[1]),
        )
        self.size = sum(stat_file(path).st_size for _, _, path in self.files)
        self.splits = frozenset(split for split, _, _ in self.files if split)

    def list_contents(self) -> list[list[Any]]:
        stats = [(relative, stat_file(path)) for _, relative, path in self.files]
        return [[show_name(relative), stat.st_size, stat.st_mtime_ns] for relative, stat in stats]

    def leave_out_bad(self, paths: list[Path], inside: Path) -> list[Path]:
        """Without the files that cannot be read, which the notes name."""
        bad = {path: wrong for path in paths if (wrong := self.find_fault(path)) is not None}
        if len(bad) == len(paths):
            raise DataError(f"none of the {len(paths)} files of {self.name} can be read: {next(iter(bad.values()))}")
        if bad:
            left = enumerate_names(sorted(str(path.relative_to(inside)) for path in bad))
            self.notes += (f"left out of {self.name}, since they cannot be read (--skip-bad): {left}.",)
        return [path for path in paths if path not in bad]

    def find_fault(self, path: Path) -> str | None:
        """Why a file cannot be read."""
        try:
            for _ in read_documents(path, self.spec):
                pass
        except DataError as error:
            return show_name(str(error))
        return None

    def read_documents(self) -> Iterator[Document]:
        before = 0
        for number, (split, _, path) in enumerate(self.files):
            size = stat_file(path).st_size
            try:
                for raw, position in read_documents(path, self.spec):
                    yield Document(raw, split, before + position)
            except DataError as error:
                raise self.name_all_bad(show_name(str(error)), number) from None
            before += size

    def name_all_bad(self, first: str, number: int) -> DataError:
        """The error of the first file that cannot be read, with all others that cannot, so that all are known at
        once."""
        others = [relative for _, relative, path in self.files[number + 1 :] if self.find_fault(path) is not None]
        if not others:
            return DataError(first)
        many = f"{len(others) + 1} of {len(self.files):,} files cannot be read"
        return DataError(f"{first.removesuffix('.')}; {many}; the others are {enumerate_names(others)}.")


@register.source("stdlib")
class Stdlib(Source):
    """The text that Python itself brings: its library's source and documentation, and pydoc's language reference.

    Test folders are left out, because not every installation has them and they hold files that are broken on purpose,
    and so are the generated tables of `encodings` and `lib2to3`, which newer versions do not have.
    """

    skipped = frozenset(
        {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "lib2to3"}
    )

    def __init__(self, name: str = "stdlib"):
        super().__init__(name)
        if name != "stdlib":
            raise DataError(f"the source stdlib takes nothing after its name, but {name} came.")
        self.root = Path(sysconfig.get_path("stdlib"))
        self.files: list[tuple[str, Path]] = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(set(folders) - self.skipped)
            paths = [Path(folder) / name for name in names if name.endswith((".py", ".txt", ".rst"))]
            self.files += [(path.relative_to(self.root).as_posix(), path) for path in paths]
        self.files = sorted(file for file in self.files if file[0] != "pydoc_data/topics.py")
        if not self.files:
            raise DataError(f"this Python keeps no library source in {self.root}; give a file or folder as source.")
        self.size = sum(path.stat().st_size for _, path in self.files)

    def list_contents(self) -> list[list[Any]]:
        return [["python", sys.version, 0], *([name, path.stat().st_size, 0] for name, path in self.files)]

    def read_documents(self) -> Iterator[Document]:
        position = 0
        for _, path in self.files:
            raw = path.read_bytes()
            position += len(raw)
            try:
                raw.decode()
            except UnicodeDecodeError:
                continue
            yield Document(raw, None, position)
        try:
            from pydoc_data.topics import topics
        except ImportError:
            return
        for topic in sorted(topics):
            yield Document(topics[topic].encode(), None, position)


@register.source("hf")
class HuggingFace(Source):
    """A dataset through `datasets`: "hf:NAME/CONFIG", "hf:OWNER/NAME/CONFIG" or "hf:OWNER/NAME"."""

    def __init__(self, name: str):
        super().__init__(name)
        try:
            datasets = import_module("datasets")
        except ImportError:
            raise DataError(f"{name} is read through datasets, which is missing; pip install datasets.") from None
        words = name.removeprefix("hf:").split("/")
        if not 1 <= len(words) <= 3 or not all(words):
            raise DataError(f"a source on the hub is written hf:NAME/CONFIG or hf:OWNER/NAME/CONFIG, but {name} came.")
        # "a/b" may be a dataset and its configuration or an owner and a dataset
        readings = [["/".join(words[:2]), *words[2:]]]
        if len(words) == 2:
            readings.insert(0, words)
        failures: list[str] = []
        for reading in readings:
            try:
                self.tables = self.tables_by_split(datasets.load_dataset(*reading))
                break
            except DataError:
                raise
            except Exception as error:  # whatever the network, the hub or the dataset's own files do
                failures.append(str(error).split("\n")[0])
        else:
            raise DataError(f"{name} cannot be loaded: {'; '.join(dict.fromkeys(failures))}.")
        self.splits = frozenset(self.tables) if len(self.tables) > 1 else frozenset()
        self.size = sum(len(rows) for rows in self.tables.values())

    def tables_by_split(self, found: Any) -> dict[str, Any]:
        tables = {split: found[key] for key in found if (split := parse_split_name(str(key)))}
        if "train" not in tables:
            raise DataError(f"{self.name} has the splits {', '.join(map(str, found))}, but train is needed.")
        for split, rows in tables.items():
            if "text" not in rows.column_names:
                columns = ", ".join(rows.column_names)
                raise DataError(f"{self.name} must have a column 'text', but its split {split} has {columns}.")
        return {split: tables[split] for split in ("test", "valid", "train") if split in tables}

    def list_contents(self) -> list[list[Any]]:
        return [[split, len(rows), str(getattr(rows, "_fingerprint", ""))] for split, rows in self.tables.items()]

    def read_documents(self) -> Iterator[Document]:
        position = 0
        for split, rows in self.tables.items():
            for number, row in enumerate(rows, 1):
                position += 1
                for raw in split_long_text(row["text"], f"row {number} of {self.name}, split {split},"):
                    yield Document(raw, split if self.splits else None, position)


def list_data_folders(data: Path | None) -> list[Path]:
    """Folders of corpora: the one given, then the one QKLAB_DATA names."""
    named = os.environ.get("QKLAB_DATA")
    return ([Path(data)] if data else []) + ([Path(named)] if named else [])


def list_files(root: Path) -> tuple[list[Path], list[Path]]:
    """What of a folder is read, and what is left out; hidden files and folders are neither.

    Formats that stand beside a corpus more often than for one are read where there is no other, of these the one there
    is most of.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error

    kinds: dict[str | None, list[Path]] = {}
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder) / name for name in names if not name.startswith(".")):
            kind = detect_format(path)
            kinds.setdefault(kind[0] if kind is not None else None, []).append(path)
    read = [kind for kind in kinds if kind in READERS]
    if not read:
        beside = sorted(kind for kind in kinds if kind in BESIDE)
        read = [max(beside, key=lambda kind: sum(stat_file(path).st_size for path in kinds[kind]))] if beside else []
    left_out = [path for kind, paths in kinds.items() if kind not in read for path in paths]
    return [path for kind in read for path in kinds[kind]], left_out


def describe_formats(paths: list[Path]) -> str:
    """What is read where these files are: all common formats, or the one of theirs."""
    own = {kind[0] for path in paths if (kind := detect_format(path)) is not None}
    return ", ".join(READERS) if own <= READERS.keys() else f"{', '.join(READERS)} and {', '.join(sorted(own))}"


def find_source_path(name: str, data: Path | None) -> Path | None:
    """The file or folder that a source's name stands for; None where a registered source has that name."""
    if name.partition(":")[0] in register.source:
        return None
    folders = list_data_folders(data)
    tried = [Path(name).expanduser(), *(folder / name for folder in folders)]
    found = next((path for path in tried if os.path.exists(path)), None)  # False, too, for what can be no path
    if found is not None:
        return found
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        raise DataError(f"the folder of corpora {missing} does not exist (given by --data or QKLAB_DATA).")
    known = [*register.source, *sorted(path.name for folder in folders for path in folder.iterdir() if path.is_dir())]
    where = (
        f", nor in {' or '.join(map(str, folders))}" if folders else "; --data or QKLAB_DATA names a folder of corpora"
    )
    raise DataError(f"there is no source {name!r}{suggest_name(name, known)}: no such file or folder here{where}.")


def find_source(name: str, data: Path | None = None, spec: DataSpec | None = None) -> Source:
    """What a source's name stands for; `spec` says how its files are read."""
    spec = DataSpec() if spec is None else spec
    path = find_source_path(name, data)
    if path is None:
        plain, kind = DataSpec(), register.source[name.partition(":")[0]]
        for setting, why in kind.without.items():
            if getattr(spec, setting) != getattr(plain, setting):
                raise DataError(f"{setting} {why}, but the source is {name}; leave it out.")
        return kind(name)
    packed = ", ".join(suffix for suffix in COMPRESSED if suffix)
    kinds = f"{', '.join(READERS | BESIDE)} (each also with {packed})"
    if path.is_dir():
        paths, skipped = list_files(path)
        if not paths:
            raise DataError(f"the folder {path} holds none of {kinds}.")
        return Files(name, path, paths, skipped, spec)
    if detect_format(path) is None:
        raise DataError(f"{path} is none of {kinds}.")
    return Files(name, path, [path], [], spec)
