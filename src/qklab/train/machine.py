"""This process's place: its device, its rank among others, its threads."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from qklab.runs.environment import count_cores
from qklab.train.spec import ExecutionSpec


@dataclass(frozen=True)
class Machine:
    """Rank `rank` of `world`, computing on `device`. Under torchrun these come from its environment."""

    device: torch.device
    rank: int = 0
    world: int = 1
    owns_group: bool = False

    @property
    def main(self) -> bool:
        """Whether this process keeps the record."""
        return self.rank == 0

    @classmethod
    def open(cls, execution: ExecutionSpec) -> "Machine":
        world, local = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        if execution.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("execution.device is cuda, but torch sees no CUDA device; leave it out or use cpu.")
        cuda = execution.device != "cpu" and torch.cuda.is_available()
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(execution.threads or choose_threads(neighbours))
        if world == 1:
            return cls(device)
        fresh = not dist.is_initialized()
        if fresh:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        return cls(device, dist.get_rank(), world, fresh)

    def close(self) -> None:
        if self.owns_group:
            dist.destroy_process_group()

    def describe(self) -> dict[str, Any]:
        """For the run's record."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {"kind": self.device.type, "name": name, "ranks": self.world, "threads": torch.get_num_threads()}


def choose_threads(neighbours: int) -> int:
    """The cores this process may use, shared with the other ranks of this machine; OMP_NUM_THREADS has precedence."""
    if "OMP_NUM_THREADS" in os.environ and neighbours == 1:
        return torch.get_num_threads()
    return max(1, count_cores() // neighbours)


def work_around_bf16(say: Callable[[str], None]) -> None:
    """Some virtual machines announce bf16 instructions that they then refuse, which kills the process. Try them in
    another process first and, if it dies, keep torch's CPU kernels to those every AVX-512 machine has."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    trial = "import torch; a = torch.ones(128, 512, dtype=torch.bfloat16); (a @ a.T).sum().item()"
    if subprocess.run([sys.executable, "-c", trial], capture_output=True, timeout=120).returncode < 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
        say("this processor's bf16 instructions do not work; bf16 is computed without them, more slowly.")
