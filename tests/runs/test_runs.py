"""Run directories: records that survive crashes, locks, environments, sinks."""

import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from qklab.runs import MetricsFile, RunDirectory, RunError, environment, read_metrics
from qklab.runs.environment import describe_environment, find_commit
from qklab.runs.sinks import SINKS, Sinks
from qklab.testing.processes import finish_process, start_process


def lines(path: Path, *records: dict) -> None:
    file = MetricsFile(path)
    for record in records:
        file.append(record)
    file.close()


def test_records_come_back_in_order_with_infinities_spelt_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines(path, {"kind": "train", "step": 1, "loss": 2.5}, {"kind": "train", "step": 2, "loss": math.inf})
    assert read_metrics(path) == [
        {"kind": "train", "step": 1, "loss": 2.5},
        {"kind": "train", "step": 2, "loss": "inf"},
    ]
    assert read_metrics(path, "evaluation") == []
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_crash_in_mid_line_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"kind": "train", "step": step, "loss": 0.1 * step, "text": "ä€"} for step in (1, 2, 3)]
    lines(path, *records)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        lines(path, {"kind": "train", "step": 4})
        expected = records[:2] + ([records[2]] if cut == len(whole) - 1 else [])
        assert read_metrics(path) == [*expected, {"kind": "train", "step": 4}], cut


def test_what_a_resumed_run_repeats_replaces_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = [{"kind": "train", "step": s, "loss": 1.0} for s in (1, 2, 3, 4)]
    again = [{"kind": "train", "step": s, "loss": 2.0} for s in (3, 4, 5)]
    lines(path, *first, {"kind": "resume", "step": 2}, *again)
    assert read_metrics(path) == first[:2] + again
    lines(path, {"kind": "resume", "step": 1}, again[0] | {"step": 2})  # what was lost and not repeated yet is gone
    assert read_metrics(path) == [first[0], again[0] | {"step": 2}]


def test_a_record_repeated_for_the_same_step_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    final = {"kind": "final", "step": 4, "split": "valid", "loss": 1.0}
    lines(path, final, {"kind": "resume", "step": 4}, final, final | {"split": "test"})
    assert read_metrics(path) == [final, final | {"split": "test"}]


def hold_lock(folder: Path, report: Connection) -> None:
    RunDirectory(folder).lock()
    report.send("ready")
    time.sleep(60)


def test_a_second_process_is_refused_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    holder = start_process(hold_lock, tmp_path, theirs)
    assert ours.recv() == "ready"
    (tmp_path / ".run.json.1.tmp").write_text("half")
    with pytest.raises(RunError, match=rf"in use by another process \(pid {holder.pid}\)"):
        RunDirectory(tmp_path).lock()
    assert (tmp_path / ".run.json.1.tmp").exists()
    holder.kill()
    holder.join()
    (tmp_path / "lock").write_text("99999999999\n")
    with RunDirectory(tmp_path).lock():
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory: it has no run\.json"):
        RunDirectory(tmp_path).read()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        RunDirectory(tmp_path).read()
    (tmp_path / "run.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match="another version"):
        RunDirectory(tmp_path).read()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RunError, match=r"cannot be written: not a directory; choose another --out"):
        RunDirectory(file / "run").lock()


def test_the_environment_names_versions_and_commit() -> None:
    described = describe_environment({"kind": "cpu"})
    assert described["packages"]["torch"]
    assert described["processor"]
    assert json.dumps(described)


def test_the_commit_is_that_of_the_checkout_that_has_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git")
    file = tmp_path / "package" / "runs" / "environment.py"
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(file))

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", "-C", tmp_path, *words], check=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "empty")
    file.touch()
    assert find_commit() is None  # the checkout of something else
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    head = find_commit()
    assert head is not None
    assert len(head) == 40
    file.write_text("changed")
    assert find_commit() == f"{head}+changes"


class Failing:
    def __init__(self, folder: Path, name: str, config: dict):
        self.calls = 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls += 1
        raise ConnectionError("no network")

    def close(self) -> None: ...


def test_a_failing_sink_is_told_of_once_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SINKS, "failing", Failing)
    said: list[str] = []
    sinks = Sinks(["failing"], tmp_path, "run", {}, said.append)
    for step in range(3):
        sinks.log({"loss": 1.0}, step)
    sinks.close()
    assert said == ["failing is left out from here on: ConnectionError: no network."]


def test_a_missing_sink_says_how_to_get_it_and_an_unknown_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    said: list[str] = []
    Sinks(["trackio"], tmp_path, "run", {}, said.append).log({"loss": 1.0}, 1)
    assert len(said) == 1
    assert "pip install trackio" in said[0]
    with pytest.raises(ValueError, match=r"did you mean 'tensorboard'"):
        Sinks(["tensorbord"], tmp_path, "run", {}, said.append)


def test_wandb_is_given_the_runs_name_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    class Module:
        init = staticmethod(lambda **options: calls.append(("init", options)))
        log = staticmethod(lambda values, step: calls.append(("log", values, step)))
        finish = staticmethod(lambda: calls.append(("finish",)))

    monkeypatch.setitem(sys.modules, "wandb", Module())
    sinks = Sinks(["wandb"], tmp_path, "my-run", {"seed": 1}, print)
    sinks.log({"loss": 1.0}, 3)
    sinks.close()
    assert calls[0][1]["id"] == "my-run"
    assert calls[0][1]["config"] == {"seed": 1}
    assert calls[1:] == [("log", {"loss": 1.0}, 3), ("finish",)]


def log_to_tensorboard(folder: Path) -> None:
    sinks = Sinks(["tensorboard"], folder, "run", {}, lambda said: sys.exit(said))
    sinks.log({"loss": 1.0}, 1)
    sinks.close()


def test_tensorboard_gets_a_file(tmp_path: Path) -> None:
    assert finish_process(start_process(log_to_tensorboard, tmp_path)) == 0
    assert list((tmp_path / "tensorboard").glob("events.out.*"))
