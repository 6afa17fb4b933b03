"""Files of documents as streams: .txt, .jsonl and .parquet, plain or compressed, never whole in memory (.json is).

Every reader yields documents as valid UTF-8 bytes. One longer than `LONGEST` goes on as a new document, after a line
break where there is one, so that memory stays bounded.
"""

import contextlib
import csv
import gzip
import io
import json
import lzma
import tempfile
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from qklab.data.spec import DataError, DataSpec

LONGEST = 2**24
LARGEST_JSON = 2**28
ADVICE = "say which encoding it has (--encoding), or leave such files out (--skip-bad)"
MARK = b"<|endoftext|>"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_zstandard(raw: BinaryIO, path: Path) -> BinaryIO:
    with contextlib.suppress(ImportError):
        return import_module("compression.zstd").ZstdFile(raw)  # part of Python 3.14
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        raise DataError(f"{path} is read through zstandard, which is missing; pip install zstandard.") from None
    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)


COMPRESSED: dict[str, Callable[[BinaryIO, Path], Any]] = {
    "": lambda raw, path: raw,
    ".gz": lambda raw, path: gzip.GzipFile(fileobj=raw),
    ".xz": lambda raw, path: lzma.LZMAFile(raw),  # noqa: SIM115
    ".zst": open_zstandard,
}


def check_utf8(raw: bytes, path: Path, offset: int) -> bytes:
    """`raw` itself where it is UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(f"{path} is not UTF-8 at byte {at}; {ADVICE}.") from None
    return raw


def count_whole_characters(raw: bytes) -> int:
    """How many bytes of `raw` end with a whole character, where `raw` was cut anywhere."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte & 0b1100_0000 != 0b1000_0000:  # the first byte of the last character, whose high bits tell its length
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(raw) - back if length > back else len(raw)
    return len(raw)


class ReencodedStream:
    """The lines of a file of text in another encoding, as UTF-8."""

    def __init__(self, stream: BinaryIO, path: Path, encoding: str):
        self.text, self.path, self.encoding = io.TextIOWrapper(stream, encoding, newline=""), path, encoding

    def readline(self, size: int = -1) -> bytes:
        try:
            return self.text.readline(size).encode()
        except UnicodeError as error:
            raise DataError(f"{self.path} is not {self.encoding}: {error}; {ADVICE}.") from None

    def read(self, size: int = -1) -> bytes:
        return b"".join(iter(self.readline, b"")) if size < 0 else self.readline(size)


def read_txt(stream: BinaryIO, path: Path, column: str = "") -> Iterator[bytes]:
    """Documents of a .txt: a line `<|endoftext|>` ends one; without such a line the file is one document."""
    lines: list[bytes] = []
    size = offset = 0  # bytes in `lines`; where in the file they begin
    line_begins = True
    for line in iter(lambda: stream.readline(LONGEST), b""):
        if not offset and not lines and line.startswith(BYTE_ORDER_MARK):
            line, offset = line[3:], 3
        if line_begins and line.rstrip(b"\r\n") == MARK:
            raw = b"".join(lines)
            yield check_utf8(raw.removesuffix(b"\n").removesuffix(b"\r"), path, offset)
            offset += size + len(line)
            lines, size = [], 0
            continue
        line_begins = line.endswith(b"\n")
        if size + len(line) > LONGEST:
            raw = b"".join(lines)
            cut = count_whole_characters(raw)
            yield check_utf8(raw[:cut], path, offset)
            offset += cut
            lines, size = [raw[cut:]], len(raw) - cut
        lines.append(line)
        size += len(line)
    if lines:
        yield check_utf8(b"".join(lines), path, offset)


def split_long_text(text: object, where: str, column: str = "text") -> Iterator[bytes]:
    """A text from a table as one document, or several where it is longer than `LONGEST`."""
    if not isinstance(text, str):
        raise DataError(f"{where} must have a string {column!r}, but {type(text).__name__} came.")
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds half a surrogate pair at character {error.start}, which is no text.") from None
    while len(raw) > LONGEST:
        line_end = raw.rfind(b"\n", 0, LONGEST) + 1
        cut = line_end or count_whole_characters(raw[:LONGEST])
        yield raw[:cut]
        raw = raw[cut:]
    yield raw


def take_column(row: object, where: str, column: str) -> object:
    """The text of a row; a row that is a text stands for itself."""
    if isinstance(row, dict) and column in row:
        return row[column]
    came = f"the fields {', '.join(map(str, row)) or 'none'}" if isinstance(row, dict) else type(row).__name__
    raise DataError(
        f"{where} must be an object with a string field {column!r}, but {came} came; say which field is the text "
        "(--column)."
    )


def read_jsonl(stream: BinaryIO, path: Path, column: str = "text") -> Iterator[bytes]:
    """Documents of a .jsonl: one object a line with a string field `column`; blank lines are skipped."""
    for number, line in enumerate(iter(stream.readline, b""), 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 at byte {error.start} of the line; {ADVICE}.") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is no JSON ({error}); each line must be an object with {column!r}.") from None
        yield from split_long_text(take_column(row, where, column), where, column)


def read_json(stream: BinaryIO, path: Path, column: str = "text") -> Iterator[bytes]:
    """Documents of a .json: texts, or objects with a string field `column`, in a list; or one such object."""
    raw = stream.read(LARGEST_JSON + 1)
    if len(raw) > LARGEST_JSON:
        raise DataError(f"{path} is larger than {LARGEST_JSON >> 20} MiB, too large for a .json; make a .jsonl of it.")
    try:
        content = json.loads(raw.removeprefix(BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; {ADVICE}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON ({error}).") from None
    for number, row in enumerate(content if isinstance(content, list) else [content], 1):
        where = f"entry {number} of {path}"
        yield from split_long_text(row if isinstance(row, str) else take_column(row, where, column), where, column)


def read_csv(stream: BinaryIO, path: Path, column: str = "text") -> Iterator[bytes]:
    """Documents of a .csv or .tsv, whose first row names its columns: the column `column`, or its only one."""
    csv.field_size_limit(2**31 - 1)
    tabs = [suffix.lower() for suffix in path.suffixes][-2:]
    lines = decode_lines(stream, path)
    try:
        rows = csv.reader(lines, delimiter="\t" if ".tsv" in tabs else ",", strict=True)
        names = next(rows, [])
        if column not in names and len(names) != 1:
            raise DataError(
                f"{path} has the columns {', '.join(map(repr, names)) or 'none'}; say which is the text (--column)."
            )
        number = names.index(column) if column in names else 0
        for row in rows:
            if len(row) > number:
                yield from split_long_text(row[number], f"line {rows.line_num} of {path}", column)
    except csv.Error as error:
        raise DataError(f"{path} is no .csv that can be read: {error}.") from None


def decode_lines(stream: BinaryIO, path: Path) -> Iterator[str]:
    for number, line in enumerate(iter(stream.readline, b""), 1):
        try:
            yield str(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"line {number} of {path} is not UTF-8 at byte {error.start}; {ADVICE}.") from None


def read_parquet(stream: BinaryIO, path: Path, column: str = "text") -> Iterator[bytes]:
    """Documents of a .parquet: its column `column`, a batch of rows at a time."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{path} is read through pyarrow, which is missing; pip install pyarrow.") from None
    with tempfile.TemporaryFile() as plain:
        if not isinstance(stream, io.BufferedReader) or not isinstance(stream.raw, io.FileIO):
            while block := stream.read(2**20):  # parquet is read from its end, a compressed stream only from its start
                plain.write(block)
            plain.seek(0)
            stream = cast("BinaryIO", plain)
        try:
            table = parquet.ParquetFile(stream)
            columns = table.schema_arrow.names
            if column not in columns:
                raise DataError(
                    f"{path} must have a column {column!r}, but it has {', '.join(columns)}; say which is the text "
                    "(--column)."
                )
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield from split_long_text(text, f"row {row} of {path}", column)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} is no parquet file that pyarrow can read ({error}).") from None


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}
# in a folder only where none of the others is: they stand beside a corpus more often than for one
BESIDE = {".md": read_txt, ".csv": read_csv, ".tsv": read_csv, ".json": read_json}


def detect_format(path: Path) -> tuple[str, str] | None:
    """(".txt" | ".jsonl" | …, "" | ".gz" | ".xz" | ".zst") of a file that can be read, else None."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    return (suffixes[-1], compression) if suffixes and suffixes[-1] in READERS | BESIDE else None


def read_documents(path: Path, spec: DataSpec | None = None) -> Iterator[tuple[bytes, int]]:
    """Each document of a file, and how many bytes of the file have been read so far."""
    spec = DataSpec() if spec is None else spec
    kind = detect_format(path)
    if kind is None:
        known = " ".join(READERS | BESIDE)
        raise DataError(f"{path} is no corpus file; {known} are, each also with .gz, .xz or .zst.")
    try:
        with path.open("rb") as raw:
            opened = COMPRESSED[kind[1]](raw, path)
            stream = opened if opened is raw else io.BufferedReader(opened, 2**17)
            if spec.encoding != "utf-8" and kind[0] != ".parquet":
                stream = ReencodedStream(cast("BinaryIO", stream), path, spec.encoding)
            for document in (READERS | BESIDE)[kind[0]](cast("BinaryIO", stream), path, spec.column):
                yield document, raw.tell()
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged or cut short ({error}); fetch it again.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
