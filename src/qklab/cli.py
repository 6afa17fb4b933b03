"""The command line: parse, call, print."""

import dataclasses
import functools
import json
import operator
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import tyro
    from tyro.conf import Positional
except ImportError:
    sys.exit("qklab: the command line needs the package tyro; install it with: pip install tyro")

from qklab import describe
from qklab.flags import CorpusChoices, RunChoices, SpecFlags, attention_spec, chosen


@dataclasses.dataclass(frozen=True)
class Describe(SpecFlags):
    __doc__ = SpecFlags.__doc__
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Demo:
    """Every mechanism and what it costs, then a small model trained on the text of Python's standard library.

    Args:
        seconds: how long to train; 0 leaves it out
    """

    seconds: float = 45.0


def run_describe(flags: Any) -> int:
    """Name, formula, parameters, FLOPs and cache bytes of an attention layer, against (Q,K,V); or why it is illegal."""
    spec = attention_spec(flags)
    print(json.dumps(describe.as_dict(spec), indent=2, ensure_ascii=False) if flags.json else describe.as_text(spec))
    return 0


def run_demo(flags: Any) -> int:
    """Build every mechanism, print what it costs, check its cache; then train a small model and let it write."""
    from rich.console import Console

    from qklab import demo

    return 0 if demo.run(Console(width=None if sys.stdout.isatty() else 140), flags.seconds) else 1


@dataclasses.dataclass(frozen=True)
class Train(RunChoices):
    """Train one model. Settings come from FILE, overridden by flags, and else from the defaults.

    Args:
        file: a TOML file with the settings
        out: the run directory; if a run is there it is continued
        data: where corpora are looked for by name; by default $QKLAB_DATA
        quiet: show no progress
    """

    file: Positional[Path | None] = None
    out: Path | None = None
    data: Path | None = None
    quiet: bool = False


def run_train(flags: Any) -> int:
    """Train a model on a corpus; run the same command again to continue where it stopped."""
    from qklab.train import launch
    from qklab.train.progress import Terminal

    values = chosen(flags)
    file, out, data, quiet = (values.pop(name, None) for name in ("file", "out", "data", "quiet"))
    spec, execution = launch.asked(values, file, out)
    outcome = launch.train(spec, out, execution, data=data, display=None if quiet else Terminal())
    if int(os.environ.get("RANK", 0)) == 0:
        print(launch.told(outcome))
    return launch.EXIT_CODES[outcome.status]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Continue a text with a trained model, drawing through its key/value cache.

    Args:
        run: a run directory
        prompt: the text to continue
        tokens: how many tokens at most
        temperature: 0 takes the likeliest token
        best: the best checkpoint instead of the newest
    """

    run: Positional[Path]
    prompt: Positional[str] = ""
    tokens: int = 100
    temperature: float = 0.8
    seed: int | None = None
    best: bool = False


def run_sample(flags: Any) -> int:
    """Continue a text with a trained model."""
    from qklab.train.trained import load, sample

    decoder, tokenizer = load(flags.run, "best" if flags.best else "newest")
    print(sample(decoder, tokenizer, flags.prompt, flags.tokens, temperature=flags.temperature, seed=flags.seed))
    return 0


@dataclasses.dataclass(frozen=True)
class DataPrepare(CorpusChoices):
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


@dataclasses.dataclass(frozen=True)
class DataStats(CorpusChoices):
    """Tokens, bytes per token, documents, and how heterogeneous a corpus is.

    Args:
        where: a prepared corpus, or a source as for `prepare`
        data: where corpora are looked for by name; by default $QKLAB_DATA
    """

    where: Positional[str] = "stdlib"
    data: Path | None = None
    json: bool = False


@dataclasses.dataclass(frozen=True)
class DataVerify:
    """Check every file of a prepared corpus against its hash."""

    folder: Positional[Path]


@dataclasses.dataclass(frozen=True)
class Data:
    action: tyro.conf.OmitSubcommandPrefixes[
        Annotated[DataPrepare, tyro.conf.subcommand("prepare")]
        | Annotated[DataStats, tyro.conf.subcommand("stats")]
        | Annotated[DataVerify, tyro.conf.subcommand("verify")]
    ]


def run_data(flags: Any) -> int:
    """Prepare corpora and look at them."""
    from qklab.data import report
    from qklab.data.prepare import prepare
    from qklab.data.spec import DataSpec

    action = flags.action
    if isinstance(action, DataVerify):
        print(report.verified_text(action.folder))
        return 0
    values = chosen(action)
    own = {name: values.pop(name, None) for name in ("where", "data", "out", "workers", "json")}
    spec = DataSpec.from_dict(values | {"source": own["where"]})
    if isinstance(action, DataPrepare):
        corpus = prepare(spec, data=own["data"], out=own["out"], workers=own["workers"], progress=True)
        print(report.prepared_text(corpus))
        return 0
    stats = report.stats_dict(report.found_corpus(own["where"], spec, data=own["data"], progress=True))
    print(json.dumps(stats, indent=2, ensure_ascii=False) if own["json"] else report.stats_text(stats))
    return 0


COMMANDS = {
    "data": (Data, run_data),
    "train": (Train, run_train),
    "sample": (Sample, run_sample),
    "describe": (Describe, run_describe),
    "demo": (Demo, run_demo),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `qklab`: bad input ends in one sentence on stderr and exit code 2."""
    parsers: list[Any] = [
        Annotated[flags, tyro.conf.subcommand(name, description=run.__doc__)] for name, (flags, run) in COMMANDS.items()
    ]
    either: Any = functools.reduce(operator.or_, parsers)
    try:
        chosen = tyro.cli(either, prog="qklab", description="Attention, between Q and K.", args=arguments)
        code = next(run for flags, run in COMMANDS.values() if isinstance(chosen, flags))(chosen)
    except ValueError as error:
        if int(os.environ.get("RANK", 0)) == 0:  # of many ranks one speaks
            print(f"qklab: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("qklab: stopped at once; what was saved before is still there.", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    main()
