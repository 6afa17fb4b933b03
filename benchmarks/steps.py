"""Training steps of language models, on a GPU each model in a process of its own, so that none finds another's memory
or compiled code in its way; all are prepared at once, since that is mostly compiling, and timed in turns."""

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from measure import list_kernels, peak_bytes, seconds
from qklab import Decoder
from qklab.ops.loss import linear_cross_entropy

STEPS_A_TURN = 5


class Step:
    """One training step: forward (on a GPU under bf16 autocast), vocabulary loss, backward, clipping, fused AdamW."""

    def __init__(self, model: Decoder, ids: Tensor, compiled: bool = True):
        self.model, self.ids = model, ids
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.loss = torch.compile(self.eager, dynamic=False) if compiled else self.eager

    def eager(self) -> Tensor:
        device = self.ids.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            features = self.model.features(self.ids[:, :-1])
            return linear_cross_entropy(features, self.model.head.weight, self.ids[:, 1:])[0]

    def __call__(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()


def serve(line: Connection, prepare: Callable[..., Step], *arguments: Any) -> None:
    """Prepare a step, tell its first loss and the bytes it needs beyond what lies on the GPU before it, then answer
    every request: with the seconds of a step, or for "kernels" with a table of them."""
    step = prepare(*arguments)
    first, peak = float(step.loss().detach()), peak_bytes(step)
    torch.cuda.empty_cache()
    line.send((first, peak))
    while asked := line.recv():
        step()
        if asked == "kernels":
            line.send(list_kernels(step, STEPS_A_TURN))
            continue
        taken = seconds(lambda: [step() for _ in range(STEPS_A_TURN)], "cuda")
        torch.cuda.empty_cache()
        line.send(taken / STEPS_A_TURN)


class Arms:
    """A process for every arm, which is what prepares its step and the arguments of that."""

    def __init__(self, arms: dict[str, tuple[Any, ...]]):
        context = multiprocessing.get_context("spawn")
        self.lines: dict[str, Connection] = {}
        for name, arm in arms.items():
            self.lines[name], theirs = context.Pipe()
            context.Process(target=serve, args=(theirs, *arm), daemon=True).start()
            theirs.close()

    def answer(self, name: str) -> Any:
        try:
            return self.lines[name].recv()
        except EOFError:
            sys.exit(f"{name}: its process ended; what it said is above, and nothing was measured.")

    def list_answers(self) -> tuple[dict[str, float], dict[str, int]]:
        """The first loss and the peak of every arm."""
        answers = {name: self.answer(name) for name in self.lines}
        return {name: first for name, (first, _) in answers.items()}, {
            name: peak for name, (_, peak) in answers.items()
        }

    def seconds(self, rounds: int) -> dict[str, list[float]]:
        """Of a step of every arm in every round, the arms taking turns."""
        times: dict[str, list[float]] = {name: [] for name in self.lines}
        for _ in range(rounds):
            for name, line in self.lines.items():
                line.send(True)
                times[name].append(self.answer(name))
        self.close()
        return times

    def print_kernels(self) -> None:
        """Where a step of every arm spends its time, one after the other."""
        for name, line in self.lines.items():
            line.send("kernels")
            print(f"\n{name}: {STEPS_A_TURN} steps\n{self.answer(name)}", flush=True)
        self.close()

    def close(self) -> None:
        for line in self.lines.values():
            line.send(False)
