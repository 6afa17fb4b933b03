"""Which documents belong to a corpus, and to which split: a pure function of the source and the spec.

A split that the source has files for is kept as it is. Otherwise a document's split follows from a hash of its text,
so that adding files never moves one; where there are too few documents for that, each is cut by position. A text that
the source holds out (test before valid) is dropped from the splits after it; repeats within a split stay, because how
often a text occurs is a property of the corpus, and are counted.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qklab.data.formats import count_whole_characters
from qklab.data.sources import SPLITS, Source
from qklab.data.spec import DataError, DataSpec

SAMPLE_BYTES = 2**25
SHORT_BYTES = 2**14


class SelectedDocument(NamedTuple):
    """A document, its split, 16 bytes that stand for its text, and how far the source has been read."""

    raw: bytes
    split: str
    digest: bytes
    position: int


def hash_to_unit_interval(digest: bytes) -> float:
    """A number in [0, 1) that 8 bytes of a digest stand for."""
    return int.from_bytes(digest, "big") / 2**64


def choose_split(digest: bytes, spec: DataSpec, kept: frozenset[str]) -> str:
    """The split of a document whose file names none; splits in `kept` have files of their own."""
    number, below = hash_to_unit_interval(digest[:8]), 0.0
    for split, share in (("test", spec.test), ("valid", spec.valid)):
        below += share
        if number < below and split not in kept:
            return split
    return "train"


def cut_text(raw: bytes, size: int) -> bytes:
    """At most `size` bytes of a text, up to the end of a line where one is not far, and of a character anyway."""
    if len(raw) <= size:
        return raw
    line_end = raw.rfind(b"\n", size // 2, size) + 1
    return raw[: line_end or count_whole_characters(raw[:size])]


def cut_by_position(
    raw: bytes, spec: DataSpec, kept: frozenset[str], taken: Counter[str]
) -> Iterator[tuple[str, bytes]]:
    """(split, text) of a document's parts: its end is for validation and test. A short one stays whole, for the split
    that lags behind its share of what was `taken`."""
    shares = {split: getattr(spec, split) for split in ("valid", "test") if split not in kept and getattr(spec, split)}
    if len(raw) < SHORT_BYTES:
        behind = (split for split, share in shares.items() if taken["train"] and taken[split] < share * taken.total())
        yield next(behind, "train"), raw
        return
    rest = cut_text(raw, int(len(raw) * (1 - sum(shares.values()))))
    yield "train", rest
    begin = len(rest)
    for split, share in shares.items():
        last = split == [*shares][-1]
        part = raw[begin:] if last else cut_text(raw[begin:], max(4, int(len(raw) * share)))
        begin += len(part)
        yield split, part


def select_documents(
    source: Source, spec: DataSpec, dropped: Counter[str], by_position: bool = False
) -> Iterator[SelectedDocument]:
    """The documents of the corpus in order; `dropped` counts what was left out: "empty", duplicates by split, and the
    bytes that were "cut" off."""
    held_out: dict[bytes, str] = {}
    taken = Counter[str]()  # bytes by split
    limit = spec.limit_bytes
    for raw, own_split, position in source.read_documents():
        if not raw.strip():
            dropped["empty"] += 1
            continue
        if by_position and own_split not in ("valid", "test"):
            if limit is not None:
                before = len(raw)
                raw = cut_text(raw, int(limit / (1 - spec.valid - spec.test)) - taken.total())
                dropped["cut"] += before - len(raw)
                if not raw:
                    return
            for split, part in cut_by_position(raw, spec, source.splits, taken):
                if part.strip():
                    taken[split] += len(part)
                    yield SelectedDocument(part, split, hashlib.blake2b(part, digest_size=16).digest(), position)
            continue
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        split = own_split if own_split in ("valid", "test") else choose_split(digest, spec, source.splits)
        if held_out.get(digest, split) != split:
            dropped[split] += 1
            continue
        if own_split in ("valid", "test"):
            held_out[digest] = split
        if split == "train" and limit is not None and taken["train"] + len(raw) > limit:
            if taken["train"]:
                return
            dropped["cut"] += len(raw)
            raw = cut_text(raw, limit)  # a first document that alone is larger
            dropped["cut"] -= len(raw)
            digest = hashlib.blake2b(raw, digest_size=16).digest()
        taken[split] += len(raw)
        yield SelectedDocument(raw, split, digest, position)


def needs_positions(tally: "Tally", spec: DataSpec, kept: frozenset[str]) -> bool:
    """Whether some split that is wanted got no document by its hash."""
    wanted = ["train", *(split for split in ("valid", "test") if getattr(spec, split))]
    return bool(tally.documents.total()) and any(not tally.documents[split] and split not in kept for split in wanted)


class TokenizerSample:
    """Training text for a BPE, at most `SAMPLE_BYTES`: the documents with the smallest hashes, so that every part of a
    large corpus is in it and the order of files does not matter much."""

    def __init__(self) -> None:
        self.documents: list[tuple[float, bytes]] = []
        self.bytes, self.below = 0, 1.0

    def add(self, document: SelectedDocument) -> None:
        number = hash_to_unit_interval(document.digest[8:])
        if number >= self.below:
            return
        self.documents.append((number, document.raw))
        self.bytes += len(document.raw)
        while self.bytes > SAMPLE_BYTES and len(self.documents) > 1:
            self.below /= 2
            self.documents = [entry for entry in self.documents if entry[0] < self.below] or self.documents[:1]
            self.bytes = sum(len(raw) for _, raw in self.documents)

    def batches(self) -> Iterator[list[bytes]]:
        for i in range(0, len(self.documents), 64):
            yield [raw for _, raw in self.documents[i : i + 64]]


class Tally:
    """What one pass over a corpus counts, and a digest of everything that passed."""

    def __init__(self) -> None:
        self.documents: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.digest = hashlib.sha256()

    def add(self, document: SelectedDocument) -> None:
        self.documents[document.split] += 1
        self.bytes[document.split] += len(document.raw)
        self.digest.update(document.split.encode() + document.digest)


def count_repeats(path: Path) -> int:
    """How many of the 8-byte digests in a file occurred before in it, whatever their number, in bounded memory."""
    if path.stat().st_size == 0:
        return 0
    digests = np.memmap(path, "<u8", mode="r")
    rounds = -(-len(digests) // 2**22)
    chunks = [digests[i : i + 2**20] for i in range(0, len(digests), 2**20)]
    distinct = sum(len(np.unique(np.concatenate([c[c % rounds == r] for c in chunks]))) for r in range(rounds))
    return len(digests) - distinct


def refuse_empty(name: str, tally: Tally, spec: DataSpec, kept: frozenset[str]) -> None:
    """Nothing can be trained without training text, nor judged without validation text."""
    count: dict[str, Any] = {split: tally.documents[split] for split in SPLITS}
    if not sum(count.values()):
        raise DataError(f"the source {name} holds no text.")
    missing = next((split for split in ("train", "valid") if not count[split]), None)
    if missing is None:
        return
    if missing in kept:
        raise DataError(f"the {missing} files of {name} hold no text that is not in a later split too.")
    documents = sum(count.values())
    raise DataError(
        f"the source {name} has {documents} document{'s' * (documents != 1)}, none of which falls into {missing} "
        f"(valid={spec.valid:g}, test={spec.test:g}); end documents by lines <|endoftext|>, give a folder with "
        "train.txt and valid.txt, or choose other fractions."
    )
