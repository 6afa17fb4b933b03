"""Calibration: run text through the model layer by layer, each layer converted before the next one sees anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qklab.hf.convert.solve import Moments

Text = Tensor | Mapping[str, Tensor] | Sequence[Tensor | Mapping[str, Tensor]]
ModelInputs = dict[str, Tensor]


def read_batches(text: Text, model: PreTrainedModel) -> list[ModelInputs]:
    """Token ids [B, T], or a tokenizer's output, or a list of either → batches with input_ids and attention_mask."""
    items = [text] if isinstance(text, Tensor | Mapping) else list(text)
    batches = []
    for item in items:
        batch = dict(item) if isinstance(item, Mapping) else {"input_ids": item}
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
            came = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(
                "calibration must be token ids [batch, tokens], what a tokenizer returns for return_tensors='pt', "
                f"or a list of those, but {came} came."
            )
        words = cast(Any, model.get_input_embeddings()).weight.shape[0]
        if int(ids.min()) < 0 or int(ids.max()) >= words:
            raise ValueError(
                f"calibration must hold ids from 0 to {words - 1}, which this model knows, but they go from "
                f"{int(ids.min())} to {int(ids.max())}; use the model's own tokenizer."
            )
        mask = batch.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        if not isinstance(mask, Tensor) or mask.shape != ids.shape or not bool(mask.any(1).all()):
            raise ValueError(
                f"calibration's attention_mask must have shape {list(ids.shape)} and leave tokens in each row."
            )
        batches.append({"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)})
    if not batches:
        raise ValueError("calibration is empty; give token ids [batch, tokens] or leave it out.")
    return batches


@contextmanager
def hook_calls(module: nn.Module, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None):
    """`before(args, kwargs)` and `after(output)` around each call of `module`."""
    handles = []
    if before is not None:
        handles.append(module.register_forward_pre_hook(lambda _, args, kw: before(args, kw), with_kwargs=True))
    if after is not None:
        handles.append(module.register_forward_hook(lambda _, args, output: after(output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@dataclass
class LayerRecord:
    """What one attention layer met: inputs [tokens, width] and outputs [tokens, width] of the real tokens by batch."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class LayerWalk:
    """Goes through the blocks of a model in order. For each with attention: `observe` runs it and returns what its
    attention met, then the caller may change it, then `advance` runs it again, so that the next one meets what the
    changed one gives. Blocks between, without attention, are run as they are."""

    def __init__(self, model: PreTrainedModel, blocks: Sequence[nn.Module], batches: Sequence[ModelInputs]):
        self.blocks, self.at = blocks, 0
        self.masks = [batch["attention_mask"].bool() for batch in batches]
        self.states: list[Tensor] = []
        self.calls: list[list[tuple[Any, Any]]] = []
        for batch in batches:
            self.capture(model, blocks, batch)

    def capture(self, model: PreTrainedModel, blocks: Sequence[nn.Module], batch: ModelInputs) -> None:
        """One pass that keeps what enters the first block and what else each block is called with."""
        calls: list[tuple[Any, Any]] = []

        def before(args: Any, kwargs: Any) -> None:
            if not calls:
                self.states.append(args[0] if args else kwargs["hidden_states"])
            calls.append((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))

        with ExitStack() as hooks:
            for block in blocks:
                hooks.enter_context(hook_calls(block, before))
            model.base_model(**batch, use_cache=False)
        self.calls.append(calls)

    def observe(self, block: nn.Module, attention: nn.Module) -> LayerRecord:
        while self.blocks[self.at] is not block:
            self.states = self.run_block()
            self.at += 1
        seen, _ = self.run(attention)
        return seen

    def advance(self, attention: nn.Module) -> LayerRecord:
        seen, self.states = self.run(attention)
        self.at += 1
        return seen

    def run_block(self) -> list[Tensor]:
        states, block = [], self.blocks[self.at]
        for state, calls in zip(self.states, self.calls, strict=True):
            args, kwargs = calls[self.at]
            states.append(first_tensor(block(state, *args, **kwargs)))
        return states

    def run(self, attention: nn.Module) -> tuple[LayerRecord, list[Tensor]]:
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def before(args: Any, kwargs: Any) -> None:
            inputs.append(args[0] if args else kwargs["hidden_states"])

        with hook_calls(attention, before, lambda output: outputs.append(first_tensor(output))):
            states = self.run_block()
        seen = LayerRecord(
            *([part[mask] for part, mask in zip(parts, self.masks, strict=True)] for parts in (inputs, outputs))
        )
        return seen, states


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout; the mode of every module is put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def measure_moments(groups: Iterator[Tensor]) -> Moments:
    """Moments of y [tokens, N, n], summed over the batches."""
    count, second, mean = 0, None, None
    for y in groups:
        y = y.double()
        part, total = torch.einsum("tni,tnj->nij", y, y), y.sum(0)
        second = part if second is None else second + part
        mean = total if mean is None else mean + total
        count += len(y)
    assert second is not None
    assert mean is not None
    return Moments(second / count, mean / count)


def measure_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """√(Σ‖after − before‖² / Σ‖before‖²)."""
    missed = sum(float((new.double() - old.double()).square().sum()) for old, new in zip(before, after, strict=True))
    size = sum(float(old.double().square().sum()) for old in before)
    return (missed / max(size, 1e-300)) ** 0.5
