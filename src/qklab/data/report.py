"""What `qklab data prepare`, `stats` and `verify` say."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qklab.data.prepare import prepare
from qklab.data.shards import MANIFEST, Corpus
from qklab.data.spec import DataSpec
from qklab.data.stats import corpus_stats


def found_corpus(
    name: str,
    spec: DataSpec | None = None,
    *,
    data: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[str, int, int], None] = False,
) -> Corpus:
    """The prepared corpus in the folder `name`, or the one prepared from the source `name` as `spec` says."""
    if (Path(name) / MANIFEST).exists():
        return Corpus.open(name)
    return prepare((spec or DataSpec()).replace(source=name), data=data, progress=progress)


def prepared_text(corpus: Corpus) -> str:
    """Where a corpus lies and how much it holds, a few lines."""
    tokenizer = corpus.manifest["content"]["tokenizer"]
    lines = [
        str(corpus.folder),
        f"  hash {corpus.hash[:16]}, tokenizer {tokenizer['kind']} of {tokenizer['vocab']} ({tokenizer['hash'][:16]})",
    ]
    for name, split in corpus.splits.items():
        removed = split.record["duplicates_removed"]
        dropped = f", {removed:,} duplicates of other splits removed" if removed else ""
        size = f"{split.tokens:>14,} tokens  {split.documents:>11,} documents  {split.bytes / 1e6:,.2f} MB"
        lines.append(f"  {name:5} {size}{dropped}")
    return "\n".join(lines)


def verified_text(folder: str | os.PathLike[str]) -> str:
    """Check every file of a prepared corpus against its SHA-256; raises DataError for the first that differs."""
    corpus = Corpus.open(folder)
    corpus.verify()
    number = len(corpus.files())
    return f"{corpus.folder}: {number} files and the tokenizer are as the manifest says (hash {corpus.hash[:16]})."


def stats_dict(corpus: Corpus) -> dict[str, Any]:
    """For `--json`: everything `stats_text` shows, unrounded."""
    return corpus_stats(corpus)


def stats_text(stats: dict[str, Any]) -> str:
    """Counts, document lengths and measures of heterogeneity as a few aligned lines."""
    lines = [
        f"{stats['source']}: {stats['tokenizer']['kind']} of {stats['tokenizer']['vocab']}, hash {stats['hash'][:16]}"
    ]
    lines.append(
        f"{'':8}{'tokens':>14}{'documents':>12}{'bytes':>16}{'bytes/token':>13}{'duplicates':>12}{'repeats':>9}"
    )
    for name, split in stats["splits"].items():
        rate = "–" if split["bytes_per_token"] is None else f"{split['bytes_per_token']:.3f}"
        lines.append(
            f"{name:8}{split['tokens']:>14,}{split['documents']:>12,}{split['bytes']:>16,}{rate:>13}"
            f"{split['duplicates_removed']:>12,}{split['repeats_kept']:>9,}"
        )
    lengths = stats["document_tokens"]
    if lengths:
        lines.append("tokens per document: " + ", ".join(f"{q} {x:,.0f}" for q, x in lengths.items()))
    lines += heterogeneity_lines(stats)
    return "\n".join(lines)


def heterogeneity_lines(stats: dict[str, Any]) -> list[str]:
    divergence, words, compression = (stats[key] for key in ("divergence", "vocabulary", "compression"))
    lines = []
    if divergence:
        for kind in ("topic", "style"):
            shown = {key: f"{x['mean']:.4f} ± {x['standard_error']:.4f}" for key, x in divergence[kind].items()}
            lines.append(
                f"unigram divergence in {kind}, bits: within documents {shown['within']}, between {shown['between']}, "
                f"gap {shown['gap']} ({divergence['documents']} documents)"
            )
    if words:
        lines.append(
            f"vocabulary growth: V(n) ≈ {words['factor']:.1f} n^{words['exponent']:.3f} over {words['words']:,} words"
        )
    if compression:
        lines.append(
            f"compression gain from concatenating {compression['documents']} documents: {compression['gain']:.1%}"
        )
    return lines or ["too few or too short documents to measure heterogeneity"]
