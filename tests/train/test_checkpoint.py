"""Checkpoints in one process: what comes back, what is kept, and what is refused."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import all_bits, bits, folder_of, make_tensors, names, newest, save_steps
from safetensors.torch import load_file
from torch import Tensor

from qklab.runs import files
from qklab.testing.processes import finish_process, start_process
from qklab.train.checkpoint import Checkpoint, CheckpointError, Checkpoints, Snapshot, store

PAYLOADS = torch.tensor([0x7FC12345, 0x7F812345, -0x80000000, -0x3EDCBB, 0x00000001, 0x7F800000], dtype=torch.int32)


def all_kinds() -> dict[str, Tensor]:
    """Dtypes, layouts, views of the same memory, NaNs with payloads."""
    numbers = torch.Generator().manual_seed(1)
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
        "optimiser.exp_avg.weight": torch.randn(7, 5, generator=numbers, dtype=torch.float64),
        "optimiser.rate": torch.tensor(-0.0),
        "loader.position": torch.tensor([3, 2**62]),
        "loader.bytes": torch.arange(5, dtype=torch.uint8),
    }


def test_every_bit_comes_back_and_others_can_read_the_files(tmp_path: Path) -> None:
    state = {"step": 3, "schedule": {"peak": 1e-3}, "text": "−0 \u2028 é", "loss": [0.1, 1e308], "none": None}
    checkpoints, wanted = Checkpoints(tmp_path / "run" / "checkpoints"), all_bits(all_kinds())
    checkpoints.save(Snapshot(3, all_kinds(), state))
    found = newest(checkpoints)
    assert (found.step, found.path, found.state) == (3, tmp_path / "run/checkpoints/step-0000000003", state)
    assert all_bits(found.read_tensors()) == wanted
    loader = {name: value for name, value in wanted.items() if name.startswith("loader.")}
    assert all_bits(found.read_tensors("loader.")) == loader
    assert names(found.path) == [
        *("loader.safetensors", "manifest.json", "model.safetensors", "optimiser.safetensors"),
    ]
    came = {name: tensor for path in found.path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert all_bits(came) == wanted
    assert json.loads((found.path / "manifest.json").read_text())["tensors"]["model.weight"] == "float32 [7, 5]"


def test_views_and_parameters_are_filled_in_place(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Snapshot(1, all_kinds(), {}))
    targets = {name: torch.zeros_like(tensor) for name, tensor in all_kinds().items()}
    parameter, buffer = torch.nn.Parameter(torch.zeros(7, 5)), torch.zeros(9, 2, dtype=torch.bfloat16)
    targets |= {"model.weight": parameter, "model.half": buffer[:, 1]}
    newest(checkpoints).load_into(targets)
    assert all_bits(targets) == all_bits(all_kinds())
    assert bits(parameter) == bits(all_kinds()["model.weight"])
    assert not buffer[:, 0].any()


def test_tensors_may_change_once_save_returns(tmp_path: Path) -> None:
    checkpoints, weights, state = Checkpoints(tmp_path, keep=9), torch.zeros(200_000), {"losses": [0.0]}
    for step in range(4):
        checkpoints.save(Snapshot(step, {"model.w": weights}, state))
        weights += 1
        state["losses"].append(0.0)
    checkpoints.wait()
    for step in range(4):
        found = store.verify_checkpoint(folder_of(tmp_path, step), None)
        assert torch.equal(found.read_tensors()["model.w"], torch.full((200_000,), float(step)))
        assert len(found.state["losses"]) == step + 1


def test_tensors_may_change_their_shape_between_saves(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step, tensor in enumerate([torch.ones(3), torch.ones(2, 3), torch.ones(2, 3).bfloat16(), torch.ones(3)]):
        tensors = {"model.w": tensor} | ({"model.new": tensor} if step == 1 else {})
        checkpoints.save(Snapshot(step, tensors, {}))
        assert all_bits(newest(checkpoints).read_tensors()) == all_bits(tensors)


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
    checkpoints = save_steps(tmp_path, *steps, best=best, keep=keep)
    pointer = [] if best < 0 else ["best.json"]
    assert names(tmp_path) == pointer + sorted(f"step-{step:010d}" for step in left)
    found = checkpoints.find_best()
    assert (found.step if found else -1) == best
    assert newest(checkpoints).step == max(left)
    if best >= 0:
        assert json.loads((tmp_path / "best.json").read_text()) == {"step": best, "validation_loss": 1 / (1 + best)}


def test_only_the_latest_best_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in range(6):
        checkpoints.save(Snapshot(step, {"model.w": torch.zeros(1)}, {}), best=step in (1, 3))
    checkpoints.wait()
    assert names(tmp_path) == ["best.json", "step-0000000003", "step-0000000005"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = save_steps(tmp_path, 1, 2)
    checkpoints.save(Snapshot(2, make_tensors(2, change=1), {}), best=True)
    assert all_bits(newest(checkpoints).read_tensors()) == all_bits(make_tensors(2, change=1))
    assert names(tmp_path) == ["best.json", "step-0000000001", "step-0000000002"]


def test_the_one_being_replaced_is_found_where_its_successor_is_missing_or_damaged(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    folder_of(tmp_path, 2).rename(tmp_path / ".replaced-step-0000000002")
    said: list[str] = []
    assert newest(Checkpoints(tmp_path, say=said.append)).step == 2
    assert said == []
    folder_of(tmp_path, 2).mkdir()
    checkpoints = Checkpoints(tmp_path, say=said.append)
    assert all_bits(newest(checkpoints).read_tensors()) == all_bits(make_tensors(2))
    assert "manifest.json is missing; the one before it, .replaced-step-0000000002, is used." in said[0]
    checkpoints.save(Snapshot(2, make_tensors(2), {}))
    checkpoints.wait()
    assert names(tmp_path) == ["damaged-step-0000000002", "step-0000000001", "step-0000000002"]


def test_an_empty_or_missing_folder_has_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert Checkpoints(folder).find_newest() is None
        assert Checkpoints(folder).find_best() is None
    assert not (tmp_path / "missing").exists()


def test_reading_changes_nothing_and_writing_sets_the_damaged_aside(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, keep=3)
    said: list[str] = []
    for again in (1, 2):  # a second damage of a step does not overwrite the first
        (folder_of(tmp_path, 3) / "manifest.json").write_text("{}")
        (tmp_path / ".tmp-step-0000000004").mkdir()
        (tmp_path / ".tmp-step-0000000004" / "model.safetensors").write_bytes(b"half")
        (tmp_path / ".best.json.1.tmp").write_text("")
        before = names(tmp_path)
        checkpoints = Checkpoints(tmp_path, keep=2, say=said.append)
        assert newest(checkpoints).step == 2
        assert names(tmp_path) == before
        checkpoints.save(Snapshot(3, make_tensors(3), {}))
        checkpoints.wait()
        damaged = ["damaged-step-0000000003", "damaged-step-0000000003-2"][:again]
        assert names(tmp_path) == [*damaged, "step-0000000002", "step-0000000003"]
        assert len(said) == again


def test_a_damaged_one_is_not_counted_among_those_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (folder_of(tmp_path, 2) / "manifest.json").write_text("")
    save_steps(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-0000000001", "step-0000000002", "step-0000000003"]


def test_where_none_can_be_trusted_all_reasons_are_given(tmp_path: Path) -> None:
    checkpoints = save_steps(tmp_path, 1, 2, best=2)
    (folder_of(tmp_path, 1) / "model.safetensors").unlink()
    (folder_of(tmp_path, 2) / "manifest.json").unlink()
    missing = r"can be trusted \(step-0000000002: manifest.json is missing"
    with pytest.raises(CheckpointError, match=f"no checkpoint in .* {missing}; .*01: model.safetensors is missing"):
        checkpoints.find_newest()
    with pytest.raises(CheckpointError, match=f"no best checkpoint in .* {missing}"):
        checkpoints.find_best()


def test_a_damaged_best_falls_back_on_one_that_was_best_before(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, say=said.append)
    for step in (1, 2):
        checkpoints.save(Snapshot(step, make_tensors(step), {}), best=True)
    checkpoints.wait()
    (folder_of(tmp_path, 2) / "model.safetensors").unlink()
    found = checkpoints.find_best()
    assert found is not None
    assert found.step == 1
    assert "model.safetensors is missing; the one before it, step-0000000001, is used" in said[0]


def test_a_run_that_goes_on_may_prune_what_another_process_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, verify = save_steps(tmp_path, 1, keep=1), store.verify_checkpoint

    def verify_late(path: Path, run: str | None) -> Checkpoint:
        if path.name == "step-0000000001":
            running.save(Snapshot(2, make_tensors(2), {}))
            running.wait()
        return verify(path, run)

    monkeypatch.setattr(store, "verify_checkpoint", verify_late)
    said: list[str] = []
    assert newest(Checkpoints(tmp_path, say=said.append)).step == 2
    assert said == []


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, run="other")
    with pytest.raises(CheckpointError, match="it belongs to run 'other' and this is run 'mine'"):
        Checkpoints(tmp_path, run="mine").find_newest()
    assert newest(Checkpoints(tmp_path)).step == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm"), r"model.norm is bfloat16 \[300\] in the checkpoint and absent in the run"),
        (lambda t: t.update({"model.more": torch.ones(1)}), r"is absent in the checkpoint and float32 \[1\]"),
        (
            lambda t: t.update({"model.norm": torch.ones(300)}),
            r"bfloat16 \[300\] in the checkpoint and float32",
        ),
        (lambda t: t.update({"optimiser.step": torch.ones(1).long()}), r"int64 \[\] in the checkpoint and int64 \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    found = newest(save_steps(tmp_path, 1))
    targets = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(1).items()}
    change(targets)
    before = all_bits(targets)
    with pytest.raises(CheckpointError, match=message):
        found.load_into(targets)
    assert all_bits(targets) == before


def test_a_checkpoint_gone_after_it_was_found_is_an_error(tmp_path: Path) -> None:
    found = newest(save_steps(tmp_path, 1))
    (found.path / "optimiser.safetensors").unlink()
    with pytest.raises(CheckpointError, match="passed verification but cannot be read now"):
        found.read_tensors()


@pytest.mark.parametrize(
    ("step", "named", "state", "message"),
    [
        (-1, {}, {}, "whole number ≥ 0, but -1 came"),
        (True, {}, {}, "whole number ≥ 0, but True came"),
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
    with pytest.raises(CheckpointError, match="at least 1 checkpoint must be kept, but keep=0 came"):
        Checkpoints(tmp_path, keep=0)


def test_all_is_flushed_before_it_counts_and_its_name_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    flush, rename = os.fsync, os.rename

    def record_flush(handle: int) -> None:
        events.append(os.fstat(handle).st_ino)
        flush(handle)

    def record_rename(path: Path, target: Path) -> None:
        events.append(target.name)
        rename(path, target)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(os, "rename", record_rename)
    save_steps(tmp_path, 1)
    folder = folder_of(tmp_path, 1)
    counts = events.index(folder.name)
    assert {path.stat().st_ino for path in [folder, *folder.iterdir()]} <= set(events[:counts])
    assert tmp_path.stat().st_ino in events[counts:]


def test_an_unexpected_failure_of_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no more")

    checkpoints = save_steps(tmp_path, 1)
    monkeypatch.setattr(store, "write_tensors", fail)
    checkpoints.save(Snapshot(2, make_tensors(2), {}))
    with pytest.raises(MemoryError, match="no more"):
        checkpoints.save(Snapshot(3, make_tensors(3), {}))
    monkeypatch.undo()
    checkpoints.save(Snapshot(4, make_tensors(4), {}))
    checkpoints.wait()
    assert names(tmp_path) == ["step-0000000001", "step-0000000004"]


def save_slowly_and_end(folder: Path) -> None:
    write = files.write_tensors

    def write_late(*given: Any) -> None:
        time.sleep(0.3)
        write(*given)

    setattr(store, "write_tensors", write_late)  # noqa: B010
    Checkpoints(folder).save(Snapshot(1, make_tensors(1), {}))


def test_a_program_that_just_ends_ends_with_its_checkpoint(tmp_path: Path) -> None:
    assert finish_process(start_process(save_slowly_and_end, tmp_path)) == 0
    assert all_bits(newest(Checkpoints(tmp_path)).read_tensors()) == all_bits(make_tensors(1))
