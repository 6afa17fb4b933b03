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
from qklab.data.tokenizer import Tokenizer, canonical
from qklab.runs.files import hash_file

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"


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
        out = np.empty(stop - start, self.dtype)
        self._fill(out, start)
        return out

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens starts[i] to starts[i] + length as rows [len(starts), length]."""
        starts = np.asarray(starts, np.int64)
        if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= self.tokens - length:
            last = int(starts.max()) + length
            raise DataError(
                f"windows from {starts.min()} to {last} were asked for, but the split has tokens 0 to {self.tokens}."
            )
        out = np.empty((len(starts), length), self.dtype)
        for row, start in zip(out, starts.tolist(), strict=True):
            self._fill(row, start)
        return out

    def _fill(self, out: np.ndarray, start: int) -> None:
        shard = int(np.searchsorted(self.borders, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            tokens, begin = self.shards[shard], start + filled - int(self.borders[shard])
            part = tokens[begin : begin + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled, shard = filled + len(part), shard + 1


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
        if manifest_hash(manifest.get("content")) != manifest.get("hash"):
            raise DataError(f"{folder / MANIFEST} is damaged (its hash does not fit); prepare the corpus again.")
        corpus = cls(folder, manifest)
        for path, size in corpus.files():
            actual = path.stat().st_size if path.exists() else None
            if actual != size:
                came = "is missing" if actual is None else f"has {actual} bytes"
                raise DataError(f"{path} {came}, but {size} were expected; prepare the corpus again.")
        return corpus

    def files(self) -> list[tuple[Path, int]]:
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


def manifest_hash(content: object) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()
