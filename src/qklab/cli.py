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

from qklab import demo, describe
from qklab.flags import RunChoices, SpecFlags, attention_spec, chosen


@dataclasses.dataclass(frozen=True)
class Describe(SpecFlags):
    __doc__ = SpecFlags.__doc__
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Demo:
    pass


def run_describe(flags: Any) -> int:
    """Name, formula, parameters, FLOPs and cache bytes of an attention layer, against (Q,K,V); or why it is illegal."""
    spec = attention_spec(flags)
    print(json.dumps(describe.as_dict(spec), indent=2, ensure_ascii=False) if flags.json else describe.as_text(spec))
    return 0


def run_demo(flags: Any) -> int:
    """Build every mechanism, print what it costs, and check that decoding from its cache equals the full forward."""
    from rich.console import Console

    return 0 if demo.run(Console(width=None if sys.stdout.isatty() else 140)) else 1


@dataclasses.dataclass(frozen=True)
class Train(RunChoices):
    """Train one model. Settings come from FILE, overridden by flags, and else from the defaults.

    Args:
        file: a TOML file with the settings
        run: the run directory; if a run is there it is continued
        data: where corpora are looked for by name; by default $QKLAB_DATA
        quiet: show no progress
    """

    file: Positional[Path | None] = None
    run: Path | None = None
    data: Path | None = None
    quiet: bool = False


def run_train(flags: Any) -> int:
    """Train a model on a corpus; run the same command again to continue where it stopped."""
    from qklab.train import launch
    from qklab.train.progress import Terminal

    values = chosen(flags)
    file, run, data, quiet = (values.pop(name, None) for name in ("file", "run", "data", "quiet"))
    spec, execution = launch.asked(values, file, run)
    outcome = launch.train(spec, run, execution, data=data, display=None if quiet else Terminal())
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
    from qklab.train.load import load, sample

    decoder, tokenizer = load(flags.run, "best" if flags.best else "newest")
    print(sample(decoder, tokenizer, flags.prompt, flags.tokens, temperature=flags.temperature, seed=flags.seed))
    return 0


COMMANDS = {
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
        print(f"qklab: {error}", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    main()
