"""Carrying out a study: every run once, nothing begun twice or changed under way, and progress told truly."""

import json
import os
import shutil
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from small_study import (
    STEPS,
    InProcess,
    RecordingDisplay,
    carry_out,
    check_whole,
    fabricate,
    read_comparable,
    resumes,
    small_spec,
)

from qklab.schema import SpecError
from qklab.study import execute
from qklab.study.answer import write_answer
from qklab.study.execute import Study, StudyInterrupted
from qklab.study.executors import RunTask, Unit, WorkerSlots
from qklab.study.metrics import find_metric
from qklab.study.plan import PlannedRun, plan_tuning_runs
from qklab.study.progress import measure_run_progress
from qklab.study.records import RunResult, is_in_use, read_result, read_study_record
from qklab.study.schedule import SLACK
from qklab.study.spec import StudyError, StudySpec, read_study
from qklab.train.launch import train
from qklab.train.spec import ExecutionSpec

STUDIES = Path(__file__).parents[2] / "studies"

# the undisturbed study


def test_every_planned_run_is_done_once(undisturbed: dict[str, Any], undisturbed_folder: Path) -> None:
    check_whole(undisturbed_folder, undisturbed)
    assert resumes(undisturbed_folder) == []
    assert len(undisturbed) == 2 * 2 + 2
    chosen = {run.split("/")[-2]: run for run in undisturbed if run.endswith("seed1")}
    assert set(chosen) == {"standard", "k=v"}
    for arm, run in chosen.items():
        own = {name: found["summary"]["evaluation"] for name, found in undisturbed.items() if f"/{arm}/" in name}
        tried = [name for name in own if name.endswith("seed0")]
        assert run == min(tried, key=lambda name: own[name]["valid"]["loss"]).replace("seed0", "seed1")


def test_a_run_of_a_study_is_the_run_that_train_makes(corpus: str, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    planned = PlannedRun(corpus, "k=v", 1e-2, 0)
    folder = planned.folder_in(tmp_path)
    train(planned.resolve_spec(small_spec(corpus)), folder, ExecutionSpec(device="cpu", threads=1))
    name = str(folder.relative_to(tmp_path))
    assert read_comparable(tmp_path) == {name: undisturbed[name]}


def test_runs_of_an_arm_go_together_where_that_is_asked_for(
    corpus: str, undisturbed_folder: Path, tmp_path: Path
) -> None:
    executor = InProcess()
    with Study(small_spec(corpus), tmp_path / "s", execution={"population": 8}).open() as study:
        results = study.carry_out(executor, RecordingDisplay())
    assert [(len(unit.tasks), unit.together) for unit in executor.units] == [(2, 2)] * 2 + [(1, 1)] * 2
    alone = {run.name: read_result(undisturbed_folder, run) for run in plan_tuning_runs(small_spec(corpus))}
    for result in results[:4]:
        before = alone[result.planned.name]
        assert before is not None
        assert result.value(find_metric("loss")) == pytest.approx(before.value(find_metric("loss")), rel=1e-4)
        assert result.process_seconds < result.summary["seconds_of_last_process"]["all"]


def split_study(spec: StudySpec, folder: Path, slots: WorkerSlots) -> list[tuple[str, list[str], int, int]]:
    """Of each process on these slots: arm, corpora, runs, and how many go together."""
    study, waiting = Study(spec, folder), deque(plan_tuning_runs(spec))
    found: list[tuple[str, list[str], int, int]] = []
    while waiting:
        runs, together = study.take_group(waiting, slots)
        found.append((runs[0].arm, list(dict.fromkeys(run.corpus for run in runs)), len(runs), together))
        assert {run.arm for run in runs} == {runs[0].arm}
    return found


def test_on_a_gpu_one_process_does_an_arm_on_every_task_of_one_shape(tmp_path: Path) -> None:
    spec = read_study(STUDIES / "b8.toml")
    spec = spec.replace(corpora=[*spec.corpora, "task:copy?length=48"])
    same, other = spec.corpora[:5], spec.corpora[5:]
    two = split_study(spec, tmp_path, WorkerSlots(2, 1, (0,)))
    assert two == [(arm, own, 5 * len(own), 5) for own in (same, other) for arm in spec.arms]
    many = split_study(spec, tmp_path, WorkerSlots(12, 1, tuple(range(12))))
    parts = [(arm, own, 5 * len(own), 5) for own in (same[:3], same[3:4], same[4:], other) for arm in spec.arms]
    assert many == parts  # no GPU is left without work
    assert [runs for *_, runs, _ in split_study(spec, tmp_path, WorkerSlots(2, 1))] == [1] * 6 * 6 * 5


def test_whether_compiling_pays_is_the_plans_to_say(tmp_path: Path) -> None:
    spec = read_study(STUDIES / "b8.toml")

    def is_compiled(spec: StudySpec, **execution: Any) -> str:
        study, run = Study(spec, tmp_path, execution=execution), next(plan_tuning_runs(spec))
        return study.make_unit([run], InProcess()).execution["compile"]

    assert is_compiled(spec) == "no"
    assert is_compiled(spec, compile="yes") == "yes"
    long = spec.base | {"budget": {"tokens": 25_000_000}}
    assert is_compiled(spec.replace(base=long)) == "no"  # twenty-five thousand steps, each a CUDA graph
    for steps, found in ((110, "no"), (130, "auto")):  # of 25 runs alone, which launch their kernels one by one
        alone = spec.base | {"budget": {"tokens": steps * 1024}}
        assert is_compiled(spec.replace(base=alone), population="off") == found
    large = spec.base | {"model": {"layers": 6, "width": 256}, "budget": {"tokens": 70_000_000}}
    assert is_compiled(spec.replace(base=large)) == "auto"


@pytest.mark.parametrize("execution", [{"population": "many"}, {"population": 0}, {"keep": -1}])
def test_an_execution_without_sense_is_refused_before_anything(corpus: str, tmp_path: Path, execution: Any) -> None:
    with pytest.raises(SpecError, match=next(iter(execution))):
        Study(small_spec(corpus), tmp_path / "s", execution=execution)
    assert not (tmp_path / "s").exists()


def test_an_arm_that_cannot_go_together_is_told_once(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(corpus)
    monkeypatch.setattr("qklab.study.execute.explain_solo", lambda run: "Gated does not say how")
    display, gpu = RecordingDisplay(), WorkerSlots(1, 1, (0,))
    with Study(spec, tmp_path / "s").open() as study:
        for run in plan_tuning_runs(spec):
            study.say_why_alone(run, gpu, display)
            study.say_why_alone(run, WorkerSlots(1, 1), display)
    assert display.count("is trained run by run: Gated does not say how") == 2  # two arms


def test_with_minutes_only_what_can_end_in_time_is_begun(
    corpus: str, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = InProcess()
    with monkeypatch.context() as patch:
        patch.setattr(RunResult, "process_seconds", 100.0)
        with Study(small_spec(corpus), tmp_path / "s", minutes=5).open() as study:
            study.until = time.monotonic() + 109  # the first is begun, since nothing is known of any
            with pytest.raises(StudyInterrupted, match=r"1 of 6 runs are done and the minutes are over"):
                study.carry_out(executor, RecordingDisplay())
    assert len(executor.units) == 1
    with Study(small_spec(corpus), tmp_path / "s").open() as study:
        study.carry_out(InProcess(), RecordingDisplay())
    assert read_comparable(tmp_path / "s") == undisturbed
    with pytest.raises(StudyError, match="minutes must be a number above 0, but 0 came"):
        Study(small_spec(corpus), tmp_path / "s", minutes=0)


def test_one_progress_for_the_whole_study(undisturbed_folder: Path) -> None:
    said = json.loads(undisturbed_folder.with_suffix(".json").read_text())
    assert sum("nats per token" in sentence for sentence in said["sentences"]) == 6
    shown = [(done, line) for done, line in said["shown"] if "runs" in line]
    assert all("/6 runs" in line for _, line in shown)
    assert all(0 <= done <= 1 for done, _ in shown)
    counts = [int(line.split("/")[0]) for _, line in shown]
    assert counts == sorted(counts)
    assert all(done >= count / 6 for (done, _), count in zip(shown, counts, strict=True))


def test_a_finished_study_is_left_alone_even_without_its_corpus(
    corpus: str, undisturbed: dict[str, Any], undisturbed_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is left to do")

    monkeypatch.setattr("qklab.study.folder.prepare_corpus", refuse)
    executor = InProcess(refuse)
    folder = shutil.copytree(undisturbed_folder, tmp_path / "study")
    results = carry_out(small_spec(corpus), folder, executor=executor)
    assert not executor.units
    assert {str(r.planned.folder_in(folder).relative_to(folder)) for r in results} == set(undisturbed)
    check_whole(folder, undisturbed)


def test_arms_that_diverge_are_results(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"standard": {}, "hopeless": {"max_skips": 0, "z_loss": 1e38}}  # whose loss is infinite from the first step
    told = RecordingDisplay()
    results = carry_out(small_spec(corpus, steps=20, lrs=[1e-3, 1e30], arms=arms), tmp_path, told, InProcess())
    status = {(r.planned.arm, r.planned.lr): r.status for r in results if r.planned.seed == 0}
    assert status["standard", 1e-3] == "finished"
    assert {status[arm, lr] for arm, lr in status if (arm, lr) != ("standard", 1e-3)} == {"diverged"}
    assert sum("no result, diverged" in sentence for sentence in told.sentences) == 3
    assert [(r.planned.arm, r.planned.lr) for r in results if r.planned.seed == 1] == [("standard", 1e-3)]


def test_runs_that_stop_or_fail_stop_the_study(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(unit: Unit, task: RunTask) -> None:
        raise StudyError("the run failed.")

    with pytest.raises(StudyError, match=r"the run failed\."):
        carry_out(small_spec(corpus), tmp_path / "a", executor=InProcess(fail))

    def stop(unit: Unit, task: RunTask) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        fabricate(small_spec(corpus), tmp_path / "b", next(plan_tuning_runs(small_spec(corpus))))

    display, executor = RecordingDisplay(), InProcess(stop, count=2)
    monkeypatch.setattr(executor, "wait", lambda seconds: InProcess.wait(executor, seconds)[:1])
    monkeypatch.setattr(executor, "stop", lambda: 1)
    executor.act = lambda unit, task: stop(unit, task) if task is executor.units[0].tasks[0] else None
    with pytest.raises(StudyInterrupted, match="stopped by SIGTERM") as stopped:
        carry_out(small_spec(corpus), tmp_path / "b", display, executor)
    assert stopped.value.code == 75
    assert display.sentences[-2:] == [
        "a run saves its state and stops.",
        "1 of them did not in time and was ended; what was saved before is still there.",
    ]


def test_a_result_that_is_written_elsewhere_is_waited_for(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "VISIBLE", 0.2)
    with pytest.raises(StudyError, match=r"ended, but its result is not in .*; the study's folder must be on a file"):
        carry_out(small_spec(corpus), tmp_path, executor=InProcess(lambda unit, task: None))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_study_is_stopped_while_its_corpus_is_prepared(
    number: signal.Signals, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(number)

    def prepare(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(120)

    monkeypatch.setattr("qklab.study.folder.prepare_corpus", prepare)
    sentence = f"^stopped by {number.name} while its corpora were prepared; the same command continues"
    with pytest.raises(StudyInterrupted, match=sentence):
        carry_out(small_spec(corpus), tmp_path / "study")
    assert signal.getsignal(number) is before
    assert not is_in_use(tmp_path / "study")


# the folder


def begun(spec: StudySpec, folder: Path) -> None:
    """A study of which one run has been done, by a fabricated summary."""
    with Study(spec, folder).open() as study:
        study.files.write_record([])
        fabricate(spec, folder, next(plan_tuning_runs(spec)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lrs": [1e-3]}, r"began with lrs=\[0.001, 0.01\], but \[0.001\] came"),
        ({"margin": 0.5}, r"began with margin=0.01, but 0.5 came"),
        ({"tuning_seeds": 2, "seeds": 2}, r"began with tuning_seeds=1, but 2 came"),
        (
            {"arms": {"standard": {}, "k=v": {"attention": {"share": "q=k"}}}},
            r"arms.k=v.attention.share='k=v', but 'q=k'",
        ),
        (
            {"arms": {"standard": {}, "k=v": {"z_loss": 0.1}}},
            r"arms.k=v.attention={'share': 'k=v'}, which is now left out",
        ),
        (
            {"arms": {"standard": {}, "k=v": {"attention": {"share": "k=v"}}, "new": {"z_loss": 0.1}}},
            r"began without arms.new, but {'z_loss': 0.1} came",
        ),
    ],
)
def test_a_study_edited_after_it_began_is_refused(
    changes: dict[str, Any], sentence: str, corpus: str, tmp_path: Path
) -> None:
    begun(small_spec(corpus, seeds=2), tmp_path)
    with pytest.raises(StudyError, match=sentence), Study(small_spec(corpus, **changes), tmp_path).open():
        pass
    assert read_study_record(tmp_path).spec == small_spec(corpus, seeds=2)
    with Study(small_spec(corpus, seeds=4, tuning_seeds=3), tmp_path).open():
        pass  # of seeds that are added some may tune


def test_a_study_edited_before_anything_ran_is_no_other(corpus: str, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    with pytest.raises(ValueError, match="there is no source 'nowhere'"):
        carry_out(small_spec("nowhere"), folder)
    assert not folder.exists()
    with Study(small_spec(corpus, seeds=1), folder).open() as study:
        study.prepare_corpora(RecordingDisplay())
    assert read_study_record(folder).spec == small_spec(corpus, seeds=1)


def test_a_corpus_that_is_gone_since_the_study_began(corpus: str, tmp_path: Path) -> None:
    copy = shutil.copytree(corpus, tmp_path / "copy")
    begun(small_spec(str(copy)), tmp_path / "study")
    shutil.rmtree(copy)
    with pytest.raises(ValueError, match=f"there is no source '{copy}'"):
        carry_out(small_spec(str(copy)), tmp_path / "study")
    assert len(list((tmp_path / "study").glob("runs/**/summary.json"))) == 1
    assert not is_in_use(tmp_path / "study")


def test_a_summary_that_was_cut_costs_its_evaluation_only(
    corpus: str, undisturbed: dict[str, Any], undisturbed_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(undisturbed_folder, tmp_path / "study")
    damaged = sorted(folder.glob("runs/*/*/*/summary.json"))[2]
    damaged.write_bytes(damaged.read_bytes()[:30])
    executor, display = InProcess(), RecordingDisplay()
    carry_out(small_spec(corpus), folder, display, executor)
    assert [task.folder for unit in executor.units for task in unit.tasks] == [damaged.parent]
    assert display.count("evaluated again") == 1
    check_whole(folder, undisturbed)


def test_a_study_of_one_seed_only_tunes_and_is_an_anecdote(
    corpus: str, undisturbed_folder: Path, tmp_path: Path
) -> None:
    spec = small_spec(corpus, seeds=1)
    with Study(spec, tmp_path).open() as study:
        study.files.write_record([])
        for run in plan_tuning_runs(spec):
            shutil.copytree(run.folder_in(undisturbed_folder), run.folder_in(tmp_path))
        results = study.carry_out(InProcess(), RecordingDisplay())
    assert [result.planned for result in results] == list(plan_tuning_runs(spec))
    assert "One seed is an anecdote" in write_answer(spec, results)


def test_seeds_are_a_target_that_is_written_once_nothing_is_refused(corpus: str, tmp_path: Path) -> None:
    copy, folder = shutil.copytree(corpus, tmp_path / "copy"), tmp_path / "study"
    begun(small_spec(str(copy)), folder)
    copy.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(ValueError, match="there is no source"):
            carry_out(small_spec(str(copy), seeds=4), folder)
        assert read_study_record(folder).spec.seeds == 2
    (tmp_path / "away").rename(copy)
    for seeds in (4, 1):  # the way back is open as long as the runs have not begun
        with Study(small_spec(str(copy), seeds=seeds), folder).open() as study:
            study.prepare_corpora(RecordingDisplay())
        assert read_study_record(folder).spec.seeds == seeds
    fabricate(small_spec(str(copy)), folder, PlannedRun(str(copy), "k=v", 1e-3, 2))
    told = r"runs have begun for 3 seeds, but seeds=2 came; .* ask for 3 or more"
    with pytest.raises(StudyError, match=told), Study(small_spec(str(copy)), folder).open():
        pass


def test_two_studies_at_once_in_one_folder(corpus: str, tmp_path: Path) -> None:
    with Study(small_spec(corpus), tmp_path).open():  # noqa: SIM117
        with pytest.raises(StudyError, match="in use by another process"), Study(small_spec(corpus), tmp_path).open():
            pass


@pytest.mark.parametrize("place", ["run.json", "mine/run.json", "runs/a/b/c/run.json", "metrics.jsonl"])
def test_a_folder_of_other_runs_is_refused(place: str, corpus: str, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("{}")
    with pytest.raises(StudyError, match=r"holds runs but no study.json"), Study(small_spec(corpus), tmp_path).open():
        pass


def test_another_run_in_the_place_of_a_planned_one_is_refused(corpus: str, tmp_path: Path) -> None:
    spec = small_spec(corpus)
    fabricate(spec, tmp_path, next(plan_tuning_runs(spec)), z_loss=0.5)
    with Study(spec, tmp_path / "new").open() as study:
        study.files.write_record([])
        (tmp_path / "runs").rename(tmp_path / "new" / "runs")
    with pytest.raises(StudyError, match=r"another run is in the place of standard .* z_loss=0.5, but 0.0 came"):
        carry_out(spec, tmp_path / "new")


def test_a_damaged_study_is_refused(corpus: str, tmp_path: Path) -> None:
    for content in ("", "[]", '{"format": 9}', '{"format": 1}', '{"format": 1, "spec": {"name": 3}}'):
        (tmp_path / "study.json").write_text(content)
        with pytest.raises(StudyError, match=r"study.json cannot be read as a study"):
            read_study_record(tmp_path)


def test_a_disk_that_refuses_is_one_sentence(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qklab.study.records.write_json", full)
    with pytest.raises(StudyError, match="no space left on device; what was saved"):
        carry_out(small_spec(corpus), tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StudyError, match="cannot be written: no space left on device; choose"):
        carry_out(small_spec(corpus), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match=r"the study's folder .* cannot be written"):
        carry_out(small_spec(corpus), tmp_path / "file")


# corpora


def texts(folder: Path, content: dict[str, str]) -> str:
    folder.mkdir(exist_ok=True)
    for name, text in content.items():
        (folder / name).write_text(text)
    return str(folder)


def on_text(source: str, **changes: Any) -> StudySpec:
    base = small_spec(source).base | {"corpus": {"tokenizer": "bytes"}}
    values: dict[str, Any] = {"base": base} | changes
    return small_spec(source, **values)


def test_a_corpus_without_test_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    source = texts(tmp_path / "text", {"train.txt": "some text " * 50, "valid.txt": "other text " * 50})
    spec = on_text(source, base=small_spec(source).base | {"corpus": {"tokenizer": "bytes", "test": 0.0}})
    with pytest.raises(StudyError, match="has no test text, which a study needs to report on"):
        carry_out(spec, tmp_path / "study")


def test_a_corpus_that_changed_since_the_study_began_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    parts = {"train.txt": "some text " * 50, "valid.txt": "other text " * 50, "test.txt": "a third text " * 50}
    source = texts(tmp_path / "text", parts)
    spec = on_text(source)
    with Study(spec, tmp_path / "study").open() as study:
        study.prepare_corpora(RecordingDisplay())
        fabricate(spec, tmp_path / "study", next(plan_tuning_runs(spec)))
    with Study(spec, tmp_path / "study").open() as study:
        study.prepare_corpora(RecordingDisplay())  # the same text
    texts(tmp_path / "text", parts | {"train.txt": "another text " * 50})
    with pytest.raises(StudyError, match=r"text changed since the study in .* began: it was .*… and is now"):
        carry_out(spec, tmp_path / "study")


def test_every_tokenizer_of_an_arm_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    parts = {"train.txt": "some text " * 50, "valid.txt": "other text " * 50, "test.txt": "a third text " * 50}
    arms = {"standard": {}, "bpe": {"corpus": {"tokenizer": "bpe", "vocab": 300}}}
    spec = on_text(texts(tmp_path / "text", parts), arms=arms, metric="bits_per_byte")
    with Study(spec, tmp_path / "study").open() as study:
        study.prepare_corpora(RecordingDisplay())
    data = json.loads((tmp_path / "study" / "study.json").read_text())["data"]
    assert sorted(entry["spec"]["tokenizer"] for entry in data) == ["bpe", "bytes"]


# scheduling


def test_runs_of_the_second_phase_begin_while_the_first_still_runs(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(corpus, seeds=3)
    study = Study(spec, tmp_path)
    plan = list(plan_tuning_runs(spec))
    assert study.runs.plan_certain_runs() == plan
    for run in plan:
        if run != PlannedRun(corpus, "k=v", 1e-2, 0):
            fabricate(spec, tmp_path, run)
    assert study.runs.list_missing_runs() == [
        PlannedRun(corpus, "k=v", 1e-2, 0),
        PlannedRun(corpus, "standard", 1e-3, 1),
        PlannedRun(corpus, "standard", 1e-3, 2),
    ]
    fabricate(spec, tmp_path, PlannedRun(corpus, "k=v", 1e-2, 0))
    assert len(study.runs.list_missing_runs()) == 4
    monkeypatch.setattr(RunResult, "process_seconds", 3.0)  # of which 1 for steps
    assert study.runs.estimate_wall_clock(plan, workers=2) == pytest.approx(SLACK * (4 * 2 + 4 * 1) / 2)


def test_progress_and_the_time_left(corpus: str, tmp_path: Path) -> None:
    spec = small_spec(corpus, seeds=3)  # 4 runs that tune, 4 that confirm
    study, display = Study(spec, tmp_path), RecordingDisplay()
    plan = list(plan_tuning_runs(spec))
    for run in plan[:2]:
        fabricate(spec, tmp_path, run)
    study.runs.list_unfinished(plan)
    study.progress.began, study.progress.given = time.monotonic() - 60.0, 2.0
    study.show_progress(plan[2:3], display)
    assert display.shown[-1][1] == "2/8 runs · waiting for a process or node to begin"
    folder = plan[2].folder_in(tmp_path)
    folder.mkdir(parents=True)
    record = {"kind": "train", "step": STEPS // 2, "time": {"seconds": 1.0}}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n" + '{"kind": "evaluation"}\n{"kind": "tr')
    assert measure_run_progress(folder, study.runs.resolve(plan[2])) == 0.5
    study.show_progress(plan[2:3], display)
    assert " left " not in display.shown[-1][1]  # it has just begun to move; what came before was starting
    study.progress.began, study.progress.given = time.monotonic() - 60.0, 2.0
    study.show_progress(plan[2:3], display)
    done, line = display.shown[-1]
    assert done == pytest.approx((2 + 0.8 * 0.5) / 8)  # steps are 0.8 of a run's time
    assert line.startswith("2/8 runs · 14 min 0 s left · now standard")  # 0.4 runs a minute, 5.6 still to do
    timed = small_spec(corpus, match="seconds", base=spec.base | {"budget": {"seconds": 4.0}})
    assert measure_run_progress(folder, plan[2].resolve_spec(timed)) == 0.25


def test_an_arm_that_always_diverges_is_not_waited_for(corpus: str, tmp_path: Path) -> None:
    spec = small_spec(corpus, seeds=3)
    for run in plan_tuning_runs(spec):
        fabricate(spec, tmp_path, run, status="diverged" if run.arm == "k=v" else "finished")
    study, display = Study(spec, tmp_path), RecordingDisplay()
    study.runs.list_unfinished(plan_tuning_runs(spec))
    study.progress.began, study.progress.moving = time.monotonic() - 60.0, True
    study.show_progress([], display)
    assert display.shown[-1][1].startswith("4/6 runs · 30 s left")
    assert {run.arm for run in study.runs.list_missing_runs()} == {"standard"}
