"""What lowers the noise of a comparison: the spread over seeds of arm − baseline, one change to the training at a time.

    python benchmarks/precision.py --device cpu --tokens 100352 --test-tokens 32768    # every change, at pico: an hour
    python benchmarks/precision.py --device cpu --size femto --tokens 102400 --test-tokens 32768 --seeds 32
    python benchmarks/precision.py --size nano --arms affine --changes own schedule "half the batch" --tokens 5000000 \\
        --test-tokens 131072 --corpus wikipedia --data CORPORA                         # on one H200, two minutes

Each case trains `--seeds` paired seeds of every arm at one learning rate and reads, of every seed, the loss on the same
test windows. Of one training come all the averages of its weights (the last ones; their exponential moving average over
a part of the run; their mean over its last part) and all the numbers of windows. What is told is the standard deviation
of the paired difference, with its 95 % interval, and the mean beside it: a change that makes both smaller has won
nothing.
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from measure import RESULTS, keep, provenance
from qklab.data.prepare import prepare_corpus
from qklab.data.shards import MANIFEST, Corpus
from qklab.data.sources import find_source_path
from qklab.study.arms import list_arms
from qklab.study.sizes import SIZES as LADDER
from qklab.study.sizes import Size
from qklab.train.evaluate import repeat_rows
from qklab.train.launch import choose_precision
from qklab.train.machine import Machine
from qklab.train.population import PopulationTrainer
from qklab.train.settings import merge_settings, resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec

stats: Any = scipy_stats  # whose own types pyright cannot infer
EMA = {"EMA over 5 %": 0.05, "EMA over 10 %": 0.1}  # its time constant, of the run
MEAN = {"mean of the last 10 %": 0.1, "mean of the last 20 %": 0.2}
LAST = "last weights"
SMALL: dict[str, Any] = {
    "model": {"recipe": "nano", "layers": 1, "width": 32, "context": 64, "tied": False},
    "attention": {"heads": 2},
    "corpus": {"vocab": 512},
    "batch": {"sequences": 4},
}
SIZES = {"femto": Size(SMALL, (5e-3, 1e-2, 2e-2))} | LADDER  # 0.05 M parameters, for a machine that is busy
Losses = dict[str, NDArray[np.float64]]  # how weights are averaged → [seeds, windows]


OWN = "as compare does"
Changes = dict[str, dict[str, Any]]  # what a change is called → the settings that make it


def list_changes(size: str, tokens: int) -> dict[str, Changes]:
    """Kind of change → its changes, each to what `compare` trains at the size."""
    own = resolve_run(SIZES[size].settings | {"budget": {"tokens": 1}})[0]
    sequences, context, warmup = own.batch.sequences, own.model.context, own.schedule.warmup
    schedules = {
        "cosine to a tenth": {"kind": "cosine", "warmup": warmup, "final": 0.1},
        "cosine to zero": {"kind": "cosine", "warmup": warmup, "final": 0.0},
        "linear to zero": {"kind": "wsd", "warmup": warmup, "decay": 1 - warmup, "final": 0.0},
    }
    warmups = {
        f"warm-up {part:g}": {"kind": "wsd", "warmup": part, "decay": 1 - part, "final": 0.0} for part in (0.05, 0.4)
    }
    return {
        "own": {OWN: {}},
        "schedule": {name: {"schedule": schedule} for name, schedule in schedules.items()},
        "tokens": {
            f"{word} the tokens": {"budget": {"tokens": round(factor * tokens)}}
            for word, factor in (("half", 0.5), ("twice", 2.0))
        },
        "warm-up": {name: {"schedule": schedule} for name, schedule in warmups.items()},
        "batch": {
            "half the batch": {"batch": {"sequences": sequences // 2}},
            "twice the batch": {"batch": {"sequences": 2 * sequences}},
        },
        "context": {
            "half the context": {"model": {"context": context // 2}, "batch": {"sequences": 2 * sequences}},
            "twice the context": {"model": {"context": 2 * context}, "batch": {"sequences": sequences // 2}},
        },
    }


def select_changes(named: Sequence[str], kinds: Mapping[str, Changes]) -> Changes:
    """The changes of these kinds or names."""
    single = {name: change for changes in kinds.values() for name, change in changes.items()}
    found: Changes = {}
    for name in named:
        found |= kinds[name] if name in kinds else {name: single[name]}
    return found


def make_specs(arm: str, change: Mapping[str, Any], options: argparse.Namespace) -> list[RunSpec]:
    """The seeds of an arm, all of one shape."""
    settings = merge_settings(SIZES[options.size].settings, change)
    corpus: dict[str, Any] = {"valid": 0.02, "test": 0.03, "limit_bytes": options.limit_bytes}
    path = find_source_path(options.corpus, options.data)
    if path is not None and (path / MANIFEST).is_file():  # which has its own tokenizer and splits
        settings, corpus = {name: own for name, own in settings.items() if name != "corpus"}, {}
    own = {
        "corpus": corpus | {"source": options.corpus if path is None else str(path)},
        "optimiser": {"lr": options.lr or SIZES[options.size].lrs[1]},
        "budget": {"tokens": options.tokens} | change.get("budget", {}),
    }
    spec, _ = resolve_run(merge_settings(merge_settings(settings, list_arms()[arm]), own))
    return [spec.replace(seed=seed) for seed in range(options.seeds)]


class WeightAverages:
    """Averages of a model's weights over its training: exponential, and plain ones over the last part."""

    def __init__(self, decoder: torch.nn.Module, steps: int):
        self.weights, self.steps, self.counts = list(decoder.parameters()), steps, dict.fromkeys(MEAN, 0)
        self.averages = {name: [w.detach().clone() for w in self.weights] for name in (*EMA, *MEAN)}

    @torch.no_grad()
    def update(self, step: int) -> None:
        for name, share in EMA.items():
            self.move(name, 1 / max(1.0, share * self.steps))
        for name, share in MEAN.items():
            if step > (1 - share) * self.steps:
                self.counts[name] += 1
                self.move(name, 1 / self.counts[name])

    def move(self, name: str, part: float) -> None:
        """Move an average towards the present weights by so much of the way."""
        for average, weight in zip(self.averages[name], self.weights, strict=True):
            average.lerp_(weight, part)

    @torch.no_grad()
    def load(self, name: str) -> None:
        for weight, average in zip(self.weights, self.averages[name], strict=True):
            weight.copy_(average)


def train_arm(specs: Sequence[RunSpec], options: argparse.Namespace, averaging: bool) -> tuple[Losses, float]:
    """Train the seeds as one model; the nats of every test window of each, and how many seconds a run took."""
    machine = Machine.open(ExecutionSpec(device=options.device, threads=options.threads))
    specs = [choose_precision(spec, machine) for spec in specs]
    corpus = Corpus.open(prepare_corpus(specs[0].corpus, data=options.data).folder)
    trainer = PopulationTrainer(specs, ExecutionSpec(device=options.device), corpus, machine)
    steps = specs[0].steps
    assert steps is not None
    averages = WeightAverages(trainer.decoder, steps) if averaging else None
    batches, began = trainer.read_batches(0), time.perf_counter()
    for step in range(1, steps + 1):
        trainer.step(next(batches), [spec.optimiser.lr * spec.schedule.factor(step / steps) for spec in specs])
        if averages is not None:
            averages.update(step)
    batches.close()
    found = {LAST: read_windows(trainer, options.test_tokens)}
    took = (time.perf_counter() - began) / len(specs)
    if averages is not None:
        for name in averages.averages:
            averages.load(name)
            found[name] = read_windows(trainer, options.test_tokens)
    return found, took


@torch.no_grad()
def read_windows(trainer: PopulationTrainer, tokens: int) -> NDArray[np.float64]:
    """The mean nats of every window for every seed, [seeds, windows]."""
    windows, members = trainer.windows["test"], len(trainer.specs)
    parts = []
    for chosen in np.array_split(windows.select_windows(tokens), max(1, tokens // (8 * windows.context))):
        batch = windows.batch(chosen).to(trainer.machine.device)
        with torch.autocast(trainer.machine.device.type, torch.bfloat16, enabled=trainer.bf16):
            losses, _ = trainer.objective(*repeat_rows(batch, members), per_token=True)
        parts.append(losses.double().view(members, len(chosen), -1).mean(2).cpu().numpy())
    return np.concatenate(parts, 1)


def describe_spread(difference: NDArray[np.float64]) -> dict[str, Any]:
    """Mean and standard deviation of the paired difference over seeds, with the deviation's 95 % interval."""
    n, sd = len(difference), float(difference.std(ddof=1))
    low, high = (sd * math.sqrt((n - 1) / stats.chi2.ppf(p, n - 1)) for p in (0.975, 0.025))
    return {"seeds": n, "mean": float(difference.mean()), "sd": sd, "sd_low": low, "sd_high": high}


def run_change(name: str, change: Mapping[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The spread of every arm under one change, for every average, and for fewer windows of the last weights."""
    averaging = name in options.averaged
    trained = {
        arm: train_arm(make_specs(arm, change, options), options, averaging) for arm in ("standard", *options.arms)
    }
    cases: list[dict[str, Any]] = []
    base, base_took = trained["standard"]
    for arm in options.arms:
        own, took = trained[arm]
        for average, losses in own.items():
            windows = losses.shape[1]
            for part in (1, 2, 4, 8) if average == LAST else (1,):
                kept = np.arange(0, windows, part)
                difference = losses[:, kept].mean(1) - base[average][:, kept].mean(1)
                case = {"change": name, "arm": arm, "weights": average, "windows": len(kept)}
                case |= {"loss": float(base[average].mean()), "seconds_a_run": (took + base_took) / 2}
                cases.append(case | describe_spread(difference))
                print(describe_case(cases[-1]), flush=True)
    return cases


def describe_case(case: Mapping[str, Any]) -> str:
    return (
        f"{case['change']:18} {case['arm']:8} {case['weights']:22} {case['windows']:4} windows: sd {case['sd']:.4f} "
        f"({case['sd_low']:.4f} to {case['sd_high']:.4f}), mean {case['mean']:+.4f}, loss {case['loss']:.4f}, "
        f"{case['seconds_a_run']:.1f} s a run"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = list_changes("pico", 1)
    names = [*kinds, *(name for changes in kinds.values() for name in changes)]
    parser.add_argument("--size", choices=SIZES, default="pico")
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--limit-bytes", type=int, default=64_000_000)
    parser.add_argument("--arms", nargs="+", default=["affine", "k=v"])
    parser.add_argument(
        "--changes", nargs="+", choices=names, default=[*kinds], help="kinds of changes, or single ones"
    )
    parser.add_argument("--averaged", nargs="*", default=[OWN], help="the changes whose averages of weights are read")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--test-tokens", type=int, default=65_536)
    parser.add_argument("--lr", type=float, help="by default the middle one that compare tries")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name")
    parser.add_argument("--commit", help="where git does not know it")
    options = parser.parse_args()
    changes = select_changes(options.changes, list_changes(options.size, options.tokens))
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    made = provenance(device, options.commit) | {"threads": options.threads}
    cases: list[dict[str, Any]] = []
    for name, change in changes.items():
        cases += run_change(name, change, options)
        what = {"size": options.size, "corpus": options.corpus, "tokens": options.tokens, "cases": cases}
        keep(options.name or f"precision-{options.size}-{device}", what | made, options.out)


if __name__ == "__main__":
    main()
