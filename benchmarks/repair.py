"""What making K=V of a trained model costs, and how much of it a short repair brings back.

    python benchmarks/repair.py --before runs/standard --scratch runs/shared --text more.txt --work rows --name NAME

`--before` is a run of a (Q,K,V) model that is a Llama, `--scratch` one with share = "k=v" that saw the same tokens from
the start, and `--text` a file that neither has seen, a tenth of which is held out. Every case leaves a file under
`--work`; the same command again does those that are missing, and several at a time may share that folder. Budgets are
shares of the tokens that `--before` was trained on.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from measure import RESULTS, keep, provenance
from qklab.hf import convert
from qklab.hf.convert.folder import load_for_conversion, measure_cache
from qklab.hf.convert.repair import LR, Repair, RepairSettings
from qklab.hf.convert.text import TokenWindows, count_words, measure_loss, read_windows
from qklab.hf.evaluate import load_for_evaluation
from qklab.runs.directory import RunDirectory
from qklab.runs.files import write_json
from qklab.train.spec import RunSpec

CALIBRATION = 16_384  # tokens


@dataclass(frozen=True)
class Case:
    """One repair: from a conversion with or without calibration, or (control) of the model as it was."""

    share: float  # of the training tokens; 0 is no repair
    seed: int = 0
    calibrated: bool = True
    train: str = "all"
    next_token: float = 0.0
    lr: float = LR
    converted: bool = True

    @property
    def name(self) -> str:
        what = ("calibrated" if self.calibrated else "uncalibrated") if self.converted else "unconverted"
        return f"{what}-{self.train}-a{self.next_token:g}-lr{self.lr:g}-{100 * self.share:g}%-s{self.seed}"


def list_cases(seeds: int) -> list[Case]:
    """By what is asked first: the learning rate, the curve, what is trained and by which loss, calibration."""
    every = range(seeds)
    cases = [Case(0), Case(0, calibrated=False)]
    cases += [Case(0.03, lr=lr) for lr in (LR / 3, LR, 3 * LR)]
    cases += [Case(share, seed) for share in (0.01, 0.03, 0.1) for seed in every]
    cases += [Case(0.03, seed, calibrated=False) for seed in every]
    cases += [Case(0.03, seed, train="attention") for seed in every]
    cases += [Case(0.03, seed, next_token=a) for a in (1.0, 0.5) for seed in every]
    cases += [Case(0.03, seed, next_token=1.0, converted=False) for seed in every]
    return list(dict.fromkeys(cases))


def run_case(case: Case, before: Path, train: TokenWindows, held_out: TokenWindows, tokens: int, batch: int) -> Any:
    """The held-out loss after a repair."""
    old, new = (load_for_conversion(before, "cpu")[0] for _ in range(2))
    if case.converted:
        calibration = train.read(range(CALIBRATION // train.context))[:, :-1] if case.calibrated else None
        convert(new, share="k=v", calibration=calibration)
    steps = round(case.share * tokens / (batch * train.context))
    began = time.process_time()
    if steps:
        how = {name: getattr(case, name) for name in ("lr", "train", "next_token", "seed")}
        repair = Repair(new, old, train, RepairSettings(batch=batch, **how))
        while repair.done < steps:
            repair.step(steps)
    seconds = time.process_time() - began
    return {"steps": steps, "tokens": steps * batch * train.context, "cpu_seconds": seconds} | {
        "nats_per_token": measure_loss(new, held_out),
        "cache_bytes_per_token": measure_cache(new),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=16_384)
    parser.add_argument("--every", type=int, nargs=2, default=(0, 1), help="only cases I of every N")
    parser.add_argument("--name", default=None, help="keep the result under this name")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    spec = RunSpec.from_dict(RunDirectory(given.before).read()["spec"])
    model, tokenizer, _ = load_for_conversion(given.before, "cpu")
    train, held_out = read_windows(given.text, tokenizer, count_words(model), spec.model.context)
    held_out = TokenWindows(held_out.ids[: given.held_out + 1], held_out.context)
    first, step = given.every
    cases = list_cases(given.seeds)
    for case in cases[first::step]:
        path = given.work / f"{case.name}.json"
        if not path.exists():
            found = run_case(case, given.before, train, held_out, spec.budget.tokens, given.batch)
            write_json(path, {"case": asdict(case)} | found)
            print(f"{case.name}: {found['nats_per_token']:.4f} nats, {found['cpu_seconds']:.0f} s", flush=True)
    if given.name is None:
        return
    done = [given.work / f"{case.name}.json" for case in cases]
    scratch, _, _ = load_for_evaluation(given.scratch)
    result = provenance("cpu", None) | {
        "model": {"name": spec.model.name, "parameters": spec.model.parameters(), "tokens": spec.budget.tokens},
        "held_out_tokens": len(held_out.ids) - 1,
        "context": held_out.context,
        "vocabulary": count_words(model),
        "batch": given.batch,
        "before": {"nats_per_token": measure_loss(model, held_out), "cache_bytes_per_token": measure_cache(model)},
        "scratch": {"nats_per_token": measure_loss(scratch, held_out)},
        "rows": [json.loads(path.read_text()) for path in done if path.exists()],
    }
    keep(given.name, result, RESULTS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
