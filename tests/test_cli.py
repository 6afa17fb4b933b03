"""The command line, as a person meets it."""

import json
import re
import subprocess
import sys

import pytest

from qklab.cli import main
from qklab.describe import format_change
from qklab.mechanisms import list_mechanisms


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.mark.parametrize(("kv_heads", "percent"), [("16", "−50 %"), ("4", "−87.5 %"), ("1", "−96.9 %")])
def test_describe_prints_the_cache_reduction(capsys: pytest.CaptureFixture[str], kv_heads: str, percent: str) -> None:
    code, out, _ = run(capsys, "describe", "--share", "k=v", "--heads", "16", "--kv-heads", kv_heads)
    assert code == 0
    lines = [line for line in out.splitlines() if "cache bytes" in line]
    assert len(lines) == 2
    assert all(line.endswith(percent) for line in lines)


def test_changes_are_told_to_a_tenth_of_a_percent_or_two_digits() -> None:
    now = {1_000_000: "±0 %", 500_000: "−50 %", 1_234_567: "+23.5 %", 999_877: "−0.012 %"}
    assert {each: format_change(each, 1_000_000) for each in now} == now


def test_describe_tells_the_whole_story(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "describe --share k=v --heads 16 --kv-heads 4 --coupling.kind leapfrog --coupling.steps 2 --norm qk"
    code, out, _ = run(capsys, *arguments.split())
    assert code == 0
    assert out.startswith("(Q,K=V) · leapfrog×2 · gqa4 · qk-norm\n")
    for stage in ("project", "couple", "normalise", "rotate", "mix", "output"):
        assert f"\n  {stage}" in out
    assert "(2 times)" in out


def test_describe_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "describe --heads 8 --latent.query-rank 64 --latent.kv-rank 32 --latent.rope-width 16 --json"
    code, out, _ = run(capsys, *arguments.split())
    told = json.loads(out)
    assert code == 0
    assert told["name"] == "MLA 64/32+16"
    assert told["layer"]["cache_bytes_per_token"] == 2 * (32 + 16)
    assert told["baseline"]["cache_bytes"] == 2 * 2 * 512 * told["baseline"]["cache_tokens"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--share q=k --heads 16 --kv-heads 4", "kv_heads=4 is refused: .*nearest legal: kv_heads=16."),
        ("--heads 0", "heads must be a whole number"),
        ("--coupling.steps 2", "add --coupling.kind"),
        ("--latent.kv-rank 8", "latent: LatentSpec needs query_rank"),
        (
            "--coupling.kind affine --coupling.step-size 2",
            "coupling: step_size=2.0 is refused: affine has no step size",
        ),
    ],
)
def test_illegal_specs_end_in_one_sentence(capsys: pytest.CaptureFixture[str], arguments: str, sentence: str) -> None:
    code, out, err = run(capsys, "describe", *arguments.split())
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(sentence, err)


def test_typos_come_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "describe", "--kv-head", "4")
    assert code == 2
    assert "--kv-heads" in err


def test_mechanisms_agree_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "mechanisms")
    assert code == 0
    assert out.count("│    yes") == len(list_mechanisms())
    assert "NO" not in out
    assert "the same" in out
    assert "parameters, untrained" in out


@pytest.mark.parametrize(
    "words", ["--help", "no-such-command", "study --help", "compare --help", "report --help", "data prepare --help"]
)
def test_help_and_wrong_commands_do_without_torch(words: str) -> None:
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); from qklab.cli import main; "
    result = subprocess.run([sys.executable, "-c", f"{check}main({words.split()})"], capture_output=True, text=True)
    assert result.returncode == (0 if "--help" in words else 2)
    assert result.stdout.splitlines()[-1] == "False"


def test_a_wrong_command_ends_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "descibe", "--heads", "3")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "there is no command 'descibe' (did you mean 'describe'?)" in err
    code, _, err = run(capsys)
    assert code == 2
    assert "describe, mechanisms" in err


SIGNALLED = """
import signal
from qklab import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # which what a script starts in the background ignores

class Command:
    def execute(self):
        if {twice}:
            from qklab.runs.signals import StopRequest
            with StopRequest() as stop:
                signal.raise_signal(signal.SIGTERM)
                assert stop.came == "SIGTERM"
                signal.raise_signal(signal.SIGTERM)
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            pass  # as what is being imported may do
        print("it went on")

cli.parse_command = lambda words: Command()
cli.main([])
"""


@pytest.mark.parametrize(("twice", "code", "name"), [(False, 130, "SIGINT"), (True, 143, "SIGTERM")])
def test_ctrl_c_while_it_starts_and_a_second_sigterm_end_in_one_sentence(twice: bool, code: int, name: str) -> None:
    program = SIGNALLED.format(twice=twice)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr == f"qklab: stopped at once by {name}; what was saved before is still there.\n"


def test_importing_qklab_pulls_in_nothing_optional() -> None:
    check = (
        "import sys; from qklab import *; "
        "print([m for m in ('tyro', 'rich', 'transformers', 'scipy', 'matplotlib', 'triton') if m in sys.modules]); "
        "from qklab import register; print('bits_per_byte' in register.metric)"  # whose home is imported for that
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["[]", "True"]
