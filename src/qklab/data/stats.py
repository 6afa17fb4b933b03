"""What is in a corpus: counts, document lengths, and three measures of how heterogeneous it is.

All are deterministic: documents are taken evenly spaced over the split and ordered by a fixed shuffle.
"""

import lzma
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from qklab.data.shards import Corpus, Split

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
PAIRS, PART_TOKENS, FREQUENT = 2000, 128, 256
WORDS, WORD_DOCUMENTS = 500_000, 20_000
PIECES, PIECE_BYTES = 256, 1024
RAW_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**20}]


def measure_corpus(corpus: Corpus, split: str = "train") -> dict[str, Any]:
    """Counts of every split, and of `split` the document lengths and measures of heterogeneity (docs/data.md)."""
    measured = corpus.splits[split]
    return {
        "hash": corpus.hash,
        "source": corpus.manifest["source"]["name"],
        "tokenizer": corpus.manifest["content"]["tokenizer"],
        "splits": {name: count_split(each) for name, each in corpus.splits.items()},
        "measured": split,
        "document_tokens": measure_lengths(measured),
        "divergence": measure_divergence(measured, corpus.tokenizer.vocab),
        "vocabulary": measure_vocabulary_growth(measured, corpus),
        "compression": measure_concatenation_gain(measured, corpus),
    }


def count_split(split: Split) -> dict[str, Any]:
    text_tokens = split.tokens - split.documents
    return {
        "tokens": split.tokens,
        "documents": split.documents,
        "bytes": split.bytes,
        "bytes_per_token": split.bytes / text_tokens if text_tokens else None,
        "duplicates_removed": split.record["duplicates_removed"],
        "repeats_kept": split.record["repeats_kept"],
    }


def measure_lengths(split: Split) -> dict[str, float] | None:
    """Tokens per document, end-of-text not counted, at the quantiles."""
    if not split.documents:
        return None
    lengths = np.diff(split.starts) - 1
    return {f"{q:.0%}": float(x) for q, x in zip(QUANTILES, np.quantile(lengths, QUANTILES), strict=True)}


def sample_documents(split: Split, most: int, at_least: int = 1) -> np.ndarray:
    """Up to `most` documents of `at_least` tokens, evenly spaced over the split, in a shuffled order."""
    long_enough = np.flatnonzero(np.diff(split.starts) > at_least)
    number = min(most, len(long_enough))
    drawn = long_enough[np.arange(number) * len(long_enough) // max(number, 1)]
    return drawn[np.argsort(np.random.default_rng(0).random(len(drawn)), kind="stable")]


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    """JSD(p, q) = H((p+q)/2) − (H(p) + H(q))/2 in bits, between the unigram distributions of two token arrays."""
    return entropy(np.concatenate([p, q])) - (entropy(p) + entropy(q)) / 2


def entropy(tokens: np.ndarray) -> float:
    frequencies = np.unique(tokens, return_counts=True)[1] / len(tokens)
    return float(-(frequencies * np.log2(frequencies)).sum())


def find_mean_and_error(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "standard_error": float(np.std(values, ddof=1) / math.sqrt(len(values)))}


def measure_divergence(split: Split, vocab: int) -> dict[str, Any] | None:
    """Between-document against within-document unigram divergence, in topic and in style.

    Aᵢ and Bᵢ are the first `PART_TOKENS` tokens of document i and the next. Within: mean JSD(Aᵢ, Bᵢ); between: mean
    JSD(Aᵢ, Bᵢ₊₁), i + 1 being the next of the shuffled documents. All parts are of one size, so that the bias of a
    divergence between small samples is in both and cancels in `gap`, their difference. "topic" tells all tokens apart;
    "style" only the `FREQUENT` most frequent (function words, punctuation, layout) and takes the others for one.
    """
    documents = sample_documents(split, PAIRS, 2 * PART_TOKENS)
    if len(documents) < 8:
        return None
    parts = np.stack([split.read(start + 1, start + 1 + 2 * PART_TOKENS) for start in split.starts[documents].tolist()])
    frequent = np.argsort(-np.bincount(parts.ravel(), minlength=vocab), kind="stable")[:FREQUENT]
    style = np.zeros(vocab, np.int64)
    style[frequent] = 1 + np.arange(len(frequent))
    return {"documents": len(documents), "topic": measure_gap(parts), "style": measure_gap(style[parts])}


def measure_gap(parts: np.ndarray) -> dict[str, dict[str, float]]:
    """Within, between and their difference for parts [documents, 2 · PART_TOKENS]."""
    firsts, seconds = parts[:, :PART_TOKENS], parts[:, PART_TOKENS:]
    within = np.array([jensen_shannon(a, b) for a, b in zip(firsts, seconds, strict=True)])
    between = np.array([jensen_shannon(a, b) for a, b in zip(firsts, np.roll(seconds, -1, axis=0), strict=True)])
    measures = {"within": within, "between": between, "gap": between - within}
    return {name: find_mean_and_error(values) for name, values in measures.items()}


def read_texts(split: Split, corpus: Corpus, documents: np.ndarray) -> Iterator[bytes]:
    pieces = corpus.tokenizer.pieces
    for document in documents.tolist():
        start, stop = (int(x) for x in split.starts[document : document + 2])
        yield b"".join(map(pieces.__getitem__, split.read(start + 1, stop).tolist()))


def measure_vocabulary_growth(split: Split, corpus: Corpus) -> dict[str, Any] | None:
    """Heaps' law V(n) ≈ K nᵝ: distinct words among the first n words of the shuffled documents, n = 1000, 2000, 4000 …

    Words are what stands between white space, so that the measure does not depend on the tokenizer. β is the slope of
    log V over log n by least squares.
    """
    seen: set[bytes] = set()
    curve: list[list[int]] = []
    words, point = 0, 1000
    for raw in read_texts(split, corpus, sample_documents(split, WORD_DOCUMENTS)):
        found = raw.split()
        while words + len(found) >= point:
            seen.update(found[: point - words])
            found, words = found[point - words :], point
            curve.append([point, len(seen)])
            point *= 2
        seen.update(found)
        words += len(found)
        if words >= WORDS:
            break
    if len(curve) < 2:
        return None
    log_words, log_distinct = np.log(np.array(curve, np.float64)).T
    slope, intercept = np.polyfit(log_words, log_distinct, 1)
    return {"words": words, "exponent": float(slope), "factor": float(np.exp(intercept)), "curve": curve}


def measure_compressed_size(raw: bytes) -> int:
    return len(lzma.compress(raw, format=lzma.FORMAT_RAW, filters=RAW_LZMA))


def measure_concatenation_gain(split: Split, corpus: Corpus) -> dict[str, Any] | None:
    """1 − C(d₁d₂…dₙ) / Σ C(dᵢ): what LZMA saves by seeing n documents together, each its first `PIECE_BYTES` bytes.

    Pieces of one size, because a compressor gains on longer texts whatever they are.
    """
    pieces = []
    for raw in read_texts(split, corpus, sample_documents(split, 8 * PIECES)):
        if len(raw) >= PIECE_BYTES:
            pieces.append(raw[:PIECE_BYTES])
        if len(pieces) == PIECES:
            break
    if len(pieces) < 8:
        return None
    apart, together = sum(map(measure_compressed_size, pieces)), measure_compressed_size(b"".join(pieces))
    return {"documents": len(pieces), "apart": apart, "together": together, "gain": 1 - together / apart}
