import dataclasses
import json
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
        where: a file or folder of .txt, .jsonl or .parquet (also .gz, .xz, .zst), "stdlib", "hf:NAME/CONFIG", or the
            name of a corpus under --data
        data: where corpora are looked for by name; by default $QKLAB_DATA
        out: the folder to prepare it in; by default one in the cache
        workers: processes that tokenise; by default one per processor
    """

    where: Positional[str] = "stdlib"
    data: Path | None = None
    out: Path | None = None
    workers: int | None = None

    def execute(self) -> int:
        from qklab.data import report
        from qklab.data.prepare import prepare

        corpus = prepare(build_data_spec(self), data=self.data, out=self.out, workers=self.workers, progress=True)
        print(report.prepared_text(corpus))
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
        from qklab.data import report

        corpus = report.found_corpus(self.where, build_data_spec(self), data=self.data, progress=True)
        stats = report.stats_dict(corpus)
        print(json.dumps(stats, indent=2, ensure_ascii=False) if self.json else report.stats_text(stats))
        return 0


@dataclasses.dataclass(frozen=True)
class VerifyAction:
    """Check every file of a prepared corpus against its hash."""

    folder: Positional[Path]

    def execute(self) -> int:
        from qklab.data import report

        print(report.verified_text(self.folder))
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
