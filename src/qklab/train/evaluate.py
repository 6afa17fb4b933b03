"""Validation: negative log-likelihood per token, perplexity per token, bits per byte; and how many answers are right,
where it is not the next token that is asked."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qklab.data.batches import IGNORED, Batch, EvaluationWindows
from qklab.train.machine import Machine
from qklab.train.objective import Objective
from qklab.train.ranks import sum_over_ranks


@dataclass(frozen=True)
class Evaluation:
    """Sums over the evaluated targets, which are tokens of this corpus's tokenizer, ends of text included."""

    nats: float
    tokens: int
    bytes: int
    standard_error: float = 0.0  # of the loss, from having read some windows of the split and not all
    hits: "Hits | None" = None

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
        text = {} if self.hits is not None else {"bits_per_byte": self.bits_per_byte, "bytes": self.bytes}
        about = {"loss": self.loss, "perplexity": self.perplexity, "tokens": self.tokens} | text
        about["standard_error"] = self.standard_error
        return about if self.hits is None else about | self.hits.describe(self.tokens)


@dataclass(frozen=True)
class Hits:
    """How many answers were right, and in how many of the `windows` that were read all of them."""

    tokens: float
    whole: float
    windows: int
    standard_errors: tuple[float, float]  # of both shares, from having read some windows of the split and not all

    def describe(self, asked: int) -> dict[str, Any]:
        return {
            "accuracy": self.tokens / asked,
            "sequence_accuracy": self.whole / self.windows,
            "sequences": self.windows,
            "accuracy_errors": list(self.standard_errors),
        }


SUMS = 6


@dataclass
class EvaluationSums:
    """What a rank has of an evaluation under way, and goes on from: its first `windows`."""

    windows: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: torch.Tensor | None = None  # [runs, 6]: of all windows, and squares of each window's; hits; windows all hit

    def describe(self, run: int) -> dict[str, Any]:
        """What there is of one run."""
        nats = [0.0] * SUMS if self.nats is None else self.nats[run].tolist()
        return {"windows": self.windows, "tokens": self.tokens, "bytes": self.bytes, "nats": nats}

    @classmethod
    def gather(cls, runs: Sequence[dict[str, Any]]) -> "EvaluationSums":
        """All runs' together, if they have come equally far; else from the beginning."""
        if len({run["windows"] for run in runs}) != 1:
            return cls()
        nats = torch.tensor([run["nats"] for run in runs], dtype=torch.float64)
        return cls(runs[0]["windows"], runs[0]["tokens"], runs[0]["bytes"], nats)


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
    sums: EvaluationSums | None = None,
    members: int | None = None,
    counts_hits: bool = False,
) -> list[Evaluation]:
    """The model's loss on about `tokens` evenly spread tokens of a split, or on all of it; the same windows for every
    model, and for each of the `members` of a stacked one; with `counts_hits` also what it gets right. `tick` is told
    the fraction done and may raise to give up; `sums` then has what is done so far, to go on with."""
    chosen = windows.select_windows(tokens)
    mine = np.array_split(chosen, machine.world)[machine.rank]
    was_training = objective.training
    objective.eval()
    sums = EvaluationSums() if sums is None else sums
    nats = torch.zeros(members or 1, SUMS, dtype=torch.float64) if sums.nats is None else sums.nats
    sums.nats = nats = nats.to(machine.device)
    try:
        # every rank makes as many calls as the busiest, since sharded models need all ranks in each
        for first in range(sums.windows, -(-len(chosen) // machine.world), rows):
            part = mine[first : first + rows]
            batch = windows.batch(part if len(part) else chosen[:1])
            real = batch.targets[batch.targets != IGNORED].numpy() if len(part) else np.empty(0, np.int64)
            with torch.autocast(machine.device.type, torch.bfloat16, enabled=bf16):
                losses, hits = objective(
                    *repeat_rows(batch.to(machine.device), members), per_token=True, counts_hits=counts_hits
                )
            if len(part):
                columns = [losses.double().view(len(nats), len(part), -1).sum(2)]
                if counts_hits:
                    right = hits.view(len(nats), len(part), -1).sum(2)
                    asked = (batch.targets != IGNORED).sum(1).to(right.device)
                    columns += [right.double(), (right == asked).double()]
                for number, windowed in enumerate(columns):
                    nats[:, 2 * number : 2 * number + 2] += torch.stack([windowed.sum(1), windowed.square().sum(1)], 1)
            sums.windows, sums.tokens = first + rows, sums.tokens + len(real)
            sums.bytes += int(byte_lengths[real].sum())
            tick(min(1.0, (first + rows) / max(1, len(mine))))
    finally:
        objective.train(was_training)
    *flat, counted, text_bytes = sum_over_ranks(*nats.flatten().tolist(), sums.tokens, sums.bytes)
    evaluations = []
    for run in range(0, len(flat), SUMS):
        pairs = [flat[run + first : run + first + 2] for first in range(0, SUMS, 2)]
        errors = [estimate_error(own, squares, len(chosen), len(windows)) * len(chosen) for own, squares in pairs]
        (total, _), (right, _), (whole, _) = pairs
        shares = (errors[1] / counted, errors[2] / len(chosen))
        hits = Hits(right, whole, len(chosen), shares) if counts_hits else None
        evaluations.append(Evaluation(total, int(counted), int(text_bytes), errors[0] / counted, hits))
    return evaluations


def repeat_rows(batch: Batch, members: int | None) -> Batch:
    """The same rows for every member of a stacked model: [B, T] → [S, B, T]."""
    if members is None:
        return batch
    return Batch(*(None if t is None else t.expand(members, *t.shape) for t in batch))  # pyright: ignore[reportArgumentType]


def estimate_error(total: float, squares: float, sampled: int, windows: int) -> float:
    """Standard error of the mean of a window's nats: what another choice of as many windows would change it by."""
    if sampled < 2 or sampled >= windows or not math.isfinite(squares):
        return 0.0
    variance = max(0.0, squares - total * total / sampled) / (sampled - 1)
    return math.sqrt(variance / sampled * (1 - sampled / windows))
