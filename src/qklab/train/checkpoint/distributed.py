"""Tensors spread over ranks: saved and loaded by torch.distributed.checkpoint as safetensors, one file per rank.

The file of a rank holds its part of each tensor and, in its header, where that part lies in the whole. Replicated
tensors are written by one rank only. Only safetensors are written and read: torch's own format for this is a pickle.
torch's modules for it take longer to import than the rest of training; they are imported where tensors are sharded.
"""

import json
from pathlib import Path

import torch.distributed as dist
from torch import Tensor


def save_shards(folder: Path, tensors: dict[str, Tensor]) -> list[Path]:
    """Every rank writes its part into `folder`, flushed to the disk, and gets its own files; all ranks call this
    together. What the disk refuses this rank is raised on this rank, once all ranks are done."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    class PartWriter(HuggingFaceStorageWriter):
        """Keeps the disk's refusal to itself: torch 2.11 cannot send it to the other ranks from Python 3.13 on."""

        refusal: OSError | None = None

        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
            try:
                return super().write_data(plan, planner)
            except OSError as error:
                self.refusal = error
                nothing: Future[list[WriteResult]] = Future()
                nothing.set_result([])
                return nothing

    writer = PartWriter(str(folder), save_distributed=True)
    save(dict(tensors), storage_writer=writer)
    if writer.refusal is not None:
        raise writer.refusal
    return sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*.safetensors"))


def load_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place from any number of files; all ranks call this together."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def part_offsets(metadata: dict[str, str] | None) -> dict[str, list[int]]:
    """Where each part lies in the whole, from a file's metadata; empty for a file of whole tensors."""
    infos = json.loads((metadata or {}).get("DCP_SHARDING_INFO", "{}"))
    return {name: list(info["saved_offsets"]) for name, info in infos.items()}
