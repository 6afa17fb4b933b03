"""Checkpoints in one process: what comes back, what is kept, and what is refused."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qklab.testing.processes import finish_process, start_process
from qklab.train.checkpoint import CheckpointError, Checkpoints, Snapshot, store

PAYLOADS = torch.tensor([0x7FC12345, 0x7F812345, -0x80000000, -0x3EDCBB, 0x00000001, 0x7F800000], dtype=torch.int32)


def tensors(step: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    weight = torch.randn(7, 5, generator=numbers)
    return {
        "model.weight": weight,
        "model.half": torch.randn(9, generator=numbers).bfloat16(),
        "model.float16": torch.randn(3, generator=numbers).half(),
        "model.transposed": torch.randn(4, 6, generator=numbers).t(),
        "model.strided": torch.randn(12, generator=numbers)[::3],
        "model.nothing": torch.empty(0, 3),
        "model.payloads": PAYLOADS.view(torch.float32),
        "model.half_payloads": torch.tensor([0x7FC1, -0x8000, 0x7F81], dtype=torch.int16).view(torch.bfloat16),
        "model.mask": torch.tensor([True, False, True]),
        "model.one": weight[:3],
        "model.tied": weight[:3],
        "optimiser.step.weight": torch.tensor(step),
        "optimiser.exp_avg.weight": torch.randn(7, 5, generator=numbers, dtype=torch.float64),
        "optimiser.rate": torch.tensor(-0.0),
        "loader.position": torch.tensor([step, 2**62]),
        "loader.bytes": torch.arange(5, dtype=torch.uint8),
    }


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(came: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert {name: bits(tensor) for name, tensor in came.items()} == {n: bits(t) for n, t in wanted.items()}


def saved(folder: Path, *steps: int, best: int = -1, **settings: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder, **settings)
    for step in steps:
        checkpoints.save(Snapshot(step, tensors(step), {"validation_loss": 1 / (1 + step)}), best=step == best)
    checkpoints.wait()
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_every_bit_comes_back(tmp_path: Path) -> None:
    state = {"step": 3, "schedule": {"peak": 1e-3}, "text": "−0 \u2028 é", "loss": [0.1, 1e308], "none": None}
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    checkpoints.save(Snapshot(3, tensors(3), state))
    found = checkpoints.find_newest()
    assert found is not None
    assert (found.step, found.path, found.state) == (3, tmp_path / "run/checkpoints/step-0000000003", state)
    assert_same(found.read_tensors(), tensors(3))
    assert_same(found.read_tensors("loader."), {n: t for n, t in tensors(3).items() if n.startswith("loader.")})
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors(3).items()}
    kept = dict(targets)
    found.load_into(targets)
    assert_same(kept, tensors(3))


def test_views_and_parameters_are_filled_in_place(tmp_path: Path) -> None:
    found = saved(tmp_path, 1).find_newest()
    assert found is not None
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors(1).items()}
    parameter = torch.nn.Parameter(torch.zeros(7, 5))
    buffer = torch.zeros(9, 2, dtype=torch.bfloat16)
    found.load_into(targets | {"model.weight": parameter, "model.half": buffer[:, 1]})
    assert bits(parameter.detach()) == bits(tensors(1)["model.weight"])
    assert bits(buffer[:, 1]) == bits(tensors(1)["model.half"])
    assert not buffer[:, 0].any()


def test_others_can_read_the_files(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    folder = tmp_path / "step-0000000007"
    files = ["loader.safetensors", "manifest.json", "model.safetensors", "optimiser.safetensors"]
    assert names(folder) == files
    came = {
        name: tensor for file in files if file != "manifest.json" for name, tensor in load_file(folder / file).items()
    }
    assert_same(came, tensors(7))
    assert json.loads((folder / "manifest.json").read_text())["tensors"]["model.weight"] == "float32 [7, 5]"


def test_tensors_may_change_once_save_returns(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    weights = torch.zeros(200_000)
    state = {"losses": [0.0]}
    for step in range(5):
        checkpoints.save(Snapshot(step, {"model.w": weights}, state))
        weights += 1
        state["losses"].append(0.0)
    checkpoints.wait()
    for step in range(5):
        found = store.verify_checkpoint(tmp_path / f"step-{step:010d}", None)
        assert torch.equal(found.read_tensors()["model.w"], torch.full((200_000,), float(step)))
        assert len(found.state["losses"]) == step + 1


def test_tensors_may_change_their_shape_between_saves(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    shapes = [torch.ones(3), torch.ones(2, 3), torch.ones(2, 3).bfloat16(), torch.ones(3)]
    for step, tensor in enumerate(shapes):
        checkpoints.save(Snapshot(step, {"model.w": tensor} | ({"model.new": tensor} if step == 1 else {}), {}))
        found = checkpoints.find_newest()
        assert found is not None
        assert bits(found.read_tensors()["model.w"]) == bits(tensor)
        assert ("model.new" in found.shapes) == (step == 1)


@pytest.mark.parametrize(
    ("steps", "best", "keep", "left"),
    [
        ((1, 2, 3, 4), -1, 2, (3, 4)),
        ((1, 2, 3, 4), 1, 2, (1, 3, 4)),
        ((1, 2, 3, 4), 4, 2, (3, 4)),
        ((1, 2, 3), 2, 1, (2, 3)),
        ((1, 2, 3), -1, 5, (1, 2, 3)),
        ((9_999_999_999, 10_000_000_000), -1, 1, (10_000_000_000,)),
        ((5, 6, 2), -1, 2, (2, 5, 6)),  # the one just saved always stays
    ],
)
def test_the_last_and_the_best_are_kept(
    tmp_path: Path, steps: tuple[int, ...], best: int, keep: int, left: tuple[int, ...]
) -> None:
    checkpoints = saved(tmp_path, *steps, best=best, keep=keep)
    pointer = [] if best < 0 else ["best.json"]
    assert names(tmp_path) == pointer + sorted(f"step-{step:010d}" for step in left)
    found, newest = checkpoints.find_best(), checkpoints.find_newest()
    assert (found.step if found else -1) == best
    assert newest is not None
    assert newest.step == max(left)
    if best >= 0:
        assert json.loads((tmp_path / "best.json").read_text()) == {"step": best, "validation_loss": 1 / (1 + best)}


def test_only_the_latest_best_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in range(6):
        checkpoints.save(Snapshot(step, {"model.w": torch.zeros(1)}, {}), best=step in (1, 3))
    checkpoints.wait()
    assert names(tmp_path) == ["best.json", "step-0000000003", "step-0000000005"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    changed = tensors(2) | {"model.half": torch.ones(9).bfloat16()}
    checkpoints.save(Snapshot(2, changed, {}), best=True)
    found = checkpoints.find_newest()
    assert found is not None
    assert_same(found.read_tensors(), changed)
    assert names(tmp_path) == ["best.json", "step-0000000001", "step-0000000002"]


def test_the_one_being_replaced_is_found_where_its_successor_is_missing_or_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-0000000002").rename(tmp_path / ".replaced-step-0000000002")
    said: list[str] = []
    found = Checkpoints(tmp_path, say=said.append).find_newest()
    assert found is not None
    assert found.step == 2
    assert said == []
    (tmp_path / "step-0000000002").mkdir()
    checkpoints = Checkpoints(tmp_path, say=said.append)
    found = checkpoints.find_newest()
    assert found is not None
    assert_same(found.read_tensors(), tensors(2))
    assert "manifest.json is missing; the one before it, .replaced-step-0000000002, is used." in said[0]
    checkpoints.save(Snapshot(2, tensors(2), {}))
    checkpoints.wait()
    assert names(tmp_path) == ["damaged-step-0000000002", "step-0000000001", "step-0000000002"]


def test_an_empty_or_missing_folder_has_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert Checkpoints(folder).find_newest() is None
        assert Checkpoints(folder).find_best() is None
    assert not (tmp_path / "missing").exists()


def test_reading_changes_nothing_and_writing_puts_the_damaged_aside(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, keep=3)
    (tmp_path / "step-0000000003" / "manifest.json").write_text("{}")
    (tmp_path / ".tmp-step-0000000004").mkdir()
    (tmp_path / ".tmp-step-0000000004" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-best.json").write_text("")
    before = names(tmp_path)
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=2, say=said.append)
    found = checkpoints.find_newest()
    assert found is not None
    assert found.step == 2
    assert names(tmp_path) == before
    for step in (3, 4):
        checkpoints.save(Snapshot(step, tensors(step), {}))
    checkpoints.wait()
    assert names(tmp_path) == ["damaged-step-0000000003", "step-0000000003", "step-0000000004"]
    assert len(said) == 1


def test_a_second_damage_of_a_step_does_not_overwrite_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        checkpoints = saved(tmp_path, 1, 2)
        (tmp_path / "step-0000000002" / "model.safetensors").unlink()
        checkpoints.say = lambda sentence: None
        checkpoints.find_newest()
        checkpoints.save(Snapshot(2, tensors(2), {}))
        checkpoints.wait()
    left = ["damaged-step-0000000002", "damaged-step-0000000002-2", "step-0000000001", "step-0000000002"]
    assert names(tmp_path) == left


def test_a_damaged_one_is_not_counted_among_those_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-0000000002" / "manifest.json").write_text("")
    saved(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-0000000001", "step-0000000002", "step-0000000003"]


def test_where_none_can_be_trusted_all_reasons_are_given(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2, best=2)
    (tmp_path / "step-0000000001" / "model.safetensors").unlink()
    (tmp_path / "step-0000000002" / "manifest.json").unlink()
    message = "no checkpoint in .* can be trusted .*02: manifest.json is missing; .*01: model.safetensors is missing"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.find_newest()
    with pytest.raises(
        CheckpointError, match=r"no best checkpoint in .* can be trusted .*02: manifest.json is missing"
    ):
        checkpoints.find_best()


def test_a_damaged_best_falls_back_on_one_that_was_best_before(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, say=said.append)
    for step in (1, 2):
        checkpoints.save(Snapshot(step, tensors(step), {}), best=True)
    checkpoints.wait()
    (tmp_path / "step-0000000002" / "model.safetensors").unlink()
    found = checkpoints.find_best()
    assert found is not None
    assert found.step == 1
    assert "model.safetensors is missing; the one before it, step-0000000001, is used" in said[0]


def test_a_run_that_goes_on_may_prune_what_another_process_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = saved(tmp_path, 1, keep=1)
    read = store.verify_checkpoint

    def read_late(path: Path, run: str | None) -> store.Checkpoint:
        if path.name == "step-0000000001":
            running.save(Snapshot(2, tensors(2), {}))
            running.wait()
        return read(path, run)

    monkeypatch.setattr(store, "verify_checkpoint", read_late)
    said: list[str] = []
    found = Checkpoints(tmp_path, say=said.append).find_newest()
    assert found is not None
    assert (found.step, said) == (2, [])


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1, run="other")
    with pytest.raises(CheckpointError, match="it belongs to run 'other' and this is run 'mine'"):
        Checkpoints(tmp_path, run="mine").find_newest()
    assert Checkpoints(tmp_path).find_newest() is not None


Change = Callable[[dict[str, Tensor]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.half"), r"model.half is bfloat16 \[9\] in the checkpoint and absent in the run"),
        (
            lambda t: t.update({"model.more": torch.ones(1)}),
            r"is absent in the checkpoint and float32 \[1\]",
        ),
        (lambda t: t.update({"model.half": torch.ones(9)}), r"bfloat16 \[9\] in the checkpoint and float32 \[9\]"),
        (lambda t: t.update({"model.weight": torch.ones(5, 7)}), r"\[7, 5\] in the checkpoint and float32 \[5, 7\]"),
        (lambda t: t.update({"optimiser.rate": torch.ones(1)}), r"float32 \[\] in the checkpoint and float32 \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path, change: Change, message: str) -> None:
    found = saved(tmp_path, 1).find_newest()
    assert found is not None
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors(1).items()}
    change(targets)
    before = {name: tensor.clone() for name, tensor in targets.items()}
    with pytest.raises(CheckpointError, match=message):
        found.load_into(targets)
    assert_same(targets, before)


def test_a_checkpoint_gone_after_it_was_found_is_an_error(tmp_path: Path) -> None:
    found = saved(tmp_path, 1).find_newest()
    assert found is not None
    (found.path / "optimiser.safetensors").unlink()
    with pytest.raises(CheckpointError, match="passed verification but cannot be read now"):
        found.read_tensors()


@pytest.mark.parametrize(
    ("step", "named", "state", "message"),
    [
        (-1, {}, {}, "whole number ≥ 0, but -1 came"),
        (True, {}, {}, "whole number ≥ 0, but True came"),
        (1.5, {}, {}, "whole number ≥ 0, but 1.5 came"),
        (1, {}, {"step": 2}, "of step 1 came with the state of step 2"),
        (1, {"weight": torch.ones(1)}, {}, "named 'model.…', 'optimiser.…' and so on, but 'weight' came"),
        (1, {"../model.weight": torch.ones(1)}, {}, "and so on, but '../model.weight' came"),
        (1, {}, {"rng": torch.ones(1)}, "cannot be saved: Object of type Tensor is not JSON serializable"),
        (1, {"model.w": torch.ones(1, device="meta")}, {}, "model.w is torch.float32, torch.strided, on meta"),
        (1, {"model.w": torch.ones(1).to_sparse()}, {}, "model.w is torch.float32, torch.sparse_coo"),
        (1, {"model.w": torch.ones(1, dtype=torch.complex128)}, {}, "model.w is torch.complex128"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    tmp_path: Path, step: Any, named: dict[str, Tensor], state: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(tmp_path).save(Snapshot(step, named, state))
    assert names(tmp_path) == []


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least 1 checkpoint must be kept, but keep=0 came"):
        Checkpoints(tmp_path, keep=0)


def test_all_is_flushed_before_it_counts_and_its_name_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    flush, rename = os.fsync, os.rename

    def flushing(handle: int) -> None:
        events.append(os.fstat(handle).st_ino)
        flush(handle)

    def renaming(path: Path, target: Path) -> None:
        events.append(target.name)
        rename(path, target)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(os, "rename", renaming)
    saved(tmp_path, 1)
    folder = tmp_path / "step-0000000001"
    counts = events.index(folder.name)
    assert {path.stat().st_ino for path in [folder, *folder.iterdir()]} <= set(events[:counts])
    assert tmp_path.stat().st_ino in events[counts:]


def test_an_unexpected_failure_of_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no more")

    checkpoints = saved(tmp_path, 1)
    monkeypatch.setattr(store, "write_tensors", broken)
    checkpoints.save(Snapshot(2, tensors(2), {}))
    with pytest.raises(MemoryError, match="no more"):
        checkpoints.save(Snapshot(3, tensors(3), {}))
    monkeypatch.undo()
    checkpoints.save(Snapshot(4, tensors(4), {}))
    checkpoints.wait()
    assert names(tmp_path) == ["step-0000000001", "step-0000000004"]


def save_slowly_and_end(folder: Path) -> None:
    write = store.write_tensors

    def slow(*given: Any) -> None:
        time.sleep(0.3)
        write(*given)

    store.write_tensors = slow
    Checkpoints(folder).save(Snapshot(1, {"model.w": torch.arange(9)}, {}))


def test_a_program_that_just_ends_ends_with_its_checkpoint(tmp_path: Path) -> None:
    assert finish_process(start_process(save_slowly_and_end, tmp_path)) == 0
    found = Checkpoints(tmp_path).find_newest()
    assert found is not None
    assert torch.equal(found.read_tensors()["model.w"], torch.arange(9))
