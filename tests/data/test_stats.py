"""What is measured of a corpus, on corpora made to be alike or different."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qklab.data import Corpus, DataSpec, prepare
from qklab.data.report import found_corpus, prepared_text, stats_dict, stats_text, verified_text
from qklab.data.stats import entropy, jensen_shannon, length_quantiles, spread


def made(tmp_path: Path, name: str, vocabularies: int, documents: int = 200, words: int = 400) -> Corpus:
    """Documents that each draw their words from one of `vocabularies` vocabularies; 1: all are alike."""
    chance = random.Random(1)
    spoken = [["".join(chance.choices("abcdefgh", k=4)) for _ in range(60)] for _ in range(vocabularies)]
    texts = [" ".join(chance.choices(spoken[i % vocabularies], k=words)) for i in range(documents)]
    path = tmp_path / f"{name}.txt"
    path.write_text("\n<|endoftext|>\n".join(texts))
    return prepare(DataSpec(source=str(path), vocab=600, valid=0.1), out=tmp_path / name)


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
    alike, different = map(stats_dict, corpora)
    for kind in ("topic", "style"):
        gaps = [stats["divergence"][kind]["gap"] for stats in (alike, different)]
        assert abs(gaps[0]["mean"]) < 4 * gaps[0]["standard_error"]  # no bias where there is no difference
        assert gaps[1]["mean"] > 20 * gaps[1]["standard_error"]
    assert different["vocabulary"]["exponent"] > alike["vocabulary"]["exponent"] + 0.05
    assert different["compression"]["gain"] < alike["compression"]["gain"] - 0.02


def test_counts_agree_with_the_corpus(corpora: tuple[Corpus, Corpus]) -> None:
    corpus = corpora[0]
    stats = stats_dict(corpus)
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


def test_statistics_are_deterministic(corpora: tuple[Corpus, Corpus]) -> None:
    assert stats_dict(corpora[1]) == stats_dict(Corpus.open(corpora[1].folder))


def test_the_sample_is_spread_over_the_split_and_shuffled(corpora: tuple[Corpus, Corpus]) -> None:
    train = corpora[0].splits["train"]
    chosen = spread(train, 10)
    assert len(set(chosen.tolist())) == 10
    assert sorted(chosen.tolist()) != chosen.tolist()
    assert np.diff(np.sort(chosen)).max() <= train.documents / 10 + 1
    assert len(spread(train, 10**6)) == train.documents
    assert len(spread(train, 10, at_least=10**9)) == 0


def test_tiny_corpora_have_counts_but_no_measures(tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text("\n<|endoftext|>\n".join("abcdefghijklmnopqrstuvwxyz"))
    corpus = prepare(DataSpec(source=str(path), tokenizer="bytes", valid=0.3, test=0.0), out=tmp_path / "out")
    stats = stats_dict(corpus)
    assert (stats["divergence"], stats["vocabulary"], stats["compression"]) == (None, None, None)
    assert length_quantiles(corpus.splits["test"]) is None
    assert stats["splits"]["test"]["bytes_per_token"] is None
    assert "too few or too short documents" in stats_text(stats)


def test_what_the_commands_say(corpora: tuple[Corpus, Corpus], tmp_path: Path) -> None:
    corpus = corpora[1]
    assert str(corpus.folder) in prepared_text(corpus)
    assert f"{corpus.splits['train'].tokens:,} tokens" in prepared_text(corpus)
    assert "are as the manifest says" in verified_text(corpus.folder)
    text = stats_text(stats_dict(corpus))
    for part in ("bytes/token", "tokens per document", "divergence in style", "V(n)", "compression gain"):
        assert part in text
    assert found_corpus(str(corpus.folder)).hash == corpus.hash


def test_a_source_is_prepared_to_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "poems.txt").write_text("\n<|endoftext|>\n".join(f"poem {i}" for i in range(100)))
    corpus = found_corpus("poems.txt", DataSpec(tokenizer="bytes"), data=tmp_path)
    assert corpus.manifest["source"]["name"] == "poems.txt"


def test_progress_in_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("qklab.data.progress.PLAIN_EVERY", 0.0)
    (tmp_path / "poems.txt").write_text("\n<|endoftext|>\n".join(f"poem {i}" * 1000 for i in range(300)))
    spec = DataSpec(source=str(tmp_path / "poems.txt"), tokenizer="bytes")
    prepare(spec, out=tmp_path / "out", progress=True, workers=1)
    said = capsys.readouterr()
    assert said.out == ""
    assert "tokenising: 2 of 2 MB, about" in said.err
    assert "s left" in said.err


def test_progress_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    (tmp_path / "poems.txt").write_text("\n<|endoftext|>\n".join(f"poem {i}" for i in range(300)))
    prepare(DataSpec(source=str(tmp_path / "poems.txt"), vocab=260), out=tmp_path / "out", progress=True)
    assert "training a BPE of 260 tokens" in capsys.readouterr().err
