"""Slices of one study from several machines: united they are the study done in one go, and nothing else gets in."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_study import InProcess, RecordingDisplay, check_whole, fabricate, read_comparable, small_spec

from qklab.cli import main
from qklab.study.execute import Study, StudyInterrupted
from qklab.study.merge import merge_studies
from qklab.study.parts import find_size_folder, read_parts
from qklab.study.plan import PlannedRun, plan_tuning_runs
from qklab.study.records import Analyses, StudyRecord, read_analyses, read_study_record
from qklab.study.sizes import split_sizes
from qklab.study.spec import StudyError, StudySpec


def carry_out_slice(corpus: str, folder: Path, arm: str) -> None:
    """What one machine does: its arm as far as it can."""
    told = f"3 of 6 runs are done, and all of {arm} that are certain"
    with Study(small_spec(corpus), folder, only=[arm]).open() as study, pytest.raises(StudyInterrupted, match=told):
        study.carry_out(InProcess(), RecordingDisplay())


def test_a_merge_of_slices_is_the_study_in_one_go(corpus: str, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    for arm in ("standard", "k=v"):
        carry_out_slice(corpus, tmp_path / arm, arm)
    found = merge_studies([tmp_path / "standard", tmp_path / "k=v"], tmp_path / "all")
    assert (found.taken, found.ended, found.planned) == (6, 6, 6)
    assert found.describe().endswith("6 have ended, all of the study.")
    check_whole(tmp_path / "all", undisturbed)
    assert read_comparable(tmp_path / "all") == undisturbed
    again = merge_studies([tmp_path / "k=v"], tmp_path / "all")
    assert (again.taken, again.ended) == (0, 6)
    nothing = InProcess()
    with Study(small_spec(corpus), tmp_path / "all").open() as study:
        assert len(study.carry_out(nothing, RecordingDisplay())) == 6
    assert nothing.units == []
    with pytest.raises(StudyError, match=r"there is no arm 'kv'.* its arms are standard, k=v"):
        Study(small_spec(corpus), tmp_path / "s", only=["kv"])


def slices(corpus: str, tmp_path: Path, other: StudySpec | None = None, **changes: Any) -> list[Path]:
    """Two folders of two runs each that were never trained; the second has another spec or changed records."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for k, folder in enumerate(folders):
        spec = other if k and other is not None else small_spec(corpus)
        for run in list(plan_tuning_runs(spec))[2 * k : 2 * k + 2]:
            fabricate(spec, folder, run)
            path = run.folder_in(folder) / "run.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "a" * 64} | (changes if k else {})))
        data = {"spec": spec.run("standard", corpus, 1e-3, 0).corpus.to_dict(), "hash": "c" * 64}
        StudyRecord(spec, [data | ({"hash": changes["hash"]} if k and "hash" in changes else {})]).write(folder)
    return folders


def test_what_does_not_belong_together_is_refused_and_nothing_is_written(corpus: str, tmp_path: Path) -> None:
    others: list[tuple[dict[str, Any], str]] = [
        ({"other": small_spec(corpus, margin=0.02)}, "with margin=0.01, but 0.02 came in .*two: another plan"),
        ({"hash": "d" * 64}, "the corpus .* was cccccccccccc… in .*one and dddddddddddd… in .*two: .* different text"),
        ({"code": "b" * 64}, r"one/.* was made by other code \(aaaaaaaaaaaa…\) than .*two/.* \(bbbbbbbbbbbb…\)"),
    ]
    for k, (changes, told) in enumerate(others):
        with pytest.raises(StudyError, match=told):
            merge_studies(slices(corpus, tmp_path / str(k), **changes), tmp_path / str(k) / "all")
        assert not (tmp_path / str(k) / "all").exists()
    with pytest.raises(StudyError, match="unites two or more folders, but 1 came"):
        merge_studies([tmp_path / "0" / "one"], tmp_path / "all")
    with pytest.raises(StudyError, match="nowhere holds no study"):
        merge_studies([tmp_path / "0" / "one", tmp_path / "nowhere"], tmp_path / "all")


def test_of_a_run_in_several_slices_one_that_ended_counts_and_every_analysis(corpus: str, tmp_path: Path) -> None:
    one, two = slices(corpus, tmp_path, small_spec(corpus, seeds=5, tuning_seeds=2))
    run = next(plan_tuning_runs(small_spec(corpus)))
    shutil.copytree(run.folder_in(one), run.folder_in(two))
    (run.folder_in(one) / "summary.json").unlink()
    (run.folder_in(one) / "checkpoints" / "step-0000000007").mkdir(parents=True)
    unfinished = PlannedRun(corpus, "standard", 1e-2, 1)
    for folder, step in ((one, 3), (two, 9)):
        fabricate(small_spec(corpus), folder, unfinished)
        (unfinished.folder_in(folder) / "summary.json").unlink()
        (unfinished.folder_in(folder) / "checkpoints" / f"step-{step:010d}").mkdir(parents=True)
        Analyses().add(step, 2, "command").write(folder)
        path = unfinished.folder_in(folder) / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "a" * 64}))
    found = merge_studies([one, two], tmp_path / "all")
    assert (found.taken, found.ended, read_study_record(tmp_path / "all").spec.seeds) == (5, 4, 5)
    assert (unfinished.folder_in(tmp_path / "all") / "checkpoints" / "step-0000000009").exists()
    assert read_analyses(tmp_path / "all").seeds == [3, 9]
    assert "still to be done" in found.describe()


def test_a_study_of_several_sizes_is_united_size_by_size(corpus: str, tmp_path: Path) -> None:
    base = {name: own for name, own in small_spec(corpus).base.items() if name not in ("budget", "model")}
    model = {"layers": 1, "context": 16, "recipe": "nano"}
    sizes = [{"name": name, "model": model | {"width": width}} for name, width in (("small", 16), ("large", 32))]
    whole = small_spec(corpus, sizes=sizes, metric="bits_per_byte", base=base)
    for folder, size in ((tmp_path / "one", "small"), (tmp_path / "two", "large")):
        part = split_sizes(whole)[size]
        StudyRecord(whole, []).write(make_folder(folder))
        StudyRecord(part, []).write(make_folder(find_size_folder(folder, size)))
        for run in plan_tuning_runs(part):
            fabricate(part, find_size_folder(folder, size), run)
    found = merge_studies([tmp_path / "one", tmp_path / "two"], tmp_path / "all")
    assert (found.taken, found.ended, found.planned) == (8, 8, 12)
    assert [(part.size, len(part.results)) for part in read_parts(tmp_path / "all")[1]] == [("small", 4), ("large", 4)]


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_from_the_command_line(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(folder) for folder in slices(corpus, tmp_path)]
    for words, told in (
        (("--merge", *folders), "a merge takes folders and --out"),
        ((), "a study needs its TOML file"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(("study", *words))
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(("study", "--merge", *folders, "--out", str(tmp_path / "all")))
    assert "4 runs were added" in capsys.readouterr().out
