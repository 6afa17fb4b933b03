"""Validation: negative log-likelihood per token, perplexity per token, bits per byte."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qklab.data.batches import IGNORED, EvaluationWindows
from qklab.train.machine import Machine
from qklab.train.objective import Objective
from qklab.train.ranks import sum_over_ranks


@dataclass(frozen=True)
class Evaluation:
    """Sums over the evaluated targets, which are tokens of this corpus's tokenizer, ends of text included."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), per token of this tokenizer: comparable only under the same one."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """nats / ln 2 over the bytes of UTF-8 text that the targets stand for: comparable across tokenizers."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.inf

    def to_dict(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


@torch.no_grad()
def evaluate_windows(
    objective: Objective,
    windows: EvaluationWindows,
    byte_lengths: np.ndarray,
    machine: Machine,
    *,
    tokens: int | None = None,
    rows: int = 16,
    bf16: bool = False,
    tick: Callable[[float], None] = lambda done: None,
) -> Evaluation:
    """The model's loss on about `tokens` evenly spread tokens of a split, or on all of it; the same windows for every
    model. `tick` is told the fraction done and may raise to give up."""
    chosen = windows.select_windows(tokens)
    mine = np.array_split(chosen, machine.world)[machine.rank]
    was_training = objective.training
    objective.eval()
    nats, counted, text_bytes = torch.zeros((), dtype=torch.float64, device=machine.device), 0, 0
    try:
        # every rank makes as many calls as the busiest, since sharded models need all ranks in each
        for first in range(0, -(-len(chosen) // machine.world), rows):
            part = mine[first : first + rows]
            batch = windows.batch(part if len(part) else chosen[:1])
            real = batch.targets[batch.targets != IGNORED].numpy() if len(part) else np.empty(0, np.int64)
            with torch.autocast(machine.device.type, torch.bfloat16, enabled=bf16):
                losses, _ = objective(*batch.to(machine.device), per_token=True)
            if len(part):
                nats += losses.double().sum()
            counted += len(real)
            text_bytes += int(byte_lengths[real].sum())
            tick(min(1.0, (first + rows) / max(1, len(mine))))
    finally:
        objective.train(was_training)
    total = sum_over_ranks(float(nats), counted, text_bytes)
    return Evaluation(total[0], int(total[1]), int(total[2]))
