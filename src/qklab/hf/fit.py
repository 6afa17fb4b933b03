"""Fitting a classifier to examples: the loop, and how it goes on after an interruption to the same last bit."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from qklab.data.glue import Examples
from qklab.data.order import make_permutation
from qklab.model.initialise import seed_of
from qklab.optim import Optimiser, OptimiserSpec
from qklab.train.checkpoint import Checkpoints, Snapshot
from qklab.train.score import ScoringWork


@dataclass(frozen=True)
class FineTuning:
    """How a model is fine-tuned: AdamW, a linear way up over `warmup` of the steps and down to 0."""

    lr: float
    seed: int
    epochs: int = 3
    batch: int = 32
    warmup: float = 0.06
    weight_decay: float = 0.01

    def factor(self, step: int, steps: int) -> float:
        """Of the learning rate at a step, counted from 0, as Transformers' linear schedule has it."""
        rising = math.ceil(self.warmup * steps)
        return step / rising if step < rising else (steps - step) / max(1, steps - rising)

    def draw_batches(self, examples: int) -> Iterator[list[int]]:
        """Which of so many examples each step sees."""
        for epoch in range(self.epochs):
            order = make_permutation(examples, self.seed, epoch, 6).tolist()
            yield from (order[first : first + self.batch] for first in range(0, examples, self.batch))


class EncodedExamples:
    """Examples as tokens, in batches padded on the right."""

    def __init__(self, examples: Examples, tokenizer: Any, longest: int):
        self.tokenizer, self.labels = tokenizer, torch.from_numpy(examples.labels)
        first, *second = ([text[i] for text in examples.texts] for i in range(len(examples.texts[0])))
        pairs = {"text_pair": second[0]} if second else {}
        self.ids = tokenizer(first, **pairs, truncation=True, max_length=longest)["input_ids"]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, places: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """ids, mask [B, T] and labels [B]."""
        rows = [self.ids[place] for place in places]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        lengths = torch.tensor([len(tokens) for tokens in rows])
        return ids, (torch.arange(width) < lengths[:, None]).long(), self.labels[torch.tensor(places)]


class FitProgress:
    """How far a fit is: saved as often as a run saves, and at once where someone asks to stop."""

    def __init__(self, checkpoints: Checkpoints, work: ScoringWork):
        self.checkpoints, self.work = checkpoints, work
        self.saved_step, self.saved_at = 0, time.monotonic()

    def restore(self, model: nn.Module, optimiser: Optimiser) -> list[float]:
        """Fill model and optimiser from the newest checkpoint, if there is one; the loss of every step so far."""
        self.model, self.optimiser = model, optimiser
        found = self.checkpoints.find_newest()
        if found is None:
            return []
        optimiser.materialise()
        found.load_into(self.tensors())
        torch.set_num_threads(found.state["threads"])  # sums rounded as they were before
        self.saved_step = found.step
        return found.state["losses"]

    def tensors(self) -> dict[str, Tensor]:
        model = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        return model | {f"optimiser.{name}": tensor for name, tensor in self.optimiser.tensors().items()}

    def note(self, losses: list[float]) -> None:
        """After each step, and while the fitted model is used: save where that is due, and leave if asked to."""
        step, stopping = len(losses), self.work.stop.came is not None
        due = self.work.execution.is_checkpoint_due(step, time.monotonic() - self.saved_at)
        if step > self.saved_step and (due or stopping):
            state = {"losses": losses, "threads": torch.get_num_threads()}
            self.checkpoints.save(Snapshot(step, self.tensors(), state))
            self.saved_step, self.saved_at = step, time.monotonic()
        if stopping:
            self.checkpoints.wait()
        self.work.leave_if_asked()


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], device: str) -> Tensor:
    """Cross-entropy, or the squared error where a label is a number."""
    ids, mask, labels = (tensor.to(device) for tensor in batch)
    outputs = model(input_ids=ids, attention_mask=mask).logits
    if labels.is_floating_point():
        return nn.functional.mse_loss(outputs[:, 0].float(), labels)
    return nn.functional.cross_entropy(outputs.float(), labels)


def fit_classifier(
    model: nn.Module, examples: EncodedExamples, how: FineTuning, device: str, progress: FitProgress | None = None
) -> list[float]:
    """Train on the examples, in an order and with random numbers that follow from the seed; the loss of every step."""
    optimiser = Optimiser(OptimiserSpec(beta2=0.999, weight_decay=how.weight_decay), model)
    losses = [] if progress is None else progress.restore(model, optimiser)
    steps = how.epochs * -(-len(examples) // how.batch)
    model.train()
    for places in islice(how.draw_batches(len(examples)), len(losses), None):
        torch.manual_seed(seed_of(how.seed, f"fine-tuning/{len(losses)}"))
        loss = compute_loss(model, examples.batch(places), device)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step(how.lr * how.factor(len(losses), steps))
        optimiser.zero_grad()
        losses.append(loss.item())
        if progress is not None:
            progress.note(losses)
    return losses
