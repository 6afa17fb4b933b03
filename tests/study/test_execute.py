"""A study survives: whatever is killed or stopped, every run exists once and is what it would have been."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from small_study import (
    STEPS,
    TWO,
    Told,
    alive,
    carried_out,
    caught,
    check_saved,
    check_whole,
    comparable,
    let_go,
    let_go_when_asked,
    parent,
    resumes,
    small,
    state,
    unfinished,
    until,
)

from qklab.runs import RunDirectory
from qklab.study import execute, worker
from qklab.study.answer import answer
from qklab.study.execute import Active, Slots, Study, StudyInterrupted, read_spec
from qklab.study.plan import Planned, tuning
from qklab.study.results import result_of
from qklab.study.spec import StudyError, StudySpec
from qklab.study.worker import CRASHED, FAILED, Ended, Nursery, heed_stops, in_use, perform, wait_for_orphan
from qklab.train.launch import Outcome, train
from qklab.train.signals import StopRequest
from qklab.train.spec import ExecutionSpec, RunSpec

# killed and stopped


@pytest.mark.long
def test_a_study_survives_whatever_happens_to_its_processes(
    corpus: str, driver: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "study"
    first = driver(carried_out, small(corpus), folder)
    run, orphan = until(lambda: caught(folder), "run under way")
    first.kill()
    first.join()

    second = driver(carried_out, small(corpus), folder)
    _, own = until(lambda: caught(folder, lambda pid: parent(parent(pid)) == second.pid), "run of the second driver")
    assert alive(orphan)
    assert in_use(run)  # which the second driver has to wait for
    let_go(orphan)
    until(lambda: not alive(orphan), "end of the orphan")
    nursery = parent(own)
    os.kill(own, signal.SIGTERM)  # as a system that stops a service or a job does it: to every process
    os.kill(own, signal.SIGCONT)
    os.kill(nursery, signal.SIGTERM)
    os.kill(second.pid, signal.SIGTERM)
    second.join()
    assert second.code.value == 75
    assert not any(map(alive, (own, nursery)))
    check_saved(folder)

    with pytest.MonkeyPatch.context() as patch, Study(small(corpus), folder).opened() as study:
        patch.setattr(execute, "SHOW", 0.0)
        patch.setattr(execute, "POLL", 0.01)
        interrupted(study, folder)
        nurseries = killed(study, folder)
    assert [state(pid) for pid in nurseries] == [[], []]  # no zombie either
    check_whole(folder, request.getfixturevalue("undisturbed"))
    assert len(resumes(folder)) >= 5


def interrupted(study: Study, folder: Path) -> None:
    """Carry out a study that Ctrl-C stops in the midst of a run."""
    stopped = list[Path]()

    def act() -> None:
        if not stopped and (found := caught(folder)):
            stopped.append(found[0])
            os.kill(os.getpid(), signal.SIGINT)
            let_go_when_asked(found[1])

    with pytest.raises(StudyInterrupted, match=r"^stopped by SIGINT; the same command continues\.$"):
        study.carry_out(TWO, Told(act))
    assert stopped[0] in unfinished(folder)
    assert not any(map(in_use, unfinished(folder)))
    check_saved(folder)


def killed(study: Study, folder: Path) -> list[int]:
    """Carry out a study in which a run is killed and then, in the midst of another, the nursery; all nurseries."""
    victims, nurseries, held = list[int](), list[int](), list[int]()

    def act() -> None:
        if told.count("its process died") < len(victims):
            return
        if held:
            let_go(held.pop())
        if len(victims) < 2 and (found := caught(folder)):
            nurseries.append(parent(found[1]))
            victims.append(nurseries[0] if victims else found[1])
            os.kill(victims[-1], signal.SIGKILL)
            held.extend(found[1:] if len(victims) == 2 else ())

    told = Told(act)
    study.carry_out(TWO, told)
    assert len(victims) == 2
    assert not held
    assert told.count("its process died (SIGKILL, perhaps for want of memory); it is resumed") == 1
    assert 1 <= told.count("its process died (the process that started it is gone; its log is") <= 2
    assert isinstance(study.starter, Nursery)
    return [nurseries[0], study.starter.process.pid]


def hear_once() -> None:
    """In a process of its own: SIGTERM comes before anyone listens, again, and again while the state is saved."""
    heed_stops(os.getppid())
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2 * worker.LOOK)
    with StopRequest() as stop:
        until(lambda: stop.came, "request")
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * worker.LOOK)


def never_save(listens: bool) -> None:
    """In a process of its own: a run that outlived its nursery and hangs."""
    worker.SAVING = 1.0
    heed_stops(nursery=0)
    with StopRequest() if listens else closing(Told()):
        time.sleep(120)


def test_sigterm_is_one_request_however_often_it_comes(driver: Callable[..., Any]) -> None:
    process = driver(hear_once)
    process.join()
    assert (process.exitcode, process.code.value) == (0, 0)


@pytest.mark.parametrize("listens", [True, False])
def test_an_orphan_that_hangs_ends_by_itself(listens: bool, driver: Callable[..., Any]) -> None:
    process = driver(never_save, listens)
    process.join()
    assert process.exitcode == -signal.SIGALRM


DEAF = """
import json, sys
for order in map(json.loads, sys.stdin):
    if order.get("signal") == 9:
        print("[1, -9]", flush=True)
"""


def test_a_run_that_hangs_when_the_study_stops_is_ended(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (execute, worker):
        monkeypatch.setattr(module, "SAVING", 0.3)
    monkeypatch.setattr(worker, "SERVE", DEAF)
    monkeypatch.setattr(execute, "SHOW", 0.0)
    told = Told(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StudyInterrupted, match="stopped by SIGTERM"):
        carried_out(small(corpus), tmp_path / "study", told, Slots(1, 1))
    assert told.sentences[-1] == "1 of them did not within 0 s and was ended; what was saved before is still there."
    with closing(Nursery(tmp_path / "log", {})) as nursery:
        nursery.start({}, tmp_path / "log", {})
        assert nursery.stop() == 1
        assert not nursery.running


def test_an_orphan_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[float]()
    with RunDirectory(tmp_path).lock() as held:
        assert in_use(tmp_path)

        def look(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 3:
                held.release()

        monkeypatch.setattr(time, "sleep", look)
        wait_for_orphan(tmp_path, os.getppid())
        assert looks == [worker.LOOK] * 3
    with RunDirectory(tmp_path).lock():  # and nothing is held by the one who waited
        wait_for_orphan(tmp_path, 0)  # whose study is gone in the meantime
        monkeypatch.setattr(worker, "SAVING", 0.0)
        wait_for_orphan(tmp_path, os.getppid())
    assert len(looks) == 3
    wait_for_orphan(tmp_path / "nothing", os.getppid())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_study_is_stopped_while_its_corpus_is_prepared(
    number: signal.Signals, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(number)

    def prepare(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(120)

    monkeypatch.setattr(execute, "prepare_corpus", prepare)
    sentence = f"^stopped by {number.name} while its corpora were prepared; the same command continues"
    with pytest.raises(StudyInterrupted, match=sentence):
        carried_out(small(corpus), tmp_path / "study")
    assert signal.getsignal(number) is before
    assert not in_use(tmp_path / "study")


# the undisturbed study


def test_every_planned_run_is_done_once(undisturbed: dict[str, Any], undisturbed_folder: Path) -> None:
    check_whole(undisturbed_folder, undisturbed)
    assert resumes(undisturbed_folder) == []
    assert len(undisturbed) == 2 * 2 + 2
    assert not (undisturbed_folder / "logs" / "processes.log").read_text()
    chosen = {run.split("/")[-2]: run for run in undisturbed if run.endswith("seed1")}
    assert set(chosen) == {"standard", "k=v"}
    for arm, run in chosen.items():
        own = {name: found["summary"]["evaluation"] for name, found in undisturbed.items() if f"/{arm}/" in name}
        tried = [name for name in own if name.endswith("seed0")]
        assert run == min(tried, key=lambda name: own[name]["valid"]["loss"]).replace("seed0", "seed1")


def test_a_run_of_a_study_is_the_run_that_train_makes(corpus: str, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    planned = Planned(corpus, "k=v", 1e-2, 0)
    folder = planned.folder(tmp_path)
    train(planned.spec(small(corpus)), folder, ExecutionSpec(device="cpu", threads=1))
    name = str(folder.relative_to(tmp_path))
    assert comparable(tmp_path) == {name: undisturbed[name]}


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

    monkeypatch.setattr(execute, "prepare_corpus", refuse)
    monkeypatch.setattr(execute, "Nursery", refuse)
    folder = shutil.copytree(undisturbed_folder, tmp_path / "study")
    results = carried_out(small(corpus), folder)
    assert {str(r.planned.folder(folder).relative_to(folder)) for r in results} == set(undisturbed)
    check_whole(folder, undisturbed)


# runs that fail


class Dying:
    """A starter whose runs all end with a code, having said something."""

    code, words, begun, lost = 1, "", 0, False

    def __init__(self, *_: Any):
        self.numbers = list[int]()

    def start(self, task: Any, log: Path, environment: Any) -> int:
        type(self).begun += 1
        with open(log, "a") as file:
            file.write(self.words)
        self.numbers.append(self.begun)
        return self.begun

    def ended(self, patience: float) -> Ended:
        return [(self.numbers.pop(), self.code)] if self.numbers else []

    def stop(self) -> int:
        return 0

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("code", "words", "begun", "sentence"),
    [
        (
            1,
            "Traceback\nRuntimeError: out of memory\n",
            3,
            r"failed: RuntimeError: out of memory \(all that it said is in",
        ),
        (-9, "resuming\n", 3, "failed: SIGKILL, perhaps for want of memory"),
        (75, "", 3, r"failed: it ended with code 75 and could say nothing; is the disk full\? \(all"),
        (2, "the disk is full.\n", 1, r"failed: the disk is full \(all"),
    ],
)
def test_a_run_that_fails_again_and_again_ends_the_study(
    code: int, words: str, begun: int, sentence: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Kind", (Dying,), {"code": code, "words": words})
    monkeypatch.setattr("qklab.study.execute.Nursery", kind)
    with pytest.raises(StudyError, match=sentence) as caught:
        carried_out(small(corpus), tmp_path / "study", slots=Slots(1, 1))
    assert not isinstance(caught.value, StudyInterrupted)
    assert kind.begun == begun


def test_a_run_that_gets_further_each_time_is_resumed_as_often_as_it_takes(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Further(Dying):
        code = -9

        def start(self, task: Any, log: Path, environment: Any) -> int:
            number = super().start(task, log, environment)
            if number <= 5:
                (Path(task["folder"]) / "checkpoints" / f"step-{number:010d}").mkdir(parents=True)
            return number

    monkeypatch.setattr("qklab.study.execute.Nursery", Further)
    with pytest.raises(StudyError, match="failed: SIGKILL"):
        carried_out(small(corpus), tmp_path / "study", slots=Slots(1, 1))
    assert Further.begun == 5 + 2


def test_a_resumed_run_keeps_its_number_of_threads(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int | None] = []

    def record(spec: RunSpec, folder: Path, execution: ExecutionSpec, **_: Any) -> Outcome:
        used.append(execution.threads)
        return Outcome("interrupted", folder, None)

    monkeypatch.setattr("qklab.study.worker.train", record)
    spec = next(tuning(small(corpus))).spec(small(corpus))
    task: dict[str, Any] = {"spec": spec.to_dict(), "folder": str(tmp_path), "execution": {"threads": 3}, "data": None}
    assert perform(task) == 75
    RunDirectory(tmp_path).write("run.json", {"spec": spec.to_dict()})
    assert perform(task) == 75
    assert used == [3, None]  # None: what the run began with


def test_what_is_wrong_with_a_run_is_its_last_word(
    corpus: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = next(tuning(small(corpus))).spec(small(corpus)).to_dict()
    task: dict[str, Any] = {"spec": spec, "folder": str(tmp_path), "execution": {"device": "cpu"}, "data": None}
    (tmp_path / "metrics.jsonl").write_text("")
    assert perform(task) == FAILED
    assert "holds what a run left but no run.json" in capfd.readouterr().err.splitlines()[-1]

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("qklab.study.worker.train", broken)
    assert perform(task) == CRASHED
    assert capfd.readouterr().err.splitlines()[-1] == "RuntimeError: out of memory"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_run_that_cannot_even_say_that_the_disk_is_full(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise ValueError("no space left on device")

    monkeypatch.setattr(worker, "train", full)
    monkeypatch.setattr(sys, "stderr", Full())
    spec = next(tuning(small(corpus))).spec(small(corpus)).to_dict()
    assert perform({"spec": spec, "folder": str(tmp_path), "execution": {}, "data": None}) == FAILED


class Here(Dying):
    """A starter whose runs are done by this process."""

    def start(self, task: Any, log: Path, environment: Any) -> int:
        self.code = perform(task)
        return super().start(task, log, environment)


def test_arms_that_diverge_are_results(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "Nursery", Here)
    arms = {"standard": {}, "hopeless": {"max_skips": 0, "z_loss": 1e38}}  # whose loss is infinite from the first step
    told = Told()
    results = carried_out(small(corpus, steps=20, lrs=[1e-3, 1e30], arms=arms), tmp_path, told, Slots(1, 1))
    status = {(r.planned.arm, r.planned.lr): r.status for r in results if r.planned.seed == 0}
    assert status["standard", 1e-3] == "finished"
    assert {status[arm, lr] for arm, lr in status if (arm, lr) != ("standard", 1e-3)} == {"diverged"}
    assert sum("no result, diverged" in sentence for sentence in told.sentences) == 3
    assert [(r.planned.arm, r.planned.lr) for r in results if r.planned.seed == 1] == [("standard", 1e-3)]


# the folder


def begun(spec: StudySpec, folder: Path) -> None:
    """A study of which one run has been done, by a fabricated summary."""
    with Study(spec, folder).opened():
        fabricate(spec, folder, next(tuning(spec)))


def fabricate(spec: StudySpec, folder: Path, planned: Planned, status: str = "finished", **other: Any) -> None:
    run = planned.spec(spec).replace(precision="fp32", **other)
    directory = RunDirectory(planned.folder(folder))
    directory.path.mkdir(parents=True)
    directory.write("run.json", {"id": "x", "spec": run.to_dict(), "data": {}, "environment": {}})
    value = {"loss": 2.0 + planned.lr + 0.1 * planned.seed, "bits_per_byte": 1.0}
    evaluation = {"valid": value, "test": value} if status == "finished" else {}
    directory.write("summary.json", {"status": status, "evaluation": evaluation, "seconds": 1.0})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lrs": [1e-3]}, r"began with lrs=\[0.001, 0.01\], but \[0.001\] came"),
        ({"margin": 0.5}, r"began with margin=0.01, but 0.5 came"),
        (
            {"arms": {"standard": {}, "k=v": {"attention": {"share": "q=k"}}}},
            r"arms.k=v.attention.share='k=v', but 'q=k'",
        ),
        ({"arms": {"standard": {}, "k=v": {}}}, r"arms.k=v.attention={'share': 'k=v'}, which is now left out"),
        (
            {"arms": {"standard": {}, "k=v": {"attention": {"share": "k=v"}}, "new": {}}},
            r"began without arms.new, but {} came",
        ),
        ({"seeds": 1}, r"holds a study of 2 seeds, but seeds=1 came; .* more seeds and not fewer"),
    ],
)
def test_a_study_edited_after_it_began_is_refused(
    changes: dict[str, Any], sentence: str, corpus: str, tmp_path: Path
) -> None:
    begun(small(corpus), tmp_path)
    with pytest.raises(StudyError, match=sentence), Study(small(corpus, **changes), tmp_path).opened():
        pass
    assert read_spec(tmp_path / "study.json") == small(corpus)


def test_a_study_edited_before_anything_ran_is_no_other(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no source 'nowhere'"):
        carried_out(small("nowhere"), tmp_path)
    with Study(small(corpus, seeds=1), tmp_path).opened():
        assert read_spec(tmp_path / "study.json") == small(corpus, seeds=1)


def test_a_corpus_that_is_gone_since_the_study_began(corpus: str, tmp_path: Path) -> None:
    copy = shutil.copytree(corpus, tmp_path / "copy")
    begun(small(str(copy)), tmp_path / "study")
    shutil.rmtree(copy)
    with pytest.raises(ValueError, match=f"there is no source '{copy}'"):
        carried_out(small(str(copy)), tmp_path / "study")
    assert len(list((tmp_path / "study").glob("runs/**/summary.json"))) == 1
    assert not in_use(tmp_path / "study")


def test_a_study_of_one_seed_only_tunes_and_is_an_anecdote(
    corpus: str, undisturbed_folder: Path, tmp_path: Path
) -> None:
    spec = small(corpus, seeds=1)
    with Study(spec, tmp_path).opened() as study:
        for run in tuning(spec):
            shutil.copytree(run.folder(undisturbed_folder), run.folder(tmp_path))
        results = study.carry_out(TWO, Told())
    assert [result.planned for result in results] == list(tuning(spec))
    assert "One seed is an anecdote" in answer(spec, results)


def test_a_study_can_be_given_more_seeds(corpus: str, tmp_path: Path) -> None:
    begun(small(corpus), tmp_path)
    with Study(small(corpus, seeds=4), tmp_path).opened():
        assert read_spec(tmp_path / "study.json").seeds == 4


def test_two_studies_at_once_in_one_folder(corpus: str, tmp_path: Path) -> None:
    with Study(small(corpus), tmp_path).opened():  # noqa: SIM117
        with pytest.raises(StudyError, match="in use by another process"), Study(small(corpus), tmp_path).opened():
            pass


@pytest.mark.parametrize("place", ["run.json", "mine/run.json", "runs/a/b/c/run.json", "metrics.jsonl"])
def test_a_folder_of_other_runs_is_refused(place: str, corpus: str, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("{}")
    with pytest.raises(StudyError, match=r"holds runs but no study.json"), Study(small(corpus), tmp_path).opened():
        pass


def test_another_run_in_the_place_of_a_planned_one_is_refused(corpus: str, tmp_path: Path) -> None:
    spec = small(corpus)
    fabricate(spec, tmp_path, next(tuning(spec)), z_loss=0.5)
    with Study(spec, tmp_path / "new").opened():
        (tmp_path / "runs").rename(tmp_path / "new" / "runs")
    with pytest.raises(StudyError, match=r"another run is in the place of standard .* z_loss=0.5, but 0.0 came"):
        carried_out(spec, tmp_path / "new")


def test_a_damaged_study_is_refused(corpus: str, tmp_path: Path) -> None:
    for content in ("", "[]", '{"format": 9}', '{"format": 1}', '{"format": 1, "spec": {"name": 3}}'):
        (tmp_path / "study.json").write_text(content)
        with pytest.raises(StudyError, match=r"study.json cannot be read as a study"):
            read_spec(tmp_path / "study.json")


def test_a_disk_that_refuses_is_one_sentence(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qklab.study.execute.write_json", full)
    with pytest.raises(StudyError, match="no space left on device; what was saved"):
        carried_out(small(corpus), tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StudyError, match="no space left on device; what was saved"):
        carried_out(small(corpus), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match=r"the study's folder .* cannot be written"):
        carried_out(small(corpus), tmp_path / "file")


# corpora


def texts(folder: Path, content: dict[str, str]) -> str:
    folder.mkdir(exist_ok=True)
    for name, text in content.items():
        (folder / name).write_text(text)
    return str(folder)


def on_text(source: str, **changes: Any) -> StudySpec:
    base = small(source).base | {"corpus": {"tokenizer": "bytes"}}
    values: dict[str, Any] = {"base": base} | changes
    return small(source, **values)


def test_a_corpus_without_test_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    source = texts(tmp_path / "text", {"train.txt": "some text " * 50, "valid.txt": "other text " * 50})
    spec = on_text(source, base=small(source).base | {"corpus": {"tokenizer": "bytes", "test": 0.0}})
    with pytest.raises(StudyError, match="has no test text, which a study needs to report on"):
        carried_out(spec, tmp_path / "study")


def test_a_corpus_that_changed_since_the_study_began_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    parts = {"train.txt": "some text " * 50, "valid.txt": "other text " * 50, "test.txt": "a third text " * 50}
    source = texts(tmp_path / "text", parts)
    spec = on_text(source)
    with Study(spec, tmp_path / "study").opened() as study:
        study.prepare(Told())
        fabricate(spec, tmp_path / "study", next(tuning(spec)))
    with Study(spec, tmp_path / "study").opened() as study:
        study.prepare(Told())  # the same text
    texts(tmp_path / "text", parts | {"train.txt": "another text " * 50})
    with pytest.raises(StudyError, match=r"text changed since the study in .* began: it was .*… and is now"):
        carried_out(spec, tmp_path / "study")


def test_every_tokenizer_of_an_arm_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    parts = {"train.txt": "some text " * 50, "valid.txt": "other text " * 50, "test.txt": "a third text " * 50}
    arms = {"standard": {}, "bpe": {"corpus": {"tokenizer": "bpe", "vocab": 300}}}
    spec = on_text(texts(tmp_path / "text", parts), arms=arms, metric="bits_per_byte")
    with Study(spec, tmp_path / "study").opened() as study:
        study.prepare(Told())
    data = json.loads((tmp_path / "study" / "study.json").read_text())["data"]
    assert sorted(entry["spec"]["tokenizer"] for entry in data) == ["bpe", "bytes"]


# scheduling


def test_runs_of_the_second_phase_begin_while_the_first_still_runs(corpus: str, tmp_path: Path) -> None:
    spec = small(corpus, seeds=3)
    study = Study(spec, tmp_path)
    plan = list(tuning(spec))
    assert study.foreseen() == []
    for run in plan:
        if run != Planned(corpus, "k=v", 1e-2, 0):
            fabricate(spec, tmp_path, run)
    assert study.left(plan) == [Planned(corpus, "k=v", 1e-2, 0)]
    assert study.foreseen() == [Planned(corpus, "standard", 1e-3, 1), Planned(corpus, "standard", 1e-3, 2)]
    fabricate(spec, tmp_path, Planned(corpus, "k=v", 1e-2, 0))
    assert study.left(plan) == []
    assert len(study.foreseen()) == 4


def test_progress_and_the_time_left(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small(corpus, seeds=3)  # 4 runs that tune, 4 that confirm
    study, told = Study(spec, tmp_path), Told()
    plan = list(tuning(spec))
    for run in plan[:2]:
        fabricate(spec, tmp_path, run)
    study.left(plan)
    study.began, study.given = time.monotonic() - 60.0, 2.0
    folder = plan[2].folder(tmp_path)
    folder.mkdir(parents=True)
    record = {"kind": "train", "step": STEPS // 2, "time": {"seconds": 1.0}}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n" + '{"kind": "evaluation"}\n{"kind": "tr')
    active = Active(plan[2], 0, tmp_path / "log", 0, "")
    assert study.progress(active) == 0.5
    study.tell([active], 8, told)
    done, line = told.shown[-1]
    assert done == pytest.approx((2 + 0.8 * 0.5) / 8)  # steps are 0.8 of a run's time
    assert line.startswith("2/8 runs · 14 min 0 s left · now standard")  # 0.4 runs a minute, 5.6 still to do


def test_an_arm_that_always_diverges_is_not_waited_for(corpus: str, tmp_path: Path) -> None:
    spec = small(corpus, seeds=3)
    for run in tuning(spec):
        fabricate(spec, tmp_path, run, status="diverged" if run.arm == "k=v" else "finished")
    study, told = Study(spec, tmp_path), Told()
    study.left(tuning(spec))
    study.began, study.given = time.monotonic() - 60.0, 0.0
    study.tell([], 8, told)
    assert told.shown[-1][1].startswith("4/6 runs · 30 s left")
    assert {run.arm for run in study.foreseen()} == {"standard"}


def test_a_budget_of_seconds_has_a_progress_too(corpus: str, tmp_path: Path) -> None:
    base = small(corpus).base | {"budget": {"seconds": 4.0}}
    study = Study(small(corpus, match="seconds", base=base), tmp_path)
    run = next(tuning(study.spec))
    run.folder(tmp_path).mkdir(parents=True)
    record = {"kind": "train", "step": 3, "time": {"seconds": 1.0}}
    (run.folder(tmp_path) / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert study.progress(Active(run, 0, tmp_path / "log", 0, "")) == 0.25


def test_looking_at_progress_costs_little(corpus: str, undisturbed_folder: Path) -> None:
    folder = undisturbed_folder
    study = Study(small(corpus), folder)
    active = [Active(run, 0, folder / "log", 0, "") for run in tuning(study.spec)][:2]
    study.began = time.monotonic()
    study.tell(active, 6, Told())
    began = time.process_time()
    for _ in range(100):
        study.tell(active, 6, Told())
    assert (time.process_time() - began) / 100 < 0.01  # twice a second: below 2 % of a core


# room


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert Slots.of_machine("cpu") == Slots(8, 1)
    assert Slots.of_machine("cpu", 2) == Slots(2, 4)
    assert Slots.of_machine("cpu", 16) == Slots(16, 1)  # asked for
    assert Slots.of_machine("cpu").visible(0) == {}
    for wrong in (0, -1):
        with pytest.raises(StudyError, match=f"--at-once.*{wrong} came"):
            Slots.of_machine("cpu", wrong)
    with pytest.raises(StudyError, match="'tpu' came"):
        Slots.of_machine("tpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(StudyError, match="no CUDA device"):
        Slots.of_machine("cuda")
    assert Slots.of_machine("auto") == Slots(8, 1)


def test_a_run_sees_the_gpu_of_its_slot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    slots = Slots.of_machine()
    assert (slots.count, slots.threads, slots.gpus) == (2, 4, (0, 1))
    assert [slots.visible(n)["CUDA_VISIBLE_DEVICES"] for n in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert [slots.visible(n)["CUDA_VISIBLE_DEVICES"] for n in range(3)] == ["5", "GPU-abc", "5"]


def test_runs_know_nothing_of_a_torchrun_around_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setattr("qklab.study.worker.SERVE", "import os; print(sorted(os.environ), os.environ['OWN'])")
    with closing(Nursery(tmp_path / "log", {"OWN": "1"})) as nursery:
        said = b"".join(iter(lambda: nursery.back.read(65536), b""))
    assert b"KEPT" in said
    assert b"RANK" not in said
    assert b"WORLD_SIZE" not in said
    assert said.rstrip().endswith(b"1")


class Replaced(BaseException):
    """In the place of a process that becomes another program."""


def test_a_run_on_a_gpu_begins_with_a_python_of_its_own(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which the run would succeed")
    spec = next(tuning(small(corpus))).spec(small(corpus)).to_dict()
    execution = {"device": "cuda"}
    task = {"spec": spec, "folder": str(tmp_path / "run"), "execution": execution, "data": None}
    order = {"task": task, "log": str(tmp_path / "log"), "environment": {"CUDA_VISIBLE_DEVICES": "7"}}
    programs = list[list[str]]()

    def leave(code: int) -> None:
        raise Replaced

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "execv", lambda _, arguments: programs.append(arguments))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(worker, "become", lambda *_: None)
    with pytest.raises(Replaced):
        worker.separate(order, os.getpid())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    (program,) = programs
    assert subprocess.run(program, check=False).returncode == FAILED
    assert "torch sees no CUDA device" in (tmp_path / "log").read_text()


def test_results_are_read_where_the_plan_puts_them(corpus: str, undisturbed_folder: Path) -> None:
    for run in tuning(small(corpus)):
        found = result_of(undisturbed_folder, run)
        assert found is not None
        assert found.status == "finished"
    assert result_of(undisturbed_folder, Planned(corpus, "standard", 1e-3, 99)) is None
