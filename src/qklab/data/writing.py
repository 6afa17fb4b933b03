"""Writing shards so that what is there is whole: aside, flushed to disk, renamed, and only then recorded."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from qklab.runs.files import hash_file, replace_file, write_bytes, write_json

SHARD_TOKENS = 2**23
UNFINISHED = "unfinished"


class ShardWriter:
    """The shards of one split, of whole documents each; the document that takes one to `SHARD_TOKENS` closes it.

    A shard counts once its record lies in `unfinished/`; a writer made later goes on after the last that counts.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, eot: int):
        self.folder, self.split, self.dtype = folder, split, dtype
        self.eot = np.array([eot], dtype)
        self.records: list[dict[str, Any]] = []
        while (record := self._recorded(len(self.records))) is not None:
            self.records.append(record)
        self.documents = sum(record["documents"] for record in self.records)
        self._empty()

    def _empty(self) -> None:
        self.parts: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.tokens = self.bytes = 0

    def _name(self, number: int) -> str:
        return f"{self.split}-{number:05d}"

    def _recorded(self, number: int) -> dict[str, Any] | None:
        notes = self.folder / UNFINISHED / self._name(number)
        try:
            record = json.loads(notes.with_suffix(".json").read_bytes())
            whole = hash_file(self.folder / record["file"]) == record["sha256"]
            return record if whole and hash_file(notes.with_suffix(".lengths")) == record["lengths"] else None
        except (OSError, ValueError, KeyError):
            return None

    def add(self, tokens: np.ndarray, size: int) -> None:
        """A document of `size` bytes."""
        self.parts += [self.eot, tokens]
        self.lengths.append(1 + len(tokens))
        self.tokens += 1 + len(tokens)
        self.bytes += size
        if self.tokens >= SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        """End the shard with what it has, if it has anything."""
        if not self.lengths:
            return
        name = self._name(len(self.records))
        notes = self.folder / UNFINISHED / name
        content = np.concatenate(self.parts).tobytes()
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
        self._empty()

    def finish(self) -> dict[str, Any]:
        """Write where documents begin and return the split's part of the manifest."""
        self.close()
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
