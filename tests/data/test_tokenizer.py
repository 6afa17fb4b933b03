"""Tokenizers: exact, reversible, byte-level, and fast only where it makes no difference."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qklab.data import DataError, Tokenizer
from qklab.data import tokenizer as subject
from qklab.data.tokenizer import ChunkCache, build_bpe, byte_of_character, train_bpe

SHARED = os.environ.get("QKLAB_DATA")
# "\x1c" and "\x1f" are white space to Python but not to GPT-2's pattern, so that tokens are learnt across them
TEXT = (
    "the cat isn't on the mat, they'll say; naïve café costs 12.50€ — 世界\n\n  def f(x):\n\treturn x\n!\x1c?\x1f!\n"
    * 20
)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer(train_bpe(iter([TEXT]), 400))


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: Tokenizer) -> Tokenizer:
    return bpe if request.param == "bpe" else Tokenizer.bytes()


spaces = st.sampled_from(" \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u2028\u202f\u3000\u200b\u180e")
words = st.sampled_from(
    ["the", "'ll", "'s", "'", "12", "é", "世界", "!?", "!\x1c?\x1f!", "e\u0301", "٣", "Ⅷ", "_", "x1", "\x00", "Ġ"]
)
texts = st.lists(st.one_of(spaces, words, st.characters(codec="utf-8")), max_size=40).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=texts)
@example(text=TEXT)
def test_cutting_into_cached_chunks_changes_no_token(bpe: Tokenizer, text: str) -> None:
    whole = build_bpe(bpe.definition).encode(text, add_special_tokens=False).ids
    assert bpe.encode([text])[0].tolist() == whole


@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_every_text_comes_back_and_every_byte_is_counted(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode([text])[0]
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert tokenizer.eot not in ids


def test_a_full_cache_forgets_without_changing_tokens(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CACHED_CHUNKS", 4)
    small = Tokenizer(bpe.definition)
    assert small.encode([TEXT])[0].tolist() == bpe.encode([TEXT])[0].tolist()
    chunks = ChunkCache(bpe.definition, bpe.dtype)
    for i in range(100):
        assert chunks[f" word{i}"]
    assert len(chunks) <= 4
    assert len(chunks.past) <= 4


def test_the_end_of_text_string_is_text_and_its_token_stands_for_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(["a <|endoftext|> b"])[0]
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == "a <|endoftext|> b"
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"
    assert tokenizer.eot == tokenizer.vocab - 1
    assert tokenizer.byte_lengths[tokenizer.eot] == 0
    assert tokenizer.byte_lengths[:-1].min() >= 1


def test_decoding_never_fails_and_encoding_wants_a_list(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode(["世"])[0][:1] if tokenizer.vocab == 257 else np.array([tokenizer.vocab + 5])
    assert tokenizer.decode(half) == "\ufffd"
    assert tokenizer.decode([-1]) == "\ufffd"
    with pytest.raises(DataError, match=r"write encode\(\[text\]\)"):
        tokenizer.encode("abc")


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t.json")
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert loaded.hash == tokenizer.hash
    assert loaded.encode([TEXT])[0].tolist() == tokenizer.encode([TEXT])[0].tolist()


def test_training_is_repeatable_and_hashes_tell_tokenizers_apart(bpe: Tokenizer) -> None:
    again = Tokenizer(train_bpe(iter([TEXT]), 400))
    assert again.hash == bpe.hash
    small = Tokenizer(train_bpe(iter([TEXT]), 300))
    assert small.hash != bpe.hash
    assert small.vocab == 300
    assert Tokenizer.bytes().hash != bpe.hash
    assert {bytes([b]) for b in range(256)} <= set(bpe.pieces)
    assert bpe.vocab <= 400
    assert len(bpe.encode(["the cat"])[0]) < 7


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "kind": "bpe"}', '"\xff"'])
def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="is no tokenizer that qklab wrote"):
        Tokenizer.load(tmp_path / "t.json")
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.load(tmp_path / "missing.json")


@pytest.mark.skipif(not SHARED, reason="QKLAB_DATA is not set")
def test_gpt2() -> None:
    tokenizer = Tokenizer.gpt2(Path(SHARED or "") / "gpt2")
    assert (tokenizer.vocab, tokenizer.eot) == (50257, 50256)
    assert tokenizer.encode(["Hello world"])[0].tolist() == [15496, 995]
    assert tokenizer.dtype == np.uint16
    whole = build_bpe(tokenizer.definition).encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.encode([TEXT])[0].tolist() == whole


def test_gpt2s_files_are_read_without_their_first_line(tmp_path: Path) -> None:
    """Files of its form in which two words have their own numbers."""
    pieces = {"Hello": ["H", "e", "l", "l", "o"], "Ġworld": ["Ġ", "w", "o", "r", "l", "d"]}
    merges = [("".join(word[:i]), word[i]) for word in pieces.values() for i in range(1, len(word))]
    numbers = {"Hello": 15496, "Ġworld": 995, "<|endoftext|>": 50256}
    free = iter(sorted(set(range(50256)) - set(numbers.values())))
    for token in [*byte_of_character(), *(left + right for left, right in merges)]:
        if token not in numbers:
            numbers[token] = next(free)
    numbers |= {f"filler{number}": number for number in free}
    (tmp_path / "encoder.json").write_text(json.dumps(numbers))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    assert Tokenizer.gpt2(tmp_path).decode([15496, 995]) == "Hello world"


def test_files_that_are_not_gpt2s_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs encoder\.json and vocab\.bpe"):
        Tokenizer.gpt2(tmp_path)
    (tmp_path / "encoder.json").write_text(json.dumps({"a": 0}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    with pytest.raises(DataError, match="does not hold GPT-2's own"):
        Tokenizer.gpt2(tmp_path)
    (tmp_path / "encoder.json").write_text("{")
    with pytest.raises(DataError, match="is no JSON"):
        Tokenizer.gpt2(tmp_path)
