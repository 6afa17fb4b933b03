"""The end of a run: evaluation on whole splits, and the summary."""

import resource
import sys
from typing import Any

import numpy as np
import torch

from qklab.data.shards import Corpus, Split
from qklab.train.loop import Loop, Status
from qklab.train.machine import Machine
from qklab.train.signals import StopRequest


class InterruptedEvaluationError(Exception):
    """Someone asked to stop during the final evaluation; the last checkpoint is already there."""


def evaluate_splits(loop: Loop, stop: StopRequest) -> dict[str, dict[str, Any]]:
    """The whole of validation and test."""
    results = {}
    for split in loop.trainer.windows:

        def tick(done: float, split: str = split) -> None:
            if stop.came is not None and loop.machine.world == 1:
                raise InterruptedEvaluationError
            loop.display.show(1.0, f"final evaluation on all of {split}: {done:.0%}")

        with loop.measure_time("evaluation"):
            results[split] = loop.trainer.evaluate(split, None, tick).to_dict()
        results[split]["unigram_loss"] = measure_unigram_loss(loop.trainer.corpus, split)
    return results


def measure_unigram_loss(corpus: Corpus, split: str) -> float:
    """Nats per token on `split` of the best model without context: train's token frequencies, one added to each."""

    def counts(of: Split) -> np.ndarray:
        total = np.zeros(corpus.tokenizer.vocab, np.int64)
        for start in range(0, of.tokens, 1 << 24):
            piece = of.read(start, min(of.tokens, start + (1 << 24)))
            total += np.bincount(piece, minlength=len(total))
        return total

    train, test = counts(corpus.splits["train"]) + 1, counts(corpus.splits[split])
    return float(-(test * np.log(train / train.sum())).sum() / test.sum())


def summarise_run(loop: Loop, status: Status, results: dict[str, Any], wall: float) -> dict[str, Any]:
    spec, state = loop.spec, loop.state
    tokens = state.step * spec.tokens_per_step
    return {
        "status": status,
        "steps": state.step,
        "tokens": tokens,
        "evaluation": results,
        "best": {"validation_loss": state.best, "step": state.best_step},
        "skipped_steps": state.skipped,
        "parameters": spec.model.parameters(),
        "training_flops": state.step * spec.flops_per_step,
        "cache_bytes_per_token": spec.model.cache_bytes(1),
        "seconds": state.seconds,
        "tokens_per_second": loop.tokens_per_second(),
        "peak_memory_bytes": measure_peak_memory(loop.machine),
        "seconds_of_last_process": {"all": wall} | loop.spent,
    }


def measure_peak_memory(machine: Machine) -> int:
    """Of the device's allocator on a GPU, of the process on a CPU."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
