"""One objective on one device, replicated (DDP) or sharded (FSDP2) over ranks, compiled or not.

FSDP2 takes longer to import than the rest of training and is imported where it is used.
"""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qklab.optim.rows import full_tensor
from qklab.train.machine import Machine
from qklab.train.objective import Objective
from qklab.train.spec import ExecutionSpec

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def should_compile(execution: ExecutionSpec, machine: Machine) -> bool:
    return execution.compile == "yes" or (execution.compile == "auto" and machine.device.type == "cuda")


def distribute_objective(objective: Objective, execution: ExecutionSpec, machine: Machine, bf16: bool) -> nn.Module:
    """What is called in a training step; `objective` itself stays what is evaluated, probed and saved.

    DDP keeps a copy of the model on every rank and averages gradients. FSDP2 keeps a share of each parameter, gradient
    and optimiser state on every rank and gathers one block's parameters at a time.
    """
    objective.decoder.recompute(execution.recompute)
    if machine.world > 1 and execution.parallel == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(machine.device.type, (machine.world,))
        half = torch.bfloat16 if bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if bf16 else None)
        for block in objective.decoder.blocks:
            if should_compile(execution, machine):
                block.compile(dynamic=False)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(objective, mesh=mesh, mp_policy=policy)
        return objective
    step: nn.Module = objective
    if should_compile(execution, machine):
        step = torch.compile(objective, dynamic=False)  # pyright: ignore[reportAssignmentType]
    if machine.world > 1:
        ids = [machine.device.index] if machine.device.type == "cuda" else None
        step = DistributedDataParallel(step, device_ids=ids)
    return step


def accumulate_gradients(step: nn.Module, last: bool) -> AbstractContextManager[None]:
    """While micro-batches other than the last are computed, gradients stay on their rank."""
    if isinstance(step, DistributedDataParallel) and not last:
        return step.no_sync()
    if is_fully_sharded(step):
        step.set_requires_gradient_sync(last)
    return nullcontext()


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """√Σ‖g‖² over all parameters and ranks, a scalar on the device."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return full_tensor(nn.utils.get_total_norm(gradients))


def is_fully_sharded(module: nn.Module) -> TypeGuard["FSDPModule"]:
    """Whether FSDP2 shards it, which it does nowhere if nobody imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def release_gathered(module: nn.Module) -> None:
    """Give back what FSDP2 gathered for a forward pass that no backward pass followed, so that every parameter is the
    rank's own share again."""
    for part in module.modules():
        if is_fully_sharded(part):
            part.reshard()
