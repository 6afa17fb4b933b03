"""One objective on one device, replicated (DDP) or sharded (FSDP2) over ranks, compiled or not."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from qklab.train.machine import Machine
from qklab.train.objective import Objective
from qklab.train.spec import ExecutionSpec


def compiles(execution: ExecutionSpec, machine: Machine) -> bool:
    return execution.compile == "yes" or (execution.compile == "auto" and machine.device.type == "cuda")


def distribute(objective: Objective, execution: ExecutionSpec, machine: Machine, bf16: bool) -> nn.Module:
    """What is called in a training step; `objective` itself stays what is evaluated, probed and saved.

    DDP keeps a copy of the model on every rank and averages gradients. FSDP2 keeps a share of each parameter, gradient
    and optimiser state on every rank and gathers one block's parameters at a time.
    """
    objective.decoder.recompute(execution.recompute)
    if machine.world > 1 and execution.parallel == "fsdp":
        mesh = init_device_mesh(machine.device.type, (machine.world,))
        half = torch.bfloat16 if bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if bf16 else None)
        for block in objective.decoder.blocks:
            if compiles(execution, machine):
                block.compile(dynamic=False)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(objective, mesh=mesh, mp_policy=policy)
        return objective
    step: nn.Module = objective
    if compiles(execution, machine):
        step = torch.compile(objective, dynamic=False)  # pyright: ignore[reportAssignmentType]
    if machine.world > 1:
        ids = [machine.device.index] if machine.device.type == "cuda" else None
        step = DistributedDataParallel(step, device_ids=ids)
    return step


def accumulating(step: nn.Module, last: bool) -> AbstractContextManager[None]:
    """While micro-batches other than the last are computed, gradients stay on their rank."""
    if isinstance(step, DistributedDataParallel) and not last:
        return step.no_sync()
    if isinstance(step, FSDPModule):
        step.set_requires_gradient_sync(last)
    return nullcontext()


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """√Σ‖g‖² over all parameters and ranks, a scalar on the device."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def settle(module: nn.Module) -> None:
    """Give back what FSDP2 gathered for a forward pass that no backward pass followed, so that every parameter is the
    rank's own share again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
