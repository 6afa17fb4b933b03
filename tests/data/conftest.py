"""Small corpora for tests of data."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from corpora import Build, join_documents, make_documents, spec_of, write_files

from qklab.data import Corpus, prepare_corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A source of 300 documents in a .txt and a .jsonl."""
    texts = make_documents(300)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[150:])
    return write_files(tmp_path / "source", {"a.txt": join_documents(texts[:150]), "b.jsonl": lines})


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Prepares a source with small settings, each time into a new folder."""
    count = itertools.count()

    def build(source: Path, **settings: Any) -> Corpus:
        return prepare_corpus(spec_of(source, **settings), out=tmp_path / f"corpus-{next(count)}")

    return build
