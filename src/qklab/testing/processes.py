"""Functions run in processes of their own: killed while they work, or as the ranks of one job (gloo, on the CPU).

Processes come from multiprocessing's forkserver, which has torch imported and no threads. Functions and their arguments
are pickled, so they are functions of a module.
"""

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = ("qklab.train.launch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo")
PATIENCE = 200.0  # seconds for a rank's answer on a busy machine


def start_process(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start function(*arguments), with one thread, in a new process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", *PRELOADED])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    process = context.Process(target=function, args=arguments, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def finish_process(process: BaseProcess) -> int | None:
    """Wait for a process; its exit code, negative for the signal that ended it."""
    process.join(PATIENCE)
    return process.exitcode


def run_on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What function(*arguments) gives on each of `world` ranks, which have a process group as under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            start_process(run_rank, rank, world, f"{folder}/meeting", theirs, function, arguments)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for _, theirs in pipes:
            theirs.close()
        outcomes = [receive_outcome(ours) for ours, _ in pipes]
        for process in ranks:
            finish_process(process)
    for _, failure in outcomes:
        assert failure is None, failure
    return [result for result, _ in outcomes]


def receive_outcome(pipe: Connection) -> tuple[Any, str | None]:
    try:
        return pipe.recv() if pipe.poll(PATIENCE) else (None, "a rank does not answer")
    except EOFError:
        return None, "a rank died"


def run_rank(
    rank: int, world: int, meeting: str, report: Connection, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        dist.init_process_group("gloo", init_method=f"file://{Path(meeting)}", rank=rank, world_size=world)
        report.send((function(*arguments), None))
    except BaseException:
        report.send((None, traceback.format_exc()))
    dist.destroy_process_group()
