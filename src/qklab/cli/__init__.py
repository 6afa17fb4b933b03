"""The command line: one file per command that parses, calls and prints. Only the command asked for is imported."""

import functools
import importlib
import operator
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, NoReturn

from qklab.runs.signals import SIGNALS, replace_handlers
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
    "convert": "Change the attention of a trained model, e.g. for half the cache, and repair it on your text.",
    "eval": "Score a run or a Transformers model on tasks of lm-evaluation-harness.",
    "finetune": "Fine-tune runs, the runs of a study or Transformers models on a task of GLUE, and compare them.",
    "describe": "Name, formula, parameters, FLOPs and cache bytes of an attention layer, against (Q,K,V); or why it is "
    "illegal.",
    "mechanisms": "Build every mechanism, print what it costs, and check its cache.",
}


def parse_command(words: Sequence[str]) -> Any:
    """Command-line words → the command with its flags; without a command, the help or what is wrong."""
    try:
        import tyro
    except ImportError:
        raise ValueError("the command line needs the package tyro; install it with: pip install tyro") from None
    import dataclasses

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
    refuse_repeated_flags(words[1:])
    command = getattr(importlib.import_module(f"qklab.cli.{name}"), f"{name.capitalize()}Command")
    complete_words = getattr(command, "complete_words", list)
    return tyro.cli(command, prog=f"qklab {name}", description=COMMANDS[name], args=complete_words(words[1:]))


def refuse_repeated_flags(words: Sequence[str]) -> None:
    """Raise for a flag that comes twice: which of its values is meant cannot be known."""
    flags = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--") and len(word) > 2]
    repeated = next((flag for flag in flags if flags.count(flag) > 1), None)
    if repeated is not None:
        several = f", with all its values after it: {repeated} A B" if repeated == "--arms" else ""
        raise ValueError(f"{repeated} came more than once; give it once{several}.")


@contextmanager
def leave_on_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM, where nothing listens for them yet or any more, end the process with a sentence and a code.

    At once and not by an exception, which what is being imported may take for an error of its own and go on; whatever
    can be killed anywhere can be left anywhere."""

    def leave(number: int, frame: FrameType | None) -> None:
        shown = b"\x1b[?25h\n" if os.isatty(2) else b""  # a bar that is redrawn hides the cursor
        name = signal.Signals(number).name
        os.write(2, shown + f"qklab: stopped at once by {name}; what was saved before is still there.\n".encode())
        os._exit(128 + number)

    restore = replace_handlers(leave, [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN])
    try:
        yield
    finally:
        restore()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `qklab`: bad input ends in one sentence on stderr and exit code 2."""
    try:
        with leave_on_signals():
            code = parse_command(sys.argv[1:] if arguments is None else arguments).execute()
    except (ValueError, MemoryError) as error:
        if int(os.environ.get("RANK", 0)) == 0:  # of many ranks one speaks
            print(f"qklab: {error or 'there is not enough memory for this.'}", file=sys.stderr)
        code = getattr(error, "code", 2)
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"qklab: {where}{(error.strerror or str(error)).lower()}.", file=sys.stderr)
        code = 2
    sys.exit(code)
