"""The ladder of model sizes that a comparison chooses from, and how fast this machine trains each."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qklab.data.spec import DataSpec
from qklab.model.decoder import Decoder
from qklab.model.recipes import recipe
from qklab.model.stack import stack
from qklab.schema import SpecError, suggest_name
from qklab.study.executors import WorkerSlots
from qklab.study.metrics import find_metric
from qklab.study.spec import DEFAULT_LR, StudySpec
from qklab.train.objective import Objective
from qklab.train.population import choose_population_size
from qklab.train.settings import merge_settings
from qklab.train.spec import RunSpec


@dataclass(frozen=True)
class Size:
    """Settings that all arms share, the learning rates each arm tries, and how much a run is trained and with how many
    seeds where no time is given: so the answer is the same on every machine."""

    settings: dict[str, Any]
    lrs: tuple[float, ...]
    tokens_per_parameter: float = 10.0
    seeds: int = 5  # with three, Holm over four arms and two analyses ask for a difference three times as large


def make_size(name: str, vocab: int, sequences: int, lrs: tuple[float, ...]) -> Size:
    """A recipe of the ladder, trained as was found to work (evidence/warmup-51m, evidence/coupling-nano): warm-up over
    a quarter of the run, without which attention collapses at the rates that are best with it, and decay to zero."""
    return Size(
        {
            "model": {"recipe": name},
            "corpus": {"vocab": vocab},
            "batch": {"sequences": sequences},
            "schedule": {"kind": "cosine", "warmup": 0.25, "final": 0.0},
        },
        lrs,
    )


SIZES: dict[str, Size] = {  # from small to large
    "pico": Size(
        {
            "model": {"recipe": "nano", "layers": 2, "width": 64, "context": 128, "tied": False},
            "attention": {"heads": 4},
            "corpus": {"vocab": 2048},
            # Seeds differ most by when they leave their first plateau: many small steps, a long warm-up and a decay to
            # zero bring all of them past it in few tokens.
            "batch": {"sequences": 2},
            "schedule": {"kind": "wsd", "warmup": 0.2, "decay": 0.8, "final": 0.0},
        },
        (1.5e-3, 3e-3, 6e-3),
        tokens_per_parameter=0.4,  # three arms in five minutes on two cores
        seeds=8,  # their differences spread by up to 0.025 nats, and a sixth fewer tokens by 0.04
    ),
    "nano": make_size("nano", 4096, 16, (3e-3, 6e-3, 1.2e-2)),
    "micro": make_size("micro", 8192, 16, (2e-3, 4e-3, 8e-3)),
    "mini": make_size("mini", 16_384, 16, (1.5e-3, 3e-3, 6e-3)),
    "34m": make_size("34m", 16_384, 32, (1e-3, 2e-3, 4e-3)),
    "51m": make_size("51m", 16_384, 32, (1.5e-3, 3e-3)),
    "124m": make_size("124m", 16_384, 32, (6e-4, 2e-3)),
}
TOKENS_PER_PARAMETER = 10.0  # with fewer a larger model is only further from the end of its training
ON_A_GPU = 2  # populations that share one: while one is trained the next is compiled
COMPILING_GAINS = 1.5  # how many times faster a population's step is once it is compiled: nano's five arms on an H200


def split_sizes(study: StudySpec) -> dict[str, StudySpec]:
    """Size → the study at that size alone, from the first to the last: the ladder's settings, over them the study's
    base, over that what is the size's own. All arms of a size train on as many tokens, so many per parameter of the
    baseline."""
    if "budget" in study.base:
        raise SpecError(
            "base: every size has a budget of its own in tokens a parameter; leave base.budget out and set "
            "tokens_per_parameter in sizes.",
            "base",
        )
    found = {entry["name"]: resolve_size(study, entry) for entry in study.sizes}
    metric = find_metric(study.metric)
    for corpus in study.corpora if metric.needs_one_tokenizer else ():
        specs = {size: one.run(one.baseline, corpus, one.lrs[0], 0).corpus for size, one in found.items()}
        (first, own), *others = specs.items()
        differing = next((size for size, spec in others if name_tokenizer(spec) != name_tokenizer(own)), None)
        if differing is not None:
            raise SpecError(
                f"sizes {first} and {differing} have different tokenizers ({describe_tokenizer(own)} and "
                f"{describe_tokenizer(specs[differing])}), and {metric.unit} compare under one only; set "
                "metric='bits_per_byte', or one corpus.vocab and corpus.limit_bytes in base.",
                "sizes",
            )
    return found


def resolve_size(study: StudySpec, entry: Mapping[str, Any]) -> StudySpec:
    """The study at one size."""
    own, name = dict(entry), entry["name"]
    ladder = SIZES.get(own.pop("name"))
    if ladder is None and "model" not in own:
        raise SpecError(
            f"sizes: there is no size {name!r}{suggest_name(name, SIZES)}; the ladder has {', '.join(SIZES)}, and a "
            "size of your own needs its model.",
            "sizes",
        )
    rate, lrs, arms, extend = (own.pop(key, None) for key in ("tokens_per_parameter", "lrs", "arms", "extend"))
    rate = TOKENS_PER_PARAMETER if rate is None else rate
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e6:
        raise SpecError(f"sizes: tokens_per_parameter of {name} must be a number above 0, but {rate!r} came.", "sizes")
    for arm in arms or ():
        if arm not in study.arms:
            known = f"{', '.join(study.arms)}{suggest_name(arm, study.arms)}"
            raise SpecError(f"sizes: {name} names the arm {arm!r}, which is none of {known}.", "sizes")
    base = merge_settings(merge_settings({} if ladder is None else ladder.settings, study.base), own)
    kept = [arm for arm in study.arms if arms is None or arm in arms or arm == study.baseline]
    part = study.replace(
        name=f"{study.name}, {name}",
        sizes=[],
        claims=(),
        arms={arm: study.arms[arm] for arm in kept},
        lrs=lrs or (study.lrs if ladder is None or study.lrs != [DEFAULT_LR] else ladder.lrs),
        extend=study.extend if extend is None else extend,
        base=base | {"budget": {"tokens": 2**20}},
    )
    try:
        parameters = part.first_run.model.parameters()
    except SpecError as error:
        raise SpecError(f"size {name}: {error}", error.field, error.nearest) from None
    return part.replace(base=base | {"budget": {"tokens": round(rate * parameters)}})


def name_tokenizer(corpus: DataSpec) -> tuple[Any, ...]:
    """What tells tokenizers apart: those of the kind bpe are made from the corpus itself."""
    if corpus.tokenizer != "bpe":
        return (corpus.tokenizer,)
    return corpus.tokenizer, corpus.vocab, corpus.source, corpus.limit_bytes


def describe_tokenizer(corpus: DataSpec) -> str:
    if corpus.tokenizer != "bpe":
        return corpus.tokenizer
    limit = "" if corpus.limit_bytes is None else f", limit_bytes={corpus.limit_bytes:,}"
    return f"vocab={corpus.vocab:,}{limit}"


def find_size(study: StudySpec) -> str:
    """The size the models of a comparison are of."""
    run = study.first_run
    model = run.model
    for name, size in SIZES.items():
        shape = size.settings["model"]
        plain = recipe(shape["recipe"])
        wanted = (
            shape.get("layers", plain.layers),
            shape.get("width", plain.width),
            model.context if run.task is not None else shape.get("context", plain.context),
        )
        if (model.layers, model.width, model.context) == wanted:
            return name
    return "of its own"


def share_gpus(slots: WorkerSlots, run: RunSpec, at_once: int | None) -> WorkerSlots:
    """The slots for runs like this one: populations share a GPU, unless it was said how many units go at once."""
    together = ON_A_GPU if at_once is None and count_runs_together(run, slots, 2) > 1 else 1
    cores = slots.count * slots.threads
    count = max(slots.count, min(slots.count * together, cores))
    return dataclasses.replace(slots, count=count, threads=max(1, cores // count))


def count_runs_together(run: RunSpec, slots: WorkerSlots, runs: int) -> int:
    """How many of `runs` runs like this one are trained as one model."""
    return choose_population_size(run, slots.device, "auto", runs)


def measure_arm_speed(run: RunSpec, slots: WorkerSlots, runs: int) -> float:
    """Tokens that `runs` runs like this one, of one arm and size, train on in a second, all of this machine's
    together."""
    members = count_runs_together(run, slots, runs)
    seconds = measure_step(run, slots.device, slots.threads, members)
    if members > 1:
        return max(1, len(slots.gpus)) * members * run.tokens_per_step * COMPILING_GAINS / seconds
    return slots.count * run.tokens_per_step / seconds


def measure_step(spec: RunSpec, device: str, threads: int, members: int = 1, repeats: int = 5) -> float:
    """How long a training step of so many runs together takes, not compiled, measured on random tokens."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decoder, shape = Decoder(spec.model, seed=0), (spec.batch.sequences, spec.model.context + 1)
        if members > 1:
            decoder, shape = stack([decoder] * members), (members, *shape)
        objective = Objective(decoder.to(device))
        optimiser = torch.optim.AdamW(objective.parameters())
        ids = torch.randint(spec.model.vocab, shape, device=device)
        taken: list[float] = []
        for _ in range(2 + repeats):
            began = time.perf_counter()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss, _ = objective(ids[..., :-1].contiguous(), ids[..., 1:].contiguous())
            loss.sum().backward()
            optimiser.step()
            optimiser.zero_grad()
            loss.sum().item()
            taken.append(time.perf_counter() - began)
        return sorted(taken[2:])[repeats // 2]
    finally:
        torch.set_num_threads(before)
