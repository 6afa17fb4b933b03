"""Training from the command line, as a person meets it: files and flags, exit codes, sentences, resuming, sampling."""

import dataclasses
import re
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tiny import Command

from qklab.data import DataSpec
from qklab.optim import OptimiserSpec, ScheduleSpec
from qklab.runs import MetricsFile, RunDirectory
from qklab.schema import Spec
from qklab.train.settings import resolve_run
from qklab.train.spec import BatchSpec, BudgetSpec, EvaluationSpec, ExecutionSpec, RunSpec

PAGE = Path(__file__).parents[2] / "docs/training.md"


def test_flags_lie_over_the_file(run_file: Path, tmp_path: Path, qklab: Command) -> None:
    flags = ["--optimiser.lr", "1e-3", "--attention.coupling.kind", "leapfrog", "--model.tied", "False", "--seed", "6"]
    code, out, _ = qklab("train", run_file, *flags, "--out", tmp_path / "run", "--quiet")
    assert code == 0
    assert "finished after 6 steps, 1,152 tokens" in out
    spec = RunDirectory(tmp_path / "run").read()["spec"]
    assert (spec["seed"], spec["batch"]["sequences"]) == (6, 4)
    assert (spec["optimiser"]["lr"], spec["model"]["tied"]) == (1e-3, False)
    assert spec["model"]["attention"]["coupling"]["kind"] == "leapfrog"


def test_the_same_command_continues(
    run_file: Path, tmp_path: Path, qklab: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = tmp_path / "run", MetricsFile.append

    def append(self: MetricsFile, record: dict[str, Any]) -> None:
        plain(self, record)
        if record["kind"] == "train" and record["step"] == 4:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "append", append)
        code, out, err = qklab("train", run_file, "--out", folder)
    assert code == 75
    assert "to be continued" in out
    assert "stopped by SIGINT at step 4, everything is saved; the same command continues" in err
    code, out, err = qklab("train", run_file, "--out", folder)
    assert code == 0
    assert f"resuming {folder} at step 4." in err
    assert [record["step"] for record in RunDirectory(folder).metrics("train")] == [1, 2, 3, 4, 5, 6]
    code, again, err = qklab("train", "--out", folder)  # the directory knows the rest
    assert code == 0
    assert "already finished; nothing to do" in err
    assert again == out


def test_a_run_without_a_name_has_a_folder_of_its_own(
    run_file: Path, tmp_path: Path, qklab: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for lr in ("1e-3", "2e-3"):
        assert qklab("train", run_file, "--quiet", "--optimiser.lr", lr)[0] == 0
    assert len([path for path in Path("runs").iterdir() if path.name.startswith("1x32-s5-")]) == 2


def test_a_run_that_diverges_has_its_own_exit_code(run_file: Path, tmp_path: Path, qklab: Command) -> None:
    absurd = ["--optimiser.lr", "1e30", "--optimiser.clip", "0", "--max-skips", "1"]
    code, out, err = qklab("train", run_file, *absurd, "--out", tmp_path / "run")
    assert code == 3
    assert "diverged after" in out
    assert "is not finite; the step is skipped" in err
    assert qklab("train", "--out", tmp_path / "run")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("train missing.toml", r"there is no run file missing\.toml"),
        ("train broken.toml", r"broken\.toml cannot be read as TOML: .*line 1"),
        ("train typo.toml", r"no field 'layer' \(did you mean 'layers'\?\)"),
        ("train run.toml --optimiser.lr -1", r"lr must be a finite number above 0, but -1\.0 came"),
        ("train run.toml --model.recipe nanno", r"did you mean 'nano'"),
        ("train run.toml --budget.seconds 5 --budget.tokens 100", "a budget is one of tokens, seconds and flops"),
        ("train run.toml --corpus.source nowhere", "there is no source 'nowhere'"),
        ("train run.toml --model.context 900000", r"too few for one window of 900000 \+ 1"),
        ("train run.toml --model.vocab 40", r"the tokenizer has 257 tokens and the model vocab=40"),
        ("train run.toml --out run.toml", "the run directory run.toml cannot be written: file exists"),
        ("train run.toml --execution.sinks tensorbord", "did you mean 'tensorboard'"),
        ("train run.toml --model.width 2000000", r"at least [\d,]+ GiB for its weights, .*; try a smaller model.width"),
        (
            "train run.toml --batch.sequences 2000000000",
            r"at least [\d,]+ GiB for its .*; try a smaller batch.sequences",
        ),
        ("train run.toml --execution.threads 100000", "threads must be a whole number from 1 to 1024, but 100000 came"),
        ("train run.toml --seed 1 --model.layers 2 --seed=2", "--seed came more than once; give it once"),
        ("data prepare run.toml --workers 100000", "workers must be a number from 1 to 256, but 100000 came"),
        ("sample nowhere", "nowhere is not a run directory"),
    ],
)
def test_bad_input_ends_in_one_sentence(
    arguments: str,
    sentence: str,
    run_file: Path,
    tmp_path: Path,
    qklab: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("[model\n")
    Path("typo.toml").write_text("[model]\nlayer = 3\n")
    code, out, err = qklab(*arguments.split())
    assert code == 2
    assert out == ""
    assert err.startswith("qklab: ")
    assert err.count("\n") == 1
    assert re.search(sentence, err)


@pytest.mark.parametrize(
    ("flag", "meant"), [("--optimizer.lr", "--optimiser.lr"), ("--logit-controll.tau", "--logit-control.tau")]
)
def test_a_mistyped_flag_comes_with_a_suggestion(flag: str, meant: str, qklab: Command) -> None:
    code, _, err = qklab("train", flag, "1e-3")
    assert code == 2
    assert meant in err


def test_a_run_is_sampled_from_and_damaged_records_are_refused(run_file: Path, tmp_path: Path, qklab: Command) -> None:
    folder = tmp_path / "run"
    assert qklab("train", run_file, "--out", folder, "--quiet")[0] == 0
    drawn = [qklab("sample", folder, "Lic", "--tokens", 12, "--seed", 1, *best) for best in ([], [], ["--best"])]
    assert all(code == 0 and out.startswith("Lic") for code, out, _ in drawn)
    assert drawn[0] == drawn[1]
    assert qklab("sample", folder, "--tokens", 3)[0] == 0  # no prompt: from the beginning of a text
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    code, _, err = qklab("train", run_file, "--out", folder, "--optimiser.lr", "1e-3")
    assert code == 2
    assert "holds a run with optimiser.lr=0.003, but 0.001 came" in err
    assert before == {path: path.read_bytes() for path in before}
    for weights in folder.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    code, _, err = qklab("sample", folder)
    assert code == 2
    assert "can be trusted" in err
    (folder / "run.json").write_text('{"format": 1')
    for command in (["train", "--out", folder], ["sample", folder]):
        code, _, err = qklab(*command)
        assert code == 2
        assert "run.json cannot be read" in err
        assert err.count("\n") == 1


def test_the_run_file_in_the_documentation_is_a_run() -> None:
    found = re.search(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    spec, execution = resolve_run(tomllib.loads(found[1]))
    assert spec.model.pattern[0].name == "(Q,K=V) · leapfrog×1 · qk-norm"
    assert spec.steps == 489
    assert execution.sinks == "tensorboard"


@pytest.mark.parametrize(
    "kind", [RunSpec, DataSpec, BatchSpec, OptimiserSpec, ScheduleSpec, BudgetSpec, EvaluationSpec, ExecutionSpec]
)
def test_every_setting_is_documented_with_its_default(kind: type[Spec]) -> None:
    """As `name` or `table.name` in the table of all settings, its default in the same row."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text[text.index("## All settings") :].splitlines() if line.startswith("|")]
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        name = field.name
        if "spec" in field.metadata:
            continue
        found = [row for row in rows if re.search(rf"`(\w+\.)?{name}`", row.split("|")[1])]
        assert found, name
        if isinstance(field.default, str | bool):
            assert any(f"`{field.default}`" in row for row in found), name
        elif isinstance(field.default, int | float):
            numbers = [float(n.replace(",", "")) for row in found for n in re.findall(r"[\d,.]*\d(?:e-\d+)?", row)]
            assert field.default in numbers, name
