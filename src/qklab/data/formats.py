"""Files of documents as streams: .txt, .jsonl and .parquet, plain or compressed, never whole in memory.

Every reader yields documents as valid UTF-8 bytes. One longer than `LONGEST` goes on as a new document, after a line
break where there is one, so that memory stays bounded.
"""

import contextlib
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

from qklab.data.spec import DataError

LONGEST = 2**24
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
        raise DataError(f"{path} is not UTF-8 at byte {at}; convert it (for example with iconv) first.") from None
    return raw


def count_whole_characters(raw: bytes) -> int:
    """How many bytes of `raw` end with a whole character, where `raw` was cut anywhere."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte & 0b1100_0000 != 0b1000_0000:  # the first byte of the last character, whose high bits tell its length
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(raw) - back if length > back else len(raw)
    return len(raw)


def read_txt(stream: BinaryIO, path: Path) -> Iterator[bytes]:
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


def split_long_text(text: object, where: str) -> Iterator[bytes]:
    """A text from a table as one document, or several where it is longer than `LONGEST`."""
    if not isinstance(text, str):
        raise DataError(f"{where} must have a string 'text', but {type(text).__name__} came.")
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


def read_jsonl(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """Documents of a .jsonl: one object a line with a string field `text`; blank lines are skipped."""
    for number, line in enumerate(iter(stream.readline, b""), 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 at byte {error.start} of the line; convert it first.") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is no JSON ({error}); each line must be an object with 'text'.") from None
        if not isinstance(row, dict) or "text" not in row:
            came = f"the fields {', '.join(map(str, row)) or 'none'}" if isinstance(row, dict) else type(row).__name__
            raise DataError(f"{where} must be an object with a string field 'text', but {came} came.")
        yield from split_long_text(row["text"], where)


def read_parquet(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """Documents of a .parquet: its column `text`, a batch of rows at a time."""
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
            if "text" not in columns:
                raise DataError(f"{path} must have a column 'text', but it has {', '.join(columns)}.")
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield from split_long_text(text, f"row {row} of {path}")
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} is no parquet file that pyarrow can read ({error}).") from None


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}


def detect_format(path: Path) -> tuple[str, str] | None:
    """(".txt" | ".jsonl" | ".parquet", "" | ".gz" | ".xz" | ".zst") of a file that can be read, else None."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    return (suffixes[-1], compression) if suffixes and suffixes[-1] in READERS else None


def read_documents(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each document of a file, and how many bytes of the file have been read so far."""
    kind = detect_format(path)
    if kind is None:
        raise DataError(f"{path} is no corpus file; {' '.join(READERS)} are, each also with .gz, .xz or .zst.")
    try:
        with path.open("rb") as raw:
            opened = COMPRESSED[kind[1]](raw, path)
            stream = opened if opened is raw else io.BufferedReader(opened, 2**17)
            for document in READERS[kind[0]](cast("BinaryIO", stream), path):
                yield document, raw.tell()
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged or cut short ({error}); fetch it again.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
