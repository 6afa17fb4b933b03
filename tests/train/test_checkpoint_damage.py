"""Hundreds of random damages: each is noticed, the newest checkpoint without one is used, and the user is told."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import all_bits, folder_of, make_tensors, newest, save_steps
from safetensors.torch import load_file, save_file
from torch import Tensor

from qklab.train.checkpoint import CheckpointError, Checkpoints, store

STEPS: list[int] = [100, 200, 300]
FILES = ("manifest.json", "model.safetensors", "optimiser.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for run in ("mine", "other"):
        save_steps(folder / run, *STEPS, keep=3, run=run)
    return folder


def flip_bit(content: bytearray, dice: random.Random) -> None:
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def truncate(content: bytearray, dice: random.Random) -> None:
    del content[dice.choice([-1, dice.randrange(len(content))]) :]


def empty(content: bytearray, dice: random.Random) -> None:
    content.clear()


def overwrite_all(content: bytearray, dice: random.Random) -> None:
    content[:] = dice.randbytes(len(content))


def add_a_space(content: bytearray, dice: random.Random) -> None:
    place = dice.choice([place for place, byte in enumerate(content) if byte in b' \n":,'] or [0])
    content[place:place] = dice.choice([b" ", b"\n", b"\t"])


CONTENTS: list[Callable[[bytearray, random.Random], None]] = [
    *[flip_bit] * 3,
    *(truncate, empty, overwrite_all, add_a_space),
]
Damage = Callable[[Path, Path, random.Random], set[int]]  # (run, other run, dice) → the damaged steps


def change_contents(run: Path, other: Path, dice: random.Random) -> set[int]:
    damaged = set(STEPS[dice.choice([1, 2, 2, 2]) :])
    for step in damaged:
        path = folder_of(run, step) / dice.choice(FILES)
        before = path.read_bytes()
        content = bytearray(before)
        dice.choice(CONTENTS)(content, dice)
        path.write_bytes(content)
    return damaged


def remove_files(run: Path, other: Path, dice: random.Random) -> set[int]:
    for file in dice.sample(FILES, dice.choice([1, len(FILES)])):
        (folder_of(run, 300) / file).unlink()
    return {300}


def rename_file(run: Path, other: Path, dice: random.Random) -> set[int]:
    path = folder_of(run, 300) / dice.choice(FILES)
    path.rename(path.with_name(dice.choice(["lost.safetensors", f"{path.name}.bak", path.name.upper()])))
    return {300}


def file_becomes_folder_or_dead_link(run: Path, other: Path, dice: random.Random) -> set[int]:
    path = folder_of(run, 300) / dice.choice(FILES)
    path.unlink()
    path.mkdir() if dice.random() < 0.5 else path.symlink_to("nowhere")
    return {300}


def add_stray_tensors(run: Path, other: Path, dice: random.Random) -> set[int]:
    shutil.copy(folder_of(other, 300) / "model.safetensors", folder_of(run, 300) / "shard-00002.safetensors")
    return {300}


def swap(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def swap_within(run: Path, other: Path, dice: random.Random) -> set[int]:
    first, second = dice.sample(FILES, 2)
    swap(folder_of(run, 300) / first, folder_of(run, 300) / second)
    return {300}


def swap_between_checkpoints(run: Path, other: Path, dice: random.Random) -> set[int]:
    for file in dice.sample(["", *FILES], 1):  # or the whole folder
        swap(folder_of(run, 300) / file, folder_of(run, 200) / file)
    return {200, 300}


def take_file_of_other_run(run: Path, other: Path, dice: random.Random) -> set[int]:
    for file in dice.sample(FILES, dice.randint(1, 2)):
        step = 300 if file == "manifest.json" else dice.choice(STEPS[:2])
        shutil.copy(folder_of(other, step) / file, folder_of(run, 300) / file)
    return {300}


def take_another_checkpoint(run: Path, other: Path, dice: random.Random) -> set[int]:
    shutil.rmtree(folder_of(run, 300))
    taken = dice.choice([folder_of(other, 300), *(folder_of(run, step) for step in STEPS[:2])])
    shutil.copytree(taken, folder_of(run, 300))
    return {300}


def rename_folder(run: Path, other: Path, dice: random.Random) -> set[int]:
    step = dice.choice([0, 50, 150, 250, 301, 10**10])
    folder_of(run, 300).rename(folder_of(run, step))
    return {step}


def folder_becomes_file(run: Path, other: Path, dice: random.Random) -> set[int]:
    shutil.rmtree(folder_of(run, 300))
    folder_of(run, 300).write_bytes(b"")
    return {300}


DAMAGES: list[Damage] = [
    *[change_contents] * 10,
    *(remove_files, rename_file, file_becomes_folder_or_dead_link, add_stray_tensors, swap_within),
    *(swap_between_checkpoints, take_file_of_other_run, take_another_checkpoint, rename_folder, folder_becomes_file),
]


def test_every_damage_is_noticed_and_told(runs: Path, tmp_path: Path) -> None:
    wanted = {step: all_bits(make_tensors(step)) for step in STEPS}
    for seed in range(250):
        dice, run = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(runs / "mine", run)
        damage = DAMAGES[seed % len(DAMAGES)]
        damaged = damage(run, runs / "other", dice)
        context = f"{damage.__name__}, seed {seed}"
        intact = [step for step in STEPS if step not in damaged and folder_of(run, step).exists()]
        said: list[str] = []
        found = newest(Checkpoints(run, run="mine", say=said.append))
        assert found.step == intact[-1], context
        assert all_bits(found.read_tensors()) == wanted[found.step], context
        assert len(said) == len(damaged), (context, said)
        for step, sentence in zip(sorted(damaged, reverse=True), said, strict=True):
            assert sentence.startswith(f"checkpoint {folder_of(run, step)} cannot be trusted: "), context
            before = f"the one before it, {found.path.name}, is used."
            assert sentence.endswith(before if step > found.step else "it is not needed."), context
        shutil.rmtree(run)


@pytest.fixture
def folder(runs: Path, tmp_path: Path) -> Path:
    """A copy of the newest checkpoint."""
    return shutil.copytree(folder_of(runs / "mine", 300), folder_of(tmp_path, 300))


def sign(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and give it the right hash again, as no accident would."""
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["sha256"]
    change(body)
    (folder / "manifest.json").write_bytes(store.format_manifest(body))


def sign_model(folder: Path) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    sign(folder, lambda body: body["files"].update({"model.safetensors": digest}))


def change_model(folder: Path, content: dict[str, Tensor]) -> None:
    save_file(load_file(folder / "model.safetensors") | content, folder / "model.safetensors")
    sign_model(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: body.update(format=1), "it is of format 1 and this version reads format 2"),
        (lambda body: body.update(step=301), "its manifest is that of step 301"),
        (lambda body: body.update(run="other"), "it belongs to run 'other' and this is run 'mine'"),
        (lambda body: body["files"].pop("model.safetensors"), "model.safetensors is not in its manifest"),
        (lambda body: body["files"].update({"../x": ""}), "../x is missing"),
    ],
)
def test_a_manifest_is_held_against_the_folder(
    folder: Path, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    sign(folder, change)
    with pytest.raises(CheckpointError) as caught:
        store.verify_checkpoint(folder, "mine")
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: sign(folder, lambda body: body["tensors"].update({"model.norm": "bfloat16 [301]"})),
        lambda folder: sign(folder, lambda body: body["tensors"].update({"model.norm": "float32 [300]"})),
        lambda folder: change_model(folder, {"model.norm": torch.ones(299).bfloat16()}),
    ],
)
def test_tensors_are_held_against_the_manifest_when_they_are_read(folder: Path, change: Callable[[Path], None]) -> None:
    change(folder)
    with pytest.raises(CheckpointError, match=r"does not hold all of model\.norm"):
        store.verify_checkpoint(folder, "mine").read_tensors()


def test_a_file_that_is_no_safetensors_is_noticed_even_with_the_right_hash(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    sign_model(folder)
    with pytest.raises(CheckpointError, match="passed verification but cannot be read now"):
        store.verify_checkpoint(folder, "mine").read_tensors()


def test_files_that_hold_no_tensors_do_no_harm(folder: Path) -> None:
    (folder / ".DS_Store").write_bytes(b"x")
    assert store.verify_checkpoint(folder, "mine").step == 300
