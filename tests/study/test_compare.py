"""qklab compare: what it plans, what it refuses, and the whole of it from the command line."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from small_study import InProcess

from qklab.cli import main
from qklab.cli.study import StudyCommand
from qklab.data.spec import DataError
from qklab.study import compare
from qklab.study.executors import WorkerSlots
from qklab.study.spec import StudyError, StudySpec

TWO = WorkerSlots(2, 1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A machine on which steps take as long as the test says, by the width of the model."""
    seconds = {64: 0.01, 128: 0.1, 512: 1.0, 768: 3.0}
    monkeypatch.setattr(compare, "measure_step", lambda spec, device, threads: seconds[spec.model.width])
    return seconds  # pyright: ignore[reportReturnType]


def test_the_time_decides_size_and_tokens(quick: dict[str, float]) -> None:
    said: list[str] = []
    small = compare.plan_comparison([], minutes=5, slots=TWO, say=said.append)
    assert list(small.arms) == ["standard", "leapfrog", "affine", "k=v", "qk-norm"]
    assert (small.corpora, small.seeds, small.analyses, small.match) == (["stdlib"], 5, 2, "tokens")
    assert small.base["model"]["width"] == 64
    steps = small.base["budget"]["tokens"] // (4 * 128)
    assert 0.6 * 300 * 2 / 35 < steps * 0.01 < 300 * 2 / 35  # most of the time that each of 35 runs has is training
    twice = compare.plan_comparison([], minutes=10, slots=TWO)
    assert twice.base["budget"]["tokens"] > 2 * small.base["budget"]["tokens"]
    large = compare.plan_comparison([], minutes=120, slots=TWO)
    assert compare.find_size(large) == "nano"
    assert "35 runs of pico" in said[-1]


def test_a_size_that_is_asked_for_is_taken(quick: dict[str, float]) -> None:
    study = compare.plan_comparison([], minutes=1, size="nano", slots=TWO)
    assert compare.find_size(study) == "nano"
    with pytest.raises(StudyError, match=r"size must be one of .*did you mean 'nano'"):
        compare.plan_comparison([], size="nanoo", slots=TWO)


def test_every_arm_is_a_legal_run_at_every_size_and_none_is_another(quick: dict[str, float]) -> None:
    for size in compare.SIZES:
        study = compare.plan_comparison([], arms=list(compare.list_arms()), size=size, slots=TWO)
        study.refuse_illegal()
        runs = [study.run(arm, "stdlib", study.lrs[0], 0) for arm in study.arms]
        assert len({json.dumps(run.to_dict(), sort_keys=True) for run in runs}) == len(compare.list_arms())


def test_the_measured_step_is_that_of_the_arm() -> None:
    study = compare.plan_size("pico", [], ["k=v"], 5, 3, TWO, "cpu")[0]
    run = study.run("standard", "stdlib", 1e-3, 0)
    deep = run.replace(model=run.model.replace(layers=16))
    assert 0 < compare.measure_step(run, "cpu", 1) < compare.measure_step(deep, "cpu", 1)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"arms": ["standard", "leepfrog"]}, "there is no arm 'leepfrog' .did you mean 'leapfrog'"),
        ({"arms": ["standard"]}, "a comparison needs an arm besides standard"),
        ({"minutes": 0.0}, "minutes must be a number above 0, but 0 came"),
        ({"minutes": float("nan")}, "minutes must be a number above 0"),
    ],
)
def test_what_cannot_be_compared(quick: dict[str, float], asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StudyError, match=sentence):
        compare.plan_comparison([], slots=TWO, **asked)


def test_a_missing_text_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "measure_step", lambda *_: pytest.fail("measured"))
    with pytest.raises(DataError, match="no-such-text"):
        compare.plan_comparison(["no-such-text"], slots=TWO)


def test_small_runs_share_a_gpu() -> None:
    gpus = WorkerSlots(2, 8, (0, 1))
    assert compare.share_gpus(gpus, "pico", None) == WorkerSlots(16, 1, (0, 1))
    assert compare.share_gpus(gpus, "51m", None) == compare.share_gpus(gpus, "pico", 2) == gpus
    assert compare.share_gpus(WorkerSlots(1, 4, (0,)), "nano", None) == WorkerSlots(4, 1, (0,))
    assert compare.share_gpus(TWO, "pico", None) == TWO


def test_compiling_is_the_studys_to_decide(quick: dict[str, float]) -> None:
    def study(tokens: int) -> StudySpec:
        made = compare.plan_comparison([], slots=TWO)
        return made.replace(base=made.base | {"budget": {"tokens": tokens}})

    assert compare.choose_execution(study(512 * (compare.COMPILED - 1))) == {"compile": "no"}
    assert compare.choose_execution(study(512 * compare.COMPILED)) == {"compile": "auto"}


def test_what_is_compared_stays(quick: dict[str, float], tmp_path: Path) -> None:
    study = compare.plan_comparison([], arms=["k=v"], slots=TWO)
    compare.refuse_other_comparison(study, tmp_path, [], None, None)
    compare.refuse_other_comparison(study, tmp_path, ["stdlib"], ["k=v", "standard"], "pico")
    for asked, told in (
        ((["other"], None, None), "texts stdlib, but other came"),
        (([], ["qk-norm"], None), "arms k=v, standard, but qk-norm, standard came"),
        (([], None, "nano"), "a size pico, but nano came"),
    ):
        with pytest.raises(StudyError, match=told):
            compare.refuse_other_comparison(study, tmp_path, *asked)


def test_ray_without_an_address() -> None:
    complete_words = StudyCommand.complete_words
    assert complete_words(["f", "--ray"]) == ["f", "--ray=local"]
    assert complete_words(["f", "--ray", "--rows", "2"]) == ["f", "--ray=local", "--rows", "2"]
    assert complete_words(["f", "--ray", "host:1"]) == ["f", "--ray", "host:1"]


# the page

PAGE = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")


def test_the_page_has_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*)\|", PAGE, re.MULTILINE))
    fields = {field.name: field.default for field in dataclasses.fields(StudySpec)}
    assert list(rows) == list(fields)
    for name, default in fields.items():
        if default not in (None, dataclasses.MISSING):
            shown = default if isinstance(default, str) else json.dumps(default)
            assert rows[name].strip() == f"`{shown}`"


def test_the_page_has_every_arm_and_size_and_its_file_is_a_study() -> None:
    flat = " ".join(PAGE.split())
    assert f"Arms by name: {', '.join(compare.list_arms())}." in flat
    assert f"{', '.join(compare.DEFAULT[:-1])} and {compare.DEFAULT[-1]}" in flat
    assert re.findall(r"^\| (\w+) \| \d+ × \d+ \|", PAGE, re.MULTILINE) == list(compare.SIZES)
    (file,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    StudySpec.from_dict(tomllib.loads(file)).refuse_illegal()


# the whole, from the command line


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough documents for every split, of words that depend on each other."""
    path = tmp_path_factory.mktemp("text") / "tales.jsonl"
    words = ("cat", "sat", "mat", "then", "dog", "ran", "while", "birds", "sang", "songs", "of", "rain")
    lines = [" ".join(words[(i * k + k * k) % len(words)] for k in range(120)) for i in range(400)]
    path.write_text("".join(json.dumps({"text": f"{i} {line}"}) + "\n" for i, line in enumerate(lines)))
    return path


@pytest.mark.long
def test_compare_answers_is_continued_and_reports(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "EVALUATED", 512)
    monkeypatch.setattr("qklab.study.executors.local.LocalExecutor", lambda device, at_once, say: InProcess())
    asked = ("compare", str(text), "--arms", "k=v", "--minutes", "0.01", "--device", "cpu")
    code, out, err = called(capsys, *asked, "--seeds", "2")
    folder = Path("comparisons/tales.jsonl")
    assert code == 0, err
    assert "8 runs of pico" in err
    assert f"On {text}, " in out
    assert "k=v takes" in out
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    summaries = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/*/summary.json")}
    assert len(summaries) == 2 * (3 + 1)

    code, again, err = called(capsys, "compare", str(text))
    assert (code, again) == (0, out[-len(again) :])  # before it came what the runs said
    assert {path: path.stat().st_mtime_ns for path in summaries} == summaries

    for wrong, told in (
        (("--minutes", "1"), "add --continue"),
        (("--seeds", "3"), "add --continue"),
        (("--arms", "affine"), "holds a comparison with arms"),
    ):
        code, _, err = called(capsys, "compare", str(text), *wrong)
        assert code == 2
        assert told in err
        assert err.count("\n") == 1

    code, out, err = called(capsys, "compare", "--out", str(folder), "--continue", "--seeds", "1")
    assert code == 0, err
    assert len(list(folder.glob("runs/*/*/*/summary.json"))) == 10
    assert json.loads((folder / "analyses.json").read_text())["command"].endswith("--continue --seeds {more}")
    assert [each["seeds"] for each in json.loads((folder / "analyses.json").read_text())["taken"]] == [2, 3]
    code, out, err = called(capsys, "compare", "--out", str(folder), "--continue", "--minutes", "0.0001")
    assert (code, len(list(folder.glob("runs/*/*/*/summary.json")))) == (0, 12)
    assert "judged 3 times" in out
    code, _, err = called(capsys, "compare", "--out", "elsewhere", "--continue")
    assert (code, "no comparison in elsewhere" in err) == (2, True)


@pytest.mark.long
def test_a_study_is_stopped_goes_on_and_reports(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "s.toml", tmp_path / "out"
    file.write_text(
        f'name = "s"\nbaseline = "standard"\ncorpora = ["{text}"]\nlrs = [1e-3]\nseeds = 1\n'
        '[base]\nmodel = {recipe = "nano", layers = 1, width = 32, context = 64}\n'
        'corpus = {tokenizer = "bytes"}\nbatch = {sequences = 8}\nbudget = {tokens = 160000}\n'
        "evaluation = {times = 2}\n"
        '[arms.standard]\n[arms."k=v"]\nattention = {share = "k=v"}\n'
    )
    command = [sys.executable, "-m", "qklab.cli", "study", str(file), "--out", str(folder), "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 120
    while not list(folder.glob("runs/*/*/*/metrics.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75
    assert "stopped by SIGTERM; " in err
    assert "the same command continues" in err
    assert "Traceback" not in err
    assert list(folder.glob("runs/*/*/*/checkpoints/step-*"))

    code, out, err = called(capsys, "study", str(file), "--out", str(folder), "--device", "cpu")
    assert code == 0, err
    assert "anecdote" in out
    assert f"Run: qklab study {file} --out {folder} --seeds 3" in out
    assert (folder / "report.html").exists()

    file.write_text(file.read_text().replace("lrs = [1e-3]", "lrs = [2e-3]"))
    code, _, err = called(capsys, "study", str(file), "--out", str(folder))
    assert (code, "began with lrs" in err) == (2, True)
    code, _, err = called(capsys, "study", str(tmp_path / "none.toml"))
    assert (code, "there is no study file" in err) == (2, True)
