"""What our messages tell people to run exists: every command and flag that a sentence of the source names."""

import ast
import re
from pathlib import Path

import pytest

from fuzz import list_flags, try_commands
from qklab.cli import COMMANDS, parse_command
from qklab.cli.compare import CompareCommand
from qklab.cli.convert import ConvertCommand
from qklab.cli.data import PrepareAction, StatsAction
from qklab.cli.describe import DescribeCommand
from qklab.cli.eval import EvalCommand
from qklab.cli.report import ReportCommand
from qklab.cli.study import StudyCommand
from qklab.cli.train import TrainCommand

SOURCE = Path(__file__).parents[1] / "src" / "qklab"
FLAGS = {
    flag
    for command in (
        *(
            CompareCommand,
            ConvertCommand,
            DescribeCommand,
            EvalCommand,
            PrepareAction,
            ReportCommand,
            StatsAction,
            StudyCommand,
        ),
        TrainCommand,
    )
    for flag in list_flags(command)
} | {"--out", "--data", "--help"}
OTHERS = ("runs/environment.py", "study/executors/ray.py", "testing/test_mechanism.py")  # these call git, ray, pytest


def read_sentences() -> list[tuple[str, str]]:
    """(file, text) of every string of the source that is no docstring; what an f-string fills in is {}."""
    found: list[tuple[str, str]] = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
        docs = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | docs:
                text = node.value
            else:
                continue
            found.append((path.relative_to(SOURCE).as_posix(), text))
    return found


SENTENCES = read_sentences()


def test_commands_that_messages_name_exist() -> None:
    told = [text for _, text in SENTENCES]
    named = [command for text in told for command in re.findall(r"[Rr]un:? qklab ([a-z]+)", text)]
    actions = [action for text in told for action in re.findall(r"\bqklab data ([a-z]+)", text)]
    assert named
    assert set(named) <= COMMANDS.keys()
    assert set(actions) <= {"prepare", "stats", "verify"}


def test_flags_that_messages_name_exist() -> None:
    named = {(file, flag) for file, text in SENTENCES for flag in re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", text)}
    assert len(named) > 10
    unknown = {(file, flag) for file, flag in named if flag not in FLAGS and file not in OTHERS}
    assert not unknown


@pytest.mark.parametrize("words", ["compare --help", "study --help", "data prepare --help", "train --help"])
def test_help_of_what_is_suggested(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_command(words.split())
    assert not end.value.code
    assert "usage" in capsys.readouterr().out.lower()


def test_nothing_that_comes_in_ends_in_a_traceback() -> None:
    assert not (faults := try_commands(48, seed=0)), "\n\n".join(faults)
