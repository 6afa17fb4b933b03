import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from qklab.cli.flags import collect_given, make_optional_flags
from qklab.data.spec import DataSpec

CorpusFlags = make_optional_flags(DataSpec, source=None)


@dataclasses.dataclass(frozen=True)
class PrepareAction(CorpusFlags):
    """Read a source, split it into train, valid and test, tokenise it, and keep it as hashed shards.

    Args:
        where: a file or folder of .txt, .md, .jsonl, .json, .csv, .tsv or .parquet (also .gz, .xz, .zst), "stdlib",
            "hf:NAME/CONFIG", or the name of a corpus under --data
        data: where corpora are looked for by name; by default $QKLAB_DATA
        out: the folder to prepare it in; by default one in the cache
        workers: processes that tokenise; by default one per processor
    """

    where: Positional[str] = "stdlib"
    data: Path | None = None
    out: Path | None = None
    workers: int | None = None

    def execute(self) -> int:
        from qklab.data.prepare import prepare_corpus
        from qklab.runs.progress import Terminal

        spec = build_data_spec(self)
        with closing(Terminal()) as display:
            corpus = prepare_corpus(
                spec, data=self.data, out=self.out, workers=self.workers, progress=display.report_bytes
            )
        print(describe_corpus(corpus))
        return 0


@dataclasses.dataclass(frozen=True)
class StatsAction(CorpusFlags):
    """Tokens, bytes per token, documents, and how heterogeneous a corpus is.

    Args:
        where: a prepared corpus, or a source as for `prepare`
        data: where corpora are looked for by name; by default $QKLAB_DATA
    """

    where: Positional[str] = "stdlib"
    data: Path | None = None
    json: bool = False

    def execute(self) -> int:
        from qklab.data.prepare import prepare_corpus
        from qklab.data.stats import measure_corpus
        from qklab.runs.progress import Terminal

        with closing(Terminal()) as display:
            stats = measure_corpus(prepare_corpus(build_data_spec(self), data=self.data, progress=display.report_bytes))
        print(json.dumps(stats, indent=2, ensure_ascii=False) if self.json else format_stats(stats))
        return 0


@dataclasses.dataclass(frozen=True)
class VerifyAction:
    """Check every file of a prepared corpus against its hash."""

    folder: Positional[Path]

    def execute(self) -> int:
        from qklab.data.shards import Corpus

        corpus = Corpus.open(self.folder)
        corpus.verify()
        files = f"{len(corpus.list_files())} files and the tokenizer"
        print(f"{corpus.folder}: {files} are as the manifest says (hash {corpus.hash[:16]}).")
        return 0


@dataclasses.dataclass(frozen=True)
class DataCommand:
    action: tyro.conf.OmitSubcommandPrefixes[
        Annotated[PrepareAction, tyro.conf.subcommand("prepare")]
        | Annotated[StatsAction, tyro.conf.subcommand("stats")]
        | Annotated[VerifyAction, tyro.conf.subcommand("verify")]
    ]

    def execute(self) -> int:
        return self.action.execute()


def build_data_spec(flags: Any) -> DataSpec:
    """Command-line flags → spec."""
    names = {field.name for field in dataclasses.fields(DataSpec)}
    values = {name: value for name, value in collect_given(flags).items() if name in names}
    return DataSpec.from_dict(values | {"source": flags.where})


def describe_corpus(corpus: Any) -> str:
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


def format_stats(stats: dict[str, Any]) -> str:
    """Counts, document lengths and measures of heterogeneity as a few aligned lines."""
    lines = [
        f"{stats['source']}: {stats['tokenizer']['kind']} of {stats['tokenizer']['vocab']}, hash {stats['hash'][:16]}",
        f"{'':8}{'tokens':>14}{'documents':>12}{'bytes':>16}{'bytes/token':>13}{'duplicates':>12}{'repeats':>9}",
    ]
    for name, split in stats["splits"].items():
        rate = "–" if split["bytes_per_token"] is None else f"{split['bytes_per_token']:.3f}"
        lines.append(
            f"{name:8}{split['tokens']:>14,}{split['documents']:>12,}{split['bytes']:>16,}{rate:>13}"
            f"{split['duplicates_removed']:>12,}{split['repeats_kept']:>9,}"
        )
    lengths = stats["document_tokens"]
    if lengths:
        lines.append("tokens per document: " + ", ".join(f"{q} {x:,.0f}" for q, x in lengths.items()))
    return "\n".join(lines + format_heterogeneity(stats))


def format_heterogeneity(stats: dict[str, Any]) -> list[str]:
    divergence, words, compression = (stats[key] for key in ("divergence", "vocabulary", "compression"))
    lines = []
    for kind in ("topic", "style") if divergence else ():
        values = {key: f"{x['mean']:.4f} ± {x['standard_error']:.4f}" for key, x in divergence[kind].items()}
        lines.append(
            f"unigram divergence in {kind}, bits: within documents {values['within']}, between {values['between']}, "
            f"gap {values['gap']} ({divergence['documents']} documents)"
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
