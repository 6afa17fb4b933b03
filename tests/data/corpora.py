"""Writing sources and reading corpora back, as tests of data need it."""

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from qklab.data import Corpus, DataSpec

Build = Callable[..., Corpus]


def make_documents(number: int, words: int = 40, seed: int = 0) -> list[str]:
    """Different documents of words that repeat as words do."""
    chance = random.Random(seed)
    vocabulary = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyzäé", k=chance.randint(2, 8))) for _ in range(300)]
    return [f"{i}: " + " ".join(chance.choices(vocabulary, k=chance.randint(1, words))) for i in range(number)]


def spec_of(source: Path, **settings: Any) -> DataSpec:
    return DataSpec(source=str(source), **{"tokenizer": "bytes", "valid": 0.1, "test": 0.1, **settings})


def join_documents(texts: Iterable[str]) -> str:
    return "".join(f"{text}\n<|endoftext|>\n" for text in texts)


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_texts(corpus: Corpus, split: str) -> list[str]:
    tokens = corpus.splits[split]
    return [corpus.tokenizer.decode(tokens.read(start + 1, stop)) for start, stop in pairwise(tokens.starts.tolist())]
