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
from qklab.train.spec import ExecutionSpec, RunSpec


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


def measure_total_memory(device: torch.device) -> int:
    """Bytes that the device has in all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_too_large(spec: RunSpec, execution: ExecutionSpec, machine: Machine) -> None:
    """Raise for a run that cannot fit, before it takes the memory: what it needs at the very least, against all there
    is."""
    share = machine.world if execution.parallel == "fsdp" else 1
    windows = -(-spec.batch.sequences // machine.world)
    rows = min(execution.rows or windows, windows)
    layers = spec.model.layers if execution.recompute == "none" else 1
    needs = {
        "weights, gradients and optimiser state": (16 * spec.model.parameters() // share, "model.width or layers"),
        "batches": (64 * windows * spec.model.context, "batch.sequences or model.context"),
        "activations": (2 * rows * spec.model.context * spec.model.width * layers, "execution.rows or model.context"),
    }
    total = measure_total_memory(machine.device)
    what, (most, instead) = max(needs.items(), key=lambda entry: entry[1][0])
    if sum(size for size, _ in needs.values()) > total:
        raise ValueError(
            f"this run needs at least {most / 2**30:,.0f} GiB for its {what}, and the {machine.device.type} has "
            f"{total / 2**30:,.0f} GiB; try a smaller {instead}."
        )


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
