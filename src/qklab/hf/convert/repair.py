"""A short repair of a converted model: it learns to give the logits that it gave before, on the user's text.

A step is a pure function of the weights, the text, the seed and its number, so a repair that is stopped and goes on is
to the last bit, on a CPU, one that was never stopped. There is no dropout: the model is to be what it was.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qklab.hf.convert.text import TokenWindows, choose_rows, count_words
from qklab.hf.families import find_family, text_config
from qklab.optim.optimiser import Optimiser
from qklab.optim.spec import OptimiserSpec, ScheduleSpec
from qklab.runs.progress import Display
from qklab.runs.signals import StopRequest
from qklab.schema import Spec, choice_field, integer_field, number_field
from qklab.train.checkpoint import Checkpoints, Snapshot
from qklab.train.loop import describe_step

TRAINED = ("attention", "all")
SCHEDULE = ScheduleSpec(kind="cosine", warmup=0.1, final=0.0)
SAVED_EVERY = 300.0  # seconds
WIDTH, LR = 128, 1e-3  # the learning rate by default at such a width


@dataclass(frozen=True, kw_only=True)
class RepairSettings(Spec):
    """AdamW without weight decay, a linear way up over a tenth of the steps and a cosine down to 0.

    Args:
        lr: The highest learning rate; by default one that fits the model's width.
        batch: Windows in a step.
        train: Attention's weights alone, which was better in every seed (docs/findings.md), or all.
        next_token: How much the loss of the text itself counts, between 0 and 1; the rest is the divergence from the
            unconverted model's predictions, KL at temperature 1.
        seed: Decides the order of the windows.
    """

    lr: float = number_field(None, above=0.0)
    batch: int = integer_field(8)
    train: Literal["all", "attention"] = choice_field("attention", TRAINED)
    next_token: float = number_field(0.0, at_least=0.0, at_most=1.0)
    seed: int = integer_field(0, at_least=0)


class Repair:
    """A converted model, the model it was made of, and the state of its optimiser."""

    def __init__(self, model: Any, before: nn.Module, windows: TokenWindows, how: RepairSettings):
        self.model, self.before, self.windows = model.float().eval(), before.eval(), windows
        self.how = how.replace(lr=how.lr or LR * WIDTH / text_config(model).hidden_size)
        self.rows = choose_rows(windows.context, count_words(model), how.batch)
        self.done = 0
        attention = {id(p) for layer in find_family(model).layers(model).values() for p in layer.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(how.train == "all" or id(parameter) in attention)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimiser = Optimiser(OptimiserSpec(lr=self.how.lr, weight_decay=0.0), model)
        self.optimiser.materialise()  # all of it from the start, also of weights that some steps do not reach
        for tensor in self.optimiser.tensors().values():
            tensor.zero_()

    def accumulate_gradients(self, step: int) -> float:
        """The gradients of a step, and its loss in nats per token."""
        ids = self.windows.draw(step, self.how.batch, self.how.seed).to(self.model.device)
        total = 0.0
        for part in ids.split(self.rows):
            loss = self.compute_loss(part) * (len(part) / len(ids))
            loss.backward()
            total += float(loss.detach())
        return total

    def compute_loss(self, ids: Tensor) -> Tensor:
        """ids [B, T + 1] → (1 − a) KL(before ‖ now) + a (loss of the next token), the mean over tokens."""
        half = ids.is_cuda and torch.cuda.is_bf16_supported()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=half):
            now = self.model(input_ids=ids[:, :-1], use_cache=False).logits.float().flatten(0, 1).log_softmax(-1)
            a = self.how.next_token
            loss = a * F.nll_loss(now, ids[:, 1:].flatten()) if a else now.new_zeros(())
            if a < 1:
                with torch.no_grad():
                    was = self.before(input_ids=ids[:, :-1], use_cache=False).logits
                was = was.float().flatten(0, 1).log_softmax(-1)
                loss = loss + (1 - a) * F.kl_div(now, was, log_target=True, reduction="batchmean")
        return loss

    def step(self, steps: int) -> float:
        """One of so many steps; its loss."""
        loss = self.accumulate_gradients(self.done)
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), self.optimiser.spec.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"the repair has diverged at step {self.done + 1}: its loss ({loss}) or gradient ({norm}) is not "
                f"finite; try a smaller --lr than {self.how.lr:g}."
            )
        self.optimiser.step(self.how.lr * SCHEDULE.factor((self.done + 1) / steps))
        self.optimiser.zero_grad()
        self.done += 1
        return loss

    def time_step(self) -> float:
        """Seconds that a step takes, by a few of them that change nothing."""
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            self.accumulate_gradients(0)
            self.optimiser.zero_grad()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])  # the first one warms up

    def tensors(self) -> dict[str, Tensor]:
        """What a repair goes on from; the tensors themselves."""
        model = {f"model.{name}": parameter.detach() for name, parameter in self.trained.items()}
        return model | {f"optimiser.{name}": tensor for name, tensor in self.optimiser.tensors().items()}

    def run(self, steps: int, checkpoints: Checkpoints, display: Display) -> bool:
        """Go on from the newest checkpoint to the end, and say whether that was reached before a signal came."""
        found = checkpoints.find_newest()
        if found is not None:
            found.load_into(self.tensors())
            self.done = found.step
            display.say(f"going on at step {self.done} of {steps}.")
        first, began, saved = self.done, time.monotonic(), time.monotonic()
        each = self.how.batch * self.windows.context
        with StopRequest() as stop:
            while self.done < steps:
                loss = self.step(steps)
                now, ran = time.monotonic(), self.done - first
                speed = ran / (now - began)
                line = describe_step(self.done, steps, loss, each * speed, (steps - self.done) / speed)
                display.show(self.done / steps, line)
                if stop.came or now - saved > SAVED_EVERY:
                    checkpoints.save(Snapshot(self.done, self.tensors(), {}))
                    saved = now
                if stop.came:
                    display.say(f"stopped by {stop.came} at step {self.done} of {steps}, everything is saved.")
                    break
        display.close()
        checkpoints.wait()
        return self.done == steps


class DivergedError(ValueError):
    """A repair whose loss is no number."""
