"""Small corpora for tests of data."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpora import join_documents, spec_of, write_files

from qklab.data import Corpus, prepare_corpus


@pytest.fixture
def documents() -> Callable[..., list[str]]:
    def make(number: int, words: int = 40, seed: int = 0) -> list[str]:
        """Different documents of words that repeat as words do."""
        chance = random.Random(seed)
        vocabulary = [
            "".join(chance.choices("abcdefghijklmnopqrstuvwxyzäé", k=chance.randint(2, 8))) for _ in range(300)
        ]
        return [f"{i}: " + " ".join(chance.choices(vocabulary, k=chance.randint(1, words))) for i in range(number)]

    return make


@pytest.fixture
def folder(tmp_path: Path, documents: Callable[..., list[str]]) -> Path:
    """A source of 300 documents in a .txt and a .jsonl."""
    texts = documents(300)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[150:])
    return write_files(tmp_path / "source", {"a.txt": join_documents(texts[:150]), "b.jsonl": lines})


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Corpus]:
    """Prepares a source with small settings, each time into a new folder."""
    count = itertools.count()

    def build(source: Path, **settings: Any) -> Corpus:
        return prepare_corpus(spec_of(source, **settings), out=tmp_path / f"corpus-{next(count)}")

    return build
