"""Up to which learning rate does each way of taming attention logits train stably, and how well?

    python studies/logit_control.py CORPUS --size nano --out nano.jsonl        # on the CPU, CORPUS a prepared folder
    python studies/logit_control.py CORPUS --size 51m --out 51m.jsonl          # on a GPU
    python studies/logit_control.py --table nano.jsonl
    python studies/logit_control.py --merge nano.jsonl other.jsonl --name nano-cpu

MHA and MLA, AdamW and Muon, learning rates from usual to hopeless; for each: no control, all query and key weights at
a tenth of the learning rate ("fixed"), QuacK at two speeds, QK-clip, and a norm (on q and k; MLA, whose keys are never
formed in decoding, has it on its latents). Every run of a seed starts from the same weights where the models have the
same weights, and sees the same batches in the same order. Runs that are in the file already are not repeated, so the
same command continues after a stop. Several processes may share the work, each with a file of its own.
"""

import argparse
import fcntl
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from qklab.attention.spec import LatentSpec
from qklab.data.batches import Batch, EvaluationWindows, batch_of
from qklab.data.order import Order
from qklab.data.shards import Corpus, Split
from qklab.data.spec import DataError
from qklab.model.decoder import Decoder
from qklab.model.diagnose import Diagnosis, diagnose, logit_change
from qklab.model.recipes import recipe
from qklab.optim import LogitControlSpec, Optimiser, OptimiserSpec, ScheduleSpec
from qklab.runs.environment import commit, environment
from qklab.runs.metrics import MetricsFile
from qklab.train.evaluate import evaluate
from qklab.train.machine import Machine, guard_bf16
from qklab.train.objective import Objective, named_weights
from qklab.train.parallel import compiles, distribute, gradient_norm
from qklab.train.probe import as_json
from qklab.train.progress import Terminal, duration
from qklab.train.signals import StopRequest
from qklab.train.spec import ExecutionSpec, padded

RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]

CONTROLS = {
    "none": LogitControlSpec(method="none"),
    "fixed-0.1": LogitControlSpec(method="fixed", tau=0.1),
    "quack-1": LogitControlSpec(method="quack", tau=1.0),
    "quack-0.1": LogitControlSpec(method="quack", tau=0.1),
    "qk-clip": LogitControlSpec(method="qk-clip", threshold=100.0),
    "qk-norm": LogitControlSpec(method="none"),
    "latent-norm": LogitControlSpec(method="none"),
}
FREE = ("none", "fixed-0.1", "quack-1", "quack-0.1")

# architecture → its arms; one that is watched for QK-clip is compiled differently and so counts as another
ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "mha": FREE,
    "mha-clipped": ("qk-clip",),
    "mha-qk-norm": ("qk-norm",),
    "mla": FREE,
    "mla-clipped": ("qk-clip",),
    "mla-latent-norm": ("latent-norm",),
}


@dataclass(frozen=True)
class Size:
    """What a size of model is trained with unless the command line says otherwise, and the ranks of its MLA."""

    steps: int
    sequences: int
    context: int
    lrs: tuple[float, ...]
    optimisers: tuple[str, ...]
    ranks: tuple[int, int, int]  # query, key and value, RoPE

    def attention(self, architecture: str) -> dict[str, Any]:
        if architecture.startswith("mla"):
            query, kv, rope = self.ranks
            normed = architecture == "mla-latent-norm"
            return {"latent": LatentSpec(query_rank=query, kv_rank=kv, rope_width=rope, norm=normed)}
        return {"norm": "qk"} if architecture == "mha-qk-norm" else {}


SIZES = {
    "nano": Size(120, 8, 128, (3e-3, 1e-2, 3e-2, 1e-1, 3e-1), ("adamw",), (64, 32, 16)),
    "51m": Size(400, 8, 1024, (1e-3, 3e-3, 1e-2, 3e-2), ("adamw", "muon"), (256, 128, 32)),
}

WEIGHT_DECAY, CLIP, WARMUP = 0.1, 1.0, 0.1
PROBE_ROWS, PROBE_TOKENS = 2, 256
CHECK = 25  # steps between two looks at whether losses are finite, each of which waits for the device
GIVE_UP = 10  # non-finite steps
TAIL, ABOVE = 20, 0.5  # unstable: the mean loss of the last 20 steps is 0.5 nats above the lowest such mean
KEPT = 100  # losses in the file


class StudyError(ValueError):
    """What someone can mend, in one sentence."""


@dataclass(frozen=True)
class Run:
    architecture: str
    arm: str
    optimiser: Literal["adamw", "muon"]
    lr: float
    seed: int

    @classmethod
    def of(cls, record: Record) -> "Run":
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})

    @property
    def name(self) -> str:
        return f"{self.architecture} · {self.arm} · {self.optimiser} · lr {self.lr:g} · seed {self.seed}"


def planned(options: argparse.Namespace) -> list[Run]:
    """Every run, those of one architecture together, first seeds before others."""
    return [
        Run(architecture, arm, optimiser, lr, seed)
        for architecture in options.architectures
        for seed in options.seeds
        for optimiser in options.optimisers
        for lr in options.lrs
        for arm in ARCHITECTURES[architecture]
        if arm in options.arms
        and (seed == options.seeds[0] or options.second_seed_lrs is None or lr in options.second_seed_lrs)
    ]


class Bench:
    """One architecture, built and compiled once; every run starts it anew in place, which compiles nothing anew."""

    def __init__(self, architecture: str, settings: Record, corpus: Corpus, machine: Machine, execution: ExecutionSpec):
        self.settings, self.corpus, self.machine = settings, corpus, machine
        size, self.steps, self.context = SIZES[settings["size"]], settings["steps"], settings["context"]
        self.bf16 = settings["precision"] == "bf16"
        vocab = padded(corpus.tokenizer.vocab)
        spec = recipe(settings["size"], vocab=vocab, context=self.context, **size.attention(architecture))
        with torch.device("cpu"):
            self.decoder = Decoder(spec, seed=0)
        self.objective = Objective(self.decoder.to(machine.device))
        self.call = distribute(self.objective, execution, machine, self.bf16)
        self.windows = EvaluationWindows(corpus.splits["valid"], self.context, corpus.tokenizer.eot, packed=False)
        probed = self.windows.batch(self.windows.chosen(None)[:PROBE_ROWS])
        self.probe_ids = probed.ids[:, :PROBE_TOKENS].to(machine.device)
        self.probe_steps = {int(s) for s in np.linspace(1, self.steps, settings["probes"]).round()}
        self.schedule = ScheduleSpec(kind="constant", warmup=WARMUP)
        self.weights: dict[int, list[Tensor]] = {}
        self.batches: dict[int, list[Batch]] = {}

    def start(self, seed: int) -> list[Batch]:
        """Give the model the first weights of `seed`; the batches of that seed, on the device."""
        own = [weight.detach() for _, weight in named_weights(self.decoder)]
        if seed not in self.weights:
            self.decoder.initialise(seed)
            self.weights[seed] = [weight.clone() for weight in own]
        for weight, first in zip(own, self.weights[seed], strict=True):
            weight.copy_(first)
        if seed not in self.batches:
            order = Order(self.corpus.splits["train"], seed, self.settings["sequences"], self.context, "contiguous")
            self.batches[seed] = [batch_of(order.rows(s)).to(self.machine.device) for s in range(self.steps)]
        return self.batches[seed]

    def train(self, run: Run, entropy: float, tick: Callable[[int, float], bool]) -> Record | None:
        """One run's record. `tick` hears now and then how many steps are done and at what loss, and says whether to
        go on; None if not."""
        batches = self.start(run.seed)
        chosen = OptimiserSpec(kind=run.optimiser, lr=run.lr, weight_decay=WEIGHT_DECAY, clip=CLIP)
        optimiser = Optimiser(chosen, self.decoder, CONTROLS[run.arm])
        outcomes = torch.full((self.steps, 2), math.nan, device=self.machine.device)  # loss, gradient norm
        probes: list[Record] = []
        watch, done, bad = Stopwatch(self.machine.device), 0, 0
        for batch in batches:
            lr = run.lr * self.schedule.factor((done + 1) / self.steps)
            if done + 1 in self.probe_steps:
                watch.pause()
                before = diagnose(self.decoder, self.probe_ids)
                outcomes[done] = self.step(batch, optimiser, lr)
                probes.append(self.probe(done + 1, before, optimiser))
                watch.go_on()
            else:
                outcomes[done] = self.step(batch, optimiser, lr)
                watch.steps += 1
            done += 1
            if done % CHECK == 0 or done == self.steps:
                bad = int((~outcomes[:done].isfinite().all(1)).sum())
                if not tick(done, outcomes[done - 1, 0].item()):
                    return None
                if bad >= GIVE_UP:
                    break
        watch.pause()
        losses = outcomes[:done, 0].tolist()
        result = self.validate() if bad < GIVE_UP else {"validation_loss": None, "bits_per_byte": None}
        kept = sorted({int(s) for s in np.linspace(0, done - 1, min(done, KEPT)).round()})
        return (
            {"kind": "run"}
            | asdict(run)
            | {
                "steps": done,
                "non_finite_steps": bad,
                "diverged": bad > 0 or result["validation_loss"] is None,
                "unstable": unstable(losses, entropy),
                **result,
                "training_loss": rounded(np.mean(losses[-TAIL:]).item()),
                "loss_steps": [s + 1 for s in kept],
                "losses": [rounded(losses[s]) for s in kept],
                "probes": probes,
                "ms_per_step": rounded(watch.milliseconds),
            }
        )

    def step(self, batch: Batch, optimiser: Optimiser, lr: float) -> Tensor:
        """Forward, backward, update, without waiting for the device: [2] loss and gradient norm.

        Where one is not finite, AdamW's update is skipped on the device. Muon cannot do that: its gradients become 0,
        and it moves on by its momentum.
        """
        with torch.autocast(self.machine.device.type, torch.bfloat16, enabled=self.bf16):
            loss, nll = self.call(*batch)
        loss.backward()
        parameters = [p for p in self.decoder.parameters() if p.grad is not None]
        norm = gradient_norm(parameters)
        outcome = torch.stack([nll.detach().float(), norm.float()])
        wrong = ~outcome.isfinite().all()
        nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)
        if optimiser.spec.kind == "muon":
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.masked_fill_(wrong, 0.0)
            optimiser.step(lr)
        else:
            optimiser.step(lr, skip=wrong.float())
        optimiser.zero_grad()
        return outcome

    def probe(self, step: int, before: Diagnosis, optimiser: Optimiser) -> Record:
        """Logits before the step and how far it moved them, per layer; the smallest and largest factor of the step."""
        moved = logit_change(before.logits, diagnose(self.decoder, self.probe_ids))
        factors = None
        if optimiser.control is not None:
            every = [values.flatten() for parts in optimiser.control.factors().values() for values in parts.values()]
            factors = as_json(torch.stack(torch.cat(every).aminmax()).tolist())
        return {
            "step": step,
            "largest_logit": as_json(before["largest_logit"].amax(1).tolist()),
            "logit_change": as_json(moved["logit_change"].square().mean(1).sqrt().tolist()),
            "largest_logit_change": as_json(moved["largest_logit_change"].amax(1).tolist()),
            "factors": factors,
        }

    def validate(self) -> Record:
        """Nats per token and bits per byte on the validation windows; None where they are not finite."""
        found = evaluate(
            self.objective,
            self.windows,
            self.corpus.tokenizer.byte_lengths,
            self.machine,
            tokens=self.settings["validation_windows"] * self.context,
            rows=self.settings["sequences"],
            bf16=self.bf16,
        )
        return {"validation_loss": rounded(found.loss), "bits_per_byte": rounded(found.bits_per_byte)}


class Stopwatch:
    """Milliseconds of `steps` steps between `go_on` and `pause`, which wait for the device."""

    def __init__(self, device: torch.device):
        self.device, self.steps, self.seconds, self.began = device, 0, 0.0, time.perf_counter()

    def wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def pause(self) -> None:
        self.seconds += self.wait() - self.began

    def go_on(self) -> None:
        self.began = self.wait()

    @property
    def milliseconds(self) -> float:
        return 1e3 * self.seconds / self.steps if self.steps else math.nan


def rounded(value: float) -> float | None:
    """Four digits after the point; JSON has no NaN."""
    return round(value, 4) if math.isfinite(value) else None


def unstable(losses: Sequence[float], entropy: float) -> bool:
    """Whether the loss ended high above where it had been, or above what knowing no context gives."""
    finite = np.array([loss for loss in losses if math.isfinite(loss)])
    if not len(finite):
        return True
    window = min(TAIL, len(finite))
    means = np.convolve(finite, np.full(window, 1 / window), "valid")
    return bool(means[-1] > means.min() + ABOVE or means[-1] > entropy)


def unigram_entropy(split: Split) -> float:
    """Nats per token of the split's token frequencies."""
    counts = np.zeros(0, np.int64)
    for start in range(0, split.tokens, 1 << 24):
        found = np.bincount(split.read(start, min(split.tokens, start + (1 << 24))), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def settings_of(options: argparse.Namespace, corpus: Corpus, machine: Machine) -> Record:
    """What all runs of a file have in common."""
    return {
        "size": options.size,
        "steps": options.steps,
        "sequences": options.sequences,
        "context": options.context,
        "validation_windows": options.validation_windows,
        "probes": options.probes,
        "probe_tokens": [PROBE_ROWS, min(PROBE_TOKENS, options.context)],
        "schedule": f"linear warm-up over {WARMUP:.0%} of the steps, then constant",
        "weight_decay": WEIGHT_DECAY,
        "clip": CLIP,
        "precision": "bf16" if machine.device.type == "cuda" else "fp32",
        "corpus": corpus.hash,
        "unigram_entropy": rounded(unigram_entropy(corpus.splits["train"])),
    }


def provenance(machine: Machine, stated: str | None) -> Record:
    return {
        "date": date.today().isoformat(),
        "commit": stated or commit() or "unknown",
        "environment": environment(machine.describe()),
    }


def lines(path: Path) -> Iterator[Record]:
    """The records of a file; a line cut short by a crash is no record."""
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise StudyError(f"{path} cannot be read: {error.strerror}.") from None
    if path.suffix == ".json":
        try:
            merged = json.loads(content)
            yield from (
                {"kind": "process", "settings": merged["settings"], "provenance": p} for p in merged["provenance"]
            )
            yield from merged["runs"]
        except (ValueError, KeyError, TypeError):
            raise StudyError(f"{path} is no merged result of this study; merge its JSONL files again.") from None
        return
    for line in content.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def gathered(paths: Sequence[Path]) -> Record:
    """Settings, provenance and runs of several files; of a run that is in two, the first counts."""
    settings: Record | None = None
    origins: list[Record] = []
    runs: dict[Run, Record] = {}
    for path in paths:
        for record in lines(path):
            if "settings" in record:
                refuse_others(path, record["settings"], settings or record["settings"])
                settings = record["settings"]
                if record["provenance"] not in origins:
                    origins.append(record["provenance"])
            elif "arm" in record:
                runs.setdefault(Run.of(record), record)
    if settings is None or not runs:
        raise StudyError(f"{', '.join(map(str, paths))}: no finished run is in there yet.")
    places = {name: place for place, name in enumerate(ARCHITECTURES)}
    ordered = sorted(runs.values(), key=lambda r: (places[r["architecture"]], r["optimiser"], r["lr"], r["seed"]))
    return {"settings": settings, "provenance": origins, "runs": ordered}


def refuse_others(path: Path, theirs: Record, ours: Record) -> None:
    for name in theirs.keys() | ours.keys():
        if theirs.get(name) != ours.get(name):
            raise StudyError(
                f"{path} holds runs with {name}={theirs.get(name)!r}, but {ours.get(name)!r} came; runs of different "
                "settings need files of their own."
            )


def merge(paths: Sequence[Path], name: str, folder: Path) -> Path:
    """One result file, a run a line."""
    found = gathered(paths)
    head = json.dumps({key: found[key] for key in ("settings", "provenance")}, indent=1, ensure_ascii=False)
    runs = ",\n".join(json.dumps(run, ensure_ascii=False, allow_nan=False) for run in found["runs"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"logit-control-{name}.json"
    path.write_text(head.removesuffix("\n}") + ',\n "runs": [\n' + runs + "\n]}\n", encoding="utf-8")
    return path


def table(paths: Sequence[Path]) -> str:
    """Validation loss by arm and learning rate."""
    found = gathered(paths)
    runs, size = found["runs"], found["settings"]["size"]
    lrs = sorted({run["lr"] for run in runs})
    blocks = [f"{size}: validation loss, nats per token; ✗ diverged, ! unstable"]
    for optimiser in sorted({run["optimiser"] for run in runs}):
        for family in ("mha", "mla"):
            own = [r for r in runs if r["optimiser"] == optimiser and r["architecture"].split("-")[0] == family]
            if not own:
                continue
            rows = [[f"{family}, {optimiser}", *(f"lr {lr:g}" for lr in lrs)]] + [
                [arm, *(cell([r for r in own if r["arm"] == arm and r["lr"] == lr]) for lr in lrs)]
                for arm in CONTROLS
                if any(r["arm"] == arm for r in own)
            ]
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
            blocks.append("\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows))
    return "\n\n".join("\n".join(line.rstrip() for line in block.splitlines()) for block in blocks)


def cell(runs: Sequence[Record]) -> str:
    """The mean over seeds and, where there are several, their range; marked where some run did not end well."""
    if not runs:
        return ""
    lost = sum(run["diverged"] for run in runs)
    losses = [run["validation_loss"] for run in runs if not run["diverged"]]
    if not losses:
        return "✗"
    said = f"{np.mean(losses):.3f}"
    if len(losses) > 1:
        said += f" ({min(losses):.3f}–{max(losses):.3f})"
    said += "!" if any(run["unstable"] for run in runs if not run["diverged"]) else ""
    return said + (f" ✗{lost}/{len(runs)}" if lost else "")


def opened(folder: Path, context: int) -> Corpus:
    corpus = Corpus.open(folder)
    for name in ("train", "valid"):
        if (tokens := corpus.splits[name].tokens) <= context:
            raise StudyError(
                f"{folder} has {tokens} tokens in {name}, too few for a window of {context}; use more text."
            )
    return corpus


def study(options: argparse.Namespace) -> None:
    """Do what is planned and not yet in the file."""
    corpus = opened(options.corpus, options.context)
    execution = ExecutionSpec(device=options.device, threads=options.threads, compile=options.compile)
    machine = Machine.open(execution)
    display = Terminal()
    if machine.device.type == "cpu" and "muon" in options.optimisers:
        guard_bf16(display.say)
    settings = settings_of(options, corpus, machine)
    plan, done = planned(options), set()
    if options.out.exists():
        for record in lines(options.out):
            if "settings" in record:
                refuse_others(options.out, record["settings"], settings)
            elif "arm" in record:
                done.add(Run.of(record))
    left = [run for run in plan if run not in done]
    display.say(f"{len(plan)} runs, {len(plan) - len(left)} of them in {options.out} already.")
    if not left:
        return
    file = MetricsFile(options.out)
    try:
        fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise StudyError(f"{options.out} is in use by another process; give each one a file of its own.") from None
    file.append({"kind": "process", "settings": settings, "provenance": provenance(machine, options.commit)})
    try:
        with StopRequest() as stop:
            finished = carry_out(left, execution, settings, corpus, machine, file, display, stop)
    finally:
        display.close()
        file.close()
    if finished < len(left):
        display.say(f"stopped by {stop.came}; {finished} more runs are in {options.out}, the same command continues.")
        sys.exit(75)


def carry_out(
    runs: Sequence[Run],
    execution: ExecutionSpec,
    settings: Record,
    corpus: Corpus,
    machine: Machine,
    file: MetricsFile,
    display: Terminal,
    stop: StopRequest,
) -> int:
    """How many of the runs were finished before a stop was asked for."""
    bench, built, began = None, "", time.monotonic()
    for number, run in enumerate(runs):
        if run.architecture != built:
            bench = None  # its memory goes before the next one's is taken
            if built and compiles(execution, machine):
                torch.compiler.reset()
            bench, built = Bench(run.architecture, settings, corpus, machine, execution), run.architecture

        def tick(steps: int, loss: float, number: int = number, run: Run = run) -> bool:
            part = (number + steps / settings["steps"]) / len(runs)
            left = duration((time.monotonic() - began) * (1 - part) / part)
            display.show(part, f"{number + 1}/{len(runs)} {run.name} · step {steps} · loss {loss:.3f} · {left} left")
            return stop.came is None

        assert bench is not None
        start = time.monotonic()
        record = bench.train(run, settings["unigram_entropy"], tick) if stop.came is None else None
        if record is None:
            return number
        record["seconds"] = rounded(time.monotonic() - start)
        file.append(record)
        file.flush()
        mark = " diverged" if record["diverged"] else " unstable" if record["unstable"] else ""
        display.say(f"{run.name}: {cell([record])}{mark}, {record['ms_per_step']} ms a step, {record['seconds']:.1f} s")
    return len(runs)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", help="a prepared corpus")
    parser.add_argument("--size", default="nano", choices=SIZES)
    parser.add_argument("--out", type=Path, help="the JSONL file that runs are appended to; by default SIZE.jsonl")
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--arms", nargs="+", default=list(CONTROLS), choices=CONTROLS)
    parser.add_argument("--optimisers", nargs="+", choices=["adamw", "muon"])
    parser.add_argument("--lrs", nargs="+", type=float)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--second-seed-lrs", nargs="*", type=float, help="where seeds after the first run; all if unset"
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--sequences", type=int, help="windows in a batch")
    parser.add_argument("--context", type=int, help="tokens in a window")
    parser.add_argument("--validation-windows", type=int, default=64)
    parser.add_argument("--probes", type=int, default=12, help="how often logits and their change are measured")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compile", default="auto", choices=["auto", "yes", "no"])
    parser.add_argument("--commit", help="the commit studied, where git cannot be asked")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the losses of result files")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="make one result file of JSONL files")
    parser.add_argument("--name", help="what the merged file's name ends with")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the merged file")
    options = parser.parse_args(given)
    if options.merge and not options.name:
        parser.error("--merge needs --name, which the result file's name ends with.")
    if not (options.merge or options.table) and options.corpus is None:
        parser.error("a prepared corpus is needed; make one with: qklab data prepare stdlib --out FOLDER")
    for name in ("steps", "sequences", "context", "validation_windows", "probes"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but {value} came.")
    for lr in [*(options.lrs or []), *(options.second_seed_lrs or [])]:
        if not 0 < lr < math.inf:
            parser.error(f"a learning rate must be above 0 and finite, but {lr:g} came.")
    for name, values in asdict(SIZES[options.size]).items():
        if getattr(options, name, 0) is None:
            setattr(options, name, values)
    if others := set(options.second_seed_lrs or []) - set(options.lrs):
        parser.error(f"--second-seed-lrs must be some of --lrs, but {min(others):g} came.")
    options.out = options.out or Path(f"{options.size}.jsonl")
    return options


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    try:
        if options.merge:
            print(f"kept in {merge(options.merge, options.name, options.results)}")
        if options.table:
            print(table(options.table))
        if not (options.merge or options.table):
            study(options)
    except (StudyError, DataError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
