"""Checkpoints of several ranks: written by 2 or 4, read by 1, 2 or 4, and errors that all ranks share."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_tools import all_bits, newest
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from qklab.runs import files
from qklab.testing.processes import run_on_ranks
from qklab.train.checkpoint import CheckpointError, Checkpoints, Snapshot, saver

SPECIAL = torch.tensor([0x7FC12345, 0x7F812345, -0x80000000, 1, 0x7F800000], dtype=torch.int32).view(torch.float32)


def trained(world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after one step; 7 and 5 rows divide evenly among neither 2 nor 4 ranks, and 1 row leaves ranks empty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1, bias=False), nn.LayerNorm(1))
    model.register_parameter("special", nn.Parameter(SPECIAL.clone()))
    model[0].bfloat16()
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5 + number)
    optimiser.step()
    return model, optimiser


def named(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state[parameter].items():
            tensors[f"optimiser.{key}.{name}"] = value
    return tensors


def whole_bits(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return all_bits({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()})


def save_sharded(folder: Path) -> dict[str, Any]:
    tensors = named(*trained(dist.get_world_size()))
    assert any(isinstance(tensor, DTensor) for tensor in tensors.values())
    checkpoints = Checkpoints(folder, run="mine")
    for step in (1, 2, 3):
        checkpoints.save(Snapshot(step, tensors, {"losses": [0.5] * step}), best=step == 1)
    return whole_bits(tensors)


def load_sharded(folder: Path) -> list[tuple[str, int, dict[str, Any]]]:
    model, optimiser = trained(dist.get_world_size())
    loaded = []
    for writers in ("1", "2", "4"):
        tensors = named(model, optimiser)
        for tensor in tensors.values():
            tensor.zero_()
        found = newest(Checkpoints(folder / writers, run="mine"))
        found.load_into(tensors)
        loaded.append((str(found.path), found.step, whole_bits(named(model, optimiser))))
    return loaded


def one_process(folder: Path) -> dict[str, Any]:
    tensors = named(*trained(1))
    checkpoints = Checkpoints(folder, run="mine")
    checkpoints.save(Snapshot(3, tensors, {}))
    checkpoints.wait()
    return whole_bits(tensors)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The same checkpoint as 1 process, 2 ranks and 4 ranks write it, and what is in it."""
    folder = tmp_path_factory.mktemp("written")
    wanted = one_process(folder / "1")
    for world in (2, 4):
        for came in run_on_ranks(world, save_sharded, folder / str(world)):
            assert came == wanted
    return folder, wanted


@pytest.mark.parametrize("readers", [2, 4])
def test_any_number_of_ranks_reads_what_any_number_wrote(written: tuple[Path, dict[str, Any]], readers: int) -> None:
    folder, wanted = written
    for loaded in run_on_ranks(readers, load_sharded, folder):
        assert loaded == [(str(folder / writers / "step-0000000003"), 3, wanted) for writers in ("1", "2", "4")]


@pytest.mark.parametrize("writers", [2, 4])
def test_one_process_reads_what_several_ranks_wrote(written: tuple[Path, dict[str, Any]], writers: int) -> None:
    folder, wanted = written
    checkpoints = Checkpoints(folder / str(writers), run="mine")
    found, best = newest(checkpoints), checkpoints.find_best()
    assert best is not None
    assert (found.step, best.step, found.state) == (3, 1, {"losses": [0.5] * 3, "step": 3})
    assert all_bits(found.read_tensors()) == wanted
    tensors = named(*trained(1))
    for tensor in tensors.values():
        tensor.zero_()
    found.load_into(tensors)
    assert whole_bits(tensors) == wanted
    files = [f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, writers + 1)]
    assert sorted(os.listdir(found.path)) == ["manifest.json", *files]


@pytest.mark.parametrize("damage", ["lost", "swapped", "flipped"])
def test_damage_to_a_part_is_noticed(written: tuple[Path, dict[str, Any]], tmp_path: Path, damage: str) -> None:
    folder, wanted = written
    run = tmp_path / "run"
    shutil.copytree(folder / "2", run)
    first, second = sorted((run / "step-0000000003").glob("*.safetensors"))
    if damage == "lost":
        second.unlink()
    elif damage == "swapped":
        first.rename(run / "aside")
        second.rename(first)
        (run / "aside").rename(second)
    else:
        content = bytearray(second.read_bytes())
        content[-1] ^= 1
        second.write_bytes(content)
    said: list[str] = []
    found = newest(Checkpoints(run, run="mine", say=said.append))
    assert found.step == 2
    assert all_bits(found.read_tensors()) == wanted
    assert "step-0000000003 cannot be trusted: shard-0000" in said[0]


def every_way(world: int) -> dict[str, Tensor]:
    """Tensors spread in all ways over `world` = 4 ranks, or not at all."""
    numbers = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(6, 10, 3, generator=numbers) for name in ("model.a", "model.b", "model.c", "model.d")}
    tensors |= {"model.none": torch.empty(0, 3), "model.mask": torch.tensor([True, False, True])}
    plain = {"model.plain": torch.randn(3, generator=numbers), "optimiser.step": torch.tensor(7)}
    if world == 1:
        return tensors | plain
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    ways = [(line, [Shard(1)]), (line, [Replicate()]), (grid, [Replicate(), Shard(0)]), (grid, [Shard(1), Shard(0)])]
    ways += [(line, [Shard(0)])] * 2
    spread = {n: distribute_tensor(t, mesh, how) for (n, t), (mesh, how) in zip(tensors.items(), ways, strict=True)}
    return spread | plain


def save_every_way(folder: Path) -> dict[str, Any]:
    tensors = every_way(4)
    checkpoints = Checkpoints(folder)
    checkpoints.save(Snapshot(1, tensors, {}))
    found = newest(checkpoints)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    found.load_into(targets)
    return whole_bits(targets)


def test_every_way_of_spreading(tmp_path: Path) -> None:
    wanted = all_bits(every_way(1))
    assert run_on_ranks(4, save_every_way, tmp_path / "run") == [wanted] * 4
    found = newest(Checkpoints(tmp_path / "run"))
    assert all_bits(found.read_tensors()) == wanted
    written = sum(os.path.getsize(path) for path in found.path.glob("*.safetensors"))
    assert written < sum(len(content) for _, _, content in wanted.values()) + 4 * 2500  # replicas are written once


def refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return "nothing was refused"


def limited(act: Callable[[], Any], rank: int) -> Any:
    """act() where files of `rank` may not grow beyond 4 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    result = act()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return result


def sharing_errors(folder: Path) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    spread: dict[str, Tensor] = {"model.w": distribute_tensor(torch.arange(4000.0), mesh, [Shard(0)])}
    whole = {"model.w": torch.arange(4000.0) + dist.get_rank()}
    told: list[Any] = []

    checkpoints = Checkpoints(folder / "sharded")
    checkpoints.save(Snapshot(1, spread, {}))
    told += [limited(lambda: refused(lambda: checkpoints.save(Snapshot(2, spread, {}))), rank) for rank in (0, 1)]
    found = checkpoints.find_newest()
    told.append(found and found.step)

    checkpoints = Checkpoints(folder / "replicated")
    checkpoints.save(Snapshot(1, whole, {}))
    checkpoints.wait()
    limited(lambda: (checkpoints.save(Snapshot(2, whole, {})), checkpoints.thread and checkpoints.thread.join()), 0)
    told.append(refused(lambda: checkpoints.save(Snapshot(3, whole, {}))))
    found = checkpoints.find_newest()
    told.append(found and (found.step, found.read_tensors()["model.w"][0].item()))

    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "replicated" / "step-0000000001" / "model.safetensors").unlink()
    told.append(refused(checkpoints.find_newest))
    told.append(refused(checkpoints.find_best))

    def elsewhere(path: Path) -> str:
        digest = plain(path)
        if dist.get_rank() == 1:
            path.unlink()
        return digest

    plain = files.hash_file
    setattr(saver, "hash_file", elsewhere)  # noqa: B010
    told.append(refused(lambda: Checkpoints(folder / "not shared").save(Snapshot(1, spread, {}))))
    setattr(saver, "hash_file", plain)  # noqa: B010

    said: list[str] = []
    checkpoints = Checkpoints(folder / "sharded", say=said.append)
    checkpoints.save(Snapshot(2, spread, {}))
    if dist.get_rank() == 0:
        (folder / "sharded" / "step-0000000002" / "manifest.json").unlink()
    found = checkpoints.find_newest()
    told.append(found and found.step)
    told.append([len(said)] if dist.get_rank() == 0 else [1 + len(said)])
    return told


def test_all_ranks_raise_what_one_suffers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first, second = run_on_ranks(2, sharing_errors, folder)
    assert first == second
    resume = "File too large; raise the limit on the size of files and resume, the checkpoints before it are untouched."
    sharded = f"the checkpoint of step 2 could not be written to {folder / 'sharded'}: {resume}"
    assert first[:3] == [sharded, sharded, 1]
    assert first[3:5] == [f"the checkpoint of step 2 could not be written to {folder / 'replicated'}: {resume}", (1, 0)]
    assert "can be trusted (step-0000000001: model.safetensors is missing)" in first[5]
    assert first[6] == "nothing was refused"
    assert "shard-00002-model-00001-of-00001.safetensors was written to" in first[7]
    assert "by another rank but rank 0 does not see it there" in first[7]
    assert first[8:] == [1, [1]]  # only rank 0 looks and speaks
    assert sorted(os.listdir(folder / "sharded")) == ["step-0000000001", "step-0000000002"]
    assert os.listdir(folder / "not shared") == []
