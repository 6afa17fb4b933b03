"""Run directories that something happened to between two processes: mended and told of, also under --quiet."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import Command, Settings, comparable, train_until

from qklab.runs import RunDirectory
from qklab.train.launch import train

Damage = Callable[[Path], object]


def stopped(settings: Settings, folder: Path) -> Path:
    """The tiny run, stopped at step 7."""
    assert train_until(7, *settings(), folder) == "interrupted"
    return folder


def cut(name: str, size: int = 0) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def cut_line(folder: Path) -> None:
    """The first three records, and half of the fourth."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda folder: (folder / "metrics.jsonl").unlink(), "7 steps (1 to 7)"),
        (cut("metrics.jsonl"), "7 steps (1 to 7)"),
        (cut_line, "4 steps (4 to 7)"),
    ],
    ids=["deleted", "emptied", "cut"],
)
def test_lost_records_are_told_and_written_down(
    damage: Damage, lost: str, settings: Settings, tmp_path: Path, qklab: Command, tiny_run: Path
) -> None:
    folder = stopped(settings, tmp_path / "run")
    damage(folder)
    code, _, err = qklab("train", "--out", folder, "--quiet", "--execution.device", "cpu")
    assert code == 0
    assert f"metrics.jsonl was deleted or cut: its records of {lost} are lost" in err
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)  # no half line stays
    (record,) = RunDirectory(folder).metrics("lost")
    assert f"{record['steps']} steps ({record['first']} to {record['last']})" == lost
    found, whole = comparable(folder), comparable(tiny_run)
    assert {key: found[key] for key in ("files", "evaluation")} == {key: whole[key] for key in ("files", "evaluation")}


@pytest.mark.parametrize("damage", [lambda folder: (folder / "tokenizer.json").unlink(), cut("tokenizer.json", 9)])
@pytest.mark.parametrize("finished", [False, True])
def test_the_tokenizer_is_brought_back(
    damage: Damage, finished: bool, settings: Settings, tiny_run: Path, tmp_path: Path, qklab: Command
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder) if finished else stopped(settings, folder)
    damage(folder)
    code, _, err = qklab("train", "--out", folder, "--quiet", "--execution.device", "cpu")
    assert code == 0
    assert "tokenizer.json was missing or damaged; it is brought back from" in err
    assert qklab("sample", folder, "Lic", "--tokens", 2)[0] == 0


def test_a_summary_that_was_cut_is_made_again(
    tiny_run: Path, tmp_path: Path, settings: Settings, qklab: Command
) -> None:
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    cut("summary.json", 50)(folder)
    code, _, err = qklab("train", "--out", folder, "--quiet", "--execution.device", "cpu")
    assert code == 0
    assert "summary.json cannot be read" in err
    assert "summary written anew" in err
    assert comparable(folder) == comparable(tiny_run)
    assert train(settings()[0], folder, settings()[1]).summary == RunDirectory(folder).summary()


def test_a_damaged_checkpoint_is_told_where_all_else_is_quiet(
    settings: Settings, tmp_path: Path, qklab: Command, tiny_run: Path
) -> None:
    folder = stopped(settings, tmp_path / "run")
    newest = max(folder.glob("checkpoints/step-*"))
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, _, err = qklab("train", "--out", folder, "--quiet", "--execution.device", "cpu")
    assert code == 0
    assert newest.name in err
    assert comparable(folder) == comparable(tiny_run)
