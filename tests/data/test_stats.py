"""What is measured of a corpus, on corpora made to be alike or different."""

import json
import random
import re
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from qklab.cli import main
from qklab.data import Corpus, DataSpec, prepare_corpus
from qklab.data.stats import entropy, jensen_shannon, measure_corpus, measure_lengths, sample_documents
from qklab.runs.progress import Terminal


def made(tmp_path: Path, name: str, vocabularies: int, documents: int = 200, words: int = 400) -> Corpus:
    """Documents that each draw their words from one of `vocabularies` vocabularies; 1: all are alike."""
    chance = random.Random(1)
    spoken = [["".join(chance.choices("abcdefgh", k=4)) for _ in range(60)] for _ in range(vocabularies)]
    texts = [" ".join(chance.choices(spoken[i % vocabularies], k=words)) for i in range(documents)]
    path = tmp_path / f"{name}.txt"
    path.write_text("\n<|endoftext|>\n".join(texts))
    return prepare_corpus(DataSpec(source=str(path), vocab=600, valid=0.1), out=tmp_path / name)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Corpus]:
    folder = tmp_path_factory.mktemp("stats")
    return made(folder, "alike", 1), made(folder, "different", 20)


def test_divergence_of_known_distributions() -> None:
    a, b = np.array([1, 1, 2, 2]), np.array([3, 3, 4, 4])
    assert entropy(a) == pytest.approx(1)
    assert jensen_shannon(a, b) == pytest.approx(1)  # nothing in common: one bit
    assert jensen_shannon(a, a) == pytest.approx(0)
    assert jensen_shannon(np.array([1, 1]), np.array([1, 2])) == pytest.approx(0.8112781 - 0.5)


def test_every_measure_tells_different_documents_from_alike_ones(corpora: tuple[Corpus, Corpus]) -> None:
    alike, different = map(measure_corpus, corpora)
    for kind in ("topic", "style"):
        gaps = [stats["divergence"][kind]["gap"] for stats in (alike, different)]
        assert abs(gaps[0]["mean"]) < 4 * gaps[0]["standard_error"]  # no bias where there is no difference
        assert gaps[1]["mean"] > 20 * gaps[1]["standard_error"]
    assert different["vocabulary"]["exponent"] > alike["vocabulary"]["exponent"] + 0.05
    assert different["compression"]["gain"] < alike["compression"]["gain"] - 0.02


def test_counts_agree_with_the_corpus(corpora: tuple[Corpus, Corpus]) -> None:
    corpus = corpora[0]
    stats = measure_corpus(corpus)
    train = corpus.splits["train"]
    text_tokens = train.tokens - train.documents
    assert stats["splits"]["train"]["bytes_per_token"] == pytest.approx(train.bytes / text_tokens)
    lengths = np.diff(train.starts) - 1
    assert stats["document_tokens"]["50%"] == np.median(lengths)
    assert stats["document_tokens"]["100%"] == lengths.max()
    assert stats["vocabulary"]["curve"][0] == [1000, 60]
    assert stats["vocabulary"]["words"] == sum(len(raw.split()) for raw in texts_of(corpus))
    assert json.loads(json.dumps(stats)) == stats


def texts_of(corpus: Corpus) -> list[str]:
    train = corpus.splits["train"]
    return corpus.tokenizer.decode(train.read(0, train.tokens)).split("<|endoftext|>")


def test_the_sample_is_spread_over_the_split_and_shuffled(corpora: tuple[Corpus, Corpus]) -> None:
    train = corpora[0].splits["train"]
    chosen = sample_documents(train, 10)
    assert len(set(chosen.tolist())) == 10
    assert sorted(chosen.tolist()) != chosen.tolist()
    assert np.diff(np.sort(chosen)).max() <= train.documents / 10 + 1
    assert len(sample_documents(train, 10**6)) == train.documents
    assert len(sample_documents(train, 10, at_least=10**9)) == 0


def test_tiny_corpora_have_counts_but_no_measures(tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text("\n<|endoftext|>\n".join("abcdefghijklmnopqrstuvwxyz"))
    corpus = prepare_corpus(DataSpec(source=str(path), tokenizer="bytes", valid=0.3, test=0.0), out=tmp_path / "out")
    stats = measure_corpus(corpus)
    assert (stats["divergence"], stats["vocabulary"], stats["compression"]) == (None, None, None)
    assert measure_lengths(corpus.splits["test"]) is None
    assert stats["splits"]["test"]["bytes_per_token"] is None


def say(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["data", *map(str, words)])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_what_the_commands_say(
    corpora: tuple[Corpus, Corpus], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = corpora[1]
    assert "are as the manifest says" in say(capsys, "verify", corpus.folder)
    text = say(capsys, "stats", corpus.folder)
    for words in ("bytes/token", "tokens per document", "divergence in style", "V(n)", "compression gain"):
        assert words in text
    assert json.loads(say(capsys, "stats", corpus.folder, "--json")) == measure_corpus(corpus)  # deterministic, too
    (tmp_path / "poems.txt").write_text("\n<|endoftext|>\n".join(f"poem {i}" for i in range(100)))
    out = ("--tokenizer", "bytes", "--data", tmp_path)
    text = say(capsys, "prepare", "poems.txt", *out, "--out", tmp_path / "prepared")
    assert text.startswith(str(tmp_path / "prepared"))
    assert f"{Corpus.open(tmp_path / 'prepared').splits['train'].tokens:,} tokens" in text
    text = say(capsys, "stats", "poems.txt", *out)
    assert text.startswith("poems.txt: bytes of 257")
    assert "too few or too short documents" in text


def test_progress_in_plain_lines_and_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qklab.runs.progress.EVERY", 0.0)
    (tmp_path / "poems.txt").write_text("\n<|endoftext|>\n".join(f"poem {i}" * 1000 for i in range(300)))
    spec = DataSpec(source=str(tmp_path / "poems.txt"), vocab=260)
    prepare_corpus(spec, out=tmp_path / "plain", progress=Terminal().report_bytes, workers=1)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"^training a BPE of 260 tokens on 2.\d MB$", err, re.MULTILINE)
    assert re.search(r"^100%  tokenising: 2 of 2 MB, \d+ s left$", err, re.MULTILINE)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with closing(Terminal()) as display:
        prepare_corpus(spec, out=tmp_path / "terminal", progress=display.report_bytes)
    err = capsys.readouterr().err
    assert "training a BPE of 260 tokens" in err
    assert "tokenising: 2 of 2 MB" in err
