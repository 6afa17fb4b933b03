"""qklab compare: what it plans, what it refuses, and the whole of it from the command line."""

import dataclasses
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_study import InProcess, fabricate, read_comparable

from qklab import register
from qklab.cli import main
from qklab.cli.study import StudyCommand
from qklab.data.spec import DataError
from qklab.study import compare, sizes
from qklab.study.arms import DEFAULT, list_arms
from qklab.study.compare import ComparisonPlan
from qklab.study.executors import WorkerSlots
from qklab.study.extend import extend_comparison, refuse_other_request
from qklab.study.plan import PlannedRun, count_runs, plan_tuning_runs
from qklab.study.records import Analyses, StudyRecord
from qklab.study.request import ComparisonRequest
from qklab.study.spec import StudyError, StudySpec
from qklab.train.spec import RunSpec
from qklab.train.trainer import Trainer

TWO = WorkerSlots(2, 1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose speed is the test's to say, by the width of the model, and text that needs no reading."""
    seconds = {64: 0.005, 128: 0.1, 256: 0.4, 384: 0.8, 512: 2.0, 768: 6.0}
    monkeypatch.setattr(sizes, "measure_step", lambda run, device, threads, members: seconds[run.model.width])
    monkeypatch.setattr(compare, "refuse_unusable", lambda spec, data: None)


def plan(slots: WorkerSlots = TWO, say: Callable[[str], None] = lambda _: None, **asked: Any) -> ComparisonPlan:
    return compare.plan_comparison(ComparisonRequest(**asked), slots=slots, say=say)


def test_the_time_decides_size_and_tokens(quick: None) -> None:
    said: list[str] = []
    small = plan(minutes=5, say=said.append)
    assert list(small.study.arms) == ["standard", "leapfrog", "affine", "k=v", "qk-norm"]
    assert (small.study.corpora, small.study.seeds, small.study.analyses) == (["stdlib"], 5, 2)
    assert (small.size, small.study.base["budget"]["tokens"]) == ("pico", small.tokens)
    assert 0.5 * 300 * 2 / 75 < small.tokens / 256 * 0.005 < 300 * 2 / 75  # most of a run's time is training
    assert small.run_seconds <= 300 * 2 / 75
    assert small.run_seconds * 4 / 3 == pytest.approx(1.25 * 300 * 2 / 75, rel=0.01)  # with one learning rate more
    evaluation = small.study.base["evaluation"]
    whole = 0.05 * small.study.base["corpus"]["limit_bytes"] / 3  # which is all there is to be read
    read = 8 * evaluation["tokens"] + min(whole, 2 * evaluation["final_tokens"])
    assert small.run_seconds == pytest.approx(2 + (small.tokens + read / 3) / 256 * 0.005)  # all of it is planned
    assert "75 runs of pico (0.394 M parameters)" in said[1]
    assert f"{small.tokens_per_parameter:.2g} a parameter" in said[1]
    assert "fewer than the 10" in said[2]
    with pytest.MonkeyPatch.context() as patch:  # no larger size is measured in vain
        patch.setattr(sizes, "measure_step", lambda run, *_: {64: 0.01}[run.model.width])
        assert plan(minutes=5).size == "pico"
    assert plan(minutes=10).tokens > 2 * small.tokens


def test_the_largest_size_that_gets_ten_tokens_a_parameter(quick: None) -> None:
    found = {minutes: plan(minutes=minutes) for minutes in (120, 430, 4300, 13_000)}
    assert [one.size for one in found.values()] == ["pico", "nano", "micro", "mini"]
    ladder = list(sizes.SIZES)
    for minutes, one in found.items():
        assert one.tokens_per_parameter >= 10
        assert plan(minutes=minutes, size=ladder[ladder.index(one.size) + 1]).tokens_per_parameter < 10


def test_the_arms_speed_is_that_of_all_runs_at_once(quick: None) -> None:
    run = plan().study.run("standard", "stdlib", 1e-3, 0)
    assert sizes.measure_arm_speed(run, TWO, 15) == pytest.approx(2 * 256 / 0.005)


def test_a_size_that_is_asked_for_is_taken(quick: None) -> None:
    assert sizes.find_size(plan(minutes=1, size="nano").study) == "nano"
    with pytest.raises(StudyError, match=r"size must be one of .*did you mean 'nano'"):
        plan(size="nanoo")


def test_every_arm_is_a_legal_run_at_every_size_and_none_is_another(quick: None) -> None:
    for size in sizes.SIZES:
        study = plan(arms=tuple(list_arms()), size=size).study
        assert sizes.find_size(study) == size
        study.refuse_illegal()
        runs = [study.run(arm, "stdlib", study.lrs[0], 0) for arm in study.arms]
        assert len({json.dumps(run.to_dict(), sort_keys=True) for run in runs}) == len(list_arms())


def test_the_measured_step_is_that_of_the_arm() -> None:
    run = compare.make_study("pico", ComparisonRequest(), 512).run("standard", "stdlib", 1e-3, 0)
    deep = run.replace(model=run.model.replace(layers=16))
    assert 0 < sizes.measure_step(run, "cpu", 1) < sizes.measure_step(deep, "cpu", 1)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"arms": ("standard", "leepfrog")}, "there is no arm 'leepfrog' .did you mean 'leapfrog'"),
        ({"arms": ("standard",)}, "a comparison needs an arm besides standard"),
        ({"arms": ("k=v", "affine", "k=v")}, "the arm k=v came twice"),
        ({"minutes": 0.0}, "minutes must be a number above 0, but 0 came"),
        ({"minutes": float("nan")}, "minutes must be a number above 0"),
        ({"seeds": 0}, "seeds must be a whole number from 1 to 1000, but 0 came"),
    ],
)
def test_what_cannot_be_compared(quick: None, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(**asked)


def test_a_text_that_cannot_be_used_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "measure_step", lambda *_: pytest.fail("measured"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for text, told in (("no-such-text", "no-such-text"), (str(tmp_path / "latin.txt"), "is not UTF-8 at byte 3")):
        with pytest.raises(DataError, match=told):
            plan(texts=(text,))


def test_a_plan_names_its_corpora_and_says_where_the_minutes_are_too_few(quick: None) -> None:
    said: list[str] = []
    plan(texts=("one", "two"), arms=("k=v",), minutes=5, say=said.append)
    assert said[1].startswith("2 arms × 2 corpora × 3 learning rates × 5 seeds: 60 runs of pico")
    assert not any("min asked for" in sentence for sentence in said)
    plan(minutes=0.5, say=said.append)
    assert "That is more than the 0.5 min asked for, and runs of fewer than 20 steps say nothing" in said[-2]


def test_populations_share_a_gpu_and_larger_runs_do_not() -> None:
    def run(size: str) -> RunSpec:
        return compare.make_study(size, ComparisonRequest(), 2**20).run("standard", "stdlib", 1e-3, 0)

    gpus = WorkerSlots(2, 8, (0, 1))
    assert sizes.share_gpus(gpus, run("pico"), None) == WorkerSlots(4, 4, (0, 1))
    assert sizes.share_gpus(gpus, run("124m"), None) == sizes.share_gpus(gpus, run("pico"), 2) == gpus
    assert sizes.share_gpus(TWO, run("pico"), None) == TWO


def test_populations_are_planned_by_their_speed(quick: None) -> None:
    together = plan(WorkerSlots(1, 16, (0,)), minutes=200)
    assert together.study.tuning_seeds == together.study.seeds == 5  # every seed tries every learning rate
    assert count_runs(together.study) == 5 * len(together.study.lrs) * 5
    assert together.slots.count == 2
    run = together.study.run("standard", "stdlib", 1e-3, 0)
    step = {128: 0.1, 256: 0.4, 384: 0.8, 512: 2.0}[run.model.width]
    speed = sizes.measure_arm_speed(run, together.slots, 15)
    assert speed == pytest.approx(15 * run.tokens_per_step * sizes.COMPILING_GAINS / step)
    assert 75 * together.tokens / speed == pytest.approx(200 * 60, rel=0.15)


@pytest.mark.parametrize(
    ("asked", "speed", "tokens"),
    [
        ({"minutes": 4, "size": "nano"}, 10e6, 20e6),
        ({"minutes": 4, "size": "micro"}, 5e6, 12e6),
        ({"minutes": 4, "arms": (*DEFAULT, "euler", "q=k", "gqa", "mqa"), "size": "nano"}, 10e6, 8e6),
    ],
)
def test_populations_end_in_time_and_a_quarter(
    quick: None, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], speed: float, tokens: float
) -> None:
    monkeypatch.setattr(compare, "measure_arm_speed", lambda *_: speed)
    found = plan(WorkerSlots(1, 16, (0,)), **asked)
    runs, arms = count_runs(found.study), len(found.study.arms)
    assert runs == 15 * arms
    assert found.tokens >= tokens
    work = runs * 1.045 * found.tokens / speed  # evaluations included
    expected, longest = (starts * compare.POPULATION_START + work for starts in (1, math.ceil(arms / 2)))
    assert expected < 60 * 4
    assert longest < 75 * 4  # every start waited for
    assert max(expected / 60, longest / 75) > 0.93 * 4


def test_half_an_hour_on_a_gpu_is_for_micro(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {64: 20e6, 128: 10e6, 256: 5e6, 384: 2.2e6}
    monkeypatch.setattr(compare, "measure_arm_speed", lambda run, *_: speeds[run.model.width])
    found = plan(WorkerSlots(1, 16, (0,)), minutes=30)
    assert (found.size, found.tokens_per_parameter >= 10) == ("micro", True)


def test_without_minutes_the_size_decides_and_no_machine_differs(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = (TWO, WorkerSlots(1, 2), WorkerSlots(8, 4), WorkerSlots(1, 16, (0,)))
    plans: list[ComparisonPlan] = []
    for asked in list[dict[str, Any]]([{}, {"size": "nano"}]):
        plans = [plan(slots, **asked) for slots in machines]
        monkeypatch.setattr(sizes, "measure_step", lambda *_: 7.0)  # a machine that is much slower
        plans += [plan(slots, **asked) for slots in machines]
        assert len({json.dumps(each.study.to_dict(), sort_keys=True) for each in plans}) == 1
        assert {each.slots.threads for each in plans if not each.slots.gpus} == {1}
    assert plans[0].tokens_per_parameter == pytest.approx(10, rel=1e-3)
    study = plan().study
    assert (plan().size, study.seeds, study.tuning_seeds) == ("pico", 8, 6)
    assert (plan(seeds=12).study.tuning_seeds, plan(size="nano").study.seeds) == (9, 5)
    assert plan(WorkerSlots(1, 2), minutes=500).slots.threads == 2


def test_what_is_compared_stays(tmp_path: Path) -> None:
    asked = ComparisonRequest(arms=("k=v",), minutes=3.0, final_tokens=0)
    record = StudyRecord(compare.make_study("pico", asked, 512), [], dataclasses.asdict(asked.fill_defaults()))
    same: dict[str, Any] = {"texts": ("stdlib",), "arms": ("k=v", "standard"), "size": "pico"}
    for request in (ComparisonRequest(), ComparisonRequest(**same), ComparisonRequest(minutes=3.0, seeds=5)):
        refuse_other_request(record, tmp_path, request)
    others: list[tuple[dict[str, Any], str]] = [
        ({"texts": ("other",)}, "texts stdlib, but other came"),
        ({"arms": ("qk-norm",)}, "arms k=v, standard, but qk-norm, standard came"),
        ({"size": "nano"}, "a size pico, but nano came"),
        ({"final_tokens": 9}, "final_tokens 0, but 9 came"),
        ({"minutes": 5.0}, "of minutes=3, but minutes=5 came; .* leave --minutes out, .* --continue, .* --out"),
        ({"seeds": 6}, "of seeds=5, but seeds=6 came; .* leave --seeds out, .* --continue, .* --out"),
    ]
    for other, told in others:
        with pytest.raises(StudyError, match=told):
            refuse_other_request(record, tmp_path, ComparisonRequest(**other))


def test_continuing_asks_once_and_after_what_is_planned(tmp_path: Path) -> None:
    study = compare.make_study("pico", ComparisonRequest(arms=("k=v",), seeds=3), 512).replace(extend=0)
    for run in plan_tuning_runs(study):  # twelve runs of a second each, of eighteen
        if run.seed < 2:
            fabricate(study, tmp_path, run)
    record = StudyRecord(study, [], {"minutes": 1.0, "seeds": 3})

    def extend(record: StudyRecord, **asked: Any) -> StudyRecord:
        return extend_comparison(record, tmp_path, ComparisonRequest(**asked), TWO)

    assert extend(record, seeds=7).spec.seeds == extend(extend(record, seeds=7), seeds=7).spec.seeds == 7
    assert extend(record).spec.seeds == 3  # what is planned comes first
    more = extend(record, minutes=0.2)  # 24 runs' time: the six that are planned, two seeds of six, and one of two
    assert (more.spec.seeds, more.spec.tuning_seeds, more.asked["continued"]) == (6, 5, 0.2)
    for arm in study.arms:
        fabricate(study, tmp_path, PlannedRun("stdlib", arm, study.lrs[0], 2))
    assert extend(more, minutes=0.2).spec.seeds == 6  # interrupted and asked again, though there is more time now
    Analyses().add(6, 2, "").write(tmp_path)
    assert extend(more, minutes=0.2).spec.seeds == 7  # 38 runs of 14 + 24; two more would be 40
    least = extend(more, minutes=1e-6).spec  # at least one, and three quarters tune
    assert (least.seeds, least.tuning_seeds) == (7, 6)
    assert extend(more, seeds=20).spec.tuning_seeds == 15
    with pytest.raises(StudyError, match="no finished run to reckon with"):
        extend_comparison(record, tmp_path / "empty", ComparisonRequest(minutes=1.0), TWO)


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
    assert f"Arms by name: {', '.join(list_arms())}." in flat
    assert f"{', '.join(DEFAULT[:-1])} and {DEFAULT[-1]}" in flat
    assert re.findall(r"^\| (\w+) \| \d+ × \d+ \|", PAGE, re.MULTILINE) == list(sizes.SIZES)
    files = [tomllib.loads(file) for file in re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
    (whole,) = [file for file in files if "baseline" in file]
    StudySpec.from_dict(whole).refuse_illegal()
    for part in files:  # what is shown of a file goes with the one that is shown whole
        study = StudySpec.from_dict(whole | part | ({"base": {}} if "sizes" in part else {}))
        for each in sizes.split_sizes(study).values() if study.sizes else [study]:
            each.refuse_illegal()


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


SMALL = {"model": {"recipe": "nano", "layers": 1, "width": 16, "context": 32}, "corpus": {"vocab": 300}}


@pytest.mark.long
def test_compare_answers_is_continued_and_reports(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pico = sizes.SIZES["pico"]
    small = dataclasses.replace(pico, settings=pico.settings | SMALL, lrs=pico.lrs[:2])
    for module in ("sizes", "compare", "request"):
        monkeypatch.setattr(f"qklab.study.{module}.SIZES", {"pico": small})
    monkeypatch.setattr(compare, "EXTEND", 0)
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
    assert len(summaries) == 2 * 2 * 2

    for same in (("compare", str(text)), (*asked, "--seeds", "2")):
        code, again, err = called(capsys, *same)
        assert (code, again) == (0, out[-len(again) :])  # before it came what the runs said
        assert {path: path.stat().st_mtime_ns for path in summaries} == summaries

    for wrong, told in (
        (("--minutes", "1"), "to give it more add --continue"),
        (("--seeds", "3"), "to give it more add --continue"),
        (("--arms", "affine"), "holds a comparison with arms"),
    ):
        code, _, err = called(capsys, "compare", str(text), *wrong)
        assert code == 2
        assert told in err
        assert err.count("\n") == 1

    for _ in range(2):  # a target: the second time there is nothing left to do
        code, out, err = called(capsys, "compare", "--out", str(folder), "--continue", "--seeds", "3")
        assert code == 0, err
        assert len(list(folder.glob("runs/*/*/*/summary.json"))) == 12  # of three seeds all tune
    assert json.loads((folder / "analyses.json").read_text())["command"].endswith("--continue --seeds {total}")
    assert [each["seeds"] for each in json.loads((folder / "analyses.json").read_text())["taken"]] == [2, 3]
    code, out, err = called(capsys, "compare", "--out", str(folder), "--continue", "--minutes", "0.0001")
    assert (code, len(list(folder.glob("runs/*/*/*/summary.json")))) == (0, 16)
    assert "judged 3 times" in out
    code, _, err = called(capsys, "compare", "--out", str(folder), "--continue", "--seeds", "2")
    assert (code, "have begun for 4 seeds" in err) == (2, True)
    assert json.loads((folder / "study.json").read_text())["spec"]["seeds"] == 4
    code, _, err = called(capsys, "compare", "--out", "elsewhere", "--continue")
    assert (code, "no comparison in elsewhere" in err) == (2, True)


@pytest.mark.long
def test_one_command_gives_the_same_numbers_on_a_slow_machine_and_with_other_cores(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = sizes.Size(sizes.SIZES["pico"].settings | SMALL, (3e-3, 6e-3), tokens_per_parameter=0.2)
    for module in ("sizes", "compare", "request"):
        monkeypatch.setattr(f"qklab.study.{module}.SIZES", {"pico": small})
    monkeypatch.setattr(compare, "EXTEND", 0)
    step = Trainer.step

    def step_slowly(*given: Any) -> Any:
        time.sleep(0.005)
        return step(*given)

    for machine, slots in (("fast", WorkerSlots(2, 1)), ("slow", WorkerSlots(1, 2))):
        monkeypatch.setattr(Trainer, "step", step if machine == "fast" else step_slowly)
        executor = InProcess()
        executor.slots = slots
        monkeypatch.setattr("qklab.study.executors.local.LocalExecutor", lambda *_, say, own=executor: own)
        asked = ("compare", str(text), "--arms", "k=v", "--seeds", "2", "--final-tokens", "256")
        code, _, err = called(capsys, *asked, "--out", str(tmp_path / machine))
        assert code == 0, err
        assert {unit.execution["threads"] for unit in executor.units} == {1}
    fast, slow = (read_comparable(tmp_path / machine) for machine in ("fast", "slow"))
    assert len(fast) == 2 * 2 * 2
    assert fast == slow


def write_reports(folder: Path) -> list[str]:
    """A folder of reports, as a registry has them, and a page that is none."""
    folder.mkdir()
    parts = ["Background", "Methods", "Participants", "Outcomes", "Adverse", "events", "Conclusion"]
    for i in range(60):
        words = [
            f"{part}. Of {40 + i} patients {i * k % 37} had outcome {k}, p = 0.0{i % 9}."
            for k, part in enumerate(parts)
        ]
        (folder / f"NCT{i:04}.txt").write_text("\n".join(words * 3))
    (folder / "index.html").write_text("<p>no text</p>")
    return [str(folder)]


def write_book(folder: Path) -> list[str]:
    (folder.with_suffix(".txt")).write_text(
        "\n".join(f"Chapter {i}. It rained {i % 7} days, and then {i * i} more." for i in range(2000))
    )
    return [str(folder.with_suffix(".txt"))]


def write_table(folder: Path) -> list[str]:
    rows = [f'{i},"Title, {i}","The {i}th note says {i % 11} words, ""quoted"" ones."' for i in range(400)]
    (folder.with_suffix(".csv")).write_text("\n".join(["id,title,note", *rows]))
    return [str(folder.with_suffix(".csv")), "--column", "note"]


@pytest.mark.parametrize(
    ("write", "said"),
    [(write_reports, "since they are none of"), (write_book, "too few documents to hold some out"), (write_table, "")],
)
def test_text_as_it_comes_gets_an_answer(
    write: Callable[[Path], list[str]],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("qklab.study.executors.local.LocalExecutor", lambda device, at_once, say: InProcess())
    tiny = {
        "model": {"recipe": "nano", "layers": 1, "width": 16, "context": 16},
        "attention": {"heads": 2},
        "corpus": {"tokenizer": "bytes"},
    }
    monkeypatch.setitem(sizes.SIZES, "pico", sizes.Size(tiny | {"batch": {"sequences": 2}}, (1e-2,)))
    words = write(tmp_path / "text")
    asked = ("compare", *words, "--arms", "k=v", "--minutes", "0.001", "--seeds", "2", "--final-tokens", "64")
    code, out, err = called(capsys, *asked, "--size", "pico")
    assert code == 0, err
    assert said in err
    assert f"On {words[0]}, " in out
    assert re.search(
        r"Each run trained [\d.]+ M parameters on 640 tokens, [\d.]+ a parameter: [\d.e-]+ MB of the corpus's", out
    )
    assert "that of a unigram model" in out
    (command,) = re.findall(r"^Run: qklab (.*)$", out, re.MULTILINE)

    left: list[float] = []

    def refuse(*_: Any, extend_minutes: float, **__: Any) -> None:
        left.append(extend_minutes)
        raise StudyError("it would begin now.")

    monkeypatch.setattr("qklab.study.execute.Study", refuse)
    clock = iter((0.0, 30.0))
    monkeypatch.setattr("qklab.cli.compare.time", SimpleNamespace(monotonic=lambda: next(clock)))
    code, _, err = called(capsys, *shlex.split(command))  # what the answer proposes is accepted
    assert (code, "it would begin now" in err) == (2, True)
    assert left == [pytest.approx(compare.OVERTIME * 0.001 - 0.5)]  # half a minute was needed to plan it


@pytest.mark.long
def test_a_study_is_stopped_goes_on_and_reports(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "s.toml", tmp_path / "out"
    file.write_text(
        f'name = "s"\nbaseline = "standard"\ncorpora = ["{text}"]\nlrs = [1e-3]\nseeds = 1\n'
        '[base]\nmodel = {recipe = "nano", layers = 1, width = 32, context = 64}\n'
        'corpus = {tokenizer = "bytes"}\nbatch = {sequences = 8}\nbudget = {tokens = 80000}\n'
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

    assert "local" in register.executor
    monkeypatch.setitem(register.executor.entries, "local", lambda *_: InProcess())
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


def test_tasks_are_compared_by_accuracy_at_their_own_length_and_not_with_text(quick: None) -> None:
    both_ways = plan(texts=("task:sort?length=16", "task:copy?length=16"), arms=("k=v",), minutes=5).study
    assert (both_ways.metric, both_ways.margin) == ("accuracy", 1.0)
    run = both_ways.run("k=v", "task:sort?length=16", both_ways.lrs[0], 0)
    assert (run.model.context, run.model.causal, run.batch.sequences) == (16, False, 32)
    assert sizes.find_size(both_ways) == "pico"
    causal = plan(texts=("task:mqar",), arms=("k=v", "q=k", "leapfrog"), minutes=5).study
    assert causal.run("q=k", "task:mqar", causal.lrs[0], 0).model.causal
    with pytest.raises(StudyError, match="tasks are compared by accuracy and texts by loss, but both came"):
        plan(texts=("task:sort", "stdlib"), arms=("k=v",))
