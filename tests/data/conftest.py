"""Small corpora for tests of data."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest


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
    source, texts = tmp_path / "source", documents(300)
    source.mkdir()
    (source / "a.txt").write_text("".join(f"{text}\n<|endoftext|>\n" for text in texts[:150]))
    (source / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[150:]))
    return source
