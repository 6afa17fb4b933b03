"""A prepared corpus: memory-mapped shards of tokens, where documents begin in them, and a manifest with their hashes.

A document is stored as [eot, t₁ … tₙ], so a split is the stream `eot d₁ eot d₂ …`: the first token of a document is
predicted from end-of-text, and what follows its last token is the next document's end-of-text.
"""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

import numpy as np

from qklab.data.sources import SPLITS
from qklab.data.spec import DataError
from qklab.data.tokenizer import Tokenizer, format_canonical_json
from qklab.runs.files import hash_file, replace_file, write_bytes, write_json

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SHARD_TOKENS = 2**23
UNFINISHED = "unfinished"


class Split:
    """The token stream of one split: `tokens` in all, `documents` of them, standing for `bytes` bytes of text."""

    def __init__(self, folder: Path, record: dict[str, Any], dtype: np.dtype):
        self.folder, self.record, self.dtype = folder, record, dtype
        self.tokens: int = record["tokens"]
        self.documents: int = record["documents"]
        self.bytes: int = record["bytes"]
        self.borders = np.cumsum([0, *(shard["tokens"] for shard in record["shards"])])  # [shards + 1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("starts", "shards")}

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Where each document's end-of-text lies in the stream, then the stream's length: int64 [documents + 1]."""
        path = self.folder / self.record["starts"]["file"]
        return np.memmap(path, "<i8", mode="r", shape=(self.documents + 1,))

    @functools.cached_property
    def shards(self) -> list[np.ndarray]:
        records = self.record["shards"]
        return [np.memmap(self.folder / r["file"], self.dtype, mode="r", shape=(r["tokens"],)) for r in records]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the stream, across shards, as an array of its own."""
        if not 0 <= start <= stop <= self.tokens:
            raise DataError(f"tokens {start} to {stop} were asked for, but the split has tokens 0 to {self.tokens}.")
        out, filled = np.empty(stop - start, self.dtype), 0
        shard = int(np.searchsorted(self.borders, start, side="right")) - 1
        while filled < len(out):
            begin = start + filled - int(self.borders[shard])
            tokens = self.shards[shard][begin : begin + len(out) - filled]
            out[filled : filled + len(tokens)] = tokens
            filled, shard = filled + len(tokens), shard + 1
        return out


class Corpus:
    """A prepared corpus in a folder. `hash` identifies its tokens, its documents and its tokenizer."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        content = manifest["content"]
        self.folder, self.manifest = folder, manifest
        self.hash: str = manifest["hash"]
        dtype = np.dtype(content["dtype"]).newbyteorder("<")
        self.splits = {name: Split(folder, content["splits"][name], dtype) for name in SPLITS}

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.load(self.folder / TOKENIZER)
        expected = self.manifest["content"]["tokenizer"]["hash"]
        if tokenizer.hash != expected:
            raise DataError(
                f"{self.folder / TOKENIZER} is not the tokenizer this corpus was prepared with "
                f"(hash {tokenizer.hash[:12]}, expected {expected[:12]}); prepare the corpus again."
            )
        return tokenizer

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """Open a prepared corpus: the manifest is checked against its own hash, the files by their size."""
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{folder} is no prepared corpus (it has no {MANIFEST}); run qklab data prepare.") from None
        except OSError as error:
            raise DataError(f"{folder / MANIFEST} cannot be read: {error.strerror}.") from error
        except ValueError:
            raise DataError(f"{folder / MANIFEST} is damaged (no JSON); prepare the corpus again.") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise DataError(f"{folder / MANIFEST} is not of format {FORMAT}; prepare the corpus with this version.")
        if hash_content(manifest.get("content")) != manifest.get("hash"):
            raise DataError(f"{folder / MANIFEST} is damaged (its hash does not fit); prepare the corpus again.")
        corpus = cls(folder, manifest)
        for path, size in corpus.list_files():
            actual = path.stat().st_size if path.exists() else None
            if actual != size:
                came = "is missing" if actual is None else f"has {actual} bytes"
                raise DataError(f"{path} {came}, but {size} were expected; prepare the corpus again.")
        return corpus

    def list_files(self) -> list[tuple[Path, int]]:
        """Shards and boundary files with the size each must have."""
        sizes = []
        for split in self.splits.values():
            shards = [(shard["file"], shard["tokens"] * split.dtype.itemsize) for shard in split.record["shards"]]
            sizes += [*shards, (split.record["starts"]["file"], 8 * (split.documents + 1))]
        return [(self.folder / name, size) for name, size in sizes]

    def verify(self) -> None:
        """Read everything and compare it with the manifest's SHA-256; raise for the first file that differs."""
        for split in self.splits.values():
            for record in [*split.record["shards"], split.record["starts"]]:
                path = self.folder / record["file"]
                try:
                    actual = hash_file(path)
                except OSError as error:
                    raise DataError(f"{path} cannot be read: {error.strerror}.") from error
                if actual != record["sha256"]:
                    raise DataError(f"{path} is damaged (its SHA-256 does not fit); prepare the corpus again.")
        assert self.tokenizer.hash


def hash_content(content: object) -> str:
    return hashlib.sha256(format_canonical_json(content)).hexdigest()


class ShardWriter:
    """The shards of one split, of whole documents each; the document that takes one to `SHARD_TOKENS` closes it.

    A shard counts once its record lies in `unfinished/`; a writer made later goes on after the last that counts.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, eot: int):
        self.folder, self.split, self.dtype = folder, split, dtype
        self.eot = np.array([eot], dtype)
        self.records: list[dict[str, Any]] = []
        while (record := self._read_record(len(self.records))) is not None:
            self.records.append(record)
        self.documents = sum(record["documents"] for record in self.records)
        self._begin_shard()

    def _begin_shard(self) -> None:
        self.pieces: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.tokens = self.bytes = 0

    def _name(self, number: int) -> str:
        return f"{self.split}-{number:05d}"

    def _read_record(self, number: int) -> dict[str, Any] | None:
        notes = self.folder / UNFINISHED / self._name(number)
        try:
            record = json.loads(notes.with_suffix(".json").read_bytes())
            whole = hash_file(self.folder / record["file"]) == record["sha256"]
            return record if whole and hash_file(notes.with_suffix(".lengths")) == record["lengths"] else None
        except (OSError, ValueError, KeyError):
            return None

    def add(self, tokens: np.ndarray, size: int) -> None:
        """A document of `size` bytes."""
        self.pieces += [self.eot, tokens]
        self.lengths.append(1 + len(tokens))
        self.tokens += 1 + len(tokens)
        self.bytes += size
        if self.tokens >= SHARD_TOKENS:
            self.close_shard()

    def close_shard(self) -> None:
        """End the shard with what it has, if it has anything."""
        if not self.lengths:
            return
        name = self._name(len(self.records))
        notes = self.folder / UNFINISHED / name
        content = np.concatenate(self.pieces).tobytes()
        lengths = np.array(self.lengths, "<i8").tobytes()
        record = {
            "file": f"{name}.bin",
            "tokens": self.tokens,
            "documents": len(self.lengths),
            "bytes": self.bytes,
            "sha256": hashlib.sha256(content).hexdigest(),
            "lengths": hashlib.sha256(lengths).hexdigest(),
        }
        write_bytes(self.folder / record["file"], content)
        write_bytes(notes.with_suffix(".lengths"), lengths)
        write_json(notes.with_suffix(".json"), record)
        self.records.append(record)
        self._begin_shard()

    def finish(self) -> dict[str, Any]:
        """Write where documents begin; what the manifest says of the split."""
        self.close_shard()
        starts = self.folder / f"{self.split}.starts.bin"
        total = 0
        with replace_file(starts) as file:
            for number in range(len(self.records)):
                lengths = np.fromfile((self.folder / UNFINISHED / self._name(number)).with_suffix(".lengths"), "<i8")
                ends = total + np.cumsum(lengths)
                file.write((ends - lengths).astype("<i8").tobytes())
                total = int(ends[-1])
            file.write(np.array([total], "<i8").tobytes())
        shards = [{key: value for key, value in record.items() if key != "lengths"} for record in self.records]
        return {
            **{count: sum(shard[count] for shard in shards) for count in ("tokens", "bytes", "documents")},
            "shards": shards,
            "starts": {"file": starts.name, "sha256": hash_file(starts)},
        }
