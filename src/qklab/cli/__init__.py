"""The command line: one file per command that parses, calls and prints. Only the command asked for is imported."""

import dataclasses
import functools
import importlib
import operator
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

try:
    import tyro
except ImportError:
    sys.exit("qklab: the command line needs the package tyro; install it with: pip install tyro")

from qklab.schema import suggest_name

COMMANDS = {  # the command NAME is the class NameCommand of qklab.cli.NAME
    "compare": "Which attention should I use on this text? Trains several and answers with numbers, intervals and "
    "pictures.",
    "study": "Carry out the study of a TOML file; run the same command again to continue where it stopped.",
    "report": "Build the report of studies or runs from their folders alone.",
    "inspect": "Diagnostics and attention maps of a trained model on a text.",
    "data": "Prepare corpora and look at them.",
    "train": "Train a model on a corpus; run the same command again to continue where it stopped.",
    "sample": "Continue a text with a trained model.",
    "export": "Write a trained model as a folder that Transformers loads.",
    "eval": "Score a run or a Transformers model on tasks of lm-evaluation-harness.",
    "describe": "Name, formula, parameters, FLOPs and cache bytes of an attention layer, against (Q,K,V); or why it is "
    "illegal.",
    "mechanisms": "Build every mechanism, print what it costs, and check its cache.",
}


def parse_command(words: Sequence[str]) -> Any:
    """Command-line words → the command with its flags; without a command, the help or what is wrong."""
    if not words or words[0].startswith("-"):
        stands = [
            Annotated[dataclasses.make_dataclass(name, ()), tyro.conf.subcommand(name, description=description)]
            for name, description in COMMANDS.items()
        ]
        one_of: Any = functools.reduce(operator.or_, stands)
        return tyro.cli(one_of, prog="qklab", description="Attention, between Q and K.", args=words)
    name = words[0]
    if name not in COMMANDS:
        raise ValueError(
            f"there is no command {name!r}{suggest_name(name, COMMANDS)}; the commands are {', '.join(COMMANDS)}."
        )
    command = getattr(importlib.import_module(f"qklab.cli.{name}"), f"{name.capitalize()}Command")
    complete_words = getattr(command, "complete_words", list)
    return tyro.cli(command, prog=f"qklab {name}", description=COMMANDS[name], args=complete_words(words[1:]))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `qklab`: bad input ends in one sentence on stderr and exit code 2."""
    try:
        code = parse_command(sys.argv[1:] if arguments is None else arguments).execute()
    except ValueError as error:
        if int(os.environ.get("RANK", 0)) == 0:  # of many ranks one speaks
            print(f"qklab: {error}", file=sys.stderr)
        code = getattr(error, "code", 2)
    except KeyboardInterrupt:
        print("qklab: stopped at once; what was saved before is still there.", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
