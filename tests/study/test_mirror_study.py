"""A study at a URL is the same study, whichever machines carry it out."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qklab.runs import RunDirectory
from qklab.study import execute
from qklab.study.execute import Slots, Study, StudyInterrupted
from qklab.study.mirror import Mirror, cache_of
from qklab.study.ray_executor import RayStudy
from qklab.study.results import Result
from qklab.study.spec import StudyError, StudySpec
from qklab.train.progress import Silent

TWO = Slots(2, 1)
LICENCE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("text")
    paragraphs = LICENCE.read_text(encoding="utf-8").split("\n\n")
    for name, part in (("valid", paragraphs[:5]), ("test", paragraphs[5:10]), ("train", paragraphs[10:])):
        (folder / f"{name}.txt").write_text("".join(f"{text}\n<|endoftext|>\n" for text in part), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("RAY_worker_niceness", "0")
        yield folder


def spec_of(corpus: Path, **changes: Any) -> StudySpec:
    values = {
        "name": "url",
        "baseline": "standard",
        "arms": {"standard": {}, "k=v": {"attention": {"share": "k=v"}}},
        "base": {
            "corpus": {"tokenizer": "bytes"},
            "model": {"layers": 1, "width": 16, "context": 32},
            "attention": {"heads": 2},
            "batch": {"sequences": 4},
            "budget": {"tokens": 4 * 32 * 200},
            "evaluation": {"times": 10, "tokens": 64, "probes": 1, "probe_tokens": 16},
        },
        "corpora": [str(corpus)],
        "seeds": 2,
    }
    return StudySpec.from_dict(values | changes)


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the study is without a URL."""
    study = Study(spec_of(corpus), tmp_path_factory.mktemp("study") / "local")
    with study.opened():
        return told(study.folder, study.carry_out(TWO, Silent()))


def told(folder: Path, results: list[Result]) -> dict[str, Any]:
    """Everything a study measured and its last checkpoints, but the times; each run is there once."""
    folders = sorted(path.parent for path in folder.glob("runs/**/run.json"))
    assert sorted(result.planned.folder(folder) for result in results) == folders
    measured = {}
    for result in results:
        directory = RunDirectory(result.planned.folder(folder))
        metrics = [{key: value for key, value in record.items() if key != "time"} for record in directory.metrics()]
        last = max(directory.checkpoints_path.glob("step-*"))
        weights = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
        measured[result.planned.name] = (metrics, result.summary["evaluation"], last.name, weights)
    return measured


class Stops(Silent):
    """Ctrl-C once a run has carried a checkpoint."""

    def __init__(self, there: Path):
        self.there, self.stopped = there, False

    def show(self, done: float, line: str) -> None:
        if not self.stopped and next(self.there.glob("runs/*/*/*/checkpoints/*/manifest.json"), None):
            self.stopped = True
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.long
def test_a_study_begun_on_one_machine_and_ended_on_another(
    corpus: Path, tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "SHOW", 0.0)
    url, there = f"file://{tmp_path}/a1", tmp_path / "a1"
    first = Study(spec_of(corpus), tmp_path / "a", mirror=Mirror(url, tmp_path / "a"))
    display = Stops(there)
    with pytest.raises(StudyInterrupted), first.opened():
        first.carry_out(TWO, display)
    assert display.stopped
    begun = {path.parent.relative_to(there) for path in there.glob("runs/*/*/*/run.json")}
    ended = {path.parent.relative_to(there) for path in there.glob("runs/*/*/*/summary.json")}
    assert begun - ended
    shutil.rmtree(tmp_path / "a")

    edited = Study(spec_of(corpus, lrs=[0.1]), tmp_path / "c", mirror=Mirror(url, tmp_path / "c"))
    with pytest.raises(StudyError, match="began with lrs"), edited.opened():
        pass

    second = Study(spec_of(corpus), tmp_path / "b", mirror=Mirror(url, tmp_path / "b"))
    with second.opened():
        results = second.carry_out(TWO, Silent())
    Mirror(url, tmp_path / "b").fetch_results(checkpoints=True)
    assert told(tmp_path / "b", results) == expected
    assert told(there, [*results]) == expected

    third = Study(spec_of(corpus), tmp_path / "d", mirror=Mirror(url, tmp_path / "d"))
    with third.opened():
        again = third.carry_out(TWO, Silent())
        assert third.starter is None  # nothing was left to do
    Mirror(url, tmp_path / "d").fetch_results(checkpoints=True)
    assert told(tmp_path / "d", again) == expected


@pytest.mark.long
def test_nodes_that_share_nothing_but_the_url(corpus: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    """The study's own folder is another one than that of the nodes."""
    pytest.importorskip("ray")
    url = f"file://{tmp_path}/a1"
    mirror = Mirror(url, tmp_path / "driver")
    study = RayStudy(spec_of(corpus), mirror.local, mirror=mirror)
    with study.opened():
        results = study.carry_out(TWO, Silent())
    mirror.fetch_results(checkpoints=True)
    assert told(mirror.local, results) == expected
    assert not (mirror.local / "runs" / results[0].planned.place / "holder.json").exists()
    assert (cache_of(url) / "runs" / results[0].planned.place / "holder.json").exists()
    log = (mirror.local / "logs" / f"{results[0].planned.place}.log").read_text()
    assert "on the node" in log
