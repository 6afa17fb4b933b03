"""Writing sources and reading corpora back, as tests of data need it."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from qklab.data import Corpus, DataSpec


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
