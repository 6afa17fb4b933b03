"""Tensors spread over ranks: saved and loaded by torch.distributed.checkpoint as safetensors, one file per rank.

The file of a rank holds its part of each tensor and, in its header, where that part lies in the whole. Replicated
tensors are written by one rank only. Only safetensors are written and read: torch's own format for this is a pickle.
"""

from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
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


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Every rank writes its part into `folder`, flushed to the disk; all ranks call this together.

    What the disk refuses this rank is raised on this rank, once all ranks are done.
    """
    writer = PartWriter(str(folder), save_distributed=True)
    save_state_dict(dict(tensors), storage_writer=writer)
    if writer.refusal is not None:
        raise writer.refusal


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place from any number of files; all ranks call this together."""
    load_state_dict(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def own_files(folder: Path) -> list[Path]:
    """The files this rank wrote."""
    return sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*.safetensors"))
