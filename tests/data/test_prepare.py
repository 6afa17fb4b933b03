"""Preparing a corpus: what ends up where, and that neither workers nor repetition change a byte of it."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import Build, join_documents, make_documents, read_files, read_texts, spec_of, write_files

from qklab.data import Corpus, DataError, DataSpec, Split, prepare_corpus, shards
from qklab.data import prepare as preparing
from qklab.data.sources import find_source


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 3000)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_is_in_one_split_with_end_of_text_before_it(folder: Path, build: Build, tokenizer: str) -> None:
    corpus = build(folder, tokenizer=tokenizer, vocab=300)
    original = [raw.decode() for raw, _, _ in find_source(str(folder)).read_documents()]
    found = {split: read_texts(corpus, split) for split in ("train", "valid", "test")}
    assert sorted(text for texts in found.values() for text in texts) == sorted(original)
    assert [text for text in original if text in set(found["train"])] == found["train"]
    assert 10 < len(found["valid"]) < 60
    for name, split in corpus.splits.items():
        stream = split.read(0, split.tokens)
        assert np.flatnonzero(stream == corpus.tokenizer.eot).tolist() == split.starts[:-1].tolist()
        assert split.documents == len(found[name])
        assert split.bytes == sum(len(text.encode()) for text in found[name])
        assert split.bytes == corpus.tokenizer.byte_lengths[stream].sum()
    assert len(corpus.splits["train"].record["shards"]) > 1
    corpus.verify()


@pytest.mark.usefixtures("small_shards")
def test_reading_crosses_shards(folder: Path, build: Build) -> None:
    split = build(folder).splits["train"]
    stream = split.read(0, split.tokens)
    assert len(split.borders) > 3
    for start, stop in [(0, 0), (0, 5), (2990, 3500), (100, split.tokens), (split.tokens - 3, split.tokens)]:
        assert split.read(start, stop).tolist() == stream[start:stop].tolist()
    for start, stop in [(-1, 4), (5, 4), (0, split.tokens + 1)]:
        with pytest.raises(DataError, match="were asked for"):
            split.read(start, stop)
    copy: Split = pickle.loads(pickle.dumps(split))
    assert copy.read(0, split.tokens).tolist() == stream.tolist()


def test_splits_do_not_move_when_files_are_added(folder: Path, build: Build) -> None:
    before = build(folder)
    (folder / "0-first.txt").write_text(join_documents(make_documents(100, seed=9)))
    after = build(folder)
    for split in ("train", "valid", "test"):
        assert set(read_texts(before, split)) <= set(read_texts(after, split))
    assert before.hash != after.hash


def test_held_out_text_is_removed_from_training_and_repeats_are_counted(tmp_path: Path, build: Build) -> None:
    words = {"train": "a b both t t c", "valid": "v both v2", "test": "t v2"}
    files = {
        f"{name}.txt": join_documents(f"{word}\n<|endoftext|>\n" for word in words[name].split()) for name in words
    }
    corpus = build(write_files(tmp_path / "source", {**files, "train.1.txt": "a\n<|endoftext|>\na"}))
    assert sorted(read_texts(corpus, "train")) == ["a", "a", "a", "b", "c"]
    assert read_texts(corpus, "valid") == ["v", "both"]
    assert read_texts(corpus, "test") == ["t", "v2"]
    records = corpus.manifest["content"]["splits"]
    assert {split: records[split]["duplicates_removed"] for split in records} == {"train": 3, "valid": 1, "test": 0}
    assert {split: records[split]["repeats_kept"] for split in records} == {"train": 2, "valid": 0, "test": 0}
    assert corpus.manifest["source"]["empty_documents_skipped"] == 11


def test_a_split_without_files_is_cut_off_training(tmp_path: Path, build: Build) -> None:
    files = {"train.txt": join_documents(make_documents(200)), "valid.txt": "held out"}
    source = write_files(tmp_path / "source", files)
    corpus = build(source)
    assert read_texts(corpus, "valid") == ["held out"]
    assert 5 < corpus.splits["test"].documents < 40
    assert build(source, test=0.0).splits["test"].tokens == 0


@pytest.mark.usefixtures("small_shards")
def test_workers_never_change_the_result(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "FEW_BYTES", 0)
    monkeypatch.setattr(preparing, "BATCH_BYTES", 700)
    spec = spec_of(folder, tokenizer="bpe", vocab=300)
    one, three = (prepare_corpus(spec, out=tmp_path / str(n), workers=n) for n in (1, 3))
    assert read_files(one.folder) == read_files(three.folder)
    with pytest.raises(DataError, match="workers must be a number from 1 to 256, but 0 came"):
        prepare_corpus(spec, workers=0)


def test_a_second_preparation_returns_at_once(
    folder: Path, cache_of_tests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_corpus(spec_of(folder))
    assert first.folder.parent == cache_of_tests / "corpora"
    assert "source-" in first.folder.name
    stamp = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    monkeypatch.setattr(preparing, "build_corpus", lambda *_: pytest.fail("prepared again"))
    monkeypatch.setattr("qklab.data.scan.select_documents", lambda *_: pytest.fail("read again"))
    assert prepare_corpus(spec_of(folder)).hash == first.hash
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == stamp
    assert prepare_corpus(DataSpec(source=str(first.folder))).hash == first.hash


def test_tests_keep_nothing_in_the_cache_of_the_user(folder: Path, cache_of_tests: Path) -> None:
    program = f"from qklab.data import *; print(prepare_corpus(DataSpec(source={str(folder)!r})).folder)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for prepared in (prepare_corpus(spec_of(folder)).folder, Path(answer.stdout.strip())):
        assert prepared.is_relative_to(cache_of_tests)
    assert not cache_of_tests.is_relative_to(Path.home() / ".cache")


def test_a_folder_of_another_spec_or_of_something_else_is_refused(folder: Path, build: Build) -> None:
    out = build(folder).folder
    with pytest.raises(DataError, match=r"prepared with tokenizer='bytes', but tokenizer='bpe' is asked for"):
        prepare_corpus(spec_of(folder, tokenizer="bpe"), out=out)
    prepare_corpus(spec_of(folder, vocab=500), out=out)  # bytes have no vocabulary to choose
    with pytest.raises(DataError, match="source is not empty and holds no corpus"):
        prepare_corpus(spec_of(folder), out=folder)
    assert not (folder / "unfinished").exists()


def test_a_changed_source_is_noticed_and_the_same_text_elsewhere_is_the_same(
    folder: Path, tmp_path: Path, build: Build
) -> None:
    first, cached = build(folder), prepare_corpus(spec_of(folder))
    shutil.copytree(folder, tmp_path / "copy")
    assert build(tmp_path / "copy").hash == first.hash
    os.utime(folder / "a.txt")
    assert prepare_corpus(spec_of(folder), out=first.folder).hash == first.hash  # only touched
    with (folder / "a.txt").open("a") as file:
        file.write("one more\n")
    with pytest.raises(DataError, match="the source has changed since"):
        prepare_corpus(spec_of(folder), out=first.folder)
    assert prepare_corpus(spec_of(folder)).folder != cached.folder
    Corpus.open(first.folder).verify()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.txt": ""}, "holds no text"),
        ({"a.txt": " \n<|endoftext|>\n\n"}, "holds no text"),
        ({"a.txt": "one document"}, r"has 1 document, none of which falls into (valid|train).*<\|endoftext\|>"),
        ({"train.txt": "a", "valid.txt": ""}, "the valid files of .* hold no text"),
        ({"train.txt": "a", "valid.txt": "a"}, "none of which falls into train|the train files of .* hold no text"),
    ],
)
def test_too_little_text_is_one_sentence(tmp_path: Path, files: dict[str, str], said: str) -> None:
    source = write_files(tmp_path / "source", files)
    with pytest.raises(DataError, match=said):
        prepare_corpus(spec_of(source, test=0.0), out=tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def book(size: int, seed: int = 0) -> str:
    text = "\n".join(make_documents(size // 100, seed=seed))
    return text[:size]


@pytest.mark.parametrize("books", [1, 20])
def test_few_long_documents_are_cut_by_position(books: int, tmp_path: Path, build: Build) -> None:
    texts = {f"{i:02}.txt": book(60_000, i) for i in range(books)}
    corpus = build(write_files(tmp_path / "books", texts), valid=0.02, test=0.03)
    assert corpus.manifest["source"]["split_by"] == "position"
    parts = {split: read_texts(corpus, split) for split in ("train", "valid", "test")}
    whole = ["".join(pieces) for pieces in zip(*parts.values(), strict=True)]
    assert whole == list(texts.values())  # the end of each is held out, nothing is lost
    sizes = {split: sum(map(len, own)) / sum(map(len, whole)) for split, own in parts.items()}
    assert sizes == pytest.approx({"train": 0.95, "valid": 0.02, "test": 0.03}, abs=0.004)
    assert all(text.endswith("\n") for text in parts["train"])


def test_a_few_short_documents_are_kept_whole(tmp_path: Path, build: Build) -> None:
    corpus = build(write_files(tmp_path / "short", {f"{i}.txt": f"text {i}" for i in range(3)}), valid=0.01, test=0.01)
    assert [len(read_texts(corpus, split)) for split in ("train", "valid", "test")] == [1, 1, 1]


@pytest.mark.parametrize(
    "files", [{"a.txt": "word " * 60_000}, {"a.txt": book(300_000), "b.txt": "more", "c.txt": "text"}]
)
def test_a_text_longer_than_the_limit_is_cut(files: dict[str, str], tmp_path: Path, build: Build) -> None:
    corpus = build(write_files(tmp_path / "long", files), limit_bytes=100_000, valid=0.02, test=0.03)
    sizes = {name: split.bytes for name, split in corpus.splits.items()}
    assert 0.98 * 100_000 < sizes["train"] <= 100_000
    assert 0 < sizes["valid"] < sizes["test"] < 0.05 * 100_000
    assert corpus.manifest["source"]["text_bytes"] == pytest.approx(
        sum(len(text.encode()) for text in files.values()), rel=0.01
    )


def test_a_refused_corpus_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", {"a.txt": "one document"})
    (source / "b.txt").write_bytes(b"\xff")
    for wrong in (source, source / "a.txt"):
        with pytest.raises(DataError):
            prepare_corpus(spec_of(wrong), out=tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_limit_bytes_ends_the_training_split(folder: Path, build: Build) -> None:
    whole, piece = build(folder), build(folder, limit_bytes=5000)
    assert 4000 < piece.splits["train"].bytes <= 5000
    assert read_texts(whole, "train")[: piece.splits["train"].documents] == read_texts(piece, "train")


def test_a_large_vocabulary_is_stored_in_four_bytes(
    folder: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qklab.data.tokenizer.choose_token_dtype", lambda vocab: np.dtype("<u4"))
    corpus = build(folder)
    assert corpus.manifest["content"]["dtype"] == "uint32"
    monkeypatch.undo()
    assert read_texts(corpus, "valid") == read_texts(build(folder), "valid")


def test_the_manifest_says_what_is_there(folder: Path, build: Build) -> None:
    corpus = build(folder, tokenizer="bpe", vocab=300)
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["content"]["dtype"] == "uint16"
    tokenizer = {name: getattr(corpus.tokenizer, name) for name in ("vocab", "eot", "hash")}
    assert manifest["content"]["tokenizer"] == {"kind": "bpe", **tokenizer}
    assert DataSpec.from_dict(manifest["spec"]).tokenizer == "bpe"
    assert [row[0] for row in manifest["source"]["files"]] == ["a.txt", "b.jsonl"]
    names = {"manifest.json", "tokenizer.json"}
    for split in manifest["content"]["splits"].values():
        names |= {split["starts"]["file"], *(shard["file"] for shard in split["shards"])}
        assert sum(shard["tokens"] for shard in split["shards"]) == split["tokens"]
    assert {path.name for path in corpus.folder.iterdir()} == names


def test_gpt2_is_looked_for_and_its_absence_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QKLAB_DATA", raising=False)
    for tokenizer, where in (("gpt2", "in no folder, because"), (f"gpt2:{tmp_path}", str(tmp_path))):
        with pytest.raises(DataError, match=f"were looked for in.*{where}|were looked for {where}"):
            prepare_corpus(spec_of(folder, tokenizer=tokenizer), out=tmp_path / "out")
