"""What making K=V of a trained model costs, and how much of it a short repair brings back.

    python benchmarks/repair.py --before runs/standard --scratch runs/shared --text more.txt --work rows --name NAME

    python benchmarks/repair.py --train benchmarks/repair-mini.toml --before runs/standard --scratch runs/shared \
        --text more.txt --work rows --device cuda --batch 32 --curve --seeds 1 --minutes 6 --name repair-mini-h200

`--before` is a run of a (Q,K,V) model that is a Llama, `--scratch` one with share = "k=v" that saw the same tokens from
the start, and `--text` a file that neither has seen, a tenth of which is held out. `--train` has both trained first,
after the settings of a run. Every case leaves a file under `--work`, and the result is written anew after each; the
same command again does what is missing, and several at a time may share that folder. Budgets are shares of the tokens
that `--before` was trained on; `--curve` leaves out all but the loss over them. After `--minutes` nothing is begun.
"""

import argparse
import json
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from measure import RESULTS, keep, provenance
from qklab.hf import convert
from qklab.hf.convert.folder import load_for_conversion, measure_cache
from qklab.hf.convert.repair import LR, WIDTH, Repair, RepairSettings
from qklab.hf.convert.text import TokenWindows, count_words, measure_loss, read_windows
from qklab.hf.evaluate import load_for_evaluation
from qklab.runs.directory import RunDirectory
from qklab.runs.files import write_json
from qklab.train.launch import train
from qklab.train.settings import resolve_run
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


def list_curve(seeds: int, width: int) -> list[Case]:
    """Only the loss over what a repair was given, by the defaults of `qklab convert`."""
    lr = LR * WIDTH / width
    repaired = [Case(share, seed, train="attention", lr=lr) for seed in range(seeds) for share in (0.01, 0.03, 0.1)]
    return [Case(0), Case(0, calibrated=False), *repaired]


def train_both(settings: Path, before: Path, scratch: Path, device: str) -> None:
    """The runs that are converted and compared with; what is there of them is kept."""
    values = tomllib.loads(settings.read_text("utf-8"))
    for folder, share in ((before, "none"), (scratch, "k=v")):
        changed = {"attention": {"share": share}, "execution": {"device": device}}
        spec, execution = resolve_run(values | changed)
        train(spec, folder, execution)


def run_case(case: Case, given: Any, text: TokenWindows, held_out: TokenWindows, tokens: int) -> Any:
    """The held-out loss after a repair."""
    old, new = (load_for_conversion(given.before, given.device)[0] for _ in range(2))
    if case.converted:
        calibration = text.read(range(min(len(text), CALIBRATION // text.context)))[:, :-1] if case.calibrated else None
        convert(new, share="k=v", calibration=calibration)
    steps = round(case.share * tokens / (given.batch * text.context))
    began, used = time.perf_counter(), time.process_time()
    if steps:
        how = {name: getattr(case, name) for name in ("lr", "train", "next_token", "seed")}
        repair = Repair(new, old, text, RepairSettings(batch=given.batch, **how))
        while repair.done < steps:
            repair.step(steps)
    spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
    return (
        {"steps": steps, "tokens": steps * given.batch * text.context}
        | spent
        | {
            "nats_per_token": measure_loss(new, held_out),
            "cache_bytes_per_token": measure_cache(new),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=16_384)
    parser.add_argument("--train", type=Path, help="settings of a run (TOML): train --before and --scratch after them")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--curve", action="store_true", help="only 1, 3 and 10 %% of the tokens, and no repair")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--every", type=int, nargs=2, default=(0, 1), help="only cases I of every N")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    parser.add_argument("--name", default=None, help="keep the result under this name")
    given = parser.parse_args()
    began = time.monotonic()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.train is not None:
        train_both(given.train, given.before, given.scratch, given.device)
    spec = RunSpec.from_dict(RunDirectory(given.before).read()["spec"])
    model, tokenizer, _ = load_for_conversion(given.before, given.device)
    text, held_out = read_windows(given.text, tokenizer, count_words(model), spec.model.context)
    held_out = TokenWindows(held_out.ids[: given.held_out + 1], held_out.context)
    scratch = load_for_evaluation(given.scratch, device=given.device)[0].to(given.device)
    result = provenance(given.device, given.commit) | {
        "model": {"name": spec.model.name, "parameters": spec.model.parameters(), "tokens": spec.budget.tokens},
        "held_out_tokens": len(held_out.ids) - 1,
        "context": held_out.context,
        "vocabulary": count_words(model),
        "batch": given.batch,
        "before": {"nats_per_token": measure_loss(model, held_out), "cache_bytes_per_token": measure_cache(model)},
        "scratch": {"nats_per_token": measure_loss(scratch, held_out)},
    }
    first, step = given.every
    cases = list_curve(given.seeds, spec.model.width) if given.curve else list_cases(given.seeds)
    for case in cases[first::step]:
        path = given.work / f"{case.name}.json"
        if not path.exists() and time.monotonic() - began < 60 * given.minutes:
            found = run_case(case, given, text, held_out, spec.budget.tokens)
            write_json(path, {"case": asdict(case)} | found)
            print(f"{case.name}: {found['nats_per_token']:.4f} nats, {found['seconds']:.0f} s", flush=True)
        if given.name is not None:
            done = [given.work / f"{case.name}.json" for case in cases]
            rows = [json.loads(path.read_text()) for path in done if path.exists()]
            keep(given.name, result | {"rows": rows}, given.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
