"""The end of a run: its final evaluation, and the summary."""

import json
import resource
import sys
import time
from typing import Any

import numpy as np
import torch

from qklab.data.batches import EvaluationWindows
from qklab.data.shards import Corpus, Split
from qklab.data.targets import measure_chance
from qklab.runs.directory import EVALUATING
from qklab.runs.signals import StopRequest
from qklab.train.evaluate import EvaluationSums
from qklab.train.loop import Loop, Member, Status
from qklab.train.machine import Machine
from qklab.train.spec import RunSpec

SAVE_SECONDS = 30.0


class InterruptedEvaluationError(Exception):
    """Someone asked to stop during the final evaluation; all that was done is saved."""


def evaluate_splits(loop: Loop, stop: StopRequest) -> list[dict[str, dict[str, Any]]]:
    """Of each run validation and test, as much of each as the spec says; stopped, it goes on where it was."""
    results: list[dict[str, dict[str, Any]]] = [{} for _ in loop.members]
    tokens = loop.spec.final_tokens
    begun = read_begun_evaluation(loop)
    saved_at = time.monotonic()
    for split, windows in loop.trainer.windows.items():
        sums = begun.setdefault(split, EvaluationSums())
        whole = len(windows.select_windows(tokens)) == len(windows)
        what = f"final evaluation on {'all' if whole else 'a sample'} of {split}"

        def tick(done: float, what: str = what) -> None:
            nonlocal saved_at
            stopped = stop.came is not None
            if loop.machine.world == 1 and (stopped or time.monotonic() - saved_at > SAVE_SECONDS):
                saved_at = time.monotonic()
                for run, member in loop.live:
                    states = {name: own.describe(run) for name, own in begun.items()}
                    member.recorder.directory.write(EVALUATING, {"step": loop.state.step, "splits": states})
                if stopped:
                    raise InterruptedEvaluationError
            loop.display.show(1.0, f"{what}: {done:.0%}")

        with loop.measure_time("evaluation"):
            found = loop.trainer.evaluate(split, tokens, tick, sums)
        about = describe_split(windows, loop.spec) | measure_baseline(loop, split)
        for result, evaluation in zip(results, found, strict=True):
            result[split] = evaluation.to_dict() | about
    return results


def describe_split(windows: EvaluationWindows, spec: RunSpec) -> dict[str, int]:
    """How much there is to be read of a split."""
    return {"split_tokens": windows.tokens} | ({} if spec.asks == "next token" else {"split_sequences": len(windows)})


def read_begun_evaluation(loop: Loop) -> dict[str, EvaluationSums]:
    """How far a process before this one came with the final evaluation: split → its sums."""
    paths = [member.recorder.directory.path / EVALUATING for _, member in loop.live]
    if loop.machine.world > 1 or len(loop.live) < len(loop.members) or not all(path.exists() for path in paths):
        return {}
    try:
        begun = [json.loads(path.read_bytes()) for path in paths]
        if all(one["step"] == loop.state.step for one in begun):
            first = begun[0]["splits"]
            return {split: EvaluationSums.gather([one["splits"][split] for one in begun]) for split in first}
    except (ValueError, KeyError, TypeError):
        loop.display.say(f"{paths[0]} is damaged; the final evaluation begins again.")
    return {}


def measure_baseline(loop: Loop, split: str) -> dict[str, float]:
    """What is known on a split without reading what stands around: the loss, and how much is right by chance."""
    corpus, spec = loop.trainer.corpus, loop.spec
    if spec.asks == "answers":
        return measure_chance(corpus, spec.model.context, split)
    return {"unigram_loss": measure_unigram_loss(corpus, split, ends=spec.asks == "next token")}


def measure_unigram_loss(corpus: Corpus, split: str, ends: bool = True) -> float:
    """Nats per token on `split` of the best model without context: train's token frequencies, one added to each; of all
    tokens, or of all but the ends of texts, which are never masked."""

    def counts(of: Split) -> np.ndarray:
        total = np.zeros(corpus.tokenizer.vocab, np.int64)
        for start in range(0, of.tokens, 1 << 24):
            piece = of.read(start, min(of.tokens, start + (1 << 24)))
            total += np.bincount(piece, minlength=len(total))
        total[corpus.tokenizer.eot] *= ends
        return total

    train, test = counts(corpus.splits["train"]) + 1, counts(corpus.splits[split])
    return float(-(test * np.log(train / train.sum())).sum() / test.sum())


def summarise_run(loop: Loop, member: Member, status: Status, results: dict[str, Any], wall: float) -> dict[str, Any]:
    spec, state = member.spec, member.state
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
        "corpus": describe_training_text(loop.trainer.corpus, spec),
        "cache_bytes_per_token": spec.model.cache_bytes_per_token(),
        "seconds": state.seconds,
        "tokens_per_second": loop.tokens_per_second(),
        "peak_memory_bytes": measure_peak_memory(loop.machine),
        "seconds_of_last_process": {"all": wall} | loop.spent,
    } | ({"population": len(loop.members)} if len(loop.members) > 1 else {})


def describe_training_text(corpus: Corpus, spec: RunSpec) -> dict[str, Any]:
    """How much training text the corpus has, and how much text its source has in all, as far as that is known; of a
    task, its sequences."""
    train = corpus.splits["train"]
    if spec.asks == "answers":
        return {"train_tokens": train.documents * spec.model.context, "sequences": train.documents}
    whole = corpus.manifest["source"].get("text_bytes")
    return {"train_tokens": train.tokens, "train_bytes": train.bytes, "text_bytes": whole}


def measure_peak_memory(machine: Machine) -> int:
    """Of the device's allocator on a GPU, of the process on a CPU."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
